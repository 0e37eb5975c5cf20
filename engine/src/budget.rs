//! How the rows of a step are shared out.

/// The rows of one step. Sequences that lack a single row (running ones) have theirs set aside beforehand; prompts share
/// the rest in chunks, so a prompt costs the running sequences a bounded delay and never a step.
#[derive(Debug)]
pub(crate) struct StepBudget {
    single: usize,
    rest: usize,
    chunk: usize,
}

impl StepBudget {
    /// `single` of `rows` rows are set aside; a sequence gets at most `chunk` of the rest.
    pub(crate) fn new(rows: usize, single: usize, chunk: usize) -> Self {
        Self {
            single,
            rest: rows.saturating_sub(single),
            chunk,
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

    #[test]
    fn prompts_share_what_single_rows_leave() {
        let mut budget = StepBudget::new(10, 3, 4);
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
        let mut budget = StepBudget::new(2, 0, 8);
        assert_eq!(budget.rows_for(1), 1);
        budget.take(1, 1);
        assert_eq!(budget.rows_for(5), 1);
    }
}
