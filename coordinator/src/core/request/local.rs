//! A decode node computes the prompt itself: no prefill node, no transfer.

use std::time::Instant;

use protocol::control::{DecodeJob, KvSource, PromptComputed};
use protocol::sampling::PromptLogprob;

use super::{Context, Effect, Request, RequestLimits, State};
use crate::core::nodes::LegId;
use crate::core::types::ClientEvent;

impl Request {
    /// `Queued` -> `Local`: the job for the decode node.
    pub fn compute_locally(&mut self, now: Instant, decode: LegId, limits: &RequestLimits) -> DecodeJob {
        debug_assert_eq!(self.state, State::Queued, "only a queued request is placed");
        self.next_attempt();
        self.prefill_sent = Some(now);
        self.state = State::Local { decode };
        self.deadline = now + limits.prefill_timeout;
        DecodeJob {
            // The first job that computes the prompt tells of it; jobs that go on behind the first tokens do not.
            prompt_logprobs: self.request.prompt_logprobs,
            ..self.decode_job(now, KvSource::Compute, limits)
        }
    }

    /// The prompt has been computed by `leg`: the client is told before the first tokens.
    pub(super) fn prompt_is_computed(
        &mut self,
        now: Instant,
        leg: LegId,
        cached_tokens: u32,
        prompt_logprobs: Option<Vec<PromptLogprob>>,
        ctx: &mut Context<'_>,
    ) {
        let sent = self.prefill_sent.unwrap_or(now);
        let queue = sent.saturating_duration_since(self.submitted);
        ctx.out.push(Effect::Computed(leg));
        ctx.out.push(Effect::Emit(ClientEvent::Prefill {
            cached_tokens,
            prompt_logprobs,
            queue_us: queue.as_micros() as u64,
        }));
    }

    /// False if the client has asked for the prompt's log-probabilities and they are not there.
    pub(super) fn tells_enough(&self, computed: &PromptComputed) -> bool {
        self.request.prompt_logprobs.is_none() || computed.prompt_logprobs.is_some()
    }

    /// The decode node has computed the prompt: from here on it is like any other request that generates, unless the prompt
    /// was all that was asked for.
    pub(super) fn on_computed_locally(
        &mut self,
        now: Instant,
        decode: LegId,
        computed: PromptComputed,
        ctx: &mut Context<'_>,
    ) {
        self.prompt_is_computed(now, decode, computed.cached_tokens, computed.prompt_logprobs, ctx);
        self.goes_on_locally(now, decode, ctx.limits);
        if self.request.choices == 0 {
            return self.done(now, ctx.out);
        }
        for (choice, token) in (0..).zip(computed.tokens) {
            self.token(now, decode, choice, token, computed.step, ctx);
        }
    }

    /// What follows are tokens, or a search that says nothing before its end.
    pub(super) fn goes_on_locally(&mut self, now: Instant, decode: LegId, limits: &RequestLimits) {
        self.state = State::Decoding { prefill: None, decode };
        self.deadline = now + self.patience(limits);
    }
}
