//! `scripts/bench interfere`: what prompts do to running decodes, on nodes of their own and on one node for both.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use config::ConfigArgs;
use integration_tests::client::post_ok;
use integration_tests::cluster::{Cluster, ClusterSpec};
use reqwest::Client;
use runtime::clock::Clock;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::gaps::{Gaps, event_times, seconds};
use crate::report::median;
use crate::{mixed, pin};

/// Tokens that a decoding stream starts with, about.
const CONTEXT_WORDS: usize = 480;
/// Tokens that a stream may generate: more than it can while it waits for the others and is measured.
const ROOM: usize = 2048;
/// Time between the last stream's first token and the first gap that counts.
const SETTLE: Duration = Duration::from_millis(300);
/// Longest wait for a first token.
const FIRST_TOKEN_WITHIN: Duration = Duration::from_secs(120);

/// Arguments of `scripts/bench interfere`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// GGUF file or model directory; scripts/bench names the default model.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Streams that decode.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    streams: u16,
    /// Length of the prompts that are prefilled meanwhile, in tokens, about.
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(16..=100_000))]
    prompt: u32,
    /// Rounds: calm, prompts, calm, prompts with hand-over; then calm once more.
    #[arg(long, value_name = "R", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Length of a measured window, in seconds.
    #[arg(long, value_name = "S", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=600))]
    seconds: u16,
    /// Core of the prefill node, of the coordinator and of this client.
    #[arg(long, value_name = "CORE", default_value_t = 0)]
    prefill_core: usize,
    /// Core of the decode node.
    #[arg(long, value_name = "CORE", default_value_t = 1)]
    decode_core: usize,
    /// Only one of the two cases.
    #[arg(long, value_name = "CASE")]
    only: Option<Case>,
    /// Another setting of the nodes, SECTION.FIELD=VALUE; may be repeated.
    #[arg(long, value_name = "SETTING")]
    set: Vec<String>,
    /// Write all figures to a file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The two cases.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Case {
    /// Prompts on a prefill node, streams on a decode node.
    Separate,
    /// Prompts and streams on one engine.
    Mixed,
}

/// What happens while a window is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Calm,
    /// Prompts that end with their first token: the decode node never hears of them.
    Prompts,
    /// Prompts whose KV is handed over, for one more token.
    HandedOver,
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut json = args
        .json
        .as_ref()
        .map(|path| std::fs::File::create(path).with_context(|| format!("--json {}", path.display())))
        .transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let mut found = json!({});
    if args.only != Some(Case::Separate) {
        found["mixed"] = runtime.block_on(mixed::run(&mixed::Setting {
            config: node_config(args)?,
            streams: usize::from(args.streams),
            context: CONTEXT_WORDS,
            prompt: args.prompt as usize,
            rounds: usize::from(args.rounds),
            core: args.decode_core,
        }))?;
    }
    if args.only != Some(Case::Mixed) {
        found["separate"] = runtime.block_on(separate(args))?;
    }
    if let Some(file) = &mut json {
        writeln!(file, "{found:#}")?;
    }
    Ok(())
}

fn node_config(args: &Args) -> Result<config::Config> {
    let mut set = args.set.clone();
    set.push(format!("model.path={}", args.model.display()));
    Ok(config::load(&ConfigArgs {
        config: None,
        set,
        print_config: false,
        check: false,
    })?)
}

/// A running pair of nodes, each on its core.
struct Pair {
    cluster: Cluster,
    client: Client,
    streams: usize,
    window: Duration,
    words: usize,
    prompts: u64,
}

async fn separate(args: &Args) -> Result<Value> {
    let mut spec = ClusterSpec::pair(args.model.clone());
    spec.settings.push(format!("limits.max_iter_times={ROOM}"));
    spec.settings.extend(args.set.iter().cloned());
    let mut cluster = Cluster::start(spec).await?;
    let mut raised = pin::raise(std::process::id())?;
    for (name, core) in [
        ("prefill-0", args.prefill_core),
        ("decode-0", args.decode_core),
        ("coordinator", args.prefill_core),
    ] {
        let pid = cluster.process(name)?.pid();
        pin::to_core(pid, core)?;
        if name == "coordinator" {
            raised &= pin::raise(pid)?;
        }
    }
    pin::to_core(std::process::id(), args.prefill_core)?;
    println!(
        "separate nodes: decode node on core {}; prefill node, coordinator and this client on core {}, the latter two with {}",
        args.decode_core,
        args.prefill_core,
        if raised {
            "raised priority"
        } else {
            "normal priority (raising it is not allowed)"
        },
    );
    let mut pair = Pair {
        cluster,
        client: Client::new(),
        streams: usize::from(args.streams),
        window: Duration::from_secs(u64::from(args.seconds)),
        words: args.prompt as usize,
        prompts: 0,
    };
    let tokens = pair.calibrate().await?;
    let phases = [Phase::Calm, Phase::Prompts, Phase::Calm, Phase::HandedOver];
    let mut windows: Vec<(Phase, Gaps, usize)> = Vec::new();
    for phase in phases
        .iter()
        .cycle()
        .take(4 * usize::from(args.rounds))
        .chain([&Phase::Calm])
    {
        let (gaps, prompts) = pair.window(*phase).await?;
        println!("  {phase:?}: {}; {prompts} prompts", gaps.to_text());
        windows.push((*phase, gaps, prompts));
    }
    Ok(summary(args, tokens, &windows))
}

/// Ratios of each disturbed window to the mean of the calm ones before and after it.
fn summary(args: &Args, tokens: u64, windows: &[(Phase, Gaps, usize)]) -> Value {
    let mut found = json!({ "streams": args.streams, "prompt_tokens": tokens, "rounds": args.rounds });
    for (phase, name) in [
        (Phase::Prompts, "prompts of one token"),
        (Phase::HandedOver, "prompts that are handed over"),
    ] {
        let movements = |q: f64| -> Vec<f64> {
            let moved = windows.windows(3).filter(|three| three[1].0 == phase);
            moved
                .map(|three| {
                    let calm = f64::midpoint(three[0].1.quantile(q), three[2].1.quantile(q));
                    three[1].1.quantile(q) / calm
                })
                .collect()
        };
        let (p50, p99) = (movements(0.5), movements(0.99));
        println!(
            "{} streams, {name}, {tokens} tokens each: ITL against calm: p50 {:+.1} %, p99 {:+.1} % (medians of {} rounds)",
            args.streams,
            100.0 * (median(p50.clone()) - 1.0),
            100.0 * (median(p99.clone()) - 1.0),
            args.rounds
        );
        found[format!("{phase:?}").to_lowercase()] = json!({
            "p50_ratio": median(p50.clone()),
            "p99_ratio": median(p99.clone()),
            "p50_rounds": p50,
            "p99_rounds": p99,
        });
    }
    let of = |wanted: Phase, q: f64| {
        let chosen = windows.iter().filter(|(phase, ..)| *phase == wanted);
        median(chosen.map(|(_, gaps, _)| gaps.quantile(q)).collect())
    };
    found["calm_p50_ms"] = json!(of(Phase::Calm, 0.5));
    found["calm_p99_ms"] = json!(of(Phase::Calm, 0.99));
    found
}

impl Pair {
    /// Text that is like no other from its first word on, or a prefix cache would answer.
    fn text(&mut self, words: usize) -> String {
        self.prompts += 1;
        let text =
            "the river runs past the old mill and on to the sea where ships wait for the morning tide and men sing";
        let body: Vec<_> = text.split(' ').cycle().take(words.saturating_sub(4)).collect();
        format!("{} times. {}", self.prompts, body.join(" "))
    }

    async fn ask(&mut self, words: usize, max_new_tokens: usize) -> Result<u64> {
        let text = self.text(words);
        let answer = post_ok(
            &self.client,
            &format!("{}/generate", self.cluster.url()),
            &body(&text, max_new_tokens),
        )
        .await?;
        answer["details"]["prompt_tokens"].as_u64().context("no prompt_tokens")
    }

    /// Finds how many words make a prompt of the length that is asked for; its tokens.
    async fn calibrate(&mut self) -> Result<u64> {
        let wanted = self.words as f64;
        let tokens = self.ask(self.words, 1).await?;
        self.words = (wanted * wanted / tokens as f64) as usize;
        self.ask(self.words, 2).await
    }

    /// One window: fresh streams, so that all windows see the same lengths; their gaps, and the prompts answered.
    async fn window(&mut self, phase: Phase) -> Result<(Gaps, usize)> {
        let mut running = JoinSet::new();
        let mut times = Vec::new();
        for _ in 0..self.streams {
            let text = self.text(CONTEXT_WORDS);
            let mine = Arc::new(Mutex::new(Vec::new()));
            times.push(Arc::clone(&mine));
            let request = self
                .client
                .post(format!("{}/generate_stream", self.cluster.url()))
                .json(&body(&text, ROOM));
            running.spawn(async move {
                let answer = request.send().await?;
                ensure!(answer.status() == 200, "status {}", answer.status());
                event_times(answer, |now| lock(&mine).push(now)).await
            });
        }
        self.wait_for_tokens(&times).await?;
        tokio::time::sleep(SETTLE).await;
        let from = Clock.now();
        let mut prompts = 0;
        while from.elapsed() < self.window {
            match phase {
                Phase::Calm => tokio::time::sleep(self.window.saturating_sub(from.elapsed())).await,
                Phase::Prompts => {
                    self.ask(self.words, 1).await?;
                    prompts += 1;
                }
                Phase::HandedOver => {
                    self.ask(self.words, 2).await?;
                    prompts += 1;
                }
            }
        }
        // The last prompt may have run beyond the window: what it did to the streams counts.
        let to = Clock.now();
        if let Some(ended) = running.try_join_next() {
            ended??;
            bail!(
                "a stream ended within {}; a shorter window (--seconds) would be right",
                seconds(from.elapsed())
            );
        }
        running.shutdown().await;
        let streams: Vec<Vec<Instant>> = times.iter().map(|times| lock(times).clone()).collect();
        Ok((Gaps::between(&streams, from, to), prompts))
    }

    /// Until every stream has a token from the decode node: the first is the prefill node's.
    async fn wait_for_tokens(&self, times: &[Arc<Mutex<Vec<Instant>>>]) -> Result<()> {
        let deadline = Clock.now() + FIRST_TOKEN_WITHIN;
        while times.iter().any(|times| lock(times).len() < 2) {
            ensure!(
                Clock.now() < deadline,
                "a stream has no second token after {}",
                seconds(FIRST_TOKEN_WITHIN)
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }
}

fn lock(times: &Mutex<Vec<Instant>>) -> std::sync::MutexGuard<'_, Vec<Instant>> {
    times.lock().unwrap_or_else(PoisonError::into_inner)
}

fn body(text: &str, max_new_tokens: usize) -> Value {
    json!({"inputs": text, "parameters": {"max_new_tokens": max_new_tokens, "details": true}})
}
