//! The product of int8 activations with quantised weights.
//!
//! Activations are rounded to int8 in blocks of 32 of k, each half of a block with its own f32 scale. (llama.cpp's Q8_1
//! has one scale for all 32; with two the distance of a model's log-probabilities from exact arithmetic shrinks by a
//! third, for one more multiply-add in twelve.) Where that is not enough, [`quantise_row`] makes a second block of what
//! the first one lost, and the product takes both: then activations have about 15 bits.
//!
//! The products of a half are summed as exact integers; halves and blocks are combined in the order of k with fused
//! multiply-adds, one accumulator for each output element and pass, and the second pass is added to the first. So neither rows nor threads nor the instruction set
//! change a bit.
#![allow(
    unsafe_code,
    reason = "a register tile reads and writes with strides, through pointers"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over constants are unrolled, iterators are not always"
)]

use super::lanes::{IntLanes, LANES};
use super::math::ROUND;
use super::pack::{BLOCK, Q4Tile, Q8Scales, Q8Tile};
use super::shared::SharedMut;

/// Activations that share a scale.
pub(super) const HALF: usize = BLOCK / 2;

/// 32 activations: value = d * q, with the d of its half.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Int8Block {
    qs: [i8; BLOCK],
    /// Scales of the halves. NaN if one of the values is not finite, which makes the outputs NaN.
    d: [f32; 2],
    /// Sums of the `qs` of the halves.
    sums: [i32; 2],
    /// `d * sum` over both halves: what a weight block's minimum is multiplied with.
    scaled_sum: f32,
}

impl Int8Block {
    pub(super) const ZERO: Self = Self {
        qs: [0; BLOCK],
        d: [0.0; 2],
        sums: [0; 2],
        scaled_sum: 0.0,
    };

    /// Rounds 32 values: scale = largest of the half / 127, ties to even.
    #[inline(always)]
    pub(super) fn new(x: &[f32; BLOCK]) -> Self {
        let mut block = Self::ZERO;
        let (halves, _) = x.as_chunks::<HALF>();
        for (i, x) in halves.iter().enumerate() {
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
            let mut sum = 0i32;
            if !d.is_nan() {
                for (q, x) in block.qs[i * HALF..][..HALF].iter_mut().zip(x) {
                    let shifted = x * inverse + ROUND;
                    // |q| <= 127 by the choice of the scale.
                    let value = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
                    *q = value as i8;
                    sum = sum.wrapping_add(value);
                }
            }
            block.d[i] = d;
            block.sums[i] = sum;
        }
        block.scaled_sum = block.d[0] * block.sums[0] as f32 + block.d[1] * block.sums[1] as f32;
        block
    }

    /// What rounding has taken away: `x` minus this block's values.
    #[inline(always)]
    pub(super) fn remainder(&self, x: &[f32; BLOCK]) -> [f32; BLOCK] {
        std::array::from_fn(|i| x[i] - self.d[i / HALF] * f32::from(self.qs[i]))
    }
}

/// Rows whose blocks lie side by side, so that a register tile finds its rows at fixed distances.
pub(super) const GROUP: usize = 8;

/// Index of a row's block among the activations, which are in the order (group of rows, pass, block, row of the group).
/// (The distance of a row's blocks is a constant: with one that depends on the passes the compiler lets the sums of a
/// register tile spill, and the product takes twice the time.)
#[inline(always)]
pub(super) fn block_index(row: usize, (pass, passes): (usize, usize), block: usize, blocks: usize) -> usize {
    ((row / GROUP * passes + pass) * blocks + block) * GROUP + row % GROUP
}

/// Rounds a row of `32 * blocks` values to int8 blocks in `out`, all rows' activations: in one pass, or in two, of which
/// the second rounds what the first has left over.
///
/// # Safety
/// No other thread may use the blocks of this row.
#[inline(always)]
pub(super) unsafe fn quantise_row(x: &[f32], row: usize, passes: usize, out: &SharedMut<'_, Int8Block>) {
    let (blocks, _) = x.as_chunks::<BLOCK>();
    for (i, x) in blocks.iter().enumerate() {
        let at = block_index(row, (0, passes), i, blocks.len());
        let first = Int8Block::new(x);
        // SAFETY: the caller vouches for the row's blocks.
        unsafe { out.part(at..at + 1)[0] = first };
        if passes == 2 {
            let at = block_index(row, (1, passes), i, blocks.len());
            // SAFETY: as above.
            unsafe { out.part(at..at + 1)[0] = Int8Block::new(&first.remainder(x)) };
        }
    }
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

/// Adds the integer sums of a half of M rows' blocks to those of the whole, with the activations' scales.
///
/// # Safety
/// `x` must point to M blocks.
#[inline(always)]
unsafe fn add_half<S: IntLanes, const M: usize, const T: usize, const H: usize>(
    dots: &[[S::Int; T]; M],
    x: *const Int8Block,
    sums: &mut [[S; T]; M],
) {
    // Loops over constants and not iterators: they must be unrolled for the sums to stay in registers.
    for r in 0..M {
        // SAFETY: row r is one of M.
        let d = S::splat(unsafe { (*x.add(r)).d[H] });
        for t in 0..T {
            let dot = S::to_f32(dots[r][t]);
            sums[r][t] = if H == 0 { dot.mul(d) } else { dot.fma(d, sums[r][t]) };
        }
    }
}

/// The products of half H of a block, four bits a weight.
///
/// # Safety
/// The tiles `first`, `first + stride`, ... must be in the matrix; `x` must point to M blocks.
#[inline(always)]
unsafe fn half_of_q4<S: IntLanes, const M: usize, const T: usize, const H: usize>(
    first: *const Q4Tile,
    stride: usize,
    x: *const Int8Block,
    sums: &mut [[S; T]; M],
) {
    let mut dots = [[S::int_zero(); T]; M];
    for g in 0..4 {
        for t in 0..T {
            // SAFETY: a tile starts with 256 bytes, aligned to 64.
            let bytes = unsafe { S::load_bytes(first.wrapping_add(t * stride).cast::<u8>().add(64 * g)) };
            let bytes = if H == 0 {
                S::low_nibbles(bytes)
            } else {
                S::high_nibbles(bytes)
            };
            for r in 0..M {
                // SAFETY: row r is one of M.
                dots[r][t] = S::dot_nibbles(dots[r][t], bytes, unsafe { four(x.add(r), 4 * H + g) });
            }
        }
    }
    // SAFETY: as the caller vouches.
    unsafe { add_half::<S, M, T, H>(&dots, x, sums) };
}

/// The products of half H of a block, eight bits a weight.
///
/// # Safety
/// As [`half_of_q4`].
#[inline(always)]
unsafe fn half_of_q8<S: IntLanes, const M: usize, const T: usize, const H: usize>(
    first: *const Q8Tile,
    stride: usize,
    x: *const Int8Block,
    sums: &mut [[S; T]; M],
) {
    let mut dots = [[S::int_zero(); T]; M];
    for r in 0..M {
        // SAFETY: row r is one of M.
        dots[r] = [S::offset_start(unsafe { (*x.add(r)).sums[H] }); T];
    }
    for g in 4 * H..4 * H + 4 {
        for t in 0..T {
            // SAFETY: a tile is 512 bytes, aligned to 64.
            let bytes = unsafe { S::load_bytes(first.wrapping_add(t * stride).cast::<u8>().add(64 * g)) };
            for r in 0..M {
                // SAFETY: row r is one of M.
                dots[r][t] = S::dot_offset(dots[r][t], bytes, unsafe { four(x.add(r), g) });
            }
        }
    }
    // SAFETY: as the caller vouches.
    unsafe { add_half::<S, M, T, H>(&dots, x, sums) };
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
            let mut sums = [[S::splat(0.0); T]; M];
            half_of_q4::<S, M, T, 0>(first, stride, x, &mut sums);
            half_of_q4::<S, M, T, 1>(first, stride, x, &mut sums);
            for t in 0..T {
                let tile = first.wrapping_add(t * stride);
                let d = S::load_f16((&raw const (*tile).d).cast());
                let min = S::load_f16((&raw const (*tile).min).cast());
                for r in 0..M {
                    let x = x.add(r);
                    let acc = &mut acc[r][t];
                    *acc = sums[r][t].fma(d, *acc);
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
            let mut sums = [[S::splat(0.0); T]; M];
            half_of_q8::<S, M, T, 0>(first, stride, x, &mut sums);
            half_of_q8::<S, M, T, 1>(first, stride, x, &mut sums);
            for t in 0..T {
                let d = S::load_f16(self.1.wrapping_add(at).wrapping_add(t * stride).cast());
                for r in 0..M {
                    let acc = &mut acc[r][t];
                    *acc = sums[r][t].fma(d, *acc);
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

impl<W: Weights> IntProduct<W> {
    /// The same product further down and to the right, of one pass. The second is added to the first.
    #[inline(always)]
    fn at(&self, row: usize, tile: usize, pass: usize) -> Self {
        Self {
            pass,
            add: self.add || pass > 0,
            tile: self.tile + tile,
            row: self.row + row,
            y: self.y.wrapping_add(row * self.y_row + tile * LANES),
            prefetch: self.prefetch && row == 0 && pass == 0,
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
                for pass in 0..self.passes {
                    let part = self.at(row, tile, pass);
                    // SAFETY: rows and tiles stay within those the caller vouches for.
                    unsafe { part.block::<S>(height, width) };
                }
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
                        self.at(row, tile, self.pass).register_tile::<S, 1, 1>();
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
        let first_block = block_index(self.row, (self.pass, self.passes), 0, self.blocks);
        let mut x = self.x.wrapping_add(first_block);
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
                unsafe {
                    let y = self.y.add(r * self.y_row + t * LANES);
                    let sum = if self.add { S::load(y).add(*acc) } else { *acc };
                    sum.store(y);
                }
            }
        }
    }
}
