//! Causal attention of a step's rows over paged KV, with grouped heads.
//!
//! What one (row, head) computes is fixed by its position alone. Keys are taken in chunks of [`CHUNK`](super::attention_unit::CHUNK), which start at
//! multiples of `CHUNK` of the position; in each chunk:
//! 1. score\[j\] = sum over d, in order, of (scale * q\[d\]) * k\[j\]\[d\];
//! 2. max' = max(max, scores); p\[j\] = exp(score\[j\] - max'); the p are summed in 16 lanes by j % 16, then as a tree;
//! 3. sum = sum * exp(max - max') + that; out = out * exp(max - max'), then out\[d\] += p\[j\] * v\[j\]\[d\], j in order.
//!
//! At the end out / sum. (This is the blockwise soft-max of Milakov and Gimelshein, as used by FlashAttention.) Rows
//! and heads that share K and V are worked on together so that a chunk is converted to f32 once for all of them; which
//! rows share a call changes no order above.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use engine::plan::BlockId;

use super::KernelError;
use super::attention_unit::{AttentionScratch, Output, UnitKernel};
use super::cpu::Cpu;
use super::dispatch;
use super::kv_block::KvShape;
use super::linear::Scratch;

/// Query rows (pairs of row and head) that share a converted chunk, about.
const SHARED: usize = 64;

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
}

/// The rows of one sequence in a step.
#[derive(Clone, Debug)]
pub struct SequenceRows<'a> {
    /// Its rows in the step's q and output.
    pub rows: Range<usize>,
    /// Position of the first row.
    pub first_position: usize,
    /// Its block table; the keys and values of all positions up to the last row's are in these blocks.
    pub blocks: &'a [BlockId],
}

/// Attention of one layer for a step.
#[derive(Clone, Copy)]
pub struct PagedAttention<'a> {
    /// The layer's shape.
    pub shape: &'a AttentionShape,
    /// The step's sequences.
    pub sequences: &'a [SequenceRows<'a>],
    /// The bytes of a block in this layer.
    pub kv: &'a (dyn Fn(BlockId) -> &'a [u8] + Sync),
}

/// Some rows of a sequence with the heads of one KV head.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) sequence: usize,
    /// Counted from the sequence's first row.
    pub(super) rows: Range<usize>,
    pub(super) kv_head: usize,
}

impl PagedAttention<'_> {
    /// Computes `out` \[rows\]\[heads\]\[dim\] from `q` of the same shape. Rows of no sequence are left alone.
    ///
    /// # Errors
    /// If shapes do not fit, a block table is too short, or a block has the wrong number of bytes.
    pub fn run(&self, cpu: &Cpu, q: &[f32], out: &mut [f32], scratch: &mut Scratch) -> Result<(), KernelError> {
        self.check(q, out)?;
        let Scratch { units, attention, .. } = scratch;
        units.clear();
        self.plan(units);
        let threads = cpu.threads().min(units.len());
        if attention.len() < threads {
            attention.resize_with(threads, AttentionScratch::default);
        }
        let (next, out) = (AtomicUsize::new(0), Output::new(out));
        let units: &[Unit] = units;
        cpu.each(&mut attention[..threads], |scratch| {
            let (out, next) = (out, &next);
            while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
                dispatch::run(
                    cpu,
                    UnitKernel {
                        attention: self,
                        unit,
                        q,
                        out,
                        scratch,
                    },
                );
            }
        });
        Ok(())
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
            let positions = sequence.first_position.saturating_add(sequence.rows.len());
            let needed = positions.div_ceil(kv.block_tokens);
            if sequence.blocks.len() < needed {
                let (what, found) = ("number of blocks of a sequence", sequence.blocks.len());
                return Err(KernelError::Shape {
                    what,
                    expected: needed,
                    found,
                });
            }
            for &block in &sequence.blocks[..needed] {
                let found = (self.kv)(block).len();
                KernelError::check("bytes of a KV block in one layer", kv.block_bytes(), found)?;
            }
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

    /// Cuts the work in units, long ones first within a sequence.
    fn plan(&self, units: &mut Vec<Unit>) {
        let kv_heads = self.shape.kv.num_kv_heads;
        let step = (SHARED / (self.shape.num_heads / kv_heads)).max(1);
        for (i, sequence) in self.sequences.iter().enumerate() {
            let rows = sequence.rows.len();
            for start in (0..rows).step_by(step).rev() {
                let rows = start..rows.min(start + step);
                units.extend((0..kv_heads).map(|kv_head| Unit {
                    sequence: i,
                    rows: rows.clone(),
                    kv_head,
                }));
            }
        }
    }
}
