//! Drives a runner through hand-made plans: which rows of which sequences share a step is the test's choice.

#![allow(dead_code, unreachable_pub, reason = "every test binary uses its own part of this")]

pub mod adapter;
pub mod checkpoint;
pub mod fp8;
pub mod one_answer;
pub mod twin;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use config::{Compute, EngineConfig, KvDtypeConfig, ModelConfig, Quantize};
use engine::plan::{BlockId, PlannedSequence, SampleSpec, SequenceId, Span, StepOutput, StepPlan, Wanted};
use engine::runner::{NoObserver, Runner};
use model::LoadedModel;
use protocol::sampling::{SampledToken, SamplingParams};
use protocol::window::Groups;

/// A sequence under test.
#[derive(Clone)]
pub struct Sequence {
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub blocks: Vec<BlockId>,
    pub computed: usize,
    pub params: Arc<SamplingParams>,
    pub prompt_logprobs: bool,
    pub logprobs: Vec<f32>,
    pub sampled: Vec<SampledToken>,
    pub adapter: Option<u32>,
}

impl Sequence {
    pub fn output(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// Rows not computed yet.
    pub fn left(&self) -> usize {
        self.tokens.len() - self.computed
    }
}

/// A runner and its sequences.
pub struct Bench<R> {
    pub runner: R,
    pub block_tokens: usize,
    /// Groups of layers: lists of blocks of a sequence.
    pub groups: usize,
    free: Vec<BlockId>,
    pub sequences: Vec<Sequence>,
    step: u64,
}

impl<R: Runner> Bench<R> {
    pub fn new(runner: R, block_tokens: usize, total_blocks: usize) -> Self {
        // Neighbouring blocks of a sequence are far apart in the pool.
        let stride = 7;
        let free = (0..stride)
            .flat_map(|s| (s..total_blocks).step_by(stride))
            .map(|b| BlockId(b as u32))
            .collect();
        Self {
            runner,
            block_tokens,
            groups: 1,
            free,
            sequences: Vec::new(),
            step: 0,
        }
    }

    /// For a model with such groups of layers.
    pub fn in_groups(self, groups: Groups) -> Self {
        Self {
            groups: groups.count(),
            ..self
        }
    }

    pub fn take_blocks(&mut self, tokens: usize) -> Vec<BlockId> {
        let needed = tokens.div_ceil(self.block_tokens) * self.groups;
        assert!(needed <= self.free.len(), "the test's pool is too small");
        self.free.split_off(self.free.len() - needed)
    }

    /// Adds a sequence with blocks for `room` generated tokens.
    pub fn add(&mut self, prompt: &[u32], params: &SamplingParams, room: usize, prompt_logprobs: bool) -> usize {
        let blocks = self.take_blocks(prompt.len() + room);
        self.sequences.push(Sequence {
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            blocks,
            computed: 0,
            params: Arc::new(params.clone()),
            prompt_logprobs,
            logprobs: Vec::new(),
            sampled: Vec::new(),
            adapter: None,
        });
        self.sequences.len() - 1
    }

    /// Ends all sequences.
    pub fn clear(&mut self) {
        for s in std::mem::take(&mut self.sequences) {
            self.free.extend(s.blocks);
        }
    }

    /// The plan that computes the next rows of some sequences.
    pub fn plan(&mut self, rows: &[(usize, usize)]) -> StepPlan {
        self.step += 1;
        let mut plan = StepPlan {
            step: self.step,
            ..StepPlan::default()
        };
        for &(index, count) in rows {
            let s = &self.sequences[index];
            let (from, to) = (s.computed, s.computed + count);
            let span = |start: usize, len: usize| Span {
                start: start as u32,
                len: len as u32,
            };
            let samples = to == s.tokens.len();
            let targets = if s.prompt_logprobs {
                s.prompt_len.saturating_sub(from + 1).min(count)
            } else {
                0
            };
            let history = if samples && s.params.needs_history() {
                s.tokens.len()
            } else {
                0
            };
            plan.sequences.push(PlannedSequence {
                id: SequenceId(index as u64),
                owner: SequenceId(index as u64),
                rows: span(plan.token_ids.len(), count),
                start_position: from as u32,
                adapter: s.adapter,
                blocks: span(plan.block_ids.len(), s.blocks.len()),
                sample: samples.then(|| SampleSpec {
                    wanted: Wanted::Tokens(1),
                    params: Arc::clone(&s.params),
                    output_position: (s.tokens.len() - s.prompt_len) as u32,
                    history: span(plan.history.len(), history),
                    prompt_len: s.prompt_len as u32,
                }),
                targets: span(plan.targets.len(), targets),
                target_alternatives: 0,
            });
            plan.token_ids.extend(&s.tokens[from..to]);
            plan.block_ids.extend(&s.blocks);
            plan.history.extend(&s.tokens[..history]);
            plan.targets.extend(&s.tokens[from + 1..from + 1 + targets]);
        }
        plan
    }

    /// Computes the next rows of some sequences and applies what comes out.
    pub fn advance(&mut self, rows: &[(usize, usize)]) {
        let plan = self.plan(rows);
        let out = self.runner.run(&plan, &mut NoObserver).unwrap();
        for &(index, count) in rows {
            self.sequences[index].computed += count;
        }
        self.apply(out);
    }

    pub fn apply(&mut self, out: StepOutput) {
        for (id, list) in out.prompt_logprobs {
            let logprobs = list.into_iter().map(|target| target.logprob);
            self.sequences[id.0 as usize].logprobs.extend(logprobs);
        }
        for (id, sampled) in out.sampled {
            let s = &mut self.sequences[id.0 as usize];
            assert_eq!(sampled.position as usize, s.sampled.len());
            s.tokens.push(sampled.token);
            s.sampled.push(sampled);
        }
    }

    /// Runs all sequences together: chunks of at most `chunk` rows, at most `batch` sequences a step, until each has
    /// `outputs` tokens.
    pub fn finish(&mut self, chunk: usize, batch: usize, outputs: usize) {
        loop {
            let open = |s: &Sequence| s.sampled.len() < outputs;
            let rows: Vec<(usize, usize)> = self
                .sequences
                .iter()
                .enumerate()
                .filter(|(_, s)| open(s))
                .map(|(i, s)| (i, s.left().min(chunk)))
                .take(batch)
                .collect();
            if rows.is_empty() {
                return;
            }
            self.advance(&rows);
        }
    }
}

/// How a model is loaded.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub compute: Compute,
    pub quantize: Quantize,
    pub kv_dtype: KvDtypeConfig,
    pub block_tokens: usize,
    pub threads: usize,
    pub pool_tokens: usize,
}

impl Setup {
    /// The product's defaults with a small pool.
    pub fn quantised() -> Self {
        Self {
            compute: Compute::Quantised,
            quantize: Quantize::None,
            kv_dtype: KvDtypeConfig::F16,
            block_tokens: 16,
            threads: 1,
            pool_tokens: 8_192,
        }
    }

    /// Closest to the reference.
    pub fn float() -> Self {
        Self {
            compute: Compute::Float32,
            kv_dtype: KvDtypeConfig::F32,
            ..Self::quantised()
        }
    }

    pub fn load(&self, path: &Path) -> LoadedModel {
        self.load_with(path, &[]).unwrap()
    }

    /// A model with adapters, called 0, 1, ...
    pub fn load_with(&self, path: &Path, adapters: &[PathBuf]) -> Result<LoadedModel, model::LoadError> {
        let named = |(i, path): (usize, &PathBuf)| format!("{i}={}", path.display());
        let model = ModelConfig {
            path: path.to_str().unwrap().to_owned(),
            adapters: adapters.iter().enumerate().map(named).collect(),
            compute: self.compute,
            quantize: self.quantize,
            kv_dtype: self.kv_dtype,
            ..ModelConfig::default()
        };
        let engine = EngineConfig {
            kv_block_tokens: self.block_tokens,
            kv_pool_tokens: self.pool_tokens,
            threads: self.threads,
            ..EngineConfig::default()
        };
        model::load(&model, &engine, 8_192)
    }

    pub fn bench(&self, path: &Path) -> Bench<model::ModelRunner> {
        self.bench_with(path, &[])
    }

    pub fn bench_with(&self, path: &Path, adapters: &[PathBuf]) -> Bench<model::ModelRunner> {
        let loaded = self.load_with(path, adapters).unwrap();
        let bench = Bench::new(loaded.runner, self.block_tokens, loaded.pool.total_blocks());
        bench.in_groups(loaded.layout.groups)
    }
}

/// The tiny llama checkpoint.
pub fn tiny_llama() -> PathBuf {
    fixture("llama")
}

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// SmolLM2-135M-Instruct as Q4_1.
pub fn smollm2() -> PathBuf {
    let name = "SmolLM2-135M-Instruct.Q4_1.gguf";
    #[allow(
        clippy::disallowed_methods,
        reason = "a test's parameter, not the product's configuration"
    )]
    let given = std::env::var("BATON_TEST_MODEL").ok().map(PathBuf::from);
    let path = given.unwrap_or_else(|| {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../.baton/models")
            .join(name)
    });
    assert!(
        path.is_file(),
        "{} is not there: run scripts/fetch-model, or set BATON_TEST_MODEL to the path of {name}",
        path.display()
    );
    path
}

pub fn read_json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

pub fn ids(value: &serde_json::Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_u64().unwrap() as u32)
        .collect()
}

pub fn floats(value: &serde_json::Value) -> Vec<f64> {
    value
        .as_array()
        .unwrap()
        .iter()
        .filter_map(serde_json::Value::as_f64)
        .collect()
}
