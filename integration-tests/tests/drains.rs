//! SIGTERM, with real processes under load: what runs is finished, what comes is served elsewhere or told, and the process
//! ends with status 0.

use std::time::Duration;

use anyhow::{Result, ensure};
use integration_tests::cluster::{Cluster, metric};
use integration_tests::trial::{IDLE_WITHIN, WORKERS, begin_with, pause, spec};
use integration_tests::vitals::idle_within;
use runtime::clock::Clock;

/// The rest waits for its turn: however fast the nodes are, requests last long enough to be met by a signal.
const ONE_AT_ONCE: &str = "engine.max_num_seqs=1";

/// SIGTERM to a process; its exit status must be 0.
fn stop(cluster: &mut Cluster, name: &str) -> Result<Duration> {
    let told = Clock.now();
    let log = cluster.process(name)?.log();
    let status = tokio::task::block_in_place(|| cluster.terminate(name, Duration::from_secs(20)))?;
    ensure!(status.success(), "{name} ended with {status} after SIGTERM:\n{log}");
    Ok(Clock.now() - told)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_told_to_stop_finishes_what_runs() -> Result<()> {
    let (mut cluster, client, known) =
        begin_with(spec(2, 2).set("coordinator.queue_timeout_ms=1500"), 31, 60, (100, 250)).await?;
    let load = known.load(&client, &cluster.url(), WORKERS);
    for name in ["decode-0", "prefill-0"] {
        pause(500).await;
        eprintln!("{name} stopped within {:?}", stop(&mut cluster, name)?);
    }
    pause(500).await;
    let tally = load.stop().await?;
    eprintln!("two nodes of four stopped: {tally}");
    tally.all_exact()?;
    idle_within(&cluster, 2, IDLE_WITHIN).await?;

    // Nobody is left who could decode: what runs ends well, what comes is told.
    let load = known.load(&client, &cluster.url(), WORKERS);
    pause(500).await;
    let told = Clock.now();
    eprintln!(
        "the last decode node stopped within {:?}",
        stop(&mut cluster, "decode-1")?
    );
    pause(2500).await;
    let tally = load.stop().await?;
    eprintln!("the last decode node stopped: {tally}");
    tally.honest(false)?;
    tally.running_at(told).all_exact()?;
    let errors = tally.errors();
    let only_503 = errors.keys().all(|kind| kind.starts_with("503 "));
    ensure!(
        only_503 && !errors.is_empty(),
        "503 is what to say when no node is there: {errors:?}"
    );
    cluster.start_node("decode", 0)?;
    cluster.ready().await?;
    known.check(&client, &cluster.url(), 0).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_cannot_finish_in_time_goes_on_elsewhere() -> Result<()> {
    let spec = spec(1, 2).set("node.drain_timeout_ms=1");
    let (mut cluster, client, known) = begin_with(spec, 34, 20, (250, 400)).await?;
    let load = known.load(&client, &cluster.url(), WORKERS);
    pause(1000).await;
    eprintln!("decode-0 stopped within {:?}", stop(&mut cluster, "decode-0")?);
    pause(500).await;
    let tally = load.stop().await?;
    let page = cluster.metrics().await?;
    let moved = metric(&page, "baton_request_migrations_total", &["cause=\"node_lost\""]);
    eprintln!("a node stopped before its jobs ended: {tally}; moved {moved:?}");
    tally.all_exact()?;
    ensure!(moved > Some(0.0), "it had nothing to give away: {moved:?}");
    idle_within(&cluster, 2, IDLE_WITHIN).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_that_is_told_to_stop_finishes_what_runs() -> Result<()> {
    let (mut cluster, client, known) = begin_with(spec(1, 1).set(ONE_AT_ONCE), 32, 20, (250, 400)).await?;
    let load = known.load(&client, &cluster.url(), WORKERS);
    pause(1000).await;
    let told = Clock.now();
    eprintln!("coordinator stopped within {:?}", stop(&mut cluster, "coordinator")?);
    let tally = load.stop().await?;
    eprintln!("coordinator stopped: {tally}");
    tally.honest(true)?;
    let running = tally.running_at(told);
    ensure!(running.exact() >= 4, "{} were running", running.exact());
    running.all_exact()?;
    for name in ["prefill-0", "decode-0"] {
        eprintln!("{name} stopped within {:?}", stop(&mut cluster, name)?);
    }
    Ok(())
}
