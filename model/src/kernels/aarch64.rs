//! The lanes of aarch64: NEON with four registers of four lanes; integer products with the dot product instruction.
#![allow(
    unsafe_code,
    reason = "CPU instructions; see `Lanes` for why they are there when these types are used"
)]

use std::arch::aarch64::*;
use std::arch::asm;

use super::lanes::{IntLanes, LANES, Lanes};

/// An expression of instructions and pointer accesses.
macro_rules! instructions {
    ($($e:tt)*) => {
        // SAFETY: `dispatch` uses these types only where the CPU has the instructions; what pointers point to is
        // vouched for by the caller of the (then unsafe) function.
        unsafe { $($e)* }
    };
}

/// An expression for each of the four registers, `$i`. (A macro, because a closure might not be inlined.)
macro_rules! four {
    ($i:ident => $e:expr) => {
        instructions! {[
            { const $i: usize = 0; $e },
            { const $i: usize = 1; $e },
            { const $i: usize = 2; $e },
            { const $i: usize = 3; $e },
        ]}
    };
}

/// NEON with the dot product of signed bytes.
#[derive(Clone, Copy)]
pub(super) struct Neon([float32x4_t; 4]);

impl Lanes for Neon {
    // 24 registers of sums, four of weights and one of activations: of 32.
    const ROWS: usize = 6;
    const TILES: usize = 1;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        instructions!(Self([vdupq_n_f32(x); 4]))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Self(four!(I => vld1q_f32(p.add(4 * I))))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        four!(I => vst1q_f32(p.add(4 * I), self.0[I]));
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        Self(four!(I => vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p.add(8 * I))))))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        four!(I => vst1_u8(p.add(8 * I), vreinterpret_u8_f16(vcvt_f16_f32(self.0[I]))));
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        Self(four!(I => vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(p.add(8 * I)))))))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        four!(I => vst1_u8(p.add(8 * I), vreinterpret_u8_u16(rounded_to_bf16(self.0[I]))));
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        instructions! {
            let bytes = vld1q_s8(p.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            Self::to_f32([
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ])
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut u8) {
        let whole = four!(I => vmovn_s32(vcvtnq_s32_f32(self.0[I])));
        instructions! {
            let (low, high) = (vcombine_s16(whole[0], whole[1]), vcombine_s16(whole[2], whole[3]));
            vst1q_s8(p.cast(), vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
        }
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        Self(four!(I => vaddq_f32(self.0[I], o.0[I])))
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        Self(four!(I => vsubq_f32(self.0[I], o.0[I])))
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        Self(four!(I => vmulq_f32(self.0[I], o.0[I])))
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        Self(four!(I => vdivq_f32(self.0[I], o.0[I])))
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Self(four!(I => vfmaq_f32(c.0[I], self.0[I], b.0[I])))
    }
    // Comparisons and selections: the instructions for minima and maxima have other rules for NaN and zeros.
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        Self(four!(I => vbslq_f32(vcltq_f32(self.0[I], o.0[I]), self.0[I], o.0[I])))
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        Self(four!(I => vbslq_f32(vcgtq_f32(self.0[I], o.0[I]), self.0[I], o.0[I])))
    }
    #[inline(always)]
    fn zero_where_less(self, x: Self, bound: Self) -> Self {
        Self(four!(I => {
            let less = vcltq_f32(x.0[I], bound.0[I]);
            vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(self.0[I]), less))
        }))
    }
    #[inline(always)]
    fn pow2_of_shifted(self) -> Self {
        Self(four!(I => {
            let n = vshlq_n_u32::<23>(vreinterpretq_u32_f32(self.0[I]));
            vreinterpretq_f32_u32(vaddq_u32(n, vdupq_n_u32(0x3f80_0000)))
        }))
    }
    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a hint, which faults nowhere.
        unsafe { asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags)) }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        instructions! {
            let x = vaddq_f32(vaddq_f32(self.0[0], self.0[2]), vaddq_f32(self.0[1], self.0[3]));
            let x = vadd_f32(vget_low_f32(x), vget_high_f32(x));
            vpadds_f32(x)
        }
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        instructions! {
            let x = larger(larger(self.0[0], self.0[2]), larger(self.0[1], self.0[3]));
            let (low, high) = (vget_low_f32(x), vget_high_f32(x));
            let x = vbsl_f32(vcgt_f32(low, high), low, high);
            let (low, high) = (vget_lane_f32::<0>(x), vget_lane_f32::<1>(x));
            if low > high { low } else { high }
        }
    }
    #[inline(always)]
    fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        let mut out = rows;
        for i in 0..4 {
            for j in 0..4 {
                // Rows 4 i to 4 i + 3, columns 4 j to 4 j + 3.
                let part = [
                    rows[4 * i].0[j],
                    rows[4 * i + 1].0[j],
                    rows[4 * i + 2].0[j],
                    rows[4 * i + 3].0[j],
                ];
                let part = transposed(part);
                for (column, values) in part.into_iter().enumerate() {
                    out[4 * j + column].0[i] = values;
                }
            }
        }
        out
    }
}

impl IntLanes for Neon {
    type Int = [int32x4_t; 4];
    type Bytes = [uint8x16_t; 4];
    const SEVERAL_ROWS: bool = true;
    const INT_TILES: usize = 1;

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> [uint8x16_t; 4] {
        four!(I => vld1q_u8(p.add(16 * I)))
    }
    #[inline(always)]
    fn plus(b: [uint8x16_t; 4], x: u8) -> [uint8x16_t; 4] {
        four!(I => vaddq_u8(b[I], vdupq_n_u8(x)))
    }
    #[inline(always)]
    fn low_nibbles(b: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        four!(I => vandq_u8(b[I], vdupq_n_u8(15)))
    }
    #[inline(always)]
    fn high_nibbles(b: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        four!(I => vshrq_n_u8::<4>(b[I]))
    }
    #[inline(always)]
    fn with_bit(b: [uint8x16_t; 4], bits: [uint8x16_t; 4], i: usize) -> [uint8x16_t; 4] {
        four!(I => {
            let bit = match i {
                0 => vshlq_n_u8::<4>(bits[I]),
                1 => vshlq_n_u8::<3>(bits[I]),
                2 => vshlq_n_u8::<2>(bits[I]),
                3 => vshlq_n_u8::<1>(bits[I]),
                4 => bits[I],
                5 => vshrq_n_u8::<1>(bits[I]),
                6 => vshrq_n_u8::<2>(bits[I]),
                _ => vshrq_n_u8::<3>(bits[I]),
            };
            vorrq_u8(b[I], vandq_u8(bit, vdupq_n_u8(16)))
        })
    }
    #[inline(always)]
    fn with_two_bits(b: [uint8x16_t; 4], bits: [uint8x16_t; 4], i: usize) -> [uint8x16_t; 4] {
        four!(I => {
            let two = match i {
                0 => vshlq_n_u8::<4>(bits[I]),
                1 => vshlq_n_u8::<2>(bits[I]),
                2 => bits[I],
                _ => vshrq_n_u8::<2>(bits[I]),
            };
            vorrq_u8(b[I], vandq_u8(two, vdupq_n_u8(48)))
        })
    }
    #[inline(always)]
    fn int_zero() -> [int32x4_t; 4] {
        instructions!([vdupq_n_s32(0); 4])
    }
    #[inline(always)]
    fn shifted<const SHIFT: u32>(x: i32) -> [int32x4_t; 4] {
        instructions!([vdupq_n_s32(x << SHIFT); 4])
    }
    #[inline(always)]
    fn dot_small(acc: [int32x4_t; 4], w: [uint8x16_t; 4], x: i32) -> [int32x4_t; 4] {
        // Bytes up to 63 are the same with a sign.
        four!(I => dot(acc[I], vreinterpretq_s8_u8(w[I]), vreinterpretq_s8_s32(vdupq_n_s32(x))))
    }
    #[inline(always)]
    fn offset_start(_negative_128: i32) -> [int32x4_t; 4] {
        Self::int_zero()
    }
    #[inline(always)]
    fn dot_offset(acc: [int32x4_t; 4], w: [uint8x16_t; 4], x: i32) -> [int32x4_t; 4] {
        // Without the offset they are signed bytes.
        Self::dot_small(acc, four!(I => veorq_u8(w[I], vdupq_n_u8(128))), x)
    }
    #[inline(always)]
    fn to_f32(acc: [int32x4_t; 4]) -> Self {
        Self(four!(I => vcvtq_f32_s32(acc[I])))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        instructions! {
            let bytes = vld1q_u8(p);
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
            Self([
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
                vcvtq_f32_u32(vmovl_high_u16(low)),
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
                vcvtq_f32_u32(vmovl_high_u16(high)),
            ])
        }
    }
}

/// `acc + sum of 4 products` of signed bytes in each lane.
#[inline(always)]
pub(super) fn dot(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // The compiler's own function for this instruction is not stable. The extension is named because a copy of this
    // function that was not inlined would be compiled without it.
    instructions! {
        asm!(
            ".arch_extension dotprod",
            "sdot {acc:v}.4s, {w:v}.16b, {x:v}.16b",
            acc = inlateout(vreg) acc,
            w = in(vreg) w,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// `if a > b { a } else { b }`.
#[inline(always)]
fn larger(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    instructions!(vbslq_f32(vcgtq_f32(a, b), a, b))
}

/// Four f32 rounded to bfloat16.
#[inline(always)]
fn rounded_to_bf16(x: float32x4_t) -> uint16x4_t {
    instructions! {
        let bits = vreinterpretq_u32_f32(x);
        let high = vshrq_n_u32::<16>(bits);
        let odd = vandq_u32(high, vdupq_n_u32(1));
        let rounded = vshrq_n_u32::<16>(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd));
        let quiet = vorrq_u32(high, vdupq_n_u32(0x40));
        vmovn_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet))
    }
}

/// Rows and columns of a four by four exchanged.
#[inline(always)]
fn transposed(rows: [float32x4_t; 4]) -> [float32x4_t; 4] {
    instructions! {
        // Even and odd columns of two rows each, in pairs.
        let even0 = vreinterpretq_f64_f32(vtrn1q_f32(rows[0], rows[1]));
        let odd0 = vreinterpretq_f64_f32(vtrn2q_f32(rows[0], rows[1]));
        let even2 = vreinterpretq_f64_f32(vtrn1q_f32(rows[2], rows[3]));
        let odd2 = vreinterpretq_f64_f32(vtrn2q_f32(rows[2], rows[3]));
        [
            vreinterpretq_f32_f64(vtrn1q_f64(even0, even2)),
            vreinterpretq_f32_f64(vtrn1q_f64(odd0, odd2)),
            vreinterpretq_f32_f64(vtrn2q_f64(even0, even2)),
            vreinterpretq_f32_f64(vtrn2q_f64(odd0, odd2)),
        ]
    }
}
