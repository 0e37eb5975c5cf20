//! How long work takes on a node, predicted from the step times it reports and from what is booked there.
//!
//! All times are whole microseconds, so that equal nodes cost exactly the same and a decision can be repeated.

use protocol::control::{LoadReport, StepTimeModel};
use serde::Serialize;

use super::Node;

/// A machine that nothing is known of: about a model of a billion weights on two CPU cores. Used only until somebody in the
/// cluster has measured.
const UNMEASURED: StepTimes = StepTimes {
    base_us: 2_000,
    row_ns: 400_000,
    row_key_ns: 300,
    single_ns: 800_000,
    single_key_ns: 400,
};

/// More is not believed of any part, in its unit: ten seconds, and ten seconds for a row.
const MOST: u64 = 10_000_000_000;

/// Parts of a step's time: it is the sum of a part that is always the same, one for each row of a prompt and for each token
/// those look back on, and one for each generating sequence and for each token it looks back on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Microseconds of every step.
    pub base_us: u64,
    /// Nanoseconds for a row of a prompt.
    pub row_ns: u64,
    /// Nanoseconds for each token that such a row looks back on.
    pub row_key_ns: u64,
    /// Nanoseconds for a generating sequence.
    pub single_ns: u64,
    /// Nanoseconds for each token that it looks back on.
    pub single_key_ns: u64,
}

/// How the engines of the cluster cut prompts.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    /// Most rows of one prompt in a step.
    pub chunk_tokens: usize,
    /// Most rows of prompts in a step that also generates.
    pub mixed_tokens: usize,
    /// By how much prompts may make a step longer that also generates, in microseconds; 0: not bounded.
    pub mixed_us: u64,
}

/// What computing a prompt on a node that may be generating costs, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Beside {
    /// From the first row to the first token.
    pub compute_us: u64,
    /// How much later the tokens of the sequences that run there come, all sequences together.
    pub damage_us: u64,
}

impl From<StepTimeModel> for StepTimes {
    fn from(model: StepTimeModel) -> Self {
        // Bounded, so that sums of products stay small.
        let sane = |part: u64| part.min(MOST);
        Self {
            base_us: sane(model.base_us),
            row_ns: sane(model.row_ns),
            row_key_ns: sane(model.row_key_ns),
            single_ns: sane(model.single_ns),
            single_key_ns: sane(model.single_key_ns),
        }
    }
}

impl StepTimes {
    /// What is not known here, from `others`, and what nobody knows, from a guess. A part is 0 as long as the node had no step
    /// with such work.
    pub(super) fn or(self, others: &Self) -> Self {
        let first = |own, other, guess| {
            if own > 0 {
                own
            } else if other > 0 {
                other
            } else {
                guess
            }
        };
        Self {
            base_us: first(self.base_us, others.base_us, UNMEASURED.base_us),
            row_ns: first(self.row_ns, others.row_ns, UNMEASURED.row_ns),
            row_key_ns: first(self.row_key_ns, others.row_key_ns, UNMEASURED.row_key_ns),
            single_ns: first(self.single_ns, others.single_ns, UNMEASURED.single_ns),
            single_key_ns: first(self.single_key_ns, others.single_key_ns, UNMEASURED.single_key_ns),
        }
    }

    /// Microseconds for `rows` rows of a prompt behind `start` tokens, without the steps' own.
    fn rows_us(&self, start: usize, rows: usize) -> u64 {
        let (start, rows) = (start as u64, rows as u64);
        let keys = rows * start + rows * (rows + 1) / 2;
        rows.saturating_mul(self.row_ns)
            .saturating_add(keys.saturating_mul(self.row_key_ns))
            / 1000
    }

    /// Microseconds for `rows` rows of a prompt behind `start` tokens on a node that computes nothing else.
    pub(super) fn prompt_us(&self, start: usize, rows: usize, limits: &StepLimits) -> u64 {
        let steps = rows.div_ceil(limits.chunk_tokens.max(1)) as u64;
        self.rows_us(start, rows)
            .saturating_add(steps.saturating_mul(self.base_us))
    }

    /// Microseconds that `sequences` sequences with `keys` tokens take of a step.
    fn generating_us(&self, sequences: usize, keys: usize) -> u64 {
        (sequences as u64)
            .saturating_mul(self.single_ns)
            .saturating_add((keys as u64).saturating_mul(self.single_key_ns))
            / 1000
    }

    /// `rows` rows of a prompt behind `start` tokens, computed beside `sequences` sequences that hold `keys` tokens.
    pub(super) fn beside(
        &self,
        (start, rows): (usize, usize),
        (sequences, keys): (usize, usize),
        limits: &StepLimits,
    ) -> Beside {
        let own = self.rows_us(start, rows);
        if sequences == 0 {
            let compute_us = self.prompt_us(start, rows, limits);
            return Beside {
                compute_us,
                damage_us: 0,
            };
        }
        let row = (own / rows.max(1) as u64).max(1);
        let in_time = match limits.mixed_us {
            0 => u64::MAX,
            time => (time / row).max(1),
        };
        let chunk = in_time.min(limits.mixed_tokens.min(limits.chunk_tokens).max(1) as u64);
        let steps = (rows as u64).div_ceil(chunk);
        Beside {
            compute_us: steps
                .saturating_mul(self.base_us.saturating_add(self.generating_us(sequences, keys)))
                .saturating_add(own),
            damage_us: own.saturating_mul(sequences as u64),
        }
    }

    /// What `more` sequences of `length` tokens each cost beside `sequences` that hold `keys` tokens, in `steps` steps: what
    /// they add to everybody's steps, and the steps they take part in.
    pub(super) fn join_us(
        &self,
        (more, length): (usize, usize),
        (sequences, keys): (usize, usize),
        steps: usize,
    ) -> u64 {
        let added = self.generating_us(more, more * length);
        let step = self
            .base_us
            .saturating_add(self.generating_us(sequences + more, keys + more * length));
        let others = added.saturating_mul(sequences as u64);
        (steps as u64).saturating_mul(others.saturating_add(step))
    }
}

/// Prompts that a node has yet to compute. *Seen* are those whose job was on its way when the node last reported; of those
/// its word says how much is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Queue {
    /// Predicted microseconds of what is not seen.
    pub(super) unseen_us: u64,
    /// Tokens of what is seen, as booked.
    pub(super) seen_tokens: u64,
    /// Predicted microseconds of what is seen, as booked.
    pub(super) seen_us: u64,
    /// Of the seen tokens, and of those that others have sent there, so many are left; `None` if the node has not said.
    pub(super) left: Option<u64>,
}

impl Queue {
    /// Predicted microseconds until all of it is computed.
    pub(super) fn us(&self, times: &StepTimes) -> u64 {
        let seen = match self.left {
            None => self.seen_us,
            Some(left) if left >= self.seen_tokens => self
                .seen_us
                .saturating_add((left - self.seen_tokens).saturating_mul(times.row_ns) / 1000),
            Some(left) => share(self.seen_us, left, self.seen_tokens),
        };
        self.unseen_us.saturating_add(seen)
    }

    /// Seen work of `tokens` tokens, booked as `us` microseconds, is over.
    pub(super) fn remove_seen(&mut self, tokens: u64, us: u64) {
        if let Some(left) = &mut self.left {
            let of_it = if *left >= self.seen_tokens {
                tokens
            } else {
                share(tokens, *left, self.seen_tokens)
            };
            *left = left.saturating_sub(of_it);
        }
        self.seen_tokens -= tokens;
        self.seen_us -= us;
    }
}

/// `whole` times `part / of`.
fn share(whole: u64, part: u64, of: u64) -> u64 {
    (u128::from(whole) * u128::from(part) / u128::from(of.max(1))) as u64
}

/// Rows of prompts that a node has yet to compute by its own word: each sequence that generates lacks one row too.
pub(super) fn rows_of_prompts(report: &LoadReport) -> u64 {
    report.queued_tokens.saturating_sub(u64::from(report.running))
}

impl Node {
    /// Sequences that run there, whoever sent them, and about how many tokens they hold.
    pub(super) fn generating(&self) -> (usize, usize) {
        let sequences = self.sequences.max(self.report.running as usize);
        let tokens = self.kept().tokens_in(sequences, self.booked_blocks as usize);
        (sequences, tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: StepTimes = StepTimes {
        base_us: 1_000,
        row_ns: 100_000,
        row_key_ns: 0,
        single_ns: 200_000,
        single_key_ns: 0,
    };
    const LIMITS: StepLimits = StepLimits {
        chunk_tokens: 100,
        mixed_tokens: 50,
        mixed_us: 2_000,
    };

    #[test]
    fn a_prompt_takes_its_rows_its_keys_and_its_steps() {
        assert_eq!(TIMES.prompt_us(0, 250, &LIMITS), 250 * 100 + 3 * 1_000);
        let keys = StepTimes {
            row_key_ns: 1_000,
            ..TIMES
        };
        // 10 rows behind 5 tokens look back on 6 + 7 + .. + 15 tokens.
        assert_eq!(keys.prompt_us(5, 10, &LIMITS), 10 * 100 + 105 + 1_000);
    }

    #[test]
    fn beside_others_a_prompt_takes_more_steps_and_makes_them_wait() {
        let alone = TIMES.beside((0, 100), (0, 0), &LIMITS);
        assert_eq!(
            alone,
            Beside {
                compute_us: 100 * 100 + 1_000,
                damage_us: 0
            }
        );
        // 2 ms a step are 20 rows; a step of four sequences takes 1.8 ms without them.
        let beside = TIMES.beside((0, 100), (4, 0), &LIMITS);
        assert_eq!(
            beside,
            Beside {
                compute_us: 100 * 100 + 5 * (1_000 + 800),
                damage_us: 4 * 100 * 100
            }
        );
    }

    #[test]
    fn a_sequence_costs_what_it_adds_to_the_steps_of_all() {
        // 200 us more for three others in each of 10 steps, and 10 steps of 1 + 4 * 0.2 ms.
        assert_eq!(TIMES.join_us((1, 0), (3, 0), 10), 10 * (3 * 200 + 1_000 + 800));
    }

    #[test]
    fn what_is_left_follows_the_nodes_word_and_what_was_sent_since() {
        let mut queue = Queue {
            unseen_us: 500,
            seen_tokens: 100,
            seen_us: 10_000,
            left: None,
        };
        assert_eq!(queue.us(&TIMES), 10_500);
        queue.left = Some(25);
        assert_eq!(queue.us(&TIMES), 3_000, "a quarter of it is left");
        queue.left = Some(130);
        assert_eq!(queue.us(&TIMES), 13_500, "30 tokens are somebody else's");
        queue.remove_seen(40, 4_000);
        assert_eq!((queue.left, queue.us(&TIMES)), (Some(90), 9_500));
        queue.left = Some(30);
        queue.remove_seen(60, 6_000);
        assert_eq!((queue.left, queue.us(&TIMES)), (Some(0), 500));
    }

    #[test]
    fn what_a_node_has_not_measured_is_taken_from_others() {
        let decode = StepTimes { row_ns: 0, ..TIMES };
        let other = StepTimes {
            row_ns: 7,
            ..StepTimes::default()
        };
        assert_eq!(
            decode.or(&other),
            StepTimes {
                row_ns: 7,
                row_key_ns: 300,
                single_key_ns: 400,
                ..TIMES
            }
        );
        assert_eq!(StepTimes::default().or(&StepTimes::default()), UNMEASURED);
    }
}
