//! The element types of the KV cache as the kernels read and write them.
#![allow(unsafe_code, reason = "vectors are read from and written to bytes")]

use protocol::kv::KvDtype;

use super::lanes::Lanes;

/// An element type.
pub(super) trait Element: Copy {
    /// Bytes of an element.
    const SIZE: usize;
    /// Elements are multiples of a scale of their token.
    const SCALED: bool = false;

    /// # Safety
    /// `p` must be good for reading 16 elements; no alignment is needed.
    unsafe fn load<S: Lanes>(p: *const u8) -> S;
    /// Rounds to the type, ties to even. Of a scaled type, lanes are in -127..=127.
    /// # Safety
    /// `p` must be good for writing 16 elements; no alignment is needed.
    unsafe fn store<S: Lanes>(v: S, p: *mut u8);
}

/// Something to do for one element type. As with kernels, all that it calls must be `#[inline(always)]`.
pub(super) trait ElementKernel {
    fn run<S: Lanes, E: Element>(self);
}

/// Does it for the type that is meant.
#[inline(always)]
pub(super) fn with_element<S: Lanes>(dtype: KvDtype, kernel: impl ElementKernel) {
    match dtype {
        KvDtype::F16 => kernel.run::<S, F16>(),
        KvDtype::F32 => kernel.run::<S, F32>(),
        KvDtype::Bf16 => kernel.run::<S, Bf16>(),
        KvDtype::Int8 => kernel.run::<S, Int8>(),
    }
}

#[derive(Clone, Copy)]
pub(super) struct F16;
#[derive(Clone, Copy)]
pub(super) struct F32;
#[derive(Clone, Copy)]
pub(super) struct Bf16;
#[derive(Clone, Copy)]
pub(super) struct Int8;

impl Element for F16 {
    const SIZE: usize = KvDtype::F16.size();
    #[inline(always)]
    unsafe fn load<S: Lanes>(p: *const u8) -> S {
        // SAFETY: passed on from the caller.
        unsafe { S::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Lanes>(v: S, p: *mut u8) {
        // SAFETY: passed on from the caller.
        unsafe { v.store_f16(p) }
    }
}

impl Element for F32 {
    const SIZE: usize = KvDtype::F32.size();
    #[inline(always)]
    unsafe fn load<S: Lanes>(p: *const u8) -> S {
        // SAFETY: passed on from the caller.
        unsafe { S::load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store<S: Lanes>(v: S, p: *mut u8) {
        // SAFETY: passed on from the caller.
        unsafe { v.store(p.cast()) }
    }
}

impl Element for Bf16 {
    const SIZE: usize = KvDtype::Bf16.size();
    #[inline(always)]
    unsafe fn load<S: Lanes>(p: *const u8) -> S {
        // SAFETY: passed on from the caller.
        unsafe { S::load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Lanes>(v: S, p: *mut u8) {
        // SAFETY: passed on from the caller.
        unsafe { v.store_bf16(p) }
    }
}

impl Element for Int8 {
    const SIZE: usize = KvDtype::Int8.size();
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn load<S: Lanes>(p: *const u8) -> S {
        // SAFETY: passed on from the caller.
        unsafe { S::load_i8(p) }
    }
    #[inline(always)]
    unsafe fn store<S: Lanes>(v: S, p: *mut u8) {
        // SAFETY: passed on from the caller.
        unsafe { v.store_i8(p) }
    }
}
