//! What the KV pool refuses.

use thiserror::Error;

/// Why KV bytes could not be read or written.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum KvError {
    /// The pool could not be allocated.
    #[error("KV pool of {blocks} blocks ({bytes} bytes) cannot be allocated: {reason}")]
    Allocation {
        /// Blocks asked for.
        blocks: usize,
        /// Their bytes.
        bytes: u128,
        /// What the system said.
        reason: String,
    },
    /// A block id that the pool does not have.
    #[error("block {block} does not exist, the pool has {total} blocks")]
    NoSuchBlock {
        /// The id.
        block: u32,
        /// Blocks of the pool.
        total: u32,
    },
    /// A layer range that the pool does not have.
    #[error("layers {start}..{end} do not exist, the pool has {total} layers")]
    NoSuchLayers {
        /// First layer.
        start: u32,
        /// One past the last layer.
        end: u64,
        /// Layers of the pool.
        total: u32,
    },
    /// A block range outside of what a [`KvWriter`](crate::kv_pool::KvWriter) owns.
    #[error("block indices {start}..{end} are outside of the reservation's {owned} blocks")]
    OutsideReservation {
        /// First index.
        start: u32,
        /// One past the last index.
        end: u64,
        /// Blocks of the reservation.
        owned: u32,
    },
    /// A payload whose length contradicts its ranges.
    #[error("payload has {found} bytes, {expected} were expected")]
    PayloadLength {
        /// Bytes that the ranges call for.
        expected: u64,
        /// Bytes given.
        found: u64,
    },
    /// The block is claimed by somebody else.
    #[error("block {block} is in use by {holder}")]
    Busy {
        /// The block.
        block: u32,
        /// Who holds it.
        holder: &'static str,
    },
    /// A second step was started while one runs.
    #[error("a step already runs on this pool")]
    StepRuns,
    /// The writer was revoked.
    #[error("the handoff's write access was revoked")]
    Revoked,
}
