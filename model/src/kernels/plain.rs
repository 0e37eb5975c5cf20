//! Plain loops compiled for the CPU's vectors. What they compute is the same bits everywhere: the compiler changes neither
//! the order nor the operations of floating-point code.
#![allow(
    unsafe_code,
    reason = "calling a function compiled for more than the base instruction set is unsafe"
)]

#[cfg(target_arch = "x86_64")]
use super::CpuLevel;

/// Code to be compiled for several instruction sets. `run` and all that it calls must be `#[inline(always)]`.
pub(crate) trait Plain {
    /// What it computes.
    type Output;
    /// Computes it.
    fn run(self) -> Self::Output;
}

/// Runs code at the best level of this CPU.
pub(crate) fn run_plain<P: Plain>(plain: P) -> P::Output {
    #[cfg(target_arch = "x86_64")]
    {
        let level = CpuLevel::detect();
        if level >= CpuLevel::Avx512 {
            // SAFETY: the CPU has the instructions.
            return unsafe { avx512(plain) };
        }
        if level >= CpuLevel::Avx2 {
            // SAFETY: as above.
            return unsafe { avx2(plain) };
        }
    }
    plain.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn avx512<P: Plain>(plain: P) -> P::Output {
    plain.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<P: Plain>(plain: P) -> P::Output {
    plain.run()
}
