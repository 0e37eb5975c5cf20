//! The numbers that bound an engine.

use std::time::Duration;

use protocol::window::{Groups, Kept};
use thiserror::Error;

/// What bounds an engine. Fixed for its lifetime.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineLimits {
    /// Blocks of the KV pool.
    pub total_blocks: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Most sequences in a step.
    pub max_num_seqs: usize,
    /// Most rows (tokens computed) in a step, over all sequences.
    pub max_batch_tokens: usize,
    /// Most rows of one sequence in a step.
    pub prefill_chunk_tokens: usize,
    /// Most rows in a step of sequences that have several to catch up with (prompts, and what was preempted), if the step
    /// also has a sequence that generates. Without them the other limits hold.
    pub mixed_prefill_tokens: usize,
    /// By how much those rows may delay such a step, as far as one knows from the times of earlier ones
    /// (`Engine::note_step_time`); one row may be computed in any case. Zero: `mixed_prefill_tokens` alone bounds them.
    pub mixed_prefill_time: Duration,
    /// Longest sequence in tokens, prompt and output. A sequence that reaches it ends with `FinishReason::Length`.
    pub max_seq_len: usize,
    /// Computed blocks are kept while there is room, and used again by sequences that begin with the same tokens.
    pub prefix_cache: bool,
    /// The groups of the model's layers, and how many positions a row sees in those that have a window: sequences let go of
    /// their blocks before them.
    pub groups: Groups,
}

impl EngineLimits {
    /// Blocks of a group that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    /// Which blocks of a sequence are kept.
    pub fn kept(&self) -> Kept {
        Kept::new(self.groups, self.block_tokens)
    }

    /// Most rows of a sequence in a step.
    pub fn most_rows(&self) -> usize {
        self.prefill_chunk_tokens.min(self.max_batch_tokens)
    }

    /// Blocks that the longest sequence has at once.
    pub fn longest_blocks(&self) -> usize {
        self.kept().most_blocks(self.max_seq_len, self.most_rows())
    }

    /// Checks the limits one by one and against each other.
    pub(crate) fn validate(&self) -> Result<(), LimitsError> {
        let fields = [
            ("total_blocks", self.total_blocks),
            ("block_tokens", self.block_tokens),
            ("max_num_seqs", self.max_num_seqs),
            ("max_batch_tokens", self.max_batch_tokens),
            ("prefill_chunk_tokens", self.prefill_chunk_tokens),
            ("mixed_prefill_tokens", self.mixed_prefill_tokens),
        ];
        for (field, value) in fields {
            if value == 0 {
                return Err(LimitsError::Zero { field });
            }
        }
        if self.max_seq_len < 2 {
            return Err(LimitsError::ShortSequence {
                max_seq_len: self.max_seq_len,
            });
        }
        if self.max_batch_tokens < self.max_num_seqs {
            return Err(LimitsError::SmallBatch {
                max_batch_tokens: self.max_batch_tokens,
                max_num_seqs: self.max_num_seqs,
            });
        }
        self.groups.check().map_err(LimitsError::Groups)?;
        let needed = self.longest_blocks();
        if needed > self.total_blocks {
            return Err(match self.groups.window() {
                None => LimitsError::SmallPool {
                    max_seq_len: self.max_seq_len,
                    pool_tokens: (self.total_blocks / self.groups.count()).saturating_mul(self.block_tokens),
                },
                Some(_) => LimitsError::SmallPoolOfWindows {
                    groups: self.groups,
                    max_seq_len: self.max_seq_len,
                    rows: self.most_rows(),
                    total_blocks: self.total_blocks,
                    needed,
                },
            });
        }
        // Spans of a plan are 32 bits wide; the longest arrays are the token histories and the block tables.
        let history = self.max_num_seqs.saturating_mul(self.max_seq_len);
        let places = self.blocks_for(self.max_seq_len).saturating_mul(self.groups.count());
        let tables = places.saturating_mul(self.max_num_seqs);
        let largest = history.max(self.max_batch_tokens).max(self.total_blocks).max(tables);
        if u32::try_from(largest).is_err() {
            return Err(LimitsError::TooLarge { largest });
        }
        Ok(())
    }
}

/// Limits under which an engine cannot work.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum LimitsError {
    /// A limit is 0.
    #[error("{field} is 0; it must be at least 1")]
    Zero {
        /// The limit.
        field: &'static str,
    },
    /// There is no room for a prompt and an output token.
    #[error("max_seq_len is {max_seq_len}; it must be at least 2: one prompt token and one output token")]
    ShortSequence {
        /// The limit.
        max_seq_len: usize,
    },
    /// Not every running sequence could get its row in every step.
    #[error("max_batch_tokens is {max_batch_tokens}; it must be at least max_num_seqs, which is {max_num_seqs}")]
    SmallBatch {
        /// The limit.
        max_batch_tokens: usize,
        /// The other limit.
        max_num_seqs: usize,
    },
    /// A sequence that is within the limits could outgrow the pool even when it is alone.
    #[error("max_seq_len is {max_seq_len}; it must be at most {pool_tokens}, the tokens that fit into the KV pool")]
    SmallPool {
        /// The limit.
        max_seq_len: usize,
        /// Tokens of the pool.
        pool_tokens: usize,
    },
    /// The groups of layers contradict themselves.
    #[error("{0}")]
    Groups(String),
    /// As [`LimitsError::SmallPool`], where sequences keep the blocks of a window.
    #[error(
        "total_blocks is {total_blocks}; it must be at least {needed}, which hold a sequence of {max_seq_len} tokens in layers \
         with {groups}, and a chunk of {rows} rows"
    )]
    SmallPoolOfWindows {
        /// The groups of layers.
        groups: Groups,
        /// Tokens of the longest sequence.
        max_seq_len: usize,
        /// Rows of a chunk.
        rows: usize,
        /// Blocks of the pool.
        total_blocks: usize,
        /// What is needed.
        needed: usize,
    },
    /// The arrays of a plan could outgrow their 32-bit indices.
    #[error(
        "a step could hold {largest} elements; total_blocks, max_batch_tokens, max_num_seqs x max_seq_len and the blocks of as many \
         sequences in all groups of layers must be at most 4294967295"
    )]
    TooLarge {
        /// Elements of the largest array.
        largest: usize,
    },
}
