//! Handoffs within one process: bounded queues that end, reset and push back as a stream does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::{Bytes, BytesMut};
use protocol::transfer::{PushMessage, PushReply};
use quinn::VarInt;
use runtime::framing::FramingError;
use runtime::quic::code;
use tokio::sync::mpsc;

use super::{Incoming, Outgoing};

enum Packet<M> {
    Message(M, Bytes),
    End,
}

/// The sending half.
pub struct MemoryOutgoing<M> {
    /// `None` once finished or reset.
    queue: Option<mpsc::Sender<Packet<M>>>,
    codes: Arc<Codes>,
    /// Keeps the place for the end, so that finishing never waits.
    end: Option<mpsc::OwnedPermit<Packet<M>>>,
}

/// The reading half.
pub struct MemoryIncoming<M> {
    queue: mpsc::Receiver<Packet<M>>,
    codes: Arc<Codes>,
    payload: Bytes,
    ended: bool,
}

/// Why a direction was cut.
struct Codes {
    reset: AtomicU64,
    stop: AtomicU64,
}

/// The prefill node's end.
pub type PushEnd = (MemoryOutgoing<PushMessage>, MemoryIncoming<PushReply>);
/// The decode node's end.
pub type ReceiveEnd = (MemoryOutgoing<PushReply>, MemoryIncoming<PushMessage>);

/// A stream whose directions hold `capacity` messages each, at least 1.
pub fn stream(capacity: usize) -> (PushEnd, ReceiveEnd) {
    let (message_out, message_in) = direction(capacity);
    let (reply_out, reply_in) = direction(capacity);
    ((message_out, reply_in), (reply_out, message_in))
}

fn direction<M: Send + 'static>(capacity: usize) -> (MemoryOutgoing<M>, MemoryIncoming<M>) {
    let cancelled = code::CANCELLED.into_inner();
    let codes = Arc::new(Codes {
        reset: AtomicU64::new(cancelled),
        stop: AtomicU64::new(cancelled),
    });
    let (sender, queue) = mpsc::channel(capacity.max(1) + 1);
    let end = sender.clone().try_reserve_owned().ok();
    let outgoing = MemoryOutgoing {
        queue: Some(sender),
        codes: Arc::clone(&codes),
        end,
    };
    (
        outgoing,
        MemoryIncoming {
            queue,
            codes,
            payload: Bytes::new(),
            ended: false,
        },
    )
}

impl<M: Send + 'static> Outgoing<M> for MemoryOutgoing<M> {
    async fn send(&mut self, message: M, payload: Bytes) -> Result<(), FramingError> {
        let queue = self.queue.as_ref().ok_or(FramingError::Closed)?;
        let stopped = || FramingError::Reset {
            code: self.codes.stop.load(Ordering::SeqCst),
        };
        queue
            .send(Packet::Message(message, payload))
            .await
            .map_err(|_| stopped())
    }

    fn finish(&mut self) -> Result<(), FramingError> {
        self.queue.take().ok_or(FramingError::Closed)?;
        if let Some(end) = self.end.take() {
            end.send(Packet::End);
        }
        Ok(())
    }

    fn reset(&mut self, code: VarInt) {
        if self.queue.take().is_some() {
            self.codes.reset.store(code.into_inner(), Ordering::SeqCst);
        }
        self.end = None;
    }
}

impl<M: Send> Incoming<M> for MemoryIncoming<M> {
    async fn next(&mut self) -> Result<Option<M>, FramingError> {
        if self.ended {
            return Ok(None);
        }
        match self.queue.recv().await {
            Some(Packet::Message(message, payload)) => {
                self.payload = payload;
                Ok(Some(message))
            }
            Some(Packet::End) => {
                self.ended = true;
                Ok(None)
            }
            None => Err(FramingError::Reset {
                code: self.codes.reset.load(Ordering::SeqCst),
            }),
        }
    }

    async fn payload(&mut self, length: usize, payload: &mut BytesMut) -> Result<(), FramingError> {
        payload.clear();
        let have = std::mem::take(&mut self.payload);
        if have.len() < length {
            return Err(FramingError::Truncated {
                expected: length,
                received: have.len(),
            });
        }
        payload.extend_from_slice(&have[..length]);
        Ok(())
    }

    fn stop(&mut self, code: VarInt) {
        self.codes.stop.store(code.into_inner(), Ordering::SeqCst);
        self.queue.close();
    }
}
