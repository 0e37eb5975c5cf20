//! Rows ready to be multiplied: made and rounded in one go, so that what lies between two products of a layer passes
//! through the first-level cache once.
#![allow(unsafe_code, reason = "threads write disjoint rows of one operand")]

use super::KernelError;
use super::activation::{Activation, check_rows, gated};
use super::cpu::Cpu;
use super::dispatch::{self, Kernel};
use super::int8_block::{GROUP, Int8Block};
use super::lanes::Lanes;
use super::linear::Linear;
use super::norm::norm_row;
use super::pack::BLOCK;
use super::rounding::quantise_row;
use super::shared::SharedMut;
use std::ops::Range;

/// How the rows come about.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    /// As they are.
    Plain(&'a [f32]),
    /// Root-mean-square norms of the rows of `x`; see [`super::rms_norm`].
    Normed {
        /// Rows as long as `weight`.
        x: &'a [f32],
        /// The norm's weights.
        weight: &'a [f32],
        /// Added to the mean of the squares.
        eps: f32,
    },
    /// activation(gate) * up.
    Gated {
        /// What the activation is applied to.
        gate: &'a [f32],
        /// The other factor, as long as `gate`.
        up: &'a [f32],
        /// The activation.
        activation: Activation,
    },
}

impl Rows<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Plain(x) | Self::Normed { x, .. } => x.len(),
            Self::Gated { gate, .. } => gate.len(),
        }
    }

    fn check(&self, k: usize) -> Result<(), KernelError> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Normed { weight, .. } => KernelError::check("number of a norm's weights", k, weight.len()),
            Self::Gated { gate, up, .. } => {
                KernelError::check("length of a gated activation's second factor", gate.len(), up.len())
            }
        }
    }
}

/// In which forms matrices want their input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Forms {
    /// As f32.
    floats: bool,
    /// As int8 blocks in so many passes; 0: not at all.
    passes: usize,
}

impl Forms {
    fn of(linears: &[&Linear]) -> Result<Self, KernelError> {
        let mut forms = Self::default();
        for linear in linears {
            match (linear.passes(), forms.passes) {
                (0, _) => forms.floats = true,
                (passes, 0) => forms.passes = passes,
                (passes, other) => {
                    KernelError::check("passes of a matrix that shares its input with others", other, passes)?;
                }
            }
        }
        Ok(forms)
    }
}

/// The rows, in the forms that the matrices want. Reused from call to call.
#[derive(Default)]
pub struct Operand {
    m: usize,
    k: usize,
    forms: Forms,
    floats: Vec<f32>,
    blocks: Vec<Int8Block>,
    /// One row for each thread.
    buffers: Vec<f32>,
}

impl Operand {
    /// Makes the rows for products with `linears`, which all have the same number of input features.
    ///
    /// # Errors
    /// If lengths do not fit, or quantised matrices want activations of different precision.
    pub fn prepare(&mut self, cpu: &Cpu, rows: Rows<'_>, linears: &[&Linear]) -> Result<(), KernelError> {
        let Some(k) = linears.first().map(|linear| linear.k()) else {
            return Ok(());
        };
        for linear in linears {
            KernelError::check(
                "input features of a matrix that shares its input with others",
                k,
                linear.k(),
            )?;
        }
        check_rows("length of the last row of a product's input", rows.len(), k)?;
        rows.check(k)?;
        let m = rows.len() / k;
        (self.m, self.k, self.forms) = (m, k, Forms::of(linears)?);
        let blocks = m.next_multiple_of(GROUP) * (k / BLOCK) * self.forms.passes;
        if self.blocks.len() < blocks {
            self.blocks.resize(blocks, Int8Block::ZERO);
        }
        let floats = if self.forms.floats { m * k } else { 0 };
        if self.floats.len() < floats {
            self.floats.resize(floats, 0.0);
        }
        if self.buffers.len() < cpu.threads() * k {
            self.buffers.resize(cpu.threads() * k, 0.0);
        }
        let (floats, blocks) = (SharedMut::new(&mut self.floats), SharedMut::new(&mut self.blocks));
        let (buffers, forms) = (SharedMut::new(&mut self.buffers), self.forms);
        cpu.ranges(m, |thread, range| {
            let make = Make {
                rows,
                k,
                forms,
                range,
                floats,
                blocks,
                // SAFETY: each thread of a call has another number.
                buffer: unsafe { buffers.part(thread * k..(thread + 1) * k) },
            };
            dispatch::run(cpu, make);
        });
        Ok(())
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.m
    }

    /// Length of a row.
    pub(super) fn k(&self) -> usize {
        self.k
    }

    /// Int8 blocks for each block of the rows; 0 if no matrix wanted them.
    pub(super) fn passes(&self) -> usize {
        self.forms.passes
    }

    /// The rows as f32, if a matrix wanted them so.
    pub(super) fn floats(&self) -> &[f32] {
        if self.forms.floats {
            &self.floats[..self.m * self.k]
        } else {
            &[]
        }
    }

    /// The rows as int8 blocks, if a matrix wanted them so.
    pub(super) fn blocks(&self) -> &[Int8Block] {
        &self.blocks[..self.m.next_multiple_of(GROUP) * (self.k / BLOCK) * self.forms.passes]
    }
}

/// Makes a range of rows.
struct Make<'a> {
    rows: Rows<'a>,
    k: usize,
    forms: Forms,
    range: Range<usize>,
    floats: SharedMut<'a, f32>,
    blocks: SharedMut<'a, Int8Block>,
    buffer: &'a mut [f32],
}

impl Kernel for Make<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        let (k, buffer) = (self.k, self.buffer);
        for row in self.range {
            let at = row * k..(row + 1) * k;
            let made: &[f32] = match self.rows {
                Rows::Plain(x) => &x[at.clone()],
                Rows::Normed { x, weight, eps } => {
                    norm_row::<S>(&x[at.clone()], weight, eps, buffer);
                    buffer
                }
                Rows::Gated { gate, up, activation } => {
                    gated::<S>(&gate[at.clone()], &up[at.clone()], activation, buffer);
                    buffer
                }
            };
            if self.forms.passes > 0 {
                // SAFETY: blocks of this row only, which belongs to this thread's range.
                unsafe { quantise_row::<S>(made, row, self.forms.passes, &self.blocks) };
            }
            if self.forms.floats {
                // SAFETY: as above.
                unsafe { self.floats.part(at) }.copy_from_slice(made);
            }
        }
    }
}
