//! A step as plain data: what to compute, and what came out.

use std::ops::Range;
use std::sync::Arc;

use protocol::sampling::{PromptLogprob, SampledToken, SamplingParams};

/// A KV block of the local pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BlockId(pub u32);

impl BlockId {
    /// Stands in a block table for a block that the sequence has let go of, as no row will see it again
    /// (`EngineLimits::groups`). It is in no pool.
    pub const NONE: Self = Self(u32::MAX);

    /// Whether there is a block.
    pub fn is_some(self) -> bool {
        self != Self::NONE
    }
}

/// A sequence of the local engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SequenceId(pub u64);

/// A range within one of a plan's flat arrays.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Span {
    /// First index.
    pub start: u32,
    /// Number of elements.
    pub len: u32,
}

impl Span {
    /// The span as a range of indices.
    pub fn range(self) -> Range<usize> {
        self.start as usize..self.start as usize + self.len as usize
    }
}

/// What one step computes: the rows of all planned sequences, in order. Flat arrays are reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct StepPlan {
    /// Number of the step, from 1.
    pub step: u64,
    /// Copies of blocks, to be made in this order before any row is computed.
    pub copies: Vec<BlockCopy>,
    /// Input token of every row.
    pub token_ids: Vec<u32>,
    /// The sequences, each with its spans into the arrays here.
    pub sequences: Vec<PlannedSequence>,
    /// Block tables.
    pub block_ids: Vec<BlockId>,
    /// Token histories of sequences whose sampling needs them.
    pub history: Vec<u32>,
    /// Prompt tokens whose log-probability is asked for.
    pub targets: Vec<u32>,
}

/// The blocks of one group of layers in a block table.
#[derive(Clone, Copy, Debug)]
pub struct GroupBlocks<'a> {
    /// The blocks of all groups, place by place.
    table: &'a [BlockId],
    groups: usize,
    group: usize,
}

impl<'a> GroupBlocks<'a> {
    /// Group `group` of `groups` (at least 1).
    pub fn new(table: &'a [BlockId], groups: usize, group: usize) -> Self {
        Self { table, groups, group }
    }

    /// The same table, for another group.
    pub fn of(self, group: usize) -> Self {
        Self { group, ..self }
    }

    /// Which group.
    pub fn group(&self) -> usize {
        self.group
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.table.len() / self.groups
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The block in a place, if there is one.
    #[inline]
    pub fn get(&self, place: usize) -> Option<BlockId> {
        self.table.get(place * self.groups + self.group).copied()
    }

    /// All of them, in order.
    pub fn iter(self) -> impl Iterator<Item = BlockId> + use<'a> {
        self.table.iter().copied().skip(self.group).step_by(self.groups)
    }
}

/// A block that a sequence shared and is going to write: from this step on it has one of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockCopy {
    /// The shared block.
    pub from: BlockId,
    /// The sequence's own: rows of this step go into it.
    pub to: BlockId,
    /// How many tokens of it, from its beginning, are needed; what follows them may be anything.
    pub tokens: u32,
}

/// The rows of one sequence in a step.
#[derive(Clone, Debug)]
pub struct PlannedSequence {
    /// The sequence.
    pub id: SequenceId,
    /// Under whose name its events come: its own, or that of the beam search it belongs to.
    pub owner: SequenceId,
    /// Its rows, in `StepPlan::token_ids`. Row i has position `start_position + i`.
    pub rows: Span,
    /// Position of the first row: the number of tokens whose KV is already in the blocks.
    pub start_position: u32,
    /// Its block table, in `StepPlan::block_ids`: place by place a block for every group of layers. It covers at least the
    /// positions `0..start_position + rows.len`. The first ones of a group are [`BlockId::NONE`] where no row sees anything of them.
    pub blocks: Span,
    /// The model's adapter that is applied to its rows, by its number; `None`: the model as it is.
    pub adapter: Option<u32>,
    /// What is taken from the last row's logits.
    pub sample: Option<SampleSpec>,
    /// For the first `targets.len` rows: report the log-probability of `StepPlan::targets[targets][i]` after row i.
    pub targets: Span,
    /// And that many of the most probable tokens in each target's place.
    pub target_alternatives: u8,
}

/// What is taken from a row of logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// So many sampled tokens, at least 1: choice `SamplingParams::choice` draws the first, the choices after it the others.
    Tokens(u32),
    /// So many of the most probable tokens of the distribution that tokens are drawn from at temperature 1, without filters
    /// (all that may be drawn, if there are fewer), best first.
    Candidates(u32),
}

/// How a token is sampled.
#[derive(Clone, Debug)]
pub struct SampleSpec {
    /// What is taken.
    pub wanted: Wanted,
    /// Parameters of the request.
    pub params: Arc<SamplingParams>,
    /// 0-based index of the new token among the generated ones: the third argument of the random function.
    pub output_position: u32,
    /// Prompt and output so far, in `StepPlan::history`; empty unless `SamplingParams::needs_history`.
    pub history: Span,
    /// How many tokens of the history are the prompt.
    pub prompt_len: u32,
}

/// What came out of a step.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// The tokens of each planned sequence with [`Wanted::Tokens`] that has not failed, in the order of the choices and of
    /// the plan.
    pub sampled: Vec<(SequenceId, SampledToken)>,
    /// The most probable tokens and their log-probabilities (nats), best first and equals by their id, for each planned
    /// sequence with [`Wanted::Candidates`] that has not failed, in the plan's order.
    pub candidates: Vec<(SequenceId, Vec<(u32, f32)>)>,
    /// What the unmodified model distribution says of targets, for each planned sequence that has some and has not failed,
    /// in the plan's order.
    pub prompt_logprobs: Vec<(SequenceId, Vec<PromptLogprob>)>,
    /// Planned sequences that came to nothing, and why in one line, in the plan's order. The others are not concerned.
    pub failed: Vec<(SequenceId, String)>,
}

impl StepOutput {
    /// Empties the output and keeps its memory.
    pub fn clear(&mut self) {
        let Self {
            sampled,
            candidates,
            prompt_logprobs,
            failed,
        } = self;
        sampled.clear();
        candidates.clear();
        prompt_logprobs.clear();
        failed.clear();
    }

    /// Notes that the sequence `id` came to nothing and takes back what it had. To be called in the plan's order.
    pub fn fail(&mut self, id: SequenceId, reason: String) {
        while self.sampled.pop_if(|(of, _)| *of == id).is_some() {}
        self.candidates.pop_if(|(of, _)| *of == id);
        self.prompt_logprobs.pop_if(|(of, _)| *of == id);
        self.failed.push((id, reason));
    }

    /// Whether the sequence `id`, the last one that was computed, came to nothing.
    pub fn has_failed(&self, id: SequenceId) -> bool {
        self.failed.last().is_some_and(|(of, _)| *of == id)
    }
}
