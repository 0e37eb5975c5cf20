//! From the engine's events to those who own the sequences.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use engine::beam::Hypothesis;
use engine::event::EngineEvent;
use engine::owners::Origin;
use engine::plan::SequenceId;
use engine::sequence::SequenceSpec;
use protocol::control::{Beam, StepTiming};
use protocol::sampling::{FinishReason, PromptLogprob, SampledToken};
use tokio::sync::mpsc;

use super::StepTap;

/// What a sequence's owner is told.
#[derive(Debug)]
pub enum SequenceEvent {
    /// One token was sampled.
    Token(TokenEvent),
    /// A sequence that draws no token is computed, and has ended; or the prompt of a beam search that is computed here is.
    Computed(ComputedEvent),
    /// A beam search has ended: its hypotheses, best first.
    Beams(Vec<Beam>),
    /// The step failed; the sequence is gone.
    Failed(String),
}

/// One sampled token.
#[derive(Debug)]
pub struct TokenEvent {
    /// The token.
    pub token: SampledToken,
    /// Its step.
    pub timing: StepTiming,
    /// Steps that had rows of the sequence since its last token.
    pub steps: u32,
    /// Tokens of the sequence whose KV came from the prefix cache when it started here.
    pub cached_tokens: u32,
    /// What the model says of the prompt's tokens from the second on, with the first token of a sequence that asked.
    pub prompt_logprobs: Option<Vec<PromptLogprob>>,
    /// Set if the stop rules end the sequence with this token.
    pub finish: Option<FinishReason>,
    /// The first tokens of further choices, and how they would end, if the sequence draws several.
    pub others: Vec<(SampledToken, Option<FinishReason>)>,
}

/// A prompt was computed for its own sake.
#[derive(Debug)]
pub struct ComputedEvent {
    /// The steps.
    pub timing: StepTiming,
    /// As with [`TokenEvent`].
    pub steps: u32,
    /// As with [`TokenEvent`].
    pub cached_tokens: u32,
    /// As with [`TokenEvent`].
    pub prompt_logprobs: Option<Vec<PromptLogprob>>,
}

/// Events of a beam search: its prompt, and its answer or its failure.
pub(super) const BEAM_EVENTS: usize = 3;

/// Every token the sequence can still get, and one failure.
pub(super) fn event_capacity(spec: &SequenceSpec) -> usize {
    let generated = spec.token_ids.len().saturating_sub(spec.prompt_len);
    let left = if spec.first_only.is_some() {
        1
    } else {
        (spec.stop.max_tokens as usize).saturating_sub(generated)
    };
    left + 2
}

/// What the thread keeps of a sequence, or of a beam search, beside the engine's own state.
pub(super) struct Record {
    events: mpsc::Sender<(usize, SequenceEvent)>,
    /// Its place among those who share the queue.
    index: usize,
    pub(super) tap: Option<Box<dyn StepTap>>,
    /// Where it comes from.
    pub(super) origin: Origin,
    /// Arrival, or the end of the step that sampled the last token.
    waiting_since: Instant,
    /// Wait before the first step since then.
    queued: Option<Duration>,
    /// Computing since then.
    computed: Duration,
    /// Steps since then.
    steps: u32,
    /// The step that was added last: several members of a beam search are in one.
    last_step: u64,
    /// Of a beam search: the steps that led to each position.
    positions: Vec<StepTiming>,
}

impl Record {
    pub(super) fn new(
        events: mpsc::Sender<(usize, SequenceEvent)>,
        index: usize,
        tap: Option<Box<dyn StepTap>>,
        now: Instant,
        origin: Origin,
    ) -> Self {
        Self {
            events,
            index,
            tap,
            origin,
            waiting_since: now,
            queued: None,
            computed: Duration::ZERO,
            steps: 0,
            last_step: 0,
            positions: Vec::new(),
        }
    }

    /// Since when it has waited for the step that leads to its next token, if none has begun.
    pub(super) fn waits_since(&self) -> Instant {
        self.waiting_since
    }

    /// A step with rows of the sequence begins.
    pub(super) fn begins(&mut self, now: Instant) {
        self.queued
            .get_or_insert(now.saturating_duration_since(self.waiting_since));
    }

    /// The step with that number had rows of the sequence.
    pub(super) fn has_computed(&mut self, step: u64, elapsed: Duration) {
        if self.last_step != step {
            self.computed += elapsed;
            self.steps = self.steps.saturating_add(1);
            self.last_step = step;
        }
    }

    fn timing(&mut self, batch_size: u32, now: Instant) -> StepTiming {
        let timing = StepTiming {
            batch_size,
            queue_us: micros(self.queued.take().unwrap_or_default()),
            compute_us: micros(std::mem::take(&mut self.computed)),
        };
        self.waiting_since = now;
        timing
    }

    fn beam(&self, hypothesis: Hypothesis) -> Beam {
        let steps = self.positions.iter().copied();
        Beam {
            tokens: hypothesis.tokens.into_iter().zip(steps).collect(),
            score: hypothesis.score,
        }
    }

    fn send(&self, id: SequenceId, event: SequenceEvent) {
        match self.events.try_send((self.index, event)) {
            // Closed: the owner has gone and its cancel is on the way.
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                tracing::error!(?id, "more events than the sequence can have tokens; event dropped");
            }
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Sends every event to the owner of its sequence.
pub(super) fn deliver(events: &mut Vec<EngineEvent>, records: &mut HashMap<SequenceId, Record>, now: Instant) {
    for event in events.drain(..) {
        match event {
            EngineEvent::Token {
                id,
                token,
                batch_size,
                cached_tokens,
                prompt_logprobs,
                finish,
                others,
            } => {
                let Some(record) = records.get_mut(&id) else { continue };
                let event = TokenEvent {
                    steps: std::mem::take(&mut record.steps),
                    token,
                    timing: record.timing(batch_size, now),
                    cached_tokens,
                    prompt_logprobs,
                    finish,
                    others,
                };
                record.send(id, SequenceEvent::Token(event));
            }
            EngineEvent::Computed {
                id,
                batch_size,
                cached_tokens,
                prompt_logprobs,
            } => {
                let Some(record) = records.get_mut(&id) else { continue };
                let event = ComputedEvent {
                    steps: std::mem::take(&mut record.steps),
                    timing: record.timing(batch_size, now),
                    cached_tokens,
                    prompt_logprobs,
                };
                record.send(id, SequenceEvent::Computed(event));
            }
            EngineEvent::BeamStep { id, batch_size } => {
                if let Some(record) = records.get_mut(&id) {
                    let timing = record.timing(batch_size, now);
                    record.positions.push(timing);
                }
            }
            EngineEvent::Beams { id, beams } => {
                if let Some(record) = records.remove(&id) {
                    let beams = beams.into_iter().map(|beam| record.beam(beam)).collect();
                    record.send(id, SequenceEvent::Beams(beams));
                }
            }
            EngineEvent::Failed { id, message } => {
                if let Some(record) = records.remove(&id) {
                    record.send(id, SequenceEvent::Failed(message));
                }
            }
            // It is counted by the engine.
            EngineEvent::Preempted { .. } => {}
        }
    }
}
