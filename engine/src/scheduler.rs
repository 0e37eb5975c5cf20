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
use crate::plan::{PlannedSequence, SequenceId, Span, StepPlan};
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
    pub(crate) plan: &'a mut StepPlan,
    pub(crate) preempted: &'a mut Vec<SequenceId>,
}

impl Scheduler {
    pub(crate) fn new(limits: EngineLimits, horizon: usize) -> Self {
        Self {
            limits,
            running: Vec::with_capacity(limits.max_num_seqs),
            waiting: VecDeque::new(),
            forecast: Forecast::new(limits.block_tokens, horizon),
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

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Reports what the order of seats and preemptions rules out.
    pub(crate) fn audit(&self, problems: &mut Vec<String>) {
        if self.running.len() > self.limits.max_num_seqs {
            problems.push(format!("{} sequences are running", self.running.len()));
        }
        for sequence in self.running.iter().filter(|sequence| !sequence.owns_blocks()) {
            problems.push(format!("sequence {} is running without blocks", sequence.id.0));
        }
        let youngest = self.running.last().map(|sequence| sequence.id);
        for owner in self.waiting.iter().filter(|sequence| sequence.owns_blocks()) {
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

    fn run(&mut self, sequence: Sequence) -> usize {
        let index = self.running.partition_point(|other| other.id < sequence.id);
        self.running.insert(index, sequence);
        index
    }

    /// Most blocks in use if `newcomer` got its blocks now, beside all sequences here and `others`.
    pub(crate) fn peak_with(&mut self, newcomer: Holder, others: &[Holder], total: usize) -> usize {
        let sequences = self.running.iter().chain(&self.waiting).map(Sequence::holder);
        self.forecast
            .peak(sequences.chain(others.iter().copied()).chain([newcomer]), total)
    }

    /// Fills the plan of a step; it stays empty if no sequence can advance.
    pub(crate) fn schedule(&mut self, pass: &mut Pass<'_>) {
        clear(pass.plan);
        self.seat_owners();
        let single = self.running.iter().filter(|sequence| sequence.pending() == 1).count();
        let generating = self.running.iter().any(Sequence::generates);
        let mut budget = StepBudget::new(&self.limits, single, generating, &self.times);
        let mut index = 0;
        while index < self.running.len() {
            self.make_room(index, &budget, pass);
            self.plan_rows(index, &mut budget, pass);
            index += 1;
        }
        self.admit(&mut budget, pass);
    }

    /// Gives free slots to those who wait with blocks of their own (they were committed), oldest first. Nobody need be
    /// asked whether the pool suffices: they take part in everybody's forecast already.
    ///
    /// As this comes first in every step, and a preemption takes the blocks of those who wait first, whoever waits with
    /// blocks is younger than everybody in the batch, and nobody does when `admit` finds a free slot.
    fn seat_owners(&mut self) {
        while self.running.len() < self.limits.max_num_seqs {
            let owner = self.waiting.iter().position(Sequence::owns_blocks);
            let Some(sequence) = owner.and_then(|at| self.waiting.remove(at)) else {
                return;
            };
            self.run(sequence);
        }
    }

    /// Starts waiting sequences, oldest first, while there are slots, rows and blocks. A forecast that fits leaves blocks
    /// for what is computed now, so none of them has to take any from a sequence whose rows are in the plan already.
    fn admit(&mut self, budget: &mut StepBudget, pass: &mut Pass<'_>) {
        while self.running.len() < self.limits.max_num_seqs {
            let Some(next) = self.waiting.front() else { return };
            if budget.rows_for(next.pending(), next.num_computed) == 0 {
                return;
            }
            let holders = self.running.iter().chain([next]).map(Sequence::holder);
            let total = pass.pool.total();
            if self.forecast.peak(holders.chain(pass.others.iter().copied()), total) > total {
                return;
            }
            let Some(mut sequence) = self.waiting.pop_front() else {
                return;
            };
            self.reuse(&mut sequence, pass.pool);
            let index = self.run(sequence);
            self.plan_rows(index, budget, pass);
        }
    }

    /// Gives a sequence that starts, or starts again, what the prefix cache holds of it.
    fn reuse(&mut self, sequence: &mut Sequence, pool: &mut BlockManager) {
        let limit = sequence.reusable_blocks(self.limits.block_tokens);
        let Some(limit) = limit.filter(|_| pool.has_cache()) else {
            sequence.cached_tokens.get_or_insert(0);
            return;
        };
        let mut table = std::mem::take(&mut sequence.table);
        let tokens = pool.attach(&mut table, &sequence.content(), limit) * self.limits.block_tokens;
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

    /// Rows that the running sequence at `index` may compute now, as many as budget and blocks allow.
    fn rows_for(&self, index: usize, budget: &StepBudget, pool: &BlockManager) -> usize {
        let sequence = &self.running[index];
        let capacity = (sequence.table.len() + pool.available()) * self.limits.block_tokens;
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
        let sequence = &mut self.running[index];
        let blocks = self.limits.blocks_for(sequence.num_computed + rows);
        let missing = blocks.saturating_sub(sequence.table.len());
        if rows > 0 && pass.pool.grow(&mut sequence.table, missing).is_ok() {
            budget.take(sequence.pending(), sequence.num_computed, rows);
            emit(pass.plan, sequence, rows, blocks);
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
        let Some(mut sequence) = taken else { return false };
        self.counts.preemptions += 1;
        self.counts.preempted_rows += sequence.num_computed as u64;
        pass.preempted.push(sequence.id);
        pass.pool.release(sequence.reset());
        self.wait(sequence);
        true
    }
}

fn clear(plan: &mut StepPlan) {
    let StepPlan {
        step: _,
        token_ids,
        sequences,
        block_ids,
        history,
        targets,
    } = plan;
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
        rows: row_span,
        start_position: start as u32,
        blocks: block_span,
        sample,
        targets,
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
