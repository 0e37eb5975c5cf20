//! Sixteen lanes of f32, and of int32 for integer products: what the kernels are written over.
//!
//! The portable implementation here is the meaning of every operation; the others (modules `x86` and `aarch64`) must agree
//! with it bit for bit, which `tests::lanes` checks. Operations are single IEEE operations or exact, so this is possible.
#![allow(
    unsafe_code,
    reason = "kernels read and write through pointers, with strides that slices cannot express"
)]

use std::array::from_fn;

use half::{bf16, f16};

#[cfg(doc)]
use super::int8_block::GROUP;
use super::int8_block::Int8Block;

/// Lanes of a vector, and columns of a tile of weights.
pub(super) const LANES: usize = 16;

/// Sixteen f32. A type of this trait is used only where the CPU has its instructions: `dispatch` sees to that, and no
/// other module names an implementation (except tests, which ask the CPU first).
pub(super) trait Lanes: Copy {
    /// Most rows of a register tile when it is narrow (see `gemm`).
    const ROWS: usize;
    /// Tiles of 16 columns in a register tile of `ROWS` rows.
    const TILES: usize;

    /// `x` in every lane.
    fn splat(x: f32) -> Self;
    /// # Safety
    /// `p` must be good for reading 16 values; no alignment is needed.
    unsafe fn load(p: *const f32) -> Self;
    /// # Safety
    /// `p` must be good for writing 16 values; no alignment is needed.
    unsafe fn store(self, p: *mut f32);
    /// Sixteen little-endian halves.
    /// # Safety
    /// `p` must be good for reading 32 bytes; no alignment is needed.
    unsafe fn load_f16(p: *const u8) -> Self;
    /// Rounds to half precision, ties to even, little-endian.
    /// # Safety
    /// `p` must be good for writing 32 bytes; no alignment is needed.
    unsafe fn store_f16(self, p: *mut u8);
    /// Sixteen little-endian bfloat16.
    /// # Safety
    /// `p` must be good for reading 32 bytes; no alignment is needed.
    unsafe fn load_bf16(p: *const u8) -> Self;
    /// Rounds to bfloat16, ties to even, little-endian; a NaN stays one, made quiet.
    /// # Safety
    /// `p` must be good for writing 32 bytes; no alignment is needed.
    unsafe fn store_bf16(self, p: *mut u8);
    /// Sixteen signed bytes.
    /// # Safety
    /// `p` must be good for reading 16 bytes.
    unsafe fn load_i8(p: *const u8) -> Self;
    /// Rounds to signed bytes, ties to even. Lanes are in -127..=127; of others the bytes are unspecified.
    /// # Safety
    /// `p` must be good for writing 16 bytes.
    unsafe fn store_i8(self, p: *mut u8);
    fn add(self, o: Self) -> Self;
    fn sub(self, o: Self) -> Self;
    fn mul(self, o: Self) -> Self;
    fn div(self, o: Self) -> Self;
    /// `self * b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    /// `if self < o { self } else { o }`: `o` where either is NaN.
    fn min(self, o: Self) -> Self;
    /// `if self > o { self } else { o }`: `o` where either is NaN.
    fn max(self, o: Self) -> Self;
    /// 0 in lanes where `x < bound`, `self` elsewhere (also where `x` is NaN).
    fn zero_where_less(self, x: Self, bound: Self) -> Self;
    /// 2^n, where the low bits of the lanes are those of `1.5 * 2^23 + n`, -126 <= n <= 127; 0 for n = -127. Any bits
    /// otherwise.
    fn pow2_of_shifted(self) -> Self;

    /// Asks for the cache line at `p`, which may lie anywhere.
    #[inline(always)]
    fn prefetch(_p: *const u8) {}

    /// Transposes 16 vectors of 16 lanes.
    #[inline(always)]
    fn transpose(rows: [Self; LANES]) -> [Self; LANES] {
        let rows = rows.map(Self::to_array);
        from_fn(|i| Self::from_array(from_fn(|j| rows[j][i])))
    }
    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        let mut a = [0.0; LANES];
        // SAFETY: the array has 16 values.
        unsafe { self.store(a.as_mut_ptr()) };
        a
    }
    #[inline(always)]
    fn from_array(a: [f32; LANES]) -> Self {
        // SAFETY: the array has 16 values.
        unsafe { Self::load(a.as_ptr()) }
    }
    /// The lanes' sum, as a tree: lanes 8 apart, then 4, 2, 1.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut a = self.to_array();
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                a[i] += a[i + width];
            }
        }
        a[0]
    }
    /// The largest lane, in the same tree.
    #[inline(always)]
    fn largest(self) -> f32 {
        let mut a = self.to_array();
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                a[i] = if a[i] > a[i + width] { a[i] } else { a[i + width] };
            }
        }
        a[0]
    }
    /// Rounds eight blocks of 32 values as [`Int8Block::new`] does, into blocks that are [`GROUP`] apart, and if REST writes
    /// what that leaves over. False where there is no better way than one block after the other, and where a value is
    /// not finite: then what is in `out` and `rest` must not be used.
    ///
    /// # Safety
    /// `x` must be good for reading and, if REST, `rest` for writing 256 values; `out` for writing the blocks.
    #[inline(always)]
    unsafe fn round_eight<const REST: bool>(_x: *const f32, _out: *mut Int8Block, _rest: *mut f32) -> bool {
        false
    }
}

/// Integer products: sixteen int32 sums of products of bytes.
pub(super) trait IntLanes: Lanes {
    /// Sixteen int32.
    type Int: Copy;
    /// 64 bytes: four for each lane.
    type Bytes: Copy;
    /// Whether several rows in a register tile of integer products are worth their code.
    const SEVERAL_ROWS: bool;
    /// Tiles of 16 columns in such a register tile: 1 or 2.
    const INT_TILES: usize;

    /// # Safety
    /// `p` must be good for reading 64 bytes and aligned to 64.
    unsafe fn load_bytes(p: *const u8) -> Self::Bytes;
    /// # Safety
    /// `p` must be good for writing 64 bytes and aligned to 64.
    #[inline(always)]
    unsafe fn store_bytes(b: Self::Bytes, p: *mut u8) {
        const { assert!(size_of::<Self::Bytes>() == 64, "64 bytes and nothing else") };
        // SAFETY: the caller vouches for 64 bytes with an alignment that no type of vectors exceeds.
        unsafe { p.cast::<Self::Bytes>().write(b) }
    }
    /// Each byte plus `x`, modulo 256.
    fn plus(b: Self::Bytes, x: u8) -> Self::Bytes;
    fn low_nibbles(b: Self::Bytes) -> Self::Bytes;
    fn high_nibbles(b: Self::Bytes) -> Self::Bytes;
    /// Bytes of `b`, which are in 0..=15, plus 16 times bit `i` (0..=7) of the same byte of `bits`.
    fn with_bit(b: Self::Bytes, bits: Self::Bytes, i: usize) -> Self::Bytes;
    /// Bytes of `b`, which are in 0..=15, plus 16 times the bits `2 i` and `2 i + 1` (i in 0..=3) of the same byte of
    /// `bits`.
    fn with_two_bits(b: Self::Bytes, bits: Self::Bytes, i: usize) -> Self::Bytes;
    fn int_zero() -> Self::Int;
    /// `x * 2^SHIFT` in every lane.
    fn shifted<const SHIFT: u32>(x: i32) -> Self::Int;
    /// `acc + sum of 4 products` a lane: bytes of `w` in 0..=63 times the four signed bytes of `x`.
    fn dot_small(acc: Self::Int, w: Self::Bytes, x: i32) -> Self::Int;
    /// Where a sum of [`IntLanes::dot_offset`] starts; `negative_128` is -128 times the sum of all signed bytes of
    /// `x`.
    fn offset_start(negative_128: i32) -> Self::Int;
    /// As [`IntLanes::dot_small`] for bytes of `w` that stand for `w - 128`. Bytes of `x` are in -127..=127.
    fn dot_offset(acc: Self::Int, w: Self::Bytes, x: i32) -> Self::Int;
    fn to_f32(acc: Self::Int) -> Self;
    /// Sixteen unsigned bytes.
    /// # Safety
    /// `p` must be good for reading 16 bytes; no alignment is needed.
    unsafe fn load_u8(p: *const u8) -> Self;
}

/// Plain Rust.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

impl Portable {
    #[inline(always)]
    fn zip(self, o: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(from_fn(|i| f(self.0[i], o.0[i])))
    }
}

impl Lanes for Portable {
    const ROWS: usize = 4;
    const TILES: usize = 1;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller vouches for 16 values; the read needs no alignment.
        Self(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller vouches for 16 values; the write needs no alignment.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        // SAFETY: the caller vouches for 32 bytes; bytes need no alignment.
        let bytes = unsafe { p.cast::<[[u8; 2]; LANES]>().read() };
        Self(bytes.map(|b| f16::from_le_bytes(b).to_f32()))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        let bytes = self.0.map(|x| f16::from_f32(x).to_le_bytes());
        // SAFETY: the caller vouches for 32 bytes; bytes need no alignment.
        unsafe { p.cast::<[[u8; 2]; LANES]>().write(bytes) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: the caller vouches for 32 bytes; bytes need no alignment.
        let bytes = unsafe { p.cast::<[[u8; 2]; LANES]>().read() };
        Self(bytes.map(|b| bf16::from_le_bytes(b).to_f32()))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        let bytes = self.0.map(|x| bf16::from_f32(x).to_le_bytes());
        // SAFETY: the caller vouches for 32 bytes; bytes need no alignment.
        unsafe { p.cast::<[[u8; 2]; LANES]>().write(bytes) }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        // SAFETY: the caller vouches for 16 bytes.
        let bytes = unsafe { p.cast::<[i8; LANES]>().read() };
        Self(bytes.map(f32::from))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut u8) {
        let bytes = self.0.map(|x| x.round_ties_even() as i8);
        // SAFETY: the caller vouches for 16 bytes.
        unsafe { p.cast::<[i8; LANES]>().write(bytes) }
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        self.zip(o, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        self.zip(o, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        self.zip(o, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        self.zip(o, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Self(from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        self.zip(o, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        self.zip(o, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn zero_where_less(self, x: Self, bound: Self) -> Self {
        Self(from_fn(|i| if x.0[i] < bound.0[i] { 0.0 } else { self.0[i] }))
    }
    #[inline(always)]
    fn pow2_of_shifted(self) -> Self {
        Self(
            self.0
                .map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(0x3f80_0000))),
        )
    }
}

impl IntLanes for Portable {
    type Int = [i32; LANES];
    type Bytes = [u8; 64];
    const SEVERAL_ROWS: bool = false;
    const INT_TILES: usize = 1;

    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> [u8; 64] {
        // SAFETY: the caller vouches for 64 bytes.
        unsafe { p.cast::<[u8; 64]>().read() }
    }
    #[inline(always)]
    fn plus(b: [u8; 64], x: u8) -> [u8; 64] {
        b.map(|b| b.wrapping_add(x))
    }
    #[inline(always)]
    fn low_nibbles(b: [u8; 64]) -> [u8; 64] {
        b.map(|q| q & 15)
    }
    #[inline(always)]
    fn high_nibbles(b: [u8; 64]) -> [u8; 64] {
        b.map(|q| q >> 4)
    }
    #[inline(always)]
    fn with_bit(b: [u8; 64], bits: [u8; 64], i: usize) -> [u8; 64] {
        from_fn(|j| b[j] | (bits[j] >> i & 1) << 4)
    }
    #[inline(always)]
    fn with_two_bits(b: [u8; 64], bits: [u8; 64], i: usize) -> [u8; 64] {
        from_fn(|j| b[j] | (bits[j] >> (2 * i) & 3) << 4)
    }
    #[inline(always)]
    fn int_zero() -> [i32; LANES] {
        [0; LANES]
    }
    #[inline(always)]
    fn shifted<const SHIFT: u32>(x: i32) -> [i32; LANES] {
        [x << SHIFT; LANES]
    }
    #[inline(always)]
    fn dot_small(acc: [i32; LANES], w: [u8; 64], x: i32) -> [i32; LANES] {
        let x = x.to_le_bytes().map(|b| i32::from(b.cast_signed()));
        from_fn(|i| acc[i] + (0..4).map(|j| i32::from(w[4 * i + j]) * x[j]).sum::<i32>())
    }
    #[inline(always)]
    fn offset_start(_negative_128: i32) -> [i32; LANES] {
        [0; LANES]
    }
    #[inline(always)]
    fn dot_offset(acc: [i32; LANES], w: [u8; 64], x: i32) -> [i32; LANES] {
        let x = x.to_le_bytes().map(|b| i32::from(b.cast_signed()));
        from_fn(|i| acc[i] + (0..4).map(|j| (i32::from(w[4 * i + j]) - 128) * x[j]).sum::<i32>())
    }
    #[inline(always)]
    fn to_f32(acc: [i32; LANES]) -> Self {
        #[allow(
            clippy::cast_precision_loss,
            reason = "a block's sum is below 2^24, so the conversion is exact"
        )]
        Self(acc.map(|x| x as f32))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> Self {
        // SAFETY: the caller vouches for 16 bytes.
        Self(unsafe { p.cast::<[u8; LANES]>().read() }.map(f32::from))
    }
}
