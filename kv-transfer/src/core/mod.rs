//! The two ends of a handoff as state machines: facts in, actions out. No clock, no sockets, no tasks.
#![deny(clippy::wildcard_enum_match_arm)]

mod coverage;
mod receive;
mod send;

pub use coverage::{Coverage, Extent, Part};
pub use receive::{CommitAction, HeaderAction, PayloadAction, ReceiveCounters, ReceiveLimits, ReceiveSession, Refusal};
pub(crate) use send::check_part;
pub use send::{Frame, SendError, SendLimits, SendSession};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Checksum of a frame's payload: xxh3_64, seed 0.
pub fn checksum(payload: &[u8]) -> u64 {
    xxh3_64(payload)
}

/// Digest of a handoff: xxh3_64 over the little-endian checksums of its frames, in the order of their numbers.
pub fn digest(checksums: impl IntoIterator<Item = u64>) -> u64 {
    let mut hash = Xxh3::new();
    for checksum in checksums {
        hash.update(&checksum.to_le_bytes());
    }
    hash.digest()
}
