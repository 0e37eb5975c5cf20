//! The memory that a prefill node may spend on computed KV that has not arrived: one budget over all its handoffs.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A budget in bytes. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Staging {
    free: Arc<Semaphore>,
    total: usize,
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
struct Staged {
    bytes: Bytes,
    _room: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Staged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Staging {
    pub(crate) fn new(total: usize) -> Self {
        let total = total.min(Semaphore::MAX_PERMITS);
        Self {
            free: Arc::new(Semaphore::new(total)),
            total,
        }
    }

    fn size(&self, bytes: &Bytes) -> Result<u32, NoRoom> {
        match u32::try_from(bytes.len()) {
            Ok(size) if bytes.len() <= self.total => Ok(size),
            Ok(_) | Err(_) => Err(NoRoom::TooLarge),
        }
    }

    /// Takes room for `bytes` if there is some now.
    pub(crate) fn try_stage(&self, bytes: &Bytes) -> Result<Bytes, NoRoom> {
        let size = self.size(bytes)?;
        let room = Arc::clone(&self.free)
            .try_acquire_many_owned(size)
            .map_err(|_| NoRoom::Full)?;
        Ok(Bytes::from_owner(Staged {
            bytes: bytes.clone(),
            _room: room,
        }))
    }

    /// Waits for room for `bytes`; first come, first served. Cancel-safe.
    pub(crate) async fn stage(&self, bytes: &Bytes) -> Result<Bytes, NoRoom> {
        let size = self.size(bytes)?;
        let room = Arc::clone(&self.free)
            .acquire_many_owned(size)
            .await
            .map_err(|_| NoRoom::TooLarge)?;
        Ok(Bytes::from_owner(Staged {
            bytes: bytes.clone(),
            _room: room,
        }))
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
