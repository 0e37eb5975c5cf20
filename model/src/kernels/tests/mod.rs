//! Every kernel against plain code, every instruction set against the portable one, every batch against single rows.

mod attention;
mod blocks;
mod ggml;
mod kv_block;
mod lanes;
mod linear;
mod rounding;
mod rowwise;

use super::{Cpu, CpuLevel};

/// A CPU of every level that this machine has, one thread each. The portable one is first.
fn cpus() -> Vec<Cpu> {
    CpuLevel::ALL
        .into_iter()
        .filter_map(|level| Cpu::with_level(level, 1).ok())
        .collect()
}

/// Pseudo-random numbers (xorshift), the same on every run.
struct Numbers(u64);

impl Numbers {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// In -1..1.
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / 8_388_608.0 - 1.0
    }

    fn units(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.unit()).collect()
    }
}

/// Bits, with one value for all NaNs: which NaN comes out is not defined.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter()
        .map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() })
        .collect()
}

/// Root of the mean squared difference, relative to that of the expected values.
fn relative_error(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f64| x * x;
    let difference: f64 = found
        .iter()
        .zip(expected)
        .map(|(&f, &e)| square(f64::from(f) - e))
        .sum();
    (difference / expected.iter().map(|&e| square(e)).sum::<f64>()).sqrt()
}

#[test]
fn impossible_cpus_are_refused() {
    let error = |result: Result<Cpu, super::KernelError>| result.err().map(|e| e.to_string()).unwrap_or_default();
    assert!(error(Cpu::new(0)).contains("cannot run on 0 threads"));
    assert!(error(Cpu::new(5000)).contains("cannot run on 5000 threads"));
    assert!(CpuLevel::Portable.is_supported() && CpuLevel::detect().is_supported());
    for level in CpuLevel::ALL {
        match Cpu::with_level(level, 1) {
            Ok(cpu) => assert!(level.is_supported() && cpu.level() == level),
            Err(e) => assert!(!level.is_supported() && e.to_string().contains(level.as_str())),
        }
    }
}
