//! Placing a request: the steps that its owner takes once it has booked nodes for it.

use std::time::{Duration, Instant};

use protocol::control::{ChoiceStart, DecodeJob, HandoffTarget, KvSource, PrefillJob};
use protocol::ids::Epoch;

use super::{Early, Request, RequestLimits, State};
use crate::core::ledger::Ledger;
use crate::core::nodes::LegId;

impl Request {
    /// `Queued` -> `Reserving`: the reservation to send to the decode node.
    pub fn reserve(&mut self, now: Instant, decode: LegId, prefill: LegId, limits: &RequestLimits) -> DecodeJob {
        debug_assert_eq!(self.state, State::Queued, "only a queued request is placed");
        self.next_attempt();
        self.state = State::Reserving { decode, prefill };
        self.deadline = now + limits.reserve_timeout;
        self.decode_job(now, KvSource::Handoff, limits)
    }

    /// `Queued` -> `Prefilling` without a decode node: the job that computes all there is to compute.
    pub fn prefill_alone(&mut self, now: Instant, prefill: LegId, limits: &RequestLimits) -> PrefillJob {
        debug_assert_eq!(self.state, State::Queued, "only a queued request is placed");
        self.next_attempt();
        self.state = State::Prefilling {
            prefill,
            decode: None,
            early: Early::default(),
        };
        self.deadline = now + limits.prefill_timeout;
        self.prefill_job(now, None, limits)
    }

    /// `Stranded` -> `Resuming`: the job that goes on behind the accepted tokens.
    pub fn resume(&mut self, now: Instant, decode: LegId, limits: &RequestLimits) -> DecodeJob {
        debug_assert_eq!(self.state, State::Stranded, "only a stranded request is resumed");
        self.next_attempt();
        self.state = State::Resuming { decode };
        self.deadline = now + limits.prefill_timeout + self.search_time(limits);
        self.decode_job(now, KvSource::Compute, limits)
    }

    /// How much longer the first word of a decode node may take than that of one that says every token.
    fn search_time(&self, limits: &RequestLimits) -> Duration {
        match self.request.beam_width {
            None => Duration::ZERO,
            Some(_) => self.patience(limits),
        }
    }

    pub(super) fn next_attempt(&mut self) {
        self.epoch = Epoch(self.epoch.0 + 1);
        self.phases.next_attempt();
    }

    pub(super) fn prefill_job(
        &mut self,
        now: Instant,
        handoff: Option<HandoffTarget>,
        limits: &RequestLimits,
    ) -> PrefillJob {
        self.prefill_sent = Some(now);
        PrefillJob {
            request: self.request.id,
            context: self.request.about.context.as_ref().clone(),
            epoch: self.epoch,
            token_ids: self.request.token_ids.to_vec(),
            adapter: self.request.adapter.clone(),
            sampling: self.request.sampling.clone(),
            stop: self.request.stop.clone(),
            prompt_logprobs: self.request.prompt_logprobs,
            choices: match self.request.beam_width {
                None => self.request.choices,
                Some(_) => 0,
            },
            handoff,
            deadline_ms: self.within(now, limits.prefill_timeout + limits.handoff_timeout),
        }
    }

    pub(super) fn decode_job(&self, now: Instant, source: KvSource, limits: &RequestLimits) -> DecodeJob {
        let handoff = limits.reserve_timeout + limits.prefill_timeout + limits.handoff_timeout;
        DecodeJob {
            request: self.request.id,
            context: self.request.about.context.as_ref().clone(),
            epoch: self.epoch,
            token_ids: self.request.token_ids.to_vec(),
            adapter: self.request.adapter.clone(),
            choices: self.open_choices(),
            beam_width: self.request.beam_width,
            sampling: self.request.sampling.clone(),
            stop: self.request.stop.clone(),
            source,
            // A prefill node tells of the prompt, and of a moved request's the client knows; `local` asks for them.
            prompt_logprobs: None,
            handoff_deadline_ms: self.within(now, handoff),
            deadline_ms: self.within(now, Duration::MAX),
        }
    }

    /// The choices that have not ended, with their accepted tokens; none for a beam search, which has neither.
    fn open_choices(&self) -> Vec<ChoiceStart> {
        if self.request.beam_width.is_some() {
            return Vec::new();
        }
        let open = (0..).zip(&self.ledgers).filter(|(_, ledger)| !ledger.is_closed());
        let start = |(choice, ledger): (u32, &Ledger)| ChoiceStart {
            choice,
            generated: ledger.tokens().to_vec(),
        };
        open.map(start).collect()
    }
}
