//! What a handoff needs from a stream: one direction out, one direction in, six methods in all.
//!
//! The prefill node sends `PushMessage`s and reads `PushReply`s; the decode node does the opposite. [`quic`] is the real
//! thing, [`memory`] its stand-in for tests, [`faulty`] makes either of them misbehave by a seed.

pub mod faulty;
pub mod memory;
pub mod quic;

use bytes::{Bytes, BytesMut};
use quinn::VarInt;
use runtime::framing::FramingError;

/// The sending direction. Dropped unfinished, it resets: the peer sees a cancel, not an end.
pub trait Outgoing<M>: Send {
    /// Sends a message and the raw bytes that belong to it (maybe none), which are not copied. Waits while the peer is slow.
    /// Not cancel-safe.
    fn send(&mut self, message: M, payload: Bytes) -> impl Future<Output = Result<(), FramingError>> + Send;

    /// Ends the stream cleanly.
    fn finish(&mut self) -> Result<(), FramingError>;

    /// Cancels with a code of [`runtime::quic::code`]. Without effect after [`finish`](Self::finish).
    fn reset(&mut self, code: VarInt);
}

/// The reading direction. Dropped before the end, it tells the peer to stop.
pub trait Incoming<M>: Send {
    /// The next message; `None` after a clean end. Cancel-safe.
    fn next(&mut self) -> impl Future<Output = Result<Option<M>, FramingError>> + Send;

    /// Reads the `length` raw bytes that follow the last message into `payload`, which is emptied first. The caller has
    /// checked `length`. Not cancel-safe.
    fn payload(
        &mut self,
        length: usize,
        payload: &mut BytesMut,
    ) -> impl Future<Output = Result<(), FramingError>> + Send;

    /// Tells the peer to stop sending, with a code of [`runtime::quic::code`].
    fn stop(&mut self, code: VarInt);
}
