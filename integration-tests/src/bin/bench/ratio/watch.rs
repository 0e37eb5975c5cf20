//! What the nodes do while they are under load, from their own metrics.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use integration_tests::cluster::metric;
use reqwest::Client;
use runtime::clock::Clock;
use tokio::sync::watch;

use super::contender::Running;

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(250);

/// What a pool, the nodes of one role, did on average.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Pool {
    /// Share of the time in which a node computed a step.
    pub(super) busy: f64,
    /// Rows (tokens) of a step.
    pub(super) rows: f64,
    /// Largest share of a node's KV blocks that sequences had.
    pub(super) kv_peak: f64,
}

/// What was seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Seen {
    /// By role.
    pub(super) pools: BTreeMap<&'static str, Pool>,
    /// Most requests in the coordinator's queue.
    pub(super) queue_peak: f64,
}

/// Counters of one node.
#[derive(Clone, Copy, Default)]
struct Counters {
    step_s: f64,
    steps: f64,
    rows: f64,
}

/// Looks at all processes of a cluster until `end` changes. Nothing is to be seen of another server.
pub(super) async fn watch(running: &Running, mut end: watch::Receiver<bool>) -> Result<Seen> {
    let client = Client::builder().timeout(Duration::from_secs(10)).build()?;
    let mut seen = Seen::default();
    if running.nodes.is_empty() {
        return Ok(seen);
    }
    let (from, before) = (Clock.now(), counters(&client, running).await?);
    let mut peaks = vec![0.0_f64; running.nodes.len()];
    loop {
        let over = tokio::time::timeout(INTERVAL, end.changed()).await.is_ok();
        for (node, peak) in running.nodes.iter().zip(&mut peaks) {
            *peak = peak.max(kv_use(&page(&client, &node.metrics).await?));
        }
        let coordinator = page(&client, &format!("{}/metrics", running.url)).await?;
        seen.queue_peak = seen.queue_peak.max(value(&coordinator, "baton_num_requests_waiting"));
        if over {
            break;
        }
    }
    let (seconds, after) = (from.elapsed().as_secs_f64(), counters(&client, running).await?);
    let mut sums: BTreeMap<&'static str, (Counters, f64, f64)> = BTreeMap::new();
    for (i, node) in running.nodes.iter().enumerate() {
        let (sum, nodes, peak) = sums.entry(node.role).or_default();
        sum.step_s += after[i].step_s - before[i].step_s;
        sum.steps += after[i].steps - before[i].steps;
        sum.rows += after[i].rows - before[i].rows;
        *nodes += 1.0;
        *peak = peak.max(peaks[i]);
    }
    let pool = |(sum, nodes, kv_peak): (Counters, f64, f64)| Pool {
        busy: sum.step_s / (seconds * nodes),
        rows: if sum.steps > 0.0 { sum.rows / sum.steps } else { 0.0 },
        kv_peak,
    };
    seen.pools = sums.into_iter().map(|(role, sum)| (role, pool(sum))).collect();
    Ok(seen)
}

async fn page(client: &Client, url: &str) -> Result<String> {
    Ok(client.get(url).send().await?.error_for_status()?.text().await?)
}

fn value(page: &str, name: &str) -> f64 {
    metric(page, name, &[]).unwrap_or(0.0)
}

async fn counters(client: &Client, running: &Running) -> Result<Vec<Counters>> {
    let mut all = Vec::new();
    for node in &running.nodes {
        let page = page(client, &node.metrics).await?;
        all.push(Counters {
            step_s: value(&page, "baton_engine_step_seconds_sum"),
            steps: value(&page, "baton_engine_step_seconds_count"),
            rows: value(&page, "baton_engine_rows_total"),
        });
    }
    Ok(all)
}

/// The share of a node's blocks that somebody has.
fn kv_use(page: &str) -> f64 {
    let of = |state: &str| metric(page, "baton_kv_blocks", &[&format!("state=\"{state}\"")]).unwrap_or(0.0);
    let owned = of("owned");
    let total = owned + of("free") + of("cached");
    if total > 0.0 { owned / total } else { 0.0 }
}
