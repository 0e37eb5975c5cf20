//! Moves the KV blocks of a sequence from a prefill node to the decode node that has reserved room for them.
//!
//! Life of a handoff:
//! 1. [`pusher::Pusher::open`] names the reservation; a stream on a warm connection carries `Open`;
//! 2. [`receiver::Receiver`] checks the fingerprint, asks the node's [`receiver::ReservationTable`] for the ticket;
//! 3. the compute thread hands over finished layers by [`pusher::PushHandle::try_push`], which never blocks;
//! 4. [`core::SendSession`] cuts frames, numbers and checksums them, keeps them until they are confirmed;
//! 5. [`core::ReceiveSession`] lets through what belongs to the reservation and is undamaged: that alone is written;
//! 6. [`pusher::Push::commit`] sends the digest over all frames and the first token;
//! 7. all there and proven: the decode node owns the sequence. Anything else: a typed error, and nothing is kept.

pub mod core;
pub mod error;
pub mod pusher;
pub mod receiver;
pub mod stats;
pub mod transport;

mod staging;

/// Most (layer, block) pairs of one handoff: both sides keep one bit for each.
pub const MAX_PARTS: u64 = 1 << 26;
