//! A runner without weights, for tests of everything around the model.
//!
//! It stores a hash of (token, position, the KV before it) for every token in every layer, and takes its logits from a
//! hash of **all** KV bytes that the row sees (those of the sequence, or of the windows of the layout's groups), read from the blocks. So a block that is lost, swapped, stale or damaged
//! changes every later token, and everything else leaves them alone: block size, chunks, batch, the node that computed.

use std::ops::Range;
use std::sync::Arc;

use engine::plan::{BlockId, GroupBlocks, PlannedSequence, SampleSpec, SequenceId, StepOutput, StepPlan, Wanted};
use engine::runner::{LayerObserver, Runner, RunnerError};
use grammar::Grammars;
use protocol::kv::{KvLayout, KvPlace, ModelIdentity};
use protocol::sampling::PromptLogprob;
use xxhash_rust::xxh3::Xxh3;

use crate::kernels::Cpu;
use crate::kv_pool::{KvError, KvPool, StepAccess};
use crate::masks::Masks;
use crate::plan_check::{PlanChecker, PlanLimits};
use crate::runner::{find_candidates, most_probable, sample_row};
use crate::sampler::{Sampler, math};

/// Called before every step, on the compute thread: may count, wait or block.
pub type StepHook = Box<dyn FnMut(&StepPlan) + Send>;
/// Called with the position a row of logits belongs to and the row: may change it, for example to force a token.
pub type LogitsHook = Box<dyn FnMut(u32, &mut [f32]) + Send>;

/// What a fake model looks like.
#[derive(Clone, Debug)]
pub struct FakeConfig {
    /// Shape of its KV cache; small dimensions make it fast.
    pub layout: KvLayout,
    /// Blocks of its pool.
    pub total_blocks: usize,
    /// Tokens of its vocabulary.
    pub vocab_size: u32,
    /// Positions it accepts.
    pub max_position_embeddings: u32,
    /// Stands for the weights: other seeds give other texts.
    pub seed: u64,
}

/// A fake model, in the form of a loaded one.
pub struct FakeModel {
    /// Executes plans.
    pub runner: FakeRunner,
    /// The KV cache.
    pub pool: Arc<KvPool>,
    /// What it pretends to be.
    pub identity: ModelIdentity,
    /// Shape of the KV cache.
    pub layout: KvLayout,
    /// Positions it accepts.
    pub max_position_embeddings: u32,
}

impl FakeModel {
    /// A fake model with a pool of its own.
    ///
    /// # Errors
    /// As [`KvPool::new`].
    pub fn new(config: &FakeConfig) -> Result<Self, KvError> {
        let pool = Arc::new(KvPool::new(config.layout, config.total_blocks)?);
        let identity = ModelIdentity {
            architecture: "fake".to_owned(),
            vocab_size: config.vocab_size,
            tokenizer_hash: 0,
            weights_hash: u128::from(config.seed),
            numerics: format!("hash/{}", config.layout.dtype.as_str()),
            adapters: Vec::new(),
        };
        let runner = FakeRunner::new(Arc::clone(&pool), config);
        Ok(Self {
            runner,
            pool,
            identity,
            layout: config.layout,
            max_position_embeddings: config.max_position_embeddings,
        })
    }
}

/// The runner of a [`FakeModel`].
pub struct FakeRunner {
    pool: Arc<KvPool>,
    seed: u64,
    checker: PlanChecker,
    sampler: Sampler,
    logits: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    cpu: Cpu,
    step_hook: Option<StepHook>,
    logits_hook: Option<LogitsHook>,
    masks: Masks,
}

impl FakeRunner {
    /// A runner on an existing pool, whose layout counts instead of the configuration's.
    pub fn new(pool: Arc<KvPool>, config: &FakeConfig) -> Self {
        let layout = *pool.layout();
        let width = layout.num_kv_heads as usize * layout.head_dim as usize;
        let limits = PlanLimits {
            vocab_size: config.vocab_size as usize,
            block_tokens: layout.block_tokens as usize,
            total_blocks: pool.total_blocks(),
            max_positions: config.max_position_embeddings as usize,
            adapters: 0,
            groups: layout.groups,
        };
        Self {
            pool,
            seed: config.seed,
            checker: PlanChecker::new(limits),
            sampler: Sampler::default(),
            logits: vec![0.0; config.vocab_size as usize],
            key: vec![0.0; width],
            value: vec![0.0; width],
            cpu: Cpu::portable(),
            step_hook: None,
            logits_hook: None,
            masks: Masks::new(None),
        }
    }

    /// Serves sequences with grammars, over the vocabulary of `grammars`.
    pub fn with_grammars(mut self, grammars: Grammars) -> Self {
        self.masks = Masks::new(Some(grammars));
        self
    }

    /// Calls `hook` before every step.
    pub fn with_step_hook(mut self, hook: impl FnMut(&StepPlan) + Send + 'static) -> Self {
        self.step_hook = Some(Box::new(hook));
        self
    }

    /// Calls `hook` on every row of logits before it is used.
    pub fn with_logits_hook(mut self, hook: impl FnMut(u32, &mut [f32]) + Send + 'static) -> Self {
        self.logits_hook = Some(Box::new(hook));
        self
    }

    fn compute(
        &mut self,
        access: &mut StepAccess<'_>,
        plan: &StepPlan,
        observer: &mut dyn LayerObserver,
        output: &mut StepOutput,
    ) {
        for place in self.pool.layout().places() {
            for s in &plan.sequences {
                self.write_layer(access, plan, s, place);
            }
            observer.layer_computed(place);
        }
        for s in &plan.sequences {
            if let Err(reason) = self.read_out(access, plan, s, output) {
                output.fail(s.id, reason);
            }
        }
    }

    /// Stores the KV of a sequence's rows in one layer.
    fn write_layer(&mut self, access: &mut StepAccess<'_>, plan: &StepPlan, s: &PlannedSequence, place: KvPlace) {
        let layout = *self.pool.layout();
        let group = place.group as usize;
        let blocks = GroupBlocks::new(&plan.block_ids[s.blocks.range()], layout.groups.count(), group);
        let layer = place.group * layout.num_layers + place.layer;
        for (position, &token) in (s.start_position..).zip(&plan.token_ids[s.rows.range()]) {
            let mut state = Xxh3::with_seed(self.seed);
            for word in [token, position, layer] {
                state.update(&word.to_le_bytes());
            }
            let seen = layout.groups.window_of(group).is_none_or(|window| window > 1);
            if let Some(before) = position.checked_sub(1).filter(|_| seen) {
                token_bytes(access, &layout, blocks, place.layer, before, |bytes| {
                    state.update(bytes)
                });
            }
            let hash = state.digest();
            for (i, x) in self.key.iter_mut().chain(&mut self.value).enumerate() {
                // Whole numbers below 2048; rounding makes the same of them on every node.
                *x = (mix(hash, i as u64) >> 53) as f32;
            }
            let rows = (&*self.key, &*self.value);
            access.write_rows(&self.cpu, place.layer, (blocks, position as usize), rows);
        }
    }

    /// Log-probabilities of targets and the sampled token of a sequence.
    fn read_out(
        &mut self,
        access: &StepAccess<'_>,
        plan: &StepPlan,
        s: &PlannedSequence,
        out: &mut StepOutput,
    ) -> Result<(), String> {
        let layout = *self.pool.layout();
        let blocks = GroupBlocks::new(&plan.block_ids[s.blocks.range()], layout.groups.count(), 0);
        let targets = &plan.targets[s.targets.range()];
        let end = s.start_position + s.rows.len;
        let last_needed = if s.sample.is_some() {
            end
        } else {
            s.start_position + s.targets.len
        };
        let mut logprobs = Vec::with_capacity(targets.len());
        let mut state = Xxh3::with_seed(self.seed);
        if last_needed == s.start_position {
            return Ok(());
        }
        for position in 0..last_needed {
            let slides = layout.groups.window().is_some();
            if !slides {
                read_positions(access, &layout, blocks, position..position + 1, &mut state);
            }
            let row = position.checked_sub(s.start_position);
            let target = row.and_then(|row| targets.get(row as usize));
            let sample = s.sample.as_ref().filter(|_| position + 1 == end);
            if target.is_none() && sample.is_none() {
                continue;
            }
            if slides {
                state.reset();
                for group in 0..layout.groups.count() {
                    let window = layout.groups.window_of(group);
                    let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
                    read_positions(access, &layout, blocks.of(group), first..position + 1, &mut state);
                }
            }
            self.fill_logits(position, state.digest());
            if let Some(&target) = target {
                let logprob = math::log_probability(&self.logits, target);
                let top = match s.target_alternatives {
                    0 => Vec::new(),
                    count => most_probable(&mut self.sampler, &self.logits, usize::from(count))?,
                };
                logprobs.push(PromptLogprob {
                    logprob: logprob.map_err(|e| e.to_string())?,
                    top,
                });
            }
            if let Some(sample) = sample {
                self.take(plan, s.id, sample, out)?;
            }
        }
        if !logprobs.is_empty() {
            out.prompt_logprobs.push((s.id, logprobs));
        }
        Ok(())
    }

    /// What is wanted from the last row's logits.
    fn take(
        &mut self,
        plan: &StepPlan,
        id: SequenceId,
        sample: &SampleSpec,
        out: &mut StepOutput,
    ) -> Result<(), String> {
        let mask = self.masks.answers().of(id);
        match sample.wanted {
            Wanted::Tokens(count) => {
                for choice in 0..count {
                    let token = sample_row(&mut self.sampler, &self.logits, plan, (sample, mask), choice)?;
                    out.sampled.push((id, token));
                }
            }
            Wanted::Candidates(count) => {
                let list = find_candidates(&mut self.sampler, &self.logits, plan, (sample, mask), count)?;
                out.candidates.push((id, list));
            }
        }
        Ok(())
    }

    fn fill_logits(&mut self, position: u32, hash: u64) {
        for (i, x) in self.logits.iter_mut().enumerate() {
            *x = ((mix(hash, i as u64) >> 40) as f32 / (1 << 24) as f32 - 0.5) * 12.0;
        }
        if let Some(hook) = &mut self.logits_hook {
            hook(position, &mut self.logits);
        }
    }
}

impl Runner for FakeRunner {
    fn execute(
        &mut self,
        plan: &StepPlan,
        observer: &mut dyn LayerObserver,
        output: &mut StepOutput,
    ) -> Result<(), RunnerError> {
        output.clear();
        if let Some(hook) = &mut self.step_hook {
            hook(plan);
        }
        self.checker.check(plan)?;
        let pool = Arc::clone(&self.pool);
        self.masks.begin(plan);
        self.masks.finish();
        pool.copy_blocks(&plan.copies)
            .map_err(|e| RunnerError::InvalidPlan(e.to_string()))?;
        let mut access = pool
            .claim_plan(plan)
            .map_err(|e| RunnerError::InvalidPlan(e.to_string()))?;
        self.compute(&mut access, plan, observer, output);
        Ok(())
    }
}

/// The `i`-th number of the stream that starts at `hash` (SplitMix64's output function on a Weyl sequence).
fn mix(hash: u64, i: u64) -> u64 {
    let mut z = hash.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Adds what is stored of positions, in all layers of a group, to a hash.
fn read_positions(
    access: &StepAccess<'_>,
    layout: &KvLayout,
    blocks: GroupBlocks<'_>,
    positions: Range<u32>,
    state: &mut Xxh3,
) {
    for position in positions {
        for layer in 0..layout.layers_of(blocks.group()) {
            token_bytes(access, layout, blocks, layer, position, |bytes| state.update(bytes));
        }
    }
}

/// Hands the bytes of one token's K and V in one layer to `take`, head by head, K first, element by element.
fn token_bytes(
    access: &StepAccess<'_>,
    layout: &KvLayout,
    blocks: GroupBlocks<'_>,
    layer: u32,
    position: u32,
    mut take: impl FnMut(&[u8]),
) {
    let (place, slot) = (
        position / layout.block_tokens,
        (position % layout.block_tokens) as usize,
    );
    // Plans are checked: there is a block.
    let block = blocks.get(place as usize).unwrap_or(BlockId::NONE);
    let (tokens, size) = (layout.block_tokens as usize, layout.dtype.size());
    let bytes = access.block(layer, block);
    for head in bytes.chunks_exact(bytes.len() / layout.num_kv_heads as usize) {
        let (keys, rest) = head.split_at(layout.head_dim as usize * tokens * size);
        for elements in keys.chunks_exact(tokens * size) {
            take(&elements[slot * size..(slot + 1) * size]);
        }
        let (values, scales) = rest.split_at(keys.len());
        take(&values[slot * keys.len() / tokens..(slot + 1) * keys.len() / tokens]);
        if !scales.is_empty() {
            for scales in scales.chunks_exact(scales.len() / 2) {
                let scale = layout.dtype.scale_bytes();
                take(&scales[slot * scale..(slot + 1) * scale]);
            }
        }
    }
}
