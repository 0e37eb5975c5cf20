//! How the rows of a step are shared out.

use crate::limits::EngineLimits;
use crate::step_time::{Delay, StepTimes};

/// The rows of one step. Sequences that lack a single row (running ones) have theirs set aside beforehand; prompts share
/// the rest in chunks, and only a part of it if somebody generates or is about to: as many rows as their time allows, which are fewer the
/// more tokens a row looks back on. So a prompt costs those a bounded delay and never a step, and as there is always a row
/// left for it, it advances in every step.
#[derive(Debug)]
pub(crate) struct StepBudget {
    single: usize,
    rest: usize,
    chunk: usize,
    delay: Option<Delay>,
}

impl StepBudget {
    /// `single` rows are set aside for as many sequences. `generating`: somebody would have to wait for prompts, be it one of
    /// those, or one whose KV is on its way and who may come in the middle of the step.
    pub(crate) fn new(limits: &EngineLimits, single: usize, generating: bool, times: &StepTimes) -> Self {
        let most = if generating {
            limits.mixed_prefill_tokens
        } else {
            limits.max_batch_tokens
        };
        Self {
            single,
            rest: limits.max_batch_tokens.saturating_sub(single).min(most),
            chunk: limits.prefill_chunk_tokens,
            delay: times.delay(limits).filter(|_| generating),
        }
    }

    /// Rows that a sequence with `computed` tokens, which lacks `pending` rows, may have.
    pub(crate) fn rows_for(&self, pending: usize, computed: usize) -> usize {
        if pending == 1 && self.single > 0 {
            1
        } else {
            let most = pending.min(self.chunk).min(self.rest);
            self.delay.map_or(most, |delay| delay.rows_for(most, computed))
        }
    }

    /// Books `rows` of a sequence with `computed` tokens, which lacks `pending` rows.
    pub(crate) fn take(&mut self, pending: usize, computed: usize, rows: usize) {
        if pending == 1 && self.single > 0 {
            self.single -= rows;
        } else {
            self.rest -= rows;
            if let Some(delay) = &mut self.delay {
                delay.take(rows, computed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use protocol::window::Groups;
    use std::time::Duration;

    use super::*;
    use crate::step_time::Work;

    fn limits(max_batch_tokens: usize, prefill_chunk_tokens: usize, mixed_prefill_tokens: usize) -> EngineLimits {
        EngineLimits {
            total_blocks: 8,
            block_tokens: 4,
            max_num_seqs: 2,
            max_batch_tokens,
            prefill_chunk_tokens,
            mixed_prefill_tokens,
            mixed_prefill_time: Duration::ZERO,
            max_seq_len: 32,
            prefix_cache: false,
            groups: Groups::ONE,
        }
    }

    #[test]
    fn who_generates_waits_for_few_rows_only() {
        let alone = StepBudget::new(&limits(100, 50, 7), 0, false, &StepTimes::default());
        assert_eq!(alone.rows_for(60, 0), 50);
        let mut mixed = StepBudget::new(&limits(100, 50, 7), 10, true, &StepTimes::default());
        mixed.take(4, 0, mixed.rows_for(4, 0));
        assert_eq!((mixed.rows_for(60, 0), mixed.rows_for(1, 0)), (3, 1));
        let full = StepBudget::new(&limits(12, 50, 7), 10, true, &StepTimes::default());
        assert_eq!(full.rows_for(60, 0), 2, "never more than a step has");
    }

    #[test]
    fn prompts_share_what_single_rows_leave() {
        let mut budget = StepBudget::new(&limits(10, 4, 10), 3, true, &StepTimes::default());
        assert_eq!(budget.rows_for(100, 0), 4);
        budget.take(100, 0, 4);
        assert_eq!(budget.rows_for(100, 0), 3);
        budget.take(100, 0, 3);
        assert_eq!(budget.rows_for(100, 0), 0);
        for _ in 0..3 {
            assert_eq!(budget.rows_for(1, 0), 1);
            budget.take(1, 0, 1);
        }
        assert_eq!(budget.rows_for(1, 0), 0);
    }

    #[test]
    fn a_late_single_row_comes_from_the_rest() {
        let mut budget = StepBudget::new(&limits(2, 8, 2), 0, false, &StepTimes::default());
        assert_eq!(budget.rows_for(1, 0), 1);
        budget.take(1, 0, 1);
        assert_eq!(budget.rows_for(5, 0), 1);
    }

    #[test]
    fn beside_those_that_generate_rows_after_many_tokens_are_fewer() {
        let limits = EngineLimits {
            mixed_prefill_time: Duration::from_millis(10),
            ..limits(600, 500, 400)
        };
        let mut times = StepTimes::default();
        // A step takes 1 ms; a row of a prompt 100 us, and 1 us more for each token it looks back on.
        for (rows, start) in [(100, 0), (100, 100), (100, 400), (100, 900)].repeat(100) {
            let row_keys = rows * start + rows * (rows + 1) / 2;
            let calm = Work {
                single: 1,
                ..Work::default()
            };
            times.note(&calm, Duration::from_millis(1));
            let mixed = Work { rows, row_keys, ..calm };
            times.note(&mixed, Duration::from_micros((1_000 + 100 * rows + row_keys) as u64));
        }
        let mut mixed = StepBudget::new(&limits, 1, true, &times);
        let rows = [0, 100, 1_000].map(|computed| mixed.rows_for(5_000, computed));
        assert!((65..=75).contains(&rows[0]), "{rows:?}");
        assert!((36..=46).contains(&rows[1]), "{rows:?}");
        assert!((7..=10).contains(&rows[2]), "{rows:?}");
        mixed.take(5_000, 1_000, rows[2]);
        assert_eq!(mixed.rows_for(5_000, 1_000), 0, "the time is used");
        assert_eq!(mixed.rows_for(1, 5_000), 1, "those that generate have their row");
        let alone = StepBudget::new(&limits, 0, false, &times);
        assert_eq!(alone.rows_for(5_000, 1_000), 500, "nobody waits");
    }
}
