//! AVX2: two registers of eight lanes; integer products with AVX-VNNI where the CPU has it.
#![allow(
    unsafe_code,
    reason = "CPU instructions; see `Lanes` for why they are there when these types are used"
)]

use std::arch::x86_64::*;

use super::super::lanes::{IntLanes, Lanes};
use super::{largest_of_eight, sum_of_eight};

/// AVX2, FMA and F16C; AVX-VNNI too if `VNNI`.
#[derive(Clone, Copy)]
pub(in super::super) struct Avx2<const VNNI: bool>([__m256; 2]);

impl<const VNNI: bool> Lanes for Avx2<VNNI> {
    const ROWS: usize = 6;
    const TILES: usize = 1;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        instructions!(Self([_mm256_set1_ps(x); 2]))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        instructions!(Self([_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))]))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        instructions! {
            _mm256_storeu_ps(p, self.0[0]);
            _mm256_storeu_ps(p.add(8), self.0[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        instructions! {
            let (low, high) = (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(16).cast()));
            Self([_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)])
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        instructions! {
            let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0[0]);
            let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0[1]);
            _mm_storeu_si128(p.cast(), low);
            _mm_storeu_si128(p.add(16).cast(), high);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        instructions! {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16).cast()));
            Self([
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ])
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        let (low, high) = (rounded_to_bf16(self.0[0]), rounded_to_bf16(self.0[1]));
        instructions! {
            // Packed within halves of 128 bits: fours 0, 2, 1, 3.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
            _mm256_storeu_si256(p.cast(), packed);
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        instructions! {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            Self([_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)])
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut u8) {
        instructions! {
            let (low, high) = (_mm256_cvtps_epi32(self.0[0]), _mm256_cvtps_epi32(self.0[1]));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(p.cast(), bytes);
        }
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        instructions!(Self([
            _mm256_add_ps(self.0[0], o.0[0]),
            _mm256_add_ps(self.0[1], o.0[1])
        ]))
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        instructions!(Self([
            _mm256_sub_ps(self.0[0], o.0[0]),
            _mm256_sub_ps(self.0[1], o.0[1])
        ]))
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        instructions!(Self([
            _mm256_mul_ps(self.0[0], o.0[0]),
            _mm256_mul_ps(self.0[1], o.0[1])
        ]))
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        instructions!(Self([
            _mm256_div_ps(self.0[0], o.0[0]),
            _mm256_div_ps(self.0[1], o.0[1])
        ]))
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        instructions! {
            let low = _mm256_fmadd_ps(self.0[0], b.0[0], c.0[0]);
            Self([low, _mm256_fmadd_ps(self.0[1], b.0[1], c.0[1])])
        }
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        instructions!(Self([
            _mm256_min_ps(self.0[0], o.0[0]),
            _mm256_min_ps(self.0[1], o.0[1])
        ]))
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        instructions!(Self([
            _mm256_max_ps(self.0[0], o.0[0]),
            _mm256_max_ps(self.0[1], o.0[1])
        ]))
    }
    #[inline(always)]
    fn zero_where_less(self, x: Self, bound: Self) -> Self {
        instructions! {
            let low = _mm256_cmp_ps::<_CMP_LT_OQ>(x.0[0], bound.0[0]);
            let high = _mm256_cmp_ps::<_CMP_LT_OQ>(x.0[1], bound.0[1]);
            Self([_mm256_andnot_ps(low, self.0[0]), _mm256_andnot_ps(high, self.0[1])])
        }
    }
    #[inline(always)]
    fn pow2_of_shifted(self) -> Self {
        instructions! {
            let one = _mm256_set1_epi32(0x3f80_0000);
            let low = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.0[0]));
            let high = _mm256_slli_epi32::<23>(_mm256_castps_si256(self.0[1]));
            let (low, high) = (_mm256_add_epi32(low, one), _mm256_add_epi32(high, one));
            Self([_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)])
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        sum_of_eight(instructions!(_mm256_add_ps(self.0[0], self.0[1])))
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        largest_of_eight(instructions!(_mm256_max_ps(self.0[0], self.0[1])))
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        instructions!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
}

impl<const VNNI: bool> IntLanes for Avx2<VNNI> {
    type Int = [__m256i; 2];
    type Bytes = [__m256i; 2];
    const SEVERAL_ROWS: bool = true;
    const INT_TILES: usize = 1;

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> [__m256i; 2] {
        instructions!([_mm256_load_si256(p.cast()), _mm256_load_si256(p.add(32).cast())])
    }
    #[inline(always)]
    fn plus(b: [__m256i; 2], x: u8) -> [__m256i; 2] {
        instructions! {
            let x = _mm256_set1_epi8(x.cast_signed());
            [_mm256_add_epi8(b[0], x), _mm256_add_epi8(b[1], x)]
        }
    }
    #[inline(always)]
    fn low_nibbles(b: [__m256i; 2]) -> [__m256i; 2] {
        instructions! {
            let mask = _mm256_set1_epi8(15);
            [_mm256_and_si256(b[0], mask), _mm256_and_si256(b[1], mask)]
        }
    }
    #[inline(always)]
    fn high_nibbles(b: [__m256i; 2]) -> [__m256i; 2] {
        Self::low_nibbles(instructions!([
            _mm256_srli_epi16::<4>(b[0]),
            _mm256_srli_epi16::<4>(b[1])
        ]))
    }
    #[inline(always)]
    fn with_bit(b: [__m256i; 2], bits: [__m256i; 2], i: usize) -> [__m256i; 2] {
        instructions! {
            let mask = _mm256_set1_epi8(16);
            let (low, high) = match i {
                0..4 => (shifted_left(bits[0], 4 - i), shifted_left(bits[1], 4 - i)),
                _ => (shifted_right(bits[0], i - 4), shifted_right(bits[1], i - 4)),
            };
            let (low, high) = (_mm256_and_si256(low, mask), _mm256_and_si256(high, mask));
            [_mm256_or_si256(b[0], low), _mm256_or_si256(b[1], high)]
        }
    }
    #[inline(always)]
    fn with_two_bits(b: [__m256i; 2], bits: [__m256i; 2], i: usize) -> [__m256i; 2] {
        instructions! {
            let mask = _mm256_set1_epi8(48);
            let (low, high) = match i {
                0..2 => (shifted_left(bits[0], 4 - 2 * i), shifted_left(bits[1], 4 - 2 * i)),
                _ => (shifted_right(bits[0], 2 * i - 4), shifted_right(bits[1], 2 * i - 4)),
            };
            let (low, high) = (_mm256_and_si256(low, mask), _mm256_and_si256(high, mask));
            [_mm256_or_si256(b[0], low), _mm256_or_si256(b[1], high)]
        }
    }
    #[inline(always)]
    fn int_zero() -> [__m256i; 2] {
        instructions!([_mm256_setzero_si256(); 2])
    }
    #[inline(always)]
    fn shifted<const SHIFT: u32>(x: i32) -> [__m256i; 2] {
        instructions!([_mm256_sll_epi32(_mm256_set1_epi32(x), _mm_cvtsi32_si128(SHIFT.cast_signed())); 2])
    }
    #[inline(always)]
    fn dot_small(acc: [__m256i; 2], w: [__m256i; 2], x: i32) -> [__m256i; 2] {
        let x = instructions!(_mm256_set1_epi32(x));
        if VNNI {
            return instructions!([
                _mm256_dpbusd_avx_epi32(acc[0], w[0], x),
                _mm256_dpbusd_avx_epi32(acc[1], w[1], x)
            ]);
        }
        // At most 2 * 63 * 127 in 16 bits.
        instructions! {
            let one = _mm256_set1_epi16(1);
            let low = _mm256_madd_epi16(_mm256_maddubs_epi16(w[0], x), one);
            let high = _mm256_madd_epi16(_mm256_maddubs_epi16(w[1], x), one);
            [_mm256_add_epi32(acc[0], low), _mm256_add_epi32(acc[1], high)]
        }
    }
    #[inline(always)]
    fn offset_start(negative_128: i32) -> [__m256i; 2] {
        if VNNI {
            Self::shifted::<0>(negative_128)
        } else {
            Self::int_zero()
        }
    }
    #[inline(always)]
    fn dot_offset(acc: [__m256i; 2], w: [__m256i; 2], x: i32) -> [__m256i; 2] {
        if VNNI {
            return Self::dot_small(acc, w, x);
        }
        // The unsigned operand must not exceed 128, or two products would not fit in 16 bits: |w| times x with the
        // sign of w, at most 2 * 128 * 127.
        instructions! {
            let (x, one, offset) = (_mm256_set1_epi32(x), _mm256_set1_epi16(1), _mm256_set1_epi8(-128));
            let (w0, w1) = (_mm256_xor_si256(w[0], offset), _mm256_xor_si256(w[1], offset));
            let low = _mm256_maddubs_epi16(_mm256_abs_epi8(w0), _mm256_sign_epi8(x, w0));
            let high = _mm256_maddubs_epi16(_mm256_abs_epi8(w1), _mm256_sign_epi8(x, w1));
            let (low, high) = (_mm256_madd_epi16(low, one), _mm256_madd_epi16(high, one));
            [_mm256_add_epi32(acc[0], low), _mm256_add_epi32(acc[1], high)]
        }
    }
    #[inline(always)]
    fn to_f32(acc: [__m256i; 2]) -> Self {
        instructions!(Self([_mm256_cvtepi32_ps(acc[0]), _mm256_cvtepi32_ps(acc[1])]))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        instructions! {
            let bytes = _mm_loadu_si128(p.cast());
            Self::to_f32([_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes))])
        }
    }
}

/// 16-bit units times 2^`by`, a constant once inlined.
#[inline(always)]
fn shifted_left(x: __m256i, by: usize) -> __m256i {
    instructions!(_mm256_sll_epi16(x, _mm_cvtsi32_si128(by as i32)))
}

/// 16-bit units over 2^`by`, rounded down; `by` is a constant once inlined.
#[inline(always)]
fn shifted_right(x: __m256i, by: usize) -> __m256i {
    instructions!(_mm256_srl_epi16(x, _mm_cvtsi32_si128(by as i32)))
}

/// Eight f32 rounded to bfloat16, in the low halves of their lanes.
#[inline(always)]
fn rounded_to_bf16(x: __m256) -> __m256i {
    instructions! {
        let bits = _mm256_castps_si256(x);
        let high = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        let quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        _mm256_blendv_epi8(_mm256_srli_epi32::<16>(rounded), quiet, nan)
    }
}
