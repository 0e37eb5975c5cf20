//! `GET /debug/blocks` of the admin plane with real processes: under load every block has an owner whose request somebody has
//! asked for, afterwards nobody owns any, and a node that does not answer is told as such beside those that do.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use integration_tests::cluster::{Cluster, ClusterSpec};
use integration_tests::trial::{pause, spec};
use reqwest::Client;
use runtime::clock::Clock;
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// What is waited for is there within this time.
const SOON: Duration = Duration::from_secs(60);
/// Clients that ask at once.
const CLIENTS: u32 = 16;
/// So many requests are to be seen as owners.
const SEEN: usize = 12;

async fn audit(cluster: &Cluster, coordinator: usize) -> Result<Value> {
    let (status, report) = cluster.admin(coordinator, "GET", "/debug/blocks", "").await?;
    ensure!(status == 200, "{status}: {report}");
    for node in list(&report["nodes"]) {
        adds_up(node)?;
    }
    Ok(report)
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn count(of: &Value, name: &str) -> Result<u64> {
    of[name].as_u64().with_context(|| format!("no {name} in {of}"))
}

/// Every block of a node that has answered is free, cached, or one owner's, and the books agree.
fn adds_up(node: &Value) -> Result<()> {
    if node["answered"] == false {
        ensure!(node["silent"].is_string() && node["agrees"] == false, "{node}");
        return Ok(());
    }
    let blocks = &node["blocks"];
    let of = |name| count(blocks, name);
    ensure!(of("free")? + of("cached")? + of("owned")? == of("total")?, "{node}");
    ensure!(
        of("total")? > 0 && of("unowned")? == 0 && of("unbooked")? == 0,
        "{node}"
    );
    let mut counted = of("further")?;
    for owner in list(&node["owners"]) {
        ensure!(owner["request"].is_string() && owner["age_ms"].is_u64(), "{owner}");
        counted += count(owner, "counted_blocks")?;
    }
    ensure!(counted == of("owned")?, "the owners have {counted} blocks: {node}");
    ensure!(node["agrees"] == true, "{node}");
    Ok(())
}

fn node<'a>(report: &'a Value, name: &str) -> Result<&'a Value> {
    let found = list(&report["nodes"]).find(|node| node["node"] == name);
    found.with_context(|| format!("no {name} in {report}"))
}

/// Waits until so many nodes answer and nobody has anything.
async fn nothing_owned(cluster: &Cluster, nodes: usize) -> Result<()> {
    let deadline = Clock.now() + SOON;
    loop {
        let report = audit(cluster, 0).await?;
        let blocks = &report["blocks"];
        let idle = (count(blocks, "owned")?, count(blocks, "booked")?) == (0, 0)
            && count(blocks, "free")? + count(blocks, "cached")? == count(blocks, "total")?
            && list(&report["nodes"]).all(|node| list(&node["owners"]).next().is_none());
        let all = list(&report["nodes"]).count() == nodes;
        if all && idle && report["complete"] == true && report["agrees"] == true {
            return Ok(());
        }
        ensure!(Clock.now() < deadline, "not idle: {report}");
        pause(20).await;
    }
}

/// Asks for an answer of `tokens` tokens; its id.
async fn ask(client: &Client, url: &str, prompt: &str, tokens: u32) -> Result<String> {
    let body = json!({"inputs": prompt, "parameters": {
        "max_new_tokens": tokens, "do_sample": true, "ignore_eos": true,
    }});
    let answer = client.post(format!("{url}/generate")).json(&body).send().await?;
    ensure!(answer.status() == 200, "{}: {}", answer.status(), answer.text().await?);
    let id = answer
        .headers()
        .get("x-request-id")
        .context("no id")?
        .to_str()?
        .to_owned();
    let _answer: Value = answer.json().await?;
    Ok(id)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_load_every_block_has_an_owner_and_afterwards_none_has() -> Result<()> {
    let spec = ClusterSpec { both: 1, ..spec(1, 1) };
    let cluster = Cluster::start(spec).await?;
    nothing_owned(&cluster, 3).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let mut clients: JoinSet<Result<Vec<String>>> = JoinSet::new();
    for number in 0..CLIENTS {
        let (url, stop) = (cluster.url(), Arc::clone(&stop));
        clients.spawn(async move {
            let (client, mut ids) = (Client::new(), Vec::new());
            while !stop.load(Ordering::Relaxed) {
                let prompt = format!("client {number} asks for the {}th time", ids.len());
                ids.push(ask(&client, &url, &prompt, 200).await?);
            }
            Ok(ids)
        });
    }
    let (mut seen, mut kinds) = (BTreeSet::new(), BTreeSet::new());
    let deadline = Clock.now() + SOON;
    while seen.len() < SEEN || !kinds.contains("sequence") {
        let report = audit(&cluster, 0).await?;
        ensure!(report["complete"] == true && report["agrees"] == true, "{report}");
        for owner in list(&report["nodes"]).flat_map(|node| list(&node["owners"])) {
            ensure!(owner["coordinator"].is_null(), "there is one coordinator: {owner}");
            seen.insert(owner["request"].as_str().unwrap_or_default().to_owned());
            kinds.insert(owner["kind"].as_str().unwrap_or_default().to_owned());
        }
        ensure!(
            Clock.now() < deadline,
            "only {seen:?} were seen as owners, as {kinds:?}"
        );
    }
    stop.store(true, Ordering::Relaxed);
    let mut asked = BTreeSet::new();
    while let Some(ids) = clients.join_next().await {
        asked.extend(ids??);
    }
    eprintln!("{} requests, {} of them seen as {kinds:?}", asked.len(), seen.len());
    let strangers: Vec<_> = seen.difference(&asked).collect();
    ensure!(strangers.is_empty(), "nobody has asked for {strangers:?}");
    nothing_owned(&cluster, 3).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_node_is_told_as_silent_and_the_other_names_what_it_keeps_for_whom() -> Result<()> {
    // Nobody gives the frozen node up: what waits for it waits until it goes on.
    let spec = ClusterSpec {
        coordinators: 2,
        ..spec(1, 1)
    };
    let spec = [
        "coordinator.node_stall_ms",
        "cluster.idle_timeout_ms",
        "coordinator.prefill_timeout_ms",
    ]
    .into_iter()
    .fold(spec, |spec, setting| spec.set(format!("{setting}=120000")));
    let mut cluster = Cluster::start(spec).await?;
    cluster.process("prefill-0")?.signal(libc::SIGSTOP);
    let mut asked: JoinSet<Result<(usize, String)>> = JoinSet::new();
    for (coordinator, prompt) in [(0, "one way"), (1, "and another way")] {
        let url = cluster.url_of(coordinator);
        asked.spawn(async move { Ok((coordinator, ask(&Client::new(), &url, prompt, 20).await?)) });
    }
    let deadline = Clock.now() + SOON;
    let report = loop {
        let report = audit(&cluster, 0).await?;
        // A job that has come a moment ago has no blocks yet.
        let owners = list(&node(&report, "decode-0")?["owners"]);
        if owners.filter(|owner| owner["kind"] == "reservation").count() == 2 {
            break report;
        }
        ensure!(Clock.now() < deadline, "the reservations do not come: {report}");
        pause(20).await;
    };
    ensure!(report["complete"] == false && report["agrees"] == true, "{report}");
    ensure!(
        node(&report, "prefill-0")?["silent"] == "it did not answer in time",
        "{report}"
    );
    let decode = node(&report, "decode-0")?;
    let named = |coordinator: &Value| -> Result<String> {
        let owner = list(&decode["owners"]).find(|owner| owner["coordinator"] == *coordinator);
        let owner = owner.with_context(|| format!("nothing of {coordinator} in {decode}"))?;
        let (kind, job) = (&owner["kind"], &owner["job"]);
        ensure!(
            kind == "reservation" && job == "decode" && owner["blocks"].as_u64() > Some(0),
            "{owner}"
        );
        Ok(owner["request"].as_str().unwrap_or_default().to_owned())
    };
    let requests = [named(&Value::Null)?, named(&json!("coordinator-1"))?];
    // The other coordinator sees the same with the names exchanged.
    let other = audit(&cluster, 1).await?;
    let own = list(&node(&other, "decode-0")?["owners"]).find(|owner| owner["coordinator"].is_null());
    ensure!(own.is_some_and(|own| own["request"] == requests[1]), "{other}");

    cluster.process("prefill-0")?.signal(libc::SIGCONT);
    while let Some(answered) = asked.join_next().await {
        let (coordinator, id) = answered??;
        ensure!(id == requests[coordinator], "{id} is not one of {requests:?}");
    }
    nothing_owned(&cluster, 2).await
}
