//! One request at a time against an idle pair of nodes: TTFT, gaps between tokens, bytes moved, exposed transfer, memory.
//!
//! `cargo build --release --workspace --bins --example idle_request && target/release/examples/idle_request [REQUESTS]` ( needs the default
//! model). Client-side times, from sending the request to receiving the event's bytes, on one kept-alive connection.

#![allow(clippy::print_stdout, reason = "a measuring program prints its figures")]

use std::net::TcpListener;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use integration_tests::client::post_ok;
use integration_tests::cluster::{Cluster, ClusterSpec, metric};
use integration_tests::files::default_model;
use reqwest::Client;
use runtime::clock::Clock;
use serde_json::json;

const NEW_TOKENS: usize = 64;

/// What one streamed request took.
struct Sample {
    ttft: Duration,
    gaps: Vec<Duration>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let requests: usize = std::env::args()
        .nth(1)
        .map_or(Ok(20), |n| n.parse())
        .context("REQUESTS must be a number")?;
    let ports = [free_port()?, free_port()?];
    let spec = ClusterSpec {
        prefill: 0,
        decode: 0,
        ..ClusterSpec::pair(default_model()?)
    };
    let mut cluster = Cluster::without_nodes(ClusterSpec {
        prefill: 1,
        decode: 1,
        ..spec
    })?;
    cluster.start_coordinator()?;
    for (name, port) in ["prefill", "decode"].iter().zip(ports) {
        let listen = format!("node.metrics_listen=127.0.0.1:{port}");
        cluster.start_process(&format!("{name}-0"), &format!("{name}-node"), &[&listen])?;
    }
    cluster.ready().await?;
    let client = Client::new();
    for words in [20, 400, 1600] {
        let prompt = prompt(words);
        run(&client, &cluster, &prompt, 2).await?;
        let before = figures(ports).await?;
        let samples = run(&client, &cluster, &prompt, requests).await?;
        report(&client, &cluster, &prompt, &samples, before, figures(ports).await?).await?;
    }
    for name in ["coordinator", "prefill-0", "decode-0"] {
        let resident = cluster.process(name)?.resident_bytes()?;
        println!(
            "resident memory of {name}: {:.0} MiB",
            resident as f64 / f64::from(1 << 20)
        );
    }
    Ok(())
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Plain English of about as many tokens as words, never twice the same beginning for two lengths.
fn prompt(words: usize) -> String {
    let text = "the river runs past the old mill and on to the sea where ships wait for the morning tide and men sing";
    let body: Vec<_> = text.split(' ').cycle().take(words).collect();
    format!("{words} words: {}", body.join(" "))
}

async fn run(client: &Client, cluster: &Cluster, prompt: &str, requests: usize) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    for _ in 0..requests {
        let body = json!({"inputs": prompt, "parameters": {"max_new_tokens": NEW_TOKENS, "details": true}});
        let sent = Clock.now();
        let answer = client
            .post(format!("{}/generate_stream", cluster.url()))
            .json(&body)
            .send()
            .await?;
        ensure!(answer.status() == 200, "status {}", answer.status());
        let times = event_times(answer).await?;
        let first = *times.first().context("no event")?;
        let gaps = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        samples.push(Sample {
            ttft: first - sent,
            gaps,
        });
    }
    Ok(samples)
}

/// When each event was complete.
async fn event_times(answer: reqwest::Response) -> Result<Vec<Instant>> {
    let (mut times, mut tail) = (Vec::new(), Vec::new());
    let mut body = answer.bytes_stream();
    while let Some(chunk) = body.next().await {
        let now = Clock.now();
        for byte in chunk? {
            tail.push(byte);
            if tail.ends_with(b"\n\n") {
                if tail.starts_with(b"data:") {
                    times.push(now);
                }
                tail.clear();
            }
        }
    }
    Ok(times)
}

/// Handoffs, bytes and exposed seconds so far.
#[derive(Clone, Copy)]
struct Figures {
    handoffs: f64,
    bytes: f64,
    exposed: f64,
}

async fn figures(ports: [u16; 2]) -> Result<Figures> {
    let page = reqwest::get(format!("http://127.0.0.1:{}/metrics", ports[0]))
        .await?
        .text()
        .await?;
    let read = |name: &str| metric(&page, name, &[]).unwrap_or(0.0);
    Ok(Figures {
        handoffs: read("baton_kv_exposed_seconds_count"),
        bytes: read("baton_kv_sent_bytes_total"),
        exposed: read("baton_kv_exposed_seconds_sum"),
    })
}

async fn report(
    client: &Client,
    cluster: &Cluster,
    prompt: &str,
    samples: &[Sample],
    before: Figures,
    after: Figures,
) -> Result<()> {
    let body = json!({"inputs": prompt, "parameters": {"max_new_tokens": 1, "details": true}});
    let details = post_ok(client, &format!("{}/generate", cluster.url()), &body).await?;
    let prompt_tokens = details["details"]["prompt_tokens"]
        .as_u64()
        .context("no prompt_tokens")?;
    let handoffs = after.handoffs - before.handoffs;
    let first = samples.iter().map(|s| s.ttft).collect();
    // The first gap crosses the hand-over; the others are decode steps.
    let second = samples.iter().filter_map(|s| s.gaps.first().copied()).collect();
    let later = samples.iter().flat_map(|s| s.gaps.iter().skip(1).copied()).collect();
    println!(
        "{prompt_tokens} prompt tokens, {NEW_TOKENS} new, {} requests: TTFT {}; first gap {}; later gaps {}; \
         {:.0} KV bytes and {:.2} ms exposed transfer a handoff",
        samples.len(),
        quantiles(first),
        quantiles(second),
        quantiles(later),
        (after.bytes - before.bytes) / handoffs,
        1e3 * (after.exposed - before.exposed) / handoffs,
    );
    Ok(())
}

fn quantiles(mut values: Vec<Duration>) -> String {
    values.sort();
    let at = |q: f64| {
        values
            .get((q * (values.len() - 1) as f64) as usize)
            .copied()
            .unwrap_or_default()
    };
    format!(
        "p50 {:.1} ms, p99 {:.1} ms",
        1e3 * at(0.5).as_secs_f64(),
        1e3 * at(0.99).as_secs_f64()
    )
}
