//! The task of one handoff: pieces in, frames out, replies heeded at any time.

use std::time::{Duration, Instant};

use bytes::Bytes;
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

/// Most replies collected while one message is being sent.
const MAX_COLLECTED: usize = 1_024;

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
        first_tokens: Vec<u32>,
        /// When the commit was asked for.
        called: Instant,
    },
}

/// A commit that the job asked for.
struct Wanted {
    num_tokens: u32,
    first_tokens: Vec<u32>,
    called: Instant,
    /// By when the receiver must have granted the handoff.
    grant_by: TokioInstant,
}

/// Runs a handoff to its end. `connect` gives a stream each time it is called. `stats` tells the cost, whatever the result.
///
/// A connection that dies before the receiver has granted anything may have been dead for long: the receiver was restarted.
/// Then nothing is lost, and the handoff begins again on a new one, once.
pub(super) async fn pump<C, F, O, I>(
    settings: &PushSettings,
    mut connect: C,
    handoff: Handoff,
    mut items: mpsc::Receiver<Item>,
    stats: &mut TransferStats,
) -> Result<(), TransferError>
where
    C: FnMut() -> F,
    F: Future<Output = Result<(O, I), TransferError>>,
    O: Outgoing<PushMessage>,
    I: Incoming<PushReply>,
{
    let Handoff { open, extent, deadline } = handoff;
    let mut session = SendSession::new(open.ticket, open.epoch, settings.layout, extent, settings.limits);
    let mut wanted = None;
    let mut may_redial = true;
    let run = async {
        loop {
            let mut granted = false;
            let result = match connect().await {
                Ok((outgoing, incoming)) => {
                    let (session, stats) = (&mut session, &mut *stats);
                    let mut pump = Pump {
                        outgoing,
                        incoming,
                        session,
                        stats,
                        granted,
                        committed: false,
                    };
                    let result = pump
                        .run(open.clone(), &mut items, &mut wanted, settings.commit_timeout)
                        .await;
                    granted = pump.granted;
                    result
                }
                Err(error) => Err(error),
            };
            match result {
                Err(TransferError::Lost { reason }) if may_redial && !granted => {
                    tracing::info!(request = %open.request, ticket = %open.ticket, reason, "connection was dead: dialling again");
                    may_redial = false;
                    session.rewind();
                }
                result => return result,
            }
        }
    };
    let result = timeout_at(deadline.into(), run).await;
    result.unwrap_or_else(|_| {
        Err(TransferError::Deadline {
            unconfirmed: session.unconfirmed(),
        })
    })
}

struct Pump<'a, O, I> {
    outgoing: O,
    incoming: I,
    session: &'a mut SendSession,
    stats: &'a mut TransferStats,
    /// The receiver has answered: it knows the ticket.
    granted: bool,
    /// The receiver has taken the sequence over.
    committed: bool,
}

impl<O: Outgoing<PushMessage>, I: Incoming<PushReply>> Pump<'_, O, I> {
    async fn run(
        &mut self,
        open: PushOpen,
        items: &mut mpsc::Receiver<Item>,
        wanted: &mut Option<Wanted>,
        commit_timeout: Duration,
    ) -> Result<(), TransferError> {
        // When the commit was asked for, and by when it must be answered.
        let mut committing: Option<(Instant, TokioInstant)> = None;
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
                return self.finish(committing.map(|(called, _)| called));
            }
            // Not before the grant: until then the handoff can begin again.
            if self.granted
                && let Some(Wanted {
                    num_tokens,
                    first_tokens,
                    called,
                    ..
                }) = wanted.take()
            {
                let commit = self.session.commit(num_tokens, first_tokens)?;
                self.send(PushMessage::Commit(commit), Bytes::new()).await?;
                committing = Some((called, TokioInstant::from(Clock.now()) + commit_timeout));
                continue;
            }
            let grant_by = wanted.as_ref().map(|wanted| wanted.grant_by);
            let answer_by = committing.map(|(_, answer_by)| answer_by).or(grant_by);
            tokio::select! {
                reply = self.incoming.next() => self.heed(reply)?,
                item = items.recv(), if committing.is_none() && wanted.is_none() => match item {
                    Some(Item::Piece { part, payload }) => self.session.push(part, &payload)?,
                    Some(Item::Commit { num_tokens, first_tokens, called }) => {
                        let grant_by = TokioInstant::from(Clock.now()) + commit_timeout;
                        *wanted = Some(Wanted { num_tokens, first_tokens, called, grant_by });
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

    /// The receiver has taken over. It needs nothing more from this stream, and may have stopped it.
    fn finish(&mut self, called: Option<Instant>) -> Result<(), TransferError> {
        let Some(called) = called else {
            return Err(TransferError::Protocol {
                reason: "Committed came before Commit".to_owned(),
            });
        };
        self.stats.exposed = Clock.now().saturating_duration_since(called);
        if let Err(error) = self.outgoing.finish() {
            tracing::trace!(%error, "stream had ended before it was finished");
        }
        Ok(())
    }

    /// Sends a message and heeds replies meanwhile, so that a slow receiver can still refuse or ask.
    async fn send(&mut self, message: PushMessage, payload: Bytes) -> Result<(), TransferError> {
        // While the message is on its way, replies are only collected: few come in so short a time.
        let mut replies = Vec::new();
        let sent = {
            let Self { outgoing, incoming, .. } = self;
            let sending = outgoing.send(message, payload);
            tokio::pin!(sending);
            loop {
                tokio::select! {
                    biased;
                    sent = &mut sending => break sent,
                    reply = incoming.next(), if replies.len() < MAX_COLLECTED => {
                        let last = !matches!(reply, Ok(Some(PushReply::Received { .. } | PushReply::Resend { .. })));
                        replies.push(reply);
                        if last {
                            break Ok(());
                        }
                    }
                }
            }
        };
        for reply in replies {
            self.heed(reply)?;
        }
        match sent {
            Ok(()) => Ok(()),
            Err(error @ FramingError::Reset { .. }) => self.reason(error).await,
            Err(error) => Err(error.into()),
        }
    }

    fn heed(&mut self, reply: Result<Option<PushReply>, FramingError>) -> Result<(), TransferError> {
        let reply = reply?;
        self.granted = true;
        match reply {
            Some(PushReply::Resend { number }) => {
                self.session.on_resend(number)?;
                self.stats.resent += 1;
            }
            Some(PushReply::Received { below }) => self.session.on_received(below)?,
            Some(PushReply::Committed) => self.committed = true,
            Some(PushReply::Refused { reason }) => return Err(TransferError::Refused { reason }),
            None => {
                return Err(TransferError::Protocol {
                    reason: "replies ended without an answer".to_owned(),
                });
            }
        }
        Ok(())
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

async fn until(deadline: Option<TokioInstant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
