//! Metric names of a node, and the functions that publish them.

use std::time::Duration;

/// Time of one engine step, in seconds.
pub const STEP_SECONDS: &str = "baton_engine_step_seconds";
/// Rows (tokens) computed by the engine.
pub const ROWS_TOTAL: &str = "baton_engine_rows_total";
/// Sequences that lost their blocks to another one and were computed again.
pub const PREEMPTIONS_TOTAL: &str = "baton_num_preemptions_total";
/// Jobs that coordinators have sent to this node, refused and cancelled ones included.
pub const JOBS_TOTAL: &str = "baton_node_jobs_total";

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
