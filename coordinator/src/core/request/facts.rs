//! What a request makes of what happens to it. Every method answers every state.

use std::time::{Duration, Instant};

use protocol::control::{HandoffStats, HandoffTarget, JobError, JobErrorKind, JobEvent, PromptComputed, StepTiming};
use protocol::ids::Ticket;
use protocol::moved::HaveBlocks;
use protocol::sampling::SampledToken;

use super::{Cause, Context, Early, Effect, Note, Request, State};
use crate::core::nodes::LegId;
use crate::core::types::ServeErrorKind;

/// What is missing where a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// No node of a role it needs.
    Node,
    /// Nodes are there and full.
    Room {
        /// Seconds after which the client may try again.
        retry_after_s: u32,
    },
}

impl Request {
    /// A node said something about one of the request's legs.
    pub fn on_event(&mut self, now: Instant, leg: LegId, event: JobEvent, ctx: &mut Context<'_>) {
        match event {
            JobEvent::Granted { ticket, have_blocks } => self.on_granted(now, leg, ticket, have_blocks, ctx),
            JobEvent::Busy { .. } => self.on_no_room(now, leg, "busy", ctx),
            JobEvent::Computed(computed) => self.on_computed(now, leg, computed, ctx),
            JobEvent::HandedOff(stats) => self.on_handed_off(now, leg, stats, ctx),
            JobEvent::Committed => self.on_committed(now, leg, ctx),
            JobEvent::Token { choice, token, step } => self.on_token(now, leg, choice, token, step, ctx),
            JobEvent::Beams(beams) => self.on_beams(now, leg, beams, ctx),
            JobEvent::Finished => self.on_node_finished(now, leg, ctx),
            JobEvent::Failed(error) => self.on_failed(now, leg, error, ctx),
        }
    }

    fn on_granted(&mut self, now: Instant, leg: LegId, ticket: Ticket, have_blocks: HaveBlocks, ctx: &mut Context<'_>) {
        match self.state {
            State::Reserving { decode, prefill } if decode == leg => {
                let Some(node) = ctx.node else {
                    return self.nonsense(now, leg, "grant of an unknown node", ctx);
                };
                let (node, address) = (node.node.clone(), node.address.clone());
                let target = HandoffTarget {
                    node,
                    address,
                    ticket,
                    have_blocks,
                };
                let job = self.prefill_job(now, Some(target), ctx.limits);
                self.state = State::Prefilling {
                    prefill,
                    decode: Some(decode),
                    early: Early::default(),
                };
                self.deadline = now + ctx.limits.prefill_timeout;
                ctx.out.push(Effect::Taken(leg));
                ctx.out.push(Effect::SendPrefill(prefill, Box::new(job)));
            }
            State::Prefilling { decode, .. } if decode == Some(leg) => ctx.ignore("granted again"),
            State::Transferring { decode, .. } | State::Decoding { decode, .. } if decode == leg => {
                ctx.ignore("granted again");
            }
            State::Resuming { decode } | State::Local { decode } if decode == leg => ctx.out.push(Effect::Taken(leg)),
            State::Queued
            | State::Reserving { .. }
            | State::Prefilling { .. }
            | State::Transferring { .. }
            | State::Stranded
            | State::Resuming { .. }
            | State::Local { .. }
            | State::Decoding { .. }
            | State::Finished => self.nonsense(now, leg, "grant", ctx),
        }
    }

    /// The node has no room or takes no jobs: that is no failure of the request, it waits for room again.
    fn on_no_room(&mut self, now: Instant, leg: LegId, why: &'static str, ctx: &mut Context<'_>) {
        match self.state {
            State::Reserving { .. } | State::Prefilling { .. } | State::Local { .. } => {
                self.release_all(ctx.out);
                self.avoid = ctx.node.map(|node| node.node.clone());
                self.state = State::Queued;
                self.deadline = self.wait_until;
                ctx.out.push(Effect::Requeue);
            }
            State::Resuming { .. } => {
                self.release_all(ctx.out);
                self.avoid = ctx.node.map(|node| node.node.clone());
                self.state = State::Stranded;
                self.deadline = self.wait_until;
                ctx.out.push(Effect::AwaitDecode);
            }
            State::Queued | State::Transferring { .. } | State::Stranded | State::Decoding { .. } | State::Finished => {
                self.nonsense(now, leg, why, ctx);
            }
        }
    }

    fn on_computed(&mut self, now: Instant, leg: LegId, computed: PromptComputed, ctx: &mut Context<'_>) {
        let step = computed.step;
        let expected = match self.request.beam_width {
            None => self.request.choices as usize,
            Some(_) => 0,
        };
        if computed.tokens.len() != expected || computed.tokens.iter().any(|token| token.position != 0) {
            return self.nonsense(now, leg, "prompt without one first token for each choice", ctx);
        }
        self.phases.waited(now, Duration::from_micros(step.queue_us));
        let told = self.tells_enough(&computed);
        match &mut self.state {
            State::Prefilling { prefill, decode, early } if *prefill == leg && told => {
                let (decode, early) = (*decode, std::mem::take(early));
                self.prompt_is_computed(now, leg, computed.cached_tokens, computed.prompt_logprobs, ctx);
                if let Some(decode) = decode {
                    self.state = State::Transferring {
                        prefill: Some(leg),
                        decode,
                    };
                }
                self.first_tokens(now, leg, computed.tokens, step, ctx);
                self.after_first_tokens(now, leg, early, ctx);
            }
            State::Transferring { prefill, .. } | State::Decoding { prefill, .. } if *prefill == Some(leg) => {
                self.first_tokens(now, leg, computed.tokens, step, ctx);
            }
            State::Local { decode } if *decode == leg && told => self.on_computed_locally(now, leg, computed, ctx),
            // A beam search that is done again has nothing new to tell of its prompt.
            State::Resuming { decode } if *decode == leg && self.request.beam_width.is_some() => {
                ctx.ignore("prompt computed again");
            }
            State::Queued
            | State::Reserving { .. }
            | State::Prefilling { .. }
            | State::Transferring { .. }
            | State::Stranded
            | State::Resuming { .. }
            | State::Local { .. }
            | State::Decoding { .. }
            | State::Finished => self.nonsense(now, leg, "first token", ctx),
        }
    }

    fn first_tokens(
        &mut self,
        now: Instant,
        leg: LegId,
        tokens: Vec<SampledToken>,
        step: StepTiming,
        ctx: &mut Context<'_>,
    ) {
        for (choice, token) in (0..).zip(tokens) {
            self.token(now, leg, choice, token, step, ctx);
        }
    }

    /// Goes on with what the decode node had said before the first tokens arrived.
    fn after_first_tokens(&mut self, now: Instant, leg: LegId, early: Early, ctx: &mut Context<'_>) {
        match self.state {
            State::Transferring { decode, .. } => {
                self.deadline = now + ctx.limits.handoff_timeout;
                if early.committed {
                    self.on_committed(now, decode, ctx);
                }
                let goes_on = |state: &State| !matches!(state, State::Finished | State::Stranded);
                for (choice, token, step) in early.tokens {
                    if !goes_on(&self.state) {
                        return;
                    }
                    self.on_token(now, decode, choice, token, step, ctx);
                }
                if let Some(beams) = early.beams {
                    return self.on_beams(now, decode, beams, ctx);
                }
                if early.finished && goes_on(&self.state) {
                    self.on_node_finished(now, decode, ctx);
                }
            }
            // The prompt was all that was asked for.
            State::Prefilling { .. } if self.request.choices == 0 => self.done(now, ctx.out),
            State::Prefilling { .. } => {
                self.nonsense(now, leg, "first token that does not end a one-token request", ctx)
            }
            State::Finished => {}
            // Tokens lead nowhere else from `Transferring` and `Prefilling`.
            State::Queued
            | State::Reserving { .. }
            | State::Stranded
            | State::Resuming { .. }
            | State::Local { .. }
            | State::Decoding { .. } => {}
        }
    }

    fn on_handed_off(&mut self, now: Instant, leg: LegId, stats: HandoffStats, ctx: &mut Context<'_>) {
        match &mut self.state {
            State::Transferring { prefill, .. } | State::Decoding { prefill, .. } if *prefill == Some(leg) => {
                *prefill = None;
                ctx.out.push(Effect::Note(Note::HandedOff(stats)));
            }
            State::Queued
            | State::Reserving { .. }
            | State::Prefilling { .. }
            | State::Transferring { .. }
            | State::Stranded
            | State::Resuming { .. }
            | State::Local { .. }
            | State::Decoding { .. }
            | State::Finished => self.nonsense(now, leg, "hand-off without a first token", ctx),
        }
    }

    fn on_committed(&mut self, now: Instant, leg: LegId, ctx: &mut Context<'_>) {
        match &mut self.state {
            State::Prefilling { decode, early, .. } if *decode == Some(leg) => early.committed = true,
            State::Transferring { prefill, decode } if *decode == leg => {
                self.state = State::Decoding {
                    prefill: *prefill,
                    decode: leg,
                };
                self.deadline = now + self.patience(ctx.limits);
            }
            State::Resuming { decode } | State::Local { decode } if *decode == leg => ctx.out.push(Effect::Taken(leg)),
            State::Decoding { decode, .. } if *decode == leg => ctx.ignore("committed again"),
            State::Queued
            | State::Reserving { .. }
            | State::Prefilling { .. }
            | State::Transferring { .. }
            | State::Stranded
            | State::Resuming { .. }
            | State::Local { .. }
            | State::Decoding { .. }
            | State::Finished => self.nonsense(now, leg, "commit", ctx),
        }
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "what an event says, and what every transition needs"
    )]
    fn on_token(
        &mut self,
        now: Instant,
        leg: LegId,
        choice: u32,
        token: SampledToken,
        step: StepTiming,
        ctx: &mut Context<'_>,
    ) {
        if self.request.beam_width.is_some() {
            return self.nonsense(now, leg, "token of a beam search", ctx);
        }
        match &mut self.state {
            State::Prefilling { decode, early, .. } if *decode == Some(leg) => {
                let most = self.ledgers.len().saturating_mul(self.request.stop.max_tokens as usize);
                if early.tokens.len() >= most {
                    return self.nonsense(now, leg, "more tokens than were asked for", ctx);
                }
                return early.tokens.push_back((choice, token, step));
            }
            State::Transferring { prefill, decode } if *decode == leg => {
                self.state = State::Decoding {
                    prefill: *prefill,
                    decode: leg,
                };
            }
            State::Resuming { decode } if *decode == leg => {
                self.state = State::Decoding {
                    prefill: None,
                    decode: leg,
                };
                let stall = now.saturating_duration_since(self.stranded_at.take().unwrap_or(now));
                ctx.out.extend([
                    Effect::Taken(leg),
                    Effect::Computed(leg),
                    Effect::Note(Note::Migrated(stall)),
                ]);
            }
            // A node may leave out what it computed for, unless the client has asked for that.
            State::Local { decode }
                if *decode == leg && token.position == 0 && self.request.prompt_logprobs.is_none() =>
            {
                self.prompt_is_computed(now, leg, 0, None, ctx);
                self.goes_on_locally(now, leg, ctx.limits);
            }
            State::Decoding { decode, .. } if *decode == leg => {}
            State::Queued
            | State::Reserving { .. }
            | State::Prefilling { .. }
            | State::Transferring { .. }
            | State::Stranded
            | State::Resuming { .. }
            | State::Local { .. }
            | State::Decoding { .. }
            | State::Finished => return self.nonsense(now, leg, "token", ctx),
        }
        self.phases.waited(now, Duration::from_micros(step.queue_us));
        self.token(now, leg, choice, token, step, ctx);
    }

    /// A node says that all choices have ended. The ledgers know that from the last token: if the request is still here,
    /// the node is wrong, unless its tokens wait for the prefill node's.
    fn on_node_finished(&mut self, now: Instant, leg: LegId, ctx: &mut Context<'_>) {
        match &mut self.state {
            State::Prefilling { decode, early, .. } if *decode == Some(leg) => early.finished = true,
            State::Queued
            | State::Reserving { .. }
            | State::Prefilling { .. }
            | State::Transferring { .. }
            | State::Stranded
            | State::Resuming { .. }
            | State::Local { .. }
            | State::Decoding { .. }
            | State::Finished => self.nonsense(now, leg, "end of choices that have not ended", ctx),
        }
    }

    fn on_failed(&mut self, now: Instant, leg: LegId, error: JobError, ctx: &mut Context<'_>) {
        match error.kind {
            JobErrorKind::Overloaded | JobErrorKind::Draining => match self.state {
                State::Reserving { .. } | State::Prefilling { .. } | State::Resuming { .. } | State::Local { .. } => {
                    self.on_no_room(now, leg, "overloaded", ctx);
                }
                State::Queued
                | State::Transferring { .. }
                | State::Stranded
                | State::Decoding { .. }
                | State::Finished => self.attempt_failed(now, leg, Cause::Failed(error), ctx),
            },
            JobErrorKind::Invalid => {
                ctx.out.push(Effect::Note(Note::Rejected(error)));
                self.fail(
                    ServeErrorKind::Internal,
                    "a node refused the request as invalid",
                    ctx.out,
                );
            }
            JobErrorKind::TransferFailed | JobErrorKind::DeadlineExceeded | JobErrorKind::Internal => {
                self.attempt_failed(now, leg, Cause::Failed(error), ctx);
            }
        }
    }

    pub(super) fn nonsense(&mut self, now: Instant, leg: LegId, what: &str, ctx: &mut Context<'_>) {
        let what = format!("{what} while {}", self.state.as_str());
        self.attempt_failed(now, leg, Cause::Nonsense(what), ctx);
    }

    /// A leg has come to nothing. What that means depends on whether the client has seen a token.
    pub fn attempt_failed(&mut self, now: Instant, leg: LegId, cause: Cause, ctx: &mut Context<'_>) {
        if cause.blames_the_node() {
            ctx.out.push(Effect::Blame(leg));
        }
        match &mut self.state {
            State::Reserving { .. } | State::Prefilling { .. } | State::Local { .. } => self.restart(now, cause, ctx),
            State::Decoding { prefill, .. } if *prefill == Some(leg) => {
                // The decode node has everything already.
                *prefill = None;
                ctx.out.push(Effect::Release(leg));
                ctx.ignore("prefill leg lost behind the commit");
            }
            State::Transferring { .. } | State::Resuming { .. } | State::Decoding { .. } => {
                self.strand(now, cause, ctx)
            }
            State::Queued | State::Stranded | State::Finished => {
                ctx.out.push(Effect::Release(leg));
                ctx.ignore("leg without a place");
            }
        }
    }

    fn restart(&mut self, now: Instant, cause: Cause, ctx: &mut Context<'_>) {
        if self.restarts >= ctx.limits.max_restarts {
            return self.give_up(cause, ctx);
        }
        self.restarts += 1;
        self.note_incident(now, "restart", &cause);
        self.release_all(ctx.out);
        self.avoid = ctx.node.map(|node| node.node.clone());
        self.state = State::Queued;
        self.wait_until = now + ctx.limits.queue_timeout;
        self.deadline = self.wait_until;
        ctx.out.extend([Effect::Note(Note::Restarted(cause)), Effect::Requeue]);
    }

    fn strand(&mut self, now: Instant, cause: Cause, ctx: &mut Context<'_>) {
        if self.migrations >= ctx.limits.max_migrations {
            return self.give_up(cause, ctx);
        }
        self.migrations += 1;
        self.note_incident(now, "migration", &cause);
        self.release_all(ctx.out);
        self.avoid = ctx.node.map(|node| node.node.clone());
        self.state = State::Stranded;
        self.stranded_at.get_or_insert(now);
        self.wait_until = now + ctx.limits.inter_token_timeout;
        self.deadline = self.wait_until;
        ctx.out
            .extend([Effect::Note(Note::Stranded(cause)), Effect::AwaitDecode]);
    }

    /// The node of `leg` is to be emptied: a request that generates there goes on elsewhere. Others end what they have begun.
    /// Not counted as a failed attempt.
    pub fn move_on(&mut self, now: Instant, leg: LegId, ctx: &mut Context<'_>) {
        match &self.state {
            State::Decoding { decode, .. } if *decode == leg => {
                self.migrations = self.migrations.saturating_sub(1);
                self.strand(now, Cause::Moved, ctx);
            }
            State::Queued
            | State::Reserving { .. }
            | State::Prefilling { .. }
            | State::Transferring { .. }
            | State::Stranded
            | State::Resuming { .. }
            | State::Local { .. }
            | State::Decoding { .. }
            | State::Finished => {}
        }
    }

    fn give_up(&mut self, cause: Cause, ctx: &mut Context<'_>) {
        let (kind, message) = cause.to_client();
        ctx.out.push(Effect::Note(Note::GivenUp(cause)));
        self.fail(kind, message, ctx.out);
    }

    /// The time of the current state is over. `missing`: what a request that waits is waiting for.
    pub fn on_deadline(&mut self, now: Instant, missing: Missing, ctx: &mut Context<'_>) {
        let name = self.state.as_str();
        if now >= self.expires && self.state != State::Finished {
            let message = format!(
                "the request was not answered within its time of {} ms",
                self.request.timeout.as_millis()
            );
            return self.fail(ServeErrorKind::Timeout, message, ctx.out);
        }
        match (&self.state, missing) {
            (State::Queued, Missing::Room { retry_after_s }) => {
                let kind = ServeErrorKind::Overloaded { retry_after_s };
                self.fail(kind, "the request waited too long for a free node", ctx.out);
            }
            (State::Queued | State::Stranded, Missing::Node) => {
                self.fail(
                    ServeErrorKind::Unavailable,
                    "no node that could serve the request is connected",
                    ctx.out,
                );
            }
            (State::Stranded, Missing::Room { .. }) => {
                self.fail(
                    ServeErrorKind::Timeout,
                    "no other decode node had room in time",
                    ctx.out,
                );
            }
            (State::Prefilling { prefill: leg, .. } | State::Local { decode: leg }, _) => {
                ctx.out.push(Effect::Blame(*leg));
                self.fail(ServeErrorKind::Timeout, "the prompt was not computed in time", ctx.out);
            }
            (
                State::Reserving { decode, .. }
                | State::Transferring { decode, .. }
                | State::Resuming { decode }
                | State::Decoding { decode, .. },
                _,
            ) => self.attempt_failed(now, *decode, Cause::Deadline(name), ctx),
            (State::Finished, _) => {}
        }
    }
}

impl Context<'_> {
    fn ignore(&mut self, what: &'static str) {
        self.out.push(Effect::Note(Note::Ignored(what)));
    }
}
