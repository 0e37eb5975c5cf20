//! The f32 product of a few rows with tiles of 16 columns: products with float weights, and both of attention's.
//!
//! Every output element has one accumulator and takes its products in the order of k, each by one fused
//! multiply-add. Rows and columns only decide which elements share a register tile, so they never change a bit.
#![allow(
    unsafe_code,
    reason = "a register tile reads and writes with strides, through pointers"
)]

use half::{bf16, f16};

use super::lanes::{LANES, Lanes};

/// Weights of 16 columns, read as f32.
pub(super) trait Weights16: Copy {
    /// Whether there are register tiles for every number of rows, or only for 1, 2, 4 and 8: code is large.
    const ALL_HEIGHTS: bool;

    /// # Safety
    /// `p` must be good for reading 16 weights; no alignment is needed.
    unsafe fn load<S: Lanes>(p: *const Self) -> S;
}

impl Weights16 for f32 {
    const ALL_HEIGHTS: bool = true;

    #[inline(always)]
    unsafe fn load<S: Lanes>(p: *const Self) -> S {
        // SAFETY: as the caller says.
        unsafe { S::load(p) }
    }
}

impl Weights16 for f16 {
    const ALL_HEIGHTS: bool = false;

    #[inline(always)]
    unsafe fn load<S: Lanes>(p: *const Self) -> S {
        // SAFETY: as the caller says.
        unsafe { S::load_f16(p.cast()) }
    }
}

impl Weights16 for bf16 {
    const ALL_HEIGHTS: bool = false;

    #[inline(always)]
    unsafe fn load<S: Lanes>(p: *const Self) -> S {
        // SAFETY: as the caller says.
        unsafe { S::load_bf16(p.cast()) }
    }
}

/// y\[r\]\[16 t + c\] (+)= sum over i of x\[r\]\[i\] * w\[t\]\[i\]\[c\]. Strides are in elements.
#[derive(Clone, Copy)]
pub(super) struct Product<W = f32> {
    pub(super) w: *const W,
    pub(super) w_tile: usize,
    pub(super) w_k: usize,
    pub(super) k: usize,
    pub(super) x: *const f32,
    pub(super) x_row: usize,
    pub(super) y: *mut f32,
    pub(super) y_row: usize,
    /// Go on from what is in y instead of from zero.
    pub(super) accumulate: bool,
    /// Ask for the weights of the next tiles while working on these.
    pub(super) prefetch: bool,
}

impl<W: Weights16> Product<W> {
    /// The same product further down and to the right.
    #[inline(always)]
    fn at(&self, row: usize, tile: usize) -> Self {
        Self {
            w: self.w.wrapping_add(tile * self.w_tile),
            x: self.x.wrapping_add(row * self.x_row),
            y: self.y.wrapping_add(row * self.y_row + tile * LANES),
            prefetch: self.prefetch && row == 0,
            ..*self
        }
    }

    /// The product for `rows` rows and `tiles` tiles.
    ///
    /// # Safety
    /// All elements named by the fields, `rows` and `tiles` must be good for reading (w, x, and y to accumulate) and
    /// writing (y), and y must not overlap the others.
    #[inline(always)]
    pub(super) unsafe fn run<S: Lanes>(&self, rows: usize, tiles: usize) {
        let mut tile = 0;
        // With few rows, more tiles side by side keep as many accumulators busy.
        let wide = match rows {
            1 => 4 * S::TILES,
            2..=4 if const { W::ALL_HEIGHTS } => 2 * S::TILES,
            _ => S::TILES,
        };
        while tile < tiles {
            let width = if tile + wide <= tiles {
                wide
            } else {
                S::TILES.min(tiles - tile)
            };
            let mut row = 0;
            while row < rows {
                let mut height = S::ROWS.min(rows - row);
                if const { !W::ALL_HEIGHTS } {
                    height = 1 << height.ilog2();
                }
                // SAFETY: rows and tiles stay within those the caller vouches for.
                unsafe { self.at(row, tile).block::<S>(height, width) };
                row += height;
            }
            tile += width;
        }
    }

    /// # Safety
    /// As [`Product::run`].
    #[inline(always)]
    unsafe fn block<S: Lanes>(&self, rows: usize, tiles: usize) {
        // SAFETY: passed on from the caller; each arm covers exactly `rows` x `tiles`.
        unsafe {
            match (rows, tiles) {
                (1, 8) if const { S::TILES > 1 } => self.register_tile::<S, 1, 8>(),
                (1, 4) => self.register_tile::<S, 1, 4>(),
                (2, 4) if const { W::ALL_HEIGHTS && S::TILES > 1 } => self.register_tile::<S, 2, 4>(),
                (3, 4) if const { W::ALL_HEIGHTS && S::TILES > 1 } => self.register_tile::<S, 3, 4>(),
                (4, 4) if const { W::ALL_HEIGHTS && S::TILES > 1 } => self.register_tile::<S, 4, 4>(),
                (1, 2) => self.register_tile::<S, 1, 2>(),
                (2, 2) => self.register_tile::<S, 2, 2>(),
                (3, 2) if const { W::ALL_HEIGHTS } => self.register_tile::<S, 3, 2>(),
                (4, 2) => self.register_tile::<S, 4, 2>(),
                (5, 2) if const { W::ALL_HEIGHTS && S::TILES > 1 } => self.register_tile::<S, 5, 2>(),
                (6, 2) if const { W::ALL_HEIGHTS && S::TILES > 1 } => self.register_tile::<S, 6, 2>(),
                (7, 2) if const { W::ALL_HEIGHTS && S::TILES > 1 } => self.register_tile::<S, 7, 2>(),
                (8, 2) if const { S::TILES > 1 } => self.register_tile::<S, 8, 2>(),
                (1, 1) => self.register_tile::<S, 1, 1>(),
                (2, 1) => self.register_tile::<S, 2, 1>(),
                (3, 1) if const { W::ALL_HEIGHTS } => self.register_tile::<S, 3, 1>(),
                (4, 1) => self.register_tile::<S, 4, 1>(),
                (5, 1) if const { W::ALL_HEIGHTS && S::ROWS > 4 } => self.register_tile::<S, 5, 1>(),
                (6, 1) if const { W::ALL_HEIGHTS && S::ROWS > 4 } => self.register_tile::<S, 6, 1>(),
                (7, 1) if const { W::ALL_HEIGHTS && S::ROWS > 6 } => self.register_tile::<S, 7, 1>(),
                (8, 1) if const { S::ROWS > 6 } => self.register_tile::<S, 8, 1>(),
                (rows, tiles) => {
                    for (row, tile) in (0..rows).flat_map(|r| (0..tiles).map(move |t| (r, t))) {
                        self.at(row, tile).register_tile::<S, 1, 1>();
                    }
                }
            }
        }
    }

    /// # Safety
    /// As [`Product::run`], for M rows and T tiles.
    #[inline(always)]
    unsafe fn register_tile<S: Lanes, const M: usize, const T: usize>(&self) {
        // SAFETY: indices stay below M rows, T tiles and k, which the caller vouches for.
        unsafe {
            let mut acc = [[S::splat(0.0); T]; M];
            if self.accumulate {
                for (r, acc) in acc.iter_mut().enumerate() {
                    for (t, acc) in acc.iter_mut().enumerate() {
                        *acc = S::load(self.y.add(r * self.y_row + t * LANES));
                    }
                }
            }
            let (mut w, mut x) = (self.w, self.x);
            for _ in 0..self.k {
                let mut columns = [S::splat(0.0); T];
                for (t, columns) in columns.iter_mut().enumerate() {
                    *columns = W::load(w.add(t * self.w_tile));
                    if self.prefetch {
                        S::prefetch(w.wrapping_add((T + t) * self.w_tile).cast());
                    }
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let x = S::splat(*x.add(r * self.x_row));
                    for (acc, w) in acc.iter_mut().zip(columns) {
                        *acc = w.fma(x, *acc);
                    }
                }
                (w, x) = (w.wrapping_add(self.w_k), x.wrapping_add(1));
            }
            for (r, acc) in acc.iter().enumerate() {
                for (t, acc) in acc.iter().enumerate() {
                    acc.store(self.y.add(r * self.y_row + t * LANES));
                }
            }
        }
    }
}
