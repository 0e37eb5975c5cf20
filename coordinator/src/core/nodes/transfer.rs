//! How long a decode node waits for KV behind the last step of a prefill node, learned for each pair from its handoffs.
//!
//! What is learned is a straight line, a fixed time and a time for each byte: the least squares over the last handoffs,
//! the older the fainter. Most of a long prompt's KV travels while the rest is computed; only what the decode node still
//! waited for counts, since only that is felt. Two made-up handoffs of little weight stand for a pair nothing is known of,
//! and keep the line determined when all handoffs are alike.

use protocol::control::HandoffStats;

/// What is left of a handoff's weight after the next one.
const KEEPS: f64 = 0.95;
/// Weight of each of the made-up handoffs.
const PRIOR_WEIGHT: f64 = 0.05;
/// Mebibytes and microseconds of the made-up handoffs: half a millisecond, and a gibibyte a second.
const PRIOR: [(f64, f64); 2] = [(0.0, 500.0), (4.0, 500.0 + 4_000.0)];
/// Longest time that is predicted, in microseconds.
const MOST_US: f64 = 600_000_000.0;

/// What is remembered of the handoffs of a pair: sums over bytes x (in mebibytes) and microseconds y.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Transfers {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl Transfers {
    fn add(&mut self, weight: f64, x: f64, y: f64) {
        self.weight += weight;
        self.x += weight * x;
        self.y += weight * y;
        self.xx += weight * x * x;
        self.xy += weight * x * y;
    }

    /// Remembers a handoff.
    pub(super) fn note(&mut self, stats: &HandoffStats) {
        for sum in [&mut self.weight, &mut self.x, &mut self.y, &mut self.xx, &mut self.xy] {
            *sum *= KEEPS;
        }
        self.add(1.0, mebibytes(stats.bytes), (stats.exposed_us as f64).min(MOST_US));
    }

    /// Microseconds for a handoff of `bytes`.
    pub(super) fn predict(&self, bytes: u64) -> u64 {
        let mut all = *self;
        for (x, y) in PRIOR {
            all.add(PRIOR_WEIGHT, x, y);
        }
        let spread = all.weight * all.xx - all.x * all.x;
        let slope = ((all.weight * all.xy - all.x * all.y) / spread).max(0.0);
        let fixed = (all.y - slope * all.x) / all.weight;
        // A line that starts below 0 goes through it instead.
        let (fixed, slope) = if fixed < 0.0 {
            (0.0, all.xy / all.xx)
        } else {
            (fixed, slope)
        };
        (fixed + slope * mebibytes(bytes)).clamp(0.0, MOST_US) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn stats(mebibytes: u64, exposed_us: u64) -> HandoffStats {
        HandoffStats {
            bytes: mebibytes * MIB,
            exposed_us,
            ..HandoffStats::default()
        }
    }

    #[test]
    fn a_pair_that_is_not_known_moves_a_gibibyte_a_second() {
        let pair = Transfers::default();
        for (bytes, expected) in [(0, 500), (8 * MIB, 8_500)] {
            assert!(pair.predict(bytes).abs_diff(expected) <= 1, "{}", pair.predict(bytes));
        }
    }

    #[test]
    fn a_pair_is_learned_and_learned_again_when_it_changes() {
        let mut pair = Transfers::default();
        for round in 0..40 {
            let size = 1 + round % 10;
            pair.note(&stats(size, 1_000 + 100 * size));
        }
        for (bytes, expected) in [(MIB, 1_100), (10 * MIB, 2_000)] {
            let told = pair.predict(bytes);
            assert!(told.abs_diff(expected) * 10 < expected, "{told} for {bytes} bytes");
        }
        for round in 0..100 {
            let size = 1 + round % 10;
            pair.note(&stats(size, 20_000 * size));
        }
        let told = pair.predict(5 * MIB);
        assert!(told.abs_diff(100_000) < 10_000, "{told} on the slow link");
    }

    #[test]
    fn handoffs_that_are_all_alike_or_absurd_leave_a_sensible_line() {
        let mut alike = Transfers::default();
        (0..50).for_each(|_| alike.note(&stats(2, 3_000)));
        let told = alike.predict(2 * MIB);
        assert!(told.abs_diff(3_000) < 300, "{told}");
        assert!(alike.predict(20 * MIB) > told && alike.predict(0) < told);
        let mut absurd = Transfers::default();
        (0..50).for_each(|_| {
            absurd.note(&HandoffStats {
                bytes: u64::MAX,
                exposed_us: u64::MAX,
                ..stats(0, 0)
            })
        });
        assert!(absurd.predict(u64::MAX) <= MOST_US as u64);
        let mut free = Transfers::default();
        (0..50).for_each(|_| free.note(&stats(0, 0)));
        assert!(free.predict(0) < 100, "{}", free.predict(0));
    }
}
