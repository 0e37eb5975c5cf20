//! The KV plane: one bidirectional stream per handoff.
//!
//! The prefill node sends [`PushMessage::Open`], frames, and at last [`PushMessage::Commit`]; the decode node answers
//! with [`PushReply`]. Payload bytes follow their frame header raw: they are never serialised. A reset of the stream, by
//! either side, cancels the handoff.

use bincode::{Decode, Encode};

use crate::ids::{Epoch, RequestId, Ticket};
use crate::kv::Fingerprint;

/// What the prefill node sends.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum PushMessage {
    /// First message of a handoff.
    Open(PushOpen),
    /// Header of a frame; `payload_len` raw bytes follow.
    Frame(FrameHeader),
    /// Everything has been sent.
    Commit(PushCommit),
}

/// Opens a handoff.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PushOpen {
    /// The request, for logs.
    pub request: RequestId,
    /// The reservation.
    pub ticket: Ticket,
    /// The reservation's generation.
    pub epoch: Epoch,
    /// Model and layout of the sender.
    pub fingerprint: Fingerprint,
}

/// Names the bytes of one frame. The payload holds, for each layer of the range and each block of the range in it, the
/// [`crate::kv::KvLayout::layer_block_bytes`] bytes of that block in canonical order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub struct FrameHeader {
    /// The reservation.
    pub ticket: Ticket,
    /// The reservation's generation.
    pub epoch: Epoch,
    /// Number of the frame within the handoff, from 0; a repeat keeps its number.
    pub number: u32,
    /// First layer.
    pub first_layer: u32,
    /// Number of layers.
    pub layers: u32,
    /// First block, by its number ([`crate::moved::Moved`]).
    pub first_block: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// `xxh3_64` of the payload.
    pub checksum: u64,
    /// Bytes of the payload.
    pub payload_len: u32,
}

/// Ends a handoff. The receiver becomes the owner of the sequence if, and only if, every (layer, block) has arrived with a
/// matching checksum and `digest` is the digest of what it has.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct PushCommit {
    /// The reservation.
    pub ticket: Ticket,
    /// The reservation's generation.
    pub epoch: Epoch,
    /// Digest over the checksums of all frames in the order of their numbers.
    pub digest: u64,
    /// Number of distinct frames.
    pub frames: u32,
    /// Tokens whose KV was sent: the prompt length.
    pub num_tokens: u32,
    /// The first token of each choice, sampled by the sender, in the order of the choices; none for beam search.
    pub first_tokens: Vec<u32>,
}

/// What the decode node answers.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum PushReply {
    /// The frame arrived damaged: send it again.
    Resend {
        /// [`FrameHeader::number`].
        number: u32,
    },
    /// The sequence belongs to the decode node now.
    Committed,
    /// The handoff is refused and over; the reason names the field that does not fit.
    Refused {
        /// Why, in one line.
        reason: String,
    },
    /// Every frame with a number below this has arrived undamaged: the sender may forget its payload. Cumulative. The first
    /// answer to an open that is granted: no commit is sent before it.
    Received {
        /// The lowest number that has not arrived.
        below: u32,
    },
}
