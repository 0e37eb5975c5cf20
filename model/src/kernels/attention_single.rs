//! Attention of one row with the query heads of one KV head, straight from the cache: what decoding does. Keys and
//! values are read once for all these heads, and those that come next are asked for meanwhile: the cache is seldom in a
//! cache of the CPU. See [`super::attention`].
#![allow(unsafe_code, reason = "keys and values are read through the addresses of blocks")]

use std::ops::Range;

use super::attention::{Call, Unit};
use super::attention_chunk::{CHUNK, Part, Running, Scales, TILES, weigh};
use super::dispatch::Kernel;
use super::kv_element::{Element, ElementKernel, with_element};
use super::lanes::{LANES, Lanes};
use super::pack::Line;

/// Most query heads that are computed at once. Plain code has no registers to gain by it.
const fn heads_at_once<S: Lanes>() -> usize {
    if S::ROWS <= 4 { 1 } else { 4 }
}

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

pub(super) struct SingleKernel<'a> {
    pub(super) call: Call<'a>,
    pub(super) unit: &'a Unit,
    /// What the thread computes next.
    pub(super) ahead: Option<&'a Unit>,
    /// Nobody has asked for the first chunk's keys yet.
    pub(super) cold: bool,
    pub(super) running: &'a mut Running,
}

impl Kernel for SingleKernel<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        with_element::<S>(self.call.shape.kv.dtype, self);
    }
}

impl ElementKernel for SingleKernel<'_> {
    #[inline(always)]
    fn run<S: Lanes, E: Element>(mut self) {
        let (shape, unit) = (self.call.shape, self.unit);
        let heads = shape.group();
        self.running.start(heads, shape.lines());
        self.running.load_queries::<S>(&self.call, 0, unit.row, unit.kv_head);
        if self.cold {
            let mut first = Ahead::new(&self.call, unit, unit.chunks.start);
            while first.pull::<S>(8) {}
        }
        for chunk in unit.chunks.clone() {
            let mut ahead = if chunk + 1 < unit.chunks.end {
                Ahead::new(&self.call, unit, chunk + 1)
            } else {
                match self.ahead {
                    Some(next) => Ahead::new(&self.call, next, next.chunks.start),
                    None => Ahead::NOTHING,
                }
            };
            let keys = Keys::find::<E>(&self.call, unit, chunk);
            // Groups of equal size, or nearly.
            let groups = heads.div_ceil(const { heads_at_once::<S>() });
            let mut first = 0;
            for left in (1..=groups).rev() {
                let count = (heads - first).div_ceil(left);
                if const { heads_at_once::<S>() == 1 } || count == 1 {
                    self.heads::<S, E, 1>(&keys, first, &mut ahead);
                } else {
                    match count {
                        2 => self.heads::<S, E, 2>(&keys, first, &mut ahead),
                        3 => self.heads::<S, E, 3>(&keys, first, &mut ahead),
                        _ => self.heads::<S, E, 4>(&keys, first, &mut ahead),
                    }
                }
                first += count;
            }
        }
        if unit.partial.is_none() {
            self.running.finish::<S>(&self.call, 0, unit.row, unit.kv_head);
        }
    }
}

/// Where a chunk's keys are.
struct Keys {
    /// The chunk's number.
    chunk: usize,
    /// The keys of each tile of sixteen; instead of a tile that is not seen, the nearest that is.
    tiles: [*const u8; TILES],
    /// What is seen, counted from the chunk's start.
    seen: Range<usize>,
    scales: Scales,
}

impl Keys {
    #[inline(always)]
    fn find<E: Element>(call: &Call<'_>, unit: &Unit, chunk: usize) -> Self {
        let kv = &call.shape.kv;
        let all = call.shape.seen(unit.position);
        let clip = |position: usize| position.clamp(chunk * CHUNK, (chunk + 1) * CHUNK) - chunk * CHUNK;
        let seen = clip(all.start)..clip(all.end);
        let (first, last) = (seen.start / LANES, (seen.end - 1) / LANES);
        let mut keys = Self {
            chunk,
            tiles: [std::ptr::null(); TILES],
            seen,
            scales: Scales::NONE,
        };
        for (i, to) in keys.tiles.iter_mut().enumerate() {
            let position = chunk * CHUNK + i.clamp(first, last) * LANES;
            let slot = position % kv.block_tokens;
            let head = call.head(unit, position / kv.block_tokens);
            *to = head.wrapping_add(slot * E::SIZE);
            if E::SCALED && (first..=last).contains(&i) {
                // SAFETY: a block has whole tiles, so the sixteen slots are all in it.
                unsafe { keys.scales.read(kv, head, slot..slot + LANES, i * LANES) };
            }
        }
        keys
    }
}

/// Keys and values that are asked for ahead of their use, head by head of some blocks.
struct Ahead {
    heads: [*const u8; TILES],
    count: usize,
    /// Bytes of a head.
    bytes: usize,
    /// The head that is being asked for, and how much of it has been.
    head: usize,
    at: usize,
}

impl Ahead {
    const NOTHING: Self = Self {
        heads: [std::ptr::null(); TILES],
        count: 0,
        bytes: 0,
        head: 0,
        at: 0,
    };

    /// A chunk of a unit.
    #[inline(always)]
    fn new(call: &Call<'_>, unit: &Unit, chunk: usize) -> Self {
        let tokens = call.shape.kv.block_tokens;
        let seen = call.shape.seen(unit.position);
        let positions = seen.start.max(chunk * CHUNK)..seen.end.min((chunk + 1) * CHUNK);
        let mut ahead = Self {
            bytes: call.shape.kv.head_bytes(),
            ..Self::NOTHING
        };
        // Of larger blocks a chunk is a small part, in long pieces that the CPU foresees itself.
        if tokens <= CHUNK {
            let blocks = positions.start / tokens..positions.end.div_ceil(tokens);
            for (to, block) in ahead.heads.iter_mut().zip(blocks) {
                *to = call.head(unit, block);
                ahead.count += 1;
            }
        }
        ahead
    }

    /// Asks for some cache lines; false if there are no more.
    #[inline(always)]
    fn pull<S: Lanes>(&mut self, lines: usize) -> bool {
        if self.head == self.count {
            return false;
        }
        let from = self.heads[self.head].wrapping_add(self.at);
        for i in 0..lines {
            S::prefetch(from.wrapping_add(i * CACHE_LINE));
        }
        self.at += lines * CACHE_LINE;
        if self.at >= self.bytes {
            (self.head, self.at) = (self.head + 1, 0);
        }
        true
    }
}

/// Lines (of keys, or of dimensions) whose sums are kept in registers beside each other for R heads.
const fn side_by_side<S: Lanes, const R: usize>() -> usize {
    match (S::TILES, R) {
        (2.., 1 | 2) => 8,
        (2.., _) | (_, 1) => 4,
        (_, 2 | 3) => 2,
        _ => 1,
    }
}

impl SingleKernel<'_> {
    /// A chunk's part in R heads from `first` on.
    #[inline(always)]
    fn heads<S: Lanes, E: Element, const R: usize>(&mut self, keys: &Keys, first: usize, ahead: &mut Ahead) {
        let mut scores = [[Line([0.0; LANES]); TILES]; R];
        if const { side_by_side::<S, R>() == 8 } {
            self.score::<S, E, R, 8>(keys, first, &mut scores, ahead);
        } else if const { side_by_side::<S, R>() == 4 } {
            self.score::<S, E, R, 4>(keys, first, &mut scores, ahead);
        } else if const { side_by_side::<S, R>() == 2 } {
            self.score::<S, E, R, 2>(keys, first, &mut scores, ahead);
        } else {
            self.score::<S, E, R, 1>(keys, first, &mut scores, ahead);
        }
        let (mut max, mut sum) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
        let scales = if E::SCALED { Some(&keys.scales) } else { None };
        let cap = self.call.shape.log2_cap();
        for (i, scores) in scores.iter_mut().enumerate() {
            (max[i], sum[i]) = weigh::<S>(scores, keys.seen.clone(), scales, cap);
        }
        let lines = self.call.shape.lines();
        let mut out = std::mem::take(&mut self.running.part);
        let mut line = 0;
        while line < lines {
            line += if const { side_by_side::<S, R>() >= 4 } && lines - line >= 4 {
                self.add_values::<S, E, R, 4>(keys, &scores, line, &mut out, ahead)
            } else if const { side_by_side::<S, R>() == 2 } && lines - line >= 2 {
                self.add_values::<S, E, R, 2>(keys, &scores, line, &mut out, ahead)
            } else {
                self.add_values::<S, E, R, 1>(keys, &scores, line, &mut out, ahead)
            };
        }
        let part = Part {
            max,
            sum,
            out: &out,
            lines,
        };
        match self.unit.partial {
            None => self.running.merge::<S>(first, R, &part, |_| false),
            Some(start) => {
                let at = (keys.chunk - self.unit.chunks.start) * self.call.shape.group() + first;
                self.keep::<R>(start + at * self.call.shape.partial_lines(), &part);
            }
        }
        self.running.part = out;
    }

    /// Step 1 for T tiles at a time.
    #[inline(always)]
    fn score<S: Lanes, E: Element, const R: usize, const T: usize>(
        &self,
        keys: &Keys,
        first: usize,
        scores: &mut [[Line; TILES]; R],
        ahead: &mut Ahead,
    ) {
        let kv = &self.call.shape.kv;
        let (lines, step) = (self.call.shape.lines(), kv.block_tokens * E::SIZE);
        let q: *const f32 = self.running.q[first * lines..(first + R) * lines].as_ptr().cast();
        let mut tile = keys.seen.start / LANES / T * T;
        while tile * LANES < keys.seen.end {
            let mut tiles = [std::ptr::null(); T];
            tiles.copy_from_slice(&keys.tiles[tile..tile + T]);
            let mut acc = [[S::splat(0.0); T]; R];
            for d in 0..kv.head_dim {
                ahead.pull::<S>(E::SIZE);
                let mut q_d = [S::splat(0.0); R];
                for (r, q_d) in q_d.iter_mut().enumerate() {
                    // SAFETY: R rows of `lines` lines each, at least as many numbers as there are dimensions.
                    *q_d = S::splat(unsafe { *q.add(r * lines * LANES + d) });
                }
                for (t, from) in tiles.iter_mut().enumerate() {
                    // SAFETY: sixteen slots of dimension d in a block.
                    let k: S = unsafe { E::load(*from) };
                    *from = from.wrapping_add(step);
                    for (acc, q) in acc.iter_mut().zip(q_d) {
                        acc[t] = k.fma(q, acc[t]);
                    }
                }
            }
            for (acc, scores) in acc.iter().zip(scores.iter_mut()) {
                for (acc, line) in acc.iter().zip(&mut scores[tile..tile + T]) {
                    line.0 = acc.to_array();
                }
            }
            tile += T;
        }
    }

    /// Step 3 for L lines of dimensions from `line` on; returns L.
    #[inline(always)]
    fn add_values<S: Lanes, E: Element, const R: usize, const L: usize>(
        &self,
        keys: &Keys,
        weights: &[[Line; TILES]; R],
        line: usize,
        out: &mut [Line],
        ahead: &mut Ahead,
    ) -> usize {
        let kv = &self.call.shape.kv;
        let row = kv.head_dim * E::SIZE;
        let weights: *const f32 = weights.as_ptr().cast();
        let mut acc = [[S::splat(0.0); L]; R];
        let mut key = keys.seen.start;
        while key < keys.seen.end {
            let position = keys.chunk * CHUNK + key;
            let slot = position % kv.block_tokens;
            let count = (kv.block_tokens - slot).min(keys.seen.end - key);
            let head = self.call.head(self.unit, position / kv.block_tokens);
            let mut from = head.wrapping_add(kv.half_bytes() + slot * row + line * LANES * E::SIZE);
            for key in key..key + count {
                ahead.pull::<S>(const { if E::SIZE < 2 { 2 } else { E::SIZE } });
                let mut weight = [S::splat(0.0); R];
                for (r, weight) in weight.iter_mut().enumerate() {
                    // SAFETY: row r of R rows with a number for each key of a chunk.
                    *weight = S::splat(unsafe { *weights.add(r * CHUNK + key) });
                }
                for l in 0..L {
                    // SAFETY: line `line + l` of the value of a slot in a block; rows are whole lines.
                    let v: S = unsafe { E::load(from.wrapping_add(l * LANES * E::SIZE)) };
                    for (acc, weight) in acc.iter_mut().zip(weight) {
                        acc[l] = v.fma(weight, acc[l]);
                    }
                }
                from = from.wrapping_add(row);
            }
            key += count;
        }
        let lines = self.call.shape.lines();
        for (acc, out) in acc.iter().zip(out.chunks_exact_mut(lines)) {
            for (acc, out) in acc.iter().zip(&mut out[line..line + L]) {
                out.0 = acc.to_array();
            }
        }
        L
    }

    /// Writes the results of R heads in a chunk to lines from `start` on, for a [`super::attention_chunk::MergeKernel`].
    #[inline(always)]
    fn keep<const R: usize>(&self, start: usize, part: &Part<'_>) {
        let size = self.call.shape.partial_lines();
        // SAFETY: the unit's own lines of the partial results, which were made long enough before threads got them.
        let to = unsafe { std::slice::from_raw_parts_mut(self.call.partials.0.add(start), R * size) };
        for (i, to) in to.chunks_exact_mut(size).enumerate() {
            let [state, out @ ..] = to else { continue };
            (state.0[0], state.0[1]) = (part.max[i], part.sum[i]);
            out.copy_from_slice(&part.out[i * part.lines..][..part.lines]);
        }
    }
}
