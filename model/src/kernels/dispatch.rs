//! Compiles a kernel for every instruction set and picks one: the only place that knows the sets.
#![allow(
    unsafe_code,
    reason = "calling a function compiled for more than the base instruction set is unsafe"
)]

use super::CpuLevel;
#[cfg(target_arch = "aarch64")]
use super::aarch64::Neon;
use super::cpu::Cpu;
use super::lanes::{IntLanes, Lanes, Portable};
#[cfg(target_arch = "x86_64")]
use super::x86::{Avx2, Avx512};

/// A kernel with its arguments. `run` and all that it calls must be `#[inline(always)]`, so that they are compiled
/// with the instructions of the caller; work in closures is not.
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
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Cpu` has a level only if the CPU has its instructions.
        CpuLevel::Avx2 | CpuLevel::AvxVnni => unsafe { avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        CpuLevel::Avx512 | CpuLevel::Avx512Vnni => unsafe { avx512(kernel) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a `Cpu` has a level only if the CPU has its instructions.
        CpuLevel::NeonDotprod => unsafe { neon(kernel) },
        // Portable: no `Cpu` has another architecture's level. (One arm, or the kernel would be compiled twice.)
        _ => kernel.run::<Portable>(),
    }
}

/// Runs a kernel with integer products at the CPU's level.
pub(super) fn run_int<K: IntKernel>(cpu: &Cpu, kernel: K) -> K::Output {
    match cpu.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Cpu` has a level only if the CPU has its instructions.
        CpuLevel::Avx2 | CpuLevel::Avx512 => unsafe { avx2_int(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        CpuLevel::AvxVnni => unsafe { avx_vnni_int(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        CpuLevel::Avx512Vnni => unsafe { avx512_int(kernel) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a `Cpu` has a level only if the CPU has its instructions.
        CpuLevel::NeonDotprod => unsafe { neon_int(kernel) },
        // Portable: no `Cpu` has another architecture's level. (One arm, or the kernel would be compiled twice.)
        _ => kernel.run::<Portable>(),
    }
}

/// Runs a kernel that is only worth its code with registers of 16 lanes and instructions for integer products; gives it
/// back where there are none.
pub(super) fn run_wide<K: IntKernel>(cpu: &Cpu, kernel: K) -> Result<K::Output, K> {
    match cpu.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a `Cpu` has a level only if the CPU has its instructions.
        CpuLevel::Avx512Vnni => Ok(unsafe { avx512_int(kernel) }),
        _ => Err(kernel),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2<false>>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2_int<K: IntKernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2<false>>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn avx512_int<K: IntKernel>(kernel: K) -> K::Output {
    kernel.run::<Avx512>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avxvnni,avx2,fma,f16c")]
fn avx_vnni_int<K: IntKernel>(kernel: K) -> K::Output {
    kernel.run::<Avx2<true>>()
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn neon<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<Neon>()
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,dotprod")]
fn neon_int<K: IntKernel>(kernel: K) -> K::Output {
    kernel.run::<Neon>()
}
