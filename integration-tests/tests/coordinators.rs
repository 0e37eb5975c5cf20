//! Several coordinators over the same nodes: they know nothing of each other, and any of them may die.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use integration_tests::ask::MODEL_NAME;
use integration_tests::cluster::{Cluster, ClusterSpec, metric};
use integration_tests::trial::{IDLE_WITHIN, begin, pause, spec};
use integration_tests::vitals::idle_within;
use reqwest::{Client, Response};
use runtime::clock::Clock;
use serde_json::{Value, json};

const WORKERS: usize = 12;

fn two() -> ClusterSpec {
    ClusterSpec {
        coordinators: 2,
        ..spec(2, 2)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_nodes_of_a_dead_coordinator_serve_the_others_undisturbed() -> Result<()> {
    let (mut cluster, client, known) = begin(two(), 61).await?;
    let (first, second) = (cluster.url_of(0), cluster.url_of(1));
    for _ in 0..3 {
        let dying = known.load(&client, &second, WORKERS);
        let living = known.load(&client, &first, WORKERS);
        pause(700).await;
        cluster.kill("coordinator-1")?;
        pause(700).await;
        let died = dying.stop().await?;
        died.honest(true)?;
        let lived = living.stop().await?;
        lived.all_exact()?;
        eprintln!("one coordinator died: its clients {died}; the other's {lived}");
        // What the dead one had running is given back by the nodes.
        idle_within(&cluster, 4, IDLE_WITHIN).await?;
        let killed = Clock.now();
        cluster.start_process("coordinator-1", "coordinator", &[])?;
        cluster.ready().await?;
        eprintln!("it is back and has its nodes after {:?}", killed.elapsed());
        known.check(&client, &second, 0).await?;
    }
    Ok(())
}

async fn ask(client: &Client, url: &str, path: &str, key: &str, body: &Value) -> Result<Response> {
    let request = client
        .post(format!("{url}{path}"))
        .header("idempotency-key", key)
        .json(body);
    Ok(request.send().await?)
}

fn streamed(max_new_tokens: u32) -> Value {
    json!({"inputs": "a long way from here", "parameters": {
        "max_new_tokens": max_new_tokens, "do_sample": true, "details": true,
    }})
}

/// Text and seed of a stream.
fn told(events: &str) -> Result<(String, Value)> {
    let last = events
        .lines()
        .filter_map(|line| line.strip_prefix("data:"))
        .next_back()
        .context("no event")?;
    let last: Value = serde_json::from_str(last)?;
    let text = last["generated_text"]
        .as_str()
        .with_context(|| format!("no end: {last}"))?;
    Ok((text.to_owned(), last["details"]["seed"].clone()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_comes_back_with_its_key_gets_the_same_answer_here_or_elsewhere() -> Result<()> {
    let (mut cluster, client, _known) = begin(two(), 62).await?;
    let (first, second) = (cluster.url_of(0), cluster.url_of(1));
    let prefills = |page: &str| metric(page, "baton_time_to_first_token_seconds_count", &[]);
    let body = streamed(240);
    // The connection breaks in the middle: the same coordinator goes on.
    let mut broken = ask(&client, &first, "/generate_stream", "key-1", &body).await?;
    ensure!(broken.status() == 200, "{}", broken.status());
    let seen = broken.chunk().await?.context("a first event")?;
    drop(broken);
    let again = ask(&client, &first, "/generate_stream", "key-1", &body)
        .await?
        .text()
        .await?;
    ensure!(again.starts_with(&*String::from_utf8_lossy(&seen)), "another beginning");
    let whole = told(&again)?;
    let page = cluster.metrics().await?;
    eprintln!("calls answered: {:?}", prefills(&page));
    // Another coordinator, while the first is alive, and when it is dead.
    let elsewhere = ask(&client, &second, "/generate_stream", "key-1", &body)
        .await?
        .text()
        .await?;
    ensure!(told(&elsewhere)? == whole, "{elsewhere}\n{again}");
    let mut broken = ask(&client, &first, "/generate_stream", "key-2", &body).await?;
    let seen = broken.chunk().await?.context("a first event")?;
    cluster.kill("coordinator")?;
    let killed: Instant = Clock.now();
    let taken_over = ask(&client, &second, "/generate_stream", "key-2", &body)
        .await?
        .text()
        .await?;
    ensure!(
        taken_over.starts_with(&*String::from_utf8_lossy(&seen)),
        "the answer begins as it did"
    );
    told(&taken_over)?;
    ensure!(
        killed.elapsed() < Duration::from_secs(10),
        "answered after {:?}",
        killed.elapsed()
    );
    let plain = json!({"model": MODEL_NAME, "prompt": "x", "temperature": 1.0, "max_tokens": 30});
    let answer: Value = ask(&client, &second, "/v1/completions", "key-3", &plain)
        .await?
        .json()
        .await?;
    let again: Value = ask(&client, &second, "/v1/completions", "key-3", &plain)
        .await?
        .json()
        .await?;
    ensure!(
        answer["choices"] == again["choices"] && answer["choices"][0]["text"].is_string(),
        "{answer} {again}"
    );
    quiet(&cluster, &client, &second).await
}

/// The nodes own nothing any more, by the word of a living coordinator.
async fn quiet(cluster: &Cluster, client: &Client, url: &str) -> Result<()> {
    let deadline = Clock.now() + IDLE_WITHIN;
    loop {
        let page = client.get(format!("{url}/metrics")).send().await?.text().await?;
        let of = |kind: &str| -> f64 {
            let kind = format!("kind=\"{kind}\"");
            let lines = page
                .lines()
                .filter(|line| line.starts_with("baton_node_blocks") && line.contains(&kind));
            lines
                .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
                .sum()
        };
        if of("total") > 0.0 && of("total") == of("free") + of("cached") && of("booked") == 0.0 {
            return Ok(());
        }
        ensure!(Clock.now() < deadline, "still owned:\n{}", cluster.logs());
        pause(20).await;
    }
}
