//! `scripts/bench coordinator`: what the front door costs by itself. Its nodes are fakes that answer at once, so all the
//! time and CPU that is left is the coordinator's, the fakes' and this client's, on the same cores. The same nodes are also
//! asked without a coordinator, in turns: the difference of the medians is what it adds.

mod client;
mod direct;
mod nodes;
mod telemetry;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use integration_tests::cluster::{Cluster, ClusterSpec};
use model_files::{ModelFiles, TextModel};
use protocol::ids::Role;
use runtime::clock::Clock;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use self::client::{Connection, request};
use self::direct::Direct;
use self::nodes::FakeNode;
use crate::report::{measured, median};

/// Positions of the model that the coordinator is told of: more than any default model has.
const POSITIONS: u32 = 65_536;
/// Tokens of an answer: the first from the prefill node, the others from the decode node.
const ANSWER: u32 = 4;

/// Arguments of `scripts/bench coordinator`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// GGUF file; scripts/bench names the default model. Only its tokenizer is used.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Lengths of the prompts, in tokens, about.
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', default_values_t = [100, 1_000, 10_000])]
    prompts: Vec<usize>,
    /// Connections that ask at once.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1024))]
    connections: u16,
    /// Length of a measured window, in seconds.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=600))]
    seconds: u16,
    /// Requests that wait at once while memory is measured.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=30_000))]
    waiting: u32,
    /// Another setting of the coordinator, SECTION.FIELD=VALUE; may be repeated.
    #[arg(long, value_name = "SETTING")]
    set: Vec<String>,
    /// Measure what metrics and traces cost instead, with prompts of the first length: neither, metrics, and both with every request
    /// traced and exported to a collector on this machine, in turns.
    #[arg(long)]
    telemetry: bool,
    /// With --telemetry: so many windows of each kind.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Write all figures to a file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<()> {
    measured(args.json.as_deref(), measure(args))
}

async fn measure(args: &Args) -> Result<Value> {
    let folder = tempfile::tempdir()?;
    let model = widened(&args.model, folder.path())?;
    let text = ModelFiles::open(&model)?.text()?;
    if args.telemetry {
        return telemetry::measure(args, &model, &text).await;
    }
    let mut rows = Vec::new();
    let mut bench = Bench::start(args, &model, &text, (false, Vec::new())).await?;
    for tokens in &args.prompts {
        rows.push(bench.speed(args, &text, *tokens).await?);
    }
    drop(bench);
    let mut full = Bench::start(args, &model, &text, (true, Vec::new())).await?;
    let memory = full.memory(args).await?;
    Ok(json!({ "rows": rows, "memory": memory }))
}

/// A copy of the model that says it has [`POSITIONS`] positions, so that long prompts are taken.
fn widened(model: &Path, folder: &Path) -> Result<PathBuf> {
    let mut bytes = std::fs::read(model).with_context(|| format!("--model {}", model.display()))?;
    let key = b"llama.context_length";
    let at = bytes.windows(key.len()).position(|window| window == key);
    // After the key: its type, which is 4 (u32), and its value.
    let at = at.context("the model's file has no llama.context_length")? + key.len();
    ensure!(
        bytes[at..at + 4] == 4_u32.to_le_bytes(),
        "llama.context_length is no u32"
    );
    bytes[at + 4..at + 8].copy_from_slice(&POSITIONS.to_le_bytes());
    let path = folder.join("widened.gguf");
    std::fs::write(&path, bytes)?;
    Ok(path)
}

/// A coordinator and its fakes.
struct Bench {
    cluster: Cluster,
    /// The same nodes without the coordinator.
    direct: Direct,
    /// The fakes live as long as these.
    _nodes: Vec<tokio::task::JoinHandle<()>>,
}

impl Bench {
    /// `full`: the decode node has no blocks. `settings`: more of the coordinator.
    async fn start(args: &Args, model: &Path, text: &TextModel, (full, settings): (bool, Vec<String>)) -> Result<Self> {
        let room = args.waiting.max(u32::from(args.connections)) + 64;
        let mut spec = ClusterSpec {
            prefill: 1,
            decode: 1,
            ..ClusterSpec::pair(model)
        }
        .set("limits.max_input_token_len=60000")
        .set("limits.max_seq_len=61000")
        .set("engine.kv_pool_tokens=65536")
        .set(format!("limits.max_concurrent_requests={room}"))
        .set(format!("limits.max_queued_requests={room}"))
        .set("coordinator.queue_timeout_ms=600000")
        // The fakes report once, and would be taken for nodes that hang.
        .set("coordinator.node_stall_ms=600000");
        spec.settings.extend(args.set.iter().cloned().chain(settings));
        let mut cluster = Cluster::without_nodes(spec)?;
        cluster.start_coordinator()?;
        let certs = cluster.dir().join("certs");
        let coordinator = format!("127.0.0.1:{}", cluster.control_port());
        up(&mut cluster).await?;
        let mut nodes = Vec::new();
        for (role, name) in [(Role::Prefill, "prefill-0"), (Role::Decode, "decode-0")] {
            let node = FakeNode {
                role,
                name,
                certs: &certs,
                coordinator: &coordinator,
                text,
                full: full && role == Role::Decode,
            };
            nodes.push(node.start().await?);
        }
        cluster.ready().await?;
        let direct = Direct::start(&certs, text).await?;
        Ok(Self {
            cluster,
            direct,
            _nodes: nodes,
        })
    }

    /// Throughput, CPU and latency with prompts of about `tokens` tokens.
    async fn speed(&mut self, args: &Args, text: &TextModel, tokens: usize) -> Result<Value> {
        let (prompt, tokens) = prompt_of(text, tokens)?;
        let asked = request(&prompt, ANSWER);
        let port = self.cluster.http_port();
        let mut alone = Connection::open(port).await?;
        for _ in 0..20 {
            alone.ask(&asked).await?;
        }
        let window = Duration::from_secs(u64::from(args.seconds));
        let ids = text.tokenizer.encode(&prompt)?;
        let (from, mut latencies, mut direct) = (Clock.now(), Vec::new(), Vec::new());
        // In turns, so that what else the machine does is in both.
        while from.elapsed() < window {
            for _ in 0..50 {
                latencies.push(1e3 * alone.ask(&asked).await?.as_secs_f64());
            }
            for _ in 0..50 {
                direct.push(1e3 * self.direct.ask(&ids, ANSWER).await?.as_secs_f64());
            }
        }
        let (rate, cpu_us) = throughput(&mut self.cluster, &["coordinator"], &asked, args.connections, window).await?;
        latencies.sort_by(f64::total_cmp);
        let p99 = latencies[(latencies.len() * 99 / 100).min(latencies.len() - 1)];
        let p50 = median(latencies);
        let nodes_p50 = median(direct);
        let added_p50 = p50 - nodes_p50;
        println!(
            "prompts of {tokens:>6} tokens: {rate:>7.0} requests/s over {} connections, {cpu_us:>7.1} us of the coordinator's CPU each; \
             alone p50 {p50:.3} ms, p99 {p99:.3} ms; the nodes without it p50 {nodes_p50:.3} ms, so it adds {added_p50:.3} ms",
            args.connections
        );
        Ok(json!({
            "prompt_tokens": tokens, "requests_per_s": rate, "cpu_us_per_request": cpu_us,
            "latency_p50_ms": p50, "latency_p99_ms": p99, "nodes_p50_ms": nodes_p50, "added_p50_ms": added_p50, "connections": args.connections, "answer_tokens": ANSWER,
        }))
    }

    /// Memory of requests that wait: the decode node has no blocks.
    async fn memory(&mut self, args: &Args) -> Result<Value> {
        let port = self.cluster.http_port();
        let asked = request(&"word ".repeat(100), ANSWER);
        let before = self.cluster.process("coordinator")?.resident_bytes()?;
        let mut connections = Vec::new();
        for _ in 0..args.waiting {
            let mut connection = Connection::open(port).await?;
            connection.send(&asked).await?;
            connections.push(connection);
        }
        let deadline = Clock.now() + Duration::from_secs(120);
        let waiting = loop {
            let page = self.cluster.metrics().await?;
            let waiting = integration_tests::cluster::metric(&page, "baton_num_requests_waiting", &[]);
            if waiting >= Some(f64::from(args.waiting)) {
                break waiting;
            }
            ensure!(
                Clock.now() < deadline,
                "only {waiting:?} requests wait after two minutes"
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        let after = self.cluster.process("coordinator")?.resident_bytes()?;
        let each = (after.saturating_sub(before)) as f64 / f64::from(args.waiting);
        println!(
            "{} requests of 100 tokens waiting: {:.1} MiB more than before, {each:.0} bytes each, their connections included",
            waiting.unwrap_or_default(),
            (after.saturating_sub(before)) as f64 / f64::from(1 << 20)
        );
        Ok(json!({ "waiting": waiting, "bytes_each": each }))
    }
}

/// Requests per second over so many connections, and microseconds of the named processes' CPU for each.
async fn throughput(
    cluster: &mut Cluster,
    names: &[&str],
    asked: &[u8],
    connections: u16,
    window: Duration,
) -> Result<(f64, f64)> {
    let port = cluster.http_port();
    let mut cpu = || -> Result<f64> { names.iter().map(|name| cpu_of(cluster.process(name)?.pid())).sum() };
    let (cpu_before, from) = (cpu()?, Clock.now());
    let mut workers = JoinSet::new();
    for _ in 0..connections {
        let asked = asked.to_vec();
        workers.spawn(async move {
            let (mut connection, mut count) = (Connection::open(port).await?, 0_u64);
            while from.elapsed() < window {
                connection.ask(&asked).await?;
                count += 1;
            }
            anyhow::Ok(count)
        });
    }
    let mut answered = 0;
    while let Some(count) = workers.join_next().await {
        answered += count??;
    }
    let seconds = from.elapsed().as_secs_f64();
    let cpu_us = 1e6 * (cpu()? - cpu_before) / answered as f64;
    Ok((answered as f64 / seconds, cpu_us))
}

/// Waits until the coordinator answers at all.
async fn up(cluster: &mut Cluster) -> Result<()> {
    let deadline = Clock.now() + Duration::from_secs(60);
    while Connection::open(cluster.http_port()).await.is_err() {
        ensure!(
            Clock.now() < deadline,
            "the coordinator does not listen:\n{}",
            cluster.logs()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// A text of about `tokens` tokens, and how many it has.
fn prompt_of(text: &TextModel, tokens: usize) -> Result<(String, usize)> {
    const WORDS: &str = "the river runs past the old mill and on to the sea where ships wait for the morning tide ";
    let words: Vec<&str> = WORDS.split_inclusive(' ').collect();
    let prompt: String = words.iter().cycle().take(tokens).copied().collect();
    let count = text.tokenizer.encode(&prompt)?.len();
    Ok((prompt, count))
}

/// CPU time of a process so far, in seconds.
fn cpu_of(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, rest) = stat.rsplit_once(')').context("no name in /proc/PID/stat")?;
    let ticks = |i: usize| -> Result<f64> { Ok(rest.split_whitespace().nth(i).context("a short line")?.parse()?) };
    // utime and stime, in hundredths of a second.
    Ok((ticks(11)? + ticks(12)?) / 100.0)
}
