//! A cluster of tiny models under trial: deadlines that are short enough for a test, requests with known answers.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use reqwest::Client;

use crate::ask::{Ask, MODEL_NAME};
use crate::cluster::{Cluster, ClusterSpec};
use crate::files::tiny_model;
use crate::load::Known;
use crate::random::Random;

/// Blocks and counters are back within this time after the last request has ended.
pub const IDLE_WITHIN: Duration = Duration::from_secs(2);
/// Streams that run while something happens.
pub const WORKERS: usize = 32;

/// The tiny model, with deadlines that are short enough for a test.
pub fn spec(prefill: usize, decode: usize) -> ClusterSpec {
    let spec = ClusterSpec {
        prefill,
        decode,
        ..ClusterSpec::pair(tiny_model())
    };
    spec.set(format!("model.model_name={MODEL_NAME}"))
        .set("coordinator.queue_timeout_ms=8000")
        .set("coordinator.reserve_timeout_ms=2000")
        .set("coordinator.prefill_timeout_ms=6000")
        .set("coordinator.handoff_timeout_ms=4000")
        .set("coordinator.inter_token_timeout_ms=8000")
        .set("coordinator.drain_timeout_ms=15000")
        .set("node.drain_timeout_ms=15000")
        .set("node.reconnect_max_ms=500")
        // Handoffs of many frames that do not fit into the window: faults hit them in the middle.
        .set("transfer.frame_bytes=4096")
        .set("transfer.window_bytes=131072")
}

/// Lets time pass.
pub async fn pause(millis: u64) {
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

/// A cluster with its requests and their answers.
pub async fn begin(spec: ClusterSpec, seed: u64) -> Result<(Cluster, Client, Arc<Known>)> {
    begin_with(spec, seed, 120, (1, 250)).await
}

/// The same with prompts of at most `words` words and answers of so many tokens.
pub async fn begin_with(
    spec: ClusterSpec,
    seed: u64,
    words: u64,
    tokens: (u64, u64),
) -> Result<(Cluster, Client, Arc<Known>)> {
    let cluster = Cluster::start(spec).await?;
    let client = Client::new();
    let mut random = Random::new(seed);
    let asks = Ask::mixed(&mut random, 24, words, tokens);
    let known = Known::learn(&client, &cluster.url(), asks).await?;
    Ok((cluster, client, Arc::new(known)))
}
