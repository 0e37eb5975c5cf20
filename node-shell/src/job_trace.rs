//! What a job did, and when: one line in the log and, if its request is traced, spans.
//!
//! A job goes through *stages*, one after the other. They are noted as they begin, from times that are known anyway, and
//! become spans when the job is over: nothing is made while it runs.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::owners::JobName;
use protocol::blocks::JobKind;
use protocol::context::{RequestContext, TraceContext};
use protocol::control::{JobEvent, StepTiming};
use runtime::clock::Clock;
use runtime::traces::{KeyValue, Span, SpanKind, tracer};

/// The work waits for its first step.
const QUEUE: &str = "queue";
/// A prompt is computed.
pub const COMPUTE: &str = "compute";
/// Tokens are generated.
pub const GENERATION: &str = "generation";

/// A part of a job.
#[derive(Debug)]
struct Stage {
    name: &'static str,
    from: Instant,
    attributes: Vec<KeyValue>,
}

/// See the head of the file. Dropped, the job is over.
#[derive(Debug)]
pub struct JobTrace {
    name: Arc<JobName>,
    context: RequestContext,
    arrived: Instant,
    outcome: &'static str,
    error: Option<String>,
    /// Empty if nothing is traced.
    stages: Vec<Stage>,
    /// Tokens generated here, by the index of the sequence.
    generated: Vec<u32>,
}

impl JobTrace {
    /// Of a job that has just arrived.
    pub(crate) fn new(name: Arc<JobName>, context: RequestContext) -> Self {
        Self {
            name,
            context,
            arrived: Clock.now(),
            // Whoever has its tokens needs no last word of the job.
            outcome: "released",
            error: None,
            stages: Vec::new(),
            generated: Vec::new(),
        }
    }

    /// By which names its request goes.
    pub fn context(&self) -> &RequestContext {
        &self.context
    }

    fn is_traced(&self) -> bool {
        self.context.trace.is_some() && tracer().is_some()
    }

    /// Its next stage begins.
    pub fn enter(&mut self, name: &'static str) {
        if !self.is_traced() {
            return;
        }
        // From its arrival on it is in some stage.
        let from = if self.stages.is_empty() {
            self.arrived
        } else {
            Clock.now()
        };
        self.stages.push(Stage {
            name,
            from,
            attributes: Vec::new(),
        });
    }

    /// The prompt has been computed in so many steps.
    pub fn computed(&mut self, step: StepTiming, steps: u32) {
        self.waited(step.queue_us);
        self.note("baton.chunks", u64::from(steps));
        self.note("baton.compute_us", step.compute_us);
    }

    /// A sequence, by its index, has one more token. The first token of all is the end of a stage that computed a prompt, and
    /// tells how long the work had waited.
    pub fn token(&mut self, index: usize, step: StepTiming, steps: u32) {
        let Some(stage) = self.stages.last().map(|stage| stage.name) else {
            return;
        };
        if self.generated.is_empty() {
            if stage == COMPUTE {
                self.computed(step, steps);
                self.enter(GENERATION);
            } else {
                self.waited(step.queue_us);
            }
        }
        if self.generated.len() <= index {
            self.generated.resize(index + 1, 0);
        }
        self.generated[index] += 1;
    }

    /// The first step of the stage came after it had waited so long: that is a stage of its own.
    fn waited(&mut self, queue_us: u64) {
        let Some(stage) = self.stages.last_mut() else { return };
        let waited = Duration::from_micros(queue_us).min(Clock.now().saturating_duration_since(stage.from));
        let queue = Stage {
            name: QUEUE,
            from: stage.from,
            attributes: Vec::new(),
        };
        stage.from += waited;
        let last = self.stages.len() - 1;
        self.stages.insert(last, queue);
    }

    /// Something is known about the stage.
    pub fn note(&mut self, what: &'static str, value: u64) {
        if let Some(stage) = self.stages.last_mut() {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            stage.attributes.push(KeyValue::new(what, value));
        }
    }

    /// Its last word.
    pub(crate) fn ends(&mut self, event: &JobEvent) {
        match event {
            JobEvent::Busy { .. } => self.outcome = "busy",
            JobEvent::HandedOff(_) => self.outcome = "handed_off",
            JobEvent::Failed(error) => {
                self.outcome = "failed";
                self.error = Some(format!("{:?}: {}", error.kind, error.message));
            }
            JobEvent::Finished | JobEvent::Beams(_) => self.outcome = "finished",
            JobEvent::Granted { .. } | JobEvent::Computed(_) | JobEvent::Committed | JobEvent::Token { .. } => {}
        }
    }

    /// The job's stream was lost, not reset.
    pub(crate) fn lost(&mut self, reason: &str) {
        self.outcome = "lost";
        self.error = Some(reason.to_owned());
    }
}

impl Drop for JobTrace {
    fn drop(&mut self) {
        let key = self.name.key;
        let kind = kind(key.kind);
        let ended = Clock.now();
        tracing::debug!(
            request = %key.request,
            client_request_id = self.context.client_id.as_deref(),
            trace_id = self.context.trace_id().map(display),
            epoch = key.epoch.0,
            kind,
            outcome = self.outcome,
            reason = self.error.as_deref(),
            ms = ended.saturating_duration_since(self.arrived).as_secs_f64() * 1e3,
            "job ended"
        );
        let Some(trace) = self.context.trace.take().filter(|_| !self.stages.is_empty()) else {
            return;
        };
        let Some(tracer) = tracer() else { return };
        if let Some(steps) = self.generated.iter().max().copied() {
            let tokens = self.generated.iter().copied().map(u64::from).sum();
            self.note("baton.tokens", tokens);
            // Each step adds a token to each sequence that goes on.
            self.note("baton.steps", u64::from(steps));
        }
        let stages = std::mem::take(&mut self.stages);
        let attributes = vec![
            KeyValue::new("baton.request_id", key.request.to_string()),
            KeyValue::new("baton.attempt", i64::from(key.epoch.0)),
            KeyValue::new("baton.outcome", self.outcome),
        ];
        let (arrived, error) = (self.arrived, self.error.take());
        tracer.report(1 + stages.len(), move |spans| {
            let mut job = Span::child(&trace, kind, arrived, ended);
            job.kind = SpanKind::Server;
            job.remote = true;
            job.attributes = attributes;
            job.error = error.map(Cow::Owned);
            add_stages(&job.context, stages, ended, spans);
            spans.push(job);
        });
    }
}

/// One span for each stage; each ends where the next one begins.
fn add_stages(job: &TraceContext, stages: Vec<Stage>, ended: Instant, spans: &mut Vec<Span>) {
    let ends: Vec<Instant> = stages.iter().skip(1).map(|next| next.from).chain([ended]).collect();
    for (stage, to) in stages.into_iter().zip(ends) {
        spans.push(Span {
            attributes: stage.attributes,
            ..Span::child(job, stage.name, stage.from, to)
        });
    }
}

/// What a job is called in logs and traces.
fn kind(kind: JobKind) -> &'static str {
    match kind {
        JobKind::Prefill => "prefill_job",
        JobKind::Decode => "decode_job",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_follow_one_another_to_the_end_of_the_job() {
        let start = Clock.now();
        let at = |ms| start + Duration::from_millis(ms);
        let stage = |name, ms| Stage {
            name,
            from: at(ms),
            attributes: Vec::new(),
        };
        let job = TraceContext {
            trace_id: 3,
            span_id: 4,
            state: String::new(),
        };
        let mut spans = Vec::new();
        let stages = vec![stage("queue", 0), stage("compute", 4), stage("push", 9)];
        add_stages(&job, stages, at(12), &mut spans);
        let told: Vec<_> = spans
            .iter()
            .map(|span| (span.name.as_ref(), span.parent, span.from - start, span.to - start))
            .collect();
        let ms = Duration::from_millis;
        let expected = [
            ("queue", Some(4), ms(0), ms(4)),
            ("compute", Some(4), ms(4), ms(9)),
            ("push", Some(4), ms(9), ms(12)),
        ];
        assert_eq!(told, expected);
    }
}
