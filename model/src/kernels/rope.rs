//! Rotary position embedding.
#![allow(unsafe_code, reason = "threads rotate disjoint rows of one slice")]

use super::KernelError;
use super::cpu::Cpu;
use super::dispatch::{self, Kernel};
use super::lanes::Lanes;
use super::shared::SharedMut;

/// Which two elements of a head are rotated together; `h` is half of the rotated width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Elements 2 i and 2 i + 1: GGUF files of the llama family.
    Interleaved,
    /// Elements i and i + h: Hugging Face checkpoints, and GGUF files of most other families.
    Half,
}

/// Cosines and sines for all positions, computed in f64 and rounded once.
#[derive(Debug)]
pub struct RopeTable {
    half: usize,
    positions: usize,
    /// `half` cosines, then `half` sines, for every position.
    values: Vec<f32>,
}

impl RopeTable {
    /// A table of `positions` rows: angle i of position p is `p * frequencies[i]`; cosines and sines are multiplied
    /// with `scale` (1 unless a long-context method says otherwise). Rotates `2 * frequencies.len()` elements.
    pub fn new(frequencies: &[f64], positions: usize, scale: f64) -> Self {
        let half = frequencies.len();
        let mut values = Vec::with_capacity(2 * half * positions);
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            reason = "rounded to f32 on purpose"
        )]
        for position in 0..positions {
            let angle = |f: &f64| position as f64 * f;
            values.extend(frequencies.iter().map(|f| (angle(f).cos() * scale) as f32));
            values.extend(frequencies.iter().map(|f| (angle(f).sin() * scale) as f32));
        }
        Self {
            half,
            positions,
            values,
        }
    }

    /// Bytes of the table.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.values[..])
    }

    /// Frequencies of the plain method: `base^(-2 i / width)` for i in 0..width / 2.
    pub fn plain_frequencies(base: f64, width: usize) -> Vec<f64> {
        let exponent = |i: usize| -((2 * i) as f64) / width as f64;
        (0..width / 2).map(|i| base.powf(exponent(i))).collect()
    }

    /// Elements of a head that are rotated.
    pub fn width(&self) -> usize {
        2 * self.half
    }

    /// Positions the table covers.
    pub fn positions(&self) -> usize {
        self.positions
    }
}

/// Rotates the first `table.width()` elements of every head of `x` \[rows\]\[heads\]\[head_dim\]; row i has position
/// `positions[i]`.
///
/// # Errors
/// If a position is not in the table, heads are narrower than the table, or `x` has the wrong length.
pub fn rope(
    cpu: &Cpu,
    table: &RopeTable,
    style: RopeStyle,
    x: &mut [f32],
    head_dim: usize,
    positions: &[u32],
) -> Result<(), KernelError> {
    if head_dim < table.width() || head_dim == 0 {
        let (what, rule) = ("width of a head", "at least 1 and at least what is rotated");
        return Err(KernelError::Dimension {
            what,
            rule,
            found: head_dim,
        });
    }
    if let Some(&p) = positions.iter().find(|&&p| p as usize >= table.positions) {
        let rule = "below the number of positions the rope table was made for";
        return Err(KernelError::Dimension {
            what: "a position",
            rule,
            found: p as usize,
        });
    }
    let row = x.len().checked_div(positions.len()).unwrap_or(0) / head_dim * head_dim;
    KernelError::check("length of rope's input", row * positions.len(), x.len())?;
    let x = SharedMut::new(x);
    cpu.ranges(positions.len(), |_, range| {
        let rotate = Rope {
            table,
            style,
            // SAFETY: every thread has other rows.
            x: unsafe { x.part(range.start * row..range.end * row) },
            head_dim,
            positions: &positions[range],
            row,
        };
        dispatch::run(cpu, rotate);
    });
    Ok(())
}

struct Rope<'a> {
    table: &'a RopeTable,
    style: RopeStyle,
    x: &'a mut [f32],
    head_dim: usize,
    positions: &'a [u32],
    row: usize,
}

impl Kernel for Rope<'_> {
    type Output = ();
    // Products and sums are separate here, as in the reference implementations; nothing is fused.
    #[inline(always)]
    fn run<S: Lanes>(self) {
        let half = self.table.half;
        for (row, &position) in self.x.chunks_exact_mut(self.row.max(1)).zip(self.positions) {
            let (cos, sin) = self.table.values[position as usize * 2 * half..][..2 * half].split_at(half);
            for head in row.chunks_exact_mut(self.head_dim) {
                match self.style {
                    RopeStyle::Interleaved => {
                        let (pairs, _) = head[..2 * half].as_chunks_mut::<2>();
                        for ((pair, c), s) in pairs.iter_mut().zip(cos).zip(sin) {
                            let [a, b] = *pair;
                            *pair = [a * c - b * s, a * s + b * c];
                        }
                    }
                    RopeStyle::Half => {
                        let (first, second) = head[..2 * half].split_at_mut(half);
                        for (((a, b), c), s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                            (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
                        }
                    }
                }
            }
        }
    }
}
