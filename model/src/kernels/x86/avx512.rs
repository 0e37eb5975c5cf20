//! AVX-512: one register of sixteen lanes.
#![allow(
    unsafe_code,
    reason = "CPU instructions; see `Lanes` for why they are there when these types are used"
)]

use std::arch::x86_64::*;

use super::super::int8_block::Int8Block;
use super::super::lanes::{IntLanes, LANES, Lanes};
use super::{largest_of_eight, rounding, sum_of_eight};

/// `a | b & c` as a truth table.
const A_OR_MASKED: i32 = 0xf8;

/// AVX-512 F, BW and VL. The integer products need VNNI too.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx512(__m512);

impl Lanes for Avx512 {
    const ROWS: usize = 8;
    const TILES: usize = 2;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        instructions!(Self(_mm512_set1_ps(x)))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        instructions!(Self(_mm512_loadu_ps(p)))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        instructions!(_mm512_storeu_ps(p, self.0))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        instructions!(Self(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        instructions!(_mm256_storeu_si256(
            p.cast(),
            _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)
        ))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        instructions! {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        // In integers: the instruction for it takes subnormal numbers for zero.
        instructions! {
            let bits = _mm512_castps_si512(self.0);
            let high = _mm512_srli_epi32::<16>(bits);
            let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
            let quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
            let out = _mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(rounded), nan, quiet);
            _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(out));
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        instructions!(Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(
            p.cast()
        )))))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut u8) {
        instructions!(_mm_storeu_si128(
            p.cast(),
            _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(self.0))
        ))
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        instructions!(Self(_mm512_add_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        instructions!(Self(_mm512_sub_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        instructions!(Self(_mm512_mul_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        instructions!(Self(_mm512_div_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        instructions!(Self(_mm512_fmadd_ps(self.0, b.0, c.0)))
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        instructions!(Self(_mm512_min_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        instructions!(Self(_mm512_max_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn zero_where_less(self, x: Self, bound: Self) -> Self {
        // Not less, or not ordered.
        instructions!(Self(_mm512_maskz_mov_ps(
            _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x.0, bound.0),
            self.0
        )))
    }
    #[inline(always)]
    fn pow2_of_shifted(self) -> Self {
        instructions! {
            let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.0));
            Self(_mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3f80_0000))))
        }
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        instructions!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        instructions! {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0)));
            sum_of_eight(_mm256_add_ps(_mm512_castps512_ps256(self.0), high))
        }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        instructions! {
            let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(self.0)));
            largest_of_eight(_mm256_max_ps(_mm512_castps512_ps256(self.0), high))
        }
    }
    #[inline(always)]
    fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        instructions! {
            // Pairs of rows: each 128-bit part then holds elements 4 p, 4 p + 1 (or + 2, + 3) of two rows.
            let mut a = [_mm512_setzero_ps(); LANES];
            for i in 0..8 {
                a[2 * i] = _mm512_unpacklo_ps(rows[2 * i].0, rows[2 * i + 1].0);
                a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].0, rows[2 * i + 1].0);
            }
            // Fours of rows: part p of b[4 i + j] holds element 4 p + j of rows 4 i to 4 i + 3.
            let mut b = [_mm512_setzero_ps(); LANES];
            for i in 0..4 {
                for half in 0..2 {
                    let lower = _mm512_castps_pd(a[4 * i + half]);
                    let upper = _mm512_castps_pd(a[4 * i + 2 + half]);
                    b[4 * i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(lower, upper));
                    b[4 * i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lower, upper));
                }
            }
            // Gather the parts p of the four fours.
            let mut out = rows;
            for j in 0..4 {
                let low01 = _mm512_shuffle_f32x4::<0b01_00_01_00>(b[j], b[4 + j]);
                let high01 = _mm512_shuffle_f32x4::<0b11_10_11_10>(b[j], b[4 + j]);
                let low23 = _mm512_shuffle_f32x4::<0b01_00_01_00>(b[8 + j], b[12 + j]);
                let high23 = _mm512_shuffle_f32x4::<0b11_10_11_10>(b[8 + j], b[12 + j]);
                out[j] = Self(_mm512_shuffle_f32x4::<0b10_00_10_00>(low01, low23));
                out[4 + j] = Self(_mm512_shuffle_f32x4::<0b11_01_11_01>(low01, low23));
                out[8 + j] = Self(_mm512_shuffle_f32x4::<0b10_00_10_00>(high01, high23));
                out[12 + j] = Self(_mm512_shuffle_f32x4::<0b11_01_11_01>(high01, high23));
            }
            out
        }
    }
    #[inline(always)]
    unsafe fn round_eight<const REST: bool>(x: *const f32, out: *mut Int8Block, rest: *mut f32) -> bool {
        // SAFETY: passed on from the caller.
        unsafe { rounding::round_eight::<REST>(x, out, rest) }
    }
}

impl IntLanes for Avx512 {
    type Int = __m512i;
    type Bytes = __m512i;
    const SEVERAL_ROWS: bool = true;
    const INT_TILES: usize = 2;

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> __m512i {
        instructions!(_mm512_load_si512(p.cast()))
    }
    #[inline(always)]
    fn plus(b: __m512i, x: u8) -> __m512i {
        instructions!(_mm512_add_epi8(b, _mm512_set1_epi8(x.cast_signed())))
    }
    #[inline(always)]
    fn low_nibbles(b: __m512i) -> __m512i {
        instructions!(_mm512_and_si512(b, _mm512_set1_epi8(15)))
    }
    #[inline(always)]
    fn high_nibbles(b: __m512i) -> __m512i {
        instructions!(_mm512_and_si512(_mm512_srli_epi16::<4>(b), _mm512_set1_epi8(15)))
    }
    #[inline(always)]
    fn with_bit(b: __m512i, bits: __m512i, i: usize) -> __m512i {
        // Shifts of 16-bit units: what crosses from byte to byte is masked.
        instructions! {
            let bit = match i {
                0 => _mm512_slli_epi16::<4>(bits),
                1 => _mm512_slli_epi16::<3>(bits),
                2 => _mm512_slli_epi16::<2>(bits),
                3 => _mm512_slli_epi16::<1>(bits),
                4 => bits,
                5 => _mm512_srli_epi16::<1>(bits),
                6 => _mm512_srli_epi16::<2>(bits),
                _ => _mm512_srli_epi16::<3>(bits),
            };
            _mm512_ternarylogic_epi32::<A_OR_MASKED>(b, bit, _mm512_set1_epi8(16))
        }
    }
    #[inline(always)]
    fn with_two_bits(b: __m512i, bits: __m512i, i: usize) -> __m512i {
        instructions! {
            let two = match i {
                0 => _mm512_slli_epi16::<4>(bits),
                1 => _mm512_slli_epi16::<2>(bits),
                2 => bits,
                _ => _mm512_srli_epi16::<2>(bits),
            };
            _mm512_ternarylogic_epi32::<A_OR_MASKED>(b, two, _mm512_set1_epi8(48))
        }
    }
    #[inline(always)]
    fn int_zero() -> __m512i {
        instructions!(_mm512_setzero_si512())
    }
    #[inline(always)]
    fn shifted<const SHIFT: u32>(x: i32) -> __m512i {
        instructions!(_mm512_slli_epi32::<SHIFT>(_mm512_set1_epi32(x)))
    }
    #[inline(always)]
    fn dot_small(acc: __m512i, w: __m512i, x: i32) -> __m512i {
        instructions!(_mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x)))
    }
    #[inline(always)]
    fn offset_start(negative_128: i32) -> __m512i {
        Self::shifted::<0>(negative_128)
    }
    #[inline(always)]
    fn dot_offset(acc: __m512i, w: __m512i, x: i32) -> __m512i {
        Self::dot_small(acc, w, x)
    }
    #[inline(always)]
    fn to_f32(acc: __m512i) -> Self {
        instructions!(Self(_mm512_cvtepi32_ps(acc)))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        instructions!(Self(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(
            p.cast()
        )))))
    }
}
