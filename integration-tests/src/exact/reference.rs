//! What every cluster must equal: one engine with one model in the test's own process, one sequence at a time, the whole
//! prompt in one step.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use config::{EngineConfig, KvDtypeConfig, ModelConfig};
use engine::beam::Hypothesis;
use engine::engine::Engine;
use engine::event::EngineEvent;
use engine::limits::EngineLimits;
use engine::plan::SequenceId;
use engine::runner::NoObserver;
use engine::sequence::{OnFinish, SequenceSpec};
use model::ModelRunner;
use model_files::{ModelFiles, TextModel};
use protocol::kv::ModelIdentity;
use protocol::sampling::{FinishReason, SampledToken, SamplingParams, StopRules};

use super::query::Query;

/// Longest sequence, in tokens.
const MAX_SEQ_LEN: usize = 1_024;

/// Most sequences of a step: those of a beam search, or of [`Reference::answers`].
const AT_ONCE: usize = 8;

/// Most alternatives that an API reports; a request that wants less is told the first ones.
const MOST_ALTERNATIVES: u8 = 5;

/// See the head of the file.
pub struct Reference {
    engine: Engine,
    runner: ModelRunner,
    identity: ModelIdentity,
    /// Tokenizer and what belongs to it.
    pub text: TextModel,
}

/// What the engine makes of a prompt.
#[derive(Clone, Debug)]
pub struct Continuation {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// Log-probabilities of the prompt's tokens from the second on, if asked for.
    pub prompt_logprobs: Option<Vec<f32>>,
    /// The answer's tokens, in order; at least one.
    pub tokens: Vec<SampledToken>,
    /// Why it ends.
    pub finish: FinishReason,
}

impl Continuation {
    /// The answer's token ids.
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.token).collect()
    }
}

impl Reference {
    /// Loads a model.
    pub fn open(model: &Path, kv_dtype: KvDtypeConfig) -> Result<Self> {
        Self::with_adapters(model, kv_dtype, &[])
    }

    /// Loads a model and adapters, each given as name=path.
    pub fn with_adapters(model: &Path, kv_dtype: KvDtypeConfig, adapters: &[String]) -> Result<Self> {
        Self::of(&ModelConfig {
            path: model.to_str().context("the model's path is not UTF-8")?.to_owned(),
            kv_dtype,
            adapters: adapters.to_vec(),
            ..ModelConfig::default()
        })
    }

    /// Loads what a section `model` of the configuration says.
    pub fn of(model: &ModelConfig) -> Result<Self> {
        let text = ModelFiles::open(&model.path)?.text()?;
        // The last token of a sequence needs no position.
        let max_seq_len = MAX_SEQ_LEN.min(text.max_position_embeddings + 1);
        let engine = EngineConfig {
            kv_pool_tokens: MAX_SEQ_LEN,
            ..EngineConfig::default()
        };
        let loaded = model::load(model, &engine, max_seq_len)?;
        let limits = EngineLimits {
            total_blocks: loaded.pool.total_blocks(),
            block_tokens: engine.kv_block_tokens,
            max_num_seqs: AT_ONCE,
            max_batch_tokens: max_seq_len,
            prefill_chunk_tokens: max_seq_len,
            mixed_prefill_tokens: max_seq_len,
            mixed_prefill_time: std::time::Duration::ZERO,
            max_seq_len,
            // Every answer is computed from nothing.
            prefix_cache: false,
            groups: loaded.layout.groups.whole(),
        };
        Ok(Self {
            engine: Engine::new(limits)?,
            runner: loaded.runner,
            identity: loaded.identity,
            text,
        })
    }

    /// What is loaded.
    pub fn identity(&self) -> &ModelIdentity {
        &self.identity
    }

    /// Answers a request under the server's limit `most`; its stop strings play no part.
    pub fn answer(&mut self, query: &Query, most: u32) -> Result<Continuation> {
        self.choice(query, 0, most)
    }

    /// As [`Reference::answer`]: the answer that is choice `choice` of several.
    pub fn choice(&mut self, query: &Query, choice: u32, most: u32) -> Result<Continuation> {
        let rules = query.stop_rules(most, &self.text.eos_token_ids);
        self.run(query, choice, rules)
    }

    /// As [`Reference::answer`], but nothing except the limit ends the answer: the text that a stop cuts.
    pub fn endless(&mut self, query: &Query, most: u32) -> Result<Continuation> {
        let rules = StopRules {
            max_tokens: most,
            eos_token_ids: Vec::new(),
            ignore_eos: true,
            stop_token_ids: Vec::new(),
        };
        self.run(query, 0, rules)
    }

    fn run(&mut self, query: &Query, choice: u32, stop: StopRules) -> Result<Continuation> {
        self.go_on(query, choice, stop, &[])
    }

    /// As [`Reference::answer`], behind the tokens `generated` that are there already: what a node does that takes a
    /// request over.
    pub fn resumed(&mut self, query: &Query, most: u32, generated: &[u32]) -> Result<Continuation> {
        let rules = query.stop_rules(most, &self.text.eos_token_ids);
        self.go_on(query, 0, rules, generated)
    }

    /// What a beam search of this width finds, the best first.
    pub fn beams(&mut self, query: &Query, width: usize, most: u32) -> Result<Vec<Hypothesis>> {
        let spec = self.spec(query, 0, query.stop_rules(most, &self.text.eos_token_ids), &[])?;
        self.engine.add_beams(spec, width)?;
        let mut events = Vec::new();
        loop {
            let step = self.engine.step(&mut self.runner, &mut NoObserver, &mut events)?;
            step.context("the search does not advance")?;
            for event in events.drain(..) {
                match event {
                    EngineEvent::Computed { .. } | EngineEvent::BeamStep { .. } => {}
                    EngineEvent::Beams { beams, .. } => return Ok(beams),
                    event => bail!("a search that is alone met {event:?}"),
                }
            }
        }
    }

    fn spec(&self, query: &Query, choice: u32, stop: StopRules, generated: &[u32]) -> Result<SequenceSpec> {
        let prompt = query.prompt_tokens(&self.text.tokenizer)?;
        let adapter = match &query.adapter {
            Some(name) => Some(self.identity.adapter(name).context("an unknown adapter")?.0 as u32),
            None => None,
        };
        let sampling = SamplingParams {
            choice,
            ..query.params(&self.text, Some(MOST_ALTERNATIVES))?
        };
        Ok(SequenceSpec {
            prompt_len: prompt.len(),
            token_ids: [prompt.as_slice(), generated].concat(),
            sampling: Arc::new(sampling),
            stop,
            prompt_logprobs: query.prompt_logprobs.then_some(0),
            on_finish: OnFinish::Release,
            first_only: None,
            adapter,
            cache_key: 0,
        })
    }

    fn go_on(&mut self, query: &Query, choice: u32, stop: StopRules, generated: &[u32]) -> Result<Continuation> {
        let spec = self.spec(query, choice, stop, generated)?;
        self.run_all(vec![spec])?.pop().context("one sequence has one answer")
    }

    /// As [`Reference::answer`], for many requests with their limits, some of them in each step: the same bits in less time.
    pub fn answers(&mut self, queries: &[(&Query, u32)]) -> Result<Vec<Continuation>> {
        let spec = |(query, most): &(&Query, u32)| {
            let rules = query.stop_rules(*most, &self.text.eos_token_ids);
            self.spec(query, 0, rules, &[])
        };
        let specs: Vec<SequenceSpec> = queries.iter().map(spec).collect::<Result<_>>()?;
        self.run_all(specs)
    }

    fn run_all(&mut self, specs: Vec<SequenceSpec>) -> Result<Vec<Continuation>> {
        let mut waiting = specs.into_iter().enumerate();
        let mut running: HashMap<SequenceId, (usize, Continuation)> = HashMap::new();
        let (mut done, mut events) = (Vec::new(), Vec::new());
        loop {
            while running.len() < AT_ONCE
                && let Some((index, spec)) = waiting.next()
            {
                let begun = Continuation {
                    prompt: spec.token_ids[..spec.prompt_len].to_vec(),
                    prompt_logprobs: None,
                    tokens: Vec::new(),
                    finish: FinishReason::Length,
                };
                running.insert(self.engine.add(spec)?, (index, begun));
            }
            if running.is_empty() {
                break;
            }
            let step = self.engine.step(&mut self.runner, &mut NoObserver, &mut events)?;
            step.context("no sequence advances")?;
            for event in events.drain(..) {
                let EngineEvent::Token {
                    id,
                    token,
                    prompt_logprobs,
                    finish,
                    ..
                } = event
                else {
                    bail!("a sequence that nobody disturbs met {event:?}");
                };
                let (_, answer) = running.get_mut(&id).context("a token of no sequence")?;
                answer.tokens.push(token);
                let logprobs = prompt_logprobs.map(|all| all.into_iter().map(|target| target.logprob).collect());
                answer.prompt_logprobs = answer.prompt_logprobs.take().or(logprobs);
                if let Some(finish) = finish {
                    answer.finish = finish;
                    done.extend(running.remove(&id));
                }
            }
        }
        self.engine.check_invariants()?;
        done.sort_by_key(|(index, _)| *index);
        Ok(done.into_iter().map(|(_, answer)| answer).collect())
    }
}
