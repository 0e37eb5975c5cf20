//! Faults under load, with real processes: clients that go away, nodes that are killed, frozen or stopped, a coordinator
//! that is restarted, too little room. Whatever happens, every request ends in time with its exact answer or a documented
//! error, and afterwards every block is free.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use integration_tests::ask::{Ask, Door};
use integration_tests::cluster::{Cluster, ClusterSpec, metric, metric_sum};
use integration_tests::load::{HANGS_AFTER, Known, Tally};
use integration_tests::ports::free_tcp;
use integration_tests::random::Random;
use integration_tests::storm::{Moment, Seen, storm};
use integration_tests::trial::{IDLE_WITHIN, WORKERS, begin, begin_with, pause, spec};
use integration_tests::vitals::{Vitals, idle_within, oldest_in_state, states};
use reqwest::Client;
use runtime::clock::Clock;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_clients_that_go_away_leave_nothing_behind() -> Result<()> {
    // Little room, so that requests are dropped in the queue, too.
    let spec = spec(1, 1)
        .set("engine.kv_pool_tokens=8192")
        .set("engine.max_num_seqs=16");
    let (mut cluster, client, known) = begin(spec, 1).await?;
    idle_within(&cluster, 2, IDLE_WITHIN).await?;
    let before = Vitals::of(&cluster).await?;
    let coordinator = cluster.process("coordinator")?.pid();
    let files = || anyhow::Ok(std::fs::read_dir(format!("/proc/{coordinator}/fd"))?.count());
    let files_before = files()?;
    for seed in 0..3 {
        // Those who stay must not see anything of those who go: no foreign bytes, no lost tokens.
        let load = known.load(&client, &cluster.url(), 4);
        let seen = a_thousand_go_away(&cluster, &client, seed).await?;
        let tally = load.stop().await?;
        let settled = idle_within(&cluster, 2, IDLE_WITHIN).await?;
        eprintln!("dropped {seen}; those who stayed: {tally}; idle after {settled:?}");
        tally.all_exact()?;
        assert_eq!(Vitals::of(&cluster).await?, before);
        for index in 0..8 {
            known.check(&client, &cluster.url(), index).await?;
        }
    }
    let files_after = files()?;
    ensure!(
        files_after < files_before + 100,
        "{files_before} open files before, {files_after} afterwards"
    );
    Ok(())
}

async fn a_thousand_go_away(cluster: &Cluster, client: &Client, seed: u64) -> Result<String> {
    let mut random = Random::new(seed);
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
            () = pause(20) => reached.extend(states(cluster).await?.into_keys()),
        }
    };
    let count = |what| seen.iter().filter(|seen| **seen == what).count();
    let (nothing, part, all) = (count(Seen::Nothing), count(Seen::Part), count(Seen::Everything));
    ensure!(nothing > 200 && part > 50, "the storm hit nothing");
    let failed: Vec<_> = seen.iter().filter(|seen| matches!(seen, Seen::Failed(_))).collect();
    ensure!(
        failed.is_empty(),
        "{} requests were refused: {:?}",
        failed.len(),
        failed.first()
    );
    let has = |state: &&str| reached.contains(*state);
    ensure!(["queued", "prefilling", "decoding"].iter().all(has), "{reached:?}");
    Ok(format!(
        "unseen {nothing}, in part {part}, too late {all}, states {reached:?}"
    ))
}

/// Kills `victims` under load and starts them again, `rounds` times; every answer must be honest. Prints recovery times.
async fn kill_and_restart(spec: ClusterSpec, victims: &[(&str, usize)], rounds: usize, seed: u64) -> Result<Cluster> {
    let nodes = spec.prefill + spec.decode;
    let (mut cluster, client, known) = begin(spec, seed).await?;
    let mut random = Random::new(seed);
    let load = known.load(&client, &cluster.url(), WORKERS);
    let (mut killed, mut restarted) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        pause(random.between(300, 900)).await;
        for (role, i) in victims {
            cluster.kill(&format!("{role}-{i}"))?;
        }
        killed.push(Clock.now());
        pause(random.between(0, 2500)).await;
        for (role, i) in victims {
            cluster.start_node(role, *i)?;
        }
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
    eprintln!(
        "kill -9 {victims:?}: {tally}; open when it was killed {open:?}; first exact answer after the restart: p50 {:?}, max {:?}; \
         idle after {settled:?}",
        recovery[recovery.len() / 2],
        recovery[recovery.len() - 1],
    );
    tally.honest(false)?;
    ensure!(
        open.iter().all(|open| *open >= WORKERS / 2),
        "no load when it was killed: {open:?}"
    );
    ensure!(tally.slowest() < HANGS_AFTER && tally.exact() > 30);
    Ok(cluster)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_decode_node_costs_a_pause() -> Result<()> {
    kill_and_restart(spec(1, 1), &[("decode", 0)], 4, 11).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_prefill_node_costs_a_pause() -> Result<()> {
    kill_and_restart(spec(1, 1), &[("prefill", 0)], 4, 12).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_nodes_killed_at_once_cost_a_pause() -> Result<()> {
    let victims = [("decode", 0), ("prefill", 0)];
    kill_and_restart(spec(1, 1), &victims, 3, 14).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_a_killed_decode_node_go_on_elsewhere() -> Result<()> {
    let cluster = kill_and_restart(spec(1, 2), &[("decode", 0)], 3, 13).await?;
    let page = cluster.metrics().await?;
    let moved = metric_sum(&page, "baton_request_migrations_total");
    eprintln!("{moved} requests moved");
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
        eprintln!("{victim} was frozen for {:?}", Clock.now() - frozen);
        cluster.ready().await?;
    }
    pause(1000).await;
    let thawed = Clock.now();
    pause(500).await;
    let tally = load.stop().await?;
    let settled = idle_within(&cluster, 2, IDLE_WITHIN).await?;
    eprintln!("frozen {victims:?} for {millis} ms: {tally}; idle after {settled:?}");
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
    freeze(&["decode-0", "prefill-0", "coordinator"], 3000, 21)
        .await
        .map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_freezes_for_a_moment_costs_nobody_an_answer() -> Result<()> {
    freeze(&["prefill-0", "decode-0", "coordinator"], 700, 22)
        .await?
        .all_exact()
}

/// The longest time that the oldest request of each state has been in it, sampled until `end` resolves.
async fn oldest(cluster: &Cluster, end: impl Future<Output = ()>) -> Result<BTreeMap<String, f64>> {
    tokio::pin!(end);
    let mut oldest = BTreeMap::new();
    loop {
        tokio::select! {
            () = &mut end => return Ok(oldest),
            () = pause(25) => for (state, age) in oldest_in_state(cluster).await? {
                let most = oldest.entry(state).or_insert(0.0);
                *most = age.max(*most);
            },
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_state_outlasts_its_deadline_when_nobody_notices_the_loss() -> Result<()> {
    // The links live on while a node is frozen: all that helps are the deadlines of the requests.
    let limits = [
        ("queued", "queue_timeout_ms", 3000),
        ("reserving", "reserve_timeout_ms", 500),
        ("prefilling", "prefill_timeout_ms", 2000),
        ("transferring", "handoff_timeout_ms", 1000),
        ("decoding", "inter_token_timeout_ms", 1500),
        ("stranded", "inter_token_timeout_ms", 1500),
        ("resuming", "prefill_timeout_ms", 2000),
    ];
    let mut spec = spec(1, 1).set("cluster.idle_timeout_ms=60000");
    for (_, field, millis) in limits {
        spec = spec.set(format!("coordinator.{field}={millis}"));
    }
    let (mut cluster, client, known) = begin(spec, 23).await?;
    let load = known.load(&client, &cluster.url(), WORKERS);
    let mut seen = BTreeMap::new();
    for victim in ["decode-0", "prefill-0"] {
        pause(500).await;
        cluster.process(victim)?.signal(libc::SIGSTOP);
        let ages = oldest(&cluster, pause(6000)).await?;
        cluster.process(victim)?.signal(libc::SIGCONT);
        eprintln!("{victim} frozen: oldest requests {ages:?}");
        for (state, age) in ages {
            let most = seen.entry(state).or_insert(0.0_f64);
            *most = age.max(*most);
        }
    }
    pause(1500).await;
    let thawed = Clock.now();
    pause(1500).await;
    let tally = load.stop().await?;
    eprintln!("deadlines: {tally}");
    tally.honest(false)?;
    ensure!(
        tally.first_exact_after(thawed).is_some(),
        "nothing is served after the thaw"
    );
    for (state, _, millis) in limits {
        let age = seen.get(state).copied().unwrap_or(0.0);
        // Gauges are set every 100 ms; every token gives a decoding request its time again.
        let more = if state == "decoding" { 5.0 } else { 1.0 };
        ensure!(
            age < f64::from(millis) / 1000.0 + more,
            "a request was {state} for {age} s"
        );
    }
    let reached = |state: &&str| seen.contains_key(*state);
    ensure!(
        ["reserving", "prefilling", "decoding"].iter().all(reached),
        "few states were reached: {seen:?}"
    );
    idle_within(&cluster, 2, IDLE_WITHIN).await.map(drop)
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
    eprintln!("coordinator killed: {tally}; ready after {ready:?}; idle after {settled:?}");
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
    let (mut cluster, client, known) = begin_with(room(400), 41, 20, (100, 460)).await?;
    let port = free_tcp()?;
    cluster.kill("decode-0")?;
    cluster.start_process(
        "decode-0",
        "decode-node",
        &[&format!("node.metrics_listen=127.0.0.1:{port}")],
    )?;
    cluster.ready().await?;
    let tally = known.burst(&client, &cluster.url(), 300).await?;
    eprintln!(
        "300 at once on room for two: {tally}; idle after {:?}",
        idle_within(&cluster, 2, IDLE_WITHIN).await?
    );
    tally.all_exact()?;
    let page = reqwest::get(format!("http://127.0.0.1:{port}/metrics"))
        .await?
        .text()
        .await?;
    let preempted = metric(&page, "baton_num_preemptions_total", &[]);
    eprintln!("preempted {preempted:?}");
    ensure!(preempted > Some(0.0), "there was room for all: {preempted:?}");
    drop(cluster);

    let cluster = Cluster::start(room(20)).await?;
    let tally = known.burst(&client, &cluster.url(), 300).await?;
    eprintln!(
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_wait_where_four_fit_and_everybody_is_answered() -> Result<()> {
    let port = free_tcp()?;
    // Answers that may grow further than admission looks ahead, so that they get in each other's way.
    let spec = spec(1, 1)
        .set("limits.max_seq_len=512")
        .set("coordinator.queue_timeout_ms=25000")
        .set_for("decode", "engine.kv_pool_tokens=2048")
        .set_for("decode", format!("node.metrics_listen=127.0.0.1:{port}"));
    let cluster = Cluster::start(spec).await?;
    let (client, mut random) = (Client::new(), Random::new(43));
    let mut asks = Ask::mixed(&mut random, 16, 20, (420, 470));
    asks.extend((0..4).map(|_| Ask::demanding(&mut random, 20, 400)));
    let known = Arc::new(Known::learn(&client, &cluster.url(), asks).await?);
    let mut preempted = 0.0;
    for _ in 0..10 {
        let tally = known.burst(&client, &cluster.url(), 68).await?;
        let settled = idle_within(&cluster, 2, IDLE_WITHIN).await?;
        let page = reqwest::get(format!("http://127.0.0.1:{port}/metrics"))
            .await?
            .text()
            .await?;
        preempted = metric(&page, "baton_num_preemptions_total", &[]).unwrap_or(0.0);
        eprintln!("68 at once on room for four: {tally}; preempted {preempted}; idle after {settled:?}");
        tally.all_exact()?;
        if preempted > 0.0 {
            break;
        }
    }
    ensure!(preempted > 0.0, "there was room for all");
    Ok(())
}
