//! Arithmetic over a row of logits: maxima, exponentials, sums in a fixed order.
//!
//! Only additions, multiplications and comparisons of single numbers in a stated order are used, so results are the same
//! bits on every machine, and the loops still become vector code.

use super::SampleError;
use crate::kernels::{Plain, run_plain};

/// Elements of one partial sum.
pub(super) const SUM_BLOCK: usize = 512;
const LANES: usize = 8;

/// The best logit of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Best {
    /// The lowest id that has the value.
    pub token: u32,
    /// The value: finite.
    pub logit: f32,
}

/// Finds the best logit.
///
/// # Errors
/// [`SampleError::NotANumber`] and [`SampleError::Infinite`] for NaN and positive infinity, [`SampleError::NoToken`] if
/// the row is empty or every logit is negative infinity.
pub fn best(logits: &[f32]) -> Result<Best, SampleError> {
    struct Find<'a>(&'a [f32]);
    impl Plain for Find<'_> {
        type Output = Result<Best, SampleError>;
        #[inline(always)]
        fn run(self) -> Self::Output {
            find_best(self.0)
        }
    }
    run_plain(Find(logits))
}

#[inline(always)]
fn find_best(logits: &[f32]) -> Result<Best, SampleError> {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let mut odd = [false; 16];
    let chunks = logits.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for i in 0..16 {
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
            odd[i] |= chunk[i].is_nan();
        }
    }
    for (i, &x) in rest.iter().enumerate() {
        lanes[i] = if x > lanes[i] { x } else { lanes[i] };
        odd[i] |= x.is_nan();
    }
    let max = lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    if odd.contains(&true) {
        let token = logits.iter().position(|x| x.is_nan()).unwrap_or(0);
        return Err(SampleError::NotANumber { token: token as u32 });
    }
    let token = logits.iter().position(|&x| x == max).unwrap_or(0) as u32;
    if max == f32::INFINITY {
        return Err(SampleError::Infinite { token });
    }
    if max == f32::NEG_INFINITY {
        return Err(SampleError::NoToken { vocab: logits.len() });
    }
    Ok(Best { token, logit: max })
}

/// `e^x` for `x <= 0`, relative error below 3e-7; 0 below -87.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts; the first has few enough bits that n * LN2_HI is exact.
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // Adding and subtracting it rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    // Not `f32::max`: the comparison is one instruction.
    let bounded = if x > -87.0 { x } else { -87.0 };
    let shifted = bounded * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (bounded - n * LN2_HI) - n * LN2_LO;
    let mut p = 1.987_569_1e-4_f32;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let fraction = p * (r * r) + r + 1.0;
    // The low bits of `shifted` hold n; moved into the exponent field they multiply by 2^n.
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    let value = fraction * power;
    if x >= -87.0 { value } else { 0.0 }
}

/// `(logit - max) / temperature`; negative infinity if that is below the range of f32.
#[inline(always)]
pub fn scaled(logit: f32, max: f32, temperature: f32) -> f32 {
    (logit - max) / temperature
}

/// The sum of up to [`SUM_BLOCK`] numbers, in 8 interleaved partial sums.
#[inline(always)]
fn block_sum(numbers: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    let (whole, rest) = numbers.as_chunks::<LANES>();
    for part in whole {
        for (lane, &x) in lanes.iter_mut().zip(part) {
            *lane += f64::from(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(x);
    }
    ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]))
}

/// Sum over a row of `exp(logit - max)`.
pub fn sum_exp(logits: &[f32], max: f32) -> f64 {
    struct Sum<'a>(&'a [f32], f32);
    impl Plain for Sum<'_> {
        type Output = f64;
        #[inline(always)]
        fn run(self) -> f64 {
            let Self(logits, max) = self;
            let mut total = 0.0;
            let mut weights = [0.0_f32; SUM_BLOCK];
            for block in logits.chunks(SUM_BLOCK) {
                for (w, &x) in weights.iter_mut().zip(block) {
                    *w = exp(x - max);
                }
                total += block_sum(&weights[..block.len()]);
            }
            total
        }
    }
    run_plain(Sum(logits, max))
}

/// Writes `exp((logit - max) / temperature)` of a row and returns its sums, one per [`SUM_BLOCK`] elements.
pub(super) fn weights(logits: &[f32], max: f32, temperature: f32, out: &mut Vec<f32>, sums: &mut Vec<f64>) {
    struct Weigh<'a> {
        logits: &'a [f32],
        max: f32,
        temperature: f32,
        out: &'a mut Vec<f32>,
        sums: &'a mut Vec<f64>,
    }
    impl Plain for Weigh<'_> {
        type Output = ();
        #[inline(always)]
        fn run(self) {
            self.out.resize(self.logits.len(), 0.0);
            self.sums.clear();
            for (block, out) in self.logits.chunks(SUM_BLOCK).zip(self.out.chunks_mut(SUM_BLOCK)) {
                for (w, &x) in out.iter_mut().zip(block) {
                    *w = exp(scaled(x, self.max, self.temperature));
                }
                self.sums.push(block_sum(out));
            }
        }
    }
    run_plain(Weigh {
        logits,
        max,
        temperature,
        out,
        sums,
    });
}

/// Log-probability of `token` under the soft-max of a row of logits (nats).
///
/// # Errors
/// As [`best`]; [`SampleError::NoSuchToken`] if the row has no such token.
pub fn log_probability(logits: &[f32], token: u32) -> Result<f32, SampleError> {
    let best = best(logits)?;
    let logit = logits.get(token as usize).ok_or(SampleError::NoSuchToken {
        token,
        vocab: logits.len(),
    })?;
    Ok((f64::from(logit - best.logit) - sum_exp(logits, best.logit).ln()) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_library_and_monotonic() {
        let mut previous = 0.0;
        for i in (0..=200_000).rev() {
            let x = -(i as f32) * 4.4e-4;
            let (ours, exact) = (exp(x), f64::from(x).exp());
            assert!(ours >= previous || (ours - previous).abs() <= previous * 2e-7, "at {x}");
            previous = ours;
            if x >= -87.0 {
                assert!(
                    (f64::from(ours) / exact - 1.0).abs() < 3e-7,
                    "exp({x}) = {ours}, exact {exact}"
                );
            }
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-87.5), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-f32::MAX), 0.0);
    }

    #[test]
    fn best_takes_the_lowest_of_equals_and_refuses_what_has_no_order() {
        let mut row = vec![0.5_f32; 1_000];
        row[701] = 2.0;
        row[702] = 2.0;
        assert_eq!(best(&row), Ok(Best { token: 701, logit: 2.0 }));
        row[999] = f32::NAN;
        assert_eq!(best(&row), Err(SampleError::NotANumber { token: 999 }));
        row[999] = f32::INFINITY;
        assert_eq!(best(&row), Err(SampleError::Infinite { token: 999 }));
        assert_eq!(best(&[f32::NEG_INFINITY; 20]), Err(SampleError::NoToken { vocab: 20 }));
        assert_eq!(best(&[]), Err(SampleError::NoToken { vocab: 0 }));
    }

    #[test]
    fn sums_agree_with_double_precision() {
        let row: Vec<f32> = (0..49_152)
            .map(|i| ((i * 7_919 % 10_007) as f32 / 10_007.0 - 0.5) * 30.0)
            .collect();
        let max = best(&row).map_or(0.0, |b| b.logit);
        let exact: f64 = row.iter().map(|&x| f64::from(x - max).exp()).sum();
        assert!((sum_exp(&row, max) / exact - 1.0).abs() < 1e-6);
        let logprob = log_probability(&row, 17).map_or(f64::NAN, f64::from);
        assert!((logprob - (f64::from(row[17] - max) - exact.ln())).abs() < 1e-5);
    }
}
