//! A runner without a model, for tests of whatever drives an engine: the next token is a hash of the sequence's tokens.
//!
//! The tokens are read back from the fake KV blocks, not taken from the plan: a lost, swapped or foreign block changes the
//! text. Every plan is checked against the contract of [`crate::plan`], so a wrong one fails its step.

use std::collections::BTreeMap;
use std::ops::Range;

use protocol::kv::KvPlace;
use protocol::sampling::{FinishReason, PromptLogprob, SampledToken, SamplingParams, StopRules};
use protocol::window::Groups;
use xxhash_rust::xxh3::Xxh3;

use crate::plan::{BlockCopy, BlockId, PlannedSequence, SampleSpec, SequenceId, Span, StepOutput, StepPlan, Wanted};
use crate::runner::{LayerObserver, Runner, RunnerError};

/// Layers that the fake model claims to have.
const LAYERS: u32 = 2;

/// Why a sequence fails that is made to.
const BROKEN: &str = "made to fail";

/// What marks a slot that was never written.
const EMPTY: u32 = u32::MAX;

/// The fake model: a vocabulary size, and nothing else.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScriptedModel {
    /// Number of tokens in the vocabulary; at least 1.
    pub vocab_size: u32,
    /// The groups of its layers. So many of the last tokens as the first group sees decide what comes next; the others have to hold the
    /// same tokens, as far as they see.
    pub groups: Groups,
}

impl ScriptedModel {
    /// A model of so many tokens whose rows see everything.
    pub const fn new(vocab_size: u32) -> Self {
        Self {
            vocab_size,
            groups: Groups::ONE,
        }
    }

    /// The same with other groups of layers.
    pub const fn with_groups(self, groups: Groups) -> Self {
        Self { groups, ..self }
    }

    /// The token after `tokens`, the first `prompt_len` of which are the prompt.
    pub fn next_token(&self, tokens: &[u32], prompt_len: usize, params: &SamplingParams) -> SampledToken {
        let position = (tokens.len() - prompt_len) as u32;
        let mut hash = self.hash_of(tokens);
        if !params.greedy {
            let (seed, choice) = params.stream_of(0);
            hash.update(&seed.to_le_bytes());
            hash.update(&choice.to_le_bytes());
            hash.update(&position.to_le_bytes());
        }
        if params.needs_history() {
            hash.update(&(prompt_len as u64).to_le_bytes());
        }
        let digest = hash.digest();
        let token = self.token(digest);
        let raw_logprob = logprob(digest);
        let alternatives = u64::from(
            params
                .top_logprobs
                .unwrap_or(0)
                .min(u8::try_from(self.vocab_size).unwrap_or(u8::MAX)),
        );
        let top_logprobs = (0..alternatives)
            .map(|i| (self.token(digest.wrapping_add(i)), raw_logprob - i as f32))
            .collect();
        SampledToken {
            position,
            token,
            logprob: raw_logprob / 2.0,
            raw_logprob,
            top_logprobs,
        }
    }

    /// The `count` most probable tokens after `tokens` with their log-probabilities, best first, equals by their id: coarse
    /// values, so that sums are exact and equals are common.
    pub fn candidates(&self, tokens: &[u32], count: usize) -> Vec<(u32, f32)> {
        let before = self.hash_of(tokens);
        let value = |token: u32| {
            let mut hash = before.clone();
            hash.update(&token.to_le_bytes());
            hash.update(b"candidate");
            (token, -((hash.digest() % 24) as f32) / 4.0)
        };
        let mut all: Vec<(u32, f32)> = (0..self.vocab_size).map(value).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        all.truncate(count);
        all
    }

    /// What it thinks of every token of `prompt` from the second on, with so many alternatives.
    pub fn prompt_logprobs(&self, prompt: &[u32], alternatives: u8) -> Vec<PromptLogprob> {
        (1..prompt.len())
            .map(|end| self.target(&prompt[..end], prompt[end], alternatives))
            .collect()
    }

    fn target(&self, before: &[u32], target: u32, alternatives: u8) -> PromptLogprob {
        PromptLogprob {
            logprob: self.target_logprob(before, target),
            top: match alternatives {
                0 => Vec::new(),
                some => self.candidates(before, usize::from(some)),
            },
        }
    }

    /// What an engine that is never disturbed generates after `tokens`, whose first `prompt_len` are the prompt, and why
    /// it ends.
    pub fn generate(
        &self,
        tokens: &[u32],
        prompt_len: usize,
        params: &SamplingParams,
        stop: &StopRules,
        max_seq_len: usize,
    ) -> (Vec<SampledToken>, FinishReason) {
        let mut all = tokens.to_vec();
        let mut sampled = Vec::new();
        loop {
            let token = self.next_token(&all, prompt_len, params);
            all.push(token.token);
            let full = (all.len() >= max_seq_len).then_some(FinishReason::Length);
            let finish = stop.finish(token.token, (all.len() - prompt_len) as u32).or(full);
            sampled.push(token);
            if let Some(finish) = finish {
                return (sampled, finish);
            }
        }
    }

    fn token(&self, digest: u64) -> u32 {
        (digest % u64::from(self.vocab_size.max(1))) as u32
    }

    /// The first of `tokens` tokens that the last of them sees in the layers of a group.
    fn first_seen(&self, group: usize, tokens: usize) -> usize {
        let window = self.groups.window_of(group);
        window.map_or(0, |window| tokens.saturating_sub(window as usize))
    }

    fn hash_of(&self, tokens: &[u32]) -> Xxh3 {
        let mut hash = Xxh3::new();
        for token in &tokens[self.first_seen(0, tokens.len())..] {
            hash.update(&token.to_le_bytes());
        }
        hash
    }

    fn target_logprob(&self, before: &[u32], target: u32) -> f32 {
        let mut hash = self.hash_of(before);
        hash.update(&target.to_le_bytes());
        hash.update(b"target");
        logprob(hash.digest())
    }
}

fn logprob(digest: u64) -> f32 {
    -(((digest >> 32) % 1000) as f32) / 64.0
}

/// A pool of fake KV blocks and the fake model over it.
#[derive(Debug)]
pub struct ScriptedRunner {
    model: ScriptedModel,
    block_tokens: usize,
    /// One token for each slot of each block.
    slots: Vec<u32>,
    fail_next: Option<String>,
    break_next: Option<SequenceId>,
}

impl ScriptedRunner {
    /// A runner over `total_blocks` empty blocks of `block_tokens` tokens.
    pub fn new(model: ScriptedModel, total_blocks: usize, block_tokens: usize) -> Self {
        Self {
            model,
            block_tokens,
            slots: vec![EMPTY; total_blocks * block_tokens],
            fail_next: None,
            break_next: None,
        }
    }

    /// Makes the next step fail with `message`.
    pub fn fail_next(&mut self, message: &str) {
        self.fail_next = Some(message.to_owned());
    }

    /// Makes the sequence `id` fail in the next step, and no other.
    pub fn break_next(&mut self, id: SequenceId) {
        self.break_next = Some(id);
    }

    /// The blocks of a group of layers in a table.
    pub fn of_group(&self, table: &[BlockId], group: usize) -> Vec<BlockId> {
        let count = self.model.groups.count();
        table.iter().copied().skip(group).step_by(count).collect()
    }

    /// Writes the KV of `tokens` into `blocks` of one group from position 0 on, as the receiver of a handoff does. Tokens beyond the
    /// blocks are an error.
    pub fn write_kv(&mut self, blocks: &[BlockId], tokens: &[u32]) -> Result<(), RunnerError> {
        for (position, token) in tokens.iter().enumerate() {
            let slot = self.slot(blocks, position)?;
            self.slots[slot] = *token;
        }
        Ok(())
    }

    /// The tokens whose KV is in the first `len` slots of `blocks`.
    pub fn read_kv(&self, blocks: &[BlockId], len: usize) -> Result<Vec<u32>, RunnerError> {
        self.read_part(blocks, 0..len)
    }

    /// The tokens whose KV is in some slots of `blocks`.
    pub fn read_part(&self, blocks: &[BlockId], positions: Range<usize>) -> Result<Vec<u32>, RunnerError> {
        positions
            .map(|position| match self.slots[self.slot(blocks, position)?] {
                EMPTY => Err(invalid(format!("position {position} was never written"))),
                token => Ok(token),
            })
            .collect()
    }

    /// Copies a block: what is needed of it was written, and the rest is lost.
    fn copy(&mut self, copy: &BlockCopy) -> Result<(), RunnerError> {
        let (from, to) = ([copy.from], [copy.to]);
        let tokens = self.read_kv(&from, copy.tokens as usize)?;
        let start = self.slot(&to, 0)?;
        self.slots[start..start + self.block_tokens].fill(EMPTY);
        self.write_kv(&to, &tokens)
    }

    fn slot(&self, blocks: &[BlockId], position: usize) -> Result<usize, RunnerError> {
        let Some(block) = blocks.get(position / self.block_tokens) else {
            return Err(invalid(format!(
                "position {position} lies beyond {} blocks",
                blocks.len()
            )));
        };
        let slot = block.0 as usize * self.block_tokens + position % self.block_tokens;
        if slot >= self.slots.len() {
            return Err(invalid(format!("block {} is not in the pool", block.0)));
        }
        Ok(slot)
    }

    /// The sequences' rows follow each other without gaps; a block into which rows go is in no other place.
    fn check_ownership(&self, plan: &StepPlan) -> Result<(), RunnerError> {
        if plan.sequences.is_empty() || plan.step == 0 {
            return Err(invalid(format!(
                "step {} has {} sequences",
                plan.step,
                plan.sequences.len()
            )));
        }
        let mut next_row = 0;
        // How often each block is in a table, and whether rows go into it.
        let mut uses: BTreeMap<BlockId, (u32, bool)> = BTreeMap::new();
        for planned in &plan.sequences {
            if planned.rows.start != next_row {
                return Err(invalid(format!(
                    "rows of sequence {} start at {}",
                    planned.id.0, planned.rows.start
                )));
            }
            next_row += planned.rows.len;
            let first_written = planned.start_position as usize / self.block_tokens;
            let count = self.model.groups.count();
            for (index, block) in part(&plan.block_ids, planned.blocks, "blocks")?.iter().enumerate() {
                let (index, group) = (index / count, index % count);
                let first_seen = self.model.first_seen(group, planned.start_position as usize + 1);
                if !block.is_some() && index < first_seen / self.block_tokens {
                    continue;
                }
                let entry = uses.entry(*block).or_default();
                *entry = (entry.0 + 1, entry.1 || index >= first_written);
            }
        }
        if next_row as usize != plan.token_ids.len() {
            return Err(invalid(format!(
                "{} of {} rows belong to a sequence",
                next_row,
                plan.token_ids.len()
            )));
        }
        for copy in &plan.copies {
            if uses.get(&copy.to) != Some(&(1, true)) || copy.from == copy.to {
                return Err(invalid(format!(
                    "block {} is copied to block {}, which no sequence writes alone",
                    copy.from.0, copy.to.0
                )));
            }
        }
        match uses.iter().find(|(_, (places, written))| *written && *places > 1) {
            Some((block, _)) => Err(invalid(format!("block {} is written and in two places", block.0))),
            None => Ok(()),
        }
    }

    /// Writes rows into the blocks of all groups; returns the first token that a row sees, and all tokens, of which those before
    /// it may be anything.
    fn write_rows(&mut self, table: &[BlockId], start: usize, rows: &[u32]) -> Result<(usize, Vec<u32>), RunnerError> {
        let mut all = (0, Vec::new());
        for group in 0..self.model.groups.count() {
            let blocks = self.of_group(table, group);
            for (row, token) in rows.iter().enumerate() {
                let slot = self.slot(&blocks, start + row)?;
                self.slots[slot] = *token;
            }
            let first = self.model.first_seen(group, start + 1);
            let seen = self.read_part(&blocks, first..start + rows.len())?;
            if group == 0 {
                let mut tokens = vec![EMPTY; first];
                tokens.extend(seen);
                all = (first, tokens);
            } else if all.1[first..] != seen {
                return Err(invalid(format!("the blocks of group {group} hold another text")));
            }
        }
        Ok(all)
    }

    fn compute(
        &mut self,
        plan: &StepPlan,
        planned: &PlannedSequence,
        output: &mut StepOutput,
    ) -> Result<(), RunnerError> {
        let rows = part(&plan.token_ids, planned.rows, "rows")?;
        let blocks = part(&plan.block_ids, planned.blocks, "blocks")?;
        let targets = part(&plan.targets, planned.targets, "targets")?;
        if rows.is_empty() || targets.len() > rows.len() {
            return Err(invalid(format!("{} rows with {} targets", rows.len(), targets.len())));
        }
        let start = planned.start_position as usize;
        let (first, tokens) = self.write_rows(blocks, start, rows)?;
        if !targets.is_empty() {
            let values = targets.iter().enumerate();
            let values = values
                .map(|(row, target)| {
                    let before = &tokens[..start + row + 1];
                    self.model.target(before, *target, planned.target_alternatives)
                })
                .collect();
            output.prompt_logprobs.push((planned.id, values));
        }
        if let Some(sample) = &planned.sample {
            let prompt_len = check_sample(plan, sample, &tokens, first)?;
            match sample.wanted {
                Wanted::Tokens(count) => output.sampled.extend((0..count).map(|choice| {
                    let params = SamplingParams {
                        choice: sample.params.choice + choice,
                        ..(*sample.params).clone()
                    };
                    (planned.id, self.model.next_token(&tokens, prompt_len, &params))
                })),
                Wanted::Candidates(count) => output
                    .candidates
                    .push((planned.id, self.model.candidates(&tokens, count as usize))),
            }
        }
        Ok(())
    }
}

impl Runner for ScriptedRunner {
    fn execute(
        &mut self,
        plan: &StepPlan,
        observer: &mut dyn LayerObserver,
        output: &mut StepOutput,
    ) -> Result<(), RunnerError> {
        output.clear();
        if let Some(message) = self.fail_next.take() {
            return Err(RunnerError::Failed(message));
        }
        self.check_ownership(plan)?;
        for copy in &plan.copies {
            self.copy(copy)?;
        }
        let broken = self.break_next.take();
        for planned in &plan.sequences {
            self.compute(plan, planned, output)?;
            if broken == Some(planned.id) {
                output.fail(planned.id, BROKEN.to_owned());
            }
        }
        for layer in 0..LAYERS {
            observer.layer_computed(KvPlace::in_one_group(layer));
        }
        Ok(())
    }
}

/// The sampling instructions fit the tokens, which are known from the `first` on; returns the length of the prompt.
fn check_sample(plan: &StepPlan, sample: &SampleSpec, tokens: &[u32], first: usize) -> Result<usize, RunnerError> {
    let history = part(&plan.history, sample.history, "history")?;
    let expected = if sample.params.needs_history() { tokens } else { &[] };
    let known = first.min(expected.len());
    if history.len() != expected.len() || history[known..] != expected[known..] {
        return Err(invalid(format!(
            "history has {} tokens, not the {} expected",
            history.len(),
            expected.len()
        )));
    }
    let prompt_len = sample.prompt_len as usize;
    if prompt_len == 0 || prompt_len + sample.output_position as usize != tokens.len() {
        return Err(invalid(format!(
            "output position {} after {} tokens with a prompt of {prompt_len}",
            sample.output_position,
            tokens.len()
        )));
    }
    Ok(prompt_len)
}

fn part<'a, T>(array: &'a [T], span: Span, name: &str) -> Result<&'a [T], RunnerError> {
    array.get(span.range()).ok_or_else(|| {
        invalid(format!(
            "{name} {}..+{} lie outside of an array of {}",
            span.start,
            span.len,
            array.len()
        ))
    })
}

fn invalid(reason: String) -> RunnerError {
    RunnerError::InvalidPlan(reason)
}

#[cfg(test)]
mod tests;
