//! A node as the coordinator sees it: jobs in, events out, real block accounting, no weights.

use std::collections::BTreeMap;

use protocol::control::{
    DecodeJob, HandoffStats, HandoffTarget, Job, JobEvent, KvSource, LoadReport, PrefillJob, PromptComputed, StepTiming,
};
use protocol::ids::{RequestId, Ticket};
use protocol::sampling::{SampledToken, StopRules};

use super::super::is_last;
use crate::core::fixtures::{BLOCK_TOKENS, EOS, sampled};
use crate::core::nodes::LegId;

/// The token at a position is a function of the request alone, as with a real model.
pub(super) fn token(request: RequestId, position: u32) -> u32 {
    let mut x = (request.0 as u64) << 32 | u64::from(position);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    match x >> 58 {
        0 => EOS,
        n => u32::from(b'a') + (n % 4) as u32,
    }
}

fn sampled_token(request: RequestId, position: u32) -> SampledToken {
    sampled(position, token(request, position))
}

fn blocks_for(tokens: usize) -> u32 {
    tokens.div_ceil(BLOCK_TOKENS as usize) as u32
}

enum Work {
    /// Computes a prompt; steps to go.
    Prefill { job: Box<PrefillJob>, steps: u32 },
    /// Waits for the decode node's answer to the commit.
    Committing,
    /// Waits for a commit.
    Reserved { job: Box<DecodeJob>, ticket: Ticket },
    /// Generates; `next` is the next position. `steps` to go before that.
    Decode {
        request: RequestId,
        stop: StopRules,
        prompt: usize,
        next: u32,
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
                let generated = job.choices.first().map_or(0, |start| start.generated.len());
                let blocks = blocks_for(prompt + generated + 1);
                let work = match job.source {
                    KvSource::Handoff => {
                        self.tickets += 1;
                        Work::Reserved {
                            job: Box::new(job),
                            ticket: Ticket(self.tickets),
                        }
                    }
                    KvSource::Compute => Work::Decode {
                        request: job.request,
                        next: generated as u32,
                        steps: 1 + (prompt + generated) as u32 / 16,
                        stop: job.stop,
                        prompt,
                    },
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

    /// A commit arrives; true if it is accepted.
    pub(super) fn commit(&mut self, ticket: Ticket, out: &mut Vec<Out>) -> bool {
        let of = |held: &Held| matches!(&held.work, Work::Reserved { ticket: t, .. } if *t == ticket);
        let Some((leg, held)) = self.legs.iter_mut().find(|(_, held)| of(held)) else {
            return false;
        };
        let Work::Reserved { job, .. } = &held.work else {
            return false;
        };
        let (request, stop, prompt) = (job.request, job.stop.clone(), job.token_ids.len());
        held.work = Work::Decode {
            request,
            stop,
            prompt,
            next: 1,
            steps: 1,
        };
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
                let token = sampled_token(job.request, 0);
                let finish = job.stop.finish(token.token, 1);
                let first = PromptComputed {
                    tokens: vec![token],
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
            Work::Decode {
                request,
                stop,
                prompt,
                next,
                steps,
            } => {
                let needed = blocks_for(*prompt + *next as usize + 1);
                if needed.saturating_sub(held.blocks) > self.free {
                    self.free += std::mem::take(&mut held.blocks);
                    return;
                }
                self.free -= needed.saturating_sub(held.blocks);
                held.blocks = held.blocks.max(needed);
                if *steps > 0 {
                    *steps -= 1;
                    return;
                }
                let token = sampled_token(*request, *next);
                *next += 1;
                let finish = stop.finish(token.token, *next);
                out.push(Out::Event(
                    leg,
                    JobEvent::Token {
                        choice: 0,
                        token,
                        step: StepTiming::default(),
                    },
                ));
                if finish.is_some() {
                    out.push(Out::Event(leg, JobEvent::Finished));
                }
            }
        }
    }
}
