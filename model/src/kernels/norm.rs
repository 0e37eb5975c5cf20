//! Root-mean-square normalisation.
#![allow(unsafe_code, reason = "threads write disjoint rows of one slice")]

use super::KernelError;
use super::activation::check_rows;
use super::cpu::Cpu;
use super::dispatch::{self, Kernel};
use super::lanes::{LANES, Lanes};
use super::math::{load_part, store_part};
use super::shared::SharedMut;

/// For every row of `x`, as long as `weight`: out = x / sqrt(mean(x^2) + eps) * weight. The squares are summed in 16
/// lanes, then the lanes as a tree.
///
/// # Errors
/// If `x` is not made of such rows or `out` is not as long as `x`.
pub fn rms_norm(cpu: &Cpu, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) -> Result<(), KernelError> {
    KernelError::check("length of a norm's output", x.len(), out.len())?;
    out.copy_from_slice(x);
    rms_norm_in_place(cpu, out, weight, eps)
}

/// [`rms_norm`] that overwrites its input.
///
/// # Errors
/// If `x` is not made of rows as long as `weight`.
pub fn rms_norm_in_place(cpu: &Cpu, x: &mut [f32], weight: &[f32], eps: f32) -> Result<(), KernelError> {
    check_rows("length of the last row of a norm", x.len(), weight.len())?;
    let dim = weight.len().max(1);
    let (rows, x) = (x.len() / dim, SharedMut::new(x));
    cpu.ranges(rows, |_, range| {
        // SAFETY: every thread has other rows.
        let x = unsafe { x.part(range.start * dim..range.end * dim) };
        dispatch::run(cpu, RmsNorm { x, weight, eps });
    });
    Ok(())
}

struct RmsNorm<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        let dim = self.weight.len();
        for row in self.x.chunks_exact_mut(dim.max(1)) {
            let scale = S::splat(norm_scale::<S>(row, self.eps));
            for at in (0..dim).step_by(LANES) {
                let v: S = load_part(row, at);
                store_part(v.mul(scale).mul(load_part(self.weight, at)), row, at);
            }
        }
    }
}

/// 1 / sqrt(mean(x^2) + eps).
#[inline(always)]
fn norm_scale<S: Lanes>(row: &[f32], eps: f32) -> f32 {
    let mut squares = S::splat(0.0);
    for at in (0..row.len()).step_by(LANES) {
        let v: S = load_part(row, at);
        squares = v.fma(v, squares);
    }
    let mean = squares.sum() / row.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// The norm of one row, into `out`.
#[inline(always)]
pub(super) fn norm_row<S: Lanes>(row: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = S::splat(norm_scale::<S>(row, eps));
    for at in (0..row.len()).step_by(LANES) {
        let v: S = load_part(row, at);
        store_part(v.mul(scale).mul(load_part(weight, at)), out, at);
    }
}
