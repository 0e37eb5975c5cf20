//! Steps that generate, timed one by one: of sequences with a grammar, with adapters, or with neither.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use config::{EngineConfig, ModelConfig};
use engine::engine::Engine;
use engine::event::EngineEvent;
use engine::limits::EngineLimits;
use engine::plan::SequenceId;
use engine::runner::NoObserver;
use engine::sequence::SequenceSpec;
use integration_tests::cpu_time;
use model::{LoadedModel, ModelRunner};
use protocol::sampling::{Grammar, SamplingParams};
use runtime::clock::Clock;

/// Steps before those that are measured.
const WARM: usize = 4;
const MAX_SEQ_LEN: usize = 1_024;

/// An engine over a model, and the prompt that it goes on with.
pub(crate) struct Unit {
    engine: Engine,
    runner: ModelRunner,
    prompt: Vec<u32>,
}

/// Loads a model with adapters (each as name=path) for sequences of up to 1,024 tokens.
pub(crate) fn load(model: &Path, threads: usize, adapters: &[String]) -> Result<(LoadedModel, EngineConfig)> {
    let settings = EngineConfig {
        threads,
        prefix_cache: false,
        kv_pool_tokens: 64 * 1_024,
        ..EngineConfig::default()
    };
    let model = ModelConfig {
        path: model.to_str().context("the model's path is not UTF-8")?.to_owned(),
        adapters: adapters.to_vec(),
        ..ModelConfig::default()
    };
    Ok((model::load(&model, &settings, MAX_SEQ_LEN)?, settings))
}

/// A time in milliseconds.
pub(crate) fn millis(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}

impl Unit {
    /// An engine with these settings.
    pub(crate) fn new(loaded: LoadedModel, settings: &EngineConfig, prompt: Vec<u32>) -> Result<Self> {
        let engine = Engine::new(EngineLimits {
            total_blocks: loaded.pool.total_blocks(),
            block_tokens: settings.kv_block_tokens,
            max_num_seqs: settings.max_num_seqs,
            max_batch_tokens: settings.max_batch_tokens,
            prefill_chunk_tokens: settings.prefill_chunk_tokens,
            mixed_prefill_tokens: settings.mixed_prefill_tokens,
            mixed_prefill_time: Duration::from_millis(settings.mixed_prefill_ms),
            max_seq_len: MAX_SEQ_LEN,
            prefix_cache: false,
            groups: loaded.layout.groups.whole(),
        })?;
        Ok(Self {
            engine,
            runner: loaded.runner,
            prompt,
        })
    }

    /// Milliseconds of each step, milliseconds of CPU time of all threads, and what the last sequence says. Sequences have
    /// `adapters` in turns; there is at least one entry.
    pub(crate) fn decode(
        &mut self,
        batch: usize,
        steps: usize,
        grammar: Option<&Grammar>,
        adapters: &[Option<u32>],
    ) -> Result<(Vec<f64>, f64, Vec<u32>)> {
        let mut ids = Vec::new();
        for seed in 0..batch {
            let adapter = adapters[seed % adapters.len()];
            ids.push(self.add(seed as u64 + 1, WARM + steps + 2, grammar, adapter)?);
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

    fn add(&mut self, seed: u64, tokens: usize, grammar: Option<&Grammar>, adapter: Option<u32>) -> Result<SequenceId> {
        let sampling = SamplingParams {
            greedy: false,
            temperature: 0.8,
            top_p: 0.95,
            seed,
            grammar: grammar.cloned(),
            ..SamplingParams::greedy()
        };
        let spec = SequenceSpec {
            sampling: Arc::new(sampling),
            adapter,
            ..SequenceSpec::greedy(self.prompt.clone(), tokens as u32)
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
