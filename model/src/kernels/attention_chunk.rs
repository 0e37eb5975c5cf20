//! What the ways to compute attention share: the soft-max of a chunk, and how chunks are merged. See
//! [`super::attention`].
#![allow(unsafe_code, reason = "threads write disjoint parts of one output")]

use std::ops::Range;

use super::attention::{Call, Merge};
use super::dispatch::Kernel;
use super::kv_block::KvShape;
use super::lanes::{LANES, Lanes};
use super::math::{exp2, load_part, soft_cap};
use super::pack::Line;

/// Keys of a chunk. Part of the numerics: see the text of [`super::attention`].
pub(super) const CHUNK: usize = 128;
/// Tiles of 16 keys in a chunk, and lines of a query row's scores.
pub(super) const TILES: usize = CHUNK / LANES;

const ZERO: Line = Line([0.0; LANES]);

/// Makes a buffer at least that long.
#[inline(always)]
pub(super) fn add_lines(buffer: &mut Vec<Line>, lines: usize) {
    if buffer.len() < lines {
        buffer.resize(lines, ZERO);
    }
}

/// Scales of a chunk's keys and values, where elements have some.
#[derive(Clone, Copy)]
pub(super) struct Scales {
    pub(super) keys: [Line; TILES],
    pub(super) values: [Line; TILES],
}

impl Scales {
    pub(super) const NONE: Self = Self {
        keys: [ZERO; TILES],
        values: [ZERO; TILES],
    };

    /// Reads the scales of neighbouring slots into the chunk's places from `at` on.
    ///
    /// # Safety
    /// `head` must be the start of a head in a block of `kv`'s shape, and the slots must be in the block.
    #[inline(always)]
    pub(super) unsafe fn read(&mut self, kv: &KvShape, head: *const u8, slots: Range<usize>, at: usize) {
        let from = head.wrapping_add(kv.scale_at(slots.start));
        // A key that is the value as well has one scale.
        let behind = if kv.latent {
            0
        } else {
            kv.block_tokens * size_of::<f32>()
        };
        for (lines, from) in [(&mut self.keys, from), (&mut self.values, from.wrapping_add(behind))] {
            let to = &mut lines.as_flattened_mut()[at..at + slots.len()];
            // SAFETY: the block has a little-endian f32 for each of the slots, by the caller's word.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr().cast(), size_of_val(to)) };
        }
    }
}

/// Lines as the numbers that they are.
trait Flat {
    fn as_flattened_mut(&mut self) -> &mut [f32];
}

impl Flat for [Line; TILES] {
    #[inline(always)]
    fn as_flattened_mut(&mut self) -> &mut [f32] {
        // SAFETY: a line is 16 f32 without padding (64 bytes, aligned to 64), so the array is 16 * TILES of them.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), CHUNK) }
    }
}

/// A thread's buffers: queries, and what has been merged of each query row so far.
#[derive(Default)]
pub(super) struct Running {
    /// q', \[query row\]\[padded dim\].
    pub(super) q: Vec<Line>,
    /// O, \[query row\]\[padded dim\].
    out: Vec<Line>,
    /// M and S, sixteen query rows a line.
    max: Vec<Line>,
    sum: Vec<Line>,
    /// o of a chunk, for up to sixteen query rows: \[query row\]\[padded dim\].
    pub(super) part: Vec<Line>,
    /// For [`super::attention_shared`]: scores of some query rows, \[query row\]\[key of the chunk\].
    pub(super) scores: Vec<Line>,
    /// For [`super::attention_shared`]: keys of a chunk, \[tile\]\[dim\]\[key\]; values of a chunk, \[key\]\[padded dim\].
    pub(super) keys: Vec<Line>,
    pub(super) values: Vec<Line>,
}

/// Lines of M, and of S, for some query rows; one to spare.
#[inline(always)]
fn states(query_rows: usize) -> usize {
    query_rows.div_ceil(LANES) + 1
}

impl Running {
    /// Makes room for units of up to so many query rows. Not left to the kernels: which thread meets which unit is
    /// chance, and no step but the first of its size should allocate.
    pub(super) fn make_room(&mut self, query_rows: usize, lines: usize) {
        add_lines(&mut self.q, query_rows * lines);
        add_lines(&mut self.out, query_rows * lines);
        let states = states(query_rows);
        add_lines(&mut self.max, states);
        add_lines(&mut self.sum, states);
        add_lines(&mut self.part, LANES * lines);
    }

    /// Readies the buffers for some query rows, for which there is room.
    #[inline(always)]
    pub(super) fn start(&mut self, query_rows: usize, lines: usize) {
        let states = states(query_rows);
        self.out[..query_rows * lines].fill(ZERO);
        self.max[..states].fill(Line([f32::NEG_INFINITY; LANES]));
        self.sum[..states].fill(ZERO);
    }

    /// Loads q' of the heads of a row, from `query_row` on.
    #[inline(always)]
    pub(super) fn load_queries<S: Lanes>(&mut self, call: &Call<'_>, query_row: usize, row: usize, kv_head: usize) {
        let (shape, lines) = (call.shape, call.shape.lines());
        let dim = shape.kv.head_dim;
        let scale = S::splat(shape.scale * std::f32::consts::LOG2_E);
        let heads = &call.q[call.offset(row, kv_head)..][..shape.group() * dim];
        let to = &mut self.q[query_row * lines..][..shape.group() * lines];
        for (head, to) in heads.chunks_exact(dim).zip(to.chunks_exact_mut(lines)) {
            for (i, line) in to.iter_mut().enumerate() {
                line.0 = load_part::<S>(head, i * LANES).mul(scale).to_array();
            }
        }
    }

    /// Merges a chunk's results of up to sixteen query rows from `first` on; `empty` says of which the chunk has none.
    #[inline(always)]
    pub(super) fn merge<S: Lanes>(
        &mut self,
        first: usize,
        count: usize,
        part: &Part<'_>,
        empty: impl Fn(usize) -> bool,
    ) {
        let (mut old, mut sums) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
        for i in 0..count {
            let at = first + i;
            (old[i], sums[i]) = (self.max[at / LANES].0[at % LANES], self.sum[at / LANES].0[at % LANES]);
        }
        let (old, new) = (S::from_array(old), S::from_array(part.max));
        let max = old.max(new);
        let (a, b) = (exp2(old.sub(max)), exp2(new.sub(max)));
        let sums = S::from_array(sums).mul(a).add(S::from_array(part.sum).mul(b));
        let (max, sums, a, b) = (max.to_array(), sums.to_array(), a.to_array(), b.to_array());
        let lines = part.lines;
        for i in 0..count {
            if empty(i) {
                continue;
            }
            let at = first + i;
            self.max[at / LANES].0[at % LANES] = max[i];
            self.sum[at / LANES].0[at % LANES] = sums[i];
            let (a, b) = (S::splat(a[i]), S::splat(b[i]));
            let out = &mut self.out[at * lines..][..lines];
            for (out, part) in out.iter_mut().zip(&part.out[i * lines..][..lines]) {
                let merged = S::from_array(out.0).mul(a).add(S::from_array(part.0).mul(b));
                out.0 = merged.to_array();
            }
        }
    }

    /// Divides the heads of a row, from `query_row` on, by their sums and writes them to the output.
    #[inline(always)]
    pub(super) fn finish<S: Lanes>(&self, call: &Call<'_>, query_row: usize, row: usize, kv_head: usize) {
        let (dim, lines, count) = (call.shape.kv.head_dim, call.shape.lines(), call.shape.group());
        // SAFETY: a (row, KV head) of this unit alone, inside of the output: see `Output`.
        let out = unsafe { std::slice::from_raw_parts_mut(call.out.0.add(call.offset(row, kv_head)), count * dim) };
        for (i, out) in out.chunks_exact_mut(dim).enumerate() {
            let at = query_row + i;
            let sum = S::splat(self.sum[at / LANES].0[at % LANES]);
            for (part, line) in out.chunks_mut(LANES).zip(&self.out[at * lines..][..lines]) {
                let values = S::from_array(line.0).div(sum).to_array();
                part.copy_from_slice(&values[..part.len()]);
            }
        }
    }
}

/// A chunk's m, s and o of some query rows.
pub(super) struct Part<'a> {
    pub(super) max: [f32; LANES],
    pub(super) sum: [f32; LANES],
    /// \[query row\]\[padded dim\].
    pub(super) out: &'a [Line],
    /// Lines of a query row.
    pub(super) lines: usize,
}

/// Step 2: turns a chunk's scores into weights for the values and returns (m, s). `seen` counts from the chunk's start.
/// `cap` is that of the scores as they are here, with the factor log2(e).
#[inline(always)]
pub(super) fn weigh<S: Lanes>(
    scores: &mut [Line],
    seen: Range<usize>,
    scales: Option<&Scales>,
    cap: Option<f32>,
) -> (f32, f32) {
    let tiles = seen.start / LANES..seen.end.div_ceil(LANES);
    let capped;
    let scales = match (cap, scales) {
        (None, scales) => scales,
        (Some(cap), None) => {
            cap_scores::<S>(&mut scores[tiles], None, cap);
            None
        }
        (Some(cap), Some(scales)) => {
            cap_scores::<S>(&mut scores[tiles.clone()], Some(&scales.keys[tiles]), cap);
            let keys = [Line([1.0; LANES]); TILES];
            capped = Scales { keys, ..*scales };
            Some(&capped)
        }
    };
    if let (0, CHUNK, Ok(scores)) = (seen.start, seen.end, <&mut [Line; TILES]>::try_from(&mut *scores)) {
        return weigh_whole::<S>(scores, scales);
    }
    let tiles = seen.start / LANES..seen.end.div_ceil(LANES);
    let lines = &mut scores[tiles.clone()];
    if let Some(scales) = scales {
        for (line, scale) in lines.iter_mut().zip(&scales.keys[tiles.clone()]) {
            line.0 = S::from_array(line.0).mul(S::from_array(scale.0)).to_array();
        }
    }
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
    let max = largest.largest();
    let mut sum = S::splat(0.0);
    for line in lines.iter_mut() {
        let weight = exp2(S::from_array(line.0).sub(S::splat(max)));
        sum = sum.add(weight);
        line.0 = weight.to_array();
    }
    if let Some(scales) = scales {
        for (line, scale) in lines.iter_mut().zip(&scales.values[tiles]) {
            line.0 = S::from_array(line.0).mul(S::from_array(scale.0)).to_array();
        }
    }
    (max, sum.sum())
}

/// Multiplies scores with their keys' scales, if there are any, and caps them.
#[inline(always)]
fn cap_scores<S: Lanes>(scores: &mut [Line], scales: Option<&[Line]>, cap: f32) {
    let factor = -2.0 / cap;
    for (i, line) in scores.iter_mut().enumerate() {
        let mut score = S::from_array(line.0);
        if let Some(scales) = scales {
            score = score.mul(S::from_array(scales[i].0));
        }
        line.0 = soft_cap(score, cap, factor).to_array();
    }
}

/// The same where all of a chunk is seen: its scores then stay in registers.
#[inline(always)]
fn weigh_whole<S: Lanes>(scores: &mut [Line; TILES], scales: Option<&Scales>) -> (f32, f32) {
    let mut values = [S::splat(0.0); TILES];
    let mut largest = S::splat(f32::NEG_INFINITY);
    for (i, value) in values.iter_mut().enumerate() {
        *value = S::from_array(scores[i].0);
        if let Some(scales) = scales {
            *value = value.mul(S::from_array(scales.keys[i].0));
        }
        largest = largest.max(*value);
    }
    let max = largest.largest();
    let (mut sum, m) = (S::splat(0.0), S::splat(max));
    for (i, value) in values.into_iter().enumerate() {
        let mut weight = exp2(value.sub(m));
        sum = sum.add(weight);
        if let Some(scales) = scales {
            weight = weight.mul(S::from_array(scales.values[i].0));
        }
        scores[i].0 = weight.to_array();
    }
    (max, sum.sum())
}

/// Merges the chunks of a row that were computed apart.
pub(super) struct MergeKernel<'a> {
    pub(super) call: Call<'a>,
    pub(super) merge: &'a Merge,
    pub(super) running: &'a mut Running,
}

impl Kernel for MergeKernel<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        let (shape, merge) = (self.call.shape, self.merge);
        let (heads, lines) = (shape.group(), shape.lines());
        self.running.start(heads, lines);
        for i in 0..merge.chunks * heads {
            let first = merge.partial + i * shape.partial_lines();
            // SAFETY: the lines of a (chunk, head), which a unit of this call has written and nobody writes any more:
            // all threads are done.
            let partial = unsafe { std::slice::from_raw_parts(self.call.partials.0.add(first), shape.partial_lines()) };
            let [state, out @ ..] = partial else { continue };
            let (mut max, mut sum) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
            (max[0], sum[0]) = (state.0[0], state.0[1]);
            let part = Part { max, sum, out, lines };
            self.running.merge::<S>(i % heads, 1, &part, |_| false);
        }
        self.running.finish::<S>(&self.call, 0, merge.row, merge.kv_head);
    }
}
