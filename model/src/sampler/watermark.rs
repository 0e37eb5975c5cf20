//! TGI's watermark: Kirchenbauer, Geiping, Wen, Katz, Miers, Goldstein, "A watermark for large language models", 2023.
//!
//! The token before seeds a permutation of the vocabulary; the first half of it is "green" and gains [`DELTA`]. Seed and
//! permutation are those of TGI 0.9.4 on a CPU (`torch.randperm` with a generator seeded `15485863 * token`), so detectors
//! made for it work. The generator is the Mersenne Twister (Matsumoto and Nishimura, ACM TOMACS 8, 1998).

/// Share of the vocabulary that is green.
const GAMMA: f64 = 0.5;
/// What green tokens gain, in nats.
const DELTA: f32 = 2.0;
/// The token before is multiplied by it.
const HASH_KEY: u64 = 15_485_863;

/// Scratch for [`Watermark::apply`].
#[derive(Debug, Default)]
pub(super) struct Watermark {
    permutation: Vec<u32>,
}

impl Watermark {
    pub(super) fn with_vocabulary(vocab: usize) -> Self {
        Self {
            permutation: Vec::with_capacity(vocab),
        }
    }

    /// Adds [`DELTA`] to the logits of the green tokens behind `previous`.
    pub(super) fn apply(&mut self, logits: &mut [f32], previous: u32) {
        for &token in self.green(logits.len(), previous) {
            // Sums stay finite: an overflow must not turn into "certain".
            let logit = &mut logits[token as usize];
            if *logit != f32::NEG_INFINITY {
                *logit = (*logit + DELTA).min(f32::MAX);
            }
        }
    }

    /// The green tokens behind `previous`.
    fn green(&mut self, vocab: usize, previous: u32) -> &[u32] {
        let count = (vocab as f64 * GAMMA) as usize;
        self.permutation.clear();
        self.permutation.extend(0..vocab as u32);
        let mut random = MersenneTwister::new(HASH_KEY.wrapping_mul(u64::from(previous)) as u32);
        // The rest of the permutation would not change these places any more.
        for i in 0..count {
            let offset = random.next() as usize % (vocab - i);
            self.permutation.swap(i, i + offset);
        }
        &self.permutation[..count]
    }
}

const STATE: usize = 624;
const SHIFT: usize = 397;

/// MT19937.
struct MersenneTwister {
    state: [u32; STATE],
    next: usize,
}

impl MersenneTwister {
    fn new(seed: u32) -> Self {
        let mut state = [seed; STATE];
        for i in 1..STATE {
            let before = state[i - 1];
            state[i] = (before ^ (before >> 30))
                .wrapping_mul(1_812_433_253)
                .wrapping_add(i as u32);
        }
        Self { state, next: STATE }
    }

    fn twist(&mut self) {
        for i in 0..STATE {
            let joined = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % STATE] & 0x7fff_ffff);
            let odd = if joined & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + SHIFT) % STATE] ^ (joined >> 1) ^ odd;
        }
        self.next = 0;
    }

    fn next(&mut self) -> u32 {
        if self.next == STATE {
            self.twist();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_the_published_one() {
        let mut random = MersenneTwister::new(5_489);
        let first: Vec<u32> = (0..3).map(|_| random.next()).collect();
        assert_eq!(first, [3_499_211_612, 581_869_302, 3_890_346_734]);
        // The 10000th number of the default seed, as the C++ standard gives it.
        let mut random = MersenneTwister::new(5_489);
        let last = (0..10_000).map(|_| random.next()).last();
        assert_eq!(last, Some(4_123_659_995));
    }

    #[test]
    fn the_permutation_is_torchs() {
        // torch.manual_seed(0); torch.randperm(10) begins 4, 1, 7, 5, 3.
        assert_eq!(Watermark::default().green(10, 0), [4, 1, 7, 5, 3]);
    }

    #[test]
    fn half_of_the_tokens_gain_and_which_depends_on_the_one_before() {
        let mut watermark = Watermark::default();
        let mut marked = |previous| {
            let mut logits = vec![1.0_f32; 101];
            logits[3] = f32::NEG_INFINITY;
            watermark.apply(&mut logits, previous);
            logits
        };
        let first = marked(7);
        let gained = first.iter().filter(|&&x| x == 3.0).count();
        assert!(gained == 50 || gained == 49, "{gained}");
        assert_eq!(first[3], f32::NEG_INFINITY);
        assert_eq!(first, marked(7));
        assert_ne!(first, marked(8));
    }
}
