//! A decode node computes the prompt itself: no prefill node, no transfer.

use std::time::Instant;

use protocol::control::{DecodeJob, KvSource};
use protocol::sampling::PromptLogprob;

use super::{Context, Effect, Request, RequestLimits, State};
use crate::core::nodes::LegId;
use crate::core::types::{ClientEvent, ServeRequest};

/// True if a decode node may be given all of it: choices are drawn, it is no beam search, and the prompt's log-probabilities are
/// not asked for. (Nodes can do these, too; requests for them always go by a prefill node so far.)
pub fn may_be_local(request: &ServeRequest) -> bool {
    request.choices > 0 && request.beam_width.is_none() && request.prompt_logprobs.is_none()
}

impl Request {
    /// `Queued` -> `Local`: the job for the decode node.
    pub fn compute_locally(&mut self, now: Instant, decode: LegId, limits: &RequestLimits) -> DecodeJob {
        debug_assert_eq!(self.state, State::Queued, "only a queued request is placed");
        self.next_attempt();
        self.prefill_sent = Some(now);
        self.state = State::Local { decode };
        self.deadline = now + limits.prefill_timeout;
        self.decode_job(now, KvSource::Compute, limits)
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

    /// The first token is there: from here on it is like any other request that generates.
    pub(super) fn goes_on_locally(&mut self, decode: LegId) {
        self.state = State::Decoding { prefill: None, decode };
    }
}
