//! The only source of chance: a sequence of numbers that a seed determines.
//!
//! SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

use std::ops::Range;
use std::time::Duration;

/// See the head of the file.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of `seed` for one `purpose`: sequences of different purposes have nothing to do with each other.
    pub fn new(seed: u64, purpose: &str) -> Self {
        Self(mix(seed ^ xxhash_rust::xxh3::xxh3_64(purpose.as_bytes())))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`; 0 if that is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound.max(1)
    }

    /// A number of the range; its start if it is empty.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end.saturating_sub(range.start))
    }

    /// True so many times of a thousand.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    /// A time of the range, in microseconds.
    pub fn micros(&mut self, range: Range<u64>) -> Duration {
        Duration::from_micros(self.within(range))
    }

    /// One of the elements, which must be some.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }
}

/// A bijection of 64 bits in which every bit of the result depends on every bit of `x`.
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
