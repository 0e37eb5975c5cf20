//! One loaded model under a real engine, and the measured pieces of work.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use config::Config;
use engine::engine::Engine;
use engine::event::EngineEvent;
use engine::limits::EngineLimits;
use engine::plan::{BlockId, SequenceId};
use engine::runner::NoObserver;
use engine::sequence::{OnFinish, SequenceSpec};
use integration_tests::cpu_time;
use model::kv_pool::KvPool;
use model::{ModelRunner, StepCost};
use protocol::sampling::{SamplingParams, StopRules};
use runtime::clock::Clock;

/// Room beyond the longest sequence: its last token is never computed, and one more may have been sampled.
const MARGIN: usize = 2;

/// What is measured: sizes of prompts and batches.
#[derive(Clone, Debug)]
pub(crate) struct Shapes {
    /// Lengths of prompts.
    pub(crate) prompts: Vec<usize>,
    /// Numbers of sequences that decode together.
    pub(crate) batches: Vec<usize>,
    /// Tokens of a decoding sequence when the measurement ends.
    pub(crate) context: usize,
    /// Steps measured; they start at `context - steps`.
    pub(crate) steps: usize,
}

/// How long something took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) wall: Duration,
    /// CPU time of the thread that computes (its helpers' is not in it).
    pub(crate) cpu: Duration,
}

/// A model with its own KV pool, on a number of threads, under an engine as a node's.
pub(crate) struct Unit {
    pub(crate) threads: usize,
    pub(crate) cost: StepCost,
    engine: Engine,
    runner: ModelRunner,
    pool: Arc<KvPool>,
    vocab: u64,
    /// Number of prompts made so far: none begins like another, or a prefix cache would answer.
    prompts: u64,
    events: Vec<EngineEvent>,
}

impl Unit {
    /// Loads the model with `threads` threads and a pool that the shapes need.
    pub(crate) fn load(config: &Config, threads: usize, shapes: &Shapes) -> Result<Self> {
        let mut settings = config.engine.clone();
        settings.threads = threads;
        let block = settings.kv_block_tokens;
        let each = (shapes.context + MARGIN).next_multiple_of(block) + block;
        let most = shapes.batches.iter().max().copied().unwrap_or(1);
        let longest = shapes.prompts.iter().max().copied().unwrap_or(1).max(shapes.context) + MARGIN;
        settings.kv_pool_bytes = 0;
        settings.kv_pool_tokens = (each * (most + 1)).max(longest.next_multiple_of(block) + block);
        settings.max_num_seqs = settings.max_num_seqs.max(most);
        settings.max_batch_tokens = settings.max_batch_tokens.max(settings.max_num_seqs);
        let loaded = model::load(&config.model, &settings, longest)?;
        let positions = loaded.max_position_embeddings as usize;
        for (what, tokens) in [("--context", shapes.context)]
            .into_iter()
            .chain(shapes.prompts.iter().map(|&tokens| ("--prefill", tokens)))
        {
            ensure!(
                tokens < positions,
                "{what} {tokens}: the model has {positions} positions, so at most {} would be right",
                positions - 1
            );
        }
        let limits = EngineLimits {
            total_blocks: loaded.pool.total_blocks(),
            block_tokens: block,
            max_num_seqs: settings.max_num_seqs,
            max_batch_tokens: settings.max_batch_tokens,
            prefill_chunk_tokens: settings.prefill_chunk_tokens,
            mixed_prefill_tokens: settings.mixed_prefill_tokens,
            mixed_prefill_time: Duration::ZERO,
            prefix_cache: settings.prefix_cache,
            groups: loaded.layout.groups.whole(),
            max_seq_len: longest,
        };
        Ok(Self {
            threads,
            cost: loaded.cost,
            engine: Engine::new(limits)?,
            runner: loaded.runner,
            pool: loaded.pool,
            vocab: u64::from(loaded.identity.vocab_size),
            prompts: 0,
            events: Vec::new(),
        })
    }

    /// Rows of a prompt that one step computes.
    pub(crate) fn chunk(&self) -> usize {
        let limits = self.engine.limits();
        limits.prefill_chunk_tokens.min(limits.max_batch_tokens)
    }

    /// Computes a new prompt of `tokens` tokens and samples its first token.
    pub(crate) fn prefill(&mut self, tokens: usize) -> Result<Taken> {
        let prompt = self.prompt(tokens);
        let spec = spec(prompt.clone(), prompt.len(), 1, OnFinish::Release);
        let (start, cpu) = (Clock.now(), cpu_time::of_this_thread());
        self.engine.add(spec)?;
        self.run_to_first_token()?;
        Ok(Taken {
            wall: start.elapsed(),
            cpu: cpu_time::of_this_thread() - cpu,
        })
    }

    /// Decodes `steps` steps of `batch` sequences, as on a decode node: their KV is written into reserved blocks (a
    /// copy of one prompt's for each), then they are committed and run together.
    pub(crate) fn decode(&mut self, batch: usize, context: usize, steps: usize) -> Result<Taken> {
        let start_at = context - steps;
        let (prompt, first, kv) = self.computed_prompt(start_at)?;
        let mut ids = Vec::new();
        for _ in 0..batch {
            ids.push(self.commit(&prompt, first, &kv, steps)?);
        }
        let (start, cpu) = (Clock.now(), cpu_time::of_this_thread());
        for _ in 0..steps {
            let tokens = self.step()?;
            ensure!(tokens == batch, "a step had {tokens} tokens instead of {batch}");
        }
        let taken = Taken {
            wall: start.elapsed(),
            cpu: cpu_time::of_this_thread() - cpu,
        };
        for id in ids {
            self.engine.cancel(id);
        }
        Ok(taken)
    }

    /// A prompt that has been computed: its tokens, the token sampled after it, its KV in canonical order.
    fn computed_prompt(&mut self, tokens: usize) -> Result<(Vec<u32>, u32, Bytes)> {
        let prompt = self.prompt(tokens);
        let id = self.engine.add(spec(prompt.clone(), prompt.len(), 1, OnFinish::Hold))?;
        let first = self.run_to_first_token()?;
        let blocks = self
            .engine
            .block_table(id)
            .context("the sequence is not held")?
            .to_vec();
        let layout = self.pool.layout();
        let used = &blocks[..layout.blocks_for(tokens) * layout.groups.count()];
        let kv = self.pool.gather(0..self.pool.layout().num_layers, used)?;
        self.engine.release_held(id);
        Ok((prompt, first, kv))
    }

    /// A sequence that has been handed over.
    fn commit(&mut self, prompt: &[u32], first: u32, kv: &Bytes, steps: usize) -> Result<SequenceId> {
        let reservation = self.engine.reserve(prompt.len(), steps + MARGIN)?;
        let blocks: Vec<BlockId> = reservation.blocks().to_vec();
        let count = u32::try_from(blocks.len())?;
        let writer = self.pool.writer(blocks)?;
        writer.write(0, self.pool.layout().num_layers, 0, count, kv)?;
        writer.revoke();
        let mut tokens = prompt.to_vec();
        tokens.push(first);
        let spec = spec(tokens, prompt.len(), steps + MARGIN, OnFinish::Release);
        Ok(self.engine.commit(reservation, spec, prompt.len())?)
    }

    fn run_to_first_token(&mut self) -> Result<u32> {
        loop {
            if self.step()? == 0 {
                continue;
            }
            let token = self.events.iter().find_map(|event| match event {
                EngineEvent::Token { token, .. } => Some(token.token),
                _ => None,
            });
            return token.context("a step without a token");
        }
    }

    /// One step of the engine; the number of tokens it sampled. Its events are in `events`.
    fn step(&mut self) -> Result<usize> {
        self.events.clear();
        self.engine
            .step(&mut self.runner, &mut NoObserver, &mut self.events)?
            .context("no sequence can advance")?;
        let mut tokens = 0;
        for event in &self.events {
            match event {
                EngineEvent::Token { .. } => tokens += 1,
                EngineEvent::Failed { message, .. } => bail!("a sequence failed: {message}"),
                EngineEvent::Preempted { .. } => bail!("a sequence was preempted: the pool is too small"),
                other => bail!("an event that no sequence here has: {other:?}"),
            }
        }
        Ok(tokens)
    }

    /// Made-up tokens, the same in every run.
    fn prompt(&mut self, tokens: usize) -> Vec<u32> {
        self.prompts += 1;
        let salt = self.prompts * 101;
        let token = |i: u64| ((i * i * 31 + i * 7 + salt) % self.vocab) as u32;
        (0..tokens as u64).map(token).collect()
    }
}

fn spec(token_ids: Vec<u32>, prompt_len: usize, max_tokens: usize, on_finish: OnFinish) -> SequenceSpec {
    SequenceSpec {
        token_ids,
        prompt_len,
        sampling: Arc::new(SamplingParams::greedy()),
        stop: StopRules {
            max_tokens: u32::try_from(max_tokens).unwrap_or(u32::MAX),
            eos_token_ids: Vec::new(),
            ignore_eos: true,
            stop_token_ids: Vec::new(),
        },
        prompt_logprobs: None,
        on_finish,
        first_only: None,
        adapter: None,
        cache_key: 0,
    }
}
