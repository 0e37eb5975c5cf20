//! How sequences enter an engine: to be computed here, or with blocks that somebody else fills.

use super::{Engine, MAX_WAITING};
use crate::admission::{Holder, Kin};
use crate::block_manager::{BlockTable, Content};
use crate::error::AddError;
use crate::plan::SequenceId;
use crate::reservation::{Awaited, CommitError, Newcomer, Reservation, ReserveError};
use crate::sequence::{Sequence, SequenceSpec};
use protocol::window::GroupKept;

impl Engine {
    /// Takes in a sequence of which nothing is computed. It waits; blocks are taken as its rows are planned.
    pub fn add(&mut self, spec: SequenceSpec) -> Result<SequenceId, AddError> {
        spec.validate(&self.limits)?;
        self.check_waiting(1)?;
        let id = self.new_id();
        self.scheduler
            .wait(Sequence::new(id, spec, BlockTable::default(), 0, &self.limits));
        Ok(id)
    }

    /// Takes in sequences that begin with the same tokens. As long as one of them has it, the KV of that beginning is computed
    /// once, and they share its full blocks; apart from that each is a sequence of its own. The first one may ask for the prompt's
    /// log-probabilities. Ids in the order of `specs`.
    pub fn add_choices(&mut self, specs: Vec<SequenceSpec>) -> Result<Vec<SequenceId>, AddError> {
        let Some(first) = specs.first() else {
            return Ok(Vec::new());
        };
        self.check_waiting(specs.len())?;
        let mut common = first.token_ids.len();
        for (index, spec) in specs.iter().enumerate() {
            spec.validate(&self.limits)?;
            if index > 0 && spec.prompt_logprobs.is_some() {
                return Err(AddError::PromptLogprobs);
            }
            let same = first.cache_key == spec.cache_key;
            let equal = first
                .token_ids
                .iter()
                .zip(&spec.token_ids)
                .take_while(|(a, b)| same && a == b);
            // The last token of each is computed in any case.
            common = common.min(equal.count()).min(spec.token_ids.len() - 1);
        }
        let family = self.next_id;
        let kin = self.kin(family, specs.len(), common);
        let ids = specs.into_iter().map(|spec| {
            let id = self.new_id();
            let mut sequence = Sequence::new(id, spec, BlockTable::default(), 0, &self.limits);
            sequence.kin = kin;
            self.scheduler.wait(sequence);
            id
        });
        Ok(ids.collect())
    }

    pub(super) fn check_waiting(&self, newcomers: usize) -> Result<(), AddError> {
        let waiting = self.scheduler.num_waiting();
        if waiting + newcomers > MAX_WAITING {
            return Err(AddError::Full {
                waiting,
                limit: MAX_WAITING,
            });
        }
        Ok(())
    }

    /// What `members` sequences have in common whose first `tokens` tokens are the same.
    pub(super) fn kin(&self, family: u64, members: usize, tokens: usize) -> Option<Kin> {
        let blocks = tokens / self.limits.block_tokens;
        (members > 1 && blocks > 0).then_some(Kin { family, blocks })
    }

    /// As [`Engine::reserve_choices`], for one sequence.
    pub fn reserve(&mut self, tokens: usize, growth: usize) -> Result<Reservation, ReserveError> {
        self.reserve_choices(tokens, growth, 1)
    }

    /// Takes all blocks for `tokens` tokens now, which `choices` sequences will share. `growth` is the most tokens that each
    /// of them may add afterwards (its `max_tokens`): a reservation is refused if the pool could run dry over it. The policy
    /// is in `admission`.
    pub fn reserve_choices(
        &mut self,
        tokens: usize,
        growth: usize,
        choices: usize,
    ) -> Result<Reservation, ReserveError> {
        self.reserve_blocks(tokens, None, growth, choices)
    }

    /// As [`Engine::reserve_choices`], for a prompt that is known: of the blocks that will be computed when it comes, the
    /// longest cached beginning is taken by reference, and need not be filled ([`Reservation::have_blocks`]).
    pub fn reserve_prompt(
        &mut self,
        prompt: &Awaited<'_>,
        growth: usize,
        choices: usize,
    ) -> Result<Reservation, ReserveError> {
        self.reserve_blocks(prompt.token_ids.len(), Some(prompt), growth, choices)
    }

    fn reserve_blocks(
        &mut self,
        tokens: usize,
        prompt: Option<&Awaited<'_>>,
        growth: usize,
        choices: usize,
    ) -> Result<Reservation, ReserveError> {
        let limit = self.limits.max_seq_len - 1;
        if tokens == 0 {
            return Err(ReserveError::Empty);
        }
        if tokens > limit {
            return Err(ReserveError::TooLong { tokens, limit });
        }
        let limit = self.limits.max_num_seqs;
        if choices == 0 || choices > limit {
            return Err(ReserveError::Choices { choices, limit });
        }
        let in_use = self.scheduler.num_running()
            + self.scheduler.num_waiting()
            + self.reservations.choices()
            + self.promised_to_beams();
        if in_use + choices > limit {
            return Err(ReserveError::NoSlots { in_use, choices, limit });
        }
        // The last token needs no KV.
        let growth = growth.min(self.limits.max_seq_len - tokens).saturating_sub(1);
        let kin = self.reservations.next_kin(tokens / self.limits.block_tokens);
        let newcomer = Newcomer { growth, choices, kin };
        let table = self.take_blocks(tokens, prompt, &newcomer)?;
        Ok(self.reservations.issue((table, self.limits.groups), tokens, &newcomer))
    }

    /// Blocks for a reservation, if the forecast allows it: those that are cached, then others.
    fn take_blocks(
        &mut self,
        tokens: usize,
        prompt: Option<&Awaited<'_>>,
        newcomer: &Newcomer,
    ) -> Result<BlockTable, ReserveError> {
        let kept = self.limits.kept();
        // Whoever commits says which tokens are computed: the last one may not be.
        let num_computed = prompt.map_or(tokens - 1, |prompt| prompt.num_computed.min(tokens));
        let needed = kept.missing_blocks(tokens, 0, num_computed);
        let (free, total) = (self.blocks.available(), self.blocks.total());
        self.collect_others();
        let holder = Holder {
            blocks: needed,
            tokens,
            growth: newcomer.growth,
            rows: 1,
            leaves: false,
            kin: Some(newcomer.kin),
        };
        let holders = std::iter::repeat_n(holder, newcomer.choices);
        let peak = self.scheduler.peak_with(holders, &self.others, total);
        let refused = ReserveError::NoBlocks {
            needed,
            free,
            peak,
            total,
        };
        if peak > total {
            return Err(refused);
        }
        let mut table = BlockTable::default();
        let mut cached = 0;
        if let Some(prompt) = prompt {
            let content = Content {
                tokens: prompt.token_ids,
                key: prompt.cache_key,
            };
            let limit = num_computed / self.limits.block_tokens;
            let first = |kept: GroupKept, _| kept.first_block(num_computed);
            cached = self.blocks.attach(&mut table, &content, limit, first);
        }
        if cached == 0 {
            table = self.blocks.without(num_computed);
        }
        let missing = self.limits.blocks_for(tokens) - table.places();
        if self.blocks.grow(&mut table, missing).is_err() {
            self.blocks.release(table);
            return Err(refused);
        }
        if prompt.is_some() && self.blocks.has_cache() {
            self.scheduler.note_hit(tokens, cached * self.limits.block_tokens);
        }
        Ok(table)
    }

    /// Makes a sequence of a reservation whose blocks hold the KV of the first `num_computed` tokens of `spec`. It joins
    /// the batch with the next plan. On an error the blocks are released.
    pub fn commit(
        &mut self,
        reservation: Reservation,
        spec: SequenceSpec,
        num_computed: usize,
    ) -> Result<SequenceId, CommitError> {
        let ids = self.commit_choices(reservation, vec![spec], num_computed)?;
        // One was committed.
        ids.first().copied().ok_or(CommitError::Unknown)
    }

    /// As [`Engine::commit`], for several sequences that begin with the same `num_computed` tokens: they share the blocks,
    /// and each copies the last one when it first writes into it. Ids in the order of `specs`.
    pub fn commit_choices(
        &mut self,
        reservation: Reservation,
        specs: Vec<SequenceSpec>,
        num_computed: usize,
    ) -> Result<Vec<SequenceId>, CommitError> {
        let (tokens, choices) = (reservation.tokens(), reservation.choices());
        let Some(table) = self.reservations.redeem(reservation) else {
            return Err(CommitError::Unknown);
        };
        let checked = self.check_commit(&specs, num_computed, tokens, choices);
        // All of them begin as the first one does.
        let cached = |()| {
            specs
                .first()
                .map_or(Ok(()), |spec| self.check_cached(&table, spec, num_computed))
        };
        if let Err(error) = checked.and_then(cached) {
            self.blocks.release(table);
            return Err(error);
        }
        let kin = self.kin(self.next_id, specs.len(), num_computed);
        let blocks = self.limits.blocks_for(num_computed);
        let mut ids = Vec::with_capacity(specs.len());
        let mut table = Some(table);
        let mut shared = BlockTable::default();
        for spec in specs {
            let id = self.new_id();
            ids.push(id);
            let first = table.take();
            let is_first = first.is_some();
            let own = first.unwrap_or_else(|| self.blocks.fork(&shared, blocks));
            let mut sequence = Sequence::new(id, spec, own, num_computed, &self.limits);
            sequence.kin = kin;
            sequence.cached_tokens = Some(0);
            if is_first {
                sequence.publish(&mut self.blocks, true);
                shared = self.blocks.fork(&sequence.table, blocks);
            }
            self.scheduler.wait(sequence);
        }
        self.blocks.release(shared);
        Ok(ids)
    }

    /// Whether a sequence of which `num_computed` tokens are computed begins as the cached blocks of a reservation do.
    pub(super) fn check_cached(
        &self,
        table: &BlockTable,
        spec: &SequenceSpec,
        num_computed: usize,
    ) -> Result<(), CommitError> {
        for (group, kept) in self.limits.kept().groups().enumerate() {
            let missing_blocks = table.gone(group);
            if missing_blocks > kept.first_block(num_computed) {
                return Err(CommitError::Window {
                    num_computed,
                    missing_blocks,
                });
            }
        }
        let have_blocks = table.indexed();
        let content = Content {
            tokens: &spec.token_ids,
            key: spec.cache_key,
        };
        if have_blocks * self.limits.block_tokens <= num_computed && self.blocks.holds(table, &content) {
            Ok(())
        } else {
            Err(CommitError::Cached { have_blocks })
        }
    }

    fn check_commit(
        &self,
        specs: &[SequenceSpec],
        num_computed: usize,
        reserved: usize,
        choices: usize,
    ) -> Result<(), CommitError> {
        let Some(first) = specs.first().filter(|_| specs.len() <= choices) else {
            return Err(CommitError::Choices {
                sequences: specs.len(),
                reserved: choices,
            });
        };
        for (index, spec) in specs.iter().enumerate() {
            spec.validate(&self.limits)?;
            let limit = reserved.min(spec.token_ids.len() - 1);
            if num_computed == 0 || num_computed > limit {
                return Err(CommitError::NumComputed {
                    num_computed,
                    limit,
                    reserved,
                });
            }
            if spec.prompt_logprobs.is_some() {
                return Err(CommitError::PromptLogprobs);
            }
            let same = spec.token_ids[..num_computed] == first.token_ids[..num_computed];
            if !same || spec.cache_key != first.cache_key {
                return Err(CommitError::Beginning { index, num_computed });
            }
        }
        Ok(())
    }
}
