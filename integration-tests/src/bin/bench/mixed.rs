//! The other half of `scripts/bench interfere`: prompts and running decodes on one engine, as on a decode node that has
//! to compute a prompt itself because no prefill node is left. The engine's own thread is driven, without a network.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use config::Config;
use engine::engine::Engine;
use engine::limits::EngineLimits;
use engine::sequence::SequenceSpec;
use node_shell::engine_thread::{self, SequenceEvent};
use node_shell::handle::{EngineHandle, SequenceStream};
use runtime::clock::Clock;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::gaps::Gaps;
use crate::pin;
use crate::report::median;

/// Tokens that each stream may generate.
const ROOM: usize = 4096;
/// How long a calm window lasts, before each prompt.
const CALM: Duration = Duration::from_millis(1500);

/// What is measured.
pub(crate) struct Setting {
    pub(crate) config: Config,
    /// Streams that decode.
    pub(crate) streams: usize,
    /// Tokens each of them starts with.
    pub(crate) context: usize,
    /// Tokens of the prompts.
    pub(crate) prompt: usize,
    /// Prompts, each after a calm window.
    pub(crate) rounds: usize,
    /// The engine's core.
    pub(crate) core: usize,
}

/// An engine thread, and the made-up prompts for it.
struct Node {
    handle: EngineHandle,
    vocab: u64,
    prompts: u64,
}

/// Measures and prints.
pub(crate) async fn run(setting: &Setting) -> Result<Value> {
    let mut engine = setting.config.engine.clone();
    let each = setting.context + ROOM + engine.kv_block_tokens;
    engine.kv_pool_bytes = 0;
    engine.kv_pool_tokens = (each * setting.streams + 2 * setting.prompt).next_multiple_of(engine.kv_block_tokens);
    let longest = each.max(setting.prompt + 2);
    let loaded = model::load(&setting.config.model, &engine, longest)?;
    let limits = EngineLimits {
        total_blocks: loaded.pool.total_blocks(),
        block_tokens: engine.kv_block_tokens,
        max_num_seqs: engine.max_num_seqs,
        max_batch_tokens: engine.max_batch_tokens,
        prefill_chunk_tokens: engine.prefill_chunk_tokens,
        mixed_prefill_tokens: engine.mixed_prefill_tokens,
        mixed_prefill_time: Duration::from_millis(engine.mixed_prefill_ms),
        prefix_cache: engine.prefix_cache,
        groups: loaded.layout.groups.whole(),
        max_seq_len: longest.min(loaded.max_position_embeddings as usize),
    };
    let (handle, thread) = engine_thread::start(Engine::new(limits)?, Box::new(loaded.runner), Clock, 64, None)?;
    pin::to_core(std::process::id(), setting.core)?;
    println!(
        "one mixed node on core {}: {} threads, {} decodes from {} tokens on, prompts of {} tokens",
        setting.core, engine.threads, setting.streams, setting.context, setting.prompt
    );
    let mut node = Node {
        handle: handle.clone(),
        vocab: u64::from(loaded.identity.vocab_size),
        prompts: 0,
    };
    let found = measure(setting, &mut node).await;
    handle.close();
    let joined = tokio::task::spawn_blocking(move || thread.join()).await?;
    anyhow::ensure!(joined, "the engine thread has panicked");
    found
}

async fn measure(setting: &Setting, node: &mut Node) -> Result<Value> {
    // Alone, for what a prompt's tokens cost: those at its end, which see the most others, cost most.
    let last = (setting.prompt / 8).max(1);
    let (mut alone, mut each) = (Vec::new(), Vec::new());
    for _ in 0..setting.rounds.max(3) {
        let shorter = node.alone((setting.prompt - last).max(1)).await?;
        let whole = node.alone(setting.prompt).await?;
        alone.push(whole);
        each.push((whole - shorter) / last as f64);
    }
    let alone = Alone {
        seconds: median(alone),
        each_ms: 1e3 * median(each),
    };
    let mut followers: Vec<JoinHandle<Vec<Instant>>> = Vec::new();
    let mut stop = Vec::new();
    for _ in 0..setting.streams {
        let mut stream = node.add(setting.context, ROOM).await?;
        next_token(&mut stream).await?;
        let (sender, receiver) = tokio::sync::oneshot::channel();
        stop.push(sender);
        followers.push(tokio::spawn(follow(stream, receiver)));
    }
    let mut windows = Vec::new();
    for _ in 0..setting.rounds {
        tokio::time::sleep(CALM / 5).await;
        let calm_from = Clock.now();
        tokio::time::sleep(CALM).await;
        let from = Clock.now();
        node.first_token(setting.prompt).await?;
        windows.push((calm_from, from, Clock.now()));
    }
    for sender in stop {
        // A follower that is gone has told its times already.
        let _gone = sender.send(());
    }
    let mut streams = Vec::new();
    for follower in followers {
        streams.push(follower.await?);
    }
    let mut rounds = Vec::new();
    for (calm_from, from, to) in windows {
        let (calm, busy) = (
            Gaps::between(&streams, calm_from, from),
            Gaps::between(&streams, from, to),
        );
        println!("  calm: {}", calm.to_text());
        println!(
            "  while a prompt is computed, {:.2} s: {}",
            (to - from).as_secs_f64(),
            busy.to_text()
        );
        rounds.push((calm, busy, to - from));
    }
    Ok(report(setting, &alone, &rounds))
}

/// The prompt on the idle node.
struct Alone {
    seconds: f64,
    /// Milliseconds for each of its last tokens.
    each_ms: f64,
}

fn report(setting: &Setting, alone: &Alone, rounds: &[(Gaps, Gaps, Duration)]) -> Value {
    let of = |pick: &dyn Fn(&(Gaps, Gaps, Duration)) -> f64| median(rounds.iter().map(pick).collect());
    // Calm gaps scatter, too: each quantile is held against the same one of the calm window before it.
    let longer = |q: f64| of(&|(calm, busy, _)| busy.quantile(q) - calm.quantile(q));
    let (median_delay, delay) = (longer(0.5), longer(0.99));
    let worst = of(&|(calm, busy, _)| busy.largest() - calm.largest());
    let (calm, late_calm) = (of(&|round| round.0.quantile(0.5)), of(&|round| round.0.quantile(0.99)));
    let (during, late) = (of(&|round| round.1.quantile(0.5)), of(&|round| round.1.quantile(0.99)));
    let each = alone.each_ms;
    // The delay, in tokens at the end of a prompt that is computed alone.
    let rows = delay / each;
    let engine = &setting.config.engine;
    println!(
        "one mixed node: gaps calm p50 {calm:.2} ms, p99 {late_calm:.2} ms; while a prompt is computed p50 {during:.2} ms, p99 {late:.2} ms: \
         a delay of {median_delay:.2} ms in the median, {delay:.2} ms at p99, {worst:.2} ms from the worst calm gap to the worst of all; \
         at p99 worth {rows:.0} of the prompt's tokens ({each:.3} ms for each of its last ones when alone); \
         budget engine.mixed_prefill_ms = {}, engine.mixed_prefill_tokens = {}; \
         prompt {:.2} s against {:.2} s alone (medians of {} rounds)",
        engine.mixed_prefill_ms,
        engine.mixed_prefill_tokens,
        of(&|round| round.2.as_secs_f64()),
        alone.seconds,
        rounds.len()
    );
    json!({
        "calm_p50_ms": calm,
        "calm_p99_ms": late_calm,
        "during_p50_ms": during,
        "during_p99_ms": late,
        "delay_p50_ms": median_delay,
        "delay_p99_ms": delay,
        "delay_worst_ms": worst,
        "delay_rows": rows,
        "budget_ms": engine.mixed_prefill_ms,
        "budget_rows": engine.mixed_prefill_tokens,
        "prompt_s": of(&|round| round.2.as_secs_f64()),
        "prompt_alone_s": alone.seconds,
    })
}

/// When each token of a stream came, until told to stop.
async fn follow(mut stream: SequenceStream, mut stop: tokio::sync::oneshot::Receiver<()>) -> Vec<Instant> {
    let mut times = Vec::new();
    loop {
        tokio::select! {
            _ = &mut stop => return times,
            event = stream.next() => match event {
                Some(SequenceEvent::Token(_)) => times.push(Clock.now()),
                Some(_) | None => return times,
            },
        }
    }
}

async fn next_token(stream: &mut SequenceStream) -> Result<()> {
    match stream.next().await.context("the engine has ended")? {
        SequenceEvent::Token(_) => Ok(()),
        other => bail!("a sequence ends with {other:?}"),
    }
}

impl Node {
    async fn add(&mut self, tokens: usize, max_tokens: usize) -> Result<SequenceStream> {
        self.prompts += 1;
        let salt = self.prompts * 101;
        let token = |i: u64| ((i * i * 31 + i * 7 + salt) % self.vocab) as u32;
        let prompt = (0..tokens as u64).map(token).collect();
        let spec = SequenceSpec::greedy(prompt, u32::try_from(max_tokens)?);
        Ok(self.handle.add(spec, None).await?)
    }

    /// Seconds that a prompt takes to its first token.
    async fn alone(&mut self, tokens: usize) -> Result<f64> {
        let start = Clock.now();
        self.first_token(tokens).await?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Computes a prompt to its first token.
    async fn first_token(&mut self, tokens: usize) -> Result<()> {
        let mut stream = self.add(tokens, 1).await?;
        next_token(&mut stream).await
    }
}
