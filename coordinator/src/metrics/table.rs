//! What the names of this crate's metrics mean.

use runtime::measure::{ANSWERS, GAPS, Kind, Measure, TOKENS, WAITS};

use super::{
    BATCH_SIZE, BATCH_STEPS, BATCH_TOKENS, CACHE_HIT_RATE, CACHE_USAGE, E2E, FAILURES, GENERATED, GENERATION_TOKENS,
    INFERENCE, INPUT_LENGTH, ITL, MAX_NEW_TOKENS, NODES, PHASES, PREEMPTIONS, PROMPT_TOKENS, QUEUE, QUEUED_BYTES,
    REQUESTS, RUNNING, SUCCESSES, SWAPPED, TIME_PER_TOKEN, TTFT, VALIDATION, WAITING,
};
use crate::driver::telemetry;

const MODEL: &[&str] = &["model_name"];

/// The same under all of its names. Counters whose names are no counters' to Prometheus are shown without a type.
fn all(
    names: &[&'static str],
    kind: Kind,
    labels: &'static [&'static str],
    unit: &'static str,
    help: &'static str,
) -> Vec<Measure> {
    let one = |name: &&'static str| {
        let kind = if kind == Kind::Counter && !name.ends_with("_total") {
            Kind::Untyped
        } else {
            kind
        };
        Measure::new(kind, name, labels, unit, help)
    };
    names.iter().map(one).collect()
}

/// How many requests and tokens there were, as the HTTP layer sees them.
fn of_requests() -> Vec<Measure> {
    let failed = "Calls without a complete answer, by TGI's word for why; cancelled: the client left.";
    [
        all(
            &REQUESTS,
            Kind::Counter,
            MODEL,
            "calls",
            "Calls that came in for an answer, refused ones included.",
        ),
        all(&SUCCESSES, Kind::Counter, MODEL, "calls", "Calls answered in full."),
        all(&FAILURES, Kind::Counter, &["model_name", "err"], "calls", failed),
        all(
            &PROMPT_TOKENS,
            Kind::Counter,
            MODEL,
            "tokens",
            "Tokens of the prompts that were taken in.",
        ),
        all(
            &GENERATION_TOKENS,
            Kind::Counter,
            MODEL,
            "tokens",
            "Generated tokens handed to the answers, each once whatever happened to its nodes.",
        ),
    ]
    .concat()
}

/// How long requests take, and how large they are.
fn of_answers() -> Vec<Measure> {
    let seconds = |name, buckets, help| all(&[name], Kind::Histogram(buckets), MODEL, "seconds", help);
    let tokens = |name, help| all(&[name], Kind::Histogram(TOKENS), MODEL, "tokens", help);
    [
        all(
            &TTFT,
            Kind::Histogram(WAITS),
            MODEL,
            "seconds",
            "From the arrival of a call to its first token on the way to the client.",
        ),
        all(
            &ITL,
            Kind::Histogram(GAPS),
            MODEL,
            "seconds",
            "Gap between two tokens of a choice on their way to the client.",
        ),
        all(
            &E2E,
            Kind::Histogram(ANSWERS),
            MODEL,
            "seconds",
            "From the arrival of a call to the end of its answer, all of it handed to the connection.",
        ),
        all(
            &[PHASES],
            Kind::Histogram(WAITS),
            &["model_name", "phase"],
            "seconds",
            "The parts of the time of answered calls; those of one call add up to all of it.",
        ),
        seconds(
            VALIDATION,
            WAITS,
            "From the arrival of a call to its submission: read, checked, tokenised.",
        ),
        seconds(
            QUEUE,
            WAITS,
            "From the submission of a prompt to the start of its prefill.",
        ),
        seconds(
            INFERENCE,
            ANSWERS,
            "From the start of the prefill to the end of the answer.",
        ),
        seconds(
            TIME_PER_TOKEN,
            GAPS,
            "From the start of the prefill to the end of the answer, by token.",
        ),
        tokens(GENERATED, "Generated tokens of an answer, all choices together."),
        tokens(INPUT_LENGTH, "Prompt tokens of a call."),
        tokens(MAX_NEW_TOKENS, "Most tokens that a call may get, after every limit."),
    ]
    .concat()
}

/// Of the cluster, as the driver tells when somebody looks.
fn of_cluster() -> Vec<Measure> {
    let gauge = |name, unit, help| all(&[name], Kind::Gauge, MODEL, unit, help);
    [
        all(&WAITING, Kind::Gauge, MODEL, "requests", "Requests in the coordinator's queue."),
        all(&RUNNING, Kind::Gauge, MODEL, "requests", "Requests that nodes work on."),
        gauge(QUEUED_BYTES, "bytes", "Bytes that the requests in the coordinator's queue are charged for."),
        gauge(BATCH_SIZE, "sequences", "Sequences in the batches of the nodes that generate."),
        gauge(BATCH_TOKENS, "tokens", "Tokens for which there is room in the KV blocks owned on nodes that generate."),
        all(
            &[BATCH_STEPS],
            Kind::Counter,
            &["model_name", "method"],
            "steps",
            "Engine steps while this coordinator watched; prefill: of nodes that compute prompts only, decode: of others.",
        ),
        gauge(SWAPPED, "sequences", "Sequences that lost their KV blocks and wait to be computed again, on nodes that generate."),
        all(
            &[PREEMPTIONS],
            Kind::Counter,
            MODEL,
            "sequences",
            "Sequences that lost their KV blocks on nodes that generate, while this coordinator watched.",
        ),
        gauge(CACHE_USAGE, "ratio", "Part of the KV blocks owned on nodes that generate: 1 is all of them."),
        gauge(
            CACHE_HIT_RATE,
            "ratio",
            "Part of the tokens found in the prefix caches of the nodes that generate, since they started: what was not sent to them.",
        ),
        all(&[NODES], Kind::Gauge, &["role"], "nodes", "Connected nodes that serve a role; one that serves both counts for each."),
    ]
    .concat()
}

/// Everything that a coordinator's recorder has. What it tells about nodes and pools ([`super::nodes`]) is not in it.
pub fn measures() -> Vec<Measure> {
    [
        of_requests(),
        of_answers(),
        of_cluster(),
        telemetry::MEASURES.to_vec(),
        runtime::measure::measures(),
        discovery::REGISTERING.to_vec(),
    ]
    .concat()
}
