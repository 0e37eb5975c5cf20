//! A node: the production engine, push schedule, send and receive sessions, driven as the production shells drive them
//! (`node-shell`, `prefill-node`, `decode-node`, `kv-transfer`), without their threads and tasks.
//!
//! What the world does to a node is a method; what the node wants of the world is an [`Out`]. The engine takes commands
//! between two steps only; connections, jobs and the writes of received frames go on while a step is computed.

mod blocks;
mod decode;
mod engine_loop;
mod local;
mod prefill;
mod push;
mod receive;
mod report;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use coordinator::core::nodes::LegId;
use engine::engine::Engine;
use engine::owners::Origin;
use engine::plan::{SequenceId, StepOutput};
use engine::reservation::{Reservation, ReservationId};
use engine::sequence::SequenceSpec;
use protocol::blocks::BlockAudit;
use protocol::control::{CoordinatorMessage, Job, JobError, JobErrorKind, JobEvent, JobUpdate, LoadReport};
use protocol::ids::{Role, Ticket};
use protocol::kv::Fingerprint;
use protocol::sampling::SamplingParams;
use protocol::transfer::{FrameHeader, PushCommit, PushOpen, PushReply};

use self::decode::DecodeWork;
use self::prefill::PrefillWork;
use self::push::Push;
use self::receive::Receive;
use crate::model::{Pool, identity, layout};
use crate::random::Random;
use crate::scenario::Scenario;

/// Name of a handoff's stream: never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PushId(pub u64);

/// What the sender of a handoff says.
#[derive(Clone, Debug)]
pub enum KvMessage {
    /// Opens the handoff.
    Open(PushOpen),
    /// A frame with its payload.
    Frame(FrameHeader, Bytes),
    /// Everything has been sent.
    Commit(PushCommit),
}

/// What a node wants to be told of later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timer {
    /// The deadline of a prefill job, or of the commit that a decode job waits for.
    Job(LegId),
    /// The deadline of a whole decode job.
    Over(LegId),
    /// A job may send what is complete.
    Early(LegId),
    /// A pusher waits for an answer no longer.
    Answer(PushId),
    /// A receiver waits for the frames before a commit no longer.
    Commit(PushId),
    /// The step that is being computed is over.
    StepEnd,
}

/// What a node wants of the world.
#[derive(Debug)]
pub enum Out {
    /// Say something on a job's stream.
    Say(LegId, JobEvent),
    /// Reset a job's stream.
    Break(LegId),
    /// Open a stream for a handoff to whoever is at an address.
    Dial(PushId, String),
    /// Say something on it.
    Push(PushId, KvMessage),
    /// Reset it, as its sender.
    ResetPush(PushId),
    /// Answer on it, as its receiver.
    Reply(PushId, PushReply),
    /// Reset it, as its receiver.
    StopPush(PushId),
    /// Answer a coordinator's question.
    Blocks(Box<BlockAudit>),
    /// Tell me later.
    Timer(Duration, Timer),
    /// The engine has something to do.
    Wake,
}

/// Work for the engine that waits for the end of the step.
#[allow(clippy::large_enum_variant, reason = "few of them wait, and not for long")]
enum Command {
    Prefill(LegId),
    Reserve(LegId),
    Compute(LegId),
    Commit {
        leg: LegId,
        reservation: Reservation,
        entry: Entry,
    },
    /// The coordinator asks whose the blocks are.
    Owners(u64),
}

/// What enters the engine over a reservation.
enum Entry {
    Choices(Vec<u32>, Vec<SequenceSpec>),
    Beams(SequenceSpec, usize),
}

/// What was granted and is given back.
enum Return {
    Sequence(SequenceId),
    Reservation(Reservation),
}

enum Work {
    Prefill(Box<PrefillWork>),
    Decode(Box<DecodeWork>),
}

/// How often what happened on a node, over its life.
#[derive(Clone, Copy, Debug, Default)]
pub struct NodeCounts {
    /// Frames that came when their handoff was over, and were dropped.
    pub frames_late: u64,
    /// Frames of another handoff, or that had come before, and were dropped.
    pub frames_dropped: u64,
    /// Frames that were asked for again.
    pub frames_repeated: u64,
    /// Jobs that were refused for want of room.
    pub busy: u64,
}

/// See the head of the file.
pub struct Node {
    name: String,
    role: Role,
    /// Number of this life.
    pub boot: u64,
    random: Random,
    engine: Engine,
    pool: Pool,
    output: StepOutput,
    /// When the step in flight is computed: at its beginning, or at its end.
    stepping: Option<Computes>,
    /// What it takes.
    step_time: Duration,
    jobs: BTreeMap<LegId, Work>,
    /// Whose the sequences are, and which of its sequences each is.
    owners: BTreeMap<SequenceId, (LegId, usize)>,
    commands: VecDeque<Command>,
    returns: Vec<Return>,
    pushes: BTreeMap<PushId, Push>,
    receives: BTreeMap<PushId, Receive>,
    /// Where the reservations come from that are out.
    reserved: BTreeMap<ReservationId, Origin>,
    /// Open reservations.
    tickets: BTreeMap<Ticket, LegId>,
    next_ticket: u64,
    next_push: u64,
    fingerprint: Fingerprint,
    frame_bytes: usize,
    staging_full: u64,
    failing_steps: u64,
    reports: u64,
    /// Names of the blocks in the prefix cache, by what the engine says of its changes.
    cached: BTreeSet<u64>,
    /// What it has said of them.
    said: BTreeSet<u64>,
    cache_changes: u64,
    /// What was reported last.
    reported: Option<LoadReport>,
    quiet: u32,
    /// It is going to leave.
    pub leaving: bool,
    /// It will not hear the next cancel. What a simulation must notice.
    pub hears_no_cancel: bool,
    /// An operator wants it to take no new jobs.
    drained: bool,
    /// Its step takes so many times as long.
    pub slowness: u32,
    /// What must not happen, and has.
    problem: Option<String>,
    /// How often what happened.
    pub counts: NodeCounts,
    /// What it wants of the world.
    pub out: Vec<Out>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Computes {
    Done,
    AtItsEnd,
}

impl Node {
    /// A node that has just started. An error says which limit is wrong.
    pub fn new(scenario: &Scenario, index: usize, boot: u64, random: Random) -> anyhow::Result<Self> {
        let (name, role) = (scenario.node(index).0, scenario.role(index));
        let limits = scenario.engine(index);
        Ok(Self {
            name,
            role,
            boot,
            random,
            engine: Engine::with_horizon(limits, scenario.horizon_tokens)?,
            pool: Pool::new(limits.total_blocks, limits.groups),
            output: StepOutput::default(),
            stepping: None,
            step_time: Duration::ZERO,
            jobs: BTreeMap::new(),
            owners: BTreeMap::new(),
            commands: VecDeque::new(),
            returns: Vec::new(),
            pushes: BTreeMap::new(),
            receives: BTreeMap::new(),
            reserved: BTreeMap::new(),
            tickets: BTreeMap::new(),
            next_ticket: boot << 32,
            next_push: boot << 32,
            fingerprint: Fingerprint::new(&identity(), &layout(scenario.groups)),
            frame_bytes: scenario.frame_bytes,
            staging_full: scenario.faults.staging_full,
            failing_steps: scenario.faults.failing_steps,
            reports: 0,
            said: BTreeSet::new(),
            cached: BTreeSet::new(),
            cache_changes: 0,
            reported: None,
            quiet: 0,
            leaving: false,
            hears_no_cancel: false,
            drained: false,
            slowness: 1,
            problem: None,
            counts: NodeCounts::default(),
            out: Vec::new(),
        })
    }

    /// Sequences that were preempted, and tokens that the prefix cache saved.
    pub fn engine_counts(&self) -> (u64, u64) {
        let stats = self.engine.stats();
        (stats.preemptions, stats.cache_hit_tokens)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Free and cached blocks.
    pub fn spare_blocks(&self) -> (u32, u32) {
        let stats = self.engine.stats();
        (stats.free_blocks as u32, stats.cached_blocks as u32)
    }

    /// True if a job runs.
    pub fn has_jobs(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// What is wrong with its books.
    pub fn audit(&self) -> Result<(), String> {
        if let Some(problem) = &self.problem {
            return Err(problem.clone());
        }
        self.engine.check_invariants().map_err(|error| error.to_string())?;
        let stats = self.engine.stats();
        let sum = stats.free_blocks + stats.cached_blocks + stats.owned_blocks;
        if sum != stats.total_blocks {
            return Err(format!("free + cached + owned is {sum} of {}", stats.total_blocks));
        }
        Ok(())
    }

    /// What it still holds although nobody is served.
    pub fn leftovers(&self) -> Vec<String> {
        let stats = self.engine.stats();
        // The operator never stops asking: a question may have just arrived.
        let is_work = |command: &&Command| !matches!(command, Command::Owners(_));
        let commands = self.commands.iter().filter(is_work).count();
        let counts = [
            ("owned blocks", stats.owned_blocks),
            ("running sequences", stats.running),
            ("waiting sequences", stats.waiting),
            ("held sequences", stats.held),
            ("reservations", stats.reservations),
            ("jobs", self.jobs.len()),
            ("sequences with an owner", self.owners.len()),
            ("commands", commands),
            ("returns", self.returns.len()),
            ("pushes", self.pushes.len()),
            ("tickets", self.tickets.len()),
            ("named reservations", self.reserved.len()),
            ("open receives", self.receives.values().filter(|r| !r.is_over()).count()),
        ];
        let left = counts.iter().filter(|(_, count)| *count > 0);
        left.map(|(what, count)| format!("{}: {count} {what}", self.name))
            .collect()
    }

    /// It takes no new jobs.
    fn is_draining(&self) -> bool {
        self.leaving || self.drained
    }

    /// An operator's order.
    pub fn obey(&mut self, order: &CoordinatorMessage) {
        match order {
            CoordinatorMessage::Drain { on } => self.drained = *on,
            // Whether it may was asked before the order was given.
            CoordinatorMessage::SetRole { role } => self.role = *role,
            CoordinatorMessage::ReportBlocks { number } => self.command(Command::Owners(*number)),
            CoordinatorMessage::Welcome | CoordinatorMessage::Refused { .. } => {}
        }
    }

    /// A job arrives.
    pub fn start(&mut self, now: Instant, leg: LegId, job: Job) {
        if self.is_draining() {
            return self.say_failed(leg, JobErrorKind::Draining, "the node is draining");
        }
        let wanted = match &job {
            Job::Prefill(_) => Role::Prefill,
            Job::Decode(_) => Role::Decode,
        };
        if !self.role.may_act_as(wanted) {
            return self.say_failed(leg, JobErrorKind::Draining, "the node serves another role now");
        }
        match job {
            Job::Prefill(job) => self.start_prefill(leg, job),
            Job::Decode(job) => self.start_decode(now, leg, job),
        }
    }

    /// The coordinator says something more about a job.
    pub fn update(&mut self, leg: LegId, update: JobUpdate) {
        let JobUpdate::EndChoice { choice } = update;
        self.end_choice(leg, choice);
    }

    /// A job's stream is gone: the coordinator cancelled it, or the link is lost.
    pub fn reset(&mut self, leg: LegId) {
        let knows = self.jobs.contains_key(&leg);
        if !(knows && std::mem::take(&mut self.hears_no_cancel)) {
            self.drop_job(leg);
        }
    }

    /// The oldest job is gone without a word. What a simulation must notice.
    pub fn forget_a_job(&mut self) {
        if let Some(leg) = self.jobs.keys().next().copied() {
            self.drop_job(leg);
        }
    }

    /// All streams of a link are gone.
    pub fn link_lost(&mut self) {
        let legs: Vec<LegId> = self.jobs.keys().copied().collect();
        legs.into_iter().for_each(|leg| self.drop_job(leg));
    }

    /// A bit of the KV of some sequence turns over. False if there is none. What a simulation must notice.
    pub fn rot(&mut self, random: &mut Random) -> bool {
        let ids = self.owners.keys().copied();
        let computed = ids.filter_map(|id| Some((id, self.engine.num_computed(id)?)));
        let some: Vec<_> = computed.filter(|(_, tokens)| *tokens > 0).collect();
        if some.is_empty() {
            return false;
        }
        let (id, tokens) = *random.pick(&some);
        // One that the next row sees.
        let groups = self.engine.limits().groups;
        let group = random.below(groups.count() as u64) as usize;
        let window = groups.window_of(group);
        let first = window.map_or(0, |window| (tokens + 1).saturating_sub(window as usize));
        let position = first + random.below((tokens - first) as u64) as usize;
        let table = self.engine.block_table(id).unwrap_or_default();
        self.pool.rot(table, (group, position), random);
        true
    }

    /// What the node asked to be told of.
    pub fn timer(&mut self, now: Instant, timer: Timer) {
        match timer {
            Timer::Job(leg) => self.job_deadline(now, leg),
            Timer::Over(leg) => {
                if self.jobs.contains_key(&leg) {
                    self.out.push(Out::Break(leg));
                    self.drop_job(leg);
                }
            }
            Timer::Early(leg) => self.send_early(leg),
            Timer::Answer(push) => self.push_unanswered(push),
            Timer::Commit(push) => self.receive_deadline(push),
            Timer::StepEnd => self.end_step(now),
        }
    }

    fn job_deadline(&mut self, now: Instant, leg: LegId) {
        let late = match self.jobs.get(&leg) {
            None => false,
            Some(Work::Prefill(_)) => true,
            Some(Work::Decode(work)) => work.awaits_commit() && work.deadline <= now,
        };
        if late {
            self.fail(leg, JobErrorKind::DeadlineExceeded, "not finished within the deadline");
        }
    }

    fn say(&mut self, leg: LegId, event: JobEvent) {
        self.out.push(Out::Say(leg, event));
    }

    fn say_failed(&mut self, leg: LegId, kind: JobErrorKind, message: impl Into<String>) {
        let message = message.into();
        self.say(leg, JobEvent::Failed(JobError { kind, message }));
    }

    /// Ends a job with its last event.
    fn end(&mut self, leg: LegId, event: JobEvent) {
        self.say(leg, event);
        self.drop_job(leg);
    }

    fn fail(&mut self, leg: LegId, kind: JobErrorKind, message: impl Into<String>) {
        self.say_failed(leg, kind, message);
        self.drop_job(leg);
    }

    /// Lets go of everything that a job has.
    fn drop_job(&mut self, leg: LegId) {
        match self.jobs.remove(&leg) {
            None => return,
            Some(Work::Prefill(work)) => self.drop_prefill(*work),
            Some(Work::Decode(work)) => self.drop_decode(leg, *work),
        }
        self.out.push(Out::Wake);
    }

    fn give_back(&mut self, item: Return) {
        self.returns.push(item);
        self.out.push(Out::Wake);
    }

    fn command(&mut self, command: Command) {
        self.commands.push_back(command);
        self.out.push(Out::Wake);
    }
}

/// The sampling of a choice, as nodes with a sequence for each choice write it.
fn sampling_of(sampling: &SamplingParams, choice: u32) -> Arc<SamplingParams> {
    Arc::new(sampling.of_choice(choice))
}
