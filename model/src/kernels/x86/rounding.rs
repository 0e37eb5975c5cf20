//! Rounding of activations with AVX-512: eight blocks at a time, so that one division makes the scales of sixteen halves,
//! and what is summed over a half is summed for sixteen of them in one tree.
#![allow(unsafe_code, reason = "CPU instructions; reads and writes through pointers")]

use std::arch::x86_64::*;

use super::super::int8_block::{GROUP, HALF, Int8Block};
use super::super::lanes::LANES;

/// Lane i is what the lanes of vector i come to with an operation that may take them in any order. Each step makes one
/// vector of two. (A macro, since closures are not compiled with the caller's instructions.)
macro_rules! reduced {
    ($rows:ident, $operation:ident) => {{
        // Part p of a[i]: elements 4 p + (0, 2) and 4 p + (1, 3) of rows 2 i and 2 i + 1.
        let mut a = [_mm512_setzero_si512(); 8];
        for i in 0..8 {
            let (even, odd) = ($rows[2 * i], $rows[2 * i + 1]);
            a[i] = $operation(_mm512_unpacklo_epi32(even, odd), _mm512_unpackhi_epi32(even, odd));
        }
        // Part p of b[i]: elements 4 p to 4 p + 3 of rows 4 i to 4 i + 3.
        let mut b = [_mm512_setzero_si512(); 4];
        for i in 0..4 {
            let (lower, upper) = (a[2 * i], a[2 * i + 1]);
            b[i] = $operation(_mm512_unpacklo_epi64(lower, upper), _mm512_unpackhi_epi64(lower, upper));
        }
        // Gather the parts.
        let mut c = [_mm512_setzero_si512(); 2];
        for i in 0..2 {
            let (lower, upper) = (b[2 * i], b[2 * i + 1]);
            let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(lower, upper);
            c[i] = $operation(even, _mm512_shuffle_i32x4::<0b11_01_11_01>(lower, upper));
        }
        let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(c[0], c[1]);
        $operation(even, _mm512_shuffle_i32x4::<0b11_01_11_01>(c[0], c[1]))
    }};
}

/// See [`super::super::lanes::Lanes::round_eight`].
///
/// # Safety
/// As there; the CPU must have AVX-512 F, BW and VL.
#[inline(always)]
pub(super) unsafe fn round_eight<const REST: bool>(x: *const f32, out: *mut Int8Block, rest: *mut f32) -> bool {
    instructions! {
        // As bits, so that infinity and NaN count as largest.
        let mut magnitudes = [_mm512_setzero_si512(); LANES];
        for (i, magnitude) in magnitudes.iter_mut().enumerate() {
            let bits = _mm512_castps_si512(_mm512_loadu_ps(x.add(i * HALF)));
            *magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fff_ffff));
        }
        let largest = reduced!(magnitudes, _mm512_max_epu32);
        if _mm512_cmpge_epu32_mask(largest, _mm512_set1_epi32(0x7f80_0000)) != 0 {
            return false;
        }
        let (largest, steps) = (_mm512_castsi512_ps(largest), _mm512_set1_ps(127.0));
        let scaled = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(largest, _mm512_set1_ps(1e-30));
        let d = _mm512_maskz_div_ps(scaled, largest, steps);
        let (mut scales, mut inverses) = ([0.0; LANES], [0.0; LANES]);
        _mm512_storeu_ps(inverses.as_mut_ptr(), _mm512_maskz_div_ps(scaled, steps, largest));
        if REST {
            _mm512_storeu_ps(scales.as_mut_ptr(), d);
        }
        let mut quants = [_mm512_setzero_si512(); LANES];
        for i in 0..LANES {
            let values = _mm512_loadu_ps(x.add(i * HALF));
            quants[i] = _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(inverses[i])));
            let to = out.add(i / 2 * GROUP).cast::<u8>().add(i % 2 * HALF);
            _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(quants[i]));
            if REST {
                let rounded = _mm512_mul_ps(_mm512_set1_ps(scales[i]), _mm512_cvtepi32_ps(quants[i]));
                _mm512_storeu_ps(rest.add(i * HALF), _mm512_sub_ps(values, rounded));
            }
        }
        let sums = reduced!(quants, _mm512_add_epi32);
        let negative = _mm512_sub_epi32(_mm512_setzero_si512(), sums);
        let negative_128 = _mm512_slli_epi32::<7>(negative);
        let products = _mm512_mul_ps(d, _mm512_cvtepi32_ps(sums));
        // Lane 2 i: the sum of block i.
        let scaled_sums = _mm512_maskz_add_ps(0x5555, products, _mm512_movehdup_ps(products));
        let (d, scaled_sums) = (_mm512_castps_si512(d), _mm512_castps_si512(scaled_sums));
        // Part p: of block 2 p, then of block 2 p + 1.
        write_parts::<0, 0>(out, _mm512_unpacklo_epi64(d, negative));
        write_parts::<1, 0>(out, _mm512_unpackhi_epi64(d, negative));
        write_parts::<0, 1>(out, _mm512_unpacklo_epi64(negative_128, scaled_sums));
        write_parts::<1, 1>(out, _mm512_unpackhi_epi64(negative_128, scaled_sums));
        true
    }
}

/// Writes part p of a vector to block `2 p + ODD`: the third 16 bytes (AT 0) or the last (AT 1).
///
/// # Safety
/// As [`round_eight`].
#[inline(always)]
unsafe fn write_parts<const ODD: usize, const AT: usize>(out: *mut Int8Block, parts: __m512i) {
    const { assert!(size_of::<Int8Block>() == 64, "quants, scales, two sums, scaled sum") };
    instructions! {
        let to = out.add(ODD * GROUP).cast::<u8>().add(32 + 16 * AT);
        let step = 2 * GROUP * size_of::<Int8Block>();
        _mm_storeu_si128(to.cast(), _mm512_castsi512_si128(parts));
        _mm_storeu_si128(to.add(step).cast(), _mm512_extracti32x4_epi32::<1>(parts));
        _mm_storeu_si128(to.add(2 * step).cast(), _mm512_extracti32x4_epi32::<2>(parts));
        _mm_storeu_si128(to.add(3 * step).cast(), _mm512_extracti32x4_epi32::<3>(parts));
    }
}
