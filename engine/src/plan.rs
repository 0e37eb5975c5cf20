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
    /// One token for each planned sequence with `sample` that has not failed, in the plan's order.
    pub sampled: Vec<(SequenceId, SampledToken)>,
    /// Log-probabilities of targets (raw model distribution, nats), for each planned sequence that has some and has not
    /// failed, in the plan's order.
    pub prompt_logprobs: Vec<(SequenceId, Vec<f32>)>,
    /// Planned sequences that came to nothing, and why in one line, in the plan's order. The others are not concerned.
    pub failed: Vec<(SequenceId, String)>,
}

impl StepOutput {
    /// Empties the output and keeps its memory.
    pub fn clear(&mut self) {
        let Self {
            sampled,
            prompt_logprobs,
            failed,
        } = self;
        sampled.clear();
        prompt_logprobs.clear();
        failed.clear();
    }

    /// Notes that the sequence `id` came to nothing and takes back what it had. To be called in the plan's order.
    pub fn fail(&mut self, id: SequenceId, reason: String) {
        self.sampled.pop_if(|(of, _)| *of == id);
        self.prompt_logprobs.pop_if(|(of, _)| *of == id);
        self.failed.push((id, reason));
    }

    /// Whether the sequence `id`, the last one that was computed, came to nothing.
    pub fn has_failed(&self, id: SequenceId) -> bool {
        self.failed.last().is_some_and(|(of, _)| *of == id)
    }
}
