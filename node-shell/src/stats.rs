//! Metric names of a node, and the functions that publish them.

use std::time::Duration;

use engine::stats::EngineStats;

use crate::handle::EngineLoad;
use crate::memory::MemoryReport;

/// Time of one engine step, in seconds.
pub const STEP_SECONDS: &str = "baton_engine_step_seconds";
/// Rows (tokens) computed by the engine.
pub const ROWS_TOTAL: &str = "baton_engine_rows_total";
/// Sequences that lost their blocks to another one and were computed again.
pub const PREEMPTIONS_TOTAL: &str = "baton_num_preemptions_total";
/// Jobs that coordinators have sent to this node, refused and cancelled ones included.
pub const JOBS_TOTAL: &str = "baton_node_jobs_total";

/// KV blocks; label `state` is `free`, `cached` or `owned`.
pub const KV_BLOCKS: &str = "baton_kv_blocks";
/// Sequences in the running batch.
pub const SEQUENCES_RUNNING: &str = "baton_num_sequences_running";
/// Sequences that wait in the engine.
pub const SEQUENCES_WAITING: &str = "baton_num_sequences_waiting";
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

/// What the prefix cache has done since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheCounts {
    queried_tokens: u64,
    hit_tokens: u64,
    evictions: u64,
}

impl CacheCounts {
    pub(crate) fn new(stats: &EngineStats) -> Self {
        Self {
            queried_tokens: stats.cache_queried_tokens,
            hit_tokens: stats.cache_hit_tokens,
            evictions: stats.cache_evictions,
        }
    }
}

pub(crate) fn cache(before: &CacheCounts, now: &CacheCounts) {
    metrics::counter!(CACHE_QUERIES_TOTAL).increment(now.queried_tokens - before.queried_tokens);
    metrics::counter!(CACHE_HITS_TOTAL).increment(now.hit_tokens - before.hit_tokens);
    metrics::counter!(CACHE_EVICTIONS_TOTAL).increment(now.evictions - before.evictions);
}

/// Resident memory in bytes; label `part` is `weights`, `embedding`, `tables`, `kv_pool` or `other`. Their sum is all of it.
pub const MEMORY_BYTES: &str = "baton_memory_bytes";
/// Resident memory on huge pages, in bytes.
pub const MEMORY_HUGE_PAGES_BYTES: &str = "baton_memory_huge_pages_bytes";
/// What the KV pool takes once all of it has been used, in bytes.
pub const KV_POOL_BYTES: &str = "baton_kv_pool_bytes";

pub(crate) fn memory(report: &MemoryReport) {
    let parts = [
        ("weights", report.weights),
        ("embedding", report.embedding),
        ("tables", report.tables),
        ("kv_pool", report.kv_pool),
        ("other", report.other),
    ];
    for (part, bytes) in parts {
        metrics::gauge!(MEMORY_BYTES, "part" => part).set(bytes as f64);
    }
    metrics::gauge!(MEMORY_HUGE_PAGES_BYTES).set(report.huge_pages as f64);
    metrics::gauge!(KV_POOL_BYTES).set(report.kv_pool_size as f64);
}

pub(crate) fn load(load: &EngineLoad) {
    let blocks = [
        ("free", load.free_blocks),
        ("cached", load.cached_blocks),
        ("owned", load.owned_blocks),
    ];
    for (state, count) in blocks {
        metrics::gauge!(KV_BLOCKS, "state" => state).set(f64::from(count));
    }
    metrics::gauge!(SEQUENCES_RUNNING).set(f64::from(load.running));
    metrics::gauge!(SEQUENCES_WAITING).set(f64::from(load.waiting));
    metrics::gauge!(RESERVATIONS).set(f64::from(load.reservations));
}

pub(crate) fn audit_failed() {
    metrics::counter!(AUDIT_FAILURES_TOTAL).increment(1);
}

pub(crate) fn job() {
    metrics::counter!(JOBS_TOTAL).increment(1);
}

pub(crate) fn step(elapsed: Duration, rows: usize) {
    metrics::histogram!(STEP_SECONDS).record(elapsed.as_secs_f64());
    metrics::counter!(ROWS_TOTAL).increment(rows as u64);
}

pub(crate) fn preempted() {
    metrics::counter!(PREEMPTIONS_TOTAL).increment(1);
}
