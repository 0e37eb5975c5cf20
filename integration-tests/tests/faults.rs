//! Faults under load, with real processes: clients that go away, nodes that are killed, frozen or stopped, a coordinator
//! that is restarted, too little room. Whatever happens, every request ends in time with its exact answer or a documented
//! error, and afterwards every block is free.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use integration_tests::ask::{Ask, Door, MODEL_NAME};
use integration_tests::cluster::{Cluster, ClusterSpec, metric};
use integration_tests::files::tiny_model;
use integration_tests::load::{HANGS_AFTER, Known, Tally};
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
    begin_with(spec, seed, 120, (1, 250)).await
}

/// The same with prompts of at most `words` words and answers of so many tokens.
async fn begin_with(
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_clients_that_go_away_leave_nothing_behind() -> Result<()> {
    // Little room, so that requests are dropped in the queue, too.
    let spec = spec(1, 1)
        .set("engine.kv_pool_tokens=8192")
        .set("engine.max_num_seqs=16");
    let (cluster, client, known) = begin(spec, 1).await?;
    idle_within(&cluster, 2, IDLE_WITHIN).await?;
    let before = Vitals::of(&cluster).await?;
    let mut random = Random::new(2);
    let mut asks = Vec::new();
    for i in 0..1000 {
        let door = Door::ALL[i % Door::ALL.len()];
        let (words, tokens) = (random.between(1, 120), random.between(1, 300));
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
    let failed: Vec<_> = seen.iter().filter(|seen| matches!(seen, Seen::Failed(_))).collect();
    ensure!(
        failed.is_empty(),
        "{} requests were refused: {:?}",
        failed.len(),
        failed.first()
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_a_killed_decode_node_go_on_elsewhere() -> Result<()> {
    let cluster = kill_and_restart(spec(1, 2), ("decode", 0), 3, 13).await?;
    let page = cluster.metrics().await?;
    let moved = page
        .lines()
        .filter(|line| line.starts_with("baton_request_migrations_total{"));
    let moved: f64 = moved
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
        .sum();
    println!("{moved} requests moved");
    ensure!(moved >= 3.0, "only {moved} requests moved");
    ensure!(
        metric(&page, "baton_token_disagreements_total", &[]).unwrap_or(0.0) == 0.0,
        "nodes disagree"
    );
    Ok(())
}

/// Freezes `victims` one after the other under load, for `millis` each; every answer must be honest.
async fn freeze(victims: &[&str], millis: u64, seed: u64) -> Result<Tally> {
    let (mut cluster, client, known) = begin(spec(1, 1), seed).await?;
    let load = known.load(&client, &cluster.url(), WORKERS);
    for victim in victims {
        pause(500).await;
        cluster.process(victim)?.signal(libc::SIGSTOP);
        let frozen = Clock.now();
        pause(millis).await;
        cluster.process(victim)?.signal(libc::SIGCONT);
        println!("{victim} was frozen for {:?}", Clock.now() - frozen);
        cluster.ready().await?;
    }
    pause(1000).await;
    let thawed = Clock.now();
    pause(500).await;
    let tally = load.stop().await?;
    let settled = idle_within(&cluster, 2, IDLE_WITHIN).await?;
    println!("frozen {victims:?} for {millis} ms: {tally}; idle after {settled:?}");
    tally.honest(false)?;
    ensure!(
        tally.first_exact_after(thawed).is_some(),
        "nothing is served after the thaw"
    );
    ensure!(tally.slowest() < HANGS_AFTER && tally.slowest() > Duration::from_millis(millis));
    Ok(tally)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_freezes_for_long_is_replaced_and_comes_back() -> Result<()> {
    freeze(&["decode-0", "prefill-0"], 3500, 21).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_freezes_for_a_moment_costs_nobody_an_answer() -> Result<()> {
    freeze(&["prefill-0", "decode-0", "coordinator"], 700, 22)
        .await?
        .all_exact()
}

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
        println!("{name} stopped within {:?}", stop(&mut cluster, name)?);
    }
    pause(500).await;
    let tally = load.stop().await?;
    println!("two nodes of four stopped: {tally}");
    tally.all_exact()?;
    idle_within(&cluster, 2, IDLE_WITHIN).await?;

    // Nobody is left who could decode: what runs ends well, what comes is told.
    let load = known.load(&client, &cluster.url(), WORKERS);
    pause(500).await;
    let told = Clock.now();
    println!(
        "the last decode node stopped within {:?}",
        stop(&mut cluster, "decode-1")?
    );
    pause(2500).await;
    let tally = load.stop().await?;
    println!("the last decode node stopped: {tally}");
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
async fn a_coordinator_that_is_told_to_stop_finishes_what_runs() -> Result<()> {
    let (mut cluster, client, known) = begin_with(spec(1, 1), 32, 20, (250, 400)).await?;
    let load = known.load(&client, &cluster.url(), WORKERS);
    pause(1000).await;
    let told = Clock.now();
    println!("coordinator stopped within {:?}", stop(&mut cluster, "coordinator")?);
    let tally = load.stop().await?;
    println!("coordinator stopped: {tally}");
    tally.honest(true)?;
    let running = tally.running_at(told);
    ensure!(running.exact() >= WORKERS / 4, "{} were running", running.exact());
    running.all_exact()?;
    for name in ["prefill-0", "decode-0"] {
        println!("{name} stopped within {:?}", stop(&mut cluster, name)?);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_come_back_to_a_coordinator_that_was_killed() -> Result<()> {
    let (mut cluster, client, known) = begin(spec(1, 1), 33).await?;
    let pids = [cluster.process("prefill-0")?.pid(), cluster.process("decode-0")?.pid()];
    let load = known.load(&client, &cluster.url(), WORKERS);
    let mut recovery = Vec::new();
    for millis in [0, 1000, 2500] {
        pause(500).await;
        cluster.kill("coordinator")?;
        pause(millis).await;
        cluster.start_coordinator()?;
        let started = Clock.now();
        cluster.ready().await?;
        recovery.push((started, Clock.now() - started));
    }
    pause(1000).await;
    let tally = load.stop().await?;
    let settled = idle_within(&cluster, 2, IDLE_WITHIN).await?;
    let ready: Vec<_> = recovery.iter().map(|(_, ready)| *ready).collect();
    println!("coordinator killed: {tally}; ready after {ready:?}; idle after {settled:?}");
    tally.honest(true)?;
    for (started, _) in recovery {
        ensure!(
            tally.first_exact_after(started).is_some(),
            "nothing is served after a restart"
        );
    }
    assert_eq!(
        pids,
        [cluster.process("prefill-0")?.pid(), cluster.process("decode-0")?.pid()]
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn little_room_makes_requests_wait_and_no_answer_wrong() -> Result<()> {
    // 64 blocks: two of the longest sequences.
    let room = |queued: usize| {
        let spec = spec(1, 1)
            .set("engine.kv_pool_tokens=1024")
            .set("limits.max_seq_len=512")
            .set("coordinator.queue_timeout_ms=25000");
        spec.set(format!("limits.max_queued_requests={queued}"))
    };
    let (cluster, client, known) = begin(room(400), 41).await?;
    let tally = known.burst(&client, &cluster.url(), 300).await?;
    println!(
        "300 at once on room for two: {tally}; idle after {:?}",
        idle_within(&cluster, 2, IDLE_WITHIN).await?
    );
    tally.all_exact()?;
    drop(cluster);

    let cluster = Cluster::start(room(20)).await?;
    let tally = known.burst(&client, &cluster.url(), 300).await?;
    println!(
        "300 at once, 20 may wait: {tally}; idle after {:?}",
        idle_within(&cluster, 2, IDLE_WITHIN).await?
    );
    tally.honest(false)?;
    let errors = tally.errors();
    ensure!(
        errors.keys().all(|kind| kind.starts_with("429 ")) && !errors.is_empty(),
        "{errors:?}"
    );
    ensure!(tally.exact() >= 20, "those who could wait were not served");
    Ok(())
}
