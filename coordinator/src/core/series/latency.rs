//! Times in buckets: what is counted of them, and which quantiles that tells.
//!
//! Sixteen buckets for each doubling, from a microsecond to 18 minutes, so a quantile is off by 3 % at most.

use std::time::Duration;

/// Buckets of a doubling.
const PER_DOUBLING: u64 = 16;
/// Its binary logarithm.
const SHIFT: u32 = PER_DOUBLING.trailing_zeros();
/// Longer times count as this one: 2^30 microseconds less one.
const LONGEST_US: u64 = (1 << 30) - 1;
/// How many buckets there are.
pub const BUCKETS: usize = (30 - SHIFT as usize + 1) * PER_DOUBLING as usize;

/// The bucket of a time.
pub fn bucket(time: Duration) -> usize {
    let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX).min(LONGEST_US);
    if us < PER_DOUBLING {
        return us as usize;
    }
    let doubling = us.ilog2() - SHIFT;
    ((u64::from(doubling) << SHIFT) + (us >> doubling)) as usize
}

/// The shortest time of a bucket, in microseconds.
fn begin_us(bucket: usize) -> u64 {
    let (doubling, step) = (bucket as u64 / PER_DOUBLING, bucket as u64 % PER_DOUBLING);
    match doubling {
        0 => step,
        doubling => (PER_DOUBLING + step) << (doubling - 1),
    }
}

/// How many times fell into each bucket; always [`BUCKETS`] of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts(Vec<u64>);

impl Default for Counts {
    fn default() -> Self {
        Self(vec![0; BUCKETS])
    }
}

impl Counts {
    /// Counts that somebody else has kept; those beyond [`BUCKETS`] are left out.
    pub fn of(counts: impl IntoIterator<Item = u64>) -> Self {
        let mut all: Vec<u64> = counts.into_iter().take(BUCKETS).collect();
        all.resize(BUCKETS, 0);
        Self(all)
    }

    /// What has been added since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let pairs = self.0.iter().zip(&earlier.0);
        Self(pairs.map(|(now, then)| now.saturating_sub(*then)).collect())
    }

    /// How many there are.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The time below which the share `q` (0 to 1) of all times lies; `None` if there are none.
    pub fn quantile(&self, q: f64) -> Option<Duration> {
        let rank = (q * self.total() as f64).ceil().max(1.0) as u64;
        let mut below = 0;
        for (number, count) in self.0.iter().enumerate().filter(|(_, count)| **count > 0) {
            if below + count >= rank {
                let (begin, end) = (begin_us(number), begin_us(number + 1));
                // Those of a bucket are taken as spread evenly over it.
                let share = ((rank - below) as f64 - 0.5) / *count as f64;
                let us = begin as f64 + share * (end - begin) as f64;
                return Some(Duration::from_nanos((us * 1e3) as u64));
            }
            below += count;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    #[test]
    fn every_time_has_its_bucket_and_buckets_are_narrow() {
        for time in (0..5_000).chain([65_535, 65_536, 1_000_000, LONGEST_US]) {
            let number = bucket(us(time));
            let (begin, end) = (begin_us(number), begin_us(number + 1));
            assert!((begin..end).contains(&time), "{time} in {begin}..{end}");
            assert!(end - begin <= 1 + begin / PER_DOUBLING, "{begin}..{end}");
        }
        assert_eq!(bucket(us(LONGEST_US)), BUCKETS - 1);
        assert_eq!(bucket(Duration::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_times() {
        let times: Vec<u64> = (1..=1_000).map(|number| number * number).collect();
        let mut counts = vec![0; BUCKETS];
        for time in &times {
            counts[bucket(us(*time))] += 1;
        }
        let counts = Counts::of(counts);
        assert_eq!(counts.total(), 1_000);
        for (q, exact) in [(0.5, times[499]), (0.9, times[899]), (0.99, times[989])] {
            let told = counts.quantile(q).expect("there are some").as_micros() as f64;
            assert!((told / exact as f64 - 1.0).abs() < 0.035, "{q}: {told} for {exact}");
        }
        assert_eq!(Counts::default().quantile(0.5), None);
    }

    #[test]
    fn what_was_added_is_the_difference() {
        let (then, now) = (Counts::of([1, 2]), Counts::of([1, 5, 7]));
        assert_eq!(now.since(&then), Counts::of([0, 3, 7]));
        assert_eq!(then.since(&now).total(), 0, "never negative");
    }
}
