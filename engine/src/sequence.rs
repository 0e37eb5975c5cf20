//! One sequence: its tokens, its blocks, and the one counter that says how far it is computed.

use std::sync::Arc;

use protocol::sampling::{FinishReason, PromptLogprob, SampledToken, SamplingParams, StopRules};
use thiserror::Error;

use crate::admission::{Holder, Kin};
use crate::block_manager::{BlockManager, BlockTable, Content};
use crate::limits::EngineLimits;
use crate::plan::{SampleSpec, SequenceId, Span, Wanted};

/// What a sequence is to compute.
#[derive(Clone, PartialEq, Debug)]
pub struct SequenceSpec {
    /// The prompt, followed by the tokens generated so far (elsewhere), if any.
    pub token_ids: Vec<u32>,
    /// How many of `token_ids` are the prompt; at least 1.
    pub prompt_len: usize,
    /// How tokens are drawn.
    pub sampling: Arc<SamplingParams>,
    /// When the sequence ends. `max_tokens` counts all tokens after the prompt, wherever they were sampled.
    pub stop: StopRules,
    /// Report the log-probabilities of the prompt with the first token sampled here, and so many alternatives in each
    /// place.
    pub prompt_logprobs: Option<u8>,
    /// What becomes of the blocks when the sequence ends by itself.
    pub on_finish: OnFinish,
    /// End once all tokens are computed, whatever `stop` says: so many choices (`sampling.choice` and those after it) then
    /// each draw their first token, maybe none. The event still tells what `stop` says.
    pub first_only: Option<u32>,
    /// The model's adapter that is applied, by its number; `None`: the model as it is.
    pub adapter: Option<u32>,
    /// What the KV depends on beside the tokens (the adapter's numbers): only sequences with the same key use each other's cached blocks. 0 where
    /// there is nothing.
    pub cache_key: u64,
}

impl SequenceSpec {
    /// A prompt whose continuation is the most probable one, of so many tokens; nothing else is wanted.
    pub fn greedy(token_ids: Vec<u32>, max_tokens: u32) -> Self {
        Self {
            prompt_len: token_ids.len(),
            token_ids,
            sampling: Arc::new(SamplingParams::greedy()),
            stop: StopRules::length(max_tokens),
            prompt_logprobs: None,
            on_finish: OnFinish::Release,
            first_only: None,
            adapter: None,
            cache_key: 0,
        }
    }
}

/// What becomes of a sequence's blocks when it ends by itself. Cancelled and failed sequences always release them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnFinish {
    /// They are free at once.
    Release,
    /// They stay readable under the sequence's id until `Engine::release_held` or `Engine::cancel`.
    Hold,
}

/// What is wrong with a [`SequenceSpec`]; it will be wrong every time.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum SpecError {
    /// The prompt's length contradicts the tokens.
    #[error("prompt_len is {prompt_len}; it must be at least 1 and at most {tokens}, the length of token_ids")]
    PromptLen {
        /// The prompt's length.
        prompt_len: usize,
        /// Number of tokens.
        tokens: usize,
    },
    /// More tokens than any sequence may have.
    #[error("token_ids has {tokens} tokens; it may have at most {limit}, which leaves room for one output token")]
    TooLong {
        /// Number of tokens.
        tokens: usize,
        /// Most tokens.
        limit: usize,
    },
    /// All tokens that may be generated have been.
    #[error("{generated} tokens after the prompt are there already; stop.max_tokens, {max_tokens}, must be larger")]
    NothingLeft {
        /// Tokens after the prompt.
        generated: usize,
        /// The limit.
        max_tokens: u32,
    },
}

impl SequenceSpec {
    pub(crate) fn validate(&self, limits: &EngineLimits) -> Result<(), SpecError> {
        let tokens = self.token_ids.len();
        if self.prompt_len == 0 || self.prompt_len > tokens {
            return Err(SpecError::PromptLen {
                prompt_len: self.prompt_len,
                tokens,
            });
        }
        let limit = limits.max_seq_len - 1;
        if tokens > limit {
            return Err(SpecError::TooLong { tokens, limit });
        }
        let generated = tokens - self.prompt_len;
        if generated >= self.stop.max_tokens as usize {
            return Err(SpecError::NothingLeft {
                generated,
                max_tokens: self.stop.max_tokens,
            });
        }
        Ok(())
    }
}

/// A sequence that has not ended. Where it is kept (running or waiting) is its state.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    /// Under whose name its events come.
    pub(crate) owner: SequenceId,
    /// Whose beginning it has.
    pub(crate) kin: Option<Kin>,
    /// As a member of a beam search it yields so many candidates, and not a token.
    pub(crate) candidates: Option<u32>,
    /// A member of a beam search that has yielded its candidates: it waits for the other members.
    pub(crate) parked: bool,
    pub(crate) table: BlockTable,
    /// Tokens whose KV is in the blocks.
    pub(crate) num_computed: usize,
    /// Tokens whose KV was cached when it started; `None` before.
    pub(crate) cached_tokens: Option<usize>,
    spec: SequenceSpec,
    /// Length at which it ends for sure.
    final_len: usize,
    /// `Some` until delivered, if log-probabilities of the prompt are asked for.
    prompt_logprobs: Option<Vec<PromptLogprob>>,
}

/// A token that was accepted.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) prompt_logprobs: Option<Vec<PromptLogprob>>,
    pub(crate) finish: Option<FinishReason>,
    /// The sequence has ended.
    pub(crate) ended: bool,
}

impl Sequence {
    /// A sequence whose first `num_computed` tokens have their KV in `table`. The spec has been validated.
    pub(crate) fn new(
        id: SequenceId,
        spec: SequenceSpec,
        table: BlockTable,
        num_computed: usize,
        limits: &EngineLimits,
    ) -> Self {
        let by_rules = spec.prompt_len.saturating_add(spec.stop.max_tokens as usize);
        let final_len = by_rules.min(limits.max_seq_len);
        let prompt_logprobs = spec.prompt_logprobs.map(|_| Vec::with_capacity(spec.prompt_len - 1));
        Self {
            id,
            owner: id,
            kin: None,
            candidates: None,
            parked: false,
            table,
            num_computed,
            cached_tokens: None,
            spec,
            final_len,
            prompt_logprobs,
        }
    }

    pub(crate) fn token_ids(&self) -> &[u32] {
        &self.spec.token_ids
    }

    pub(crate) fn adapter(&self) -> Option<u32> {
        self.spec.adapter
    }

    pub(crate) fn on_finish(&self) -> OnFinish {
        self.spec.on_finish
    }

    pub(crate) fn first_only(&self) -> Option<u32> {
        self.spec.first_only
    }

    pub(crate) fn target_alternatives(&self) -> u8 {
        self.spec.prompt_logprobs.unwrap_or(0)
    }

    pub(crate) fn owns_blocks(&self) -> bool {
        !self.table.is_empty()
    }

    /// What its blocks hold, or are going to.
    pub(crate) fn content(&self) -> Content<'_> {
        Content {
            tokens: &self.spec.token_ids,
            key: self.spec.cache_key,
        }
    }

    /// Blocks at its beginning that need not be computed if they are cached. The last token is computed in any case, as
    /// the next one is sampled from what comes of it. `None`: all are computed, as the log-probabilities of the prompt are
    /// still owed.
    pub(crate) fn reusable_blocks(&self, block_tokens: usize) -> Option<usize> {
        let owes_prompt = self.prompt_logprobs.is_some() && self.spec.prompt_len > 1;
        (!owes_prompt).then(|| (self.spec.token_ids.len() - 1) / block_tokens)
    }

    /// Rows that are missing before the next token can be sampled; at least 1 unless it is parked.
    pub(crate) fn pending(&self) -> usize {
        self.spec.token_ids.len() - self.num_computed
    }

    /// Whether its next row yields a token for somebody who waits for it since the last one.
    pub(crate) fn generates(&self) -> bool {
        self.pending() == 1 && self.spec.token_ids.len() > self.spec.prompt_len
    }

    /// Its share in the forecast. The last token it samples needs no KV.
    pub(crate) fn holder(&self) -> Holder {
        let tokens = self.spec.token_ids.len();
        let growth = if self.spec.first_only.is_some() {
            0
        } else {
            (self.final_len - 1).saturating_sub(tokens)
        };
        // How long a prompt takes to be computed, and a holder to let go, nobody knows.
        let leaves = self.spec.on_finish == OnFinish::Release && self.pending() <= 1;
        Holder {
            blocks: self.table.num_present(),
            tokens,
            growth,
            rows: self.pending(),
            leaves,
            kin: self.kin,
        }
    }

    /// Prompt tokens whose log-probability the next `rows` rows yield.
    pub(crate) fn targets(&self, rows: usize) -> &[u32] {
        if self.prompt_logprobs.is_none() {
            return &[];
        }
        let first = (self.num_computed + 1).min(self.spec.prompt_len);
        let end = (self.num_computed + rows + 1).min(self.spec.prompt_len);
        &self.spec.token_ids[first..end]
    }

    /// How the next token is sampled, if the next `rows` rows lead to it; `history_start` is where its history would
    /// begin in the plan.
    pub(crate) fn sample_spec(&self, rows: usize, history_start: usize) -> Option<SampleSpec> {
        if rows < self.pending() {
            return None;
        }
        let wanted = match (self.candidates, self.spec.first_only) {
            (Some(count), _) => Wanted::Candidates(count),
            (None, Some(0)) => return None,
            (None, Some(choices)) => Wanted::Tokens(choices),
            (None, None) => Wanted::Tokens(1),
        };
        let history_len = if self.spec.sampling.needs_history() {
            self.spec.token_ids.len()
        } else {
            0
        };
        Some(SampleSpec {
            wanted,
            params: self.spec.sampling.clone(),
            output_position: (self.spec.token_ids.len() - self.spec.prompt_len) as u32,
            history: Span {
                start: history_start as u32,
                len: history_len as u32,
            },
            prompt_len: self.spec.prompt_len as u32,
        })
    }

    /// Notes that the next `rows` rows are computed.
    pub(crate) fn advance(&mut self, rows: usize, prompt_logprobs: &[PromptLogprob]) {
        self.num_computed += rows;
        if let Some(all) = &mut self.prompt_logprobs {
            all.extend_from_slice(prompt_logprobs);
        }
    }

    /// Why the sequence would end with `token` as its next one, if it would.
    pub(crate) fn finish(&self, token: u32) -> Option<FinishReason> {
        let len = self.spec.token_ids.len() + 1;
        let by_rules = self.spec.stop.finish(token, (len - self.spec.prompt_len) as u32);
        by_rules.or((len >= self.final_len).then_some(FinishReason::Length))
    }

    /// Appends the sampled token.
    pub(crate) fn accept(&mut self, token: &SampledToken) -> Accepted {
        let finish = self.finish(token.token);
        self.spec.token_ids.push(token.token);
        Accepted {
            prompt_logprobs: self.prompt_logprobs.take(),
            finish,
            ended: finish.is_some() || self.spec.first_only.is_some(),
        }
    }

    /// What is known of the prompt, once all of it is computed.
    pub(crate) fn take_prompt_logprobs(&mut self) -> Option<Vec<PromptLogprob>> {
        self.prompt_logprobs.take()
    }

    /// Length at which it ends for sure.
    pub(crate) fn final_len(&self) -> usize {
        self.final_len
    }

    /// Lets others find what is computed. With `adopt` blocks may be changed for equal ones.
    pub(crate) fn publish(&mut self, blocks: &mut BlockManager, adopt: bool) {
        let mut table = std::mem::take(&mut self.table);
        blocks.publish(&mut table, &self.content(), self.num_computed, adopt);
        self.table = table;
    }

    /// Lets go of the blocks that its next rows do not see.
    pub(crate) fn slide(&mut self, blocks: &mut BlockManager) {
        blocks.slide(&mut self.table, self.num_computed);
    }

    /// Forgets what was computed and hands out the blocks; the tokens stay.
    pub(crate) fn reset(&mut self) -> BlockTable {
        self.num_computed = 0;
        self.parked = false;
        if let Some(all) = &mut self.prompt_logprobs {
            all.clear();
        }
        std::mem::take(&mut self.table)
    }
}
