//! Activations rounded to int8 in blocks of 32 of k, each half of a block with its own f32 scale.
//!
//! (llama.cpp's Q8_1 has one scale for all 32; with two the distance of a model's log-probabilities from exact arithmetic
//! shrinks by a third, for one more multiply-add in twelve.) Where that is not enough, [`super::rounding`] makes a second block
//! of what the first one lost, and the product takes both: then activations have about 15 bits.
use super::math::ROUND;
use super::pack::BLOCK;

/// Activations that share a scale.
pub(super) const HALF: usize = BLOCK / 2;

/// 32 activations: value = d * q, with the d of its half.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Int8Block {
    pub(super) qs: [i8; BLOCK],
    /// Scales of the halves. NaN if one of the values is not finite, which makes the outputs NaN.
    pub(super) d: [f32; 2],
    /// Minus the sums of the `qs` of the halves, which an offset of the weights is multiplied with.
    pub(super) negative: [i32; 2],
    /// 128 times [`Int8Block::negative`], for eight-bit weights.
    pub(super) negative_128: [i32; 2],
    /// `d * sum` over both halves: what a weight block's minimum is multiplied with.
    pub(super) scaled_sum: f32,
}

impl Int8Block {
    pub(super) const ZERO: Self = Self {
        qs: [0; BLOCK],
        d: [0.0; 2],
        negative: [0; 2],
        negative_128: [0; 2],
        scaled_sum: 0.0,
    };

    /// Rounds 32 values: scale = largest of the half / 127, ties to even.
    #[inline(always)]
    pub(super) fn new(x: &[f32; BLOCK]) -> Self {
        let mut block = Self::ZERO;
        let (halves, _) = x.as_chunks::<HALF>();
        for (i, x) in halves.iter().enumerate() {
            // As bits, so that infinity and NaN count as largest.
            let largest = x.iter().fold(0u32, |a, x| a.max(x.to_bits() & 0x7fff_ffff));
            let largest = f32::from_bits(largest);
            // Below 1e-30 the inverse of the scale would overflow.
            let (d, inverse) = if largest < 1e-30 {
                (0.0, 0.0)
            } else if largest.is_finite() {
                (largest / 127.0, 127.0 / largest)
            } else {
                (f32::NAN, 0.0)
            };
            let mut negative = 0i32;
            if !d.is_nan() {
                for (q, x) in block.qs[i * HALF..][..HALF].iter_mut().zip(x) {
                    let shifted = x * inverse + ROUND;
                    // |q| <= 127 by the choice of the scale.
                    let value = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
                    *q = value as i8;
                    negative = negative.wrapping_sub(value);
                }
            }
            block.d[i] = d;
            block.negative[i] = negative;
            block.negative_128[i] = 128 * negative;
        }
        let sums = block.negative.map(|sum| sum.wrapping_neg() as f32);
        block.scaled_sum = block.d[0] * sums[0] + block.d[1] * sums[1];
        block
    }

    /// What rounding has taken away: `x` minus this block's values.
    #[inline(always)]
    pub(super) fn remainder(&self, x: &[f32; BLOCK]) -> [f32; BLOCK] {
        // A loop: what `from_fn` calls would not be compiled with the CPU's vectors.
        let mut out = *x;
        for (i, d) in self.d.into_iter().enumerate() {
            for (out, &q) in out[i * HALF..][..HALF].iter_mut().zip(&self.qs[i * HALF..][..HALF]) {
                *out -= d * f32::from(q);
            }
        }
        out
    }
}

/// Rows whose blocks lie side by side, so that a register tile finds its rows at fixed distances.
pub(super) const GROUP: usize = 8;

/// Index of a row's block among the activations, which are in the order (group of rows, pass, block, row of the group).
/// (The distance of a row's blocks is a constant: with one that depends on the passes the compiler lets the sums of a
/// register tile spill, and the product takes twice the time.)
#[inline(always)]
pub(super) fn block_index(row: usize, (pass, passes): (usize, usize), block: usize, blocks: usize) -> usize {
    ((row / GROUP * passes + pass) * blocks + block) * GROUP + row % GROUP
}
