//! Memory of packed weights: on huge pages where the system has them.
//!
//! Decoding reads all weights for each token. With pages of 4 KiB one thread reads memory at three quarters of the speed
//! that it has with pages of 2 MiB, which a matrix of some hundred KiB cannot have for itself. So matrices share chunks.
#![allow(
    unsafe_code,
    reason = "buffers of different types lie in one mapping, each in a part of its own"
)]

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bytemuck::Zeroable;
use memmap2::{MmapMut, MmapOptions};

use super::KernelError;

/// Size of a huge page.
const HUGE_PAGE: usize = 2 << 20;
/// Size of a chunk. Of its last huge page the end is wasted; pages that nobody touches cost nothing.
const CHUNK: usize = 64 << 20;
/// Every buffer starts at a multiple of this: a cache line, and the largest alignment of a tile.
const ALIGN: usize = 64;

/// A mapping that buffers share. It goes when the last of them goes.
struct Chunk {
    /// Never read or written as a whole: only through the buffers' own parts.
    _map: MmapMut,
}

/// The chunk from which small buffers are cut, and where its free part starts.
struct Open {
    chunk: Weak<Chunk>,
    /// Address of the chunk's first aligned byte, and how many bytes from there are given away.
    start: usize,
    used: usize,
}

static OPEN: Mutex<Open> = Mutex::new(Open {
    chunk: Weak::new(),
    start: 0,
    used: 0,
});

/// Maps at least `bytes`, aligned to a huge page; returns the mapping and its first aligned address.
fn map(bytes: usize) -> Result<(Chunk, usize), KernelError> {
    let failed = |reason: String| KernelError::Memory { bytes, reason };
    let len = bytes
        .checked_add(HUGE_PAGE)
        .ok_or_else(|| failed("larger than the address space".to_owned()))?;
    let mut map = MmapOptions::new()
        .len(len)
        .map_anon()
        .map_err(|e| failed(e.to_string()))?;
    #[cfg(target_os = "linux")]
    if let Err(error) = map.advise(memmap2::Advice::HugePage) {
        tracing::debug!(%error, "no huge pages for the weights");
    }
    let start = (map.as_mut_ptr() as usize).next_multiple_of(HUGE_PAGE);
    Ok((Chunk { _map: map }, start))
}

/// `bytes` zeroed bytes at an aligned address, nobody else's as long as the chunk lives.
fn cut(bytes: usize) -> Result<(Arc<Chunk>, usize), KernelError> {
    if bytes > CHUNK / 2 {
        let (chunk, start) = map(bytes)?;
        return Ok((Arc::new(chunk), start));
    }
    // A panic cannot come between the changes of the fields.
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let room = open.used.checked_add(bytes).is_some_and(|end| end <= CHUNK);
    let chunk = match open.chunk.upgrade().filter(|_| room) {
        Some(chunk) => chunk,
        None => {
            let (chunk, start) = map(CHUNK)?;
            let chunk = Arc::new(chunk);
            *open = Open {
                chunk: Arc::downgrade(&chunk),
                start,
                used: 0,
            };
            chunk
        }
    };
    let at = open.start + open.used;
    open.used += bytes.next_multiple_of(ALIGN);
    Ok((chunk, at))
}

/// Packed weights in memory: the one place that allocates them.
pub(super) struct Buffer<T> {
    start: *mut T,
    len: usize,
    _chunk: Arc<Chunk>,
    _owns: PhantomData<T>,
}

// SAFETY: a buffer is the only one with access to its part of the chunk, as a `Vec` is to its memory; the chunk itself is
// never touched.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Copy + Zeroable> Buffer<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// If the system has no memory left.
    pub(super) fn new(len: usize) -> Result<Self, KernelError> {
        const { assert!(align_of::<T>() <= ALIGN, "elements are aligned within a chunk") };
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(|| KernelError::Memory {
            bytes: usize::MAX,
            reason: "larger than the address space".to_owned(),
        })?;
        let (chunk, at) = cut(bytes)?;
        Ok(Self {
            start: std::ptr::with_exposed_provenance_mut(at),
            len,
            _chunk: chunk,
            _owns: PhantomData,
        })
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements from `start` on lie in the chunk, are aligned, were zero at first (which is a value of
        // the type) and are this buffer's alone.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zero_aligned_and_do_not_overlap() {
        let mut buffers: Vec<Buffer<[u8; 48]>> = Vec::new();
        for len in [0, 1, 7, 1_000, 100_000, 500_000, 1_000_000, 3] {
            let buffer = Buffer::<[u8; 48]>::new(len).unwrap();
            assert_eq!(buffer.len(), len);
            assert_eq!(buffer.as_ptr() as usize % ALIGN, 0);
            assert!(buffer.iter().all(|x| x.iter().all(|&b| b == 0)));
            buffers.push(buffer);
        }
        for (i, buffer) in buffers.iter_mut().enumerate() {
            buffer.as_mut_slice().fill([i as u8 + 1; 48]);
        }
        for (i, buffer) in buffers.iter().enumerate() {
            assert!(buffer.iter().all(|x| *x == [i as u8 + 1; 48]), "buffer {i}");
        }
        // Freed chunks are not cut from again.
        drop(buffers);
        let again = Buffer::<u32>::new(1_000).unwrap();
        assert!(again.iter().all(|&x| x == 0));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let error = Buffer::<u64>::new(usize::MAX / 2).err().unwrap().to_string();
        assert!(error.contains("address space"), "{error}");
        let error = Buffer::<u64>::new(1 << 55).err().unwrap().to_string();
        assert!(error.contains("bytes for weights"), "{error}");
    }
}
