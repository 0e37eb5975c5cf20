//! The prefill jobs of a node, as `prefill_node::role` and `prefill_node::tap` run them.

use bytes::Bytes;
use coordinator::core::nodes::LegId;
use engine::plan::{BlockId, GroupBlocks, SequenceId};
use engine::sequence::{OnFinish, SequenceSpec};
use kv_transfer::core::{Extent, Part};
use prefill_node::core::push_schedule::{Piece, PushSchedule};
use protocol::control::{HandoffStats, JobErrorKind, JobEvent, PrefillJob, PromptComputed, StepTiming};
use protocol::kv::KvPlace;
use protocol::moved::{HaveBlocks, Moved};
use protocol::sampling::{FinishReason, PromptLogprob, SampledToken, StopRules};
use protocol::transfer::PushOpen;
use std::sync::Arc;
use std::time::Duration;

use super::{Command, Node, Out, PushId, Return, Timer, Work};
use crate::model::{Pool, adapter, layout};

/// A prefill job.
pub(super) struct PrefillWork {
    pub(super) job: PrefillJob,
    stage: Stage,
    pub(super) push: Option<PushId>,
    /// What of the prompt's KV is due.
    schedule: PushSchedule,
    /// The block table; empty while the sequence has none.
    blocks: Vec<BlockId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Entering,
    Computing(SequenceId),
    HandingOver(SequenceId),
}

impl PrefillWork {
    fn sequence(&self) -> Option<SequenceId> {
        match self.stage {
            Stage::Entering => None,
            Stage::Computing(id) | Stage::HandingOver(id) => Some(id),
        }
    }

    /// A step with rows of the prompt begins. True if something may be sent meanwhile.
    pub(super) fn step_begins(&mut self, computed_tokens: u32, blocks: &[BlockId]) -> bool {
        self.schedule.step_begins(computed_tokens);
        blocks.clone_into(&mut self.blocks);
        self.push.is_some() && self.schedule.early().is_some()
    }

    /// A layer is there; hands out what is due while `room` says that there is some.
    pub(super) fn layer_computed(
        &mut self,
        place: KvPlace,
        computed_tokens: u32,
        pool: &Pool,
        mut room: impl FnMut() -> bool,
        out: &mut Vec<(Part, Bytes)>,
    ) {
        if self.push.is_none() {
            return;
        }
        self.schedule.layer_computed(place, computed_tokens);
        while let Some(piece) = self.schedule.fresh()
            && room()
        {
            out.push(gather((self.schedule.moved(), piece), &self.blocks, pool));
            self.schedule.take_fresh();
        }
    }

    pub(super) fn preempted(&mut self) {
        self.schedule.preempted();
        self.blocks.clear();
    }
}

/// A prompt has been computed.
pub(super) struct Prompt {
    /// The first token of each choice, and why it would end.
    pub(super) firsts: Vec<(SampledToken, Option<FinishReason>)>,
    pub(super) batch_size: u32,
    pub(super) cached_tokens: u32,
    pub(super) prompt_logprobs: Option<Vec<PromptLogprob>>,
}

impl Node {
    pub(super) fn start_prefill(&mut self, leg: LegId, job: PrefillJob) {
        let have = job.handoff.as_ref();
        let have = have.map_or(HaveBlocks::NONE, |target| target.have_blocks);
        let layout = layout(self.engine.limits().groups);
        let tokens = job.token_ids.len() as u32;
        let Some(schedule) = PushSchedule::new(layout, tokens, have, self.frame_bytes) else {
            return self.say_failed(leg, JobErrorKind::Invalid, "more blocks are there than the prompt has");
        };
        let extent = Extent::of(&layout, &schedule.moved());
        let push = job.handoff.as_ref().map(|target| {
            let open = PushOpen {
                request: job.request,
                ticket: target.ticket,
                epoch: job.epoch,
                fingerprint: self.fingerprint,
            };
            (target.address.clone(), open)
        });
        let push = push.map(|(address, open)| self.open_push(leg, address, open, extent));
        self.out
            .push(Out::Timer(Duration::from_millis(job.deadline_ms), Timer::Job(leg)));
        let work = PrefillWork {
            job,
            stage: Stage::Entering,
            push,
            schedule,
            blocks: Vec::new(),
        };
        self.jobs.insert(leg, Work::Prefill(Box::new(work)));
        self.command(Command::Prefill(leg));
    }

    /// The engine takes the prompt.
    pub(super) fn enter_prefill(&mut self, leg: LegId) {
        let Some(Work::Prefill(work)) = self.jobs.get_mut(&leg) else {
            return;
        };
        match spec(&work.job).map(|spec| self.engine.add(spec)) {
            Some(Ok(id)) => {
                work.stage = Stage::Computing(id);
                self.owners.insert(id, (leg, 0));
            }
            Some(Err(error)) => self.fail(leg, super::engine_loop::kind_of(&error), error.to_string()),
            None => self.fail(leg, JobErrorKind::Invalid, "the adapter is not known"),
        }
    }

    /// The prompt of a job is computed.
    pub(super) fn prompt_computed(&mut self, leg: LegId, prompt: Prompt) {
        let Some(Work::Prefill(work)) = self.jobs.get_mut(&leg) else {
            return;
        };
        if let Some(id) = work.sequence() {
            work.stage = Stage::HandingOver(id);
        }
        let all_ended = !prompt.firsts.is_empty() && prompt.firsts.iter().all(|(_, finish)| finish.is_some());
        let tokens: Vec<SampledToken> = prompt.firsts.into_iter().map(|(token, _)| token).collect();
        let first_tokens = tokens.iter().map(|token| token.token).collect();
        let (push, num_tokens) = (work.push, work.job.token_ids.len() as u32);
        let draws_none = work.job.choices == 0;
        let step = StepTiming {
            batch_size: prompt.batch_size,
            ..StepTiming::default()
        };
        self.say(
            leg,
            JobEvent::Computed(PromptComputed {
                tokens,
                step,
                cached_tokens: prompt.cached_tokens,
                prompt_logprobs: prompt.prompt_logprobs,
            }),
        );
        match push {
            _ if all_ended => self.end(leg, JobEvent::Finished),
            Some(push) => {
                if let Some(Work::Prefill(work)) = self.jobs.get_mut(&leg) {
                    work.schedule.ends();
                }
                self.send_early(leg);
                self.commit_push(push, num_tokens, first_tokens);
            }
            None if draws_none => self.end(leg, JobEvent::Finished),
            None => self.fail(leg, JobErrorKind::Invalid, "handoff is missing"),
        }
    }

    /// Sends what is complete, while the rest is computed.
    pub(super) fn send_early(&mut self, leg: LegId) {
        let Some(Work::Prefill(work)) = self.jobs.get_mut(&leg) else {
            return;
        };
        let Some(push) = work.push else { return };
        let mut pieces = Vec::new();
        while !work.blocks.is_empty()
            && let Some(piece) = work.schedule.take_early()
        {
            pieces.push(gather((work.schedule.moved(), piece), &work.blocks, &self.pool));
        }
        self.push_pieces(push, pieces);
    }

    /// The decode node has everything.
    pub(super) fn push_committed(&mut self, leg: LegId, stats: HandoffStats) {
        if let Some(Work::Prefill(work)) = self.jobs.get_mut(&leg) {
            work.push = None;
            self.end(leg, JobEvent::HandedOff(stats));
        }
    }

    pub(super) fn drop_prefill(&mut self, work: PrefillWork) {
        if let Some(push) = work.push
            && self.pushes.remove(&push).is_some()
        {
            self.out.push(Out::ResetPush(push));
        }
        if let Some(id) = work.sequence() {
            self.owners.remove(&id);
            self.give_back(Return::Sequence(id));
        }
    }
}

fn gather((moved, piece): (Moved, Piece), table: &[BlockId], pool: &Pool) -> (Part, Bytes) {
    let mut bytes = Vec::new();
    let blocks = GroupBlocks::new(table, moved.groups().count(), piece.group as usize);
    let first = piece.first_block as usize;
    let of: Vec<BlockId> = blocks.iter().skip(first).take(piece.blocks as usize).collect();
    pool.gather(piece.first_layer..piece.first_layer + piece.layers, &of, &mut bytes);
    let part = Part {
        first_layer: piece.first_layer,
        layers: piece.layers,
        first_block: moved.number(piece.group as usize, piece.first_block),
        blocks: piece.blocks,
    };
    (part, bytes.into())
}

fn spec(job: &PrefillJob) -> Option<SequenceSpec> {
    let (adapter, cache_key) = adapter(job.adapter.as_deref())?;
    Some(SequenceSpec {
        token_ids: job.token_ids.clone(),
        prompt_len: job.token_ids.len(),
        sampling: Arc::new(job.sampling.clone()),
        stop: StopRules {
            max_tokens: job.stop.max_tokens.max(1),
            ..job.stop.clone()
        },
        prompt_logprobs: job.prompt_logprobs,
        on_finish: if job.handoff.is_some() {
            OnFinish::Hold
        } else {
            OnFinish::Release
        },
        first_only: Some(job.choices),
        adapter,
        cache_key,
    })
}
