//! How long the rows of a prompt delay a step, learned from the steps that were measured.
//!
//! The time of a step is taken for a sum: a part that is always the same, and a part for each generating row, for each
//! token such rows look back on, for each row of a prompt, and for each token *those* look back on. The five factors are
//! the non-negative least squares of the **relative** errors, so short steps count as much as long ones, and a step that
//! the system interrupted cannot count for more than one. Three kinds of steps are remembered apart (only generating,
//! only prompts, both), each for its last few: as long as prompts and generating rows come together only their sum is
//! seen, and what was seen of each alone tells the parts. Nothing of this changes an answer, which does not depend on how
//! a prompt is cut.

use std::time::Duration;

use protocol::control::StepTimeModel;

use crate::limits::EngineLimits;
use crate::plan::StepPlan;

/// Parts of a step's time.
const PARTS: usize = 5;
/// Their order.
const ROWS: usize = 3;
const ROW_KEYS: usize = 4;
/// Rounds of improvement after each measured step; they go on from the last result.
const SWEEPS: usize = 8;
/// Steps of both kinds after which a late one counts for a third of what it did.
const LATE_STEPS: f64 = 128.0;
/// What is held back is this much more than the latest step was late by: the next may be later still.
const LATE_MARGIN: f64 = 1.25;
/// Held back before any step was measured, as a share of what prompts may take.
const FIRST_MARGIN: f64 = 0.25;
/// Most rows of prompts in the first step that also generates.
const FIRST_ROWS: usize = 8;

/// What a step computes, as far as its time depends on it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Work {
    /// Sequences with a single row.
    pub(crate) single: usize,
    /// Tokens that those rows look back on.
    pub(crate) single_keys: usize,
    /// Rows of sequences with several.
    pub(crate) rows: usize,
    /// Tokens that each of those looks back on, all rows together.
    pub(crate) row_keys: usize,
}

impl Work {
    pub(crate) fn of(plan: &StepPlan) -> Self {
        let mut work = Self::default();
        for planned in &plan.sequences {
            let (start, rows) = (planned.start_position as usize, planned.rows.len as usize);
            if rows == 1 && planned.sample.is_some() {
                work.single += 1;
                work.single_keys += start + 1;
            } else {
                work.rows += rows;
                work.row_keys += row_keys(start, rows);
            }
        }
        work
    }

    fn parts(&self) -> [f64; PARTS] {
        [1, self.single, self.single_keys, self.rows, self.row_keys].map(|part| part as f64)
    }
}

/// Tokens that `rows` rows after `start` tokens look back on, themselves included.
fn row_keys(start: usize, rows: usize) -> usize {
    rows * start + rows * (rows + 1) / 2
}

/// Steps of one kind, the older the fainter: the normal equations of their relative errors.
#[derive(Clone, Copy, Debug)]
struct Memory {
    products: [[f64; PARTS]; PARTS],
    sums: [f64; PARTS],
    /// What is left of a step when the next one of its kind comes.
    keeps: f64,
    /// Weight of a new step.
    weight: f64,
}

impl Memory {
    /// Remembers about `steps` steps, which together weigh as `like` of those of a memory of weight 1.
    fn new(steps: f64, like: f64) -> Self {
        Self {
            products: [[0.0; PARTS]; PARTS],
            sums: [0.0; PARTS],
            keeps: 1.0 - 1.0 / steps,
            weight: like / steps,
        }
    }

    fn note(&mut self, parts: &[f64; PARTS], seconds: f64) {
        let relative = parts.map(|part| part / seconds);
        for (i, row) in self.products.iter_mut().enumerate() {
            for (product, other) in row.iter_mut().zip(&relative) {
                *product = *product * self.keeps + self.weight * relative[i] * other;
            }
            self.sums[i] = self.sums[i] * self.keeps + self.weight * relative[i];
        }
    }
}

/// What prompts cost beside sequences that generate.
#[derive(Clone, Debug)]
pub(crate) struct StepTimes {
    generating: Memory,
    prompts: Memory,
    mixed: Memory,
    /// Seconds for one of each part.
    factors: [f64; PARTS],
    /// Most rows of prompts in a measured step that also generated.
    most_rows: usize,
    /// By how much steps of both kinds take longer than expected at most, in seconds, the older the fainter.
    excess: f64,
    /// What is left of [`FIRST_MARGIN`].
    unknown: f64,
}

impl Default for StepTimes {
    fn default() -> Self {
        Self {
            generating: Memory::new(64.0, 16.0),
            // Large chunks are cheaper by the row than small ones: they only say something while nothing else does.
            prompts: Memory::new(8.0, 0.5),
            mixed: Memory::new(16.0, 16.0),
            factors: [0.0; PARTS],
            most_rows: 0,
            excess: 0.0,
            unknown: FIRST_MARGIN,
        }
    }
}

impl StepTimes {
    /// Learns from a step that took `elapsed`.
    pub(crate) fn note(&mut self, work: &Work, elapsed: Duration) {
        let (parts, seconds) = (work.parts(), elapsed.as_secs_f64());
        if seconds <= 0.0 || (work.single == 0 && work.rows == 0) {
            return;
        }
        let memory = if work.rows == 0 {
            &mut self.generating
        } else if work.single == 0 {
            &mut self.prompts
        } else {
            let expected: f64 = parts
                .iter()
                .zip(&self.factors)
                .map(|(part, factor)| part * factor)
                .sum();
            let keeps = 1.0 - 1.0 / LATE_STEPS;
            (self.excess, self.unknown) = (self.excess * keeps, self.unknown * keeps);
            // The first ones are not expected at all. One that took more than twice as long did not scatter: the system
            // interrupted it, or the machine has changed, and then the factors will.
            let late = seconds - expected;
            if self.most_rows >= FIRST_ROWS && late < expected {
                self.excess = self.excess.max(late);
            }
            self.most_rows = self.most_rows.max(work.rows);
            &mut self.mixed
        };
        memory.note(&parts, seconds);
        self.fit();
    }

    /// Coordinate descent: each factor in turn is the best one beside the others, and not negative.
    fn fit(&mut self) {
        let memories = [&self.generating, &self.prompts, &self.mixed];
        let sum = |of: &dyn Fn(&Memory) -> f64| memories.iter().map(|memory| of(memory)).sum::<f64>();
        for _ in 0..SWEEPS {
            for i in 0..PARTS {
                let own = sum(&|memory| memory.products[i][i]);
                if own <= 0.0 {
                    continue;
                }
                let others: f64 = (0..PARTS)
                    .filter(|j| *j != i)
                    .map(|j| sum(&|memory| memory.products[i][j]) * self.factors[j])
                    .sum();
                self.factors[i] = ((sum(&|memory| memory.sums[i]) - others) / own).max(0.0);
            }
        }
    }

    /// The factors as integers.
    pub(crate) fn model(&self) -> StepTimeModel {
        let [base, single, single_key, row, row_key] = self.factors;
        // Seconds of a step: far below what 64 bits hold, and never negative.
        let nanos = |seconds: f64| (seconds * 1e9).round() as u64;
        StepTimeModel {
            base_us: (base * 1e6).round() as u64,
            row_ns: nanos(row),
            row_key_ns: nanos(row_key),
            single_ns: nanos(single),
            single_key_ns: nanos(single_key),
        }
    }

    /// The time that prompts may take of the next step that also generates. `None` if it is not limited.
    pub(crate) fn delay(&self, limits: &EngineLimits) -> Option<Delay> {
        let allowed = limits.mixed_prefill_time.as_secs_f64();
        (allowed > 0.0).then(|| Delay {
            // Room for what times scatter.
            left: (allowed - (LATE_MARGIN * self.excess).max(allowed * self.unknown)).max(allowed / 2.0),
            row: self.factors[ROWS],
            key: self.factors[ROW_KEYS],
            // Little is known of chunks far larger than those that were measured.
            rows: (2 * self.most_rows).max(FIRST_ROWS),
            used: false,
        })
    }
}

/// What is left of the time that prompts may take of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Delay {
    /// Seconds.
    left: f64,
    /// Seconds for a row.
    row: f64,
    /// Seconds for each token that a row looks back on.
    key: f64,
    /// Rows.
    rows: usize,
    /// Somebody has rows.
    used: bool,
}

impl Delay {
    /// How many of `most` rows after `start` tokens there is time for. Whoever comes first has one in any case: a prompt
    /// would never end otherwise.
    pub(crate) fn rows_for(&self, most: usize, start: usize) -> usize {
        // row * n + key * row_keys(start, n) <= left, solved for n.
        let linear = self.row + self.key * (start as f64 + 0.5);
        let rows = 2.0 * self.left / (linear + (linear * linear + 2.0 * self.key * self.left).sqrt());
        // Not a number, or infinite, if rows cost nothing: the limit is `self.rows` then.
        let rows = if rows.is_finite() { rows as usize } else { usize::MAX };
        let least = usize::from(!self.used);
        rows.min(self.rows).max(least).min(most)
    }

    /// Books `rows` rows after `start` tokens.
    pub(crate) fn take(&mut self, rows: usize, start: usize) {
        let seconds = self.row * rows as f64 + self.key * row_keys(start, rows) as f64;
        self.left = (self.left - seconds).max(0.0);
        self.rows = self.rows.saturating_sub(rows);
        self.used |= rows > 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::window::Groups;

    /// A machine: seconds for a step, for a generating row and a token it looks back on, for a row and a token of those.
    const MACHINE: [f64; PARTS] = [4e-3, 8e-4, 4e-7, 4e-4, 3e-7];

    fn time_of(work: &Work, machine: &[f64; PARTS]) -> Duration {
        let seconds = work
            .parts()
            .into_iter()
            .zip(machine)
            .map(|(part, factor)| part * factor);
        Duration::from_secs_f64(seconds.sum())
    }

    fn limits(mixed_prefill_time: Duration) -> EngineLimits {
        EngineLimits {
            total_blocks: 1_024,
            block_tokens: 16,
            max_num_seqs: 64,
            max_batch_tokens: 512,
            prefill_chunk_tokens: 256,
            mixed_prefill_tokens: 512,
            mixed_prefill_time,
            max_seq_len: 8_192,
            prefix_cache: false,
            groups: Groups::ONE,
        }
    }

    /// Decodes 8 sequences of 500 tokens and computes `prompts` beside them, on a machine where step number `n` takes
    /// `machine(n, ..)`. For each step with a prompt: tokens before its rows, their number, and by how much it took longer
    /// than the sequences alone do on [`MACHINE`], in seconds.
    fn prompts_beside(
        times: &mut StepTimes,
        limits: &EngineLimits,
        machine: impl Fn(usize, &Work) -> Duration,
        prompts: &[usize],
    ) -> Vec<(usize, usize, f64)> {
        let (streams, context) = (8, 500);
        let calm = Work {
            single: streams,
            single_keys: streams * context,
            ..Work::default()
        };
        let (mut steps, mut found) = (0, Vec::new());
        for prompt in prompts {
            let mut computed = 0;
            for _ in 0..10 {
                times.note(&calm, machine(steps, &calm));
                steps += 1;
            }
            while computed < *prompt {
                let delay = times.delay(limits).unwrap();
                let rows = delay.rows_for((prompt - computed).min(256), computed);
                assert!(rows > 0, "a prompt stands still");
                let work = Work {
                    rows,
                    row_keys: row_keys(computed, rows),
                    ..calm
                };
                times.note(&work, machine(steps, &work));
                let delay = machine(steps, &work).as_secs_f64() - time_of(&calm, &MACHINE).as_secs_f64();
                found.push((computed, rows, delay));
                computed += rows;
                steps += 1;
            }
        }
        found
    }

    #[test]
    fn prompts_take_the_time_they_may_and_no_more_wherever_they_are() {
        let limits = limits(Duration::from_millis(20));
        let mut times = StepTimes::default();
        let found = prompts_beside(
            &mut times,
            &limits,
            |_, work| time_of(work, &MACHINE),
            &[2_048, 2_048, 6_000],
        );
        for (at, rows, delay) in &found {
            assert!(*delay <= 0.022, "{rows} rows after {at} tokens delay by {delay} s");
        }
        // Once learned, what is allowed is used; fewer rows after more tokens.
        let second = &found[found.iter().rposition(|(at, ..)| *at == 0).unwrap()..];
        let full = &second[..second.len() - 1];
        for (at, rows, delay) in full {
            assert!(*delay >= 0.016, "{rows} rows after {at} tokens delay by {delay} s");
        }
        let (first, last) = (full[0].1, full[full.len() - 1].1);
        assert!(first > 40 && last < first / 3, "{first} rows at first, {last} at last");
    }

    #[test]
    fn the_model_tells_what_a_step_takes() {
        let mut times = StepTimes::default();
        assert_eq!(times.model(), StepTimeModel::default(), "nothing is known yet");
        let limits = limits(Duration::from_millis(20));
        prompts_beside(&mut times, &limits, |_, work| time_of(work, &MACHINE), &[2_048; 4]);
        let model = times.model();
        let work = Work {
            single: 8,
            single_keys: 4_000,
            rows: 30,
            row_keys: row_keys(1_000, 30),
        };
        let keys = model.row_key_ns * work.row_keys as u64 + model.single_key_ns * 4_000;
        let nanos = model.base_us * 1_000 + model.row_ns * 30 + model.single_ns * 8 + keys;
        let (told, true_time) = (nanos as f64 / 1e9, time_of(&work, &MACHINE).as_secs_f64());
        assert!(
            (told / true_time - 1.0).abs() < 0.1,
            "{told} s instead of {true_time} s"
        );
    }

    #[test]
    fn the_first_prompt_starts_with_few_rows() {
        let times = StepTimes::default();
        let delay = times.delay(&limits(Duration::from_millis(20))).unwrap();
        assert_eq!(delay.rows_for(512, 0), FIRST_ROWS);
        assert!(times.delay(&limits(Duration::ZERO)).is_none(), "no limit");
    }

    #[test]
    fn times_that_scatter_keep_prompts_within_the_limit_mostly() {
        let limits = limits(Duration::from_millis(20));
        // Up to a fifth longer, and now and then a step that the system interrupts for 50 ms.
        let machine = |step: usize, work: &Work| {
            let scatter = 1.0 + 0.2 * ((step * 7_919) % 101) as f64 / 101.0;
            let stolen = if step.is_multiple_of(37) { 0.05 } else { 0.0 };
            Duration::from_secs_f64(time_of(work, &MACHINE).as_secs_f64() * scatter + stolen)
        };
        let found = prompts_beside(&mut StepTimes::default(), &limits, machine, &[2_048; 6]);
        let late = &found[found.len() / 6..];
        // Alone the sequences take 12 ms and up to a fifth more. Late are those that the system interrupted, 1 in 37, and
        // few others.
        let beyond = late.iter().filter(|(.., delay)| *delay > 0.02 + 0.1 * 0.012).count();
        assert!(beyond * 18 <= late.len(), "{beyond} of {} steps", late.len());
        let mean = late.iter().map(|(.., delay)| delay).sum::<f64>() / late.len() as f64;
        assert!(mean > 0.012, "prompts get {mean} s a step");
    }

    #[test]
    fn a_machine_that_becomes_slower_is_learned() {
        let limits = limits(Duration::from_millis(20));
        let mut times = StepTimes::default();
        prompts_beside(&mut times, &limits, |_, work| time_of(work, &MACHINE), &[2_048]);
        let slow = MACHINE.map(|factor| 3.0 * factor);
        let found = prompts_beside(&mut times, &limits, |_, work| time_of(work, &slow), &[2_048; 2]);
        for (at, rows, delay) in &found[found.len() / 2..] {
            // Alone the sequences take longer too now, by twice what they took before.
            let delay = delay - 2.0 * (4e-3 + 8.0 * 8e-4 + 8.0 * 500.0 * 4e-7);
            assert!(delay <= 0.022, "{rows} rows after {at} tokens delay by {delay} s");
        }
    }

    #[test]
    fn a_row_that_takes_longer_than_allowed_is_computed_alone() {
        let limits = limits(Duration::from_micros(10));
        let found = prompts_beside(
            &mut StepTimes::default(),
            &limits,
            |_, work| time_of(work, &MACHINE),
            &[60],
        );
        assert!(found[1..].iter().all(|(_, rows, _)| *rows == 1), "{found:?}");
        let delay = Delay {
            used: true,
            ..StepTimes::default().delay(&limits).unwrap()
        };
        let expensive = Delay { row: 1.0, ..delay };
        assert_eq!(expensive.rows_for(100, 0), 0, "only the first prompt of a step");
    }

    #[test]
    fn prompts_share_the_time_of_a_step() {
        let mut delay = Delay {
            left: 0.010,
            row: 1e-3,
            key: 0.0,
            rows: 100,
            used: false,
        };
        assert_eq!(delay.rows_for(100, 0), 10);
        delay.take(4, 0);
        assert_eq!(delay.rows_for(100, 0), 6);
        // Solved for the number of rows: no row more, none less.
        let delay = Delay {
            left: 0.010,
            row: 1e-3,
            key: 1e-6,
            rows: 100,
            used: false,
        };
        for start in [0, 100, 1_000, 5_000] {
            let rows = delay.rows_for(100, start);
            let seconds = |rows: usize| 1e-3 * rows as f64 + 1e-6 * row_keys(start, rows) as f64;
            assert!(
                seconds(rows) <= 0.010 && seconds(rows + 1) > 0.010,
                "{rows} rows after {start}"
            );
        }
    }
}
