//! The task of one handoff: pieces in, frames out, replies heeded at any time.

use std::time::{Duration, Instant};

use bytes::Bytes;
use protocol::sampling::SampledToken;
use protocol::transfer::{PushMessage, PushOpen, PushReply};
use runtime::clock::Clock;
use runtime::framing::FramingError;
use tokio::sync::mpsc;
use tokio::time::{Instant as TokioInstant, sleep_until, timeout, timeout_at};

use super::PushSettings;
use crate::core::{Extent, Part, SendSession};
use crate::error::TransferError;
use crate::stats::TransferStats;
use crate::transport::{Incoming, Outgoing};

/// After the stream was stopped, longest wait for the reply that says why.
const REASON_TIMEOUT: Duration = Duration::from_secs(1);

/// What a push is about.
pub(super) struct Handoff {
    pub(super) open: PushOpen,
    pub(super) extent: Extent,
    /// By when everything must be over.
    pub(super) deadline: Instant,
}

/// What a push is fed with.
pub(super) enum Item {
    /// Computed KV, in staged memory.
    Piece {
        /// What it is.
        part: Part,
        /// Its bytes.
        payload: Bytes,
    },
    /// The end.
    Commit {
        /// Tokens whose KV was pushed.
        num_tokens: u32,
        /// The token sampled after them.
        first_token: SampledToken,
        /// When the commit was asked for.
        called: Instant,
    },
}

/// A commit that waits for its answer.
struct Committing {
    called: Instant,
    answer_by: TokioInstant,
}

/// Runs a handoff to its end. `stats` tells the cost, whatever the result.
pub(super) async fn pump<F, O, I>(
    settings: &PushSettings,
    connect: F,
    handoff: Handoff,
    mut items: mpsc::Receiver<Item>,
    stats: &mut TransferStats,
) -> Result<(), TransferError>
where
    F: Future<Output = Result<(O, I), TransferError>>,
    O: Outgoing<PushMessage>,
    I: Incoming<PushReply>,
{
    let Handoff { open, extent, deadline } = handoff;
    let deadline = deadline.into();
    let late = |unconfirmed| TransferError::Deadline { unconfirmed };
    let (outgoing, incoming) = timeout_at(deadline, connect).await.map_err(|_| late(0))??;
    let session = SendSession::new(open.ticket, open.epoch, settings.layout, extent, settings.limits);
    let mut pump = Pump {
        outgoing,
        incoming,
        session,
        stats,
        committed: false,
    };
    let run = pump.run(open, &mut items, settings.commit_timeout);
    let result = timeout_at(deadline, run).await;
    result.unwrap_or_else(|_| Err(late(pump.session.unconfirmed())))
}

struct Pump<'a, O, I> {
    outgoing: O,
    incoming: I,
    session: SendSession,
    stats: &'a mut TransferStats,
    /// The receiver has taken the sequence over.
    committed: bool,
}

impl<O: Outgoing<PushMessage>, I: Incoming<PushReply>> Pump<'_, O, I> {
    async fn run(
        &mut self,
        open: PushOpen,
        items: &mut mpsc::Receiver<Item>,
        commit_timeout: Duration,
    ) -> Result<(), TransferError> {
        let mut committing: Option<Committing> = None;
        self.send(PushMessage::Open(open), Bytes::new()).await?;
        loop {
            while !self.committed
                && let Some(frame) = self.session.next_frame()
            {
                self.stats.frames += 1;
                self.stats.bytes += frame.payload.len() as u64;
                self.send(PushMessage::Frame(frame.header), frame.payload).await?;
            }
            if self.committed {
                let Some(Committing { called, .. }) = committing else {
                    return Err(TransferError::Protocol {
                        reason: "Committed came before Commit".to_owned(),
                    });
                };
                self.stats.exposed = Clock.now().saturating_duration_since(called);
                // The receiver needs nothing more from this stream, and may have stopped it.
                if let Err(error) = self.outgoing.finish() {
                    tracing::trace!(%error, "stream had ended before it was finished");
                }
                return Ok(());
            }
            let answer_by = committing.as_ref().map(|committing| committing.answer_by);
            tokio::select! {
                reply = self.incoming.next() => self.heed(reply)?,
                item = items.recv(), if committing.is_none() => match item {
                    Some(Item::Piece { part, payload }) => self.session.push(part, &payload)?,
                    Some(Item::Commit { num_tokens, first_token, called }) => {
                        let commit = self.session.commit(num_tokens, first_token)?;
                        self.send(PushMessage::Commit(commit), Bytes::new()).await?;
                        let answer_by = TokioInstant::from(Clock.now()) + commit_timeout;
                        committing = Some(Committing { called, answer_by });
                    }
                    None => return Err(TransferError::Cancelled),
                },
                () = until(answer_by) => {
                    let after_ms = u64::try_from(commit_timeout.as_millis()).unwrap_or(u64::MAX);
                    return Err(TransferError::NoAnswer { after_ms });
                }
            }
        }
    }

    /// Sends a message and heeds replies meanwhile, so that a slow receiver can still refuse or ask.
    async fn send(&mut self, message: PushMessage, payload: Bytes) -> Result<(), TransferError> {
        let Self {
            outgoing,
            incoming,
            session,
            stats,
            committed,
        } = self;
        let sent = {
            let sending = outgoing.send(message, payload);
            tokio::pin!(sending);
            loop {
                tokio::select! {
                    biased;
                    sent = &mut sending => break sent,
                    reply = incoming.next(), if !*committed => heed(session, stats, committed, reply)?,
                }
            }
        };
        match sent {
            Ok(()) => Ok(()),
            Err(error @ FramingError::Reset { .. }) => self.reason(error).await,
            Err(error) => Err(error.into()),
        }
    }

    fn heed(&mut self, reply: Result<Option<PushReply>, FramingError>) -> Result<(), TransferError> {
        heed(&mut self.session, self.stats, &mut self.committed, reply)
    }

    /// The receiver stopped the stream: the reason may still be on its way. It may be that it has all it needs.
    async fn reason(&mut self, stopped: FramingError) -> Result<(), TransferError> {
        let reason = timeout(REASON_TIMEOUT, async {
            while !self.committed {
                let reply = self.incoming.next().await;
                self.heed(reply)?;
            }
            Ok(())
        });
        reason.await.unwrap_or_else(|_| Err(stopped.into()))
    }
}

fn heed(
    session: &mut SendSession,
    stats: &mut TransferStats,
    committed: &mut bool,
    reply: Result<Option<PushReply>, FramingError>,
) -> Result<(), TransferError> {
    match reply? {
        Some(PushReply::Resend { number }) => {
            session.on_resend(number)?;
            stats.resent += 1;
        }
        Some(PushReply::Received { below }) => session.on_received(below)?,
        Some(PushReply::Committed) => *committed = true,
        Some(PushReply::Refused { reason }) => return Err(TransferError::Refused { reason }),
        None => {
            return Err(TransferError::Protocol {
                reason: "replies ended without an answer".to_owned(),
            });
        }
    }
    Ok(())
}

async fn until(deadline: Option<TokioInstant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
