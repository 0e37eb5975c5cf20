//! Attention of some rows of a sequence with the query heads of one KV head: what prefilling does. A chunk's keys and
//! values are converted to f32 once for all these query rows. See [`super::attention`].
#![allow(
    unsafe_code,
    reason = "products read and write with strides; keys and values are read through the addresses of blocks"
)]

use std::array::from_fn;
use std::ops::Range;

use super::attention::{Call, Unit};
use super::attention_chunk::{CHUNK, Part, Running, Scales, TILES, add_lines, weigh};
use super::dispatch::Kernel;
use super::gemm::Product;
use super::kv_element::{Element, ElementKernel, with_element};
use super::lanes::{LANES, Lanes};
use super::pack::Line;

/// Query rows whose scores are held at once.
const GROUP: usize = LANES;

const ZERO: Line = Line([0.0; LANES]);

pub(super) struct SharedKernel<'a> {
    pub(super) call: Call<'a>,
    pub(super) unit: &'a Unit,
    pub(super) running: &'a mut Running,
}

/// Makes room for the units of this kernel, beside [`Running::make_room`].
pub(super) fn make_room(running: &mut Running, lines: usize) {
    add_lines(&mut running.keys, CHUNK * lines);
    add_lines(&mut running.values, CHUNK * lines);
    add_lines(&mut running.scores, GROUP * TILES);
}

impl Kernel for SharedKernel<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(mut self) {
        let (unit, heads, lines) = (self.unit, self.call.shape.group(), self.call.shape.lines());
        let query_rows = unit.rows * heads;
        self.running.start(query_rows, lines);
        for i in 0..unit.rows {
            self.running
                .load_queries::<S>(&self.call, i * heads, unit.row + i, unit.kv_head);
        }
        let (first, last) = (self.seen(0), self.seen(query_rows - 1));
        let mut scales = Scales::NONE;
        for base in unit.chunks.clone().map(|chunk| chunk * CHUNK) {
            let keys = first.start.max(base)..last.end.min(base + CHUNK);
            let load = Load {
                call: &self.call,
                unit,
                base,
                keys,
                running: self.running,
                scales: &mut scales,
            };
            with_element::<S>(self.call.shape.kv.dtype, load);
            let scaled = self.call.shape.kv.dtype.scale_bytes() > 0;
            let scales = scaled.then_some(&scales);
            for start in (0..query_rows).step_by(GROUP) {
                self.group::<S>(base, start..query_rows.min(start + GROUP), scales);
            }
        }
        for i in 0..unit.rows {
            self.running
                .finish::<S>(&self.call, i * heads, unit.row + i, unit.kv_head);
        }
    }
}

/// Converts a chunk.
struct Load<'a> {
    call: &'a Call<'a>,
    unit: &'a Unit,
    /// The chunk's first position.
    base: usize,
    /// What is needed of it.
    keys: Range<usize>,
    running: &'a mut Running,
    scales: &'a mut Scales,
}

impl ElementKernel for Load<'_> {
    #[inline(always)]
    fn run<S: Lanes, E: Element>(mut self) {
        self.load_keys::<S, E>();
        if self.call.shape.kv.latent {
            self.values_of_keys::<S, E>();
        } else {
            self.load_values::<S, E>();
        }
    }
}

impl Load<'_> {
    /// The KV head in the block of the first of some positions, the slots there that belong to them, and the rest.
    #[inline(always)]
    fn next_block(&self, positions: Range<usize>) -> (*const u8, Range<usize>, Range<usize>) {
        let size = self.call.shape.kv.block_tokens;
        let slot = positions.start % size;
        let count = positions.len().min(size - slot);
        let head = self.call.head(self.unit, positions.start / size);
        (head, slot..slot + count, positions.start + count..positions.end)
    }

    /// Keys of a chunk as tiles of 16 keys in f32. Of the tiles' keys that are not in `keys` nothing is used.
    #[inline(always)]
    fn load_keys<S: Lanes, E: Element>(&mut self) {
        let (kv, padded) = (&self.call.shape.kv, self.call.shape.lines() * LANES);
        let (base, keys, step) = (self.base, self.keys.clone(), kv.block_tokens * E::SIZE);
        for tile in (keys.start - base) / LANES..(keys.end - base).div_ceil(LANES) {
            let positions = base + tile * LANES..(base + (tile + 1) * LANES);
            if kv.block_tokens.is_multiple_of(LANES) {
                let (head, slots, _) = self.next_block(positions);
                let from = head.wrapping_add(slots.start * E::SIZE);
                let to = &mut self.running.keys[tile * padded..][..kv.head_dim];
                for (d, line) in to.iter_mut().enumerate() {
                    // SAFETY: the sixteen slots of a tile, which are in one block, in dimension d.
                    line.0 = unsafe { E::load::<S>(from.wrapping_add(d * step)) }.to_array();
                }
            } else {
                self.gather_tile::<S, E>(tile, positions.start.max(keys.start)..positions.end.min(keys.end));
            }
        }
    }

    /// A tile of keys that lie in several blocks, or not sixteen to a block.
    #[inline(always)]
    fn gather_tile<S: Lanes, E: Element>(&mut self, tile: usize, keys: Range<usize>) {
        let (kv, padded) = (&self.call.shape.kv, self.call.shape.lines() * LANES);
        for d in 0..kv.head_dim {
            let mut bytes = [0u8; LANES * size_of::<f32>()];
            let mut positions = keys.clone();
            while !positions.is_empty() {
                let at = (positions.start - self.base - tile * LANES) * E::SIZE;
                let (head, slots, rest) = self.next_block(positions);
                let from = head.wrapping_add((d * kv.block_tokens + slots.start) * E::SIZE);
                let to = &mut bytes[at..at + slots.len() * E::SIZE];
                // SAFETY: these slots of dimension d are in the block.
                unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
                positions = rest;
            }
            // SAFETY: the buffer has room for 16 of the widest elements.
            self.running.keys[tile * padded + d].0 = unsafe { E::load::<S>(bytes.as_ptr()) }.to_array();
        }
    }

    /// Turns the keys that are loaded into values, and loads their scales.
    #[inline(always)]
    fn values_of_keys<S: Lanes, E: Element>(&mut self) {
        let (kv, lines) = (&self.call.shape.kv, self.call.shape.lines());
        for tile in (self.keys.start - self.base) / LANES..(self.keys.end - self.base).div_ceil(LANES) {
            for line in 0..lines {
                let first = line * LANES;
                let dims = LANES.min(kv.head_dim - first);
                let mut rows = [S::splat(0.0); LANES];
                for (row, from) in rows
                    .iter_mut()
                    .zip(&self.running.keys[tile * lines * LANES + first..][..dims])
                {
                    *row = S::from_array(from.0);
                }
                for (key, row) in S::transpose(rows).into_iter().enumerate() {
                    self.running.values[(tile * LANES + key) * lines + line].0 = row.to_array();
                }
            }
        }
        let mut positions = self.keys.clone();
        while E::SCALED && !positions.is_empty() {
            let at = positions.start - self.base;
            let (head, slots, rest) = self.next_block(positions);
            // SAFETY: the slots are in the block.
            unsafe { self.scales.read(kv, head, slots, at) };
            positions = rest;
        }
    }

    /// Values of a chunk as f32 rows, padded with zeros to whole lines, and the chunk's scales.
    #[inline(always)]
    fn load_values<S: Lanes, E: Element>(&mut self) {
        let (kv, lines) = (&self.call.shape.kv, self.call.shape.lines());
        let row = kv.head_dim * E::SIZE;
        let mut positions = self.keys.clone();
        while !positions.is_empty() {
            let at = positions.start - self.base;
            let (head, slots, rest) = self.next_block(positions);
            if E::SCALED {
                // SAFETY: the slots are in the block.
                unsafe { self.scales.read(kv, head, slots.clone(), at) };
            }
            let to = &mut self.running.values[at * lines..][..slots.len() * lines];
            for (slot, to) in slots.zip(to.chunks_exact_mut(lines)) {
                let from = head.wrapping_add(kv.half_bytes() + slot * row);
                for (i, line) in to.iter_mut().enumerate() {
                    let (from, left) = (from.wrapping_add(i * LANES * E::SIZE), kv.head_dim - i * LANES);
                    if left >= LANES {
                        // SAFETY: sixteen dimensions of a slot in the block.
                        line.0 = unsafe { E::load::<S>(from) }.to_array();
                        continue;
                    }
                    let mut bytes = [0u8; LANES * size_of::<f32>()];
                    // SAFETY: the last dimensions of a slot in the block; then the buffer, which has room for 16.
                    line.0 = unsafe {
                        std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), left * E::SIZE);
                        E::load::<S>(bytes.as_ptr())
                    }
                    .to_array();
                }
            }
            positions = rest;
        }
    }
}

impl SharedKernel<'_> {
    /// Positions that a query row sees.
    #[inline(always)]
    fn seen(&self, query_row: usize) -> Range<usize> {
        let shape = self.call.shape;
        shape.seen(self.unit.position + query_row / shape.group())
    }

    /// A chunk's contribution to a few query rows.
    #[inline(always)]
    fn group<S: Lanes>(&mut self, base: usize, query_rows: Range<usize>, scales: Option<&Scales>) {
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
        // The tiles that are seen are written before they are read.
        let mut scores = std::mem::take(&mut self.running.scores);
        self.score::<S>(query_rows.clone(), lowest / LANES..highest.div_ceil(LANES), &mut scores);
        let (mut max, mut sum) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
        let cap = self.call.shape.log2_cap();
        for (i, (seen, scores)) in seen.iter().zip(scores.chunks_exact_mut(TILES)).enumerate() {
            if !seen.is_empty() {
                (max[i], sum[i]) = weigh::<S>(scores, seen.clone(), scales, cap);
            }
        }
        let mut out = std::mem::take(&mut self.running.part);
        self.add_values::<S>(seen, &scores, &mut out);
        let part = Part {
            max,
            sum,
            out: &out,
            lines: self.call.shape.lines(),
        };
        self.running
            .merge::<S>(query_rows.start, count, &part, |i| seen[i].is_empty());
        self.running.part = out;
        self.running.scores = scores;
    }

    /// Step 1 of a group for some tiles of keys.
    #[inline(always)]
    fn score<S: Lanes>(&self, query_rows: Range<usize>, tiles: Range<usize>, scores: &mut [Line]) {
        let lines = self.call.shape.lines();
        let padded = lines * LANES;
        let keys = &self.running.keys[tiles.start * padded..tiles.end * padded];
        let q = &self.running.q[query_rows.start * lines..query_rows.end * lines];
        let product: Product = Product {
            w: keys.as_ptr().cast(),
            w_tile: padded * LANES,
            w_k: LANES,
            k: self.call.shape.kv.head_dim,
            x: q.as_ptr().cast(),
            x_row: padded,
            y: scores.as_mut_ptr().cast::<f32>().wrapping_add(tiles.start * LANES),
            y_row: CHUNK,
            accumulate: false,
            prefetch: false,
        };
        // SAFETY: the slices above cover tiles and query rows; `scores` has GROUP rows of CHUNK, and at most GROUP
        // rows and CHUNK / 16 tiles are asked for.
        unsafe { product.run::<S>(query_rows.len(), tiles.len()) };
    }

    /// Step 3 of a group, row by row of it where rows do not see the same.
    #[inline(always)]
    fn add_values<S: Lanes>(&self, seen: &[Range<usize>], weights: &[Line], out: &mut [Line]) {
        let (count, lines) = (seen.len(), self.call.shape.lines());
        // Keys that all rows see are taken for all at once, those before and after them row by row.
        let common = seen[count - 1].start..seen[0].end;
        if common.is_empty() {
            out[..count * lines].fill(ZERO);
            for (i, seen) in seen.iter().enumerate() {
                self.add_some::<S>(i..i + 1, seen.clone(), weights, out, true);
            }
            return;
        }
        let same_start = seen[0].start == common.start;
        if !same_start {
            out[..count * lines].fill(ZERO);
            for (i, seen) in seen.iter().enumerate() {
                self.add_some::<S>(i..i + 1, seen.start..common.start, weights, out, true);
            }
        }
        self.add_some::<S>(0..count, common.clone(), weights, out, !same_start);
        for (i, seen) in seen.iter().enumerate() {
            self.add_some::<S>(i..i + 1, common.end..seen.end, weights, out, true);
        }
    }

    /// Adds weighted values of some keys to some rows of a group.
    #[inline(always)]
    fn add_some<S: Lanes>(
        &self,
        rows: Range<usize>,
        keys: Range<usize>,
        weights: &[Line],
        out: &mut [Line],
        accumulate: bool,
    ) {
        if keys.is_empty() {
            return;
        }
        let lines = self.call.shape.lines();
        let padded = lines * LANES;
        let product: Product = Product {
            w: self.running.values[keys.start * lines..keys.end * lines]
                .as_ptr()
                .cast(),
            w_tile: LANES,
            w_k: padded,
            k: keys.len(),
            x: weights[rows.start * TILES..rows.end * TILES]
                .as_ptr()
                .cast::<f32>()
                .wrapping_add(keys.start),
            x_row: CHUNK,
            y: out[rows.start * lines..rows.end * lines].as_mut_ptr().cast(),
            y_row: padded,
            accumulate,
            prefetch: false,
        };
        // SAFETY: the slices above cover the keys' values, the rows' weights and the rows' outputs.
        unsafe { product.run::<S>(rows.len(), lines) };
    }
}
