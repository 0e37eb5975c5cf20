//! The product of int8 activations with quantised weights.
//!
//! Activations are rounded to int8 in blocks of 32 of k with an f32 scale each, as llama.cpp's Q8_1 does. A block's
//! sum of products is an exact integer; the blocks are combined in the order of k with fused multiply-adds, one
//! accumulator for each output element. So neither rows nor threads nor the instruction set change a bit.
#![allow(
    unsafe_code,
    reason = "a register tile reads and writes with strides, through pointers"
)]

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
        let (mut qs, mut sum) = ([0i8; BLOCK], 0i32);
        if !d.is_nan() {
            for (q, x) in qs.iter_mut().zip(x) {
                let shifted = x * inverse + ROUND;
                // |q| <= 127 by the choice of the scale.
                let value = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
                *q = value as i8;
                sum = sum.wrapping_add(value);
            }
        }
        let scaled_sum = d * sum as f32;
        Self { qs, d, scaled_sum, sum }
    }
}

/// Rows whose blocks lie side by side, so that a register tile finds its rows at fixed distances.
pub(super) const GROUP: usize = 8;

/// Index of a row's block among the activations, which are in the order (group of rows, block, row of the group).
#[inline(always)]
pub(super) fn block_index(row: usize, block: usize, blocks: usize) -> usize {
    (row / GROUP * blocks + block) * GROUP + row % GROUP
}

/// Quantised tiles by pointer: what the register tile reads of its weights.
pub(super) trait Weights: Copy {
    /// Adds the products of one block of M rows with T tiles, `at`, `at + stride`, ..., combined with the scales.
    ///
    /// # Safety
    /// The tiles must be in the matrix; `x` must point to M blocks.
    unsafe fn add_block<S: IntLanes, const M: usize, const T: usize>(
        self,
        at: usize,
        stride: usize,
        x: *const Int8Block,
        acc: &mut [[S; T]; M],
    );

    /// Asks for the cache lines of tile `at`, which may lie beyond the last.
    fn prefetch<S: IntLanes>(self, at: usize);
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
    unsafe fn add_block<S: IntLanes, const M: usize, const T: usize>(
        self,
        at: usize,
        stride: usize,
        x: *const Int8Block,
        acc: &mut [[S; T]; M],
    ) {
        // SAFETY: the caller vouches for the tiles and the blocks; tiles are aligned to 64.
        unsafe {
            let first = self.0.wrapping_add(at);
            let mut dots = [[S::int_zero(); T]; M];
            for g in 0..4 {
                let mut bytes = [S::no_bytes(); T];
                for (t, bytes) in bytes.iter_mut().enumerate() {
                    *bytes = S::load_bytes(first.wrapping_add(t * stride).cast::<u8>().add(64 * g));
                }
                for (r, dots) in dots.iter_mut().enumerate() {
                    let (low, high) = (four(x.add(r), g), four(x.add(r), 4 + g));
                    for (dot, bytes) in dots.iter_mut().zip(bytes) {
                        *dot = S::dot_nibbles(*dot, S::low_nibbles(bytes), low);
                        *dot = S::dot_nibbles(*dot, S::high_nibbles(bytes), high);
                    }
                }
            }
            for t in 0..T {
                let tile = first.wrapping_add(t * stride);
                let d = S::load_f16((&raw const (*tile).d).cast());
                let min = S::load_f16((&raw const (*tile).min).cast());
                for r in 0..M {
                    let x = x.add(r);
                    let acc = &mut acc[r][t];
                    *acc = S::to_f32(dots[r][t]).mul(d).fma(S::splat((*x).d), *acc);
                    *acc = min.fma(S::splat((*x).scaled_sum), *acc);
                }
            }
        }
    }

    #[inline(always)]
    fn prefetch<S: IntLanes>(self, at: usize) {
        for line in 0..size_of::<Q4Tile>() / 64 {
            S::prefetch(self.0.wrapping_add(at).cast::<u8>().wrapping_add(64 * line));
        }
    }
}

impl Weights for Q8Weights {
    #[inline(always)]
    unsafe fn add_block<S: IntLanes, const M: usize, const T: usize>(
        self,
        at: usize,
        stride: usize,
        x: *const Int8Block,
        acc: &mut [[S; T]; M],
    ) {
        // SAFETY: the caller vouches for the tiles and the blocks; tiles are aligned to 64.
        unsafe {
            let first = self.0.wrapping_add(at);
            let mut dots = [[S::int_zero(); T]; M];
            for (r, dots) in dots.iter_mut().enumerate() {
                *dots = [S::offset_start((*x.add(r)).sum); T];
            }
            for g in 0..8 {
                let mut bytes = [S::no_bytes(); T];
                for (t, bytes) in bytes.iter_mut().enumerate() {
                    *bytes = S::load_bytes(first.wrapping_add(t * stride).cast::<u8>().add(64 * g));
                }
                for (r, dots) in dots.iter_mut().enumerate() {
                    let four = four(x.add(r), g);
                    for (dot, bytes) in dots.iter_mut().zip(bytes) {
                        *dot = S::dot_offset(*dot, bytes, four);
                    }
                }
            }
            for t in 0..T {
                let d = S::load_f16(self.1.wrapping_add(at).wrapping_add(t * stride).cast());
                for r in 0..M {
                    let acc = &mut acc[r][t];
                    *acc = S::to_f32(dots[r][t]).mul(d).fma(S::splat((*x.add(r)).d), *acc);
                }
            }
        }
    }

    #[inline(always)]
    fn prefetch<S: IntLanes>(self, at: usize) {
        for line in 0..size_of::<Q8Tile>() / 64 {
            S::prefetch(self.0.wrapping_add(at).cast::<u8>().wrapping_add(64 * line));
        }
        S::prefetch(self.1.wrapping_add(at).cast());
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
    /// All activations; see [`block_index`].
    pub(super) x: *const Int8Block,
    /// First row, a multiple of [`GROUP`].
    pub(super) row: usize,
    /// Where the first tile's first row goes.
    pub(super) y: *mut f32,
    pub(super) y_row: usize,
    /// Ask for the weights of the next tiles while working on these.
    pub(super) prefetch: bool,
}

impl<W: Weights> IntProduct<W> {
    /// The same product further down and to the right.
    #[inline(always)]
    fn at(&self, row: usize, tile: usize) -> Self {
        Self {
            tile: self.tile + tile,
            row: self.row + row,
            y: self.y.wrapping_add(row * self.y_row + tile * LANES),
            prefetch: self.prefetch && row == 0,
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
        let wide = if rows == 1 { 4 } else { S::INT_TILES };
        while tile < tiles {
            let width = if tile + wide <= tiles {
                wide
            } else {
                S::INT_TILES.min(tiles - tile)
            };
            let mut row = 0;
            while row < rows {
                // Not beyond a group's end.
                let height = S::INT_ROWS.min(rows - row).min(GROUP - row % GROUP);
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
                (1, 1) => self.register_tile::<S, 1, 1>(),
                (2, 1) => self.register_tile::<S, 2, 1>(),
                (3, 1) => self.register_tile::<S, 3, 1>(),
                (4, 1) => self.register_tile::<S, 4, 1>(),
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
    /// As [`IntProduct::run`], for M rows of one group and T tiles.
    #[inline(always)]
    unsafe fn register_tile<S: IntLanes, const M: usize, const T: usize>(&self) {
        let mut acc = [[S::splat(0.0); T]; M];
        let mut x = self.x.wrapping_add(block_index(self.row, 0, self.blocks));
        let first = self.tile * self.blocks;
        for at in first..first + self.blocks {
            if self.prefetch {
                for t in T..2 * T {
                    self.w.prefetch::<S>(at + t * self.blocks);
                }
            }
            // SAFETY: tiles and rows are among those the caller vouches for.
            unsafe { self.w.add_block::<S, M, T>(at, self.blocks, x, &mut acc) };
            x = x.wrapping_add(GROUP);
        }
        for (r, acc) in acc.iter().enumerate() {
            for (t, acc) in acc.iter().enumerate() {
                // SAFETY: row r and tile t are among those the caller vouches for.
                unsafe { acc.store(self.y.add(r * self.y_row + t * LANES)) };
            }
        }
    }
}
