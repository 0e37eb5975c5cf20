//! Metric names of a node, what they mean, and the functions that publish them.

use std::time::Duration;

use engine::stats::StepStats;
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use runtime::clock::Clock;
use runtime::measure::{GAPS, Measure, SEQUENCES};
use runtime::shutdown::Shutdown;

use crate::handle::{EngineHandle, EngineLoad};
use crate::memory::MemoryReport;
use crate::process::NodeRole;

/// Time of one engine step, in seconds.
pub const STEP_SECONDS: &str = "baton_engine_step_seconds";
/// Sequences in an engine step.
pub const STEP_BATCH_SIZE: &str = "baton_engine_step_batch_size";
/// Rows (tokens) computed by the engine.
pub const ROWS_TOTAL: &str = "baton_engine_rows_total";
/// Tokens that the engine has sampled.
pub const SAMPLED_TOTAL: &str = "baton_engine_sampled_tokens_total";
/// Sequences that lost their blocks to another one and were computed again.
pub const PREEMPTIONS_TOTAL: &str = "baton_num_preemptions_total";
/// Rows that were computed for nothing.
pub const PREEMPTED_ROWS_TOTAL: &str = "baton_engine_preempted_rows_total";
/// Jobs that coordinators have sent to this node, refused and cancelled ones included.
pub const JOBS_TOTAL: &str = "baton_node_jobs_total";
/// KV blocks; label `state` is `free`, `cached` or `owned`.
pub const KV_BLOCKS: &str = "baton_kv_blocks";
/// Sequences in the running batch.
pub const SEQUENCES_RUNNING: &str = "baton_num_sequences_running";
/// Sequences that wait in the engine.
pub const SEQUENCES_WAITING: &str = "baton_num_sequences_waiting";
/// Sequences among those that wait which had started.
pub const SEQUENCES_PREEMPTED: &str = "baton_num_sequences_preempted";
/// How long the sequence that is first in line has waited.
pub const OLDEST_WAIT_SECONDS: &str = "baton_oldest_wait_seconds";
/// Rows that all sequences lack before their next tokens.
pub const QUEUED_ROWS: &str = "baton_engine_queued_rows";
/// Reservations that are not committed.
pub const RESERVATIONS: &str = "baton_num_reservations";
/// Audits that found the books of the KV blocks wrong.
pub const AUDIT_FAILURES_TOTAL: &str = "baton_audit_failures_total";
/// Tokens of sequences for which the prefix cache was asked when they started, and of prompts whose KV was to come.
pub const CACHE_QUERIES_TOTAL: &str = "baton_prefix_cache_queries_total";
/// Tokens of these whose KV was there: it was not computed again, or not sent.
pub const CACHE_HITS_TOTAL: &str = "baton_prefix_cache_hits_total";
/// Cached KV blocks that were given away because others needed the room.
pub const CACHE_EVICTIONS_TOTAL: &str = "baton_prefix_cache_evictions_total";
/// Resident memory in bytes; label `part` is `weights`, `embedding`, `tables`, `kv_pool` or `other`. Their sum is all of it.
pub const MEMORY_BYTES: &str = "baton_memory_bytes";
/// Resident memory on huge pages, in bytes.
pub const MEMORY_HUGE_PAGES_BYTES: &str = "baton_memory_huge_pages_bytes";
/// What the KV pool takes once all of it has been used, in bytes.
pub const KV_POOL_BYTES: &str = "baton_kv_pool_bytes";

/// What every node measures of its engine and its memory.
pub const MEASURES: &[Measure] = &[
    Measure::histogram(STEP_SECONDS, GAPS, "seconds", "Time of an engine step."),
    Measure::histogram(
        STEP_BATCH_SIZE,
        SEQUENCES,
        "sequences",
        "Sequences that an engine step advanced.",
    ),
    Measure::counter(
        ROWS_TOTAL,
        &[],
        "tokens",
        "Tokens computed: those of prompts, and one for each that was generated behind them.",
    ),
    Measure::counter(SAMPLED_TOTAL, &[], "tokens", "Tokens that the engine has sampled."),
    Measure::counter(
        PREEMPTIONS_TOTAL,
        &[],
        "sequences",
        "Sequences that lost their KV blocks to older ones, to be computed again.",
    ),
    Measure::counter(
        PREEMPTED_ROWS_TOTAL,
        &[],
        "tokens",
        "Tokens computed for nothing, since their sequences lost the KV blocks.",
    ),
    Measure::counter(
        JOBS_TOTAL,
        &[],
        "jobs",
        "Jobs that coordinators have sent, refused and cancelled ones included.",
    ),
    Measure::gauge(
        KV_BLOCKS,
        &["state"],
        "blocks",
        "KV blocks: free, cached (kept as prefix cache only) and owned. Their sum is the pool.",
    ),
    Measure::gauge(SEQUENCES_RUNNING, &[], "sequences", "Sequences in the running batch."),
    Measure::gauge(
        SEQUENCES_WAITING,
        &[],
        "sequences",
        "Sequences that wait in the engine for a slot or for KV blocks.",
    ),
    Measure::gauge(
        SEQUENCES_PREEMPTED,
        &[],
        "sequences",
        "Sequences among those that wait which had started and lost their KV blocks.",
    ),
    Measure::gauge(
        OLDEST_WAIT_SECONDS,
        &[],
        "seconds",
        "How long the sequence that is first in line has waited; 0 if none waits. Looked at every second.",
    ),
    Measure::gauge(
        QUEUED_ROWS,
        &[],
        "tokens",
        "Tokens to be computed before each sequence has its next one.",
    ),
    Measure::gauge(
        RESERVATIONS,
        &[],
        "reservations",
        "KV block reservations that wait for their KV.",
    ),
    Measure::counter(
        AUDIT_FAILURES_TOTAL,
        &[],
        "audits",
        "Audits that found the books of the KV blocks wrong: a defect.",
    ),
    Measure::counter(
        CACHE_QUERIES_TOTAL,
        &[],
        "tokens",
        "Tokens for which the prefix cache was asked: of sequences that started, and of prompts whose KV was to come.",
    ),
    Measure::counter(
        CACHE_HITS_TOTAL,
        &[],
        "tokens",
        "Tokens of these whose KV was there, and was not computed or not sent.",
    ),
    Measure::counter(
        CACHE_EVICTIONS_TOTAL,
        &[],
        "blocks",
        "Cached KV blocks that were given away because others needed the room.",
    ),
    Measure::gauge(
        MEMORY_BYTES,
        &["part"],
        "bytes",
        "Resident memory by part. The sum is all of the process's.",
    ),
    Measure::gauge(MEMORY_HUGE_PAGES_BYTES, &[], "bytes", "Resident memory on huge pages."),
    Measure::gauge(
        KV_POOL_BYTES,
        &[],
        "bytes",
        "What the KV pool takes once all of it has been used.",
    ),
];

/// Everything that a node of role `R` measures.
pub fn measures<R: NodeRole>() -> Vec<Measure> {
    [
        MEASURES,
        &R::measures(),
        &runtime::measure::measures(),
        discovery::FINDING,
    ]
    .concat()
}

pub(crate) fn memory(report: &MemoryReport) {
    let parts = [
        ("weights", report.weights),
        ("embedding", report.embedding),
        ("tables", report.tables),
        ("kv_pool", report.kv_pool),
        ("other", report.other),
    ];
    for (part, bytes) in parts {
        gauge!(MEMORY_BYTES, "part" => part).set(bytes as f64);
    }
    gauge!(MEMORY_HUGE_PAGES_BYTES).set(report.huge_pages as f64);
    gauge!(KV_POOL_BYTES).set(report.kv_pool_size as f64);
}

pub(crate) fn job() {
    counter!(JOBS_TOTAL).increment(1);
}

/// How often the oldest wait is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// Keeps the oldest wait up to date until the process stops: while a step hangs nothing else does.
pub(crate) fn watch(engine: EngineHandle, shutdown: Shutdown) {
    let oldest = gauge!(OLDEST_WAIT_SECONDS);
    tokio::spawn(async move {
        loop {
            let since = engine.load().waiting_since;
            let waited = since.map(|since| Clock.now().saturating_duration_since(since));
            oldest.set(waited.unwrap_or_default().as_secs_f64());
            tokio::select! {
                () = shutdown.wait_forced() => return,
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    });
}

/// Handles of what the engine thread publishes with every step, made once: publishing takes no look-up.
pub(crate) struct EngineMetrics {
    step_seconds: Histogram,
    batch_size: Histogram,
    rows: Counter,
    sampled: Counter,
    preemptions: Counter,
    preempted_rows: Counter,
    cache_queries: Counter,
    cache_hits: Counter,
    cache_evictions: Counter,
    audit_failures: Counter,
    free_blocks: Gauge,
    cached_blocks: Gauge,
    owned_blocks: Gauge,
    running: Gauge,
    waiting: Gauge,
    preempted: Gauge,
    reservations: Gauge,
    queued_rows: Gauge,
}

impl EngineMetrics {
    pub(crate) fn new() -> Self {
        let blocks = |state: &'static str| gauge!(KV_BLOCKS, "state" => state);
        Self {
            step_seconds: histogram!(STEP_SECONDS),
            batch_size: histogram!(STEP_BATCH_SIZE),
            rows: counter!(ROWS_TOTAL),
            sampled: counter!(SAMPLED_TOTAL),
            preemptions: counter!(PREEMPTIONS_TOTAL),
            preempted_rows: counter!(PREEMPTED_ROWS_TOTAL),
            cache_queries: counter!(CACHE_QUERIES_TOTAL),
            cache_hits: counter!(CACHE_HITS_TOTAL),
            cache_evictions: counter!(CACHE_EVICTIONS_TOTAL),
            audit_failures: counter!(AUDIT_FAILURES_TOTAL),
            free_blocks: blocks("free"),
            cached_blocks: blocks("cached"),
            owned_blocks: blocks("owned"),
            running: gauge!(SEQUENCES_RUNNING),
            waiting: gauge!(SEQUENCES_WAITING),
            preempted: gauge!(SEQUENCES_PREEMPTED),
            reservations: gauge!(RESERVATIONS),
            queued_rows: gauge!(QUEUED_ROWS),
        }
    }

    /// Publishes the engine's state, and what it has done since it started.
    pub(crate) fn load(&self, load: &EngineLoad) {
        let done = &load.done;
        self.preempted_rows.absolute(done.preempted_rows);
        self.cache_queries.absolute(done.cache_queried_tokens);
        self.cache_hits.absolute(done.cache_hit_tokens);
        self.cache_evictions.absolute(done.cache_evictions);
        self.free_blocks.set(f64::from(load.free_blocks));
        self.cached_blocks.set(f64::from(load.cached_blocks));
        self.owned_blocks.set(f64::from(load.owned_blocks));
        self.running.set(f64::from(load.running));
        self.waiting.set(f64::from(load.waiting));
        self.preempted.set(f64::from(load.preempted));
        self.reservations.set(f64::from(load.reservations));
        self.queued_rows.set(load.queued_tokens as f64);
    }

    /// A step is over. Said before anybody hears of its tokens: who has them finds them counted.
    pub(crate) fn step(&self, elapsed: Duration, step: &StepStats, preempted: usize) {
        self.step_seconds.record(elapsed.as_secs_f64());
        self.batch_size.record(f64::from(step.batch_size));
        self.rows.increment(step.rows.into());
        self.sampled.increment(step.sampled_tokens.into());
        self.preemptions.increment(preempted as u64);
    }

    pub(crate) fn audit_failed(&self) {
        self.audit_failures.increment(1);
    }
}
