//! A step as plain data: what to compute, and what came out.

use std::ops::Range;
use std::sync::Arc;

use protocol::sampling::{SampledToken, SamplingParams};

/// A KV block of the local pool.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BlockId(pub u32);

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

/// The rows of one sequence in a step.
#[derive(Clone, Debug)]
pub struct PlannedSequence {
    /// The sequence.
    pub id: SequenceId,
    /// Its rows, in `StepPlan::token_ids`. Row i has position `start_position + i`.
    pub rows: Span,
    /// Position of the first row: the number of tokens whose KV is already in the blocks.
    pub start_position: u32,
    /// Its block table, in `StepPlan::block_ids`: covers at least the positions `0..start_position + rows.len`.
    pub blocks: Span,
    /// Sample one token from the last row's logits.
    pub sample: Option<SampleSpec>,
    /// For the first `targets.len` rows: report the log-probability of `StepPlan::targets[targets][i]` after row i.
    pub targets: Span,
}

/// How a token is sampled.
#[derive(Clone, Debug)]
pub struct SampleSpec {
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
    /// One token for each planned sequence with `sample`, in the plan's order.
    pub sampled: Vec<(SequenceId, SampledToken)>,
    /// Log-probabilities of targets (raw model distribution, nats), for each planned sequence that has some, in the
    /// plan's order.
    pub prompt_logprobs: Vec<(SequenceId, Vec<f32>)>,
}
