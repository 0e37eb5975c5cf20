//! The fake model: its next token is a function of all bytes of a sequence's KV, in all layers, or of those in a window.
//!
//! The KV of a position is a pure function of the tokens up to it and of the adapter, and it is computed from the KV of the
//! position before it as that lies in the blocks. So a block that is lost, stale, swapped or foreign changes every later
//! token: the text shows it.

use engine::plan::{BlockCopy, BlockId, GroupBlocks, PlannedSequence, SampleSpec, StepOutput, StepPlan, Wanted};
use protocol::kv::{AdapterIdentity, KvDtype, KvLayout, KvPlace, ModelIdentity};
use protocol::sampling::{PromptLogprob, SampledToken, SamplingParams};
use protocol::window::Groups;

use crate::random::{Random, mix};

/// Tokens of the vocabulary. The last one ends a sequence.
pub const VOCAB: u32 = 16;
/// The end-of-sequence token.
pub const EOS: u32 = VOCAB - 1;
/// Tokens of a KV block.
pub const BLOCK_TOKENS: usize = 4;
/// Layers of a block; the model has as many for each group, or less for the last of a kind.
const LAYERS: u32 = 2;
/// One in so many tokens is the end-of-sequence token.
const EOS_RATE: u64 = 40;
/// Name of the one adapter.
pub const ADAPTER: &str = "terse";
/// Hash of its numbers.
const ADAPTER_HASH: u64 = 0x7e25;

/// Bytes of a position in one layer.
const SLOT: usize = 16;

/// Shape of the fake KV cache: small, and with several layers and blocks, so that everything that is cut can be cut.
pub const LAYOUT: KvLayout = KvLayout {
    num_layers: LAYERS,
    num_kv_heads: 1,
    head_dim: 2,
    block_tokens: BLOCK_TOKENS as u32,
    dtype: KvDtype::F32,
    latent: false,
    groups: Groups::ONE,
};

/// The same of a model with such groups of layers. Windows have at least 2 positions: a position's KV is computed from the
/// one before it.
pub fn layout(groups: Groups) -> KvLayout {
    KvLayout { groups, ..LAYOUT }
}

/// What a node says that it serves.
pub fn identity() -> ModelIdentity {
    ModelIdentity {
        architecture: "fake".to_owned(),
        vocab_size: VOCAB,
        tokenizer_hash: 7,
        weights_hash: 9,
        numerics: "exact".to_owned(),
        adapters: vec![AdapterIdentity {
            name: ADAPTER.to_owned(),
            hash: ADAPTER_HASH,
        }],
    }
}

/// Number and cache key of an adapter, as the engine wants them; `None` for a name that no node knows.
pub fn adapter(name: Option<&str>) -> Option<(Option<u32>, u64)> {
    match name {
        None => Some((None, 0)),
        Some(ADAPTER) => Some((Some(0), ADAPTER_HASH)),
        Some(_) => None,
    }
}

/// The KV pool of a node: layer after layer, block after block, position after position.
#[derive(Clone, Debug)]
pub struct Pool {
    /// What rows of the model see.
    groups: Groups,
    blocks: usize,
    bytes: Vec<u8>,
}

impl Pool {
    /// A pool whose bytes mean nothing.
    pub fn new(blocks: usize, groups: Groups) -> Self {
        let layer_block = LAYOUT.layer_block_bytes();
        debug_assert_eq!(layer_block, SLOT * BLOCK_TOKENS, "a block is its positions");
        Self {
            groups,
            blocks,
            bytes: vec![0xa5; blocks * layer_block * LAYERS as usize],
        }
    }

    fn at(&self, layer: u32, block: BlockId) -> usize {
        (layer as usize * self.blocks + block.0 as usize) * LAYOUT.layer_block_bytes()
    }

    /// The bytes of a block in one layer.
    pub fn block(&self, layer: u32, block: BlockId) -> &[u8] {
        let at = self.at(layer, block);
        &self.bytes[at..at + LAYOUT.layer_block_bytes()]
    }

    /// Replaces the bytes of a block in one layer; as many as there are, at most.
    pub fn write(&mut self, layer: u32, block: BlockId, bytes: &[u8]) {
        let at = self.at(layer, block);
        let len = bytes.len().min(LAYOUT.layer_block_bytes());
        self.bytes[at..at + len].copy_from_slice(&bytes[..len]);
    }

    /// A number that differs, for all practical purposes, if any byte of `blocks` does.
    pub fn fingerprint(&self, blocks: impl Iterator<Item = BlockId>) -> u64 {
        blocks.fold(0, |hash, block| {
            (0..LAYERS).fold(hash, |hash, layer| {
                mix(hash ^ xxhash_rust::xxh3::xxh3_64(self.block(layer, block)))
            })
        })
    }

    /// Appends the bytes of layers and blocks in canonical order.
    pub fn gather(&self, layers: std::ops::Range<u32>, blocks: &[BlockId], out: &mut Vec<u8>) {
        for layer in layers {
            for block in blocks {
                out.extend_from_slice(self.block(layer, *block));
            }
        }
    }

    fn slot(&self, place: KvPlace, table: &[BlockId], position: usize) -> usize {
        let blocks = GroupBlocks::new(table, self.groups.count(), place.group as usize);
        let block = blocks.get(position / BLOCK_TOKENS).unwrap_or(BlockId::NONE);
        self.at(place.layer, block) + position % BLOCK_TOKENS * SLOT
    }

    /// Where the KV of the model's layers is, in their order.
    fn places(&self) -> impl Iterator<Item = KvPlace> + use<> {
        layout(self.groups).places()
    }

    fn read(&self, place: KvPlace, table: &[BlockId], position: usize) -> (u64, u64) {
        let at = self.slot(place, table, position);
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| self.bytes[at + i]));
        (word(at), word(at + 8))
    }

    /// Turns over a bit of what the blocks of a group hold of a position.
    pub fn rot(&mut self, table: &[BlockId], (group, position): (usize, usize), random: &mut Random) {
        if position / BLOCK_TOKENS < table.len() / self.groups.count() {
            let layer = random.below(u64::from(layout(self.groups).layers_of(group))) as u32;
            let group = group as u32;
            let place = KvPlace { group, layer };
            let at = self.slot(place, table, position) + random.below(SLOT as u64) as usize;
            self.bytes[at] ^= 1 << random.below(8);
        }
    }

    fn copy(&mut self, copy: &BlockCopy) {
        for layer in 0..LAYERS {
            let (from, to) = (self.at(layer, copy.from), self.at(layer, copy.to));
            let len = copy.tokens as usize * SLOT;
            self.bytes.copy_within(from..from + len, to);
            // What follows may be anything.
            self.bytes[to + len..to + LAYOUT.layer_block_bytes()].fill(0x5a);
        }
    }

    /// Writes the KV of one row, which depends on the one before it.
    fn put(&mut self, place: KvPlace, table: &[BlockId], position: usize, token: u32, adapter: Option<u32>) {
        let layer = place.group * LAYERS + place.layer;
        let before = match position.checked_sub(1) {
            Some(before) => self.read(place, table, before).0,
            None => adapter.map_or(1, |number| u64::from(number) + 2),
        };
        let key = mix(before ^ u64::from(token) << 8 ^ u64::from(layer) << 40 ^ 0x6b);
        let value = mix(key ^ position as u64);
        let at = self.slot(place, table, position);
        self.bytes[at..at + 8].copy_from_slice(&key.to_le_bytes());
        self.bytes[at + 8..at + SLOT].copy_from_slice(&value.to_le_bytes());
    }
}

/// What all KV of the positions that a row sees comes to.
#[derive(Clone, Copy, Debug, Default)]
struct Digest {
    hash: u64,
    positions: usize,
}

impl Digest {
    fn add(&mut self, pool: &Pool, blocks: &[BlockId], place: KvPlace, position: usize) {
        let (key, value) = pool.read(place, blocks, position);
        self.hash = mix(self.hash ^ key ^ value.rotate_left(17));
    }

    /// Goes on to `end` positions.
    fn extend(&mut self, pool: &Pool, blocks: &[BlockId], end: usize) {
        if pool.groups.window().is_none() {
            for position in self.positions..end {
                pool.places().for_each(|place| self.add(pool, blocks, place, position));
            }
        } else {
            self.hash = 0;
            for place in pool.places() {
                let window = pool.groups.window_of(place.group as usize);
                let first = window.map_or(0, |window| end.saturating_sub(window as usize));
                (first..end).for_each(|position| self.add(pool, blocks, place, position));
            }
        }
        self.positions = end;
    }
}

/// Computes a plan: layer after layer of all rows, with `layer_computed` told of each, then the samples.
pub fn execute(
    plan: &StepPlan,
    pool: &mut Pool,
    mut layer_computed: impl FnMut(KvPlace, &Pool),
    output: &mut StepOutput,
) {
    output.clear();
    for copy in &plan.copies {
        pool.copy(copy);
    }
    for place in pool.places() {
        for planned in &plan.sequences {
            let blocks = &plan.block_ids[planned.blocks.range()];
            for (row, token) in plan.token_ids[planned.rows.range()].iter().enumerate() {
                let position = planned.start_position as usize + row;
                pool.put(place, blocks, position, *token, planned.adapter);
            }
        }
        layer_computed(place, pool);
    }
    for planned in &plan.sequences {
        answer(plan, planned, pool, output);
    }
}

fn answer(plan: &StepPlan, planned: &PlannedSequence, pool: &Pool, output: &mut StepOutput) {
    let blocks = &plan.block_ids[planned.blocks.range()];
    let start = planned.start_position as usize;
    let mut digest = Digest::default();
    let targets = &plan.targets[planned.targets.range()];
    if !targets.is_empty() {
        let thoughts = targets.iter().enumerate().map(|(row, target)| {
            digest.extend(pool, blocks, start + row + 1);
            target_logprob(digest.hash, *target, planned.target_alternatives)
        });
        let thoughts = thoughts.collect();
        output.prompt_logprobs.push((planned.id, thoughts));
    }
    let Some(sample) = &planned.sample else { return };
    digest.extend(pool, blocks, start + planned.rows.len as usize);
    let history = &plan.history[sample.history.range()];
    match sample.wanted {
        Wanted::Tokens(count) => output
            .sampled
            .extend((0..count).map(|more| (planned.id, draw(digest.hash, sample, more, history)))),
        Wanted::Candidates(count) => {
            output
                .candidates
                .push((planned.id, candidates(digest.hash, count as usize)));
        }
    }
}

fn draw(digest: u64, sample: &SampleSpec, more: u32, history: &[u32]) -> SampledToken {
    let params: &SamplingParams = &sample.params;
    let mut hash = digest;
    if !params.greedy {
        let (seed, choice) = params.stream_of(more);
        hash = mix(hash ^ seed);
        hash = mix(hash ^ u64::from(choice) << 32 ^ u64::from(sample.output_position));
    }
    if params.needs_history() {
        hash = history.iter().fold(hash, |hash, token| mix(hash ^ u64::from(*token)));
        hash = mix(hash ^ u64::from(sample.prompt_len) << 20);
    }
    let token = if hash.is_multiple_of(EOS_RATE) {
        EOS
    } else {
        (hash >> 16) as u32 % EOS
    };
    let raw_logprob = logprob(digest);
    let alternatives = u32::from(params.top_logprobs.unwrap_or(0)).min(VOCAB);
    SampledToken {
        position: sample.output_position,
        token,
        logprob: logprob(hash),
        raw_logprob,
        top_logprobs: (0..alternatives)
            .map(|i| ((digest as u32).wrapping_add(i) % VOCAB, raw_logprob - i as f32))
            .collect(),
    }
}

fn candidates(digest: u64, count: usize) -> Vec<(u32, f32)> {
    // Coarse values: sums are exact, and equals are common.
    let value = |token: u32| (token, -((mix(digest ^ u64::from(token)) % 24) as f32) / 4.0);
    let mut all: Vec<(u32, f32)> = (0..VOCAB).map(value).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.truncate(count);
    all
}

fn target_logprob(digest: u64, target: u32, alternatives: u8) -> PromptLogprob {
    PromptLogprob {
        logprob: logprob(mix(digest ^ u64::from(target))),
        top: match alternatives {
            0 => Vec::new(),
            some => candidates(digest, usize::from(some)),
        },
    }
}

fn logprob(digest: u64) -> f32 {
    -(((digest >> 32) % 1000) as f32) / 64.0
}
