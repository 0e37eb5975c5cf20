//! The engine: the one owner of all sequences and blocks of a node.

use std::collections::BTreeMap;
use std::time::Duration;

mod advance;
mod audit;
mod beams;
mod enter;
mod owners;

use protocol::control::StepTimeModel;

use crate::admission::{GROWTH_HORIZON_TOKENS, Holder};
use crate::block_manager::{BlockManager, BlockTable};
use crate::engine::beams::BeamSearch;
pub use crate::error::{AddError, StepError};
use crate::event::{CacheEvent, EngineEvent};
use crate::limits::{EngineLimits, LimitsError};
use crate::output::check_output;
use crate::plan::{BlockId, SequenceId, StepOutput, StepPlan};
use crate::prefix_cache::PrefixCache;
use crate::reservation::{Reservation, Reservations};
use crate::runner::{LayerObserver, Runner};
use crate::scheduler::{Pass, Scheduler};
use crate::stats::{EngineStats, StepStats};
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
    /// Beam searches, by the id of their first member.
    beams: BTreeMap<SequenceId, BeamSearch>,
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
    step_time: Duration,
    batched_sequences: u64,
    rows: u64,
    sampled_tokens: u64,
}

impl Engine {
    /// An engine without sequences, all of whose blocks are free.
    pub fn new(limits: EngineLimits) -> Result<Self, LimitsError> {
        Self::with_horizon(limits, GROWTH_HORIZON_TOKENS)
    }

    /// As [`Engine::new`], with another reach of the forecast of what sequences grow into, in tokens (`admission`). For
    /// simulations, whose sequences are short: with a reach that is shorter yet they preempt each other.
    pub fn with_horizon(limits: EngineLimits, horizon: usize) -> Result<Self, LimitsError> {
        limits.validate()?;
        Ok(Self {
            limits,
            blocks: BlockManager::new(
                limits.total_blocks,
                limits.block_tokens,
                limits.kept(),
                limits.prefix_cache,
            ),
            scheduler: Scheduler::new(limits, horizon),
            reservations: Reservations::default(),
            held: BTreeMap::new(),
            beams: BTreeMap::new(),
            plan: StepPlan::default(),
            in_flight: false,
            limbo: Vec::new(),
            preempted: Vec::new(),
            others: Vec::new(),
            next_id: 0,
            steps: 0,
            step_time: Duration::ZERO,
            batched_sequences: 0,
            rows: 0,
            sampled_tokens: 0,
        })
    }

    /// The limits.
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
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

    /// Ends a sequence in whatever state it is, held included, or a beam search. False if there is none of that id (any more).
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        if self.end_beams(id, &|table| table) {
            return true;
        }
        match self.scheduler.remove(id) {
            Some(sequence) => {
                self.preempted.retain(|preempted| *preempted != id);
                self.free(sequence.table);
                true
            }
            None => self.release_held(id),
        }
    }

    /// Frees the blocks of a sequence that ended with [`OnFinish::Hold`](crate::sequence::OnFinish::Hold). False if it holds none (any more).
    pub fn release_held(&mut self, id: SequenceId) -> bool {
        let Some(held) = self.held.remove(&id) else {
            return false;
        };
        self.free(held.table);
        true
    }

    /// The blocks of a sequence, place by place in the order of its positions, for all groups of layers, also while it is held. Empty while it waits. They are
    /// [`BlockId::NONE`] where it has let go of them.
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
            loop {
                self.collect_others();
                self.scheduler.schedule(&mut Pass {
                    pool: &mut self.blocks,
                    others: &self.others,
                    expecting: self.reservations.len() > 0,
                    plan: &mut self.plan,
                    preempted: &mut self.preempted,
                });
                if !self.plan.sequences.is_empty() {
                    break;
                }
                if !self.scheduler.strip_parked(&mut self.blocks, &mut self.preempted) {
                    return None;
                }
            }
            self.in_flight = true;
            self.plan.step += 1;
        }
        Some(&self.plan)
    }

    /// Notes how long the runner took for the step in flight. Such times tell how many rows of prompts fit into
    /// `EngineLimits::mixed_prefill_time`, and others what to expect of this engine; they have no part in any answer.
    pub fn note_step_time(&mut self, elapsed: Duration) {
        if self.in_flight {
            self.scheduler.times.note(&Work::of(&self.plan), elapsed);
            self.step_time += elapsed;
        }
    }

    /// What steps take, as far as [`Engine::note_step_time`] has told.
    pub fn step_times(&self) -> StepTimeModel {
        self.scheduler.times.model()
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
        self.batched_sequences += u64::from(stats.batch_size);
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
            self.fail(planned, message, events, |table| table);
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

    /// Whether the prefix cache has changed since [`Engine::take_cache_changes`].
    pub fn has_cache_changes(&self) -> bool {
        self.blocks.cache().is_some_and(PrefixCache::has_changes)
    }

    /// Appends what has changed in the prefix cache since the last call, in order: at most one event for each block of the
    /// pool. False if there were more, which are lost: [`Engine::cached_names`] tells what is there.
    pub fn take_cache_changes(&mut self, changes: &mut Vec<CacheEvent>) -> bool {
        self.blocks.take_cache_changes(changes)
    }

    /// The names ([`protocol::prefix::block_hashes`]) of all blocks that a sequence with the same beginning would find.
    pub fn cached_names(&self) -> impl Iterator<Item = u64> {
        self.blocks.cache().into_iter().flat_map(PrefixCache::wire_names)
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
            preempted: self.scheduler.num_preempted(),
            held: self.held.len(),
            reservations: self.reservations.len(),
            steps: self.steps,
            step_time: self.step_time,
            batched_sequences: self.batched_sequences,
            rows: self.rows,
            sampled_tokens: self.sampled_tokens,
            preemptions: counts.preemptions,
            preempted_rows: counts.preempted_rows,
            cache_queried_tokens: counts.queried_tokens,
            cache_hit_tokens: counts.hit_tokens,
            cache_resumed_tokens: counts.resumed_tokens,
            cache_evictions: self.blocks.evictions(),
            queued_rows: self.scheduler.queued_rows(),
        }
    }

    /// The sequence, or beam search, that waits first in line; `None` if none waits.
    pub fn first_waiting(&self) -> Option<SequenceId> {
        self.scheduler.first_waiting()
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
            blocks: table.num_present(),
            tokens: 0,
            growth: 0,
            rows: 0,
            leaves: false,
            kin: None,
        }));
        self.collect_beams();
    }

    fn report_preempted(&mut self, events: &mut Vec<EngineEvent>) {
        events.extend(self.preempted.drain(..).map(|id| EngineEvent::Preempted { id }));
    }
}
