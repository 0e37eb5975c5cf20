//! The most that integer products can do on a CPU: the yardstick of benchmarks.
#![allow(unsafe_code, reason = "bytes are loaded through a pointer")]

use std::hint::black_box;

use super::Cpu;
use super::dispatch::{self, IntKernel};
use super::lanes::IntLanes;

/// Independent sums, so that no instruction waits for another.
const SUMS: usize = 12;

/// Does `steps` rounds of integer products in registers, as the quantised products do them and nothing else, on the
/// caller's thread. Returns the operations (two for each product of bytes).
pub fn int8_peak(cpu: &Cpu, steps: usize) -> u64 {
    dispatch::run_int(cpu, Peak(steps))
}

struct Peak(usize);

#[repr(C, align(64))]
struct Aligned([u8; 64]);

impl IntKernel for Peak {
    type Output = u64;
    #[inline(always)]
    fn run<S: IntLanes>(self) -> u64 {
        let bytes = black_box(Aligned([3; 64]));
        // SAFETY: 64 bytes, aligned to 64.
        let w = S::low_nibbles(unsafe { S::load_bytes(bytes.0.as_ptr()) });
        let x = black_box(0x0102_0304);
        let mut sums = [S::int_zero(); SUMS];
        for _ in 0..self.0 {
            for sum in &mut sums {
                *sum = S::dot_small(*sum, w, x);
            }
        }
        for sum in sums {
            black_box(S::to_f32(sum).to_array());
        }
        (self.0 * SUMS * 2 * size_of::<Aligned>()) as u64
    }
}
