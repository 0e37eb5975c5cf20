//! Causal attention of a step's rows over paged KV, with grouped heads.
//!
//! What one (row, head) computes is fixed by its position alone. Keys are taken in chunks of
//! [`CHUNK`], which start at multiples of `CHUNK` of the position. Each chunk for itself:
//! 1. score\[j\] = sum over d, in order, of q'\[d\] * k\[j\]\[d\], where q' = q * (scale * log2(e));
//!    With a cap c, the score becomes c' * tanh(score / c'), where c' = c * log2(e);
//! 2. m = largest score; p\[j\] = 2^(score\[j\] - m); s = the p summed in 16 lanes by j % 16, then as a tree;
//! 3. o\[d\] = sum over j, in order, of p\[j\] * v\[j\]\[d\].
//!
//! The chunks are then merged in order: M' = max(M, m), a = 2^(M - M'), b = 2^(m - M'), S = S * a + s * b,
//! O = O * a + o * b, from M = -infinity, S = 0, O = 0. At the end O / S. (The blockwise soft-max of Milakov and
//! Gimelshein, as FlashAttention uses it, with chunks that can be computed apart.) Where elements have scales, k and v
//! stand for the stored whole numbers, the score is multiplied by the key's scale (before it is capped), and p by the value's in step 3 alone.
//!
//! So the order of work is free: rows that share keys are worked on together ([`super::attention_shared`]), a row alone
//! reads its keys and values once, straight from the cache ([`super::attention_single`]), and its chunks may be spread
//! over threads.
#![allow(
    unsafe_code,
    reason = "threads write disjoint parts of one output, and hold the blocks' addresses in a reused table"
)]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use engine::plan::{BlockId, GroupBlocks};

use super::KernelError;
use super::attention_chunk::{CHUNK, MergeKernel, Running, add_lines};
use super::attention_shared::{SharedKernel, make_room as make_room_for_shared};
use super::attention_single::SingleKernel;
use super::cpu::Cpu;
use super::dispatch;
use super::kv_block::KvShape;
use super::lanes::LANES;
use super::linear::Scratch;
use super::pack::Line;

/// Query rows (pairs of row and head) that share a converted chunk, about.
const SHARED: usize = 192;
/// Rows of a sequence up to which each is computed alone.
const FEW_ROWS: usize = 2;
/// Units of single rows that a thread gets, about; more even out better, fewer start less often.
const UNITS_PER_THREAD: usize = 4;

/// Shape of a layer's attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Shape of the KV blocks.
    pub kv: KvShape,
    /// Query heads, a multiple of the KV heads: head h uses KV head `h / (num_heads / num_kv_heads)`.
    pub num_heads: usize,
    /// Factor of the scores, usually 1 / sqrt(head_dim).
    pub scale: f32,
    /// A row sees the last `window` positions, its own included; `None`: all.
    pub window: Option<usize>,
    /// Scores s become cap * tanh(s / cap); `None`: they stay.
    pub cap: Option<f32>,
}

impl AttentionShape {
    /// The cap of scores that have the factor log2(e).
    #[inline(always)]
    pub(super) fn log2_cap(&self) -> Option<f32> {
        self.cap.map(|cap| cap * std::f32::consts::LOG2_E)
    }

    /// Query heads of a KV head.
    #[inline(always)]
    pub(super) fn group(&self) -> usize {
        self.num_heads / self.kv.num_kv_heads
    }

    /// Lines of a head's query, and of its output.
    #[inline(always)]
    pub(super) fn lines(&self) -> usize {
        self.kv.head_dim.div_ceil(LANES)
    }

    /// Lines in which a (chunk, head) keeps its m, s and o until it is merged.
    #[inline(always)]
    pub(super) fn partial_lines(&self) -> usize {
        1 + self.lines()
    }

    /// Positions that the row at `position` sees.
    #[inline(always)]
    pub(super) fn seen(&self, position: usize) -> Range<usize> {
        let end = position + 1;
        self.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// Numbers of the chunks that rows at some positions see.
    #[inline(always)]
    fn chunks(&self, first: usize, last: usize) -> Range<usize> {
        self.seen(first).start / CHUNK..self.seen(last).end.div_ceil(CHUNK)
    }
}

/// The rows of one sequence in a step.
#[derive(Clone, Debug)]
pub struct SequenceRows<'a> {
    /// Its rows in the step's q and output.
    pub rows: Range<usize>,
    /// Position of the first row.
    pub first_position: usize,
    /// Its block table; the keys and values of all positions up to the last row's are in these blocks.
    pub blocks: GroupBlocks<'a>,
}

/// Attention of one layer for a step.
#[derive(Clone, Copy)]
pub struct PagedAttention<'a> {
    /// The layer's shape.
    pub shape: &'a AttentionShape,
    /// The layer's group: which of the sequences' blocks are its.
    pub group: usize,
    /// The step's sequences.
    pub sequences: &'a [SequenceRows<'a>],
    /// The bytes of a block in this layer.
    pub kv: &'a (dyn Fn(BlockId) -> &'a [u8] + Sync),
}

/// Buffers of attention, reused from call to call.
#[derive(Default)]
pub(super) struct AttentionBuffers {
    blocks: Vec<BlockAddress>,
    units: Vec<Unit>,
    merges: Vec<Merge>,
    partials: Vec<Line>,
    threads: Vec<Running>,
}

/// Where a block begins in the layer that is computed.
#[derive(Clone, Copy)]
pub(super) struct BlockAddress(pub(super) *const u8);
// SAFETY: an address is only used while the call lasts that borrowed the block for reading.
unsafe impl Send for BlockAddress {}
// SAFETY: as above.
unsafe impl Sync for BlockAddress {}

/// Some rows of a sequence with the heads of one KV head.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    /// Where the sequence's blocks begin in the table.
    pub(super) table: usize,
    /// Position of the first row.
    pub(super) position: usize,
    /// The first row's index in q and in the output.
    pub(super) row: usize,
    pub(super) rows: usize,
    pub(super) kv_head: usize,
    /// The chunks to compute.
    pub(super) chunks: Range<usize>,
    /// Where the results of the first chunk go if somebody else merges them: index into the partial results.
    pub(super) partial: Option<usize>,
    /// A row alone, straight from the cache.
    pub(super) single: bool,
}

/// A row and KV head whose chunks were computed apart.
#[derive(Clone, Debug)]
pub(super) struct Merge {
    pub(super) row: usize,
    pub(super) kv_head: usize,
    pub(super) chunks: usize,
    /// Where the results of the first chunk are.
    pub(super) partial: usize,
}

/// Where threads write, each its own rows and heads.
#[derive(Clone, Copy)]
pub(super) struct Output(pub(super) *mut f32);
// SAFETY: units cover disjoint (row, head) pairs of the slice that `PagedAttention::run` borrows mutably, and it has
// checked that all of them lie inside.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

/// Where threads write partial results, each its own chunks.
#[derive(Clone, Copy)]
pub(super) struct Partials(pub(super) *mut Line);
// SAFETY: as for `Output`: units that keep partial results have their own lines, for which room was made.
unsafe impl Send for Partials {}
// SAFETY: as above.
unsafe impl Sync for Partials {}

/// What all units of a call share.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) shape: &'a AttentionShape,
    pub(super) blocks: &'a [BlockAddress],
    pub(super) q: &'a [f32],
    pub(super) out: Output,
    pub(super) partials: Partials,
}

impl Call<'_> {
    /// Where a unit's KV head begins in a block of its sequence.
    #[inline(always)]
    pub(super) fn head(&self, unit: &Unit, block: usize) -> *const u8 {
        let start = self.blocks[unit.table + block].0;
        start.wrapping_add(unit.kv_head * self.shape.kv.head_bytes())
    }

    /// Where a row's first query head of a KV head begins in q and in the output.
    #[inline(always)]
    pub(super) fn offset(&self, row: usize, kv_head: usize) -> usize {
        (row * self.shape.num_heads + kv_head * self.shape.group()) * self.shape.kv.head_dim
    }
}

impl PagedAttention<'_> {
    /// Computes `out` \[rows\]\[heads\]\[dim\] from `q` of the same shape. Rows of no sequence are left alone.
    ///
    /// # Errors
    /// If shapes do not fit, a block table is too short, or a block has the wrong number of bytes.
    pub fn run(&self, cpu: &Cpu, q: &[f32], out: &mut [f32], scratch: &mut Scratch) -> Result<(), KernelError> {
        self.check(q, out)?;
        let buffers = &mut scratch.attention;
        self.find_blocks(&mut buffers.blocks)?;
        self.plan(cpu.threads(), buffers);
        let threads = cpu.threads().min(buffers.units.len());
        self.make_room(threads, buffers);
        let call = Call {
            shape: self.shape,
            blocks: &buffers.blocks,
            q,
            out: Output(out.as_mut_ptr()),
            partials: Partials(buffers.partials.as_mut_ptr()),
        };
        let (next, units) = (AtomicUsize::new(0), &buffers.units[..]);
        cpu.each(&mut buffers.threads[..threads], |running| {
            work(cpu, call, units, &next, running);
        });
        for merge in &buffers.merges {
            let running = &mut buffers.threads[0];
            dispatch::run(cpu, MergeKernel { call, merge, running });
        }
        Ok(())
    }

    /// Every thread gets the buffers that the largest unit needs.
    fn make_room(&self, threads: usize, buffers: &mut AttentionBuffers) {
        if buffers.threads.len() < threads {
            buffers.threads.resize_with(threads, Running::default);
        }
        let (mut rows, mut shared) = (0, false);
        for unit in &buffers.units {
            rows = rows.max(unit.rows);
            shared |= !unit.single;
        }
        let lines = self.shape.lines();
        for running in &mut buffers.threads[..threads] {
            running.make_room(rows * self.shape.group(), lines);
            if shared {
                make_room_for_shared(running, lines);
            }
        }
    }

    fn check(&self, q: &[f32], out: &[f32]) -> Result<(), KernelError> {
        let (shape, kv) = (self.shape, &self.shape.kv);
        if kv.num_kv_heads == 0 || !shape.num_heads.is_multiple_of(kv.num_kv_heads) || shape.num_heads == 0 {
            let (what, rule) = (
                "number of query heads",
                "a multiple of the number of KV heads, both at least 1",
            );
            return Err(KernelError::Dimension {
                what,
                rule,
                found: shape.num_heads,
            });
        }
        if kv.head_dim == 0 || kv.block_tokens == 0 || shape.window == Some(0) {
            let (what, rule) = ("head width, block size or attention window", "at least 1");
            return Err(KernelError::Dimension { what, rule, found: 0 });
        }
        KernelError::check("length of attention's output", q.len(), out.len())?;
        let mut end = 0;
        for sequence in self.sequences {
            if sequence.rows.start < end {
                let (what, rule) = ("first row of a sequence", "behind the rows of the sequence before it");
                return Err(KernelError::Dimension {
                    what,
                    rule,
                    found: sequence.rows.start,
                });
            }
            end = end.max(sequence.rows.end);
        }
        let row = shape.num_heads * kv.head_dim;
        if end * row > q.len() {
            let what = "length of attention's input";
            return Err(KernelError::Shape {
                what,
                expected: end * row,
                found: q.len(),
            });
        }
        Ok(())
    }

    /// The addresses of all sequences' blocks, one sequence after another. Blocks that no row of the layer sees are not asked
    /// for: the sequence may have let go of them.
    fn find_blocks(&self, addresses: &mut Vec<BlockAddress>) -> Result<(), KernelError> {
        let kv = &self.shape.kv;
        addresses.clear();
        for sequence in self.sequences {
            let needed = self.blocks_of(sequence);
            let found = sequence.blocks.len();
            if found < needed {
                return Err(KernelError::Shape {
                    what: "number of blocks of a sequence",
                    expected: needed,
                    found,
                });
            }
            let unseen = self.shape.seen(sequence.first_position).start / kv.block_tokens;
            let unseen = unseen.min(needed);
            addresses.extend((0..unseen).map(|_| BlockAddress(std::ptr::null())));
            let blocks = sequence.blocks.of(self.group).iter();
            for block in blocks.take(needed).skip(unseen) {
                let bytes = (self.kv)(block);
                KernelError::check("bytes of a KV block in one layer", kv.block_bytes(), bytes.len())?;
                addresses.push(BlockAddress(bytes.as_ptr()));
            }
        }
        Ok(())
    }

    /// Blocks that a sequence's rows may read.
    fn blocks_of(&self, sequence: &SequenceRows<'_>) -> usize {
        let positions = sequence.first_position.saturating_add(sequence.rows.len());
        positions.div_ceil(self.shape.kv.block_tokens)
    }

    /// Whether a row can be computed straight from the cache: whole vectors of keys and of dimensions. Keys that are values
    /// as well must be turned first.
    fn vectors_fit(&self) -> bool {
        let kv = &self.shape.kv;
        !kv.latent && kv.block_tokens.is_multiple_of(LANES) && kv.head_dim.is_multiple_of(LANES)
    }

    /// Some rows of a sequence, counted from its first, whose blocks begin at `table`; for the first KV head.
    fn unit(&self, sequence: &SequenceRows<'_>, table: usize, rows: Range<usize>, single: bool) -> Unit {
        let position = sequence.first_position + rows.start;
        Unit {
            table,
            position,
            row: sequence.rows.start + rows.start,
            rows: rows.len(),
            kv_head: 0,
            chunks: self.shape.chunks(position, position + rows.len() - 1),
            partial: None,
            single,
        }
    }

    /// Whether the rows of a sequence are computed one by one.
    fn is_single(&self, sequence: &SequenceRows<'_>) -> bool {
        self.vectors_fit() && sequence.rows.len() <= FEW_ROWS
    }

    /// Cuts the work in units: rows that share keys first, the long ones before the short, then rows alone.
    fn plan(&self, threads: usize, buffers: &mut AttentionBuffers) {
        let (shape, kv_heads) = (self.shape, self.shape.kv.num_kv_heads);
        let step = (SHARED / shape.group()).max(1);
        let AttentionBuffers {
            units,
            merges,
            partials,
            ..
        } = buffers;
        units.clear();
        merges.clear();
        let (mut table, mut single_chunks) = (0, 0);
        for sequence in self.sequences {
            let rows = sequence.rows.len();
            if self.is_single(sequence) {
                let chunks = |row| self.unit(sequence, table, row..row + 1, true).chunks.len();
                single_chunks += (0..rows).map(chunks).sum::<usize>() * kv_heads;
            } else {
                for start in (0..rows).step_by(step).rev() {
                    let unit = self.unit(sequence, table, start..rows.min(start + step), false);
                    units.extend((0..kv_heads).map(|kv_head| Unit {
                        kv_head,
                        ..unit.clone()
                    }));
                }
            }
            table += self.blocks_of(sequence);
        }
        // A row's chunks are spread over threads if it is a large part of the work.
        let most = match threads {
            1 => usize::MAX,
            threads => single_chunks.div_ceil(threads * UNITS_PER_THREAD).max(1),
        };
        let (mut table, mut lines) = (0, 0);
        for sequence in self.sequences {
            if self.is_single(sequence) {
                for row in 0..sequence.rows.len() {
                    let unit = self.unit(sequence, table, row..row + 1, true);
                    lines = cut(shape, &unit, most, lines, units, merges);
                }
            }
            table += self.blocks_of(sequence);
        }
        add_lines(partials, lines);
    }
}

/// Adds the units of a row for all KV heads, each of at most `most` chunks. `lines` is the number of lines of partial
/// results in use; returns the new one.
fn cut(
    shape: &AttentionShape,
    unit: &Unit,
    most: usize,
    mut lines: usize,
    units: &mut Vec<Unit>,
    merges: &mut Vec<Merge>,
) -> usize {
    let chunk_lines = shape.group() * shape.partial_lines();
    for kv_head in 0..shape.kv.num_kv_heads {
        if unit.chunks.len() <= most {
            units.push(Unit {
                kv_head,
                ..unit.clone()
            });
            continue;
        }
        merges.push(Merge {
            row: unit.row,
            kv_head,
            chunks: unit.chunks.len(),
            partial: lines,
        });
        for start in unit.chunks.clone().step_by(most) {
            let chunks = start..unit.chunks.end.min(start + most);
            let partial = Some(lines);
            lines += chunks.len() * chunk_lines;
            units.push(Unit {
                kv_head,
                chunks,
                partial,
                ..unit.clone()
            });
        }
    }
    lines
}

/// What one thread does: takes units until there are none.
fn work(cpu: &Cpu, call: Call<'_>, units: &[Unit], next: &AtomicUsize, running: &mut Running) {
    let take = || units.get(next.fetch_add(1, Ordering::Relaxed));
    let mut current = take();
    let mut cold = true;
    while let Some(unit) = current {
        if unit.single {
            // The next one is taken before this one is computed, so that its keys can be asked for in time.
            current = take();
            dispatch::run(
                cpu,
                SingleKernel {
                    call,
                    unit,
                    ahead: current,
                    cold,
                    running,
                },
            );
            cold = false;
        } else {
            dispatch::run(cpu, SharedKernel { call, unit, running });
            current = take();
            cold = true;
        }
    }
}
