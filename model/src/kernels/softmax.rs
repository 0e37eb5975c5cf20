//! Over one row of logits: softmax, log-probabilities, the largest.

use super::cpu::Cpu;
use super::dispatch::{self, Kernel};
use super::lanes::{LANES, Lanes};
use super::math::{exp, load_part, store_part};

/// Values whose exponentials are summed in f32 lanes before the sum goes on in f64.
const SPAN: usize = 1024;

/// ln(sum of e^x), largest value taken out first. Negative infinity for an empty row; NaN if a value is NaN.
pub fn log_sum_exp(cpu: &Cpu, x: &[f32]) -> f64 {
    let max = largest(x);
    if max.is_infinite() {
        // Nothing but that, or something else among it.
        return if x.iter().any(|v| v.is_nan()) {
            f64::NAN
        } else {
            f64::from(max)
        };
    }
    f64::from(max) + dispatch::run(cpu, ExpSum { x, max }).ln()
}

/// out = x - ln(sum of e^x): log-probabilities.
///
/// # Errors
/// If the lengths differ.
pub fn log_softmax(cpu: &Cpu, x: &[f32], out: &mut [f32]) -> Result<(), super::KernelError> {
    super::KernelError::check("length of log-softmax's output", x.len(), out.len())?;
    let sum = log_sum_exp(cpu, x);
    for (out, &x) in out.iter_mut().zip(x) {
        let log_probability = (f64::from(x) - sum) as f32;
        *out = log_probability;
    }
    Ok(())
}

/// Replaces logits by probabilities.
pub fn softmax(cpu: &Cpu, x: &mut [f32]) {
    let max = largest(x);
    let sum = dispatch::run(cpu, ExpSum { x, max });
    let inverse = (1.0 / sum) as f32;
    dispatch::run(cpu, ExpScaled { x, max, inverse });
}

/// Index of the largest value, the first of equals; NaN is never the largest. `None` if there is none.
pub fn argmax(x: &[f32]) -> Option<usize> {
    let max = largest(x);
    x.iter().position(|&v| v == max)
}

/// The largest value that is no NaN; negative infinity if there is none.
fn largest(x: &[f32]) -> f32 {
    // In lanes, so that the compiler makes vectors of it. A maximum is the same in any order.
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for part in whole {
        for (a, &v) in lanes.iter_mut().zip(part) {
            *a = if v > *a { v } else { *a };
        }
    }
    lanes
        .iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, |a, &v| if v > a { v } else { a })
}

struct ExpSum<'a> {
    x: &'a [f32],
    max: f32,
}

impl Kernel for ExpSum<'_> {
    type Output = f64;
    #[inline(always)]
    fn run<S: Lanes>(self) -> f64 {
        let mut total = 0.0;
        for span in self.x.chunks(SPAN) {
            let mut sum = S::splat(0.0);
            for at in (0..span.len()).step_by(LANES) {
                let v: S = exp(load_part::<S>(span, at).sub(S::splat(self.max)));
                let count = LANES.min(span.len() - at);
                if count == LANES {
                    sum = sum.add(v);
                } else {
                    let mut lanes = v.to_array();
                    lanes[count..].fill(0.0);
                    sum = sum.add(S::from_array(lanes));
                }
            }
            total += f64::from(sum.sum());
        }
        total
    }
}

struct ExpScaled<'a> {
    x: &'a mut [f32],
    max: f32,
    inverse: f32,
}

impl Kernel for ExpScaled<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        for at in (0..self.x.len()).step_by(LANES) {
            let v: S = exp(load_part::<S>(self.x, at).sub(S::splat(self.max)));
            store_part(v.mul(S::splat(self.inverse)), self.x, at);
        }
    }
}
