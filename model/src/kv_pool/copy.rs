//! Copies of blocks within the pool: a sequence gets a block of its own before it writes what it shared.

#![allow(unsafe_code, reason = "both chunks of a copy lie in one arena, see the module above")]

use std::sync::atomic::Ordering;

use engine::plan::{BlockCopy, BlockId};

use super::read_claim::{ReadClaim, busy};
use super::{KvError, KvPool, STEP};

/// The claim of a block that a copy is written to.
struct WriteClaim<'a> {
    pool: &'a KvPool,
    block: [BlockId; 1],
}

impl<'a> WriteClaim<'a> {
    fn take(pool: &'a KvPool, block: BlockId) -> Result<Self, KvError> {
        let word = pool.claim_word(block)?;
        word.compare_exchange(0, STEP, Ordering::Acquire, Ordering::Relaxed)
            .map_err(|held| busy(block, held))?;
        Ok(Self { pool, block: [block] })
    }
}

impl Drop for WriteClaim<'_> {
    fn drop(&mut self) {
        self.pool.unclaim(&self.block, STEP);
    }
}

impl KvPool {
    /// Copies blocks, one after the other, whole, in all layers that a block has. To be called before the step that needs them claims its
    /// plan.
    ///
    /// # Errors
    /// [`KvError::NoSuchBlock`]; [`KvError::Busy`] if a handoff or a step writes the block that is copied, or anybody
    /// holds the one that is written. The copies before it have been made.
    pub fn copy_blocks(&self, copies: &[BlockCopy]) -> Result<(), KvError> {
        for copy in copies {
            let from = [copy.from];
            let source = ReadClaim::take(self, &from)?;
            let target = WriteClaim::take(self, copy.to)?;
            for layer in 0..self.layout.num_layers {
                let (read, written) = (self.chunk_ptr(layer, copy.from), self.chunk_ptr(layer, copy.to));
                // SAFETY: both chunks lie within the arena (`chunk_ptr`) and are initialised. They are different ones: a
                // block that is claimed for reading cannot be claimed for writing. `source` keeps writers out of the
                // first, `target` everybody out of the second.
                unsafe { std::ptr::copy_nonoverlapping(read, written, self.chunk) };
            }
            drop((source, target));
        }
        Ok(())
    }
}
