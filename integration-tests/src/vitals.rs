//! What a cluster says about its own state: blocks, queues, jobs.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use runtime::clock::Clock;

use crate::cluster::{Cluster, metric};

/// What is to be logged is logged within this time.
const LOGGED_WITHIN: Duration = Duration::from_secs(10);
const BLOCKS: &str = "baton_node_blocks";

/// Blocks of a node, in the coordinator's words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// All.
    pub total: u64,
    /// Owned by nobody, by the node's last report: free, or kept only as prefix cache.
    pub unowned: u64,
    /// Booked by the coordinator.
    pub booked: u64,
}

/// A look at a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vitals {
    /// Blocks of each connected node.
    pub nodes: BTreeMap<String, Blocks>,
    /// Requests in the coordinator's queue.
    pub waiting: u64,
    /// Requests that nodes work on.
    pub running: u64,
}

impl Vitals {
    /// Reads the coordinator's metrics.
    pub async fn of(cluster: &Cluster) -> Result<Self> {
        let page = cluster.metrics().await?;
        let mut nodes: BTreeMap<String, Blocks> = BTreeMap::new();
        for line in page.lines().filter(|line| line.starts_with(BLOCKS)) {
            let (series, value) = line.rsplit_once(' ').context("a sample without a value")?;
            let value = value.parse::<f64>()? as u64;
            let node = label(series, "node").with_context(|| format!("no node in {series}"))?;
            let blocks = nodes.entry(node.to_owned()).or_default();
            match label(series, "kind") {
                Some("total") => blocks.total = value,
                Some("free" | "cached") => blocks.unowned += value,
                Some("booked") => blocks.booked = value,
                Some("owned") => {}
                other => bail!("unknown kind {other:?} in {series}"),
            }
        }
        // A node that is gone is told with zeros.
        nodes.retain(|_, blocks| blocks.total > 0);
        let count = |name| {
            metric(&page, name, &[])
                .map(|value| value as u64)
                .with_context(|| format!("no {name}"))
        };
        Ok(Self {
            nodes,
            waiting: count("baton_num_requests_waiting")?,
            running: count("baton_num_requests_running")?,
        })
    }

    /// True if nothing is going on and everything has been given back, on the given number of nodes.
    pub fn is_idle(&self, nodes: usize) -> bool {
        let free = |blocks: &Blocks| blocks.unowned == blocks.total && blocks.booked == 0;
        self.nodes.len() == nodes && self.nodes.values().all(free) && self.waiting == 0 && self.running == 0
    }
}

/// Waits until the cluster of `nodes` nodes is idle; says how long it took. An error holds what it still held.
pub async fn idle_within(cluster: &Cluster, nodes: usize, within: Duration) -> Result<Duration> {
    let start = Clock.now();
    loop {
        let asked = Clock.now();
        let vitals = Vitals::of(cluster).await?;
        if vitals.is_idle(nodes) {
            return Ok(asked - start);
        }
        ensure!(asked - start < within, "not idle within {within:?}: {vitals:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Requests in each of the coordinator's states that has some.
pub async fn states(cluster: &Cluster) -> Result<BTreeMap<String, f64>> {
    by_state(cluster, "baton_requests_in_state{").await
}

/// For each of the coordinator's states that has requests, how long the oldest has been in it, in seconds.
pub async fn oldest_in_state(cluster: &Cluster) -> Result<BTreeMap<String, f64>> {
    by_state(cluster, "baton_oldest_request_in_state_seconds{").await
}

async fn by_state(cluster: &Cluster, name: &str) -> Result<BTreeMap<String, f64>> {
    let page = cluster.metrics().await?;
    let mut states = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with(name)) {
        let (series, value) = line.rsplit_once(' ').context("a sample without a value")?;
        let state = label(series, "state").with_context(|| format!("no state in {series}"))?;
        let value = value.parse::<f64>()?;
        if value > 0.0 {
            states.insert(state.to_owned(), value);
        }
    }
    Ok(states)
}

fn label<'a>(series: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = series.split_once(&format!("{name}=\""))?;
    rest.split('"').next()
}

/// Waits until a process has logged a line with all of `words`; the line.
pub async fn logged(cluster: &mut Cluster, name: &str, words: &[&str]) -> Result<String> {
    let deadline = Clock.now() + LOGGED_WITHIN;
    loop {
        let log = cluster.process(name)?.log();
        if let Some(line) = log.lines().find(|line| words.iter().all(|word| line.contains(word))) {
            return Ok(line.to_owned());
        }
        ensure!(Clock.now() < deadline, "{name} has not logged {words:?}:\n{log}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
