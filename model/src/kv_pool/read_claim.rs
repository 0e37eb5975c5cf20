//! The claim of a copy: blocks that stay as they are while they are read.

use std::sync::atomic::{AtomicU32, Ordering};

use engine::plan::BlockId;

use super::{KvError, KvPool, READERS, SHARED, STEP, WRITER, lock};

/// Keeps writers out of blocks while they are copied.
pub(super) struct ReadClaim<'a> {
    pool: &'a KvPool,
    /// Blocks claimed so far.
    blocks: &'a [BlockId],
    /// True on the thread whose step runs. Blocks that this step writes need no further claim: no other thread can end the
    /// step, and this thread is here.
    own_step: bool,
}

impl<'a> ReadClaim<'a> {
    pub(super) fn take(pool: &'a KvPool, blocks: &'a [BlockId]) -> Result<Self, KvError> {
        let own_step = *lock(&pool.step) == Some(std::thread::current().id());
        let mut claim = Self {
            pool,
            blocks: &blocks[..0],
            own_step,
        };
        for (i, block) in blocks.iter().enumerate() {
            let word = pool.claim_word(*block)?;
            if !claim.is_quiet(word) {
                let readable =
                    |held: u32| (held & (WRITER | STEP) == 0 && held & READERS < READERS).then_some(held + 1);
                word.fetch_update(Ordering::Acquire, Ordering::Relaxed, readable)
                    .map_err(|held| busy(*block, held))?;
            }
            claim.blocks = &blocks[..=i];
        }
        Ok(claim)
    }

    fn is_quiet(&self, word: &AtomicU32) -> bool {
        self.own_step && word.load(Ordering::Relaxed) & STEP != 0
    }
}

impl Drop for ReadClaim<'_> {
    fn drop(&mut self) {
        for block in self.blocks {
            let word = &self.pool.claims[block.0 as usize];
            if !self.is_quiet(word) {
                word.fetch_sub(1, Ordering::Release);
            }
        }
    }
}

/// The error of a claim that met the claims `held`.
pub(super) fn busy(block: BlockId, held: u32) -> KvError {
    let holder = match held {
        h if h & WRITER != 0 => "a handoff that writes it",
        h if h & (STEP | SHARED) != 0 => "a running step",
        _ => "a copy being taken",
    };
    KvError::Busy { block: block.0, holder }
}
