//! What the driver makes known of what the core decides: one line and one number for each event.

use std::collections::BTreeSet;
use std::time::Duration;

use config::LogRequests;
use metrics::{Gauge, counter, gauge, histogram};
use protocol::context::RequestContext;
use protocol::ids::RequestId;
use runtime::measure::{Measure, WAITS};
use tracing::field::display;

use crate::core::journey::Ended;
use crate::core::phases::Phase;
use crate::core::request::{Cause, Note, State};
use crate::core::types::{ClusterStatus, NodeStatus, ServeError, ServeErrorKind};

/// Attempts repeated before the first token, by `cause`.
pub const RESTARTS: &str = "baton_request_restarts_total";
/// Requests that lost their decode leg behind the first token, by `cause`.
pub const MIGRATIONS: &str = "baton_request_migrations_total";
/// From the loss of a decode leg to the next token, in seconds.
pub const MIGRATION_STALL: &str = "baton_migration_stall_seconds";
/// KV bytes sent by prefill nodes, repeats included.
pub const HANDOFF_BYTES: &str = "baton_handoff_bytes_total";
/// KV frames that had to be sent again.
pub const HANDOFF_RESENT: &str = "baton_handoff_frames_resent_total";
/// From the end of the prefill to the acknowledged commit, in seconds.
pub const HANDOFF_EXPOSED: &str = "baton_handoff_exposed_seconds";
/// Tokens that came for a request that had them or was over.
pub const WASTED_TOKENS: &str = "baton_wasted_tokens_total";
/// Events that came for a job that was over.
pub const LATE_EVENTS: &str = "baton_late_events_total";
/// Positions for which two nodes sampled different tokens.
pub const DISAGREEMENTS: &str = "baton_token_disagreements_total";
/// Requests that ended without an answer, by `kind`.
pub const FAILED_REQUESTS: &str = "baton_requests_failed_total";
/// Requests in each `state`.
pub const IN_STATE: &str = "baton_requests_in_state";
/// How long the oldest request of each `state` has been in it, in seconds.
pub const OLDEST_IN_STATE: &str = "baton_oldest_request_in_state_seconds";

/// What the driver measures.
pub const MEASURES: &[Measure] = &[
    Measure::counter(
        RESTARTS,
        &["cause"],
        "attempts",
        "Attempts that failed before the first token and were repeated, by why.",
    ),
    Measure::counter(
        MIGRATIONS,
        &["cause"],
        "requests",
        "Requests that lost the node that generated and were moved to another one, by why.",
    ),
    Measure::histogram(
        MIGRATION_STALL,
        WAITS,
        "seconds",
        "From the loss of the node that generated to the next token.",
    ),
    Measure::counter(
        HANDOFF_BYTES,
        &[],
        "bytes",
        "KV payload of completed handoffs, repeats included.",
    ),
    Measure::counter(HANDOFF_RESENT, &[], "frames", "KV frames that had to be sent again."),
    Measure::histogram(
        HANDOFF_EXPOSED,
        WAITS,
        "seconds",
        "From the end of a prefill to the acknowledged commit of its KV.",
    ),
    Measure::counter(
        WASTED_TOKENS,
        &[],
        "tokens",
        "Tokens from nodes for requests that had them already or were over.",
    ),
    Measure::counter(LATE_EVENTS, &[], "events", "Events from nodes for jobs that were over."),
    Measure::counter(
        DISAGREEMENTS,
        &[],
        "tokens",
        "Positions for which two nodes sampled different tokens: a defect.",
    ),
    Measure::counter(
        FAILED_REQUESTS,
        &["kind"],
        "requests",
        "Requests that ended without an answer, by why.",
    ),
    Measure::gauge(
        IN_STATE,
        &["state"],
        "requests",
        "Requests in each state of their life.",
    ),
    Measure::gauge(
        OLDEST_IN_STATE,
        &["state"],
        "seconds",
        "How long the oldest request of each state has been in it.",
    ),
];

/// Shows from the beginning what may never come.
fn announce() {
    for cause in Cause::WORDS {
        counter!(RESTARTS, "cause" => *cause).increment(0);
        counter!(MIGRATIONS, "cause" => *cause).increment(0);
    }
    for kind in ServeErrorKind::WORDS {
        counter!(FAILED_REQUESTS, "kind" => *kind).increment(0);
    }
}

/// What is shown of the core's state.
pub(super) struct Gauges {
    /// Every state with its two gauges: also one that nothing is in is shown.
    states: Vec<(&'static str, Gauge, Gauge)>,
    /// Nodes that were stalled, or whose breaker was not closed, when last looked at.
    unfit: BTreeSet<String>,
}

impl Gauges {
    /// Announces all that the driver measures.
    pub(super) fn new() -> Self {
        announce();
        let gauges = |state: &&'static str| {
            (
                *state,
                gauge!(IN_STATE, "state" => *state),
                gauge!(OLDEST_IN_STATE, "state" => *state),
            )
        };
        let all = Self {
            states: State::WORDS.iter().map(gauges).collect(),
            unfit: BTreeSet::new(),
        };
        all.states(&[]);
        all
    }

    pub(super) fn states(&self, now: &[(&'static str, usize, Duration)]) {
        for (state, count, oldest) in &self.states {
            let found = now.iter().find(|(name, ..)| name == state);
            count.set(found.map_or(0.0, |(_, count, _)| *count as f64));
            oldest.set(found.map_or(0.0, |(.., oldest)| oldest.as_secs_f64()));
        }
    }

    /// Logs what has become of the nodes' fitness.
    pub(super) fn nodes(&mut self, status: &ClusterStatus) {
        self.unfit
            .retain(|name| status.nodes.iter().any(|node| node.node == *name));
        for node in &status.nodes {
            self.tell(node);
        }
    }
}

impl Gauges {
    /// Logs when a node becomes unfit, and when it is fit again.
    fn tell(&mut self, node: &NodeStatus) {
        let name = &node.node;
        if !node.stalled && node.breaker == "closed" {
            if self.unfit.remove(name) {
                tracing::info!(node = %name, "node is fit again");
            }
        } else if self.unfit.insert(name.clone()) {
            tracing::warn!(node = %name, stalled = node.stalled, breaker = node.breaker, "node gets no work");
        }
    }
}

pub(super) fn note(request: RequestId, context: &RequestContext, note: &Note) {
    let (client_request_id, trace_id) = (context.client_id.as_deref(), context.trace_id().map(display));
    match note {
        Note::Restarted(cause) => {
            counter!(RESTARTS, "cause" => cause.as_str()).increment(1);
            tracing::warn!(%request, client_request_id, trace_id, %cause,
                "attempt failed before the first token: starting again");
        }
        Note::Stranded(cause) => {
            counter!(MIGRATIONS, "cause" => cause.as_str()).increment(1);
            tracing::warn!(%request, client_request_id, trace_id, %cause, "decode leg lost: moving the request");
        }
        Note::GivenUp(cause) => {
            tracing::warn!(%request, client_request_id, trace_id, %cause, "the last attempt failed");
        }
        Note::Migrated(stall) => {
            histogram!(MIGRATION_STALL).record(stall.as_secs_f64());
            let stall_ms = stall.as_millis() as u64;
            tracing::info!(%request, client_request_id, trace_id, stall_ms, "moved request goes on");
        }
        Note::HandedOff(stats) => {
            counter!(HANDOFF_BYTES).increment(stats.bytes);
            counter!(HANDOFF_RESENT).increment(u64::from(stats.resent));
            histogram!(HANDOFF_EXPOSED).record(Duration::from_micros(stats.exposed_us).as_secs_f64());
        }
        Note::Wasted => counter!(WASTED_TOKENS).increment(1),
        Note::Disagreement { position } => {
            counter!(DISAGREEMENTS).increment(1);
            tracing::error!(%request, client_request_id, trace_id, position,
                "two nodes sampled different tokens for one position");
        }
        Note::Rejected(error) => {
            tracing::error!(%request, client_request_id, trace_id, reason = %error.message,
                "a node rejects the job as invalid");
        }
        Note::Ignored(what) => tracing::debug!(%request, client_request_id, trace_id, what, "ignored"),
    }
}

pub(super) fn late(token: bool) {
    counter!(LATE_EVENTS).increment(1);
    if token {
        counter!(WASTED_TOKENS).increment(1);
    }
}

pub(super) fn failed(error: &ServeError) {
    counter!(FAILED_REQUESTS, "kind" => error.kind.as_str()).increment(1);
}

/// A request that was not taken.
pub(super) fn refused(request: RequestId, context: &RequestContext, error: &ServeError) {
    failed(error);
    let (client_request_id, trace_id) = (context.client_id.as_deref(), context.trace_id().map(display));
    tracing::debug!(%request, client_request_id, trace_id, outcome = error.kind.as_str(), reason = %error.message,
        "request refused");
}

/// The line about a request that has ended, at the level that operators want it at.
pub(super) fn ended(level: LogRequests, ended: &Ended) {
    macro_rules! line {
        ($log:ident) => {{
            let (record, context) = (&ended.record, &ended.context);
            let ms = |phase| record.phases.of(phase).as_secs_f64() * 1e3;
            let nodes: Vec<&str> = record.nodes.iter().map(AsRef::as_ref).collect();
            tracing::$log!(
                request = %ended.id,
                client_request_id = context.client_id.as_deref(),
                trace_id = context.trace_id().map(display),
                outcome = record.outcome,
                reason = ended.error.as_deref(),
                attempts = record.attempts,
                nodes = nodes.join(","),
                prompt_tokens = record.prompt_tokens as u64,
                generated_tokens = record.generated_tokens as u64,
                finish_reasons = record.finish_reasons.join(","),
                queue_ms = ms(Phase::Queue),
                prefill_queue_ms = ms(Phase::PrefillQueue),
                prefill_ms = ms(Phase::Prefill),
                exposed_transfer_ms = ms(Phase::Transfer),
                decode_queue_ms = ms(Phase::DecodeQueue),
                decode_ms = ms(Phase::Decode),
                "request ended"
            );
        }};
    }
    match level {
        LogRequests::Debug if tracing::enabled!(tracing::Level::DEBUG) => line!(debug),
        LogRequests::Info if tracing::enabled!(tracing::Level::INFO) => line!(info),
        LogRequests::Off | LogRequests::Debug | LogRequests::Info => {}
    }
}
