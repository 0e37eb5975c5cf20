//! Processes that are killed, that want the same file, that are told to end; and a cluster whose model comes from a hub.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use integration_tests::cluster::{Cluster, ClusterSpec, Process};
use integration_tests::files::{binary, tiny_model};
use integration_tests::hub::{Fault, Hub, checksum};
use integration_tests::random::Random;
use runtime::clock::Clock;
use serde_json::{Value, json};
use tempfile::TempDir;

const TOKEN: &str = "hf_a_token_of_a_test";
/// What must come true comes true within this time, or never.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where the stand-in pauses, and what of it must have been written by then.
const PAUSE: usize = 700_000;
const WRITTEN: u64 = 512 << 10;

async fn until(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let deadline = Clock.now() + PATIENCE;
    while !holds() {
        if Clock.now() >= deadline {
            bail!("not within {PATIENCE:?}: {what}");
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// The repository's folder in a cache.
fn root(cache: &Path) -> PathBuf {
    cache.join("models--tiny--model")
}

fn unfinished(cache: &Path, bytes: &[u8]) -> PathBuf {
    root(cache)
        .join("blobs")
        .join(format!("{}.incomplete", checksum(bytes)))
}

/// Publishes a small model directory with weights that are nowhere alike, and returns these.
fn publish(hub: &Hub) -> Vec<u8> {
    let mut random = Random::new(7);
    let weights: Vec<u8> = (0..1_500_000).map(|_| random.below(256) as u8).collect();
    let files: [(&str, &[u8]); 3] = [
        ("config.json", b"{}"),
        ("tokenizer.json", b"{\"model\": {}}"),
        ("model.safetensors", &weights),
    ];
    hub.publish("tiny/model", 'a', &files);
    weights
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |found| found.len())
}

fn settings(hub: &Hub, cache: &Path) -> Vec<String> {
    vec![
        format!("model.hub_endpoint={}", hub.url),
        format!("model.hub_cache_dir={}", cache.display()),
        "model.hub_token_file=".to_owned(),
        "model.offline=false".to_owned(),
    ]
}

fn arguments(hub: &Hub, cache: &Path) -> Vec<String> {
    let mut arguments = vec!["fetch".to_owned(), "hf://tiny/model".to_owned()];
    arguments.extend(
        settings(hub, cache)
            .into_iter()
            .flat_map(|setting| ["--set".to_owned(), setting]),
    );
    arguments
}

/// `model fetch`.
fn start(name: &str, hub: &Hub, cache: &Path) -> Result<Process> {
    Process::start(name, &binary("model")?, &arguments(hub, cache), cache)
}

/// Waits for its end, and returns the path that it has printed.
async fn path_of(mut process: Process) -> Result<PathBuf> {
    let status = tokio::task::spawn_blocking(move || {
        let status = process.wait(PATIENCE)?;
        anyhow::Ok((status, process.log()))
    });
    let (status, log) = status.await??;
    ensure!(status.success(), "{status}: {log}");
    Ok(PathBuf::from(log.lines().last().context("nothing printed")?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_fetch_goes_on_where_it_was() -> Result<()> {
    let (hub, cache) = (Hub::start().await?, TempDir::new()?);
    let large = publish(&hub);
    let part = unfinished(cache.path(), &large);
    hub.fault("/cdn/", Fault::Pause(PAUSE));
    let mut first = start("first", &hub, cache.path())?;
    until("a part is written", || size(&part) >= WRITTEN).await?;
    first.signal(libc::SIGKILL);
    tokio::task::block_in_place(|| first.wait(PATIENCE))?;
    let there = usize::try_from(size(&part))?;
    assert!(there < large.len());

    hub.forget();
    let path = path_of(start("second", &hub, cache.path())?).await?;
    assert_eq!(fs::read(path.join("model.safetensors"))?, large);
    let sent: Vec<_> = hub.seen_of("/cdn/").iter().map(|seen| (seen.from, seen.sent)).collect();
    assert_eq!(sent, [(Some(there), large.len() - there)], "only the rest");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_several_processes_one_fetches_and_another_takes_over_if_it_dies() -> Result<()> {
    let hub = Hub::start().await?;
    let large = publish(&hub);
    for kill in [true, false] {
        let cache = TempDir::new()?;
        let part = unfinished(cache.path(), &large);
        hub.forget();
        hub.fault("/cdn/", Fault::Pause(PAUSE));
        let mut first = start("first", &hub, cache.path())?;
        until("a part is written", || size(&part) >= WRITTEN).await?;
        let there = usize::try_from(size(&part))?;
        let second = start("second", &hub, cache.path())?;
        let waits = format!("another process is fetching this file owner=\"{}\"", first.pid());
        until("the second one waits", || second.log().contains(&waits)).await?;
        if kill {
            first.signal(libc::SIGKILL);
            tokio::task::block_in_place(|| first.wait(PATIENCE))?;
        } else {
            hub.go_on();
            path_of(first).await?;
        }
        let path = path_of(second).await?;
        assert_eq!(fs::read(path.join("model.safetensors"))?, large);
        let asked: Vec<_> = hub.seen_of("/cdn/").iter().map(|seen| seen.from).collect();
        let expected = if kill { vec![None, Some(there)] } else { vec![None] };
        assert_eq!(asked, expected, "killed: {kill}");
    }
    Ok(())
}

/// A limit on the size of files fails as a full disk does: in the middle of a file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_told_and_what_is_there_is_kept() -> Result<()> {
    let (hub, cache) = (Hub::start().await?, TempDir::new()?);
    let large = publish(&hub);
    let limited = || {
        let script = "trap '' XFSZ; ulimit -f 1024; exec \"$0\" \"$@\"";
        let mut command = Command::new("bash");
        command.args(["-c", script]).arg(binary("model")?);
        anyhow::Ok(command.args(arguments(&hub, cache.path())).output()?)
    };
    let output = tokio::task::block_in_place(limited)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let part = unfinished(cache.path(), &large);
    assert!(!output.status.success(), "{said}");
    assert!(
        said.contains(&part.display().to_string()) && said.contains("File too large"),
        "{said}"
    );
    assert_eq!(size(&part), 1 << 20);
    let path = path_of(start("again", &hub, cache.path())?).await?;
    assert_eq!(fs::read(path.join("model.safetensors"))?, large);
    assert_eq!(hub.seen_of("/cdn/").last().and_then(|seen| seen.from), Some(1 << 20));
    Ok(())
}

async fn answer(cluster: &Cluster) -> Result<Value> {
    let parameters = json!({ "max_new_tokens": 12, "details": true });
    let body = json!({ "inputs": "hello there, general", "parameters": parameters });
    let request = reqwest::Client::new()
        .post(format!("{}/generate", cluster.url()))
        .json(&body);
    let answer: Value = request.send().await?.error_for_status()?.json().await?;
    Ok(json!([
        answer["generated_text"],
        answer["details"]["tokens"]
            .as_array()
            .map(|tokens| { tokens.iter().map(|token| token["id"].clone()).collect::<Vec<_>>() })
    ]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_serves_a_model_from_a_hub_as_it_serves_it_from_a_path() -> Result<()> {
    let (hub, cache) = (Hub::start().await?, TempDir::new()?);
    hub.publish_directory("tiny/model", 'd', &tiny_model())?;
    hub.require(TOKEN);
    let token = cache.path().join("token");
    fs::write(&token, format!("{TOKEN}\n"))?;
    let mut spec = ClusterSpec::pair("hf://tiny/model@main");
    spec.settings = settings(&hub, cache.path());
    spec.settings.push(format!("model.hub_token_file={}", token.display()));

    // While the weights come, the front door is open, and says that it cannot serve.
    let weights = fs::read(tiny_model().join("model.safetensors"))?;
    let part = unfinished(cache.path(), &weights);
    hub.fault("/cdn/", Fault::Pause(weights.len() / 2));
    let mut cluster = Cluster::without_nodes(spec)?;
    cluster.start_coordinator()?;
    cluster.start_node("prefill", 0)?;
    until("a part is asked for", || {
        hub.seen_of("/cdn/").iter().any(|seen| seen.sent == weights.len() / 2)
    })
    .await?;
    let health = format!("{}/health", cluster.url());
    let mut status = 0;
    let deadline = Clock.now() + PATIENCE;
    while status == 0 && Clock.now() < deadline {
        status = reqwest::get(&health).await.map_or(0, |answer| answer.status().as_u16());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(status, 503, "{}", cluster.logs());
    // SIGTERM ends a fetch at once, and leaves what is there.
    let ended = tokio::task::block_in_place(|| cluster.terminate("prefill-0", PATIENCE))?;
    assert!(ended.success() && part.exists(), "{ended}");

    cluster.start_node("prefill", 0)?;
    cluster.start_node("decode", 0)?;
    cluster.ready().await?;
    let models: Value = reqwest::get(format!("{}/v1/models", cluster.url()))
        .await?
        .json()
        .await?;
    assert_eq!(models["data"][0]["id"], "tiny/model");
    assert!(!cluster.logs().contains(TOKEN));
    let fetched = answer(&cluster).await?;
    drop(cluster);

    let local = Cluster::start(ClusterSpec::pair(tiny_model())).await?;
    assert_eq!(fetched, answer(&local).await?);
    assert!(root(cache.path()).join("refs/main").exists());
    Ok(())
}
