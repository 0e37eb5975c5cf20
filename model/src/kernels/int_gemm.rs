//! The product of int8 activations with quantised weights.
//!
//! The products of half a block are summed as exact integers; halves and blocks are combined in the order of k with fused
//! multiply-adds (see [`add_block`]), one accumulator for each output element and pass (see `int8_block`), and the second
//! pass is added to the first. So neither rows nor threads nor the instruction set change a bit.
#![allow(
    unsafe_code,
    reason = "a register tile reads and writes with strides, through pointers"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over constants are unrolled, iterators are not always"
)]

use super::int8_block::{GROUP, Int8Block, block_index};
use super::lanes::{IntLanes, LANES};
use super::tiles::{Form, QuantTile};

/// y\[r\]\[16 t + c\] = sum over blocks of x\[r\] * w\[t\]. Strides in elements.
pub(super) struct IntProduct<Q> {
    /// The first tile of the first 16 columns.
    pub(super) w: *const Q,
    /// Blocks of k.
    pub(super) blocks: usize,
    /// All activations; see [`block_index`].
    pub(super) x: *const Int8Block,
    /// Blocks of activations for each block of k.
    pub(super) passes: usize,
    /// The one of them that is multiplied.
    pub(super) pass: usize,
    /// First row, a multiple of [`GROUP`].
    pub(super) row: usize,
    /// Where the first tile's first row goes.
    pub(super) y: *mut f32,
    pub(super) y_row: usize,
    /// Add to what is in y.
    pub(super) add: bool,
    /// Ask for the weights of the next tiles while working on these.
    pub(super) prefetch: bool,
}

/// Rows of a register tile, if there are several. 4 rows and 2 tiles keep all sums in 32 registers.
pub(super) const ROWS: usize = 4;

impl<Q: QuantTile> IntProduct<Q> {
    /// Tiles from one 16 columns to the next.
    #[inline(always)]
    pub(super) fn stride(&self) -> usize {
        self.blocks.div_ceil(Q::BLOCKS)
    }

    /// The same product further down and to the right, of one pass. The second is added to the first.
    #[inline(always)]
    pub(super) fn at(&self, row: usize, tile: usize, pass: usize) -> Self {
        Self {
            pass,
            add: self.add || pass > 0,
            w: self.w.wrapping_add(tile * self.stride()),
            row: self.row + row,
            y: self.y.wrapping_add(row * self.y_row + tile * LANES),
            prefetch: self.prefetch && row == 0 && pass == 0,
            ..*self
        }
    }

    /// The product for `rows` rows and `tiles` tiles of columns.
    ///
    /// # Safety
    /// All elements named by the fields, `rows` and `tiles` must be good for reading (w, x, the latter for all rows of
    /// the groups that `rows` rows lie in) and writing (y).
    #[inline(always)]
    pub(super) unsafe fn run<S: IntLanes>(&self, rows: usize, tiles: usize) {
        if rows == 1 || const { !S::SEVERAL_ROWS } {
            // One row waits for memory, which gives most to a single stream.
            for tile in 0..tiles {
                for row in 0..rows {
                    for pass in 0..self.passes {
                        // SAFETY: row and tile are below those the caller vouches for.
                        unsafe { self.at(row, tile, pass).register_tile::<S, 1, 1>(1) };
                    }
                }
            }
            return;
        }
        // What is left over gets a lower register tile where that is cheaper than a full one.
        if const { S::INT_TILES == 2 && Q::TALL } {
            for tile in 0..tiles {
                let mut row = 0;
                while row < rows {
                    let left = rows - row;
                    let height = match left {
                        1 => 1,
                        2..=5 => ROWS,
                        _ => 2 * ROWS,
                    };
                    for pass in 0..self.passes {
                        let part = self.at(row, tile, pass);
                        // SAFETY: rows and tiles stay within those the caller vouches for.
                        unsafe {
                            match left {
                                1 => part.register_tile::<S, 1, 1>(1),
                                2..=5 => part.register_tile::<S, ROWS, 1>(left),
                                _ => part.register_tile::<S, { 2 * ROWS }, 1>(left),
                            }
                        }
                    }
                    row += height;
                }
            }
            return;
        }
        let mut tile = 0;
        while tile < tiles {
            let width = S::INT_TILES.min(tiles - tile);
            for row in (0..rows).step_by(ROWS) {
                for pass in 0..self.passes {
                    let (part, rows) = (self.at(row, tile, pass), rows - row);
                    // SAFETY: rows and tiles stay within those the caller vouches for.
                    unsafe {
                        if const { S::INT_TILES == 2 } && width == 2 {
                            match rows {
                                1 => part.register_tile::<S, 1, 2>(1),
                                2 => part.register_tile::<S, 2, 2>(2),
                                _ => part.register_tile::<S, ROWS, 2>(rows),
                            }
                        } else if rows == 1 {
                            part.register_tile::<S, 1, 1>(1);
                        } else {
                            part.register_tile::<S, ROWS, 1>(rows);
                        }
                    }
                }
            }
            tile += width;
        }
    }

    /// Computes M rows and writes the first `rows` of them: a group has as many, and they cost less than one row after the
    /// other.
    ///
    /// # Safety
    /// As [`IntProduct::run`], for M rows of one group and T tiles of columns; writes only `rows` rows.
    #[inline(always)]
    unsafe fn register_tile<S: IntLanes, const M: usize, const T: usize>(&self, rows: usize) {
        let stride = self.stride();
        let mut acc = [[S::splat(0.0); T]; M];
        let first = block_index(self.row, (self.pass, self.passes), 0, self.blocks);
        let mut x = self.x.wrapping_add(first);
        for block in 0..self.blocks {
            let (tile, block) = (self.w.wrapping_add(block / Q::BLOCKS), block % Q::BLOCKS);
            if self.prefetch {
                for t in T..2 * T {
                    prefetch::<S, Q>(tile.wrapping_add(t * stride), block);
                }
            }
            // SAFETY: tiles and rows are among those the caller vouches for.
            unsafe { add_block::<S, Q, M, T>(tile, stride, block, x, &mut acc) };
            x = x.wrapping_add(GROUP);
        }
        // SAFETY: passed on from the caller.
        unsafe { self.write::<S, M, T>(&acc, rows) };
    }

    /// Writes or adds the first `rows` of M rows of sums.
    ///
    /// # Safety
    /// As [`IntProduct::run`], for `rows` rows and T tiles of columns.
    #[inline(always)]
    pub(super) unsafe fn write<S: IntLanes, const M: usize, const T: usize>(&self, acc: &[[S; T]; M], rows: usize) {
        for (r, acc) in acc.iter().enumerate() {
            if r >= rows {
                break;
            }
            for (t, acc) in acc.iter().enumerate() {
                // SAFETY: row r and tile t are among those the caller vouches for.
                unsafe {
                    let y = self.y.add(r * self.y_row + t * LANES);
                    let sum = if self.add { S::load(y).add(*acc) } else { *acc };
                    sum.store(y);
                }
            }
        }
    }
}

/// Asks for the cache lines of a tile's block, which may lie anywhere.
#[inline(always)]
fn prefetch<S: IntLanes, Q: QuantTile>(tile: *const Q, block: usize) {
    let lines = const { size_of::<Q>() / 64 };
    let first = block * lines / Q::BLOCKS;
    for line in 0..lines.div_ceil(Q::BLOCKS) {
        S::prefetch(tile.cast::<u8>().wrapping_add(64 * (first + line)));
    }
}

/// Adds the products of one block of 32 of k, for M rows and T tiles of columns: tiles `tile`, `tile + stride`, ...
/// With the integer sums of products `dot0` and `dot1` of the halves and the row's scales `x.d`:
/// * [`Form::Plain`]: `acc = fma(fma(dot1, x.d[1], dot0 * x.d[0]), d, acc)`;
/// * [`Form::Minimum`]: the same, then `acc = fma(min, x.scaled_sum, acc)`;
/// * [`Form::Halves`]: `acc = fma(dot0 * x.d[0], d0, acc)`, then `acc = fma(dot1 * x.d[1], d1, acc)`.
///
/// # Safety
/// The tiles must be in the matrix and have the block; `x` must point to M blocks.
#[inline(always)]
pub(super) unsafe fn add_block<S: IntLanes, Q: QuantTile, const M: usize, const T: usize>(
    tile: *const Q,
    stride: usize,
    block: usize,
    x: *const Int8Block,
    acc: &mut [[S; T]; M],
) {
    let mut sums = [[S::splat(0.0); T]; M];
    // SAFETY: the caller vouches for the tiles and the blocks.
    unsafe {
        let dots = dots::<S, Q, M, T, 0>(tile, stride, block, x);
        for r in 0..M {
            let d = S::splat((*x.add(r)).d[0]);
            for t in 0..T {
                sums[r][t] = S::to_f32(dots[r][t]).mul(d);
            }
        }
        let mut scales = [[S::splat(0.0); 2]; T];
        for t in 0..T {
            scales[t] = Q::scales::<S>(tile.wrapping_add(t * stride), block);
        }
        if const { matches!(Q::FORM, Form::Halves) } {
            for r in 0..M {
                for t in 0..T {
                    acc[r][t] = sums[r][t].fma(scales[t][0], acc[r][t]);
                }
            }
        }
        let dots = self::dots::<S, Q, M, T, 1>(tile, stride, block, x);
        for r in 0..M {
            let d = S::splat((*x.add(r)).d[1]);
            let scaled_sum = S::splat((*x.add(r)).scaled_sum);
            for t in 0..T {
                let ([first, second], dot, acc) = (scales[t], S::to_f32(dots[r][t]), &mut acc[r][t]);
                *acc = match Q::FORM {
                    Form::Plain => dot.fma(d, sums[r][t]).fma(first, *acc),
                    Form::Minimum => second.fma(scaled_sum, dot.fma(d, sums[r][t]).fma(first, *acc)),
                    Form::Halves => dot.mul(d).fma(second, *acc),
                };
            }
        }
    }
}

/// The integer sums of products of half a block.
///
/// # Safety
/// As [`add_block`].
#[inline(always)]
unsafe fn dots<S: IntLanes, Q: QuantTile, const M: usize, const T: usize, const HALF: usize>(
    tile: *const Q,
    stride: usize,
    block: usize,
    x: *const Int8Block,
) -> [[S::Int; T]; M] {
    let mut dots = [[S::int_zero(); T]; M];
    // SAFETY: passed on from the caller.
    unsafe {
        for r in 0..M {
            let (negative, negative_128) = ((*x.add(r)).negative[HALF], (*x.add(r)).negative_128[HALF]);
            dots[r] = [Q::start::<S>(negative, negative_128); T];
        }
        add_four::<S, Q, M, T, HALF, 0>(tile, stride, block, x, &mut dots);
        add_four::<S, Q, M, T, HALF, 1>(tile, stride, block, x, &mut dots);
        add_four::<S, Q, M, T, HALF, 2>(tile, stride, block, x, &mut dots);
        add_four::<S, Q, M, T, HALF, 3>(tile, stride, block, x, &mut dots);
    }
    dots
}

/// Adds the integer products of the four values of k from 16 HALF + 4 G on.
///
/// # Safety
/// As [`add_block`].
#[inline(always)]
unsafe fn add_four<S: IntLanes, Q: QuantTile, const M: usize, const T: usize, const HALF: usize, const G: usize>(
    tile: *const Q,
    stride: usize,
    block: usize,
    x: *const Int8Block,
    dots: &mut [[S::Int; T]; M],
) {
    for t in 0..T {
        // SAFETY: the caller vouches for the tiles.
        let bytes = unsafe { Q::quants::<S, HALF, G>(tile.wrapping_add(t * stride), block) };
        for r in 0..M {
            // SAFETY: the caller vouches for M blocks; a block starts with 32 bytes and is aligned to 64.
            let four = unsafe { x.add(r).cast::<i32>().add(4 * HALF + G).read() };
            dots[r][t] = Q::dot::<S>(dots[r][t], bytes, four);
        }
    }
}
