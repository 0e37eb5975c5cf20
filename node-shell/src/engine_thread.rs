//! The one OS thread that runs a node's engine: commands in, events out, one step after the other.
//!
//! Life of a step: take what has arrived (blocking only when the last plan was empty) -> plan -> execute, telling the taps
//! of each finished layer -> apply -> count -> send each sequence its events. The thread never waits for a consumer: every
//! sequence's event queue is as long as the sequence can get.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use engine::engine::Engine;
use engine::event::EngineEvent;
use engine::owners::{JobName, Origin, Owner, Ownership};
use engine::plan::{BlockId, SequenceId, StepOutput, StepPlan};
use engine::reservation::{Awaited, Reservation, ReservationId};
use engine::runner::{LayerObserver, Runner};
use engine::sequence::SequenceSpec;
use engine::stats::StepStats;
use protocol::kv::KvPlace;
use runtime::clock::Clock;
use tokio::sync::{mpsc, oneshot, watch};

mod deliver;

use deliver::{BEAM_EVENTS, Record, deliver, event_capacity};
pub use deliver::{ComputedEvent, SequenceEvent, TokenEvent};

use crate::cache_feed::CacheFeed;
use crate::handle::{AwaitedPrompt, EngineHandle, EngineLoad, ReservedBlocks, SequenceGroup, SubmitError, narrow};
use crate::queue::Inbox;
use crate::stats::EngineMetrics;

/// Follows the KV of one sequence while it is computed. Called on the compute thread: must not block. Dropped there too,
/// when the sequence has left the engine and before its blocks can be anybody else's.
pub trait StepTap: Send {
    /// A step with rows of the sequence is about to be computed. The first `computed_tokens` positions are in the pool in
    /// all layers (when a sequence starts: what the prefix cache has of it); `blocks` is the block table of this step.
    fn step_begins(&mut self, computed_tokens: u32, blocks: &[BlockId]);

    /// K and V of the layer at `place` are in the pool for the positions `0..computed_tokens`.
    fn layer_computed(&mut self, place: KvPlace, computed_tokens: u32);

    /// The sequence has lost its blocks, which others may write from now on. It starts again later. May be said again
    /// before it does.
    fn preempted(&mut self);
}

/// Commands may be refused when the queue is full.
pub(crate) enum Command {
    Enter {
        work: Box<Work>,
        /// Whose it is.
        job: Option<Arc<JobName>>,
        reply: oneshot::Sender<Result<SequenceGroup, SubmitError>>,
    },
    Reserve {
        prompt: AwaitedPrompt,
        growth: usize,
        choices: usize,
        /// Whose it is.
        job: Option<Arc<JobName>>,
        reply: oneshot::Sender<Result<ReservedBlocks, SubmitError>>,
    },
    /// Whose the blocks are.
    Owners { reply: oneshot::Sender<Ownership> },
}

/// What enters the engine.
pub(crate) enum Work {
    One(SequenceSpec, Option<Box<dyn StepTap>>),
    Choices(Vec<SequenceSpec>),
    Beams(SequenceSpec, usize),
    Commit(ReservedBlocks, Vec<SequenceSpec>, usize),
    CommitBeams(ReservedBlocks, SequenceSpec, usize, usize),
}

/// Returns give back what was granted; they are never refused.
pub(crate) enum Return {
    Sequence(SequenceId),
    Reservation(Reservation),
}

/// The running thread.
#[derive(Debug)]
pub struct EngineThread {
    thread: JoinHandle<()>,
    ended: oneshot::Receiver<()>,
}

impl EngineThread {
    /// Resolves when the thread ends, which it does by itself only if it panicked.
    pub async fn ended(&mut self) {
        // An error means that the sender was dropped: the thread is gone, which is what is asked.
        let _gone = (&mut self.ended).await;
    }

    /// Waits for the end of the thread, after [`EngineHandle::close`]. False if it panicked.
    pub fn join(self) -> bool {
        self.thread.join().is_ok()
    }
}

/// Starts the engine thread.
///
/// `queue_capacity` bounds the commands that wait for the next step. The thread is pinned to `core` if there is one. Errors
/// if the operating system refuses the thread or the core.
pub fn start(
    engine: Engine,
    runner: Box<dyn Runner>,
    clock: Clock,
    queue_capacity: usize,
    core: Option<usize>,
) -> std::io::Result<(EngineHandle, EngineThread)> {
    let inbox = Inbox::new(queue_capacity);
    let cache = CacheFeed::new(engine.limits().total_blocks);
    let (load_sender, load) = watch::channel(EngineLoad::new(&engine, false, None));
    let (ended_sender, ended) = oneshot::channel();
    let state = State {
        engine,
        runner,
        clock,
        inbox: inbox.clone(),
        load: load_sender,
        cache: Arc::clone(&cache),
        records: HashMap::new(),
        reserved: HashMap::new(),
        events: Vec::new(),
        output: StepOutput::default(),
        taps: Vec::new(),
        metrics: EngineMetrics::new(),
        audited: None,
    };
    let (pinned, is_pinned) = std::sync::mpsc::sync_channel(1);
    let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        let _ended = ended_sender;
        let result = core.map_or(Ok(()), model::kernels::pin_current_thread);
        let usable = result.is_ok();
        // Whoever starts the thread waits for this.
        let _unheard = pinned.send(result);
        if usable {
            state.run();
        }
    })?;
    is_pinned
        .recv()
        .map_err(std::io::Error::other)?
        .map_err(std::io::Error::other)?;
    Ok((EngineHandle::new(inbox, load, cache), EngineThread { thread, ended }))
}

/// Shortest time between two audits.
const AUDIT_INTERVAL: Duration = Duration::from_secs(1);

struct State {
    engine: Engine,
    runner: Box<dyn Runner>,
    clock: Clock,
    inbox: Inbox<Command, Return>,
    load: watch::Sender<EngineLoad>,
    cache: Arc<CacheFeed>,
    records: HashMap<SequenceId, Record>,
    /// Where the reservations come from that are out.
    reserved: HashMap<ReservationId, Origin>,
    events: Vec<EngineEvent>,
    output: StepOutput,
    /// Those of the step that is being computed.
    taps: Vec<Tapped>,
    metrics: EngineMetrics,
    /// When the books were audited last.
    audited: Option<Instant>,
}

impl State {
    fn run(mut self) {
        let (mut commands, mut returns) = (Vec::new(), Vec::new());
        let mut idle = true;
        while self.inbox.take(&mut commands, &mut returns, idle) {
            for item in returns.drain(..) {
                self.take_back(item);
            }
            for command in commands.drain(..) {
                self.obey(command);
            }
            idle = !self.step();
            // Steps follow one another: only where none does is none pending.
            self.publish(!idle);
            self.cache.take(&mut self.engine);
            if idle {
                self.audit();
            }
        }
    }

    /// Publishes the state. A step that never ends is seen by what was said before it began.
    fn publish(&mut self, pending: bool) {
        let first = self.engine.first_waiting().and_then(|id| self.records.get(&id));
        let load = EngineLoad::new(&self.engine, pending, first.map(Record::waits_since));
        let changed = self
            .load
            .send_if_modified(|current| std::mem::replace(current, load) != load);
        if changed {
            self.metrics.load(&load);
        }
    }

    /// Every block has an owner: checked whenever the thread runs out of work, at most once a second.
    fn audit(&mut self) {
        let now = self.clock.now();
        if self.audited.is_some_and(|last| now < last + AUDIT_INTERVAL) {
            return;
        }
        self.audited = Some(now);
        if let Err(error) = self.engine.check_invariants() {
            self.metrics.audit_failed();
            tracing::error!(%error, "the books of the KV blocks are wrong");
        }
    }

    fn take_back(&mut self, item: Return) {
        match item {
            Return::Sequence(id) => {
                self.engine.cancel(id);
                self.records.remove(&id);
            }
            Return::Reservation(reservation) => {
                self.reserved.remove(&reservation.id());
                if !self.engine.release_reservation(reservation) {
                    tracing::error!("a reservation came back that this engine did not issue");
                }
            }
        }
    }

    /// A reply whose receiver is gone is dropped, and what it held comes back through the inbox.
    fn obey(&mut self, command: Command) {
        match command {
            Command::Enter { work, job, reply } => {
                if let Some(entered) = self.enter(*work, job) {
                    let _unheard = reply.send(entered);
                }
            }
            Command::Reserve {
                prompt,
                growth,
                choices,
                job,
                reply,
            } => {
                let prompt = Awaited {
                    token_ids: &prompt.token_ids,
                    cache_key: prompt.cache_key,
                    num_computed: prompt.num_computed,
                };
                let reserved = self.engine.reserve_prompt(&prompt, growth, choices);
                if let Ok(reservation) = &reserved {
                    let origin = self.origin(job);
                    self.reserved.insert(reservation.id(), origin);
                }
                let reserved = reserved.map_err(SubmitError::from);
                let _unheard = reply.send(reserved.map(|r| ReservedBlocks::new(r, self.inbox.clone())));
            }
            Command::Owners { reply } => {
                let _unheard = reply.send(self.ownership());
            }
        }
    }

    /// Something of `job` that is here from now on.
    fn origin(&self, job: Option<Arc<JobName>>) -> Origin {
        Origin {
            since: Some(self.clock.now()),
            job,
        }
    }

    /// Whose the blocks are. An owner that nobody here knows has no origin.
    fn ownership(&self) -> Ownership {
        self.engine.ownership(|owner| {
            let origin = match owner {
                Owner::Sequence(id) | Owner::Held(id) => self.records.get(&id).map(|record| &record.origin),
                Owner::Reservation(id) | Owner::Dropped(id) => self.reserved.get(&id),
                Owner::Step => None,
            };
            origin.cloned().unwrap_or_default()
        })
    }

    /// `None` if what was reserved is gone, which cannot be while somebody has it.
    fn enter(&mut self, work: Work, job: Option<Arc<JobName>>) -> Option<Result<SequenceGroup, SubmitError>> {
        let origin = self.origin(job);
        let entered = match work {
            Work::One(spec, tap) => {
                let capacity = event_capacity(&spec);
                let added = self.engine.add(spec).map_err(SubmitError::from);
                added.map(|id| self.track(vec![id], capacity, tap, origin))
            }
            Work::Choices(specs) => {
                let capacity = specs.iter().map(event_capacity).sum();
                let added = self.engine.add_choices(specs).map_err(SubmitError::from);
                added.map(|ids| self.track(ids, capacity, None, origin))
            }
            Work::Beams(spec, width) => {
                let added = self.engine.add_beams(spec, width).map_err(SubmitError::from);
                added.map(|id| self.track(vec![id], BEAM_EVENTS, None, origin))
            }
            Work::Commit(reserved, specs, num_computed) => {
                let capacity = specs.iter().map(event_capacity).sum();
                let reservation = self.redeem(reserved)?;
                let committed = self.engine.commit_choices(reservation, specs, num_computed);
                let committed = committed.map_err(SubmitError::from);
                committed.map(|ids| self.track(ids, capacity, None, origin))
            }
            Work::CommitBeams(reserved, spec, num_computed, width) => {
                let reservation = self.redeem(reserved)?;
                let committed = self.engine.commit_beams(reservation, spec, num_computed, width);
                let committed = committed.map_err(SubmitError::from);
                committed.map(|id| self.track(vec![id], BEAM_EVENTS, None, origin))
            }
        };
        Some(entered)
    }

    /// A reservation on its way back to the engine.
    fn redeem(&mut self, reserved: ReservedBlocks) -> Option<Reservation> {
        let reservation = reserved.take()?;
        self.reserved.remove(&reservation.id());
        Some(reservation)
    }

    /// Opens one queue for the events of sequences that belong together. `tap` follows the first one.
    fn track(
        &mut self,
        ids: Vec<SequenceId>,
        capacity: usize,
        tap: Option<Box<dyn StepTap>>,
        origin: Origin,
    ) -> SequenceGroup {
        let (events, receiver) = mpsc::channel(capacity.max(1));
        let now = self.clock.now();
        let mut tap = tap;
        for (index, id) in ids.iter().enumerate() {
            let record = Record::new(events.clone(), index, tap.take(), now, origin.clone());
            self.records.insert(*id, record);
        }
        SequenceGroup::new(ids, receiver, self.inbox.clone())
    }

    /// Runs one step. False if there was nothing to plan.
    fn step(&mut self) -> bool {
        let started = self.clock.now();
        let planned = self.engine.plan().is_some();
        // Also if nothing is planned: what they had may be reserved, and written, before the next step.
        for id in self.engine.preempted() {
            if let Some(tap) = self.records.get_mut(id).and_then(|record| record.tap.as_mut()) {
                tap.preempted();
            }
        }
        if !planned {
            return false;
        }
        if !self.load.borrow().pending {
            self.publish(true);
        }
        // The same plan again.
        let Some(plan) = self.engine.plan() else { return false };
        let mut computed = nothing_sampled(plan);
        let rows = computed.rows;
        for planned in &plan.sequences {
            let Some(record) = self.records.get_mut(&planned.owner) else {
                continue;
            };
            record.begins(started);
            if let Some(mut tap) = record.tap.take() {
                tap.step_begins(planned.start_position, &plan.block_ids[planned.blocks.range()]);
                self.taps.push(Tapped {
                    id: planned.id,
                    computed_tokens: planned.start_position + planned.rows.len,
                    tap,
                });
            }
        }
        let outcome = self.runner.execute(plan, &mut Taps(&mut self.taps), &mut self.output);
        let elapsed = self.clock.now().saturating_duration_since(started);
        for planned in &plan.sequences {
            if let Some(record) = self.records.get_mut(&planned.owner) {
                record.has_computed(plan.step, elapsed);
            }
        }
        for Tapped { id, tap, .. } in self.taps.drain(..) {
            if let Some(record) = self.records.get_mut(&id) {
                record.tap = Some(tap);
            }
        }
        match outcome {
            Ok(()) => {
                self.engine.note_step_time(elapsed);
                match self.engine.apply(&self.output, &mut self.events) {
                    Ok(stats) => computed = stats,
                    Err(error) => {
                        tracing::error!(%error, rows, "a step came to nothing; its sequences end with an error");
                    }
                }
            }
            Err(error) => {
                tracing::error!(%error, rows, "a step failed; its sequences end with an error");
                self.engine.fail_step(&error.to_string(), &mut self.events);
            }
        }
        let preempted = self
            .events
            .iter()
            .filter(|event| matches!(event, EngineEvent::Preempted { .. }));
        self.metrics.step(elapsed, &computed, preempted.count());
        deliver(&mut self.events, &mut self.records, self.clock.now());
        true
    }
}

/// What a step is that comes to nothing.
fn nothing_sampled(plan: &StepPlan) -> StepStats {
    StepStats {
        step: plan.step,
        batch_size: narrow(plan.sequences.len()),
        rows: narrow(plan.token_ids.len()),
        sampled_tokens: 0,
    }
}

/// A tap during a step.
struct Tapped {
    id: SequenceId,
    /// Tokens of its sequence that are computed after the step.
    computed_tokens: u32,
    tap: Box<dyn StepTap>,
}

/// Passes finished layers on to the taps of the planned sequences.
struct Taps<'a>(&'a mut Vec<Tapped>);

impl LayerObserver for Taps<'_> {
    fn layer_computed(&mut self, place: KvPlace) {
        for tapped in self.0.iter_mut() {
            tapped.tap.layer_computed(place, tapped.computed_tokens);
        }
    }
}

/// The way into the thread.
pub(crate) type EngineInbox = Inbox<Command, Return>;
