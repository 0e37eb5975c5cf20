//! Compiles a kernel for every instruction set and picks one: the only place that knows the sets.
#![allow(
    unsafe_code,
    reason = "calling a function compiled for more than the base instruction set is unsafe"
)]

use super::CpuLevel;
use super::cpu::Cpu;
use super::lanes::{IntLanes, Lanes, Portable};

/// A kernel with its arguments. `run` and all that it calls must be `#[inline(always)]`, so that they are compiled
/// with the instructions of the caller.
pub(super) trait Kernel {
    type Output;
    fn run<S: Lanes>(self) -> Self::Output;
}

/// A kernel that uses integer products.
pub(super) trait IntKernel {
    type Output;
    fn run<S: IntLanes>(self) -> Self::Output;
}

/// Runs a kernel at the CPU's level.
pub(super) fn run<K: Kernel>(cpu: &Cpu, kernel: K) -> K::Output {
    match cpu.level() {
        CpuLevel::Portable => kernel.run::<Portable>(),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2 => kernel.run::<Portable>(),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512 | CpuLevel::Avx512Vnni => kernel.run::<Portable>(),
        #[cfg(not(target_arch = "x86_64"))]
        CpuLevel::Avx2 | CpuLevel::Avx512 | CpuLevel::Avx512Vnni => kernel.run::<Portable>(),
    }
}

/// Runs a kernel with integer products at the CPU's level.
pub(super) fn run_int<K: IntKernel>(cpu: &Cpu, kernel: K) -> K::Output {
    match cpu.level() {
        CpuLevel::Portable => kernel.run::<Portable>(),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx2 | CpuLevel::Avx512 => kernel.run::<Portable>(),
        #[cfg(target_arch = "x86_64")]
        CpuLevel::Avx512Vnni => kernel.run::<Portable>(),
        #[cfg(not(target_arch = "x86_64"))]
        CpuLevel::Avx2 | CpuLevel::Avx512 | CpuLevel::Avx512Vnni => kernel.run::<Portable>(),
    }
}
