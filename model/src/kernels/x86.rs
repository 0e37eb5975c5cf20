//! The lanes of x86: AVX-512, and AVX2 with two registers of eight.
#![allow(
    unsafe_code,
    reason = "CPU instructions; see `Lanes` for why they are there when these types are used"
)]

use std::arch::x86_64::*;

use super::lanes::{IntLanes, LANES, Lanes};

/// An expression of instructions and pointer accesses.
macro_rules! instructions {
    ($($e:tt)*) => {
        // SAFETY: `dispatch` uses these types only where the CPU has the instructions; what pointers point to is
        // vouched for by the caller of the (then unsafe) function.
        unsafe { $($e)* }
    };
}

/// AVX-512 F, BW and VL. The integer products need VNNI too.
#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

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
}

impl IntLanes for Avx512 {
    type Int = __m512i;
    type Bytes = __m512i;
    const INT_ROWS: usize = 4;
    const INT_TILES: usize = 2;

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> __m512i {
        instructions!(_mm512_load_si512(p.cast()))
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
    fn int_zero() -> __m512i {
        instructions!(_mm512_setzero_si512())
    }
    #[inline(always)]
    fn dot_nibbles(acc: __m512i, w: __m512i, x: i32) -> __m512i {
        instructions!(_mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x)))
    }
    #[inline(always)]
    fn offset_start(sum: i32) -> __m512i {
        instructions!(_mm512_set1_epi32(sum.wrapping_mul(-128)))
    }
    #[inline(always)]
    fn dot_offset(acc: __m512i, w: __m512i, x: i32) -> __m512i {
        instructions!(_mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x)))
    }
    #[inline(always)]
    fn to_f32(acc: __m512i) -> Self {
        instructions!(Self(_mm512_cvtepi32_ps(acc)))
    }
}

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2([__m256; 2]);

impl Lanes for Avx2 {
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

/// The tree of [`Lanes::sum`] from the second step on.
#[inline(always)]
fn sum_of_eight(x: __m256) -> f32 {
    instructions! {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    }
}

/// The same for [`Lanes::largest`].
#[inline(always)]
fn largest_of_eight(x: __m256) -> f32 {
    instructions! {
        let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
    }
}

impl IntLanes for Avx2 {
    type Int = [__m256i; 2];
    type Bytes = [__m256i; 2];
    const INT_ROWS: usize = 3;
    const INT_TILES: usize = 1;

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> [__m256i; 2] {
        instructions!([_mm256_load_si256(p.cast()), _mm256_load_si256(p.add(32).cast())])
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
    fn int_zero() -> [__m256i; 2] {
        instructions!([_mm256_setzero_si256(); 2])
    }
    #[inline(always)]
    fn dot_nibbles(acc: [__m256i; 2], w: [__m256i; 2], x: i32) -> [__m256i; 2] {
        // At most 2 * 15 * 127 in 16 bits.
        instructions! {
            let (x, one) = (_mm256_set1_epi32(x), _mm256_set1_epi16(1));
            let low = _mm256_madd_epi16(_mm256_maddubs_epi16(w[0], x), one);
            let high = _mm256_madd_epi16(_mm256_maddubs_epi16(w[1], x), one);
            [_mm256_add_epi32(acc[0], low), _mm256_add_epi32(acc[1], high)]
        }
    }
    #[inline(always)]
    fn offset_start(_sum: i32) -> [__m256i; 2] {
        Self::int_zero()
    }
    #[inline(always)]
    fn dot_offset(acc: [__m256i; 2], w: [__m256i; 2], x: i32) -> [__m256i; 2] {
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
}
