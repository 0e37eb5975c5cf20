//! The life of one request.
//!
//! ```text
//! Queued -> Reserving -> Prefilling -> Transferring -> Decoding -> Finished
//!              |             |              |             |
//!   (busy, lost, failed:     |      (lost, failed, late: Stranded -> Resuming -> Decoding,
//!    Queued again) <---------'       at most `max_migrations` times)
//! ```
//!
//! A decode node may compute the prompt itself: `Queued -> Local -> Decoding`; as long as it has no first token, what is lost
//! starts again.
//!
//! A request without need of a decode node (no choice may have more than one token) goes from `Queued` to `Prefilling` and
//! from there to `Finished`. The choices of a request share its state and its legs; each has a ledger of its own, and the
//! request ends when the last of them has ended. Before the
//! first token a lost or failed attempt starts again (at most `max_restarts` times); after it the request is moved: a
//! decode node computes prompt and accepted tokens of the choices that are open, and goes on. A beam search has no accepted
//! tokens before its end: it is done again. Every state but `Finished` has a deadline, and the
//! request ends with exactly one `Done` or `Failed`.
//!
//! The machine knows its legs by name only; which node a leg is on is its owner's business (`cluster`).

mod beams;
mod cause;
mod facts;
mod jobs;
mod journey;
mod local;

pub use self::cause::Cause;
pub use self::facts::Missing;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use protocol::control::{Beam, HandoffStats, Hello, JobError, PrefillJob, StepTiming};
use protocol::ids::{Epoch, NodeId};
use protocol::sampling::SampledToken;

use super::journey::Served;
use super::ledger::{Ledger, Verdict};
use super::nodes::{Held, LegId};
use super::phases::{PhaseTimes, PhaseTracker};
use super::types::{ClientEvent, ServeError, ServeErrorKind, ServeRequest};
use super::words;

/// Deadlines and bounds of every request.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    /// Longest wait in the queue.
    pub queue_timeout: Duration,
    /// Longest wait for a decode node's answer to a reservation.
    pub reserve_timeout: Duration,
    /// Longest wait for the first token of a prefill job, and of a decode job that computes its KV.
    pub prefill_timeout: Duration,
    /// Longest wait from the first token to the commit.
    pub handoff_timeout: Duration,
    /// Longest wait for the next token, and for a node on which to go on.
    pub inter_token_timeout: Duration,
    /// New attempts after failed ones, before the first token.
    pub max_restarts: u32,
    /// Moves to another decode node, after the first token.
    pub max_migrations: u32,
}

/// Where a request is.
#[derive(Debug, PartialEq)]
pub enum State {
    /// It waits for a prefill node with credit and a decode node with blocks.
    Queued,
    /// A decode node has been asked for blocks; a prefill job is booked and not sent.
    Reserving {
        /// The reservation.
        decode: LegId,
        /// The booking.
        prefill: LegId,
    },
    /// A prefill node computes the prompt.
    Prefilling {
        /// The prefill job.
        prefill: LegId,
        /// The reservation; `None` if one token is all that is wanted.
        decode: Option<LegId>,
        /// What the decode node said before the first token arrived here.
        early: Early,
    },
    /// The first tokens are out, the KV is under way.
    Transferring {
        /// The prefill job; `None` once it is over.
        prefill: Option<LegId>,
        /// The reservation.
        decode: LegId,
    },
    /// The decode leg was lost: the request waits for another one.
    Stranded,
    /// A decode node computes prompt and accepted tokens.
    Resuming {
        /// The decode job.
        decode: LegId,
    },
    /// A decode node computes the prompt itself, and will go on from there.
    Local {
        /// The decode job.
        decode: LegId,
    },
    /// A decode node runs the generation loop.
    Decoding {
        /// The prefill job, if its end has not been reported yet.
        prefill: Option<LegId>,
        /// The decode job.
        decode: LegId,
    },
    /// It is over.
    Finished,
}

impl State {
    words! {
        Queued => "queued",
        Reserving => "reserving",
        Prefilling => "prefilling",
        Transferring => "transferring",
        Stranded => "stranded",
        Resuming => "resuming",
        Local => "local",
        Decoding => "decoding",
        Finished => "finished",
    }

    /// The legs the request holds.
    fn legs(&self) -> [Option<LegId>; 2] {
        match self {
            Self::Queued | Self::Stranded | Self::Finished => [None, None],
            Self::Reserving { decode, prefill } => [Some(*prefill), Some(*decode)],
            Self::Prefilling { prefill, decode, .. } => [Some(*prefill), *decode],
            Self::Transferring { prefill, decode } | Self::Decoding { prefill, decode } => [*prefill, Some(*decode)],
            Self::Resuming { decode } | Self::Local { decode } => [None, Some(*decode)],
        }
    }

    /// The legs the request holds, by name.
    pub fn held_legs(&self) -> impl Iterator<Item = LegId> + use<> {
        self.legs().into_iter().flatten()
    }

    /// The decode leg the request holds.
    pub fn decode_leg(&self) -> Option<LegId> {
        let [_, decode] = self.legs();
        decode
    }
}

/// What a decode node said before the first token arrived: its link may be faster than the prefill node's.
#[derive(Debug, Default, PartialEq)]
pub struct Early {
    committed: bool,
    finished: bool,
    /// By choice.
    tokens: VecDeque<(u32, SampledToken, StepTiming)>,
    beams: Option<Vec<Beam>>,
}

/// What the machine wants done, in order.
#[derive(Debug, PartialEq)]
pub enum Effect {
    /// Tell the client.
    Emit(ClientEvent),
    /// Send the booked prefill job.
    SendPrefill(LegId, Box<PrefillJob>),
    /// Give the leg up: reset its stream, give back what is booked.
    Release(LegId),
    /// The prompt of the leg has been computed.
    Computed(LegId),
    /// The job of the leg has failed, and its node is to blame.
    Blame(LegId),
    /// The leg's node took the job.
    Taken(LegId),
    /// A choice on the decode leg holds one token more than before: so many, prompt included.
    Grow(LegId, usize),
    /// A choice on the decode leg, which held so many tokens behind a prompt of so many, has ended; others go on.
    Shrink {
        /// The decode leg.
        leg: LegId,
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the choice, prompt included.
        tokens: usize,
    },
    /// Tell the decode node that a choice has ended for a reason that it cannot know.
    EndChoice(LegId, u32),
    /// Put the request at the head of the queue.
    Requeue,
    /// Put the request among those that wait for another decode node.
    AwaitDecode,
    /// For logs and metrics.
    Note(Note),
}

/// Something that happened to a request, for logs and metrics.
#[derive(Clone, Debug, PartialEq)]
pub enum Note {
    /// An attempt failed before the first token; the request starts again.
    Restarted(Cause),
    /// The request lost its decode leg and waits for another one.
    Stranded(Cause),
    /// The last attempt failed; the request ends.
    GivenUp(Cause),
    /// The first token of a moved request came this long after the leg was lost.
    Migrated(Duration),
    /// The KV has been handed over.
    HandedOff(HandoffStats),
    /// A token that was known, or came behind the end.
    Wasted,
    /// Two nodes sampled different tokens for one position.
    Disagreement {
        /// The position.
        position: u32,
    },
    /// A node says that the job will fail everywhere.
    Rejected(JobError),
    /// Something came that makes no difference.
    Ignored(&'static str),
}

/// See the head of the file.
pub struct Request {
    /// What the client wants.
    pub request: ServeRequest,
    state: State,
    /// One for each choice, by its number.
    ledgers: Vec<Ledger>,
    /// Choices that have not ended.
    open: usize,
    epoch: Epoch,
    submitted: Instant,
    /// When the time of the whole request is over.
    expires: Instant,
    /// When the state's time is over.
    deadline: Instant,
    /// When the wait for a node is over, also if the request is sent back to it.
    wait_until: Instant,
    /// The first prefill job was sent then.
    prefill_sent: Option<Instant>,
    /// When the leg was lost whose place has not been taken yet.
    stranded_at: Option<Instant>,
    restarts: u32,
    migrations: u32,
    /// Node of the last failed attempt.
    avoid: Option<NodeId>,
    phases: PhaseTracker,
    served: Served,
}

impl Request {
    /// A request that has just been admitted.
    pub fn new(now: Instant, request: ServeRequest, ledgers: Vec<Ledger>, limits: &RequestLimits) -> Self {
        let mut phases = PhaseTracker::new(now);
        if request.about.context.trace.is_some() {
            phases.write_down(request.about.arrived.unwrap_or(now));
        }
        Self {
            state: State::Queued,
            open: ledgers.len(),
            ledgers,
            epoch: Epoch(0),
            submitted: now,
            expires: now + request.timeout,
            request,
            deadline: now + limits.queue_timeout,
            wait_until: now + limits.queue_timeout,
            prefill_sent: None,
            stranded_at: None,
            restarts: 0,
            migrations: 0,
            avoid: None,
            phases,
            served: Served::default(),
        }
    }

    /// Where its time went up to now.
    pub fn phases(&self, now: Instant) -> PhaseTimes {
        self.phases.times(now)
    }

    /// A transition is over: time from here on belongs to the new state.
    pub fn settle(&mut self, now: Instant) {
        self.phases.follow(now, &self.state);
    }

    /// Tokens of the answer so far, all choices together.
    pub fn generated_tokens(&self) -> usize {
        self.ledgers.iter().map(|ledger| ledger.tokens().len()).sum()
    }

    /// Where it is.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// When the state's time is over, or that of the whole request.
    pub fn deadline(&self) -> Instant {
        self.deadline.min(self.expires)
    }

    /// When the time of the whole request is over.
    pub fn expires(&self) -> Instant {
        self.expires
    }

    /// How much of `wanted` is left of the request's time, in whole milliseconds, at least one.
    fn within(&self, now: Instant, wanted: Duration) -> u64 {
        let left = self.expires.saturating_duration_since(now);
        (wanted.min(left).as_millis() as u64).max(1)
    }

    /// Number of its current attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.epoch.0
    }

    /// Node of the last failed attempt.
    pub fn avoid(&self) -> Option<&NodeId> {
        self.avoid.as_ref()
    }

    /// If the request waits to be placed: elsewhere than on `node`, as long as there is another one.
    pub fn shun(&mut self, node: Option<&NodeId>) {
        if matches!(self.state, State::Queued | State::Stranded) {
            self.avoid = node.cloned();
        }
    }

    /// What a decode node has to hold of each open choice, beside the prompt: its accepted tokens, and the next.
    pub fn held(&self) -> Held {
        if self.request.beam_width.is_some() {
            return Held::alike(self.ledgers.len(), 1);
        }
        let open = self.ledgers.iter().filter(|ledger| !ledger.is_closed());
        Held::Each(open.map(|ledger| ledger.tokens().len() + 1).collect())
    }

    /// Steps that it can take at most on a decode node.
    pub fn steps_left(&self) -> usize {
        let open = self.ledgers.iter().filter(|ledger| !ledger.is_closed());
        let known = open.map(|ledger| ledger.tokens().len()).min().unwrap_or(0);
        (self.request.stop.max_tokens as usize).saturating_sub(known)
    }

    /// True if a decode node is needed.
    pub fn needs_decode(&self) -> bool {
        self.request.needs_decode()
    }

    /// Longest wait for the next word of a decode node that generates. A beam search is silent to its end.
    fn patience(&self, limits: &RequestLimits) -> Duration {
        match self.request.beam_width {
            None => limits.inter_token_timeout,
            Some(_) => limits.inter_token_timeout.saturating_mul(self.request.stop.max_tokens),
        }
    }

    fn release_all(&self, out: &mut Vec<Effect>) {
        out.extend(self.state.held_legs().map(Effect::Release));
    }

    fn done(&mut self, now: Instant, out: &mut Vec<Effect>) {
        // The nodes first: in the same tick in which the client learns of the end they do, too.
        self.release_all(out);
        self.state = State::Finished;
        let (submitted, phases) = (self.submitted, self.phases.times(now));
        self.tell_served(out);
        out.push(Effect::Emit(ClientEvent::Done { submitted, phases }));
    }

    /// Ends the request without an answer.
    pub fn fail(&mut self, kind: ServeErrorKind, message: impl Into<String>, out: &mut Vec<Effect>) {
        if self.state != State::Finished {
            self.release_all(out);
            self.state = State::Finished;
            self.tell_served(out);
            out.push(Effect::Emit(ClientEvent::Failed(ServeError::new(kind, message))));
        }
    }

    /// Offers a token of `choice` to its ledger. `leg` is where it came from.
    #[allow(
        clippy::too_many_arguments,
        reason = "what an event says, and what every transition needs"
    )]
    fn token(
        &mut self,
        now: Instant,
        leg: LegId,
        choice: u32,
        token: SampledToken,
        step: StepTiming,
        ctx: &mut Context<'_>,
    ) {
        let (position, id) = (token.position, token.token);
        let Some(ledger) = self.ledgers.get_mut(choice as usize) else {
            return self.nonsense(now, leg, &format!("token of choice {choice}"), ctx);
        };
        match ledger.accept(token, step) {
            Verdict::Accepted { token, completion } => {
                ctx.out.push(Effect::Emit(ClientEvent::Token { choice, token }));
                match completion {
                    Some(completion) => {
                        ctx.out.push(Effect::Emit(ClientEvent::Ended { choice, completion }));
                        self.choice_ended(now, choice, id, ctx);
                    }
                    None => self.choice_goes_on(choice, ctx),
                }
                self.deadline = now + self.patience(ctx.limits);
            }
            Verdict::Known { same: true } => ctx.out.push(Effect::Note(Note::Wasted)),
            Verdict::Known { same: false } => ctx.out.push(Effect::Note(Note::Disagreement { position })),
            Verdict::Gap { expected } => {
                let what = format!("token {position} where token {expected} is due");
                self.attempt_failed(now, leg, Cause::Nonsense(what), ctx);
            }
        }
    }

    /// The step that draws the next token needs a place for the last one.
    fn choice_goes_on(&self, choice: u32, ctx: &mut Context<'_>) {
        if let Some(decode) = self.state.decode_leg() {
            let tokens = self.request.token_ids.len() + self.ledgers[choice as usize].tokens().len();
            ctx.out.push(Effect::Grow(decode, tokens + 1));
        }
    }

    /// A choice has ended with the token `last`. Stop strings are known here only: the node has to be told of them.
    fn choice_ended(&mut self, now: Instant, choice: u32, last: u32, ctx: &mut Context<'_>) {
        self.open -= 1;
        if self.open == 0 {
            return self.done(now, ctx.out);
        }
        let Some(decode) = self.state.decode_leg() else { return };
        let generated = self.ledgers[choice as usize].tokens().len();
        let prompt = self.request.token_ids.len();
        ctx.out.push(Effect::Shrink {
            leg: decode,
            prompt,
            tokens: prompt + generated,
        });
        if self.request.stop.finish(last, generated as u32).is_none() {
            ctx.out.push(Effect::EndChoice(decode, choice));
        }
    }
}

/// What a transition needs beside the request itself.
pub struct Context<'a> {
    /// Deadlines and bounds.
    pub limits: &'a RequestLimits,
    /// What is to be done.
    pub out: &'a mut Vec<Effect>,
    /// The node the fact comes from or is about, if it is (still) connected.
    pub node: Option<&'a Hello>,
}
