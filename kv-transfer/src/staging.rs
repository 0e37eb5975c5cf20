//! The memory that a prefill node may spend on computed KV that has not arrived: one budget over all its handoffs.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Most buffers kept for the next piece. Fresh memory of this size costs more than to fill it: the system clears it page
/// by page.
const MAX_SPARE: usize = 16;

/// A budget in bytes. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Staging {
    free: Arc<Semaphore>,
    total: usize,
    spare: Arc<Spare>,
}

/// Buffers that have been sent, for the next pieces.
#[derive(Debug, Default)]
struct Spare {
    buffers: Mutex<Vec<Vec<u8>>>,
    /// Largest buffer that is kept: all of them together are at most a quarter of the budget, and come on top of it.
    largest: usize,
}

impl Spare {
    fn take(&self) -> Vec<u8> {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        buffers.pop().unwrap_or_default()
    }

    fn give_back(&self, mut buffer: Vec<u8>) {
        buffer.clear();
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if buffers.len() < MAX_SPARE && buffer.capacity() <= self.largest {
            buffers.push(buffer);
        }
    }
}

/// Why there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// Not now.
    Full,
    /// Not ever.
    TooLarge,
}

/// Bytes that give their room back when the last reference to them goes, be it in a session or in the network stack.
struct Staged<B> {
    bytes: B,
    _room: OwnedSemaphorePermit,
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for Staged<B> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

/// A buffer that is used again.
#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    spare: Arc<Spare>,
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.spare.give_back(std::mem::take(&mut self.bytes));
    }
}

/// Room in the budget, and an empty buffer for what takes it.
#[derive(Debug)]
pub(crate) struct StagedRoom {
    buffer: Buffer,
    room: OwnedSemaphorePermit,
}

impl StagedRoom {
    pub(crate) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.buffer.bytes.len()
    }

    pub(crate) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(Staged {
            bytes: self.buffer,
            _room: self.room,
        })
    }
}

impl Staging {
    pub(crate) fn new(total: usize) -> Self {
        let total = total.min(Semaphore::MAX_PERMITS);
        let spare = Spare {
            buffers: Mutex::default(),
            largest: (total / (4 * MAX_SPARE)).max(4_096),
        };
        Self {
            free: Arc::new(Semaphore::new(total)),
            total,
            spare: Arc::new(spare),
        }
    }

    fn size(&self, bytes: usize) -> Result<u32, NoRoom> {
        match u32::try_from(bytes) {
            Ok(size) if bytes <= self.total => Ok(size),
            Ok(_) | Err(_) => Err(NoRoom::TooLarge),
        }
    }

    /// Takes room for `bytes` bytes if there is some now.
    pub(crate) fn try_room(&self, bytes: usize) -> Result<StagedRoom, NoRoom> {
        let room = Arc::clone(&self.free)
            .try_acquire_many_owned(self.size(bytes)?)
            .map_err(|_| NoRoom::Full)?;
        Ok(self.with_buffer(room, bytes))
    }

    /// Waits for room for `bytes` bytes; first come, first served. Cancel-safe.
    pub(crate) async fn room(&self, bytes: usize) -> Result<StagedRoom, NoRoom> {
        let room = Arc::clone(&self.free)
            .acquire_many_owned(self.size(bytes)?)
            .await
            .map_err(|_| NoRoom::TooLarge)?;
        Ok(self.with_buffer(room, bytes))
    }

    fn with_buffer(&self, room: OwnedSemaphorePermit, bytes: usize) -> StagedRoom {
        let mut buffer = Buffer {
            bytes: self.spare.take(),
            spare: Arc::clone(&self.spare),
        };
        buffer.bytes.reserve_exact(bytes);
        StagedRoom { buffer, room }
    }

    /// Takes room for `bytes`, which are not copied, if there is some now.
    pub(crate) fn try_stage(&self, bytes: &Bytes) -> Result<Bytes, NoRoom> {
        let room = Arc::clone(&self.free)
            .try_acquire_many_owned(self.size(bytes.len())?)
            .map_err(|_| NoRoom::Full)?;
        Ok(staged(bytes, room))
    }

    /// As [`Self::try_stage`], but waits for room; first come, first served. Cancel-safe.
    pub(crate) async fn stage(&self, bytes: &Bytes) -> Result<Bytes, NoRoom> {
        let room = Arc::clone(&self.free)
            .acquire_many_owned(self.size(bytes.len())?)
            .await
            .map_err(|_| NoRoom::TooLarge)?;
        Ok(staged(bytes, room))
    }

    /// Bytes in use.
    pub(crate) fn used(&self) -> usize {
        self.total - self.free.available_permits()
    }

    /// The budget.
    pub(crate) fn total(&self) -> usize {
        self.total
    }
}

fn staged(bytes: &Bytes, room: OwnedSemaphorePermit) -> Bytes {
    Bytes::from_owner(Staged {
        bytes: bytes.clone(),
        _room: room,
    })
}
