//! Faults under load, with real processes: clients that go away, nodes that are killed, frozen or stopped, a coordinator
//! that is restarted, too little room. Whatever happens, every request ends in time with its exact answer or a documented
//! error, and afterwards every block is free.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use integration_tests::ask::{Ask, Door, MODEL_NAME};
use integration_tests::cluster::{Cluster, ClusterSpec};
use integration_tests::files::tiny_model;
use integration_tests::load::{HANGS_AFTER, Known};
use integration_tests::random::Random;
use integration_tests::storm::{Moment, Seen, storm};
use integration_tests::vitals::{Vitals, idle_within, states};
use reqwest::Client;
use runtime::clock::Clock;

/// Blocks and counters are back within this time after the last request has ended.
const IDLE_WITHIN: Duration = Duration::from_secs(2);
/// Streams that run while something happens.
const WORKERS: usize = 32;

/// The tiny model, with deadlines that are short enough for a test.
fn spec(prefill: usize, decode: usize) -> ClusterSpec {
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
}

async fn pause(millis: u64) {
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

/// A cluster with its requests and their answers.
async fn begin(spec: ClusterSpec, seed: u64) -> Result<(Cluster, Client, Arc<Known>)> {
    let cluster = Cluster::start(spec).await?;
    let client = Client::new();
    let mut random = Random::new(seed);
    let asks = Ask::mixed(&mut random, 24, 120, (1, 250));
    let known = Known::learn(&client, &cluster.url(), asks).await?;
    Ok((cluster, client, Arc::new(known)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_clients_that_go_away_leave_nothing_behind() -> Result<()> {
    // Little room, so that requests are dropped in the queue, too.
    let spec = spec(1, 1)
        .set("engine.kv_pool_tokens=8192")
        .set("engine.max_num_seqs=16");
    let (cluster, client, known) = begin(spec, 1).await?;
    let before = Vitals::of(&cluster).await?;
    let mut random = Random::new(2);
    let mut asks = Vec::new();
    for i in 0..1000 {
        let door = Door::ALL[i % Door::ALL.len()];
        let (words, tokens) = (random.between(1, 150), random.between(1, 300));
        let ask = Ask::new(&mut random, door, words, tokens);
        asks.push((ask, Moment::any(&mut random, door.is_stream())));
    }
    let (url, dropping) = (cluster.url(), client.clone());
    let mut running = tokio::spawn(async move { storm(&dropping, &url, asks, 64).await });
    let mut reached = BTreeSet::new();
    let seen = loop {
        tokio::select! {
            seen = &mut running => break seen??,
            () = pause(20) => reached.extend(states(&cluster).await?.into_keys()),
        }
    };
    let settled = idle_within(&cluster, 2, IDLE_WITHIN).await?;
    let count = |what| seen.iter().filter(|seen| **seen == what).count();
    let (nothing, part, all) = (count(Seen::Nothing), count(Seen::Part), count(Seen::Everything));
    println!("dropped unseen {nothing}, in part {part}, too late {all}; states {reached:?}; idle after {settled:?}");
    ensure!(nothing > 200 && part > 100, "the storm hit nothing");
    ensure!(
        count(Seen::Failed) == 0,
        "{} requests were refused",
        count(Seen::Failed)
    );
    ensure!(
        ["queued", "prefilling", "decoding"]
            .iter()
            .all(|state| reached.contains(*state)),
        "{reached:?}"
    );
    assert_eq!(Vitals::of(&cluster).await?, before);
    for index in 0..8 {
        known.check(&client, &cluster.url(), index).await?;
    }
    Ok(())
}

/// Kills `victim` under load and starts it again, `rounds` times; every answer must be honest. Prints recovery times.
async fn kill_and_restart(spec: ClusterSpec, victim: (&str, usize), rounds: usize, seed: u64) -> Result<Cluster> {
    let nodes = spec.prefill + spec.decode;
    let (mut cluster, client, known) = begin(spec, seed).await?;
    let mut random = Random::new(seed);
    let load = known.load(&client, &cluster.url(), WORKERS);
    let (mut killed, mut restarted) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        pause(random.between(300, 900)).await;
        cluster.kill(&format!("{}-{}", victim.0, victim.1))?;
        killed.push(Clock.now());
        pause(random.between(0, 2500)).await;
        cluster.start_node(victim.0, victim.1)?;
        cluster.ready().await?;
        restarted.push(Clock.now());
    }
    pause(1000).await;
    let tally = load.stop().await?;
    let settled = idle_within(&cluster, nodes, IDLE_WITHIN).await?;
    let mut recovery = Vec::new();
    for at in &restarted {
        recovery.push(
            tally
                .first_exact_after(*at)
                .context("no exact answer after a restart")?,
        );
    }
    recovery.sort();
    let open: Vec<_> = killed.iter().map(|at| tally.open_at(*at)).collect();
    println!(
        "kill -9 {}: {tally}; open when it was killed {open:?}; first exact answer after the restart: p50 {:?}, max {:?}; \
         idle after {settled:?}",
        victim.0,
        recovery[recovery.len() / 2],
        recovery[recovery.len() - 1],
    );
    tally.honest(false)?;
    ensure!(
        open.iter().all(|open| *open >= WORKERS / 2),
        "no load when it was killed: {open:?}"
    );
    ensure!(tally.slowest() < HANGS_AFTER && tally.exact() > 100);
    Ok(cluster)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_decode_node_costs_a_pause() -> Result<()> {
    kill_and_restart(spec(1, 1), ("decode", 0), 5, 11).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_prefill_node_costs_a_pause() -> Result<()> {
    kill_and_restart(spec(1, 1), ("prefill", 0), 5, 12).await.map(drop)
}
