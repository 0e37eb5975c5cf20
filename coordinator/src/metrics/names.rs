//! The names of metrics of requests and of the cluster, each with all that it goes by.

use crate::core::words;

/// Requests that came in, refused ones included.
pub const REQUESTS: [&str; 3] = ["baton_requests_total", "tgi_request_count", "request_received_total"];
/// Requests answered in full.
pub const SUCCESSES: [&str; 3] = [
    "baton_request_success_total",
    "tgi_request_success",
    "request_success_total",
];
/// Requests not answered; label `err` is TGI's error type, or `cancelled` if the client left.
pub const FAILURES: [&str; 3] = [
    "baton_request_failure_total",
    "tgi_request_failure",
    "request_failed_total",
];
/// Prompt tokens of admitted requests.
pub const PROMPT_TOKENS: [&str; 2] = ["baton_prompt_tokens_total", "prompt_tokens_total"];
/// Tokens handed to clients.
pub const GENERATION_TOKENS: [&str; 2] = ["baton_generation_tokens_total", "generation_tokens_total"];
/// Arrival to first token, in seconds.
pub const TTFT: [&str; 2] = ["baton_time_to_first_token_seconds", "time_to_first_token_seconds"];
/// Gap between two tokens, in seconds.
pub const ITL: [&str; 2] = ["baton_inter_token_latency_seconds", "time_per_output_token_seconds"];
/// Arrival to the end of the answer, all of it handed to the connection, in seconds.
pub const E2E: [&str; 3] = [
    "baton_e2e_request_latency_seconds",
    "e2e_request_latency_seconds",
    "tgi_request_duration",
];
/// The parts of [`E2E`], in seconds; label `phase`. Those of one request add up to it.
pub const PHASES: &str = "baton_request_phase_seconds";
/// Arrival to submission (reading, checking, tokenising), in seconds.
pub const VALIDATION: &str = "tgi_request_validation_duration";
/// Submission to the start of the prefill, in seconds.
pub const QUEUE: &str = "tgi_request_queue_duration";
/// Start of the prefill to the end of the answer, in seconds.
pub const INFERENCE: &str = "tgi_request_inference_duration";
/// [`INFERENCE`] per generated token, in seconds.
pub const TIME_PER_TOKEN: &str = "tgi_request_mean_time_per_token_duration";
/// Generated tokens of an answer.
pub const GENERATED: &str = "tgi_request_generated_tokens";
/// Prompt tokens of a request.
pub const INPUT_LENGTH: &str = "tgi_request_input_length";
/// Token limit of a request, after clamping.
pub const MAX_NEW_TOKENS: &str = "tgi_request_max_new_tokens";
/// Requests in the coordinator's queue.
pub const WAITING: [&str; 3] = ["baton_num_requests_waiting", "num_requests_waiting", "tgi_queue_size"];
/// Requests that nodes work on.
pub const RUNNING: [&str; 2] = ["baton_num_requests_running", "num_requests_running"];
/// Sequences in the decode nodes' batches.
pub const BATCH_SIZE: &str = "tgi_batch_current_size";
/// Tokens for which the sequences on decode nodes own KV blocks.
pub const BATCH_TOKENS: &str = "tgi_batch_current_max_tokens";
/// Steps of nodes while this coordinator watched; label `method`.
pub const BATCH_STEPS: &str = "tgi_batch_inference_count";
/// Connected nodes, label `role`.
pub const NODES: &str = "baton_nodes";
/// Bytes that the requests in the coordinator's queue are charged for.
pub const QUEUED_BYTES: &str = "baton_queued_bytes";
/// Sequences on decode nodes that had started and wait since they lost their blocks.
pub const SWAPPED: &str = "num_requests_swapped";
/// Preemptions on decode nodes while this coordinator watched.
pub const PREEMPTIONS: &str = "num_preemptions_total";
/// Part of the decode nodes' blocks that is owned, 0 to 1.
pub const CACHE_USAGE: &str = "npu_cache_usage_perc";
/// Part of the tokens found in the decode nodes' prefix caches, 0 to 1.
pub const CACHE_HIT_RATE: &str = "npu_prefix_cache_hit_rate";

/// Why a call has no complete answer, in TGI's words: values of the label `err`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It is wrong.
    Validation,
    /// There was no room for it.
    Overloaded,
    /// No node was there.
    Unavailable,
    /// The nodes failed.
    Generation,
    /// The answer stopped.
    Incomplete,
    /// It was a health check, which said no.
    Unhealthy,
    /// Its client went away.
    Cancelled,
}

impl Failure {
    words! {
        Validation => "validation",
        Overloaded => "overloaded",
        Unavailable => "unavailable",
        Generation => "generation",
        Incomplete => "incomplete_generation",
        Unhealthy => "healthcheck",
        Cancelled => "cancelled",
    }
}
