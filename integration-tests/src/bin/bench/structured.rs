//! `scripts/bench structured`: what a JSON schema costs per token: the mask alone, and steps of sequences with it beside
//! steps of sequences without.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use config::{EngineConfig, ModelConfig};
use engine::engine::Engine;
use engine::event::EngineEvent;
use engine::limits::EngineLimits;
use engine::plan::SequenceId;
use engine::runner::NoObserver;
use engine::sequence::{OnFinish, SequenceSpec};
use grammar::{Grammars, Vocabulary};
use integration_tests::cpu_time;
use model::ModelRunner;
use model_files::ModelFiles;
use protocol::sampling::{Grammar, SamplingParams, StopRules};
use runtime::clock::Clock;

use crate::report::median;

/// A list that never has enough entries, of records with members of all kinds.
const SCHEMA: &str = r#"{"type":"array","minItems":5000,"items":{"type":"object","properties":{
    "name":{"type":"string","maxLength":40},"count":{"type":"integer","minimum":0,"maximum":9999},"ratio":{"type":"number"},
    "kind":{"enum":["small","medium","large"]},"tags":{"type":"array","items":{"type":"string","maxLength":12},"maxItems":4},
    "note":{"anyOf":[{"type":"string","maxLength":60},{"type":"null"}]}},
    "required":["name","count","ratio","kind","tags","note"],"additionalProperties":false}}"#;
/// Steps before those that are measured.
const WARM: usize = 4;

/// Arguments of `scripts/bench structured`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// GGUF file or model directory; scripts/bench names the default model.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Compute threads.
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    /// Sequences of a step.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,8")]
    batches: Vec<usize>,
    /// Steps that are measured, each with and without the schema.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(8..=400))]
    steps: u32,
    /// Rounds; each measures both, one after the other.
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<()> {
    let settings = EngineConfig {
        threads: args.threads,
        prefix_cache: false,
        kv_pool_tokens: 64 * 1_024,
        ..EngineConfig::default()
    };
    let model = ModelConfig {
        path: args.model.to_str().context("the model's path is not UTF-8")?.to_owned(),
        ..ModelConfig::default()
    };
    let loaded = model::load(&model, &settings, 1_024)?;
    let text = ModelFiles::open(&args.model)?.text()?;
    let prompt = text.tokenizer.encode("A list of things in the shed, as JSON:\n")?;
    let grammar = Grammar::JsonSchema(SCHEMA.to_owned());
    let compiled = Clock.now();
    loaded.grammars.prepare(&grammar)?;
    println!("vocabulary and schema: {:.1} ms, once", millis(compiled.elapsed()));
    let fresh = Grammars::new(Vocabulary::Text(Box::new(text)));
    fresh.prepare(&Grammar::Regex("a".to_owned()))?;
    let compiled = Clock.now();
    fresh.prepare(&grammar)?;
    println!("the schema alone: {:.1} ms", millis(compiled.elapsed()));
    let mut unit = Unit {
        engine: Engine::new(EngineLimits {
            total_blocks: loaded.pool.total_blocks(),
            block_tokens: settings.kv_block_tokens,
            max_num_seqs: settings.max_num_seqs,
            max_batch_tokens: settings.max_batch_tokens,
            prefill_chunk_tokens: settings.prefill_chunk_tokens,
            mixed_prefill_tokens: settings.mixed_prefill_tokens,
            mixed_prefill_time: Duration::from_millis(settings.mixed_prefill_ms),
            max_seq_len: 1_024,
            prefix_cache: false,
        })?,
        runner: loaded.runner,
        prompt,
    };
    for &batch in &args.batches {
        compare(&mut unit, batch, args, &grammar, &fresh)?;
    }
    Ok(())
}

fn compare(unit: &mut Unit, batch: usize, args: &Args, grammar: &Grammar, fresh: &Grammars) -> Result<()> {
    let steps = args.steps as usize;
    let (mut free, mut held, mut cpu_free, mut cpu_held) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut output = Vec::new();
    for _ in 0..args.rounds {
        let (times, cpu, _) = unit.decode(batch, steps, None)?;
        free.extend(times);
        cpu_free.push(cpu);
        let (times, cpu, tokens) = unit.decode(batch, steps, Some(grammar))?;
        held.extend(times);
        cpu_held.push(cpu);
        output = tokens;
    }
    let (free, held) = (median(free), median(held));
    let cpu = (median(cpu_held) - median(cpu_free)) / (batch * steps) as f64;
    println!(
        "batch {batch}: a step takes {free:.3} ms, with the schema {held:.3} ms ({:+.1} %): {:+.1} us a token; CPU time of \
         all threads {:+.1} us a token",
        100.0 * (held / free - 1.0),
        1e3 * (held - free) / batch as f64,
        1e3 * cpu
    );
    let mut state = fresh.start(grammar)?;
    let mut masks = Vec::new();
    for at in 0..output.len() {
        let start = Clock.now();
        state.mask(&output[..at])?;
        masks.push(1e3 * millis(start.elapsed()));
    }
    let largest = masks.iter().copied().fold(0.0, f64::max);
    println!(
        "  the mask alone: median {:.1} us, largest {largest:.1} us, mean {:.1} us of {} tokens",
        median(masks.clone()),
        masks.iter().sum::<f64>() / masks.len() as f64,
        masks.len()
    );
    Ok(())
}

fn millis(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

struct Unit {
    engine: Engine,
    runner: ModelRunner,
    prompt: Vec<u32>,
}

impl Unit {
    /// Milliseconds of each step, milliseconds of CPU time of all threads, and what the last sequence says.
    fn decode(&mut self, batch: usize, steps: usize, grammar: Option<&Grammar>) -> Result<(Vec<f64>, f64, Vec<u32>)> {
        let mut ids = Vec::new();
        for seed in 0..batch {
            ids.push(self.add(seed as u64 + 1, WARM + steps + 2, grammar)?);
        }
        let (mut times, mut output, mut before) = (Vec::new(), Vec::new(), Duration::ZERO);
        let mut whole = 0;
        while times.len() < steps {
            let start = Clock.now();
            let tokens = self.step()?;
            output.extend(
                tokens
                    .iter()
                    .filter(|(id, _)| Some(id) == ids.last())
                    .map(|(_, token)| *token),
            );
            if tokens.len() == batch {
                whole += 1;
                if whole > WARM {
                    times.push(millis(start.elapsed()));
                } else {
                    before = cpu_time::of_this_process();
                }
            }
        }
        let cpu = millis(cpu_time::of_this_process() - before);
        for id in ids {
            self.engine.cancel(id);
        }
        Ok((times, cpu, output))
    }

    fn add(&mut self, seed: u64, tokens: usize, grammar: Option<&Grammar>) -> Result<SequenceId> {
        let sampling = SamplingParams {
            greedy: false,
            temperature: 0.8,
            top_p: 0.95,
            seed,
            grammar: grammar.cloned(),
            ..SamplingParams::greedy()
        };
        let spec = SequenceSpec {
            token_ids: self.prompt.clone(),
            prompt_len: self.prompt.len(),
            sampling: Arc::new(sampling),
            stop: StopRules {
                max_tokens: tokens as u32,
                eos_token_ids: Vec::new(),
                ignore_eos: true,
                stop_token_ids: Vec::new(),
            },
            prompt_logprobs: None,
            on_finish: OnFinish::Release,
            first_only: None,
            adapter: None,
            cache_key: 0,
        };
        Ok(self.engine.add(spec)?)
    }

    fn step(&mut self) -> Result<Vec<(SequenceId, u32)>> {
        let mut events = Vec::new();
        let stepped = self.engine.step(&mut self.runner, &mut NoObserver, &mut events)?;
        ensure!(stepped.is_some(), "no sequence advances");
        let mut tokens = Vec::new();
        for event in events {
            match event {
                EngineEvent::Token { id, token, .. } => tokens.push((id, token.token)),
                other => anyhow::bail!("a measured sequence met {other:?}"),
            }
        }
        Ok(tokens)
    }
}
