//! An engine over the real model, and what came of its sequences.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use config::{EngineConfig, ModelConfig};
use engine::beam::Hypothesis;
use engine::engine::Engine;
use engine::event::EngineEvent;
use engine::limits::EngineLimits;
use engine::plan::SequenceId;
use engine::runner::NoObserver;
use engine::sequence::SequenceSpec;
use integration_tests::files::default_model;
use model::ModelRunner;
use model::kv_pool::KvPool;
use protocol::sampling::{PromptLogprob, SampledToken};

use super::{LONGEST, OUTPUTS};

/// How an engine cuts and mixes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant {
    pub(crate) batch: usize,
    pub(crate) chunk: usize,
    pub(crate) threads: usize,
    pub(crate) cache: bool,
    /// Blocks of the pool beside those of the longest sequence.
    pub(crate) spare: usize,
}

/// What came of the sequences.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) tokens: BTreeMap<SequenceId, Vec<SampledToken>>,
    /// First tokens of the choices after the first one.
    pub(crate) others: BTreeMap<SequenceId, Vec<SampledToken>>,
    pub(crate) prompts: BTreeMap<SequenceId, Vec<PromptLogprob>>,
    pub(crate) beams: BTreeMap<SequenceId, Vec<Hypothesis>>,
    pub(crate) preempted: usize,
}

/// An engine over the default model.
pub(crate) struct One {
    pub(crate) engine: Engine,
    runner: ModelRunner,
    pub(crate) pool: Arc<KvPool>,
}

impl One {
    pub(crate) fn open(variant: Variant) -> Result<Self> {
        let path = default_model()?;
        let model = ModelConfig {
            path: path.to_str().context("the model's path is not UTF-8")?.to_owned(),
            ..ModelConfig::default()
        };
        let config = EngineConfig::default();
        let max_seq_len = LONGEST + OUTPUTS as usize + 1;
        let blocks = max_seq_len.div_ceil(config.kv_block_tokens) + variant.spare;
        let config = EngineConfig {
            kv_pool_tokens: blocks * config.kv_block_tokens,
            threads: variant.threads,
            ..config
        };
        let loaded = model::load(&model, &config, max_seq_len)?;
        let rows = (variant.batch * variant.chunk).min(512);
        let engine = Engine::new(EngineLimits {
            total_blocks: loaded.pool.total_blocks(),
            block_tokens: config.kv_block_tokens,
            max_num_seqs: variant.batch,
            max_batch_tokens: rows,
            prefill_chunk_tokens: variant.chunk,
            mixed_prefill_tokens: rows,
            mixed_prefill_time: std::time::Duration::ZERO,
            prefix_cache: variant.cache,
            groups: loaded.layout.groups.whole(),
            max_seq_len,
        })?;
        Ok(Self {
            engine,
            runner: loaded.runner,
            pool: loaded.pool,
        })
    }

    /// Steps until everybody has ended.
    pub(crate) fn run(&mut self) -> Result<Found> {
        let mut found = Found::default();
        let mut events = Vec::new();
        while self
            .engine
            .step(&mut self.runner, &mut NoObserver, &mut events)?
            .is_some()
        {
            for event in events.drain(..) {
                match event {
                    EngineEvent::Token {
                        id,
                        token,
                        others,
                        prompt_logprobs,
                        ..
                    } => {
                        found.tokens.entry(id).or_default().push(token);
                        let others = others.into_iter().map(|(token, _)| token);
                        found.others.entry(id).or_default().extend(others);
                        found.prompts.extend(prompt_logprobs.map(|all| (id, all)));
                    }
                    EngineEvent::Computed {
                        id, prompt_logprobs, ..
                    } => {
                        found.prompts.extend(prompt_logprobs.map(|all| (id, all)));
                    }
                    EngineEvent::Beams { id, beams } => {
                        found.beams.insert(id, beams);
                    }
                    EngineEvent::BeamStep { .. } => {}
                    EngineEvent::Preempted { .. } => found.preempted += 1,
                    EngineEvent::Failed { message, .. } => bail!("a sequence failed: {message}"),
                }
            }
            self.engine.check_invariants()?;
        }
        let stats = self.engine.stats();
        ensure!(stats.running + stats.waiting == 0, "sequences are left: {stats:?}");
        Ok(found)
    }

    /// A sequence alone.
    pub(crate) fn answer(&mut self, spec: SequenceSpec) -> Result<Vec<SampledToken>> {
        let id = self.engine.add(spec)?;
        self.run()?.tokens.remove(&id).context("no token")
    }
}
