//! `scripts/bench first-token`: how far the time to first token that the server tells is from the one that clients see.
//!
//! Streams are begun at a constant rate, whatever has become of those before. Each asks where its time went, and so is told the value
//! that went into `baton_time_to_first_token_seconds`; the client's clock runs from before it sends the request until the first event
//! is there. What lies between is the network, and how long the threads of either end wait for a core once there is something for
//! them: beside nodes that compute, the client's own wait was most of it. Therefore its threads go before others, where that is
//! allowed; the server's do not, so what clients wait for its threads is in the difference.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use integration_tests::cluster::{Cluster, ClusterSpec, metric_sum};
use load_generator::core::timing::{FIRST, parse};
use reqwest::Client;
use runtime::clock::Clock;
use serde_json::json;

use crate::pin::raise;

const NAME: &str = "bench";

/// Arguments of `scripts/bench first-token`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// GGUF file or model directory; scripts/bench names the default model.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Requests.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(10..=100_000))]
    requests: u32,
    /// Requests a second.
    #[arg(long, default_value_t = 5.0)]
    rate: f64,
    /// Words of each prompt.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(1..=4_096))]
    words: u32,
    /// Tokens of each answer.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=4_096))]
    tokens: u32,
    /// Another setting of all processes, SECTION.FIELD=VALUE; may be repeated.
    #[arg(long, value_name = "SETTING")]
    set: Vec<String>,
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(
        args.rate.is_finite() && args.rate > 0.0,
        "--rate {}: right is a number above 0",
        args.rate
    );
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(measure(args))
}

async fn measure(args: &Args) -> Result<()> {
    let mut spec = ClusterSpec::pair(args.model.clone()).set(format!("model.model_name={NAME}"));
    spec.settings.extend(args.set.iter().cloned());
    let cluster = Cluster::start(spec).await?;
    // After the start: what it started would go before others as well.
    let raised = raise(std::process::id())?;
    let client = Client::new();
    let url = format!("{}/v1/completions", cluster.url());
    // Connections are made, and pages touched.
    for number in 0..5 {
        ask(&client, &url, args, number).await?;
    }
    let counted = |page: &str| metric_sum(page, "baton_time_to_first_token_seconds_count");
    let before = counted(&cluster.metrics().await?);
    let start = Clock.now();
    let mut running = Vec::new();
    for number in 0..args.requests {
        let due = start + Duration::from_secs_f64(f64::from(number) / args.rate);
        tokio::time::sleep_until(due.into()).await;
        let (client, url) = (client.clone(), url.clone());
        let body = body(args, 5 + number);
        running.push(tokio::spawn(async move { send(&client, &url, body).await }));
    }
    let mut seen = Vec::new();
    for one in running {
        seen.push(one.await??);
    }
    let after = counted(&cluster.metrics().await?);
    ensure!(
        after - before == f64::from(args.requests),
        "{before} first tokens before, {after} after"
    );
    print(args, &seen, raised);
    Ok(())
}

/// Times to first token in milliseconds.
struct Seen {
    by_client: f64,
    by_server: f64,
}

fn body(args: &Args, number: u32) -> serde_json::Value {
    // No two prompts begin alike.
    let prompt = format!(
        "{number} {}",
        "once upon a time ".repeat(args.words.div_ceil(4) as usize)
    );
    json!({
        "model": NAME, "prompt": prompt, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": true, "stream": true,
    })
}

async fn ask(client: &Client, url: &str, args: &Args, number: u32) -> Result<Seen> {
    send(client, url, body(args, number)).await
}

async fn send(client: &Client, url: &str, body: serde_json::Value) -> Result<Seen> {
    let sent = Clock.now();
    let answer = client
        .post(url)
        .header("x-baton-phases", "1")
        .json(&body)
        .send()
        .await?;
    let (mut body, mut text, mut by_client) = (answer.error_for_status()?.bytes_stream(), Vec::new(), None);
    while let Some(bytes) = body.next().await {
        let bytes = bytes?;
        if bytes.windows(5).any(|window| window == b"data:") {
            by_client.get_or_insert_with(|| (Clock.now() - sent).as_secs_f64() * 1e3);
        }
        text.extend_from_slice(&bytes);
    }
    let text = String::from_utf8(text)?;
    let line = text.lines().find_map(|line| line.strip_prefix(": server-timing: "));
    let told = parse(line.with_context(|| format!("nothing told: {text}"))?);
    let first = told.iter().find(|(name, _)| name == FIRST);
    Ok(Seen {
        by_client: by_client.context("no event")?,
        by_server: first.context("no time to first token is told")?.1,
    })
}

/// One of the times of a request, or of two of them.
type Time = fn(&Seen) -> f64;

fn print(args: &Args, seen: &[Seen], raised: bool) {
    println!(
        "{} streams, {} a second, prompts of about {} words, {} tokens; times to first token in ms",
        args.requests, args.rate, args.words, args.tokens
    );
    if !raised {
        println!(
            "the client's threads may not go before others (this needs CAP_SYS_NICE): its own waits are in the difference"
        );
    }
    println!("{:<24} {:>9} {:>9} {:>9} {:>9}", "", "p50", "p90", "p99", "max");
    let rows: [(&str, Time); 3] = [
        ("seen by clients", |seen| seen.by_client),
        ("told by the server", |seen| seen.by_server),
        ("difference, each its own", |seen| seen.by_client - seen.by_server),
    ];
    let mut p99 = Vec::new();
    for (name, of) in rows {
        let mut all: Vec<f64> = seen.iter().map(of).collect();
        all.sort_unstable_by(f64::total_cmp);
        let at = |part: f64| all[((all.len() as f64 * part).ceil() as usize).clamp(1, all.len()) - 1];
        println!(
            "{name:<24} {:>9.3} {:>9.3} {:>9.3} {:>9.3}",
            at(0.5),
            at(0.9),
            at(0.99),
            at(1.0)
        );
        p99.push(at(0.99));
    }
    println!("p99 seen - p99 told: {:.3} ms", p99[0] - p99[1]);
}
