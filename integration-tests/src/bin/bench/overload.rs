//! `scripts/bench overload`: what a crowd that waits costs those who are served: tokens a second of a decode node that has
//! room for a few sequences, with as many requests as fit, and with many more that wait.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use integration_tests::client::post_ok;
use integration_tests::cluster::{Cluster, ClusterSpec, metric};
use integration_tests::ports;
use reqwest::Client;
use runtime::clock::Clock;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::report::{measured, median};

/// Between the first requests of a window and its beginning.
const SETTLE: Duration = Duration::from_millis(1_500);
/// Nobody is refused for waiting too long.
const PATIENCE_MS: u64 = 3_600_000;
/// The name of the served model.
const MODEL: &str = "crowded";
const IDLE_WITHIN: Duration = Duration::from_secs(60);

/// Arguments of `scripts/bench overload`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// GGUF file or model directory; scripts/bench names the default model.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Whole sequences that the decode node has room for.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    sequences: u16,
    /// Requests that wait in the other windows.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    waiting: u16,
    /// Tokens of a prompt.
    #[arg(long, value_name = "TOKENS", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    prompt: u32,
    /// Tokens of an answer. Admission looks 256 tokens ahead: longer ones can be in each other's way.
    #[arg(long, value_name = "TOKENS", default_value_t = 384, value_parser = clap::value_parser!(u32).range(2..=100_000))]
    tokens: u32,
    /// Rounds: a window with as many requests as fit, and one with the crowd.
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Length of a window, in seconds.
    #[arg(long, value_name = "S", default_value_t = 6, value_parser = clap::value_parser!(u16).range(1..=600))]
    seconds: u16,
    /// Another setting of all processes, SECTION.FIELD=VALUE; may be repeated.
    #[arg(long, value_name = "SETTING")]
    set: Vec<String>,
    /// Write all figures to a file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<()> {
    measured(args.json.as_deref(), measure(args))
}

/// The processes, and what is asked of them.
struct Crowd {
    cluster: Cluster,
    client: Client,
    decode_metrics: u16,
    prompt: u32,
    tokens: u32,
    window: Duration,
    asked: Arc<AtomicU64>,
}

/// One window.
#[derive(Clone, Copy, Debug)]
struct Window {
    tokens_per_s: f64,
    preemptions: f64,
    /// Sequences in a step of the decode node, on average.
    batch: f64,
    waiting: f64,
}

async fn measure(args: &Args) -> Result<Value> {
    let mut crowd = start(args).await?;
    let fit = usize::from(args.sequences);
    let all = fit + usize::from(args.waiting);
    println!(
        "room for {fit} sequences of {} + {} tokens; windows of {} s",
        args.prompt, args.tokens, args.seconds
    );
    crowd.window(fit).await?;
    let (mut calm, mut crowded) = (Vec::new(), Vec::new());
    for round in 0..args.rounds {
        // Whatever the machine does meanwhile, neither kind always comes first.
        let order = if round % 2 == 0 { [fit, all] } else { [all, fit] };
        for requests in order {
            let window = crowd.window(requests).await?;
            println!(
                "  {requests:>4} requests: {:>8.1} tokens/s, {:>4.0} preemptions, {:.2} sequences a step, {:.0} waiting",
                window.tokens_per_s, window.preemptions, window.batch, window.waiting
            );
            if requests == fit { &mut calm } else { &mut crowded }.push(window);
        }
    }
    let middle = |windows: &[Window], pick: fn(&Window) -> f64| median(windows.iter().map(pick).collect());
    let speed = |windows: &[Window]| middle(windows, |window| window.tokens_per_s);
    let ratios = calm
        .iter()
        .zip(&crowded)
        .map(|(calm, crowded)| crowded.tokens_per_s / calm.tokens_per_s);
    let ratio = median(ratios.collect());
    let preemptions: f64 = crowded.iter().map(|window| window.preemptions).sum();
    println!(
        "with {} more that wait: {:.1} tokens/s against {:.1}, ratio {ratio:.3} (medians of {} rounds); {preemptions:.0} preemptions",
        args.waiting,
        speed(&crowded),
        speed(&calm),
        args.rounds,
    );
    let each = |windows: &[Window]| {
        let rows = windows.iter().map(|window| {
            json!({
                "tokens_per_s": window.tokens_per_s, "preemptions": window.preemptions, "batch": window.batch,
                "waiting": window.waiting,
            })
        });
        rows.collect::<Vec<Value>>()
    };
    Ok(json!({
        "sequences": fit, "waiting": args.waiting, "prompt": args.prompt, "tokens": args.tokens, "ratio": ratio,
        "fit_tokens_per_s": speed(&calm), "crowd_tokens_per_s": speed(&crowded), "fit": each(&calm), "crowd": each(&crowded),
    }))
}

async fn start(args: &Args) -> Result<Crowd> {
    let longest = args.prompt + args.tokens;
    let mut spec = ClusterSpec::pair(args.model.clone())
        .set(format!("limits.max_seq_len={longest}"))
        .set(format!("model.model_name={MODEL}"))
        .set(format!("limits.max_iter_times={}", args.tokens))
        .set(format!("limits.request_timeout_ms={PATIENCE_MS}"))
        .set(format!("coordinator.queue_timeout_ms={PATIENCE_MS}"))
        .set("limits.max_queued_requests=8192")
        .set("limits.max_concurrent_requests=8192");
    spec.settings.extend(args.set.iter().cloned());
    let mut cluster = Cluster::without_nodes(spec)?;
    cluster.start_coordinator()?;
    let decode_metrics = ports::free_tcp()?;
    let room = format!(
        "engine.kv_pool_tokens={}",
        u32::from(args.sequences) * longest.next_multiple_of(16)
    );
    let listen = format!("node.metrics_listen=127.0.0.1:{decode_metrics}");
    cluster.start_process("prefill-0", "prefill-node", &[])?;
    cluster.start_process("decode-0", "decode-node", &[&room, &listen])?;
    cluster.ready().await?;
    Ok(Crowd {
        cluster,
        client: Client::new(),
        decode_metrics,
        prompt: args.prompt,
        tokens: args.tokens,
        window: Duration::from_secs(u64::from(args.seconds)),
        asked: Arc::default(),
    })
}

impl Crowd {
    /// Keeps so many requests open, and measures.
    async fn window(&mut self, requests: usize) -> Result<Window> {
        let mut clients = JoinSet::new();
        for _ in 0..requests {
            let (client, asked) = (self.client.clone(), Arc::clone(&self.asked));
            let (url, prompt, tokens) = (
                format!("{}/v1/completions", self.cluster.url()),
                self.prompt,
                self.tokens,
            );
            clients.spawn(async move {
                loop {
                    let number = asked.fetch_add(1, Ordering::Relaxed);
                    post_ok(&client, &url, &body(prompt, tokens, number)).await?;
                }
                #[allow(unreachable_code, reason = "says what the task returns")]
                anyhow::Ok(())
            });
        }
        tokio::time::sleep(SETTLE).await;
        let (from, before) = (Clock.now(), self.counters().await?);
        tokio::time::sleep(self.window).await;
        let (seconds, after) = (from.elapsed().as_secs_f64(), self.counters().await?);
        if let Some(ended) = clients.try_join_next() {
            ended??;
        }
        clients.shutdown().await;
        self.rest().await?;
        Ok(Window {
            tokens_per_s: (after.tokens - before.tokens) / seconds,
            preemptions: after.preemptions - before.preemptions,
            batch: (after.tokens - before.tokens) / (after.steps - before.steps),
            waiting: after.waiting,
        })
    }

    async fn counters(&self) -> Result<Counters> {
        let page = self.cluster.metrics().await?;
        let node = reqwest::get(format!("http://127.0.0.1:{}/metrics", self.decode_metrics))
            .await?
            .text()
            .await?;
        let value = |page: &str, name: &str| metric(page, name, &[]).unwrap_or(0.0);
        Ok(Counters {
            tokens: value(&page, "baton_generation_tokens_total"),
            waiting: value(&page, "baton_num_requests_waiting"),
            preemptions: value(&node, "baton_num_preemptions_total"),
            steps: value(&node, "baton_engine_step_seconds_count"),
        })
    }

    /// Until all that was given up is gone.
    async fn rest(&self) -> Result<()> {
        let deadline = Clock.now() + IDLE_WITHIN;
        loop {
            let page = self.cluster.metrics().await?;
            let value = |name: &str| metric(&page, name, &[]).unwrap_or(0.0);
            if value("baton_num_requests_waiting") + value("baton_num_requests_running") == 0.0 {
                return Ok(());
            }
            ensure!(Clock.now() < deadline, "requests that were given up are still there");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

struct Counters {
    tokens: f64,
    waiting: f64,
    preemptions: f64,
    steps: f64,
}

/// A prompt of its own for each request: nothing of it is cached.
fn body(prompt: u32, tokens: u32, number: u64) -> Value {
    let token = |i: u32| 10 + (u64::from(i) * 7 + number * 31 + u64::from(i * i) * number) % 400;
    let prompt: Vec<u64> = (0..prompt).map(token).collect();
    json!({
        "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": true,
    })
}
