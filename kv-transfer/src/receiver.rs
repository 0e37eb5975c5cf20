//! The decode node's side: accepts handoffs on the KV plane and writes what passes into reserved blocks.
//!
//! Life of a handoff here: `Open` -> fingerprint, ticket -> granted by the [`ReservationTable`] -> frames: header checked,
//! payload read, checked, written -> `Commit` -> all there and proven -> `committed`. For every granted handoff exactly one
//! of two things happens: `committed` returned `Ok`, or `aborted` was called.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use config::TransferConfig;
use protocol::codec::MAX_PAYLOAD_BYTES;
use protocol::ids::Ticket;
use protocol::kv::{Fingerprint, KvLayout};
use protocol::transfer::{FrameHeader, PushCommit, PushMessage, PushOpen, PushReply};
use runtime::framing::FramingError;
use runtime::quic::{Link, code, describe};
use tokio::sync::Semaphore;
use tokio::time::{timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::MAX_PARTS;
use crate::core::{CommitAction, Extent, HeaderAction, PayloadAction, ReceiveCounters, ReceiveLimits, ReceiveSession};
use crate::stats;
use crate::transport::{Incoming, Outgoing, quic};

/// Handoffs served at once; more wait in the connection, where flow control holds them.
const MAX_HANDOFFS: usize = 512;
/// Frames after which a receipt is sent even if more data is there.
const RECEIPT_EVERY: u32 = 8;
/// Longest wait for the sender to take an answer.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);

/// Where the bytes of a granted handoff go.
pub trait BlockSink: Send + Sync {
    /// What must arrive.
    fn extent(&self) -> Extent;

    /// Writes a frame that has passed all checks. `header.first_block` is a number as the extent's are
    /// ([`protocol::moved::Moved`]). An error ends the handoff; it is what a revoked reservation answers.
    fn write(&self, header: &FrameHeader, payload: &[u8]) -> Result<(), String>;
}

/// A granted handoff.
#[derive(Clone)]
pub struct Grant {
    /// Where the bytes go.
    pub sink: Arc<dyn BlockSink>,
    /// Cancelled by the node to take the grant back: the sender is told at once. Without meaning after `committed`.
    pub revoked: CancellationToken,
    /// By when the commit must have come.
    pub deadline: Instant,
}

/// The decode node's reservations.
pub trait ReservationTable: Send + Sync {
    /// Looks a ticket up. An error refuses the handoff; it goes to the sender and should name what does not fit.
    fn open(&self, open: &PushOpen) -> Result<Grant, String>;

    /// Everything has arrived: the sequence belongs to this node unless this returns an error.
    fn committed(&self, open: &PushOpen, commit: PushCommit) -> Result<(), String>;

    /// The handoff ended without a commit. Called once per grant, after the last write.
    fn aborted(&self, open: &PushOpen);
}

/// How a handoff ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The node owns the sequence.
    Committed,
    /// This side refused it: why.
    Refused(String),
    /// The sender cancelled or vanished: how.
    Cancelled(String),
    /// This node took the grant back.
    Revoked,
}

impl Outcome {
    /// The outcome's word in metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Committed => "committed",
            Self::Refused(_) => "refused",
            Self::Cancelled(_) => "cancelled",
            Self::Revoked => "revoked",
        }
    }
}

/// Receives handoffs. Clones share the state.
#[derive(Clone)]
pub struct Receiver {
    shared: Arc<Shared>,
}

struct Shared {
    table: Arc<dyn ReservationTable>,
    fingerprint: Fingerprint,
    layout: KvLayout,
    limits: ReceiveLimits,
    commit_timeout: Duration,
    slots: Semaphore,
    open: Mutex<HashSet<Ticket>>,
    /// Payload bytes of the handoffs that are over.
    received: AtomicU64,
}

impl Receiver {
    /// A receiver for nodes whose model and layout have `fingerprint`.
    pub fn new(
        table: Arc<dyn ReservationTable>,
        fingerprint: Fingerprint,
        layout: KvLayout,
        transfer: &TransferConfig,
    ) -> Self {
        let limits = ReceiveLimits {
            max_payload_bytes: MAX_PAYLOAD_BYTES as u32,
            max_resends: transfer.max_resends,
        };
        let commit_timeout = Duration::from_millis(transfer.commit_timeout_ms);
        stats::announce_receiving();
        let slots = Semaphore::new(MAX_HANDOFFS);
        let open = Mutex::default();
        Self {
            shared: Arc::new(Shared {
                table,
                fingerprint,
                layout,
                limits,
                commit_timeout,
                slots,
                open,
                received: AtomicU64::new(0),
            }),
        }
    }

    /// Serves a link of the KV plane until it ends; one task per handoff. Dropping the future stops taking new handoffs
    /// and leaves running ones to end by themselves.
    pub async fn serve(&self, link: Link) {
        let peer = &link.peer;
        loop {
            let stream = match link.connection.accept_bi().await {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::info!(%peer, reason = describe(&error), "KV link ended");
                    return;
                }
            };
            let (receiver, peer) = (self.clone(), peer.clone());
            tokio::spawn(async move {
                let (outgoing, incoming) = quic::halves(stream);
                let (outcome, counters) = receiver.handle(outgoing, incoming).await;
                tracing::debug!(%peer, ?outcome, ?counters, "handoff ended");
            });
        }
    }

    /// Payload bytes that were written into blocks by all handoffs that are over.
    pub fn received_bytes(&self) -> u64 {
        self.shared.received.load(Ordering::Relaxed)
    }

    /// Runs one handoff to its end, on any transport, and publishes what came.
    pub async fn handle<O, I>(&self, mut outgoing: O, mut incoming: I) -> (Outcome, ReceiveCounters)
    where
        O: Outgoing<PushReply>,
        I: Incoming<PushMessage>,
    {
        let (outcome, counters) = self.run(&mut outgoing, &mut incoming).await;
        match &outcome {
            Outcome::Committed => {}
            Outcome::Refused(reason) => {
                let reply = PushReply::Refused { reason: reason.clone() };
                // The sender may be gone: then there is nobody to tell.
                if let Ok(Ok(())) = timeout(REPLY_TIMEOUT, outgoing.send(reply, Bytes::new())).await {
                    finish(&mut outgoing);
                }
                incoming.stop(code::REFUSED);
            }
            Outcome::Cancelled(_) => outgoing.reset(code::CANCELLED),
            Outcome::Revoked => {
                outgoing.reset(code::REVOKED);
                incoming.stop(code::REVOKED);
            }
        }
        self.shared.received.fetch_add(counters.bytes, Ordering::Relaxed);
        stats::publish_handoff(&counters, &outcome);
        (outcome, counters)
    }

    /// Everything but the last word to the sender. When this returns, the table knows how it ended.
    async fn run<O, I>(&self, outgoing: &mut O, incoming: &mut I) -> (Outcome, ReceiveCounters)
    where
        O: Outgoing<PushReply>,
        I: Incoming<PushMessage>,
    {
        let nothing = ReceiveCounters::default();
        let shared = &*self.shared;
        let Ok(Ok(_slot)) = timeout(shared.commit_timeout, shared.slots.acquire()).await else {
            return (
                Outcome::Refused(format!("{MAX_HANDOFFS} handoffs are running: none ended in time")),
                nothing,
            );
        };
        let open = match timeout(shared.commit_timeout, incoming.next()).await {
            Ok(Ok(Some(PushMessage::Open(open)))) => open,
            Ok(Ok(Some(PushMessage::Frame(_) | PushMessage::Commit(_)))) => {
                return (Outcome::Refused("first message is not Open".to_owned()), nothing);
            }
            Ok(Ok(None)) => return (Outcome::Cancelled("stream ended before Open".to_owned()), nothing),
            Ok(Err(error)) => return (failed(&error), nothing),
            Err(_) => return (Outcome::Refused("Open did not come in time".to_owned()), nothing),
        };
        let granted = match Granted::new(shared, open) {
            Ok(granted) => granted,
            Err(reason) => return (Outcome::Refused(reason), nothing),
        };
        let extent = granted.grant.sink.extent();
        if extent.parts() > MAX_PARTS {
            let reason = format!("reservation of {extent} is larger than {MAX_PARTS} (layer, block) pairs");
            return (Outcome::Refused(reason), nothing);
        }
        let mut session = ReceiveSession::new(
            granted.open.ticket,
            granted.open.epoch,
            shared.layout,
            extent,
            shared.limits,
        );
        let outcome = self.receive(granted, &mut session, outgoing, incoming).await;
        (outcome, session.counters())
    }

    async fn receive<O, I>(
        &self,
        granted: Granted<'_>,
        session: &mut ReceiveSession,
        outgoing: &mut O,
        incoming: &mut I,
    ) -> Outcome
    where
        O: Outgoing<PushReply>,
        I: Incoming<PushMessage>,
    {
        let (deadline, revoked) = (granted.grant.deadline.into(), granted.grant.revoked.clone());
        let frames = self.frames(&*granted.grant.sink, session, outgoing, incoming);
        let ended = tokio::select! {
            biased;
            () = revoked.cancelled() => Err(Outcome::Revoked),
            ended = timeout_at(deadline, frames) => match ended {
                Ok(ended) => ended,
                Err(_) => Err(Outcome::Refused(session.on_deadline().to_string())),
            },
        };
        let commit = match ended {
            Ok(commit) => commit,
            Err(outcome) => {
                session.on_abort();
                return outcome;
            }
        };
        let request = granted.open.request;
        if let Err(reason) = granted.commit(commit) {
            return Outcome::Refused(reason);
        }
        // The sequence is ours whether or not the sender hears of it.
        match timeout(REPLY_TIMEOUT, outgoing.send(PushReply::Committed, Bytes::new())).await {
            Ok(Ok(())) => finish(outgoing),
            Ok(Err(error)) => tracing::warn!(%request, %error, "sender does not hear of its commit"),
            Err(_) => tracing::warn!(%request, "sender does not take the answer to its commit"),
        }
        Outcome::Committed
    }

    /// Takes frames until the commit is proven. Nothing is half done where this can be dropped: a write and its record are
    /// one step.
    async fn frames<O, I>(
        &self,
        sink: &dyn BlockSink,
        session: &mut ReceiveSession,
        outgoing: &mut O,
        incoming: &mut I,
    ) -> Result<PushCommit, Outcome>
    where
        O: Outgoing<PushReply>,
        I: Incoming<PushMessage>,
    {
        let mut payload = BytesMut::new();
        let mut told = 0;
        // The grant: from now on the sender may commit.
        reply(outgoing, PushReply::Received { below: 0 }).await?;
        loop {
            let Some(message) = self.next(session, incoming, &mut told, outgoing).await? else {
                return Err(Outcome::Cancelled("stream ended before the commit".to_owned()));
            };
            let action = match message {
                PushMessage::Open(_) => return Err(Outcome::Refused("Open came twice".to_owned())),
                PushMessage::Commit(commit) => session.on_commit(commit),
                PushMessage::Frame(header) => {
                    let skip = match session.on_header(&header) {
                        HeaderAction::Refuse(refusal) => return Err(Outcome::Refused(refusal.to_string())),
                        HeaderAction::Read => false,
                        HeaderAction::Skip => true,
                    };
                    let read = incoming.payload(header.payload_len as usize, &mut payload).await;
                    read.map_err(|error| failed(&error))?;
                    if skip {
                        CommitAction::Wait
                    } else {
                        take(sink, session, &header, &payload, outgoing).await?
                    }
                }
            };
            match action {
                CommitAction::Wait => {}
                CommitAction::Complete(commit) => return Ok(commit),
                CommitAction::Refuse(refusal) => return Err(Outcome::Refused(refusal.to_string())),
            }
        }
    }

    /// The next message; meanwhile tells the sender what it may forget, at the latest when nothing more is there.
    async fn next<O, I>(
        &self,
        session: &mut ReceiveSession,
        incoming: &mut I,
        told: &mut u32,
        outgoing: &mut O,
    ) -> Result<Option<PushMessage>, Outcome>
    where
        O: Outgoing<PushReply>,
        I: Incoming<PushMessage>,
    {
        let below = session.received_below();
        if below > *told {
            let ready = tokio::select! {
                biased;
                message = incoming.next(), if below - *told < RECEIPT_EVERY => Some(message),
                () = std::future::ready(()) => None,
            };
            if let Some(message) = ready {
                return message.map_err(|error| failed(&error));
            }
            reply(outgoing, PushReply::Received { below }).await?;
            *told = below;
        }
        if !session.is_commit_pending() {
            return incoming.next().await.map_err(|error| failed(&error));
        }
        match timeout(self.shared.commit_timeout, incoming.next()).await {
            Ok(message) => message.map_err(|error| failed(&error)),
            Err(_) => Err(Outcome::Refused(session.on_deadline().to_string())),
        }
    }
}

/// Checks a payload and writes it, or asks for it again.
async fn take<O: Outgoing<PushReply>>(
    sink: &dyn BlockSink,
    session: &mut ReceiveSession,
    header: &FrameHeader,
    payload: &[u8],
    outgoing: &mut O,
) -> Result<CommitAction, Outcome> {
    match session.on_payload(header, payload) {
        PayloadAction::Skip => Ok(CommitAction::Wait),
        PayloadAction::Refuse(refusal) => Ok(CommitAction::Refuse(refusal)),
        PayloadAction::Resend { number } => {
            tracing::warn!(number, ticket = %header.ticket, "damaged KV frame: asking for it again");
            reply(outgoing, PushReply::Resend { number }).await?;
            Ok(CommitAction::Wait)
        }
        PayloadAction::Write => Ok(match sink.write(header, payload) {
            Ok(()) => session.on_written(header),
            Err(reason) => CommitAction::Refuse(session.on_write_failed(header, reason)),
        }),
    }
}

async fn reply<O: Outgoing<PushReply>>(outgoing: &mut O, reply: PushReply) -> Result<(), Outcome> {
    outgoing.send(reply, Bytes::new()).await.map_err(|error| failed(&error))
}

fn finish<O: Outgoing<PushReply>>(outgoing: &mut O) {
    if let Err(error) = outgoing.finish() {
        tracing::debug!(%error, "reply stream had ended");
    }
}

/// A stream error on this side: broken messages are refused, everything else is the sender's going away.
fn failed(error: &FramingError) -> Outcome {
    match error {
        FramingError::Codec(_) | FramingError::Truncated { .. } => Outcome::Refused(error.to_string()),
        FramingError::Reset { .. } | FramingError::Connection { .. } | FramingError::Closed => {
            Outcome::Cancelled(error.to_string())
        }
    }
}

/// A grant in use. Dropped uncommitted, it tells the table.
struct Granted<'a> {
    shared: &'a Shared,
    open: PushOpen,
    grant: Grant,
    committed: bool,
}

impl<'a> Granted<'a> {
    fn new(shared: &'a Shared, open: PushOpen) -> Result<Self, String> {
        if open.fingerprint != shared.fingerprint {
            return Err(format!(
                "fingerprint: this node serves {}, the sender {}: model or KV layout differ",
                shared.fingerprint, open.fingerprint
            ));
        }
        if !shared.open_tickets().insert(open.ticket) {
            return Err(format!("ticket {} is being pushed by another stream", open.ticket));
        }
        match shared.table.open(&open) {
            Ok(grant) => Ok(Self {
                shared,
                open,
                grant,
                committed: false,
            }),
            Err(reason) => {
                shared.open_tickets().remove(&open.ticket);
                Err(reason)
            }
        }
    }

    fn commit(mut self, commit: PushCommit) -> Result<(), String> {
        self.shared.table.committed(&self.open, commit)?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for Granted<'_> {
    fn drop(&mut self) {
        if !self.committed {
            self.shared.table.aborted(&self.open);
        }
        self.shared.open_tickets().remove(&self.open.ticket);
    }
}

impl Shared {
    fn open_tickets(&self) -> std::sync::MutexGuard<'_, HashSet<Ticket>> {
        // A set of numbers stays consistent whoever panicked.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
