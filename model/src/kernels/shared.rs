//! A slice that several threads fill.
#![allow(unsafe_code, reason = "threads write disjoint parts of one slice, through a pointer")]

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice, disjoint parts of which are written by several threads during one call.
pub(super) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

impl<T> Clone for SharedMut<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedMut<'_, T> {}

// SAFETY: parts are handed out by `part` and `start`, whose callers vouch that no two threads have the same element.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            _borrow: PhantomData,
        }
    }

    /// Number of elements.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The first element.
    #[inline(always)]
    pub(super) fn start(&self) -> *mut T {
        self.start
    }

    /// Some elements.
    ///
    /// # Panics
    /// If the range is not inside of the slice.
    ///
    /// # Safety
    /// No other reference to these elements may exist while the result is used.
    #[inline(always)]
    pub(super) unsafe fn part(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a part of the slice");
        // SAFETY: inside of the slice, which is borrowed for 'a; the caller vouches that the part is not shared.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
