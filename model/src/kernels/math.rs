//! The exponential function over lanes: the same bits at every level.

use std::f32::consts::LN_2;

use super::lanes::{LANES, Lanes};

/// 1.5 * 2^23: adding it rounds to an integer, ties to even, and leaves the integer in the low bits.
pub(super) const ROUND: f32 = 12_582_912.0;
/// Below this, e^x is less than the smallest normal number and is taken as 0.
const LOWEST: f32 = -87.336_54;
/// Above this, e^x is cut off (at 2.4e38) instead of becoming infinite.
const HIGHEST: f32 = 88.376_26;

/// e^x, within 2 units in the last place; 0 below -87.34, 2.4e38 above 88.38, NaN for NaN; exactly 1 for 0.
///
/// Cody and Waite's reduction to |r| <= ln(2)/2 with ln(2) in two parts, then the degree-7 Taylor-like minimax
/// polynomial of the Cephes library's `expf`.
#[inline(always)]
pub(super) fn exp<S: Lanes>(x: S) -> S {
    let clamped = S::splat(LOWEST).max(S::splat(HIGHEST).min(x));
    let shifted = clamped.fma(S::splat(std::f32::consts::LOG2_E), S::splat(ROUND));
    let n = shifted.sub(S::splat(ROUND));
    let r = n.fma(S::splat(-0.693_359_4), clamped);
    let r = n.fma(S::splat(2.121_944_4e-4), r);
    let mut p = S::splat(1.987_569_2e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5, 1.0, 1.0] {
        p = p.fma(r, S::splat(c));
    }
    p.mul(shifted.pow2_of_shifted()).zero_where_less(x, S::splat(LOWEST))
}

/// 2^x for x <= 0, within 2 units in the last place; exactly 1 for 0, exactly 0 below -126.5, NaN for NaN.
///
/// x = n + r with an integer n and |r| <= 1/2; 2^r is 1 + r times a polynomial fitted for the least largest relative
/// error there (1.05e-7 in exact arithmetic).
#[inline(always)]
pub(super) fn exp2<S: Lanes>(x: S) -> S {
    let clamped = S::splat(-127.0).max(x);
    let shifted = clamped.add(S::splat(ROUND));
    let r = clamped.sub(shifted.sub(S::splat(ROUND)));
    let mut p = S::splat(1.330_060_5e-3);
    for c in [9.669_691e-3, 5.550_558_5e-2, 0.240_222_83, LN_2, 1.0] {
        p = p.fma(r, S::splat(c));
    }
    p.mul(shifted.pow2_of_shifted())
}

/// cap * tanh(x / cap), within 2e-7 of cap; `factor` is -2 / cap.
#[inline(always)]
pub(super) fn soft_cap<S: Lanes>(x: S, cap: f32, factor: f32) -> S {
    // tanh(y) = (1 - e^-2y) / (1 + e^-2y)
    let (one, power) = (S::splat(1.0), exp(x.mul(S::splat(factor))));
    one.sub(power).div(one.add(power)).mul(S::splat(cap))
}

/// 16 values of a slice from `at` on; zeros beyond its end.
#[inline(always)]
pub(super) fn load_part<S: Lanes>(x: &[f32], at: usize) -> S {
    if let Some(full) = x.get(at..at + LANES).and_then(|s| s.first_chunk::<LANES>()) {
        return S::from_array(*full);
    }
    let mut padded = [0.0; LANES];
    let rest = x.get(at..).unwrap_or(&[]);
    padded[..rest.len()].copy_from_slice(rest);
    S::from_array(padded)
}

/// Writes 16 lanes to a slice from `at` on; those beyond its end are dropped.
#[inline(always)]
pub(super) fn store_part<S: Lanes>(v: S, x: &mut [f32], at: usize) {
    let lanes = v.to_array();
    if let Some(full) = x.get_mut(at..at + LANES).and_then(|s| s.first_chunk_mut::<LANES>()) {
        *full = lanes;
    } else if let Some(rest) = x.get_mut(at..) {
        rest.copy_from_slice(&lanes[..rest.len()]);
    }
}
