//! How fast nodes work: the differences between what they had done some seconds ago and what they have done now.
//!
//! A rate is taken over the last ten seconds, or over as much of them as the node has been known for. It says nothing about a
//! node that has been known for less than half a second.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use protocol::control::WorkDone;
use protocol::ids::Role;

use super::types::{ClusterStatus, NodeStatus, PoolStatus, Rates, Watched};

/// Over how long rates are taken.
const WINDOW: Duration = Duration::from_secs(10);
/// Time between two remembered looks.
const BETWEEN: Duration = Duration::from_millis(500);

/// What a node had done at some moment.
#[derive(Clone, Copy, Debug)]
struct Look {
    at: Instant,
    steps: u64,
    done: WorkDone,
}

/// Remembers what nodes had done. Bounded: some twenty looks for each node that is connected.
#[derive(Debug, Default)]
pub struct Pace {
    nodes: BTreeMap<String, Looks>,
    watched: Watched,
}

/// What a node had done.
#[derive(Debug, Default)]
struct Looks {
    /// Those that are remembered, the oldest first.
    kept: VecDeque<Look>,
    last: Option<Look>,
}

impl Pace {
    /// Looks at the nodes: fills in their rates, and the pools.
    pub fn look(&mut self, now: Instant, status: &mut ClusterStatus) {
        self.nodes
            .retain(|name, _| status.nodes.iter().any(|node| node.node == *name));
        for node in &mut status.nodes {
            node.rates = self.rates(now, node);
        }
        status.pools = pools(&status.nodes);
        status.watched = self.watched;
    }

    fn rates(&mut self, now: Instant, node: &NodeStatus) -> Rates {
        let look = Look {
            at: now,
            steps: node.steps,
            done: node.done,
        };
        let looks = match self.nodes.get_mut(&node.node) {
            Some(looks) => looks,
            None => self.nodes.entry(node.node.clone()).or_default(),
        };
        // A process that was started again begins to count at 0.
        if looks.last.is_some_and(|last| look.steps < last.steps) {
            *looks = Looks::default();
        }
        if let Some(last) = looks.last.replace(look) {
            self.watched.add(node.role, &last, &look);
        }
        let looks = &mut looks.kept;
        while looks
            .get(1)
            .is_some_and(|second| now.saturating_duration_since(second.at) >= WINDOW)
        {
            looks.pop_front();
        }
        if looks
            .back()
            .is_none_or(|last| now.saturating_duration_since(last.at) >= BETWEEN)
        {
            looks.push_back(look);
        }
        let mut rates = looks.front().map_or_else(Rates::default, |first| between(first, &look));
        rates.cache_hit_rate = ratio(node.done.cache_hit_tokens, node.done.cache_queried_tokens);
        rates
    }
}

impl Watched {
    fn add(&mut self, role: Role, last: &Look, look: &Look) {
        let steps = look.steps.saturating_sub(last.steps);
        if role.may_act_as(Role::Decode) {
            self.decode_steps += steps;
            self.decode_preemptions += look.done.preemptions.saturating_sub(last.done.preemptions);
        } else {
            self.prefill_steps += steps;
        }
    }
}

fn between(first: &Look, last: &Look) -> Rates {
    let time = last.at.saturating_duration_since(first.at);
    if time < BETWEEN {
        return Rates::default();
    }
    let grown = |of: fn(&WorkDone) -> u64| of(&last.done).saturating_sub(of(&first.done)) as f64;
    let steps = last.steps.saturating_sub(first.steps) as f64;
    let of_a_step = |sum: f64| if steps > 0.0 { sum / steps } else { 0.0 };
    let seconds = time.as_secs_f64();
    Rates {
        steps_per_second: steps / seconds,
        step_seconds: of_a_step(grown(|done| done.step_us) / 1e6),
        batch_size: of_a_step(grown(|done| done.batched_sequences)),
        computed_tokens_per_second: grown(|done| done.rows) / seconds,
        tokens_per_second: grown(|done| done.sampled_tokens) / seconds,
        sent_bytes_per_second: grown(|done| done.sent_bytes) / seconds,
        received_bytes_per_second: grown(|done| done.received_bytes) / seconds,
        preemptions_per_second: grown(|done| done.preemptions) / seconds,
        cache_hit_rate: None,
    }
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// The pools of `nodes`, which are in the order of their roles.
fn pools(nodes: &[NodeStatus]) -> Vec<PoolStatus> {
    nodes.chunk_by(|a, b| a.role == b.role).filter_map(pool).collect()
}

/// What the nodes of one role do together; `None` if there are none.
fn pool(nodes: &[NodeStatus]) -> Option<PoolStatus> {
    let sum = |of: fn(&NodeStatus) -> u64| nodes.iter().map(of).sum::<u64>();
    let rate = |of: fn(&Rates) -> f64| nodes.iter().map(|node| of(&node.rates)).sum::<f64>();
    let steps = rate(|rates| rates.steps_per_second);
    let of_a_step = |sum: f64| if steps > 0.0 { sum / steps } else { 0.0 };
    Some(PoolStatus {
        role: nodes.first()?.role,
        nodes: u32::try_from(nodes.len()).unwrap_or(u32::MAX),
        total_blocks: sum(|node| node.total_blocks.into()),
        free_blocks: sum(|node| node.free_blocks.into()),
        cached_blocks: sum(|node| node.cached_blocks.into()),
        owned_blocks: sum(|node| node.owned_blocks.into()),
        booked_blocks: sum(|node| node.booked_blocks.into()),
        jobs: sum(|node| node.jobs.into()),
        running: sum(|node| node.running.into()),
        waiting: sum(|node| node.waiting.into()),
        preempted: sum(|node| node.preempted.into()),
        queued_tokens: sum(|node| node.queued_tokens),
        oldest_wait: nodes.iter().map(|node| node.oldest_wait).max().unwrap_or_default(),
        rates: Rates {
            steps_per_second: steps,
            step_seconds: of_a_step(rate(|rates| rates.step_seconds * rates.steps_per_second)),
            batch_size: of_a_step(rate(|rates| rates.batch_size * rates.steps_per_second)),
            computed_tokens_per_second: rate(|rates| rates.computed_tokens_per_second),
            tokens_per_second: rate(|rates| rates.tokens_per_second),
            sent_bytes_per_second: rate(|rates| rates.sent_bytes_per_second),
            received_bytes_per_second: rate(|rates| rates.received_bytes_per_second),
            preemptions_per_second: rate(|rates| rates.preemptions_per_second),
            cache_hit_rate: ratio(
                sum(|node| node.done.cache_hit_tokens),
                sum(|node| node.done.cache_queried_tokens),
            ),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::fixtures::node_status;
    use crate::origin::origin;

    /// A node that has done so much.
    fn node(name: &str, role: Role, steps: u64) -> NodeStatus {
        NodeStatus {
            steps,
            done: WorkDone {
                step_us: 20_000 * steps,
                batched_sequences: 4 * steps,
                rows: 8 * steps,
                sampled_tokens: 3 * steps,
                cache_queried_tokens: 10 * steps,
                cache_hit_tokens: 4 * steps,
                sent_bytes: 1_000 * steps,
                ..WorkDone::default()
            },
            ..node_status(name, role)
        }
    }

    /// Looks at nodes at moments of one time.
    struct Moments {
        pace: Pace,
        start: Instant,
    }

    impl Moments {
        fn new() -> Self {
            Self {
                pace: Pace::default(),
                start: origin(),
            }
        }

        fn look(&mut self, after: Duration, nodes: Vec<NodeStatus>) -> ClusterStatus {
            let mut status = ClusterStatus {
                nodes,
                ..ClusterStatus::default()
            };
            self.pace.look(self.start + after, &mut status);
            status
        }
    }

    #[test]
    fn rates_are_those_of_the_last_seconds() {
        let mut looks = Moments::new();
        let at = |tenths: u64| Duration::from_millis(100 * tenths);
        // 50 steps a second for 20 seconds, then none.
        for tenths in 0..200 {
            looks.look(at(tenths), vec![node("d0", Role::Decode, 5 * tenths)]);
        }
        let told = looks.look(at(200), vec![node("d0", Role::Decode, 1_000)]).nodes[0].rates;
        for (told, right) in [
            (told.steps_per_second, 50.0),
            (told.step_seconds, 0.02),
            (told.batch_size, 4.0),
            (told.computed_tokens_per_second, 400.0),
            (told.tokens_per_second, 150.0),
            (told.sent_bytes_per_second, 50_000.0),
            (told.cache_hit_rate.unwrap_or_default(), 0.4),
        ] {
            assert!((told - right).abs() < 1e-6 * right, "{told} is not {right}");
        }
        assert!(
            looks.pace.nodes["d0"].kept.len() <= 22,
            "{}",
            looks.pace.nodes["d0"].kept.len()
        );
        for tenths in 201..305 {
            looks.look(at(tenths), vec![node("d0", Role::Decode, 1_000)]);
        }
        let told = looks.look(at(305), vec![node("d0", Role::Decode, 1_000)]).nodes[0].rates;
        assert_eq!((told.tokens_per_second, told.step_seconds), (0.0, 0.0));
        assert_eq!(told.cache_hit_rate, Some(0.4));
    }

    #[test]
    fn a_node_that_is_new_or_started_again_has_no_rate_yet_and_one_that_is_gone_is_forgotten() {
        let mut looks = Moments::new();
        let second = Duration::from_secs(1);
        looks.look(second, vec![node("p0", Role::Prefill, 100)]);
        let known = looks.look(2 * second, vec![node("p0", Role::Prefill, 150)]);
        assert!((known.nodes[0].rates.steps_per_second - 50.0).abs() < 1e-9);
        let again = looks.look(3 * second, vec![node("p0", Role::Prefill, 7)]);
        assert_eq!(again.nodes[0].rates.steps_per_second, 0.0);
        assert_eq!(
            again.watched.prefill_steps, 50,
            "what it did before it was known is not counted"
        );
        let gone = looks.look(4 * second, Vec::new());
        assert_eq!(gone.watched.prefill_steps, 50);
        assert!(looks.pace.nodes.is_empty());
    }

    #[test]
    fn a_pool_is_the_sum_of_its_nodes_and_its_step_the_mean_one() {
        let mut looks = Moments::new();
        let nodes = |prefill: u64, first: u64, second: u64| {
            let mut slow = node("d1", Role::Decode, second);
            slow.done.step_us *= 4;
            (slow.running, slow.oldest_wait) = (3, Duration::from_millis(70));
            vec![
                node("p0", Role::Prefill, prefill),
                node("d0", Role::Decode, first),
                slow,
            ]
        };
        looks.look(Duration::ZERO, nodes(0, 0, 0));
        let status = looks.look(Duration::from_secs(2), nodes(10, 60, 20));
        let roles: Vec<(Role, u32)> = status.pools.iter().map(|pool| (pool.role, pool.nodes)).collect();
        assert_eq!(roles, [(Role::Prefill, 1), (Role::Decode, 2)]);
        let decode = &status.pools[1];
        assert_eq!((decode.running, decode.oldest_wait), (3, Duration::from_millis(70)));
        assert!((decode.rates.tokens_per_second - 120.0).abs() < 1e-9);
        // 60 steps of 20 ms and 20 of 80 ms.
        assert!((decode.rates.step_seconds - 0.035).abs() < 1e-9);
        assert_eq!(decode.rates.cache_hit_rate, Some(0.4));
    }
}
