//! Quantised products of many rows: the weights are taken apart once for all rows, into the first-level cache.
//!
//! A register tile of a few rows takes as long to make bytes of a weight's bits, and numbers of its scales, as one of many
//! rows. The bytes hold the same integers and the sums run in the same order, so the bits are those of `int_gemm`.
#![allow(
    unsafe_code,
    reason = "a register tile reads and writes with strides, through pointers"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "loops over constants are unrolled, iterators are not always"
)]

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::int_gemm::{IntProduct, ROWS, add_block};
use super::int8_block::{GROUP, Int8Block, block_index};
use super::lanes::{IntLanes, LANES};
use super::tiles::{Form, QuantTile};

/// A block of 16 columns x 32 of k of a tile of kind Q.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Unpacked<Q> {
    /// Byte (g, column, j) holds k = 4 g + j. Quants with an offset have that of Q8_0, 128: activations have its start
    /// ready.
    qs: [u8; 512],
    scales: [[f32; LANES]; 2],
    kind: PhantomData<Q>,
}

impl<Q: QuantTile> QuantTile for Unpacked<Q> {
    const BLOCKS: usize = 1;
    const FORM: Form = Q::FORM;
    const OFFSET: u8 = if Q::OFFSET == 0 { 0 } else { 128 };

    #[inline(always)]
    fn start<S: IntLanes>(_negative: i32, negative_128: i32) -> S::Int {
        if const { Self::OFFSET == 0 } {
            S::int_zero()
        } else {
            S::offset_start(negative_128)
        }
    }
    #[inline(always)]
    unsafe fn quants<S: IntLanes, const HALF: usize, const G: usize>(tile: *const Self, _block: usize) -> S::Bytes {
        // SAFETY: the caller vouches for the tile; HALF < 2, G < 4.
        unsafe { S::load_bytes((&raw const (*tile).qs).cast::<u8>().add(64 * (4 * HALF + G))) }
    }
    #[inline(always)]
    fn dot<S: IntLanes>(acc: S::Int, quants: S::Bytes, x: i32) -> S::Int {
        if const { Self::OFFSET == 0 } {
            S::dot_small(acc, quants, x)
        } else {
            S::dot_offset(acc, quants, x)
        }
    }
    #[inline(always)]
    unsafe fn scales<S: IntLanes>(tile: *const Self, _block: usize) -> [S; 2] {
        // SAFETY: the caller vouches for the tile.
        unsafe {
            let scales = (&raw const (*tile).scales).cast::<f32>();
            let second = if const { matches!(Q::FORM, Form::Plain) } {
                S::splat(0.0)
            } else {
                S::load(scales.add(LANES))
            };
            [S::load(scales), second]
        }
    }
}

/// Tiles of columns side by side.
const TILES: usize = 2;
/// Blocks of k that are taken apart at a time: with their activations they fit in the first-level cache.
const CHUNK: usize = 24;
/// Most rows that share what is taken apart.
pub(super) const HEIGHT: usize = 128;

/// What a strip of tiles works with.
#[repr(C, align(64))]
struct Buffers<Q> {
    weights: [[Unpacked<Q>; CHUNK]; TILES],
    /// Sums of products so far.
    sums: [[[f32; LANES]; TILES]; HEIGHT],
}

impl<Q: QuantTile> IntProduct<Q> {
    /// As [`IntProduct::run`], for up to [`HEIGHT`] rows.
    ///
    /// # Panics
    /// If there are more.
    ///
    /// # Safety
    /// As [`IntProduct::run`].
    #[inline(always)]
    pub(super) unsafe fn run_unpacked<S: IntLanes>(&self, rows: usize, tiles: usize) {
        assert!(rows <= HEIGHT, "room for the sums of all rows");
        let mut buffers = MaybeUninit::<Buffers<Q>>::uninit();
        for tile in (0..tiles).step_by(TILES) {
            for pass in 0..self.passes {
                let part = self.at(0, tile, pass);
                // SAFETY: the tiles are among those the caller vouches for.
                unsafe {
                    if tile + TILES <= tiles {
                        part.strip::<S, TILES>(rows, buffers.as_mut_ptr());
                    } else {
                        part.strip::<S, 1>(rows, buffers.as_mut_ptr());
                    }
                }
            }
        }
    }

    /// T tiles of columns, up to HEIGHT rows, one pass.
    ///
    /// # Safety
    /// As [`IntProduct::run`]; the buffers need not be initialised.
    #[inline(always)]
    unsafe fn strip<S: IntLanes, const T: usize>(&self, rows: usize, buffers: *mut Buffers<Q>) {
        let chunk = self.blocks.div_ceil(self.blocks.div_ceil(CHUNK));
        let mut first = 0;
        while first < self.blocks {
            let count = chunk.min(self.blocks - first);
            // SAFETY: the blocks and rows are among those the caller vouches for; `count` is at most CHUNK.
            unsafe {
                self.unpack::<S, T>(first, count, (&raw mut (*buffers).weights).cast());
                for row in (0..rows).step_by(ROWS) {
                    self.add_chunk::<S, T>(row, rows - row, first, count, buffers);
                }
            }
            first += count;
        }
    }

    /// Takes blocks `first` to `first + count - 1` of T tiles apart.
    ///
    /// # Safety
    /// The tiles must have the blocks, and `to` room for CHUNK blocks for each of them.
    #[inline(always)]
    unsafe fn unpack<S: IntLanes, const T: usize>(&self, first: usize, count: usize, to: *mut Unpacked<Q>) {
        let stride = self.stride();
        for t in 0..T {
            for i in 0..count {
                let block = first + i;
                let tile = self.w.wrapping_add(t * stride + block / Q::BLOCKS);
                let block = block % Q::BLOCKS;
                // SAFETY: the caller vouches for tile, block and room.
                unsafe {
                    let to = to.add(t * CHUNK + i);
                    unpack_four::<S, Q, 0, 0>(tile, block, to);
                    unpack_four::<S, Q, 0, 1>(tile, block, to);
                    unpack_four::<S, Q, 0, 2>(tile, block, to);
                    unpack_four::<S, Q, 0, 3>(tile, block, to);
                    unpack_four::<S, Q, 1, 0>(tile, block, to);
                    unpack_four::<S, Q, 1, 1>(tile, block, to);
                    unpack_four::<S, Q, 1, 2>(tile, block, to);
                    unpack_four::<S, Q, 1, 3>(tile, block, to);
                    let [scale, second] = Q::scales::<S>(tile, block);
                    let scales = (&raw mut (*to).scales).cast::<f32>();
                    scale.store(scales);
                    if const { !matches!(Q::FORM, Form::Plain) } {
                        second.store(scales.add(LANES));
                    }
                }
            }
        }
    }

    /// Adds the products of the blocks that are taken apart for rows `row` to `row + ROWS - 1`, of which there are `rows`.
    ///
    /// # Safety
    /// As [`IntProduct::run`]; the buffers must have the blocks from `first` on, and the sums of those before.
    #[inline(always)]
    unsafe fn add_chunk<S: IntLanes, const T: usize>(
        &self,
        row: usize,
        rows: usize,
        first: usize,
        count: usize,
        buffers: *mut Buffers<Q>,
    ) {
        let mut acc = [[S::splat(0.0); T]; ROWS];
        // SAFETY: see above; a group has ROWS rows from `row` on.
        unsafe {
            let sums = (&raw mut (*buffers).sums).cast::<f32>().add(row * TILES * LANES);
            if first > 0 {
                for r in 0..ROWS {
                    for t in 0..T {
                        acc[r][t] = S::load(sums.add((r * TILES + t) * LANES));
                    }
                }
            }
            let at = block_index(self.row + row, (self.pass, self.passes), first, self.blocks);
            let mut x: *const Int8Block = self.x.wrapping_add(at);
            let mut w: *const Unpacked<Q> = (&raw const (*buffers).weights).cast();
            for _ in 0..count {
                add_block::<S, Unpacked<Q>, ROWS, T>(w, CHUNK, 0, x, &mut acc);
                (w, x) = (w.wrapping_add(1), x.wrapping_add(GROUP));
            }
            if first + count < self.blocks {
                for r in 0..ROWS {
                    for t in 0..T {
                        acc[r][t].store(sums.add((r * TILES + t) * LANES));
                    }
                }
                return;
            }
        }
        // SAFETY: the rows and tiles are among those the caller vouches for.
        unsafe { self.at(row, 0, self.pass).write::<S, ROWS, T>(&acc, rows) };
    }
}

/// The quants of k = 16 HALF + 4 G to 16 HALF + 4 G + 3 as bytes.
///
/// # Safety
/// As [`QuantTile::quants`], and `to` must have room for a block.
#[inline(always)]
unsafe fn unpack_four<S: IntLanes, Q: QuantTile, const HALF: usize, const G: usize>(
    tile: *const Q,
    block: usize,
    to: *mut Unpacked<Q>,
) {
    // SAFETY: as the caller says; HALF < 2, G < 4.
    unsafe {
        let mut quants = Q::quants::<S, HALF, G>(tile, block);
        if const { Q::OFFSET > 0 && Q::OFFSET < 128 } {
            quants = S::plus(quants, const { 128 - Q::OFFSET });
        }
        S::store_bytes(quants, (&raw mut (*to).qs).cast::<u8>().add(64 * (4 * HALF + G)));
    }
}
