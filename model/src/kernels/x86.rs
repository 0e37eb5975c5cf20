//! The lanes of x86: AVX-512, and AVX2 with two registers of eight.
#![allow(
    unsafe_code,
    reason = "CPU instructions; see `Lanes` for why they are there when these types are used"
)]

use std::arch::x86_64::*;

/// An expression of instructions and pointer accesses.
macro_rules! instructions {
    ($($e:tt)*) => {
        // SAFETY: `dispatch` uses these types only where the CPU has the instructions; what pointers point to is
        // vouched for by the caller of the (then unsafe) function.
        unsafe { $($e)* }
    };
}

mod avx2;
mod avx512;
mod rounding;

pub(super) use avx2::Avx2;
pub(super) use avx512::Avx512;

/// The tree of `Lanes::sum` from the second step on.
#[inline(always)]
fn sum_of_eight(x: __m256) -> f32 {
    instructions! {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    }
}

/// The same for `Lanes::largest`.
#[inline(always)]
fn largest_of_eight(x: __m256) -> f32 {
    instructions! {
        let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
    }
}
