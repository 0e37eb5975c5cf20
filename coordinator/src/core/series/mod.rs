//! The last minutes as numbers: what a page that is opened now draws of the time before, and what has just been.
//!
//! Somebody takes samples at a steady pace: totals that only grow, and the cluster as it is. A sample becomes a point, rates
//! being what was added since the sample before. Points and nodes that are remembered are bounded.

pub mod latency;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use protocol::ids::Role;

use self::latency::Counts;
use super::types::{ClusterStatus, NodeStatus};

/// Most nodes that are remembered after they have gone.
const MOST_GONE: usize = 256;

/// Totals since the beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Requests answered in full.
    pub answered: u64,
    /// Requests not answered, those among them whose clients left.
    pub failed: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Tokens handed to clients.
    pub generated_tokens: u64,
    /// Arrival to first token.
    pub ttft: Counts,
    /// Gaps between tokens.
    pub itl: Counts,
}

/// What a second brought.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Requests answered in full.
    pub answered: f64,
    /// Requests not answered.
    pub failed: f64,
    /// Prompt tokens.
    pub prompt_tokens: f64,
    /// Tokens handed to clients.
    pub generated_tokens: f64,
}

/// The quantiles that are told: the half, nine tenths and 99 hundredths.
pub const QUANTILES: [f64; 3] = [0.5, 0.9, 0.99];
/// The roles of nodes.
pub const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

/// Times in a window: [`QUANTILES`] of them. `None` if there were none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// The quantiles.
    pub quantiles: Option<[Duration; 3]>,
    /// How many times there were.
    pub count: u64,
}

/// One moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// When.
    pub at: Instant,
    /// Requests in the coordinator's queue.
    pub queued: usize,
    /// Requests that nodes work on.
    pub running: usize,
    /// What a second brought, since the point before.
    pub rates: Rates,
    /// Arrival to first token, in the window before.
    pub ttft: Spread,
    /// Gaps between tokens, in the window before.
    pub itl: Spread,
    /// Share of the KV blocks in use (neither free nor only cached), of the nodes of each of [`ROLES`]; `None` without nodes.
    pub kv_used: [Option<f64>; 3],
}

/// A node that was here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gone {
    /// Its name.
    pub node: String,
    /// What it did.
    pub role: Role,
    /// For how long it has not been seen.
    pub since: Duration,
}

/// How much is kept.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Points that are kept.
    pub points: usize,
    /// Samples that quantiles and recent rates are taken over.
    pub window: usize,
}

/// See the head of the file.
#[derive(Debug)]
pub struct Series {
    shape: Shape,
    points: VecDeque<Point>,
    /// Number of the first point that is kept, counted from the beginning.
    first: u64,
    /// The last samples, the newest last: one more than the window.
    samples: VecDeque<(Instant, Totals)>,
    /// When each node was last seen.
    seen: BTreeMap<String, (Role, Instant)>,
}

impl Series {
    /// Begins with totals of 0.
    pub fn new(now: Instant, shape: Shape) -> Self {
        Self {
            shape,
            points: VecDeque::new(),
            first: 0,
            samples: VecDeque::from([(now, Totals::default())]),
            seen: BTreeMap::new(),
        }
    }

    /// A sample.
    pub fn push(&mut self, now: Instant, totals: Totals, status: &ClusterStatus) {
        let rates = self.samples.back().map_or_else(Rates::default, |(at, before)| {
            rates(before, &totals, now.saturating_duration_since(*at))
        });
        self.samples.push_back((now, totals));
        while self.samples.len() > self.shape.window + 1 {
            self.samples.pop_front();
        }
        let (ttft, itl) = self.spreads();
        if self.points.len() >= self.shape.points {
            self.points.pop_front();
            self.first += 1;
        }
        self.points.push_back(Point {
            at: now,
            queued: status.queued,
            running: status.running,
            rates,
            ttft,
            itl,
            kv_used: ROLES.map(|role| used(status.nodes.iter().filter(|node| node.role == role))),
        });
        self.see(now, status);
    }

    fn see(&mut self, now: Instant, status: &ClusterStatus) {
        for node in &status.nodes {
            self.seen.insert(node.node.clone(), (node.role, now));
        }
        // Those whose last moment has left the picture are forgotten, and the oldest if there are too many.
        let oldest = self.points.front().map_or(now, |point| point.at);
        self.seen.retain(|_, (_, at)| *at >= oldest);
        while self.seen.len() > status.nodes.len() + MOST_GONE {
            let longest = self.seen.iter().min_by_key(|(_, (_, at))| *at);
            let Some(name) = longest.map(|(name, _)| name.clone()) else {
                break;
            };
            self.seen.remove(&name);
        }
    }

    /// The points from number `since` on that are kept, and the number of the first of them.
    pub fn since(&self, since: u64) -> (u64, impl Iterator<Item = &Point>) {
        let skipped = since.saturating_sub(self.first).min(self.points.len() as u64);
        (self.first + skipped, self.points.iter().skip(skipped as usize))
    }

    /// Number of the point that comes next.
    pub fn next(&self) -> u64 {
        self.first + self.points.len() as u64
    }

    /// What a second brought, over the window, and how long that is.
    pub fn recent(&self) -> (Rates, Duration) {
        match (self.samples.front(), self.samples.back()) {
            (Some((from, before)), Some((to, after))) => {
                let time = to.saturating_duration_since(*from);
                (rates(before, after, time), time)
            }
            _ => (Rates::default(), Duration::ZERO),
        }
    }

    /// Arrival to first token and gaps between tokens, over the window.
    pub fn spreads(&self) -> (Spread, Spread) {
        match (self.samples.front(), self.samples.back()) {
            (Some((_, before)), Some((_, after))) => (
                spread(&after.ttft.since(&before.ttft)),
                spread(&after.itl.since(&before.itl)),
            ),
            _ => (Spread::default(), Spread::default()),
        }
    }

    /// Nodes that were here while the points lasted, and are not connected according to `status`.
    pub fn gone(&self, now: Instant, status: &ClusterStatus) -> Vec<Gone> {
        let here = |name: &str| status.nodes.iter().any(|node| node.node == name);
        let away = self.seen.iter().filter(|(name, _)| !here(name));
        away.map(|(name, (role, at))| Gone {
            node: name.clone(),
            role: *role,
            since: now.saturating_duration_since(*at),
        })
        .collect()
    }
}

fn rates(before: &Totals, after: &Totals, time: Duration) -> Rates {
    if time.is_zero() {
        return Rates::default();
    }
    let rate = |from: u64, to: u64| to.saturating_sub(from) as f64 / time.as_secs_f64();
    Rates {
        answered: rate(before.answered, after.answered),
        failed: rate(before.failed, after.failed),
        prompt_tokens: rate(before.prompt_tokens, after.prompt_tokens),
        generated_tokens: rate(before.generated_tokens, after.generated_tokens),
    }
}

fn spread(counts: &Counts) -> Spread {
    let [half, most, nearly_all] = QUANTILES.map(|q| counts.quantile(q));
    let quantiles = match (half, most, nearly_all) {
        (Some(half), Some(most), Some(nearly_all)) => Some([half, most, nearly_all]),
        _ => None,
    };
    Spread {
        quantiles,
        count: counts.total(),
    }
}

/// Share of the nodes' blocks in use; `None` if there are no blocks.
fn used<'a>(nodes: impl Iterator<Item = &'a NodeStatus>) -> Option<f64> {
    let (mut total, mut idle) = (0, 0);
    for node in nodes {
        total += u64::from(node.total_blocks);
        idle += u64::from(node.free_blocks) + u64::from(node.cached_blocks);
    }
    (total > 0).then(|| total.saturating_sub(idle) as f64 / total as f64)
}

#[cfg(test)]
mod tests;
