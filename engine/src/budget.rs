//! How the rows of a step are shared out.

use crate::limits::EngineLimits;

/// The rows of one step. Sequences that lack a single row (running ones) have theirs set aside beforehand; prompts share
/// the rest in chunks, and only a part of it if somebody generates. So a prompt costs those a bounded delay and never a
/// step, and as there is always a row left for it, it advances in every step.
#[derive(Debug)]
pub(crate) struct StepBudget {
    single: usize,
    rest: usize,
    chunk: usize,
}

impl StepBudget {
    /// `single` rows are set aside for as many sequences, some of which generate tokens if `generating`.
    pub(crate) fn new(limits: &EngineLimits, single: usize, generating: bool) -> Self {
        let most = if generating {
            limits.mixed_prefill_tokens
        } else {
            limits.max_batch_tokens
        };
        Self {
            single,
            rest: limits.max_batch_tokens.saturating_sub(single).min(most),
            chunk: limits.prefill_chunk_tokens,
        }
    }

    /// Rows that a sequence which lacks `pending` rows may have.
    pub(crate) fn rows_for(&self, pending: usize) -> usize {
        if pending == 1 && self.single > 0 {
            1
        } else {
            pending.min(self.chunk).min(self.rest)
        }
    }

    /// Books `rows` of a sequence which lacks `pending` rows.
    pub(crate) fn take(&mut self, pending: usize, rows: usize) {
        if pending == 1 && self.single > 0 {
            self.single -= rows;
        } else {
            self.rest -= rows;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(max_batch_tokens: usize, prefill_chunk_tokens: usize, mixed_prefill_tokens: usize) -> EngineLimits {
        EngineLimits {
            total_blocks: 8,
            block_tokens: 4,
            max_num_seqs: 2,
            max_batch_tokens,
            prefill_chunk_tokens,
            mixed_prefill_tokens,
            max_seq_len: 32,
            prefix_cache: false,
        }
    }

    #[test]
    fn who_generates_waits_for_few_rows_only() {
        let alone = StepBudget::new(&limits(100, 50, 7), 0, false);
        assert_eq!(alone.rows_for(60), 50);
        let mut mixed = StepBudget::new(&limits(100, 50, 7), 10, true);
        mixed.take(4, mixed.rows_for(4));
        assert_eq!((mixed.rows_for(60), mixed.rows_for(1)), (3, 1));
        let full = StepBudget::new(&limits(12, 50, 7), 10, true);
        assert_eq!(full.rows_for(60), 2, "never more than a step has");
    }

    #[test]
    fn prompts_share_what_single_rows_leave() {
        let mut budget = StepBudget::new(&limits(10, 4, 10), 3, true);
        assert_eq!(budget.rows_for(100), 4);
        budget.take(100, 4);
        assert_eq!(budget.rows_for(100), 3);
        budget.take(100, 3);
        assert_eq!(budget.rows_for(100), 0);
        for _ in 0..3 {
            assert_eq!(budget.rows_for(1), 1);
            budget.take(1, 1);
        }
        assert_eq!(budget.rows_for(1), 0);
    }

    #[test]
    fn a_late_single_row_comes_from_the_rest() {
        let mut budget = StepBudget::new(&limits(2, 8, 2), 0, false);
        assert_eq!(budget.rows_for(1), 1);
        budget.take(1, 1);
        assert_eq!(budget.rows_for(5), 1);
    }
}
