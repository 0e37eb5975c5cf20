//! [`protocol`] messages and raw payloads on QUIC streams.
//!
//! A stream that is cut is never taken for one that ended: readers tell the clean end ([`None`]) from a reset and from an
//! end inside a message; writers reset their stream when they are dropped unfinished. None of these functions waits with a
//! deadline of its own: callers know theirs and wrap the call in a timeout.

use bincode::{Decode, Encode};
use bytes::{Bytes, BytesMut};
use protocol::codec::{self, CodecError, HEAD_BYTES};
use quinn::{ConnectionError, ReadError, RecvStream, SendStream, VarInt, WriteError};
use thiserror::Error;

use crate::quic::{code, describe};

/// Why a message or payload did not get through.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FramingError {
    /// The bytes are not a message.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The stream ended inside a message or payload.
    #[error("stream ended after {received} of {expected} bytes")]
    Truncated {
        /// Bytes that were due.
        expected: usize,
        /// Bytes that came.
        received: usize,
    },
    /// The peer reset its sending side, or stopped reading ours: a cancel.
    #[error("stream reset by the peer (code {code})")]
    Reset {
        /// One of [`crate::quic::code`].
        code: u64,
    },
    /// The connection is gone.
    #[error("connection lost: {reason}")]
    Connection {
        /// Why.
        reason: String,
        /// True if the peer fell silent or vanished without a word.
        silent: bool,
    },
    /// This side has already finished or reset the stream.
    #[error("stream is already closed on this side")]
    Closed,
}

impl From<ConnectionError> for FramingError {
    fn from(error: ConnectionError) -> Self {
        let silent = matches!(error, ConnectionError::TimedOut | ConnectionError::Reset);
        Self::Connection {
            reason: describe(&error),
            silent,
        }
    }
}

impl From<ReadError> for FramingError {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Reset(code) => Self::Reset {
                code: code.into_inner(),
            },
            ReadError::ConnectionLost(error) => error.into(),
            ReadError::ClosedStream | ReadError::IllegalOrderedRead | ReadError::ZeroRttRejected => Self::Closed,
        }
    }
}

impl From<WriteError> for FramingError {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Stopped(code) => Self::Reset {
                code: code.into_inner(),
            },
            WriteError::ConnectionLost(error) => error.into(),
            WriteError::ClosedStream | WriteError::ZeroRttRejected => Self::Closed,
        }
    }
}

/// Writes one message. Not cancel-safe: after a cancelled call the stream is good for nothing but a reset.
pub async fn write_message<T: Encode>(stream: &mut SendStream, message: &T, limit: usize) -> Result<(), FramingError> {
    let bytes = Bytes::from(codec::encode(message, limit)?);
    Ok(stream.write_chunk(bytes).await?)
}

/// Writes raw bytes without copying them. Not cancel-safe.
pub async fn write_all_chunks(stream: &mut SendStream, chunks: &mut [Bytes]) -> Result<(), FramingError> {
    Ok(stream.write_all_chunks(chunks).await?)
}

/// Reads one message; `None` if the peer finished the stream before it. Not cancel-safe: see [`MessageReader`].
pub async fn read_message<T: Decode<()>>(stream: &mut RecvStream, limit: usize) -> Result<Option<T>, FramingError> {
    let mut buffer = BytesMut::new();
    if !fill(stream, &mut buffer, HEAD_BYTES).await? {
        return Ok(None);
    }
    let length = body_length(&buffer, limit)?;
    buffer.clear();
    read_exact(stream, length, &mut buffer).await?;
    Ok(Some(codec::decode_body(&buffer)?))
}

/// Reads `length` raw bytes to the end of `buffer`. The caller has checked `length` against its limit. Not cancel-safe.
pub async fn read_exact(stream: &mut RecvStream, length: usize, buffer: &mut BytesMut) -> Result<(), FramingError> {
    let target = buffer.len() + length;
    if length > 0 && !fill(stream, buffer, target).await? {
        return Err(FramingError::Truncated {
            expected: length,
            received: 0,
        });
    }
    Ok(())
}

fn body_length(head: &[u8], limit: usize) -> Result<usize, FramingError> {
    let mut bytes = [0; HEAD_BYTES];
    bytes.copy_from_slice(&head[..HEAD_BYTES]);
    Ok(codec::decode_head(bytes, limit)?)
}

/// Reads until `buffer` holds `target` bytes. False if the stream ended before the first of them. Cancel-safe: what has
/// come is in `buffer`.
async fn fill(stream: &mut RecvStream, buffer: &mut BytesMut, target: usize) -> Result<bool, FramingError> {
    while buffer.len() < target {
        let Some(chunk) = stream.read_chunk(target - buffer.len(), true).await? else {
            if buffer.is_empty() {
                return Ok(false);
            }
            return Err(FramingError::Truncated {
                expected: target,
                received: buffer.len(),
            });
        };
        // Grows with what arrives, not with what was announced.
        buffer.extend_from_slice(&chunk.bytes);
    }
    Ok(true)
}

/// Reads messages, cancel-safe: a call dropped in the middle, as by `select!`, loses nothing.
///
/// Dropping the reader before the end tells the peer to stop sending.
#[derive(Debug)]
pub struct MessageReader {
    stream: RecvStream,
    buffer: BytesMut,
    limit: usize,
}

impl MessageReader {
    /// Reads messages with bodies of at most `limit` bytes.
    pub fn new(stream: RecvStream, limit: usize) -> Self {
        Self {
            stream,
            buffer: BytesMut::new(),
            limit,
        }
    }

    /// The next message; `None` if the peer finished the stream. Cancel-safe.
    pub async fn next<T: Decode<()>>(&mut self) -> Result<Option<T>, FramingError> {
        if !fill(&mut self.stream, &mut self.buffer, HEAD_BYTES).await? {
            return Ok(None);
        }
        let length = body_length(&self.buffer, self.limit)?;
        fill(&mut self.stream, &mut self.buffer, HEAD_BYTES + length).await?;
        let message = codec::decode_body(&self.buffer[HEAD_BYTES..])?;
        self.buffer.clear();
        Ok(Some(message))
    }

    /// Reads `length` raw bytes that follow a message into `payload`, which is emptied first. Not cancel-safe.
    pub async fn payload(&mut self, length: usize, payload: &mut BytesMut) -> Result<(), FramingError> {
        payload.clear();
        read_exact(&mut self.stream, length, payload).await
    }

    /// Tells the peer to stop sending. Without effect if the stream has ended.
    pub fn stop(&mut self, code: VarInt) {
        if self.stream.stop(code).is_err() {
            tracing::trace!("stream had ended before it was stopped");
        }
    }

    /// Gives the stream back. Bytes of a message that was read in part are lost.
    pub fn into_inner(self) -> RecvStream {
        self.stream
    }
}

/// Writes messages; dropped without [`finish`](Self::finish), it resets the stream, so that the peer sees a cancel and not
/// an end.
#[derive(Debug)]
pub struct MessageWriter {
    stream: SendStream,
    limit: usize,
    finished: bool,
}

impl MessageWriter {
    /// Writes messages with bodies of at most `limit` bytes.
    pub fn new(stream: SendStream, limit: usize) -> Self {
        Self {
            stream,
            limit,
            finished: false,
        }
    }

    /// Writes one message. Not cancel-safe.
    pub async fn write<T: Encode>(&mut self, message: &T) -> Result<(), FramingError> {
        write_message(&mut self.stream, message, self.limit).await
    }

    /// Writes several messages at once. Not cancel-safe.
    pub async fn write_all<T: Encode>(&mut self, messages: &[T]) -> Result<(), FramingError> {
        let mut bytes = Vec::new();
        for message in messages {
            bytes.append(&mut codec::encode(message, self.limit)?);
        }
        Ok(self.stream.write_chunk(Bytes::from(bytes)).await?)
    }

    /// Writes one message and raw bytes behind it, which are not copied. Not cancel-safe.
    pub async fn write_with_payload<T: Encode>(&mut self, message: &T, payload: Bytes) -> Result<(), FramingError> {
        let head = Bytes::from(codec::encode(message, self.limit)?);
        write_all_chunks(&mut self.stream, &mut [head, payload]).await
    }

    /// Ends the stream cleanly: the peer reads everything written, then the end.
    pub fn finish(&mut self) -> Result<(), FramingError> {
        self.finished = true;
        self.stream.finish().map_err(|_| FramingError::Closed)
    }

    /// Cancels: the peer reads [`FramingError::Reset`]. Without effect after [`finish`](Self::finish).
    pub fn reset(&mut self, code: VarInt) {
        if !self.finished && self.stream.reset(code).is_err() {
            tracing::trace!("stream had ended before it was reset");
        }
        self.finished = true;
    }

    /// Waits until the peer stops reading or resets; `Ok` if it has read everything after [`finish`](Self::finish).
    /// Cancel-safe.
    pub async fn stopped(&mut self) -> Result<(), FramingError> {
        match self.stream.stopped().await {
            Ok(None) => Ok(()),
            Ok(Some(code)) => Err(FramingError::Reset {
                code: code.into_inner(),
            }),
            Err(quinn::StoppedError::ConnectionLost(error)) => Err(error.into()),
            Err(quinn::StoppedError::ZeroRttRejected) => Err(FramingError::Closed),
        }
    }
}

impl Drop for MessageWriter {
    fn drop(&mut self) {
        self.reset(code::CANCELLED);
    }
}
