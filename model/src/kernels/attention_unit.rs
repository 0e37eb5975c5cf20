//! One unit of attention: some rows of a sequence with the query heads of one KV head. See [`super::attention`].
#![allow(
    unsafe_code,
    reason = "products read and write with strides; threads write disjoint heads of one output"
)]

use std::array::from_fn;
use std::ops::Range;

use super::attention::{PagedAttention, Unit};
use super::dispatch::Kernel;
use super::gemm::Product;
use super::kv_block::{Half, load_row};
use super::lanes::{LANES, Lanes};
use super::math::{exp, load_part};
use super::pack::Line;

/// Keys of a chunk. Part of the numerics: see the text of [`super::attention`].
pub(super) const CHUNK: usize = 128;
/// Query rows whose scores are held at once.
const GROUP: usize = 8;

/// Buffers of one thread.
#[derive(Default)]
pub(super) struct AttentionScratch {
    /// Scaled queries, \[query row\]\[padded dim\].
    q: Vec<Line>,
    /// Keys of a chunk, \[tile of 16 keys\]\[padded dim\]\[key\].
    keys: Vec<Line>,
    /// Values of a chunk, \[key\]\[padded dim\]; before them the keys in this order.
    values: Vec<Line>,
    /// Scores, then unscaled probabilities, of a group: \[query row\]\[key\].
    scores: Vec<Line>,
    /// Sums of weighted values, \[query row\]\[padded dim\].
    out: Vec<Line>,
    /// Largest score so far and sum of the exponentials, of every query row.
    state: Vec<(f32, f32)>,
}

impl AttentionScratch {
    /// Sizes the buffers; does nothing once they are large enough.
    fn prepare(&mut self, query_rows: usize, dim_lines: usize) {
        let grow = |buffer: &mut Vec<Line>, lines: usize| {
            if buffer.len() < lines {
                buffer.resize(lines, Line([0.0; LANES]));
            }
        };
        grow(&mut self.q, query_rows * dim_lines);
        grow(&mut self.keys, CHUNK * dim_lines);
        grow(&mut self.values, CHUNK * dim_lines);
        grow(&mut self.scores, GROUP * CHUNK / LANES);
        grow(&mut self.out, query_rows * dim_lines);
        self.state.clear();
        self.state.resize(query_rows, (f32::NEG_INFINITY, 0.0));
    }
}

/// Where threads write, each its own rows and heads.
#[derive(Clone, Copy)]
pub(super) struct Output(*mut f32);
// SAFETY: units cover disjoint (row, head) pairs of the slice that `PagedAttention::run` borrows mutably, and it has
// checked that all of them lie inside.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

impl Output {
    pub(super) fn new(out: &mut [f32]) -> Self {
        Self(out.as_mut_ptr())
    }
}

pub(super) struct UnitKernel<'a, 'kv> {
    pub(super) attention: &'a PagedAttention<'kv>,
    pub(super) unit: &'a Unit,
    pub(super) q: &'a [f32],
    pub(super) out: Output,
    pub(super) scratch: &'a mut AttentionScratch,
}

impl Kernel for UnitKernel<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(mut self) {
        let query_rows = self.unit.rows.len() * self.heads();
        self.scratch.prepare(query_rows, self.dim().div_ceil(LANES));
        self.load_queries::<S>();
        let (first, last) = (self.seen(0), self.seen(query_rows - 1));
        for base in (first.start / CHUNK * CHUNK..last.end).step_by(CHUNK) {
            let keys = first.start.max(base)..last.end.min(base + CHUNK);
            self.load_keys::<S>(base, keys.clone());
            self.load_rows::<S>(Half::Values, base, keys);
            for start in (0..query_rows).step_by(GROUP) {
                self.group::<S>(base, start..query_rows.min(start + GROUP));
            }
        }
        self.store_out::<S>(query_rows);
    }
}

impl<'kv> UnitKernel<'_, 'kv> {
    /// Query heads of the KV head.
    #[inline(always)]
    fn heads(&self) -> usize {
        self.attention.shape.num_heads / self.attention.shape.kv.num_kv_heads
    }
    #[inline(always)]
    fn dim(&self) -> usize {
        self.attention.shape.kv.head_dim
    }
    /// Head width in f32, padded to whole vectors.
    #[inline(always)]
    fn padded(&self) -> usize {
        self.dim().next_multiple_of(LANES)
    }

    /// Positions that a query row sees.
    #[inline(always)]
    fn seen(&self, query_row: usize) -> Range<usize> {
        let sequence = &self.attention.sequences[self.unit.sequence];
        let end = sequence.first_position + self.unit.rows.start + query_row / self.heads() + 1;
        self.attention
            .shape
            .window
            .map_or(0, |window| end.saturating_sub(window))..end
    }

    /// Where a query row's head begins in q and in the output.
    #[inline(always)]
    fn offset(&self, query_row: usize) -> usize {
        let (shape, heads) = (self.attention.shape, self.heads());
        let sequence = &self.attention.sequences[self.unit.sequence];
        let row = sequence.rows.start + self.unit.rows.start + query_row / heads;
        (row * shape.num_heads + self.unit.kv_head * heads + query_row % heads) * self.dim()
    }

    /// Scales the queries and pads them to whole vectors.
    #[inline(always)]
    fn load_queries<S: Lanes>(&mut self) {
        let (dim, scale) = (self.dim(), S::splat(self.attention.shape.scale));
        let lines = dim.div_ceil(LANES);
        for i in 0..self.scratch.state.len() {
            let head = &self.q[self.offset(i)..][..dim];
            for (j, line) in self.scratch.q[i * lines..][..lines].iter_mut().enumerate() {
                line.0 = load_part::<S>(head, j * LANES).mul(scale).to_array();
            }
        }
        self.scratch.out[..self.scratch.state.len() * lines].fill(Line([0.0; LANES]));
    }

    /// The block of the first of some positions, the slots there that belong to them, and the rest of the positions.
    #[inline(always)]
    fn next_block(&self, positions: Range<usize>) -> (&'kv [u8], Range<usize>, Range<usize>) {
        let size = self.attention.shape.kv.block_tokens;
        let id = self.attention.sequences[self.unit.sequence].blocks[positions.start / size];
        let slot = positions.start % size;
        let count = positions.len().min(size - slot);
        (
            (self.attention.kv)(id),
            slot..slot + count,
            positions.start + count..positions.end,
        )
    }

    /// Keys of a chunk as tiles of 16 keys, transposed. Of the tiles' keys that are not in `keys` nothing is used.
    #[inline(always)]
    fn load_keys<S: Lanes>(&mut self, base: usize, keys: Range<usize>) {
        // The place of the values serves for the keys before they are transposed.
        self.load_rows::<S>(Half::Keys, base, keys.clone());
        let padded = self.padded();
        let lines = padded / LANES;
        let AttentionScratch {
            keys: to, values: from, ..
        } = &mut *self.scratch;
        for tile in (keys.start - base) / LANES..(keys.end - base).div_ceil(LANES) {
            let from = &from[tile * LANES * lines..][..LANES * lines];
            let to = &mut to[tile * LANES * lines..][..LANES * lines];
            for (i, to) in to.chunks_exact_mut(LANES).enumerate() {
                let from: *const f32 = from[i..].as_ptr().cast();
                let mut rows = [S::splat(0.0); LANES];
                for (j, row) in rows.iter_mut().enumerate() {
                    // SAFETY: line i of row j of 16, each of `lines` > i lines.
                    *row = unsafe { S::load(from.wrapping_add(j * padded)) };
                }
                for (line, column) in to.iter_mut().zip(S::transpose(rows)) {
                    line.0 = column.to_array();
                }
            }
        }
    }

    /// Keys or values of a chunk as f32 rows, in the place of the values.
    #[inline(always)]
    fn load_rows<S: Lanes>(&mut self, half: Half, base: usize, keys: Range<usize>) {
        let (kv, lines) = (&self.attention.shape.kv, self.padded() / LANES);
        let mut positions = keys;
        while !positions.is_empty() {
            let at = positions.start - base;
            let (block, slots, rest) = self.next_block(positions);
            let rows = kv.rows(block, half, self.unit.kv_head, slots);
            for (row, to) in rows.zip(self.scratch.values[at * lines..].chunks_exact_mut(lines)) {
                load_row::<S>(kv.dtype, row, to);
            }
            positions = rest;
        }
    }

    /// A chunk's contribution to a few query rows.
    #[inline(always)]
    fn group<S: Lanes>(&mut self, base: usize, query_rows: Range<usize>) {
        // What each row sees of the chunk, counted from its start.
        let mut seen: [Range<usize>; GROUP] = from_fn(|_| 0..0);
        let count = query_rows.len();
        for (seen, row) in seen.iter_mut().zip(query_rows.clone()) {
            let all = self.seen(row);
            let clip = |position: usize| position.clamp(base, base + CHUNK) - base;
            *seen = clip(all.start)..clip(all.end);
        }
        let seen = &seen[..count];
        // Rows see later and later positions: the first row's start is the lowest, the last row's end the highest.
        let (lowest, highest) = (seen[0].start, seen[count - 1].end);
        if lowest >= highest {
            return;
        }
        self.score::<S>(query_rows.clone(), lowest / LANES..highest.div_ceil(LANES));
        for (i, (seen, row)) in seen.iter().zip(query_rows.clone()).enumerate() {
            if !seen.is_empty() {
                self.weigh::<S>(i, seen.clone(), row);
            }
        }
        // Keys that all rows see are taken for all at once, those before and after them row by row.
        let common = seen[count - 1].start..seen[0].end;
        if common.is_empty() {
            for (i, seen) in seen.iter().enumerate() {
                self.accumulate::<S>(i..i + 1, query_rows.start, seen.clone());
            }
            return;
        }
        for (i, seen) in seen.iter().enumerate() {
            self.accumulate::<S>(i..i + 1, query_rows.start, seen.start..common.start);
        }
        self.accumulate::<S>(0..count, query_rows.start, common.clone());
        for (i, seen) in seen.iter().enumerate() {
            self.accumulate::<S>(i..i + 1, query_rows.start, common.end..seen.end);
        }
    }

    /// Scores of a group for some tiles of keys.
    #[inline(always)]
    fn score<S: Lanes>(&mut self, query_rows: Range<usize>, tiles: Range<usize>) {
        let padded = self.padded();
        let scratch = &mut *self.scratch;
        let product = Product {
            w: scratch.keys[tiles.start * padded..tiles.end * padded].as_ptr().cast(),
            w_tile: padded * LANES,
            w_k: LANES,
            k: self.attention.shape.kv.head_dim,
            x: scratch.q[query_rows.start * padded / LANES..query_rows.end * padded / LANES]
                .as_ptr()
                .cast(),
            x_row: padded,
            y: scratch.scores[tiles.start..].as_mut_ptr().cast(),
            y_row: CHUNK,
            accumulate: false,
            prefetch: false,
        };
        // SAFETY: the slices above cover tiles and query rows; `scores` has GROUP rows of CHUNK, and at most GROUP
        // rows and CHUNK / 16 tiles are asked for.
        unsafe { product.run::<S>(query_rows.len(), tiles.len()) };
    }

    /// Turns row `i` of the scores into weights, and brings the query row's maximum, sum and output up to date.
    #[inline(always)]
    fn weigh<S: Lanes>(&mut self, i: usize, seen: Range<usize>, query_row: usize) {
        let lines_per_row = CHUNK / LANES;
        let lines = &mut self.scratch.scores[i * lines_per_row..][..lines_per_row];
        let lines = &mut lines[seen.start / LANES..seen.end.div_ceil(LANES)];
        // Keys not seen weigh exactly nothing.
        if let Some(first) = lines.first_mut() {
            first.0[..seen.start % LANES].fill(f32::NEG_INFINITY);
        }
        if let (Some(last), 1..) = (lines.last_mut(), seen.end % LANES) {
            last.0[seen.end % LANES..].fill(f32::NEG_INFINITY);
        }
        let mut largest = S::splat(f32::NEG_INFINITY);
        for line in lines.iter() {
            largest = largest.max(S::from_array(line.0));
        }
        let (old, sum) = self.scratch.state[query_row];
        let largest = largest.largest();
        let max = if old > largest { old } else { largest };
        let mut added = S::splat(0.0);
        for line in lines.iter_mut() {
            let weight = exp(S::from_array(line.0).sub(S::splat(max)));
            added = added.add(weight);
            line.0 = weight.to_array();
        }
        let correction = exp(S::splat(old - max));
        let factor = correction.to_array()[0];
        self.scratch.state[query_row] = (max, sum.mul_add(factor, added.sum()));
        // Times exactly 1 changes nothing, so the work can be left out.
        if factor != 1.0 {
            let lines = self.padded() / LANES;
            for line in &mut self.scratch.out[query_row * lines..][..lines] {
                line.0 = S::from_array(line.0).mul(correction).to_array();
            }
        }
    }

    /// Adds weighted values to rows of a group that starts at query row `first`.
    #[inline(always)]
    fn accumulate<S: Lanes>(&mut self, rows: Range<usize>, first: usize, keys: Range<usize>) {
        if keys.is_empty() {
            return;
        }
        let padded = self.padded();
        let lines = padded / LANES;
        let scratch = &mut *self.scratch;
        let product = Product {
            w: scratch.values[keys.start * lines..keys.end * lines].as_ptr().cast(),
            w_tile: LANES,
            w_k: padded,
            k: keys.len(),
            x: scratch.scores[rows.start * CHUNK / LANES..rows.end * CHUNK / LANES]
                .as_ptr()
                .cast::<f32>()
                .wrapping_add(keys.start),
            x_row: CHUNK,
            y: scratch.out[(first + rows.start) * lines..(first + rows.end) * lines]
                .as_mut_ptr()
                .cast(),
            y_row: padded,
            accumulate: true,
            prefetch: false,
        };
        // SAFETY: the slices above cover the keys' values, the rows' weights and the rows' outputs.
        unsafe { product.run::<S>(rows.len(), lines) };
    }

    /// Divides by the sums and writes the unit's part of the output.
    #[inline(always)]
    fn store_out<S: Lanes>(&mut self, query_rows: usize) {
        let (dim, lines) = (self.dim(), self.padded() / LANES);
        for i in 0..query_rows {
            let sum = S::splat(self.scratch.state[i].1);
            // SAFETY: a (row, head) of this unit alone, inside of the output: see `Output`.
            let out = unsafe { std::slice::from_raw_parts_mut(self.out.0.add(self.offset(i)), dim) };
            for (part, line) in out.chunks_mut(LANES).zip(&self.scratch.out[i * lines..][..lines]) {
                let values = S::from_array(line.0).div(sum).to_array();
                part.copy_from_slice(&values[..part.len()]);
            }
        }
    }
}
