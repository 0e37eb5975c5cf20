//! What `/metrics` tells about nodes and pools: written anew for each scrape from what the driver says, so that a node that has gone
//! is told no more, and nothing has to be taken back.

use std::fmt::Write;

use runtime::measure::{Kind, Measure};

use crate::core::types::{ClusterStatus, NodeStatus, PoolStatus};

/// A metric of each node, or of each pool: one sample for each of `samples`, which have one more label if there are several.
pub struct Family<T: 'static> {
    /// What it is.
    pub measure: Measure,
    /// Value of the last label, and the value of the sample; `None`: there is none now.
    samples: &'static [Sample<T>],
}

type Sample<T> = (&'static str, fn(&T) -> Option<f64>);

const NODE: &[&str] = &["node", "role"];
const POOL: &[&str] = &["role"];
/// With this label there are several samples.
const KIND: &str = "kind";

const fn gauge<T: 'static>(
    labels: &'static [&'static str],
    name: &'static str,
    unit: &'static str,
    help: &'static str,
    samples: &'static [Sample<T>],
) -> Family<T> {
    let measure = Measure::gauge(name, labels, unit, help);
    Family { measure, samples }
}

const fn of_node(
    name: &'static str,
    unit: &'static str,
    help: &'static str,
    samples: &'static [Sample<NodeStatus>],
) -> Family<NodeStatus> {
    gauge(NODE, name, unit, help, samples)
}

const fn of_pool(
    name: &'static str,
    unit: &'static str,
    help: &'static str,
    samples: &'static [Sample<PoolStatus>],
) -> Family<PoolStatus> {
    gauge(POOL, name, unit, help, samples)
}

const fn total(
    name: &'static str,
    unit: &'static str,
    help: &'static str,
    samples: &'static [Sample<NodeStatus>],
) -> Family<NodeStatus> {
    let measure = Measure::counter(name, NODE, unit, help);
    Family { measure, samples }
}

fn number(value: impl Into<f64>) -> Option<f64> {
    Some(value.into())
}

fn count(value: u64) -> Option<f64> {
    Some(value as f64)
}

/// What there is to say about each node.
pub const OF_NODES: &[Family<NodeStatus>] = &[
    gauge(
        &["node", "role", KIND],
        "baton_node_blocks",
        "blocks",
        "KV blocks of a node: total = free + cached + owned by its last report; booked is what this coordinator counts on.",
        &[
            ("total", |node| number(node.total_blocks)),
            ("free", |node| number(node.free_blocks)),
            ("cached", |node| number(node.cached_blocks)),
            ("owned", |node| number(node.owned_blocks)),
            ("booked", |node| number(node.booked_blocks)),
        ],
    ),
    of_node(
        "baton_node_jobs",
        "jobs",
        "Jobs of this coordinator on a node.",
        &[("", |node| number(node.jobs))],
    ),
    of_node(
        "baton_node_running_sequences",
        "sequences",
        "Sequences in the running batch of a node.",
        &[("", |node| number(node.running))],
    ),
    of_node(
        "baton_node_waiting_sequences",
        "sequences",
        "Sequences that wait in the engine of a node.",
        &[("", |node| number(node.waiting))],
    ),
    of_node(
        "baton_node_preempted_sequences",
        "sequences",
        "Sequences among those that wait on a node which had started and lost their KV blocks.",
        &[("", |node| number(node.preempted))],
    ),
    of_node(
        "baton_node_queued_tokens",
        "tokens",
        "Tokens that a node has to compute before each of its sequences has its next one.",
        &[("", |node| count(node.queued_tokens))],
    ),
    of_node(
        "baton_node_oldest_wait_seconds",
        "seconds",
        "How long the sequence that is first in a node's line had waited when it last reported.",
        &[("", |node| number(node.oldest_wait.as_secs_f64()))],
    ),
    of_node(
        "baton_node_reservations",
        "reservations",
        "KV block reservations of a node that wait for their KV.",
        &[("", |node| number(node.reservations))],
    ),
    of_node(
        "baton_node_stalled",
        "1 or 0",
        "Whether a node does not get on with its work, or says nothing.",
        &[("", |node| number(u8::from(node.stalled)))],
    ),
    of_node(
        "baton_node_breaker_open",
        "1, 0.5 or 0",
        "Whether a node gets no jobs because those that it had failed: 1 none, 0.5 one to try it, 0 it gets jobs.",
        &[("", |node| number(breaker(node.breaker)))],
    ),
    of_node(
        "baton_node_draining",
        "1 or 0",
        "Whether a node takes no new jobs and finishes those that run.",
        &[("", |node| number(u8::from(node.draining)))],
    ),
    of_node(
        "baton_node_step_time_seconds",
        "seconds",
        STEP_TIME,
        &[("", |node| number(node.rates.step_seconds))],
    ),
    of_node(
        "baton_node_batch_size",
        "sequences",
        BATCH,
        &[("", |node| number(node.rates.batch_size))],
    ),
    of_node(
        "baton_node_tokens_per_second",
        "tokens/second",
        SAMPLED,
        &[("", |node| number(node.rates.tokens_per_second))],
    ),
    of_node(
        "baton_node_computed_tokens_per_second",
        "tokens/second",
        COMPUTED,
        &[("", |node| number(node.rates.computed_tokens_per_second))],
    ),
    of_node(
        "baton_node_sent_bytes_per_second",
        "bytes/second",
        SENT,
        &[("", |node| number(node.rates.sent_bytes_per_second))],
    ),
    of_node(
        "baton_node_received_bytes_per_second",
        "bytes/second",
        RECEIVED,
        &[("", |node| number(node.rates.received_bytes_per_second))],
    ),
    of_node(
        "baton_node_prefix_cache_hit_ratio",
        "ratio",
        HITS,
        &[("", |node| node.rates.cache_hit_rate)],
    ),
    total(
        "baton_node_steps_total",
        "steps",
        "Engine steps of a node.",
        &[("", |node| count(node.steps))],
    ),
    total(
        "baton_node_step_seconds_total",
        "seconds",
        "Time of the engine steps of a node.",
        &[("", |node| number(node.done.step_us as f64 / 1e6))],
    ),
    total(
        "baton_node_batched_sequences_total",
        "sequences",
        "Sequences that the engine steps of a node advanced, summed over the steps.",
        &[("", |node| count(node.done.batched_sequences))],
    ),
    total(
        "baton_node_computed_tokens_total",
        "tokens",
        "Tokens that a node computed: those of prompts, and one for each that was generated behind them.",
        &[("", |node| count(node.done.rows))],
    ),
    total(
        "baton_node_sampled_tokens_total",
        "tokens",
        "Tokens that a node sampled.",
        &[("", |node| count(node.done.sampled_tokens))],
    ),
    total(
        "baton_node_preemptions_total",
        "sequences",
        "Sequences of a node that lost their KV blocks to older ones.",
        &[("", |node| count(node.done.preemptions))],
    ),
    total(
        "baton_node_preempted_tokens_total",
        "tokens",
        "Tokens that a node computed for nothing, since their sequences lost the KV blocks.",
        &[("", |node| count(node.done.preempted_rows))],
    ),
    total(
        "baton_node_prefix_cache_queries_total",
        "tokens",
        "Tokens for which the prefix cache of a node was asked.",
        &[("", |node| count(node.done.cache_queried_tokens))],
    ),
    total(
        "baton_node_prefix_cache_hits_total",
        "tokens",
        "Tokens of these whose KV was there.",
        &[("", |node| count(node.done.cache_hit_tokens))],
    ),
    total(
        "baton_node_prefix_cache_evictions_total",
        "blocks",
        "Cached KV blocks of a node that were given away because others needed the room.",
        &[("", |node| count(node.done.cache_evictions))],
    ),
    total(
        "baton_node_sent_bytes_total",
        "bytes",
        "KV payload that a node has sent to others, repeats included.",
        &[("", |node| count(node.done.sent_bytes))],
    ),
    total(
        "baton_node_received_bytes_total",
        "bytes",
        "KV payload from others that a node has written into its blocks.",
        &[("", |node| count(node.done.received_bytes))],
    ),
];

/// What there is to say about each pool. Nothing of it grows for ever: the sum over nodes would fall when one of them goes.
pub const OF_POOLS: &[Family<PoolStatus>] = &[
    of_pool(
        "baton_pool_nodes",
        "nodes",
        "Connected nodes of a role; those that serve both roles are a pool of their own.",
        &[("", |pool| number(pool.nodes))],
    ),
    gauge(
        &["role", KIND],
        "baton_pool_blocks",
        "blocks",
        "KV blocks of a pool, by kind as of its nodes.",
        &[
            ("total", |pool| count(pool.total_blocks)),
            ("free", |pool| count(pool.free_blocks)),
            ("cached", |pool| count(pool.cached_blocks)),
            ("owned", |pool| count(pool.owned_blocks)),
            ("booked", |pool| count(pool.booked_blocks)),
        ],
    ),
    of_pool(
        "baton_pool_jobs",
        "jobs",
        "Jobs of this coordinator on a pool.",
        &[("", |pool| count(pool.jobs))],
    ),
    of_pool(
        "baton_pool_running_sequences",
        "sequences",
        "Sequences in the running batches of a pool.",
        &[("", |pool| count(pool.running))],
    ),
    of_pool(
        "baton_pool_waiting_sequences",
        "sequences",
        "Sequences that wait in the engines of a pool.",
        &[("", |pool| count(pool.waiting))],
    ),
    of_pool(
        "baton_pool_preempted_sequences",
        "sequences",
        "Sequences among those that wait in a pool which had started and lost their KV blocks.",
        &[("", |pool| count(pool.preempted))],
    ),
    of_pool(
        "baton_pool_queued_tokens",
        "tokens",
        "Tokens that a pool has to compute before each of its sequences has its next one.",
        &[("", |pool| count(pool.queued_tokens))],
    ),
    of_pool(
        "baton_pool_oldest_wait_seconds",
        "seconds",
        "The longest wait among the nodes of a pool.",
        &[("", |pool| number(pool.oldest_wait.as_secs_f64()))],
    ),
    of_pool(
        "baton_pool_step_time_seconds",
        "seconds",
        STEP_TIME,
        &[("", |pool| number(pool.rates.step_seconds))],
    ),
    of_pool(
        "baton_pool_batch_size",
        "sequences",
        BATCH,
        &[("", |pool| number(pool.rates.batch_size))],
    ),
    of_pool(
        "baton_pool_tokens_per_second",
        "tokens/second",
        SAMPLED,
        &[("", |pool| number(pool.rates.tokens_per_second))],
    ),
    of_pool(
        "baton_pool_computed_tokens_per_second",
        "tokens/second",
        COMPUTED,
        &[("", |pool| number(pool.rates.computed_tokens_per_second))],
    ),
    of_pool(
        "baton_pool_sent_bytes_per_second",
        "bytes/second",
        SENT,
        &[("", |pool| number(pool.rates.sent_bytes_per_second))],
    ),
    of_pool(
        "baton_pool_received_bytes_per_second",
        "bytes/second",
        RECEIVED,
        &[("", |pool| number(pool.rates.received_bytes_per_second))],
    ),
    of_pool(
        "baton_pool_prefix_cache_hit_ratio",
        "ratio",
        HITS,
        &[("", |pool| pool.rates.cache_hit_rate)],
    ),
];

// The same of nodes and of pools.
const STEP_TIME: &str = "Mean time of an engine step over the last 10 seconds; 0 if there was none.";
const BATCH: &str = "Mean number of sequences in an engine step over the last 10 seconds; 0 if there was none.";
const SAMPLED: &str = "Tokens sampled a second, over the last 10 seconds.";
const COMPUTED: &str = "Tokens computed a second, prompts included, over the last 10 seconds.";
const SENT: &str = "KV payload sent to other nodes a second, over the last 10 seconds.";
const RECEIVED: &str = "KV payload from other nodes a second, over the last 10 seconds.";
const HITS: &str = "Part of the tokens found in the prefix cache, of those it was asked for since the nodes started.";

fn breaker(state: &str) -> f64 {
    match state {
        "closed" => 0.0,
        "half_open" => 0.5,
        _ => 1.0,
    }
}

/// The text of these metrics, in the Prometheus text format.
pub fn render(status: &ClusterStatus) -> String {
    let mut page = String::with_capacity(4_096 * (1 + status.nodes.len()));
    for family in OF_NODES {
        let labels = |node: &NodeStatus| format!("node=\"{}\",role=\"{}\"", escaped(&node.node), node.role.as_str());
        write_family(&mut page, family, &status.nodes, labels);
    }
    for family in OF_POOLS {
        let labels = |pool: &PoolStatus| format!("role=\"{}\"", pool.role.as_str());
        write_family(&mut page, family, &status.pools, labels);
    }
    page
}

fn write_family<T: 'static>(page: &mut String, family: &Family<T>, all: &[T], labels: impl Fn(&T) -> String) {
    let Measure { name, kind, help, .. } = family.measure;
    let word = match kind {
        Kind::Counter => "counter",
        _ => "gauge",
    };
    // Writing to a string cannot fail.
    let _written = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {word}");
    for one in all {
        let labels = labels(one);
        for (last, value) in family.samples {
            let Some(value) = value(one) else { continue };
            let _written = if last.is_empty() {
                writeln!(page, "{name}{{{labels}}} {value}")
            } else {
                writeln!(page, "{name}{{{labels},{KIND}=\"{last}\"}} {value}")
            };
        }
    }
    page.push('\n');
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use protocol::ids::Role;

    use super::*;
    use crate::core::fixtures::node_status;

    #[test]
    fn nodes_are_told_while_they_are_there_and_names_are_escaped() {
        let mut node = node_status("d\"0\\", Role::Decode);
        (node.breaker, node.done.step_us) = ("half_open", 1_500_000);
        let status = ClusterStatus {
            nodes: vec![node],
            ..ClusterStatus::default()
        };
        let page = render(&status);
        let labels = r#"{node="d\"0\\",role="decode"}"#;
        for told in [
            format!("\nbaton_node_breaker_open{labels} 0.5\n"),
            format!("# TYPE baton_node_step_seconds_total counter\nbaton_node_step_seconds_total{labels} 1.5\n"),
            "baton_node_blocks{node=\"d\\\"0\\\\\",role=\"decode\",kind=\"free\"} 8\n".to_owned(),
        ] {
            assert!(page.contains(&told), "{told} is not in:\n{page}");
        }
        // It was never asked.
        assert!(!page.contains("baton_node_prefix_cache_hit_ratio{"), "{page}");
        let empty = render(&ClusterStatus::default());
        assert!(
            !empty.contains("node=") && empty.contains("# TYPE baton_node_jobs gauge"),
            "{empty}"
        );
    }

    #[test]
    fn no_name_is_told_twice() {
        let page = render(&ClusterStatus::default());
        let mut names: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        assert!(all > 30);
    }
}
