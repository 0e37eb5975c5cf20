//! A node as the coordinator sees it: jobs in, events out, real block accounting, no weights.

use std::collections::BTreeMap;

use protocol::control::{
    Beam, ChoiceStart, DecodeJob, HandoffStats, HandoffTarget, Job, JobEvent, JobUpdate, KvSource, LoadReport,
    PrefillJob, PromptComputed, StepTiming,
};
use protocol::ids::{RequestId, Ticket};
use protocol::sampling::{SampledToken, StopRules};

use super::super::is_last;
use crate::core::fixtures::{BLOCK_TOKENS, EOS, sampled};
use crate::core::nodes::LegId;

/// The token of a choice at a position is a function of the request alone, as with a real model.
pub(super) fn token(request: RequestId, choice: u32, position: u32) -> u32 {
    let mut x = (request.0 as u64) << 32 | u64::from(choice) << 24 | u64::from(position);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    match x >> 58 {
        0 => EOS,
        n => u32::from(b'a') + (n % 4) as u32,
    }
}

fn sampled_token(request: RequestId, choice: u32, position: u32) -> SampledToken {
    sampled(position, token(request, choice, position))
}

fn blocks_for(tokens: usize) -> u32 {
    tokens.div_ceil(BLOCK_TOKENS as usize) as u32
}

/// Blocks of sequences with so many tokens each that share the full blocks of a prompt.
fn shared_blocks_for(prompt: usize, sequences: impl Iterator<Item = usize>) -> u32 {
    let shared = (prompt / BLOCK_TOKENS as usize) as u32;
    shared + sequences.map(|tokens| blocks_for(tokens) - shared).sum::<u32>()
}

/// The hypothesis that is a choice's tokens.
fn beam(request: RequestId, choice: u32, stop: &StopRules) -> Beam {
    let mut tokens = Vec::new();
    for position in 0.. {
        let token = sampled_token(request, choice, position);
        let finish = stop.finish(token.token, position + 1);
        tokens.push((token, StepTiming::default()));
        if finish.is_some() {
            break;
        }
    }
    Beam { tokens, score: 0.0 }
}

enum Work {
    /// Computes a prompt; steps to go.
    Prefill { job: Box<PrefillJob>, steps: u32 },
    /// Waits for the decode node's answer to the commit.
    Committing,
    /// Waits for a commit.
    Reserved { job: Box<DecodeJob>, ticket: Ticket },
    /// Generates. `steps` to go before that.
    Decode {
        job: Box<DecodeJob>,
        /// The open choices, and the next position of each.
        open: Vec<(u32, u32)>,
        steps: u32,
    },
}

struct Held {
    work: Work,
    /// 0: preempted, to be taken again.
    blocks: u32,
}

/// What a node wants the world to do.
pub(super) enum Out {
    Event(LegId, JobEvent),
    /// The commit of a prefill leg, for a decode node.
    Commit {
        from: LegId,
        target: HandoffTarget,
    },
}

pub(super) struct Node {
    pub(super) name: String,
    pub(super) boot: u64,
    pub(super) total: u32,
    pub(super) free: u32,
    legs: BTreeMap<LegId, Held>,
    tickets: u64,
    reports: u64,
}

impl Node {
    pub(super) fn new(name: &str, boot: u64, total: u32) -> Self {
        Self {
            name: name.to_owned(),
            boot,
            total,
            free: total,
            legs: BTreeMap::new(),
            tickets: boot << 32,
            reports: 0,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.legs.is_empty() && self.free == self.total
    }

    pub(super) fn report(&mut self) -> LoadReport {
        self.reports += 1;
        LoadReport {
            sequence: self.reports,
            free_blocks: self.free,
            owned_blocks: self.total - self.free,
            ..LoadReport::default()
        }
    }

    pub(super) fn start(&mut self, leg: LegId, job: Job, out: &mut Vec<Out>) {
        match job {
            Job::Prefill(job) => {
                let blocks = blocks_for(job.token_ids.len());
                let steps = 1 + job.token_ids.len() as u32 / 16;
                self.hold(
                    leg,
                    blocks,
                    Work::Prefill {
                        job: Box::new(job),
                        steps,
                    },
                    out,
                );
            }
            Job::Decode(job) => {
                let prompt = job.token_ids.len();
                let generated: usize = job.choices.iter().map(|start| start.generated.len()).sum();
                let tokens = |start: &ChoiceStart| prompt + start.generated.len() + 1;
                let beams = (0..job.beam_width.unwrap_or(0)).map(|_| prompt + 1);
                let blocks = shared_blocks_for(prompt, job.choices.iter().map(tokens).chain(beams));
                let work = match job.source {
                    KvSource::Handoff => {
                        self.tickets += 1;
                        Work::Reserved {
                            job: Box::new(job),
                            ticket: Ticket(self.tickets),
                        }
                    }
                    KvSource::Compute => decode(Box::new(job), 1 + (prompt + generated) as u32 / 16, false),
                };
                let ticket = if let Work::Reserved { ticket, .. } = &work {
                    Some(*ticket)
                } else {
                    None
                };
                if self.hold(leg, blocks, work, out)
                    && let Some(ticket) = ticket
                {
                    out.push(Out::Event(leg, JobEvent::Granted { ticket, have_blocks: 0 }));
                }
            }
        }
    }

    fn hold(&mut self, leg: LegId, blocks: u32, work: Work, out: &mut Vec<Out>) -> bool {
        if blocks > self.free {
            out.push(Out::Event(
                leg,
                JobEvent::Busy {
                    needed_blocks: blocks,
                    free_blocks: self.free,
                },
            ));
            return false;
        }
        self.free -= blocks;
        self.legs.insert(leg, Held { work, blocks });
        true
    }

    pub(super) fn reset(&mut self, leg: LegId) {
        if let Some(held) = self.legs.remove(&leg) {
            self.free += held.blocks;
        }
    }

    /// The coordinator says something about a job.
    pub(super) fn update(&mut self, leg: LegId, update: JobUpdate) {
        let JobUpdate::EndChoice { choice } = update;
        if let Some(held) = self.legs.get_mut(&leg) {
            match &mut held.work {
                Work::Decode { open, .. } => open.retain(|(of, _)| *of != choice),
                // Its first token comes with the commit, and ends it.
                Work::Reserved { job, .. } => job.choices.retain(|start| start.choice != choice),
                Work::Prefill { .. } | Work::Committing => {}
            }
        }
    }

    /// A commit arrives; true if it is accepted.
    pub(super) fn commit(&mut self, ticket: Ticket, out: &mut Vec<Out>) -> bool {
        let of = |held: &Held| matches!(&held.work, Work::Reserved { ticket: t, .. } if *t == ticket);
        let Some((leg, held)) = self.legs.iter_mut().find(|(_, held)| of(held)) else {
            return false;
        };
        let Work::Reserved { job, .. } = &held.work else {
            return false;
        };
        held.work = decode(job.clone(), 1, true);
        out.push(Out::Event(*leg, JobEvent::Committed));
        true
    }

    /// The answer to a commit arrives.
    pub(super) fn committed(&mut self, leg: LegId, accepted: bool, out: &mut Vec<Out>) {
        if !self.legs.contains_key(&leg) {
            return;
        }
        self.reset(leg);
        let event = if accepted {
            JobEvent::HandedOff(HandoffStats::default())
        } else {
            let kind = protocol::control::JobErrorKind::TransferFailed;
            JobEvent::Failed(protocol::control::JobError {
                kind,
                message: "refused".to_owned(),
            })
        };
        out.push(Out::Event(leg, event));
    }

    /// One step of the engine: the oldest legs first; who gets no block is preempted.
    pub(super) fn step(&mut self, out: &mut Vec<Out>) {
        let legs: Vec<LegId> = self.legs.keys().copied().collect();
        for leg in legs {
            let from = out.len();
            self.step_leg(leg, out);
            let over = out[from..]
                .iter()
                .any(|o| matches!(o, Out::Event(_, event) if is_last(event)));
            if over {
                self.reset(leg);
            }
        }
    }

    fn step_leg(&mut self, leg: LegId, out: &mut Vec<Out>) {
        let Some(held) = self.legs.get_mut(&leg) else { return };
        match &mut held.work {
            Work::Committing | Work::Reserved { .. } => {}
            Work::Prefill { steps, .. } if *steps > 0 => *steps -= 1,
            Work::Prefill { job, .. } => {
                let first = |choice| sampled_token(job.request, choice, 0);
                let tokens: Vec<SampledToken> = (0..job.choices).map(first).collect();
                let ends = |token: &SampledToken| job.stop.finish(token.token, 1).is_some();
                // Without choices the prompt was all, unless a search follows.
                let all = tokens.iter().all(ends) && !(tokens.is_empty() && job.handoff.is_some());
                let finish = all.then_some(());
                let first = PromptComputed {
                    tokens,
                    step: StepTiming::default(),
                    cached_tokens: 0,
                    prompt_logprobs: None,
                };
                out.push(Out::Event(leg, JobEvent::Computed(first)));
                match (finish, &job.handoff) {
                    (Some(_), _) => out.push(Out::Event(leg, JobEvent::Finished)),
                    (None, Some(target)) => {
                        out.push(Out::Commit {
                            from: leg,
                            target: target.clone(),
                        });
                        held.work = Work::Committing;
                    }
                    (None, None) => panic!("a prefill job without a target that does not end with its first token"),
                }
            }
            Work::Decode { job, open, steps } => {
                let prompt = job.token_ids.len();
                let beams = (0..job.beam_width.unwrap_or(0)).map(|_| prompt + 1);
                let choices = open.iter().map(|(_, next)| prompt + *next as usize + 1);
                let needed = shared_blocks_for(prompt, choices.chain(beams));
                if needed > self.free + held.blocks {
                    self.free += std::mem::take(&mut held.blocks);
                    return;
                }
                self.free = self.free + held.blocks - needed;
                held.blocks = needed;
                if *steps > 0 {
                    *steps -= 1;
                    return;
                }
                if let Some(width) = job.beam_width {
                    let beams = (0..width).map(|choice| beam(job.request, choice, &job.stop));
                    out.push(Out::Event(leg, JobEvent::Beams(beams.collect())));
                    return;
                }
                open.retain_mut(|(choice, next)| {
                    let token = sampled_token(job.request, *choice, *next);
                    *next += 1;
                    let finish = job.stop.finish(token.token, *next);
                    let event = JobEvent::Token {
                        choice: *choice,
                        token,
                        step: StepTiming::default(),
                    };
                    out.push(Out::Event(leg, event));
                    finish.is_none()
                });
                if open.is_empty() {
                    out.push(Out::Event(leg, JobEvent::Finished));
                }
            }
        }
    }
}

/// The loop of a job. `handed_over`: the first tokens came with the commit.
fn decode(job: Box<DecodeJob>, steps: u32, handed_over: bool) -> Work {
    let next = |start: &ChoiceStart| start.generated.len() as u32 + u32::from(handed_over);
    let ended = |choice: u32, next: u32| {
        next.checked_sub(1)
            .is_some_and(|last| job.stop.finish(token(job.request, choice, last), next).is_some())
    };
    let starts = job.choices.iter().map(|start| (start.choice, next(start)));
    let open = starts.filter(|&(choice, next)| !ended(choice, next)).collect();
    Work::Decode { job, open, steps }
}
