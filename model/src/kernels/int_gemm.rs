//! The product of int8 activations with quantised weights.
//!
//! Activations are rounded to int8 in blocks of 32 of k with an f32 scale each, as llama.cpp's Q8_1 does. A block's
//! sum of products is an exact integer; the blocks are combined in the order of k with fused multiply-adds, one
//! accumulator for each output element. So neither rows nor threads nor the instruction set change a bit.
#![allow(
    unsafe_code,
    reason = "a register tile reads and writes with strides, through pointers"
)]

use std::array::from_fn;

use super::lanes::{IntLanes, LANES};
use super::math::ROUND;
use super::pack::{BLOCK, Q4Tile, Q8Scales, Q8Tile};

/// 32 activations: value = d * q.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
pub(super) struct Int8Block {
    qs: [i8; BLOCK],
    /// Scale. NaN if one of the values is not finite, which makes the outputs NaN.
    d: f32,
    /// `d * sum`: what a weight block's minimum is multiplied with.
    scaled_sum: f32,
    /// Sum of `qs`.
    sum: i32,
}

impl Int8Block {
    pub(super) const ZERO: Self = Self {
        qs: [0; BLOCK],
        d: 0.0,
        scaled_sum: 0.0,
        sum: 0,
    };

    /// Rounds 32 values: scale = largest / 127, ties to even.
    #[inline(always)]
    pub(super) fn new(x: &[f32; BLOCK]) -> Self {
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
        let qs: [i32; BLOCK] = from_fn(|i| {
            let shifted = if d.is_nan() { ROUND } else { x[i] * inverse + ROUND };
            shifted.to_bits().cast_signed() - ROUND.to_bits().cast_signed()
        });
        let sum = qs.iter().sum::<i32>();
        #[allow(clippy::cast_possible_truncation, reason = "|q| <= 127 by the choice of the scale")]
        let bytes = qs.map(|q| q as i8);
        #[allow(clippy::cast_precision_loss, reason = "at most 32 * 127")]
        Self {
            qs: bytes,
            d,
            scaled_sum: d * sum as f32,
            sum,
        }
    }
}

/// Quantised tiles by pointer: what the register tile reads of its weights.
pub(super) trait Weights: Copy {
    /// Sums of products of tile `at` with the activations of M rows, and their combination with the scales:
    /// acc\[r\] += ...
    ///
    /// # Safety
    /// `at` must be a tile of the matrix; `x` must point to M blocks, `x_row` apart.
    unsafe fn add_tile<S: IntLanes, const M: usize>(
        self,
        at: usize,
        x: *const Int8Block,
        x_row: usize,
        acc: [&mut S; M],
    );
}

/// Q4_0 and Q4_1.
#[derive(Clone, Copy)]
pub(super) struct Q4Weights(pub(super) *const Q4Tile);

/// Q8_0.
#[derive(Clone, Copy)]
pub(super) struct Q8Weights(pub(super) *const Q8Tile, pub(super) *const Q8Scales);

/// Four signed bytes of a block as one number: values 4 g .. 4 g + 4.
///
/// # Safety
/// `x` must point to a block, and g < 8.
#[inline(always)]
unsafe fn four(x: *const Int8Block, g: usize) -> i32 {
    // SAFETY: the block starts with 32 bytes and is aligned to 16.
    unsafe { x.cast::<i32>().add(g).read() }
}

impl Weights for Q4Weights {
    #[inline(always)]
    unsafe fn add_tile<S: IntLanes, const M: usize>(
        self,
        at: usize,
        x: *const Int8Block,
        x_row: usize,
        acc: [&mut S; M],
    ) {
        // SAFETY: the caller vouches for the tile and the blocks; tiles are aligned to 64.
        unsafe {
            let tile = self.0.add(at);
            let mut dots = [S::int_zero(); M];
            for g in 0..4 {
                let bytes = S::load_bytes((&raw const (*tile).qs).cast::<u8>().add(64 * g));
                let (low, high) = (S::low_nibbles(bytes), S::high_nibbles(bytes));
                for (r, dot) in dots.iter_mut().enumerate() {
                    *dot = S::dot_nibbles(*dot, low, four(x.add(r * x_row), g));
                    *dot = S::dot_nibbles(*dot, high, four(x.add(r * x_row), 4 + g));
                }
            }
            let d = S::load_f16((&raw const (*tile).d).cast());
            let min = S::load_f16((&raw const (*tile).min).cast());
            for (r, acc) in acc.into_iter().enumerate() {
                let x = x.add(r * x_row);
                *acc = S::to_f32(dots[r]).mul(d).fma(S::splat((*x).d), *acc);
                *acc = min.fma(S::splat((*x).scaled_sum), *acc);
            }
        }
    }
}

impl Weights for Q8Weights {
    #[inline(always)]
    unsafe fn add_tile<S: IntLanes, const M: usize>(
        self,
        at: usize,
        x: *const Int8Block,
        x_row: usize,
        acc: [&mut S; M],
    ) {
        // SAFETY: the caller vouches for the tile and the blocks; tiles are aligned to 64.
        unsafe {
            let tile = self.0.add(at);
            let mut dots: [S::Int; M] = from_fn(|r| S::offset_start((*x.add(r * x_row)).sum));
            for g in 0..8 {
                let bytes = S::load_bytes(tile.cast::<u8>().add(64 * g));
                for (r, dot) in dots.iter_mut().enumerate() {
                    *dot = S::dot_offset(*dot, bytes, four(x.add(r * x_row), g));
                }
            }
            let d = S::load_f16(self.1.add(at).cast());
            for (r, acc) in acc.into_iter().enumerate() {
                *acc = S::to_f32(dots[r]).mul(d).fma(S::splat((*x.add(r * x_row)).d), *acc);
            }
        }
    }
}

/// y\[r\]\[16 t + c\] = sum over blocks of x\[r\] * w\[t\]. Strides in elements.
#[derive(Clone, Copy)]
pub(super) struct IntProduct<W> {
    pub(super) w: W,
    /// First tile of columns.
    pub(super) tile: usize,
    /// Blocks of k.
    pub(super) blocks: usize,
    pub(super) x: *const Int8Block,
    /// Where the first tile's first row goes.
    pub(super) y: *mut f32,
    pub(super) y_row: usize,
}

impl<W: Weights> IntProduct<W> {
    /// The same product further down and to the right.
    #[inline(always)]
    fn at(&self, row: usize, tile: usize) -> Self {
        Self {
            tile: self.tile + tile,
            x: self.x.wrapping_add(row * self.blocks),
            y: self.y.wrapping_add(row * self.y_row + tile * LANES),
            ..*self
        }
    }

    /// The product for `rows` rows and `tiles` tiles.
    ///
    /// # Safety
    /// All elements named by the fields, `rows` and `tiles` must be good for reading (w, x) and writing (y).
    #[inline(always)]
    pub(super) unsafe fn run<S: IntLanes>(&self, rows: usize, tiles: usize) {
        let mut tile = 0;
        // With few rows, more tiles side by side keep as many accumulators busy.
        let wide = if rows == 1 { 4 } else { S::TILES };
        while tile < tiles {
            let width = if tile + wide <= tiles {
                wide
            } else {
                S::TILES.min(tiles - tile)
            };
            let mut row = 0;
            while row < rows {
                let height = S::INT_ROWS.min(rows - row);
                // SAFETY: rows and tiles stay within those the caller vouches for.
                unsafe { self.at(row, tile).block::<S>(height, width) };
                row += height;
            }
            tile += width;
        }
    }

    /// # Safety
    /// As [`IntProduct::run`].
    #[inline(always)]
    unsafe fn block<S: IntLanes>(&self, rows: usize, tiles: usize) {
        // SAFETY: passed on from the caller; each arm covers exactly `rows` x `tiles`.
        unsafe {
            match (rows, tiles) {
                (1, 4) => self.register_tile::<S, 1, 4>(),
                (1, 2) => self.register_tile::<S, 1, 2>(),
                (2, 2) => self.register_tile::<S, 2, 2>(),
                (3, 2) => self.register_tile::<S, 3, 2>(),
                (4, 2) => self.register_tile::<S, 4, 2>(),
                (5, 2) => self.register_tile::<S, 5, 2>(),
                (6, 2) => self.register_tile::<S, 6, 2>(),
                (7, 2) => self.register_tile::<S, 7, 2>(),
                (8, 2) => self.register_tile::<S, 8, 2>(),
                (1, 1) => self.register_tile::<S, 1, 1>(),
                (2, 1) => self.register_tile::<S, 2, 1>(),
                (3, 1) => self.register_tile::<S, 3, 1>(),
                (4, 1) => self.register_tile::<S, 4, 1>(),
                (5, 1) => self.register_tile::<S, 5, 1>(),
                (6, 1) => self.register_tile::<S, 6, 1>(),
                (7, 1) => self.register_tile::<S, 7, 1>(),
                (8, 1) => self.register_tile::<S, 8, 1>(),
                (rows, tiles) => {
                    for (row, tile) in (0..rows).flat_map(|r| (0..tiles).map(move |t| (r, t))) {
                        self.at(row, tile).register_tile::<S, 1, 1>();
                    }
                }
            }
        }
    }

    /// # Safety
    /// As [`IntProduct::run`], for M rows and T tiles.
    #[inline(always)]
    unsafe fn register_tile<S: IntLanes, const M: usize, const T: usize>(&self) {
        let mut acc = [[S::splat(0.0); M]; T];
        for b in 0..self.blocks {
            for (t, acc) in acc.iter_mut().enumerate() {
                let at = (self.tile + t) * self.blocks + b;
                // SAFETY: tile and blocks are among those the caller vouches for.
                unsafe { self.w.add_tile::<S, M>(at, self.x.add(b), self.blocks, acc.each_mut()) };
            }
        }
        for (t, acc) in acc.iter().enumerate() {
            for (r, acc) in acc.iter().enumerate() {
                // SAFETY: row r and tile t are among those the caller vouches for.
                unsafe { acc.store(self.y.add(r * self.y_row + t * LANES)) };
            }
        }
    }
}
