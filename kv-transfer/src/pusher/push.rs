//! One handoff as the prefill node holds it: the compute thread's handle and the job's end.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use protocol::kv::KvLayout;
use protocol::transfer::{PushMessage, PushReply};
use runtime::clock::Clock;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::PushSettings;
use super::pump::{Handoff, Item, pump};
use crate::core::{Extent, Part, SendError, check_part};
use crate::error::TransferError;
use crate::staging::{NoRoom, StagedRoom, Staging};
use crate::stats::{TransferStats, publish_push};
use crate::transport::{Incoming, Outgoing};

/// Pushed pieces that wait to be cut. Their bytes are bounded by the staging budget.
const QUEUE: usize = 1_024;

/// Why a piece was not taken.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PushError {
    /// No room now: push it again later, nothing is lost.
    #[error("staging is full")]
    Full,
    /// More than the whole staging budget: push smaller pieces.
    #[error("payload of {bytes} bytes is more than transfer.staging_bytes = {staging_bytes}")]
    TooLarge {
        /// Bytes of the payload.
        bytes: usize,
        /// The budget.
        staging_bytes: usize,
    },
    /// The handoff is over; [`Push::failed`] says why.
    #[error("the handoff is over")]
    Closed,
    /// Not part of the handoff.
    #[error(transparent)]
    Invalid(#[from] SendError),
}

/// Takes computed KV from any thread. Clones feed the same handoff.
#[derive(Clone)]
pub struct PushHandle {
    queue: mpsc::Sender<Item>,
    staging: Staging,
    layout: KvLayout,
    extent: Extent,
}

impl PushHandle {
    /// Hands over the bytes of `part`, in canonical order. Never blocks: if the network is behind and the staging budget
    /// used up, the answer is [`PushError::Full`], and the caller tries again later. `Bytes` are not copied.
    pub fn try_push(&self, part: Part, payload: Bytes) -> Result<(), PushError> {
        self.check(&part, &payload)?;
        let place = self.queue.try_reserve().map_err(|error| match error {
            mpsc::error::TrySendError::Full(()) => PushError::Full,
            mpsc::error::TrySendError::Closed(()) => PushError::Closed,
        })?;
        let payload = self
            .staging
            .try_stage(&payload)
            .map_err(|error| self.no_room(error, payload.len()))?;
        place.send(Item::Piece { part, payload });
        Ok(())
    }

    /// Like [`try_push`](Self::try_push), but waits for room; at most until the handoff ends. Cancel-safe.
    pub async fn push(&self, part: Part, payload: Bytes) -> Result<(), PushError> {
        self.check(&part, &payload)?;
        let staged = tokio::select! {
            biased;
            () = self.queue.closed() => return Err(PushError::Closed),
            staged = self.staging.stage(&payload) => staged.map_err(|error| self.no_room(error, payload.len()))?,
        };
        self.queue
            .send(Item::Piece { part, payload: staged })
            .await
            .map_err(|_| PushError::Closed)
    }

    /// Room for the bytes of `part`, to be filled and sent: whoever has to copy them first copies nothing for which there
    /// is no room. Never blocks: the answer is [`PushError::Full`] if there is none now.
    pub fn try_reserve(&self, part: Part) -> Result<Room<'_>, PushError> {
        let bytes = self.bytes(&part)?;
        let place = self.queue.try_reserve().map_err(|error| match error {
            mpsc::error::TrySendError::Full(()) => PushError::Full,
            mpsc::error::TrySendError::Closed(()) => PushError::Closed,
        })?;
        let staged = self
            .staging
            .try_room(bytes)
            .map_err(|error| self.no_room(error, bytes))?;
        Ok(Room {
            place,
            part,
            bytes,
            staged,
        })
    }

    /// As [`try_reserve`](Self::try_reserve), but waits for room; at most until the handoff ends. Cancel-safe.
    pub async fn reserve(&self, part: Part) -> Result<Room<'_>, PushError> {
        let bytes = self.bytes(&part)?;
        let staged = tokio::select! {
            biased;
            () = self.queue.closed() => return Err(PushError::Closed),
            staged = self.staging.room(bytes) => staged.map_err(|error| self.no_room(error, bytes))?,
        };
        let place = self.queue.reserve().await.map_err(|_| PushError::Closed)?;
        Ok(Room {
            place,
            part,
            bytes,
            staged,
        })
    }

    /// Bytes of a part.
    fn bytes(&self, part: &Part) -> Result<usize, PushError> {
        let bytes = part.layers as usize * part.blocks as usize * self.layout.layer_block_bytes();
        check_part(part, bytes, &self.layout, self.extent)?;
        Ok(bytes)
    }

    fn check(&self, part: &Part, payload: &Bytes) -> Result<(), PushError> {
        Ok(check_part(part, payload.len(), &self.layout, self.extent)?)
    }

    fn no_room(&self, error: NoRoom, bytes: usize) -> PushError {
        match error {
            NoRoom::Full => PushError::Full,
            NoRoom::TooLarge => PushError::TooLarge {
                bytes,
                staging_bytes: self.staging.total(),
            },
        }
    }
}

/// Room for one part, and an empty buffer for its bytes. Dropping it gives the room back.
#[derive(Debug)]
pub struct Room<'a> {
    place: mpsc::Permit<'a, Item>,
    part: Part,
    bytes: usize,
    staged: StagedRoom,
}

impl Room<'_> {
    /// Where the part's bytes belong, in canonical order. The memory is there already.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        self.staged.buffer()
    }

    /// Hands the bytes over.
    ///
    /// # Errors
    /// [`PushError::Invalid`] if the buffer does not hold the part's bytes.
    pub fn send(self) -> Result<(), PushError> {
        let (found, part) = (self.staged.len(), self.part);
        if found != self.bytes {
            let expected = self.bytes as u64;
            return Err(SendError::PayloadLength { found, part, expected }.into());
        }
        let payload = self.staged.into_bytes();
        self.place.send(Item::Piece { part, payload });
        Ok(())
    }
}

/// One handoff. Dropping it cancels: the stream is reset and the decode node frees the reservation.
pub struct Push {
    handle: PushHandle,
    done: oneshot::Receiver<Result<TransferStats, TransferError>>,
    failure: Option<TransferError>,
    _cancel: DropGuard,
}

impl Push {
    pub(super) fn spawn<C, F, O, I>(settings: PushSettings, connect: C, handoff: Handoff) -> Self
    where
        C: FnMut() -> F + Send + 'static,
        F: Future<Output = Result<(O, I), TransferError>> + Send + 'static,
        O: Outgoing<PushMessage> + 'static,
        I: Incoming<PushReply> + 'static,
    {
        let (queue, items) = mpsc::channel(QUEUE);
        let (sender, done) = oneshot::channel();
        let cancel = CancellationToken::new();
        let cancelled = cancel.clone();
        let (staging, layout, extent) = (settings.staging.clone(), settings.layout, handoff.extent);
        let sent = Arc::clone(&settings.sent);
        tokio::spawn(async move {
            let mut stats = TransferStats::default();
            let result = tokio::select! {
                biased;
                () = cancelled.cancelled() => Err(TransferError::Cancelled),
                result = pump(&settings, connect, handoff, items, &mut stats) => result,
            };
            sent.fetch_add(stats.bytes, Ordering::Relaxed);
            publish_push(&stats, result.is_ok());
            // Nobody listens any more if the push was dropped.
            drop(sender.send(result.map(|()| stats)));
        });
        let handle = PushHandle {
            queue,
            staging,
            layout,
            extent,
        };
        Self {
            handle,
            done,
            failure: None,
            _cancel: cancel.drop_guard(),
        }
    }

    /// A handle for the compute thread.
    pub fn staging(&self) -> PushHandle {
        self.handle.clone()
    }

    /// Waits until the handoff fails; for ever if it does not. For jobs that should stop computing then. Cancel-safe.
    pub async fn failed(&mut self) -> TransferError {
        if let Some(error) = &self.failure {
            return error.clone();
        }
        let error = match (&mut self.done).await {
            Ok(Err(error)) => error,
            // A handoff only succeeds by `commit`, which consumes it.
            Ok(Ok(_)) | Err(_) => TransferError::Cancelled,
        };
        self.failure.insert(error).clone()
    }

    /// Ends the handoff once everything has been pushed: `num_tokens` tokens of KV and the token sampled after them. Returns
    /// when the decode node has taken the sequence over, or why it has not; at the latest at the handoff's deadline.
    pub async fn commit(self, num_tokens: u32, first_tokens: Vec<u32>) -> Result<TransferStats, TransferError> {
        if let Some(error) = self.failure {
            return Err(error);
        }
        let item = Item::Commit {
            num_tokens,
            first_tokens,
            called: Clock.now(),
        };
        // A closed queue means that the handoff has failed: `done` says why.
        if self.handle.queue.send(item).await.is_err() {
            tracing::debug!("handoff ended before its commit");
        }
        self.done.await.unwrap_or(Err(TransferError::Cancelled))
    }
}
