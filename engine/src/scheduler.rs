//! Which rows of which sequences a step computes.
//!
//! Sequences are kept in the order of their ids, oldest first, in one of two places: `running` (at most `max_num_seqs`)
//! or `waiting`. A step walks through `running` by age. Whoever finds no block takes some from the youngest, never from an
//! older one; the youngest without a block sits the step out. So the oldest sequence always advances as long as only
//! sequences own blocks, it ends after finitely many steps, and then another one is the oldest: no livelock. Blocks of
//! reservations and of held sequences are not taken; they come back within the deadlines of their owners.

use std::collections::VecDeque;

use crate::admission::{Forecast, Holder};
use crate::block_manager::BlockManager;
use crate::budget::StepBudget;
use crate::limits::EngineLimits;
use crate::plan::{BlockCopy, PlannedSequence, SequenceId, Span, StepPlan};
use crate::sequence::Sequence;
use crate::step_time::StepTimes;

/// All sequences that have not ended.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: EngineLimits,
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    forecast: Forecast,
    counts: Counts,
    /// What steps took.
    pub(crate) times: StepTimes,
}

/// What has happened since the start; see `EngineStats`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) preemptions: u64,
    pub(crate) preempted_rows: u64,
    pub(crate) queried_tokens: u64,
    pub(crate) hit_tokens: u64,
    pub(crate) resumed_tokens: u64,
}

/// What a scheduling pass works on beside the scheduler's own sequences.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    pub(crate) pool: &'a mut BlockManager,
    /// Owners of blocks that are not sequences of the scheduler.
    pub(crate) others: &'a [Holder],
    /// Blocks are reserved for sequences that will join the batch, perhaps in the middle of this step.
    pub(crate) expecting: bool,
    pub(crate) plan: &'a mut StepPlan,
    pub(crate) preempted: &'a mut Vec<SequenceId>,
}

impl Scheduler {
    pub(crate) fn new(limits: EngineLimits, horizon: usize) -> Self {
        Self {
            limits,
            running: Vec::with_capacity(limits.max_num_seqs),
            waiting: VecDeque::new(),
            forecast: Forecast::new(limits.kept(), limits.most_rows(), horizon),
            counts: Counts::default(),
            times: StepTimes::default(),
        }
    }

    pub(crate) fn num_running(&self) -> usize {
        self.running.len()
    }

    pub(crate) fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Those that wait, have started before and own no blocks: a preemption took them.
    pub(crate) fn num_preempted(&self) -> usize {
        let lost = |sequence: &&Sequence| sequence.cached_tokens.is_some() && !sequence.owns_blocks();
        self.waiting.iter().filter(lost).count()
    }

    /// Under whose name the one that waits first in line is known.
    pub(crate) fn first_waiting(&self) -> Option<SequenceId> {
        self.waiting.front().map(|sequence| sequence.owner)
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Reports what the order of seats and preemptions rules out.
    pub(crate) fn audit(&self, in_flight: bool, problems: &mut Vec<String>) {
        if self.running.len() > self.limits.max_num_seqs {
            problems.push(format!("{} sequences are running", self.running.len()));
        }
        for sequence in self.running.iter().filter(|sequence| !sequence.owns_blocks()) {
            problems.push(format!("sequence {} is running without blocks", sequence.id.0));
        }
        let youngest = self.running.last().map(|sequence| sequence.id);
        // New members of a beam search are as old as the search: the next plan gives them their places.
        let seated = |sequence: &&Sequence| in_flight || sequence.candidates.is_none();
        let owners = self.waiting.iter().filter(|sequence| sequence.owns_blocks());
        for owner in owners.filter(seated) {
            if Some(owner.id) < youngest {
                problems.push(format!(
                    "sequence {} waits with blocks, a younger one is running",
                    owner.id.0
                ));
            }
        }
        let in_order = |a: &Sequence, b: &Sequence| a.id < b.id;
        if !self.running.iter().is_sorted_by(|a, b| in_order(a, b))
            || !self.waiting.iter().is_sorted_by(|a, b| in_order(a, b))
        {
            problems.push("sequences are not in the order of their ids".to_owned());
        }
    }

    /// Rows that all sequences lack before their next tokens.
    pub(crate) fn queued_rows(&self) -> u64 {
        self.sequences().map(|sequence| self.own_rows(sequence) as u64).sum()
    }

    /// Rows that a sequence lacks, without those of a beginning that an older one computes for it.
    fn own_rows(&self, sequence: &Sequence) -> usize {
        let common = sequence.kin.map_or(0, |kin| kin.blocks * self.limits.block_tokens);
        let shared = common.saturating_sub(sequence.num_computed);
        let is_older = |other: &Sequence| other.id < sequence.id && other.kin == sequence.kin;
        if shared > 0 && self.sequences().any(is_older) {
            sequence.pending() - shared
        } else {
            sequence.pending()
        }
    }

    /// All sequences.
    pub(crate) fn sequences(&self) -> impl Iterator<Item = &Sequence> {
        self.running.iter().chain(&self.waiting)
    }

    pub(crate) fn get(&self, id: SequenceId) -> Option<&Sequence> {
        match self.running.binary_search_by_key(&id, |sequence| sequence.id) {
            Ok(index) => self.running.get(index),
            Err(_) => self
                .waiting
                .get(self.waiting.binary_search_by_key(&id, |sequence| sequence.id).ok()?),
        }
    }

    /// A sequence of the batch. What a step computed belongs to running sequences only: those that ended since it was
    /// planned are not found.
    pub(crate) fn running_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        let index = self.running.binary_search_by_key(&id, |sequence| sequence.id).ok()?;
        self.running.get_mut(index)
    }

    /// Takes a sequence out.
    pub(crate) fn remove(&mut self, id: SequenceId) -> Option<Sequence> {
        match self.running.binary_search_by_key(&id, |sequence| sequence.id) {
            Ok(index) => Some(self.running.remove(index)),
            Err(_) => {
                let index = self.waiting.binary_search_by_key(&id, |sequence| sequence.id).ok()?;
                self.waiting.remove(index)
            }
        }
    }

    /// Takes a sequence in. One that owns blocks gets a slot with the next plan, if there is one.
    pub(crate) fn wait(&mut self, sequence: Sequence) {
        let index = self.waiting.partition_point(|other| other.id < sequence.id);
        self.waiting.insert(index, sequence);
    }

    /// Takes in a member of a beam search in the place of another one.
    pub(crate) fn enter(&mut self, sequence: Sequence) {
        if sequence.owns_blocks() && self.running.len() < self.limits.max_num_seqs {
            self.run(sequence);
        } else {
            self.wait(sequence);
        }
    }

    fn run(&mut self, sequence: Sequence) -> usize {
        let index = self.running.partition_point(|other| other.id < sequence.id);
        self.running.insert(index, sequence);
        index
    }

    /// Most blocks in use if `newcomers` got their blocks now, beside all sequences here and `others`.
    pub(crate) fn peak_with(
        &mut self,
        newcomers: impl Iterator<Item = Holder>,
        others: &[Holder],
        total: usize,
    ) -> usize {
        let sequences = self.running.iter().chain(&self.waiting).map(Sequence::holder);
        self.forecast
            .peak(sequences.chain(others.iter().copied()).chain(newcomers), total)
    }

    /// Fills the plan of a step; it stays empty if no sequence can advance.
    pub(crate) fn schedule(&mut self, pass: &mut Pass<'_>) {
        clear(pass.plan);
        self.seat_owners();
        let single = self.running.iter().filter(|sequence| sequence.pending() == 1).count();
        let generating = pass.expecting || self.running.iter().any(Sequence::generates);
        let mut budget = StepBudget::new(&self.limits, single, generating, &self.times);
        let mut index = 0;
        while index < self.running.len() {
            self.make_room(index, &budget, pass);
            self.plan_rows(index, &mut budget, pass);
            index += 1;
        }
        self.admit(&mut budget, pass);
    }

    /// Gives slots to those who wait with blocks of their own (they were committed or forked), oldest first; also those of
    /// younger ones, who wait with their blocks then. Nobody need be asked whether the pool suffices: they take part in
    /// everybody's forecast already.
    ///
    /// As this comes first in every step, and a preemption takes the blocks of those who wait first, whoever waits with
    /// blocks is younger than everybody in the batch, and nobody does when `admit` finds a free slot.
    fn seat_owners(&mut self) {
        while let Some(at) = self.waiting.iter().position(Sequence::owns_blocks) {
            let free = self.running.len() < self.limits.max_num_seqs;
            let youngest = self.running.last().map(|sequence| sequence.id);
            if !free && youngest < Some(self.waiting[at].id) {
                return;
            }
            let yields = if free { None } else { self.running.pop() };
            if let Some(owner) = self.waiting.remove(at) {
                self.run(owner);
            }
            if let Some(sequence) = yields {
                self.wait(sequence);
            }
        }
    }

    /// Starts waiting sequences, oldest first, while there are slots, rows and blocks. A forecast that fits leaves blocks
    /// for what is computed now, so none of them has to take any from a sequence whose rows are in the plan already.
    fn admit(&mut self, budget: &mut StepBudget, pass: &mut Pass<'_>) {
        let mut at = 0;
        while self.running.len() < self.limits.max_num_seqs {
            let Some(next) = self.waiting.get(at) else { return };
            if budget.rows_for(next.pending(), next.num_computed) == 0 {
                return;
            }
            if self.waits_for_kin(next) {
                at += 1;
                continue;
            }
            let lost = self.has_lost_kin(next);
            if let Some(next) = self.waiting.get_mut(at).filter(|_| lost) {
                // It goes on alone, and so its blocks are counted.
                next.kin = None;
            }
            let next = self.waiting.get(at);
            let holders = self.running.iter().chain(next).map(Sequence::holder);
            let total = pass.pool.total();
            if self.forecast.peak(holders.chain(pass.others.iter().copied()), total) > total {
                return;
            }
            let Some(mut sequence) = self.waiting.remove(at) else {
                return;
            };
            self.reuse(&mut sequence, pass.pool);
            self.share(&mut sequence, pass.pool);
            let index = self.run(sequence);
            self.plan_rows(index, budget, pass);
        }
    }

    /// Counts what the prefix cache has of a prompt that comes from elsewhere.
    pub(crate) fn note_hit(&mut self, asked_tokens: usize, tokens: usize) {
        self.counts.queried_tokens += asked_tokens as u64;
        self.counts.hit_tokens += tokens as u64;
    }

    /// Gives a sequence that starts, or starts again, what the prefix cache holds of it.
    fn reuse(&mut self, sequence: &mut Sequence, pool: &mut BlockManager) {
        let limit = sequence.reusable_blocks(self.limits.block_tokens);
        let Some(limit) = limit.filter(|_| pool.has_cache()) else {
            sequence.cached_tokens.get_or_insert(0);
            return;
        };
        let mut table = std::mem::take(&mut sequence.table);
        let found = pool.attach(&mut table, &sequence.content(), limit, |kept, blocks| {
            kept.first_of_blocks(blocks)
        });
        let tokens = found * self.limits.block_tokens;
        (sequence.table, sequence.num_computed) = (table, tokens);
        match sequence.cached_tokens {
            Some(_) => self.counts.resumed_tokens += tokens as u64,
            None => {
                self.counts.queried_tokens += sequence.token_ids().len() as u64;
                self.counts.hit_tokens += tokens as u64;
                sequence.cached_tokens = Some(tokens);
            }
        }
    }

    /// Those of the batch who have computed the beginning that they share with `sequence`, and have what it would need of it.
    fn donor(&self, sequence: &Sequence) -> Option<&Sequence> {
        let kin = sequence.kin?;
        let tokens = kin.blocks * self.limits.block_tokens;
        let has_all = |other: &Sequence| {
            let mut groups = self.limits.kept().groups().enumerate();
            groups.all(|(group, kept)| other.table.gone(group) <= kept.first_block(tokens))
        };
        let family = |other: &&Sequence| other.kin.is_some_and(|other| other.family == kin.family);
        self.running
            .iter()
            .filter(family)
            .find(|other| other.num_computed >= tokens && has_all(other))
    }

    /// Whether somebody older of the batch is computing the beginning that `sequence` shares with it. Whoever it is
    /// advances before anybody younger does, or leaves the batch: no one waits for ever.
    fn waits_for_kin(&self, sequence: &Sequence) -> bool {
        let Some(kin) = sequence.kin else { return false };
        let tokens = kin.blocks * self.limits.block_tokens;
        let mut older = self.running.iter().take_while(|other| other.id < sequence.id);
        let computes =
            |other: &Sequence| other.num_computed < tokens && other.kin.is_some_and(|other| other.family == kin.family);
        older.any(computes) && self.donor(sequence).is_none()
    }

    /// Whether those of the batch who have computed the beginning that they share with `sequence` have let go of what it would
    /// need of it.
    fn has_lost_kin(&self, sequence: &Sequence) -> bool {
        let Some(kin) = sequence.kin else { return false };
        let tokens = kin.blocks * self.limits.block_tokens;
        let family = |other: &&Sequence| other.kin.is_some_and(|other| other.family == kin.family);
        let mut kin = self.running.iter().filter(family);
        kin.any(|other| other.num_computed >= tokens) && self.donor(sequence).is_none()
    }

    /// Gives a sequence that starts, or starts again, the beginning that one of its kin has computed, unless it owes the
    /// log-probabilities of it.
    fn share(&self, sequence: &mut Sequence, pool: &mut BlockManager) {
        if sequence.reusable_blocks(self.limits.block_tokens).is_none() {
            return;
        }
        let Some(kin) = sequence.kin.filter(|kin| kin.blocks > sequence.table.places()) else {
            return;
        };
        if let Some(donor) = self.donor(sequence) {
            let shared = pool.fork(&donor.table, kin.blocks);
            pool.release(std::mem::replace(&mut sequence.table, shared));
            sequence.num_computed = kin.blocks * self.limits.block_tokens;
        }
    }

    /// The place in its table that a sequence writes next.
    fn next_place(&self, sequence: &Sequence) -> usize {
        sequence.num_computed / self.limits.block_tokens
    }

    /// Takes the blocks of the youngest member of a beam search that waits for the other members. False if there is none.
    /// Called when nobody can advance: its candidates are known, so all it loses is the KV of what follows it.
    pub(crate) fn strip_parked(&mut self, pool: &mut BlockManager, preempted: &mut Vec<SequenceId>) -> bool {
        let Some(at) = self.running.iter().rposition(|sequence| sequence.parked) else {
            return false;
        };
        let sequence = self.running.remove(at);
        self.put_back(sequence, pool, preempted);
        true
    }

    /// Rows that the running sequence at `index` may compute now, as many as budget and blocks allow.
    fn rows_for(&self, index: usize, budget: &StepBudget, pool: &BlockManager) -> usize {
        let sequence = &self.running[index];
        // A shared block is never written: the sequence gets a copy first.
        let copies = pool.shared_in(&sequence.table, self.next_place(sequence));
        let Some(available) = pool.available().checked_sub(copies) else {
            return 0;
        };
        let places = sequence.table.places() + available / self.limits.groups.count();
        let capacity = places * self.limits.block_tokens;
        budget
            .rows_for(sequence.pending(), sequence.num_computed)
            .min(capacity - sequence.num_computed)
    }

    /// Preempts younger sequences until the running one at `index` can compute a row, if only blocks are missing.
    fn make_room(&mut self, index: usize, budget: &StepBudget, pass: &mut Pass<'_>) {
        let sequence = &self.running[index];
        if budget.rows_for(sequence.pending(), sequence.num_computed) > 0 {
            while self.rows_for(index, budget, pass.pool) == 0 && self.preempt_younger(index, pass) {}
        }
    }

    /// Plans the next rows of the running sequence at `index`; none if it has to wait.
    fn plan_rows(&mut self, index: usize, budget: &mut StepBudget, pass: &mut Pass<'_>) {
        let rows = self.rows_for(index, budget, pass.pool);
        if rows == 0 {
            return;
        }
        let place = self.next_place(&self.running[index]);
        let sequence = &mut self.running[index];
        let tokens = (sequence.num_computed % self.limits.block_tokens) as u32;
        let copies = &mut pass.plan.copies;
        let copy = |from, to| copies.push(BlockCopy { from, to, tokens });
        // There are blocks: `rows_for` has counted them.
        if pass.pool.own_copies(&mut sequence.table, place, copy).is_err() {
            return;
        }
        let blocks = self.limits.blocks_for(sequence.num_computed + rows);
        let missing = blocks.saturating_sub(sequence.table.places());
        if pass.pool.grow(&mut sequence.table, missing).is_ok() {
            budget.take(sequence.pending(), sequence.num_computed, rows);
            emit(pass.plan, sequence, rows, blocks * self.limits.groups.count());
        }
    }

    /// Takes the blocks of the youngest sequence that owns some, if it is younger than the running one at `index`, and
    /// sends it to wait. False if there is none.
    fn preempt_younger(&mut self, index: usize, pass: &mut Pass<'_>) -> bool {
        let taken = match self.waiting.iter().rposition(Sequence::owns_blocks) {
            // Who waits with blocks is younger than everybody in the batch: see `seat_owners`.
            Some(at) => self.waiting.remove(at),
            None if index + 1 < self.running.len() => self.running.pop(),
            None => None,
        };
        let Some(sequence) = taken else { return false };
        self.put_back(sequence, pass.pool, pass.preempted);
        true
    }

    /// Takes the blocks of a sequence that has left the batch. It waits to start again, unless it has done its work: then
    /// it is gone.
    fn put_back(&mut self, mut sequence: Sequence, pool: &mut BlockManager, preempted: &mut Vec<SequenceId>) {
        self.counts.preemptions += 1;
        self.counts.preempted_rows += sequence.num_computed as u64;
        preempted.push(sequence.id);
        let done = sequence.parked;
        pool.release(sequence.reset());
        if !done {
            self.wait(sequence);
        }
    }
}

fn clear(plan: &mut StepPlan) {
    let StepPlan {
        step: _,
        copies,
        token_ids,
        sequences,
        block_ids,
        history,
        targets,
    } = plan;
    copies.clear();
    token_ids.clear();
    sequences.clear();
    block_ids.clear();
    history.clear();
    targets.clear();
}

/// Appends the next `rows` rows of `sequence`, which lie in its first `blocks` blocks.
fn emit(plan: &mut StepPlan, sequence: &Sequence, rows: usize, blocks: usize) {
    let start = sequence.num_computed;
    let row_span = extend(&mut plan.token_ids, &sequence.token_ids()[start..start + rows]);
    let block_span = extend(&mut plan.block_ids, &sequence.table.blocks()[..blocks]);
    let targets = extend(&mut plan.targets, sequence.targets(rows));
    let sample = sequence.sample_spec(rows, plan.history.len());
    if sample.as_ref().is_some_and(|sample| sample.history.len > 0) {
        plan.history.extend_from_slice(sequence.token_ids());
    }
    plan.sequences.push(PlannedSequence {
        id: sequence.id,
        owner: sequence.owner,
        rows: row_span,
        start_position: start as u32,
        adapter: sequence.adapter(),
        blocks: block_span,
        sample,
        targets,
        target_alternatives: sequence.target_alternatives(),
    });
}

/// Appends `values`; says where. The limits of an engine keep every array of a plan within 32 bits.
fn extend<T: Copy>(array: &mut Vec<T>, values: &[T]) -> Span {
    let span = Span {
        start: array.len() as u32,
        len: values.len() as u32,
    };
    array.extend_from_slice(values);
    span
}
