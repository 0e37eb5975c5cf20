//! Checked numbers to sampling parameters: what both endpoint families share.

use protocol::sampling::SamplingParams;

/// Bounds within which the model's arithmetic (single precision) is sound. Values beyond them act like the bound: the
/// distribution is flat, or all on one token, long before.
const FLATTEST: f64 = 1e6;
const SHARPEST: f64 = 1e-6;

/// A temperature or a repetition penalty, as the nodes compute with it.
pub fn factor(value: f64) -> f32 {
    value.clamp(SHARPEST, FLATTEST) as f32
}

/// A probability mass, as the nodes compute with it: never rounded to 0, which would keep no token.
pub fn mass(value: f64) -> f32 {
    (value as f32).max(f32::MIN_POSITIVE)
}

/// A `top_k` of at least the vocabulary keeps everything: that is 0, off.
pub fn top_k(value: u32, vocab_size: usize) -> u32 {
    if value as usize >= vocab_size { 0 } else { value }
}

/// Greedy decoding that still draws nothing, with the given seed for the record.
pub fn greedy(seed: u64) -> SamplingParams {
    SamplingParams {
        seed,
        ..SamplingParams::greedy()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extreme_numbers_stay_sound() {
        assert_eq!(factor(1e300), 1e6);
        assert_eq!(factor(1e-300), 1e-6);
        assert_eq!(factor(1.03), 1.03);
        assert!(mass(1e-300) > 0.0);
        assert_eq!(top_k(10, 10), 0);
        assert_eq!(top_k(9, 10), 9);
    }
}
