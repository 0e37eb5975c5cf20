//! When requests are sent: seeded processes of arrivals.

use std::time::Duration;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp1, Gamma};

use super::Invalid;

/// A process of arrivals. All have the same mean rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Process {
    /// Independent of each other: gaps are exponentially distributed.
    Poisson,
    /// Gaps of a gamma distribution with this shape: 1 is Poisson, less comes in bursts, more is more even.
    Gamma(f64),
    /// All gaps are equal.
    Constant,
}

/// Times of arrivals from the first, which is at zero. Without end, never decreasing, and a function of process, rate and
/// seed alone; another rate stretches the same times.
#[derive(Debug)]
pub struct Arrivals {
    rate: f64,
    gaps: Gaps,
    random: ChaCha8Rng,
    /// In units of the mean gap, so that rounding does not depend on the rate.
    next: f64,
}

#[derive(Debug)]
enum Gaps {
    Exponential,
    Gamma(Gamma<f64>),
    Equal,
}

impl Arrivals {
    /// `rate` arrivals a second. Errors if it is no positive number, or if a shape is none.
    pub fn new(process: Process, rate: f64, seed: u64) -> Result<Self, Invalid> {
        if !(rate.is_finite() && rate > 0.0) {
            return Err(Invalid::new("rate", rate, "a number of requests a second above 0"));
        }
        let gaps = match process {
            Process::Poisson => Gaps::Exponential,
            Process::Constant => Gaps::Equal,
            // A scale of 1/shape makes the mean gap 1.
            Process::Gamma(shape) => match Gamma::new(shape, 1.0 / shape) {
                Ok(gamma) if shape.is_finite() => Gaps::Gamma(gamma),
                _ => return Err(Invalid::new("burstiness", shape, "a number above 0; 1 is Poisson")),
            },
        };
        Ok(Self {
            rate,
            gaps,
            random: ChaCha8Rng::seed_from_u64(seed),
            next: 0.0,
        })
    }
}

impl Iterator for Arrivals {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let now = self.next;
        self.next += match &self.gaps {
            Gaps::Exponential => Distribution::<f64>::sample(&Exp1, &mut self.random),
            Gaps::Gamma(gamma) => gamma.sample(&mut self.random),
            Gaps::Equal => 1.0,
        };
        // Beyond what a duration holds nobody waits.
        Some(Duration::try_from_secs_f64(now / self.rate).unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(process: Process, rate: f64, seed: u64, count: usize) -> Vec<f64> {
        let times: Vec<f64> = Arrivals::new(process, rate, seed)
            .expect("valid")
            .take(count + 1)
            .map(|time| time.as_secs_f64())
            .collect();
        assert_eq!(times[0], 0.0);
        times.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Mean, and standard deviation over mean.
    fn shape(gaps: &[f64]) -> (f64, f64) {
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        (mean, variance.sqrt() / mean)
    }

    #[test]
    fn processes_have_their_rate_and_their_spread() {
        // The deviation of gamma gaps over their mean is 1/sqrt(shape). Seeds are fixed, so the bounds cannot be missed by chance.
        for (process, spread) in [
            (Process::Poisson, 1.0),
            (Process::Gamma(1.0), 1.0),
            (Process::Gamma(0.25), 2.0),
            (Process::Gamma(4.0), 0.5),
            (Process::Constant, 0.0),
        ] {
            let (mean, found) = shape(&gaps(process, 20.0, 7, 20_000));
            assert!((mean * 20.0 - 1.0).abs() < 0.03, "{process:?}: mean gap {mean}");
            assert!((found - spread).abs() < 0.05, "{process:?}: spread {found}");
        }
    }

    #[test]
    fn the_seed_decides_and_the_rate_stretches() {
        let slow = gaps(Process::Poisson, 1.0, 11, 100);
        assert_eq!(slow, gaps(Process::Poisson, 1.0, 11, 100));
        assert_ne!(slow, gaps(Process::Poisson, 1.0, 12, 100));
        for (slow, fast) in slow.iter().zip(gaps(Process::Poisson, 4.0, 11, 100)) {
            assert!((slow / 4.0 - fast).abs() < 1e-8);
        }
    }

    #[test]
    fn known_times_of_a_constant_rate() {
        let times: Vec<_> = Arrivals::new(Process::Constant, 4.0, 0)
            .expect("valid")
            .take(4)
            .collect();
        assert_eq!(times, [0, 250, 500, 750].map(Duration::from_millis));
    }

    #[test]
    fn rates_and_shapes_must_be_positive_numbers() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = Arrivals::new(Process::Poisson, rate, 0)
                .expect_err("no rate")
                .to_string();
            assert!(error.contains("rate") && error.contains("above 0"), "{error}");
        }
        for shape in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = Arrivals::new(Process::Gamma(shape), 1.0, 0)
                .expect_err("no shape")
                .to_string();
            assert!(error.contains("burstiness"), "{error}");
        }
    }
}
