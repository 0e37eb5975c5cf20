//! Traces: spans of this process on their way to an OpenTelemetry collector.
//!
//! Life of a span:
//! 1. Something is traced if its [`TraceContext`] says so; [`Tracer::begin`] decides that once, where a call enters the
//!    cluster.
//! 2. What happened is a [`Span`] once it is over, made from times that were taken anyway. [`Tracer::report`] writes it as bytes
//!    at the end of a bounded queue and never waits for room: what finds none is dropped, unmade, and counted. Bytes are all that
//!    goes to another thread: memory that one thread takes and another gives back costs both more than the writing.
//! 3. A thread of its own sends the bytes in batches by OTLP over HTTP. A collector that is slow, dead or wrong costs spans, and
//!    nothing else.
//! 4. [`TracesHandle::close`] sends what waits, within a deadline.
//!
//! Without a collector in the configuration there is no [`tracer`], and nothing is made.

mod export;
mod otlp;
mod span;

use std::collections::VecDeque;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use config::TelemetryConfig;
use metrics::counter;
use opentelemetry::trace::{SpanKind as Kind, TraceState};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, Sampler, SamplingDecision, ShouldSample};
use protocol::context::{TraceContext, TraceParent};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::span::WallTime;
pub use self::span::{Span, SpanEvent};
use crate::clock::Clock;
use crate::measure::Measure;
use crate::telemetry::TelemetryError;
pub use opentelemetry::trace::SpanKind;
pub use opentelemetry::{Array, KeyValue, StringValue, Value};

/// Spans that a collector has taken.
pub const EXPORTED: &str = "baton_trace_spans_exported_total";
/// Spans that were lost, by `reason`: `queue` (too many waited), `export` (the collector did not take them).
pub const DROPPED: &str = "baton_trace_spans_dropped_total";
/// Why spans are lost: values of the label `reason`.
const QUEUE: &str = "queue";
const EXPORT: &str = "export";

/// What is measured of traces; shown also where none are made.
pub(crate) const MEASURES: &[Measure] = &[
    Measure::counter(EXPORTED, &[], "spans", "Spans that the collector of traces has taken."),
    Measure::counter(
        DROPPED,
        &["reason"],
        "spans",
        "Spans that were lost, by why: too many waited (queue), or the collector did not take them (export).",
    ),
];

/// Shows from the beginning what may never come.
pub(crate) fn announce() {
    for reason in [QUEUE, EXPORT] {
        counter!(DROPPED, "reason" => reason).increment(0);
    }
}

/// Longest `tracestate` that is passed on, in bytes: as much as the specification wants carried.
const MAX_STATE: usize = 512;
/// How long after its deadline the thread may take to end.
const GRACE: Duration = Duration::from_millis(200);

static TRACER: OnceLock<Tracer> = OnceLock::new();

/// The way to the collector.
pub struct Tracer {
    waiting: Arc<Waiting>,
    sampler: Sampler,
}

/// What waits to be sent. The thread that exports is woken by the first span of a batch and when there are enough for one, not by
/// each: on a busy machine a wake costs more than the span.
struct Waiting {
    /// Those that have room, written or about to be.
    spans: AtomicUsize,
    most: usize,
    /// So many are enough for a batch.
    enough: usize,
    queue: Mutex<Queue>,
    changed: Notify,
}

/// See [`Waiting`].
struct Queue {
    batches: VecDeque<Batch>,
    wall: WallTime,
}

/// Spans on their way out.
#[derive(Default)]
struct Batch {
    /// So many are in `bytes`.
    spans: usize,
    /// Each as a field of its scope.
    bytes: Vec<u8>,
}

impl Waiting {
    /// A queue for `most`.
    fn new(most: usize) -> Self {
        Self {
            spans: AtomicUsize::new(0),
            most,
            // Room is left for those that come while a batch is sent.
            enough: export::BATCH.min(most / 2),
            queue: Mutex::new(Queue {
                batches: VecDeque::new(),
                wall: WallTime::new(Clock.now(), Clock.wall_time()),
            }),
            changed: Notify::new(),
        }
    }

    fn spans(&self) -> usize {
        self.spans.load(Ordering::Relaxed)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Nobody panics with it: writing a span has no way to.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The batch that has waited longest.
    fn take(&self) -> Option<Batch> {
        let mut queue = self.queue();
        queue.wall.follow(Clock.now(), Clock.wall_time());
        let batch = queue.batches.pop_front()?;
        self.spans.fetch_sub(batch.spans, Ordering::Relaxed);
        Some(batch)
    }
}

impl Queue {
    fn push(&mut self, spans: usize, made: &[Span]) {
        if self.batches.back().is_none_or(|last| last.spans >= export::BATCH) {
            self.batches.push_back(Batch::default());
        }
        if let Some(batch) = self.batches.back_mut() {
            made.iter()
                .for_each(|span| otlp::span(&mut batch.bytes, span, &self.wall));
            batch.spans += spans;
        }
    }
}

/// Who this process is in traces.
#[derive(Clone, Debug)]
pub struct Service {
    /// What it does, for example `coordinator`.
    pub role: &'static str,
    /// Its name among those of its kind.
    pub instance: String,
}

/// The span of a call that has just come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begun {
    /// The span itself: the parent of all that is done for the call.
    pub context: TraceContext,
    /// The client's span.
    pub parent: Option<u64>,
}

/// The process's tracer; `None` if nothing is traced.
pub fn tracer() -> Option<&'static Tracer> {
    TRACER.get()
}

/// Ends the export.
pub struct TracesHandle {
    stop: CancellationToken,
    ended: oneshot::Receiver<()>,
    deadline: Duration,
}

impl TracesHandle {
    /// Exports what waits, for at most `telemetry.trace_export_timeout_ms`.
    pub async fn close(self) {
        self.stop.cancel();
        if timeout(self.deadline + GRACE, self.ended).await.is_err() {
            tracing::warn!("the collector did not take the last spans in time");
        }
    }
}

/// Starts the export to the configured collector, once per process; `None` if none is configured.
///
/// # Errors
/// There is an export already, or the system gives no thread.
pub fn install(telemetry: &TelemetryConfig, service: &Service) -> Result<Option<TracesHandle>, TelemetryError> {
    if telemetry.otlp_endpoint.is_empty() {
        return Ok(None);
    }
    let failed = |reason: String| TelemetryError::Traces { reason };
    let waiting = Arc::new(Waiting::new(telemetry.trace_queue_spans));
    let ratio = f64::from(telemetry.traces_per_million) / 1e6;
    let tracer = Tracer {
        waiting: Arc::clone(&waiting),
        sampler: Sampler::TraceIdRatioBased(ratio),
    };
    let exporter = export::Exporter::new(telemetry, service).map_err(failed)?;
    TRACER
        .set(tracer)
        .map_err(|_| failed("they are set up already".to_owned()))?;
    let stop = CancellationToken::new();
    let (sender, ended) = oneshot::channel();
    let stopped = stop.clone();
    let run = move || {
        let _ended = sender;
        exporter.run(&waiting, &stopped);
    };
    std::thread::Builder::new()
        .name("traces".to_owned())
        .spawn(run)
        .map_err(|error| failed(error.to_string()))?;
    tracing::info!(collector = telemetry.otlp_endpoint, "traces are exported");
    let deadline = Duration::from_millis(telemetry.trace_export_timeout_ms);
    Ok(Some(TracesHandle { stop, ended, deadline }))
}

impl Tracer {
    /// Decides whether a call is traced: as its parent is, or by chance if it has none. The headers are taken as W3C Trace
    /// Context wants them: a malformed `parent` counts as none, a malformed `state` as empty.
    pub fn begin(&self, parent: Option<&str>, state: Option<&str>) -> Option<Begun> {
        let parent = parent.and_then(TraceParent::parse);
        let ids = RandomIdGenerator::default();
        let (trace_id, state) = match parent {
            Some(parent) if !parent.sampled => return None,
            Some(parent) => (parent.trace_id, state.map_or_else(String::new, valid_state)),
            None => {
                let trace_id = ids.new_trace_id();
                let sampled = self.sampler.should_sample(None, trace_id, "", &Kind::Server, &[], &[]);
                if sampled.decision != SamplingDecision::RecordAndSample {
                    return None;
                }
                (u128::from_be_bytes(trace_id.to_bytes()).max(1), String::new())
            }
        };
        let span_id = new_span_id();
        let context = TraceContext {
            trace_id,
            span_id,
            state,
        };
        Some(Begun {
            context,
            parent: parent.map(|parent| parent.span_id),
        })
    }

    /// Has `make` add exactly `spans` spans, for export, if there is room for them. Never waits for the collector.
    pub fn report(&self, spans: usize, make: impl FnOnce(&mut Vec<Span>)) {
        if spans == 0 {
            return;
        }
        let waiting = &*self.waiting;
        let before = waiting.spans.fetch_add(spans, Ordering::Relaxed);
        let after = before + spans;
        if after > waiting.most {
            waiting.spans.fetch_sub(spans, Ordering::Relaxed);
            dropped(QUEUE, spans);
            return;
        }
        let mut made = Vec::with_capacity(spans);
        make(&mut made);
        waiting.queue().push(spans, &made);
        if before == 0 || (before < waiting.enough && after >= waiting.enough) {
            waiting.changed.notify_one();
        }
    }
}

/// A name for a span; never 0.
pub(crate) fn new_span_id() -> u64 {
    u64::from_be_bytes(RandomIdGenerator::default().new_span_id().to_bytes()).max(1)
}

fn dropped(reason: &'static str, spans: usize) {
    counter!(DROPPED, "reason" => reason).increment(spans as u64);
}

/// `state`, if it can be passed on.
fn valid_state(state: &str) -> String {
    let state = state.trim_matches([' ', '\t']);
    let valid = state.len() <= MAX_STATE && TraceState::from_str(state).is_ok();
    if valid { state.to_owned() } else { String::new() }
}

#[cfg(test)]
mod tests;
