//! Nodes whose role is switched, and nodes that are emptied, under load: no request is lost, no answer is another one.

use std::time::Duration;

use anyhow::{Result, ensure};
use integration_tests::cluster::{Cluster, ClusterSpec, metric};
use integration_tests::trial::{IDLE_WITHIN, WORKERS, begin_with, pause, spec};
use integration_tests::vitals::idle_within;
use runtime::clock::Clock;
use serde_json::json;

/// An order is shown by the node's own reports within this time.
const SHOWN_WITHIN: Duration = Duration::from_secs(5);

async fn role(cluster: &Cluster, node: &str, role: &str) -> Result<()> {
    let body = json!({ "role": role }).to_string();
    let (status, answer) = cluster.admin(0, "POST", &format!("/nodes/{node}/role"), &body).await?;
    ensure!(status == 202, "{status}: {answer}");
    shows(cluster, node, |shown| shown["role"] == role).await
}

async fn shows(cluster: &Cluster, node: &str, wanted: impl Fn(&serde_json::Value) -> bool) -> Result<()> {
    let deadline = Clock.now() + SHOWN_WITHIN;
    loop {
        let (_, shown) = cluster.admin(0, "GET", &format!("/nodes/{node}"), "").await?;
        if wanted(&shown) {
            return Ok(());
        }
        ensure!(Clock.now() < deadline, "still {shown}");
        pause(10).await;
    }
}

fn switchable(nodes: usize) -> ClusterSpec {
    ClusterSpec {
        both: nodes,
        ..spec(0, 0)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn roles_are_switched_under_load_without_a_lost_request() -> Result<()> {
    let (cluster, client, known) = begin_with(switchable(3), 51, 80, (1, 150)).await?;
    let pids = node_pids(&cluster).await?;
    let load = known.load(&client, &cluster.url(), WORKERS);
    for (first, second, third) in [
        ("prefill", "decode", "both"),
        ("decode", "prefill", "both"),
        ("both", "prefill", "decode"),
        ("decode", "both", "prefill"),
        ("prefill", "decode", "decode"),
        ("both", "both", "both"),
    ] {
        // Never without a node for each role: who takes over is there before who leaves has left.
        for node in ["both-0", "both-1", "both-2"] {
            role(&cluster, node, "both").await?;
        }
        for (node, to) in [("both-0", first), ("both-1", second), ("both-2", third)] {
            role(&cluster, node, to).await?;
        }
        pause(400).await;
    }
    let tally = load.stop().await?;
    eprintln!("six times three roles switched: {tally}");
    tally.all_exact()?;
    ensure!(node_pids(&cluster).await? == pids, "no node has started again");
    idle_within(&cluster, 3, IDLE_WITHIN).await.map(drop)
}

/// What tells one life of a node from the next, as far as operators see it.
async fn node_pids(cluster: &Cluster) -> Result<Vec<String>> {
    let (_, shown) = cluster.admin(0, "GET", "/nodes", "").await?;
    let nodes = shown["nodes"].as_array().into_iter().flatten();
    Ok(nodes.map(|node| node["node"].to_string()).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_is_emptied_under_load_and_comes_back() -> Result<()> {
    let (cluster, client, known) = begin_with(spec(1, 2), 52, 60, (100, 250)).await?;
    let load = known.load(&client, &cluster.url(), WORKERS);
    for _ in 0..3 {
        for node in ["decode-0", "decode-1"] {
            pause(500).await;
            let (status, answer) = cluster
                .admin(0, "POST", &format!("/nodes/{node}/drain"), r#"{"move": true}"#)
                .await?;
            ensure!(status == 202, "{status}: {answer}");
            // What was under way to the node ends there; the rest has moved.
            shows(&cluster, node, |shown| shown["draining"] == true && shown["jobs"] == 0).await?;
            cluster.admin(0, "POST", &format!("/nodes/{node}/undrain"), "").await?;
            shows(&cluster, node, |shown| shown["draining"] == false).await?;
        }
    }
    let tally = load.stop().await?;
    let page = cluster.metrics().await?;
    let moved = metric(&page, "baton_request_migrations_total", &["cause=\"moved\""]);
    eprintln!("six drains: {tally}; moved {moved:?}");
    tally.all_exact()?;
    ensure!(moved > Some(0.0), "nothing was moved: {moved:?}");
    idle_within(&cluster, 3, IDLE_WITHIN).await.map(drop)
}
