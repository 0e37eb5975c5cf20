//! Writes of handoffs into the blocks of their reservations.

#![allow(
    unsafe_code,
    reason = "a handoff writes its claimed blocks while steps work on others, see the module above"
)]

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use engine::plan::BlockId;
use protocol::kv::KvLayout;

use super::read_claim::busy;
use super::{KvError, KvPool, WRITER, lock};

impl KvPool {
    /// Claims `blocks` for the writes of one handoff: exclusive until the writer is revoked or dropped.
    ///
    /// # Errors
    /// [`KvError::NoSuchBlock`], [`KvError::Busy`] if somebody holds one of the blocks (also: a block named twice).
    pub fn writer(self: &Arc<Self>, blocks: Vec<BlockId>) -> Result<KvWriter, KvError> {
        for (i, block) in blocks.iter().enumerate() {
            let taken = self.claim_word(*block).and_then(|word| {
                word.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed)
                    .map_err(|held| busy(*block, held))
            });
            if let Err(error) = taken {
                self.unclaim(&blocks[..i], WRITER);
                return Err(error);
            }
        }
        Ok(KvWriter {
            pool: Arc::clone(self),
            blocks,
            open: Mutex::new(true),
        })
    }
}

/// Exclusive write access of one handoff to its reservation's blocks.
///
/// Revoke it before the reservation is committed or released: until then the engine's steps cannot use the blocks.
#[derive(Debug)]
pub struct KvWriter {
    pool: Arc<KvPool>,
    blocks: Vec<BlockId>,
    /// False once revoked. Held during a write, so that a revocation waits for it.
    open: Mutex<bool>,
}

impl KvWriter {
    /// Number of blocks that may be written.
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Shape of the cache.
    pub fn layout(&self) -> &KvLayout {
        &self.pool.layout
    }

    /// Places a payload: for each of `layers` layers from `first_layer`, for each of `blocks` blocks from
    /// `first_block_index` (an index into the writer's blocks), its canonical bytes. Nothing is written
    /// unless all of it fits.
    ///
    /// # Errors
    /// [`KvError::NoSuchLayers`], [`KvError::OutsideReservation`], [`KvError::PayloadLength`], [`KvError::Revoked`].
    pub fn write(
        &self,
        first_layer: u32,
        layers: u32,
        first_block_index: u32,
        blocks: u32,
        payload: &[u8],
    ) -> Result<(), KvError> {
        self.pool
            .check_layers(first_layer, u64::from(first_layer) + u64::from(layers))?;
        let end = u64::from(first_block_index) + u64::from(blocks);
        let outside = || KvError::OutsideReservation {
            start: first_block_index,
            end,
            owned: self.blocks.len() as u32,
        };
        let range = first_block_index as usize..usize::try_from(end).map_err(|_| outside())?;
        let targets = self.blocks.get(range).ok_or_else(outside)?;
        let chunk = self.pool.chunk;
        let expected = u64::from(layers) * targets.len() as u64 * chunk as u64;
        if payload.len() as u64 != expected {
            return Err(KvError::PayloadLength {
                expected,
                found: payload.len() as u64,
            });
        }
        let open = self.lock_open();
        if !*open {
            return Err(KvError::Revoked);
        }
        let mut chunks = payload.chunks_exact(chunk);
        for layer in first_layer..first_layer + layers {
            for (block, bytes) in targets.iter().zip(&mut chunks) {
                let start = self.pool.chunk_ptr(layer, *block);
                // SAFETY: `bytes` is one chunk long and outside of the arena. The blocks are claimed by this writer
                // (`open` is true, and only `revoke` ends the claim, under the same lock), so no other thread reads or
                // writes them; other writes of this writer wait for the lock.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, chunk) };
            }
        }
        Ok(())
    }

    /// Ends the access: waits for writes in flight, afterwards every write fails and the blocks are idle. Idempotent.
    pub fn revoke(&self) {
        let mut open = self.lock_open();
        if std::mem::take(&mut *open) {
            self.pool.unclaim(&self.blocks, WRITER);
        }
    }

    fn lock_open(&self) -> MutexGuard<'_, bool> {
        lock(&self.open)
    }
}

impl Drop for KvWriter {
    fn drop(&mut self) {
        self.revoke();
    }
}
