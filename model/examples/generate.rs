//! Tokens a second of a model through the engine's runner: prefill of one prompt, decode of a batch.
//!
//! `cargo run --release -p model --example generate -- MODEL [threads] [prompt tokens] [batch] [context] [compute]`
#![allow(clippy::print_stdout, reason = "a benchmark prints")]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use config::{Compute, EngineConfig, ModelConfig};
use engine::plan::{BlockId, PlannedSequence, SampleSpec, SequenceId, Span, StepPlan, Wanted};
use engine::runner::{NoObserver, Runner};
use model::ModelRunner;
use protocol::sampling::SamplingParams;

const BLOCK: usize = 16;
const CHUNK: usize = 256;
const DECODE_STEPS: usize = 64;

/// Sequences of equal length that own consecutive blocks.
struct Bench {
    runner: ModelRunner,
    params: Arc<SamplingParams>,
    room: usize,
}

impl Bench {
    /// Computes `rows` rows of every sequence from `start` on; returns the last rows' tokens.
    fn step(&mut self, tokens: &[Vec<u32>], start: usize, sample: bool) -> Result<Vec<u32>> {
        let mut plan = StepPlan {
            step: 1,
            ..StepPlan::default()
        };
        let blocks_each = self.room / BLOCK;
        for (i, rows) in tokens.iter().enumerate() {
            plan.sequences.push(PlannedSequence {
                id: SequenceId(i as u64),
                owner: SequenceId(i as u64),
                rows: Span {
                    start: plan.token_ids.len() as u32,
                    len: rows.len() as u32,
                },
                start_position: start as u32,
                adapter: None,
                blocks: Span {
                    start: plan.block_ids.len() as u32,
                    len: blocks_each as u32,
                },
                sample: sample.then(|| SampleSpec {
                    wanted: Wanted::Tokens(1),
                    params: Arc::clone(&self.params),
                    output_position: 0,
                    history: Span::default(),
                    prompt_len: 0,
                }),
                targets: Span::default(),
                target_alternatives: 0,
            });
            plan.token_ids.extend(rows);
            plan.block_ids
                .extend((i * blocks_each..(i + 1) * blocks_each).map(|b| BlockId(b as u32)));
        }
        let out = self.runner.run(&plan, &mut NoObserver)?;
        Ok(out.sampled.into_iter().map(|(_, s)| s.token).collect())
    }

    fn prefill(&mut self, prompts: &[Vec<u32>]) -> Result<Vec<u32>> {
        let length = prompts[0].len();
        for start in (0..length).step_by(CHUNK) {
            let end = length.min(start + CHUNK);
            let chunk: Vec<Vec<u32>> = prompts.iter().map(|p| p[start..end].to_vec()).collect();
            let sampled = self.step(&chunk, start, end == length)?;
            if end == length {
                return Ok(sampled);
            }
        }
        bail!("empty prompts")
    }
}

/// CPU time of this thread: on a busy machine, what the wall clock would say on an idle one.
fn cpu_seconds() -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds: f64 = stat.split_whitespace().next().context("empty schedstat")?.parse()?;
    Ok(nanoseconds * 1e-9)
}

/// A made-up prompt of `n` tokens.
fn prompt(salt: u32, n: usize, vocab: u32) -> Vec<u32> {
    (0..n as u32)
        .map(|t| (t * t * 31 + t * 7 + salt * 101) % vocab)
        .collect()
}

fn measure_prefill(bench: &mut Bench, prompt: Vec<u32>) -> Result<()> {
    let (mut best, mut cpu) = (f64::MAX, f64::MAX);
    let rows = prompt.len() as f64;
    let prompts = vec![prompt];
    for _ in 0..5 {
        let (start, cpu_start) = (Instant::now(), cpu_seconds()?);
        bench.prefill(&prompts)?;
        best = best.min(start.elapsed().as_secs_f64());
        cpu = cpu.min(cpu_seconds()? - cpu_start);
    }
    println!(
        "prefill {rows}: {:.1} tokens/s (best of 5; {:.1} by this thread's CPU time)",
        rows / best,
        rows / cpu
    );
    Ok(())
}

fn measure_decode(bench: &mut Bench, prompts: &[Vec<u32>]) -> Result<()> {
    let (sequences, context) = (prompts.len(), prompts[0].len());
    let mut last = bench.prefill(prompts)?;
    let mut times: Vec<f64> = Vec::new();
    let cpu_start = cpu_seconds()?;
    for position in context..context + DECODE_STEPS {
        let start = Instant::now();
        let tokens: Vec<Vec<u32>> = last.iter().map(|&t| vec![t]).collect();
        last = bench.step(&tokens, position, true)?;
        times.push(start.elapsed().as_secs_f64());
    }
    let cpu = (cpu_seconds()? - cpu_start) / DECODE_STEPS as f64;
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    println!(
        "decode, batch {sequences}, context {context}: {:.1} tokens/s ({:.2} ms a step, median of {DECODE_STEPS}; {:.2} \
         ms of this thread's CPU time)",
        sequences as f64 / median,
        median * 1e3,
        cpu * 1e3
    );
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| args.get(i).map_or(Ok(default), |a| a.parse());
    let usage = "usage: generate MODEL [threads] [prompt] [batch] [context] [compute]";
    let path = args.first().context(usage)?.clone();
    let (threads, prompt_len) = (number(1, 1)?, number(2, 512)?);
    let (batch, context) = (number(3, 16)?, number(4, 480)?);
    let compute = match args.get(5).map(String::as_str) {
        None | Some("quantised") => Compute::Quantised,
        Some("precise") => Compute::Precise,
        Some("float32") => Compute::Float32,
        Some(other) => bail!("compute is {other:?}; quantised or float32 would be right"),
    };
    let room = (prompt_len.max(context) + DECODE_STEPS + 1).next_multiple_of(BLOCK);
    let model = ModelConfig {
        path,
        compute,
        ..ModelConfig::default()
    };
    let pool = room * batch.max(1);
    let engine = EngineConfig {
        threads,
        kv_block_tokens: BLOCK,
        kv_pool_tokens: pool,
        ..EngineConfig::default()
    };
    let start = Instant::now();
    let loaded = model::load(&model, &engine, room)?;
    println!(
        "loaded in {:.2} s: {:?}",
        start.elapsed().as_secs_f64(),
        loaded.identity
    );
    let vocab = loaded.identity.vocab_size;
    let mut bench = Bench {
        runner: loaded.runner,
        params: Arc::new(SamplingParams::greedy()),
        room,
    };
    measure_prefill(&mut bench, prompt(1, prompt_len, vocab))?;
    for sequences in [1, batch] {
        let prompts: Vec<_> = (0..sequences as u32).map(|i| prompt(i, context, vocab)).collect();
        measure_decode(&mut bench, &prompts)?;
    }
    Ok(())
}
