//! The engine: the one owner of all sequences and blocks of a node.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::admission::{GROWTH_HORIZON_TOKENS, Holder};
use crate::block_manager::{BlockManager, BlockTable};
pub use crate::error::{AddError, StepError};
use crate::event::EngineEvent;
use crate::limits::{EngineLimits, LimitsError};
use crate::output::check_output;
use crate::plan::{BlockId, SequenceId, StepOutput, StepPlan};
use crate::reservation::{CommitError, Reservation, Reservations, ReserveError};
use crate::runner::{LayerObserver, Runner};
use crate::scheduler::{Pass, Scheduler};
use crate::sequence::{OnFinish, Sequence, SequenceSpec};
use crate::stats::{AuditError, EngineStats, StepStats};
use crate::step_time::Work;

/// Most sequences that wait. Far beyond what a node should be given at once: the queue belongs to whoever hands out work.
pub const MAX_WAITING: usize = 1024;

/// A sequence that ended and whose blocks someone still reads.
#[derive(Debug)]
struct Held {
    table: BlockTable,
    num_computed: usize,
}

/// Sequences and blocks of a node. Calls come in any order; the three of a step are [`Engine::plan`], the runner's
/// `execute`, and [`Engine::apply`] or [`Engine::fail_step`]. Between `plan` and `apply` every other call is allowed; blocks
/// that it frees are not given away before the step is over.
#[derive(Debug)]
pub struct Engine {
    limits: EngineLimits,
    blocks: BlockManager,
    scheduler: Scheduler,
    reservations: Reservations,
    held: BTreeMap<SequenceId, Held>,
    plan: StepPlan,
    /// `plan` is given out and not applied.
    in_flight: bool,
    /// Tables of sequences that ended while a step was in flight.
    limbo: Vec<BlockTable>,
    /// Not reported yet.
    preempted: Vec<SequenceId>,
    /// Reused by every question to the forecast.
    others: Vec<Holder>,
    next_id: u64,
    steps: u64,
    rows: u64,
    sampled_tokens: u64,
}

impl Engine {
    /// An engine without sequences, all of whose blocks are free.
    pub fn new(limits: EngineLimits) -> Result<Self, LimitsError> {
        Self::with_horizon(limits, GROWTH_HORIZON_TOKENS)
    }

    /// As [`Engine::new`], with another reach of the forecast (`admission`).
    pub(crate) fn with_horizon(limits: EngineLimits, horizon: usize) -> Result<Self, LimitsError> {
        limits.validate()?;
        Ok(Self {
            limits,
            blocks: BlockManager::new(limits.total_blocks, limits.block_tokens, limits.prefix_cache),
            scheduler: Scheduler::new(limits, horizon),
            reservations: Reservations::default(),
            held: BTreeMap::new(),
            plan: StepPlan::default(),
            in_flight: false,
            limbo: Vec::new(),
            preempted: Vec::new(),
            others: Vec::new(),
            next_id: 0,
            steps: 0,
            rows: 0,
            sampled_tokens: 0,
        })
    }

    /// The limits.
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    /// Takes in a sequence of which nothing is computed. It waits; blocks are taken as its rows are planned.
    pub fn add(&mut self, spec: SequenceSpec) -> Result<SequenceId, AddError> {
        spec.validate(&self.limits)?;
        let waiting = self.scheduler.num_waiting();
        if waiting >= MAX_WAITING {
            return Err(AddError::Full {
                waiting,
                limit: MAX_WAITING,
            });
        }
        let id = self.new_id();
        self.scheduler
            .wait(Sequence::new(id, spec, BlockTable::default(), 0, &self.limits));
        Ok(id)
    }

    /// Takes all blocks for `tokens` tokens now. `growth` is the most tokens the sequence may add afterwards (its
    /// `max_tokens`): a reservation is refused if the pool could run dry over it. The policy is in `admission`.
    pub fn reserve(&mut self, tokens: usize, growth: usize) -> Result<Reservation, ReserveError> {
        let limit = self.limits.max_seq_len - 1;
        if tokens == 0 {
            return Err(ReserveError::Empty);
        }
        if tokens > limit {
            return Err(ReserveError::TooLong { tokens, limit });
        }
        let in_use = self.scheduler.num_running() + self.scheduler.num_waiting() + self.reservations.len();
        if in_use >= self.limits.max_num_seqs {
            return Err(ReserveError::NoSlots {
                in_use,
                limit: self.limits.max_num_seqs,
            });
        }
        // The last token needs no KV.
        let growth = growth.min(self.limits.max_seq_len - tokens).saturating_sub(1);
        let needed = self.limits.blocks_for(tokens);
        let (free, total) = (self.blocks.available(), self.blocks.total());
        self.collect_others();
        let newcomer = Holder {
            blocks: needed,
            tokens,
            growth,
            leaves: false,
        };
        let peak = self.scheduler.peak_with(newcomer, &self.others, total);
        let mut table = BlockTable::default();
        if peak > total || self.blocks.grow(&mut table, needed).is_err() {
            return Err(ReserveError::NoBlocks {
                needed,
                free,
                peak,
                total,
            });
        }
        Ok(self.reservations.issue(table, tokens, growth))
    }

    /// Gives reserved blocks back. Whoever wrote into them must have stopped. False, and nothing happens, if the
    /// reservation is another engine's.
    pub fn release_reservation(&mut self, reservation: Reservation) -> bool {
        let Some(table) = self.reservations.redeem(reservation) else {
            return false;
        };
        self.blocks.release(table);
        true
    }

    /// Makes a sequence of a reservation whose blocks hold the KV of the first `num_computed` tokens of `spec`. It joins
    /// the batch with the next plan. On an error the blocks are released.
    pub fn commit(
        &mut self,
        reservation: Reservation,
        spec: SequenceSpec,
        num_computed: usize,
    ) -> Result<SequenceId, CommitError> {
        let reserved = reservation.tokens();
        let Some(table) = self.reservations.redeem(reservation) else {
            return Err(CommitError::Unknown);
        };
        if let Err(error) = self.check_commit(&spec, num_computed, reserved) {
            self.blocks.release(table);
            return Err(error);
        }
        let id = self.new_id();
        let mut sequence = Sequence::new(id, spec, table, num_computed, &self.limits);
        sequence.cached_tokens = Some(0);
        sequence.publish(&mut self.blocks, true);
        self.scheduler.wait(sequence);
        Ok(id)
    }

    fn check_commit(&self, spec: &SequenceSpec, num_computed: usize, reserved: usize) -> Result<(), CommitError> {
        spec.validate(&self.limits)?;
        let limit = reserved.min(spec.token_ids.len() - 1);
        if num_computed == 0 || num_computed > limit {
            return Err(CommitError::NumComputed {
                num_computed,
                limit,
                reserved,
            });
        }
        if spec.prompt_logprobs {
            return Err(CommitError::PromptLogprobs);
        }
        Ok(())
    }

    /// Ends a sequence in whatever state it is, held included. False if there is none of that id (any more).
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        match self.scheduler.remove(id) {
            Some(sequence) => {
                self.preempted.retain(|preempted| *preempted != id);
                self.free(sequence.table);
                true
            }
            None => self.release_held(id),
        }
    }

    /// Frees the blocks of a sequence that ended with [`OnFinish::Hold`]. False if it holds none (any more).
    pub fn release_held(&mut self, id: SequenceId) -> bool {
        let Some(held) = self.held.remove(&id) else {
            return false;
        };
        self.free(held.table);
        true
    }

    /// The blocks of a sequence, in the order of its positions, also while it is held. Empty while it waits.
    pub fn block_table(&self, id: SequenceId) -> Option<&[BlockId]> {
        let table = match self.scheduler.get(id) {
            Some(sequence) => &sequence.table,
            None => &self.held.get(&id)?.table,
        };
        Some(table.blocks())
    }

    /// How many leading tokens of a sequence have their KV in its blocks, also while it is held.
    pub fn num_computed(&self, id: SequenceId) -> Option<usize> {
        match self.scheduler.get(id) {
            Some(sequence) => Some(sequence.num_computed),
            None => Some(self.held.get(&id)?.num_computed),
        }
    }

    /// Sequences that lost their blocks to the plan in flight. Their events come when the step ends; who still reads those
    /// blocks must stop before the step begins.
    pub fn preempted(&self) -> &[SequenceId] {
        &self.preempted
    }

    /// What the next step computes; `None` if no sequence can advance before some other call changes that. While a step
    /// is in flight this is its plan again.
    pub fn plan(&mut self) -> Option<&StepPlan> {
        if !self.in_flight {
            self.collect_others();
            self.scheduler.schedule(&mut Pass {
                pool: &mut self.blocks,
                others: &self.others,
                plan: &mut self.plan,
                preempted: &mut self.preempted,
            });
            if self.plan.sequences.is_empty() {
                return None;
            }
            self.in_flight = true;
            self.plan.step += 1;
        }
        Some(&self.plan)
    }

    /// Notes how long the runner took for the step in flight. Such times tell how many rows of prompts fit into
    /// `EngineLimits::mixed_prefill_time`; they have no part in any answer.
    pub fn note_step_time(&mut self, elapsed: Duration) {
        if self.in_flight && !self.limits.mixed_prefill_time.is_zero() {
            self.scheduler.times.note(&Work::of(&self.plan), elapsed);
        }
    }

    /// Ends the step in flight with what the runner computed. Appends what became of the sequences. An output that
    /// contradicts the plan fails the step as [`Engine::fail_step`] does.
    pub fn apply(&mut self, output: &StepOutput, events: &mut Vec<EngineEvent>) -> Result<StepStats, StepError> {
        if !self.in_flight {
            return Err(StepError::NoStep);
        }
        if let Err(reason) = check_output(&self.plan, output) {
            let error = StepError::Output {
                step: self.plan.step,
                reason,
            };
            self.fail_step(&error.to_string(), events);
            return Err(error);
        }
        self.report_preempted(events);
        let plan = std::mem::take(&mut self.plan);
        self.advance(&plan, output, events);
        let stats = StepStats {
            step: plan.step,
            batch_size: plan.sequences.len() as u32,
            rows: plan.token_ids.len() as u32,
            sampled_tokens: output.sampled.len() as u32,
        };
        self.plan = plan;
        self.steps += 1;
        self.rows += u64::from(stats.rows);
        self.sampled_tokens += u64::from(stats.sampled_tokens);
        self.end_step();
        Ok(stats)
    }

    /// Ends the step in flight without a result: every sequence in it fails and frees its blocks. Nothing happens if no
    /// step is in flight.
    pub fn fail_step(&mut self, message: &str, events: &mut Vec<EngineEvent>) {
        if !self.in_flight {
            return;
        }
        self.report_preempted(events);
        let plan = std::mem::take(&mut self.plan);
        for planned in &plan.sequences {
            self.fail(planned.id, message, events, |table| table);
        }
        self.plan = plan;
        self.end_step();
    }

    /// One whole step: plans, executes, applies. `None` if no sequence can advance.
    pub fn step(
        &mut self,
        runner: &mut dyn Runner,
        observer: &mut dyn LayerObserver,
        events: &mut Vec<EngineEvent>,
    ) -> Result<Option<StepStats>, StepError> {
        let Some(plan) = self.plan() else { return Ok(None) };
        match runner.run(plan, observer) {
            Ok(output) => self.apply(&output, events).map(Some),
            Err(error) => {
                self.fail_step(&error.to_string(), events);
                Err(error.into())
            }
        }
    }

    /// Numbers about the present state.
    pub fn stats(&self) -> EngineStats {
        let counts = self.scheduler.counts();
        EngineStats {
            total_blocks: self.blocks.total(),
            free_blocks: self.blocks.free(),
            cached_blocks: self.blocks.cached(),
            owned_blocks: self.blocks.owned(),
            running: self.scheduler.num_running(),
            waiting: self.scheduler.num_waiting(),
            held: self.held.len(),
            reservations: self.reservations.len(),
            steps: self.steps,
            rows: self.rows,
            sampled_tokens: self.sampled_tokens,
            preemptions: counts.preemptions,
            preempted_rows: counts.preempted_rows,
            cache_queried_tokens: counts.queried_tokens,
            cache_hit_tokens: counts.hit_tokens,
            cache_resumed_tokens: counts.resumed_tokens,
            cache_evictions: self.blocks.evictions(),
        }
    }

    /// Audits the books: every block is free, or in exactly the tables that are counted for it; no sequence claims more
    /// KV than its blocks hold; no reservation was dropped. Costs time in proportion to the pool.
    pub fn check_invariants(&self) -> Result<(), AuditError> {
        let mut problems = Vec::new();
        let sequences = self.scheduler.sequences().map(|sequence| &sequence.table);
        let tables = sequences
            .chain(self.held.values().map(|held| &held.table))
            .chain(&self.limbo);
        self.blocks.audit(tables, self.reservations.blocks(), &mut problems);
        self.reservations.audit(&mut problems);
        for sequence in self.scheduler.sequences() {
            let (room, computed) = (sequence.table.len() * self.limits.block_tokens, sequence.num_computed);
            if computed > room || computed >= sequence.token_ids().len() {
                problems.push(format!(
                    "sequence {} has {computed} of {} tokens computed, with room for {room}",
                    sequence.id.0,
                    sequence.token_ids().len()
                ));
            }
        }
        self.scheduler.audit(&mut problems);
        if !self.in_flight && !self.limbo.is_empty() {
            problems.push(format!("{} tables wait for a step that is over", self.limbo.len()));
        }
        if problems.is_empty() {
            Ok(())
        } else {
            Err(AuditError { problems })
        }
    }

    fn new_id(&mut self) -> SequenceId {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        id
    }

    /// Frees the blocks of a sequence that ended; after the step, if one may still read or write them.
    fn free(&mut self, table: BlockTable) {
        if self.in_flight {
            self.limbo.push(table);
        } else {
            self.blocks.release(table);
        }
    }

    fn end_step(&mut self) {
        self.in_flight = false;
        while let Some(table) = self.limbo.pop() {
            self.blocks.release(table);
        }
    }

    /// Everybody who owns blocks and is not a sequence of the scheduler.
    fn collect_others(&mut self) {
        self.others.clear();
        self.others.extend(self.reservations.holders());
        let tables = self.held.values().map(|held| &held.table).chain(&self.limbo);
        self.others.extend(tables.map(|table| Holder {
            blocks: table.len(),
            tokens: 0,
            growth: 0,
            leaves: false,
        }));
    }

    fn report_preempted(&mut self, events: &mut Vec<EngineEvent>) {
        events.extend(self.preempted.drain(..).map(|id| EngineEvent::Preempted { id }));
    }

    fn advance(&mut self, plan: &StepPlan, output: &StepOutput, events: &mut Vec<EngineEvent>) {
        let mut sampled = output.sampled.iter();
        let mut logprobs = output.prompt_logprobs.iter();
        let mut failed = output.failed.iter().peekable();
        for planned in &plan.sequences {
            if let Some((id, reason)) = failed.next_if(|(id, _)| *id == planned.id) {
                // What spoilt it would spoil others.
                self.fail(*id, reason, events, BlockTable::spoilt);
                continue;
            }
            let new_logprobs = if planned.targets.len > 0 { logprobs.next() } else { None };
            let token = planned.sample.as_ref().and_then(|_| sampled.next());
            let Some(sequence) = self.scheduler.running_mut(planned.id) else {
                continue;
            };
            sequence.advance(
                planned.rows.len as usize,
                new_logprobs.map_or(&[], |(_, values)| values),
            );
            let Some((id, token)) = token else {
                sequence.publish(&mut self.blocks, true);
                continue;
            };
            let accepted = sequence.accept(token);
            // Whoever reads the blocks of an ended sequence knows them by the table of its last step.
            sequence.publish(&mut self.blocks, !accepted.ended);
            events.push(EngineEvent::Token {
                id: *id,
                token: token.clone(),
                batch_size: plan.sequences.len() as u32,
                cached_tokens: sequence.cached_tokens.unwrap_or(0) as u32,
                prompt_logprobs: accepted.prompt_logprobs,
                finish: accepted.finish,
            });
            if accepted.ended {
                self.end(*id);
            }
        }
    }

    /// A sequence of the step in flight came to nothing; its blocks go `with` what that means for them.
    fn fail(
        &mut self,
        id: SequenceId,
        message: &str,
        events: &mut Vec<EngineEvent>,
        with: impl FnOnce(BlockTable) -> BlockTable,
    ) {
        // Those cancelled meanwhile have no owner who waits for an event.
        if let Some(sequence) = self.scheduler.remove(id) {
            self.limbo.push(with(sequence.table));
            events.push(EngineEvent::Failed {
                id,
                message: message.to_owned(),
            });
        }
    }

    /// A sequence has ended by itself.
    fn end(&mut self, id: SequenceId) {
        let Some(sequence) = self.scheduler.remove(id) else {
            return;
        };
        match sequence.on_finish() {
            OnFinish::Release => self.free(sequence.table),
            OnFinish::Hold => {
                self.held.insert(
                    id,
                    Held {
                        num_computed: sequence.num_computed,
                        table: sequence.table,
                    },
                );
            }
        }
    }
}
