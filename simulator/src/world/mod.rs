//! The world of a seed: a coordinator's core, nodes, clients, and the network between them, on one queue of events.
//!
//! An event happens, whoever is concerned acts, books are audited, and what is wanted of others becomes further events.
//! Nothing else drives the clock, so a seed is a history.

mod audits;
mod faults;
mod front;
mod links;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::{Duration, Instant};

use protocol::blocks::BlockAudit;
use protocol::control::{CacheChange, CoordinatorMessage, Hello, Job, JobEvent, JobUpdate, LoadReport};
use protocol::transfer::PushReply;
use runtime::clock::Clock;

use coordinator::core::nodes::LegId;

use self::faults::Incident;
use self::front::Front;
use crate::network::{ConnId, Network, Place, Side};
use crate::node::{KvMessage, Node, NodeCounts, PushId, Timer};
use crate::random::Random;
use crate::scenario::Scenario;
use crate::trace::Trace;
use crate::workload::{self, Call};

/// How long everything goes on after the last request has ended and the last fault is over: whoever holds something that
/// nobody knows of any more has lost it by then.
const SETTLE: Duration = Duration::from_secs(6);
/// Before the first call comes in all nodes have joined.
const JOINED: Duration = Duration::from_millis(400);
/// A request that has not ended by then hangs.
const LONGEST: Duration = Duration::from_secs(600);

/// What is said over a connection.
enum Message {
    Hello(Box<Hello>),
    Welcome,
    Order(CoordinatorMessage),
    Report(LoadReport),
    Cache(Box<CacheChange>),
    Blocks(Box<BlockAudit>),
    Start(LegId, Box<Job>),
    Update(LegId, JobUpdate),
    Reset(LegId),
    Said(LegId, Box<JobEvent>),
    /// A job's stream has ended before its job.
    Broken(LegId),
    /// On the stream of a handoff, named as its receiver names it.
    Push(PushId, Box<KvMessage>),
    ResetPush(PushId),
    Reply(PushId, PushReply),
    StopPush(PushId),
}

/// What happens to a node from within.
enum Own {
    Timer(Timer),
    Wake,
    /// It looks whether its load is to be reported.
    Report,
    /// It dials the coordinator.
    Dial,
    /// It drains, and looks whether it can go.
    Leave {
        /// When it looked first.
        since: Instant,
        /// Since when it has no job.
        idle: Option<Instant>,
    },
}

enum Event {
    Arrive(ConnId, Side, Message),
    /// An end of a connection learns that it is gone.
    Notice(ConnId, Side),
    Call(usize),
    Cancel(usize),
    Own(usize, u64, Own),
    Return(usize),
    Incident(Incident),
    /// Somebody asks the coordinator whose the blocks are.
    Audit,
}

struct Entry {
    at: Instant,
    number: u64,
    event: Event,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// The place of a node.
struct Slot {
    node: Option<Node>,
    /// It does nothing until then.
    frozen_until: Option<Instant>,
    /// Its connection to the coordinator.
    control: Option<ConnId>,
    /// The coordinator has welcomed it on that.
    joined: bool,
    /// It is going to be woken.
    waking: bool,
    /// A report that may come again.
    old_report: Option<LoadReport>,
}

/// Where a handoff's messages go.
#[derive(Clone, Copy)]
struct Stream {
    conn: ConnId,
    push: PushId,
}

/// How often what happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Requests that were answered.
    pub answered: u64,
    /// Requests that ended with an error.
    pub failed: u64,
    /// Of these: their client left or did not read.
    pub cancelled: u64,
    /// No room in time.
    pub overloaded: u64,
    /// No node of a role.
    pub unavailable: u64,
    /// A deadline passed.
    pub timeout: u64,
    /// Too many nodes were lost under it, or transfers failed.
    pub lost: u64,
    /// Calls that were refused at the door.
    pub refused: u64,
    /// Attempts that began again before the first token.
    pub restarted: u64,
    /// Requests that went on on another decode node.
    pub moved: u64,
    /// Handoffs that were completed.
    pub handed_off: u64,
    /// Tokens that came twice.
    pub wasted: u64,
    /// Words of jobs that were over.
    pub late: u64,
    /// Choices that a stop string ended before the others.
    pub ended_alone: u64,
    /// Links that the coordinator lost.
    pub links_lost: u64,
    /// Lives of nodes that ended.
    pub deaths: u64,
    /// Preemptions.
    pub preempted: u64,
    /// Tokens that prefix caches saved.
    pub cached_tokens: u64,
    /// Frames that came when their handoff was over, and were dropped.
    pub frames_late: u64,
    /// Frames of another handoff, or that had come before, and were dropped.
    pub frames_dropped: u64,
    /// Frames that were sent again.
    pub frames_repeated: u64,
    /// Jobs that were refused for want of room.
    pub busy: u64,
    /// Audits of the nodes' blocks.
    pub audits: u64,
    /// Of these: nodes that did not answer.
    pub audits_silent: u64,
    /// Tokens that clients got.
    pub tokens: u64,
    /// Longest time that a request took.
    pub longest_us: u64,
    /// Time that passed.
    pub virtual_us: u64,
    /// Events that happened.
    pub events: u64,
}

impl Tally {
    /// Adds up.
    pub fn add(&mut self, more: &Self) {
        let pairs = [
            (&mut self.answered, more.answered),
            (&mut self.failed, more.failed),
            (&mut self.cancelled, more.cancelled),
            (&mut self.overloaded, more.overloaded),
            (&mut self.unavailable, more.unavailable),
            (&mut self.timeout, more.timeout),
            (&mut self.lost, more.lost),
            (&mut self.refused, more.refused),
            (&mut self.restarted, more.restarted),
            (&mut self.moved, more.moved),
            (&mut self.wasted, more.wasted),
            (&mut self.late, more.late),
            (&mut self.ended_alone, more.ended_alone),
            (&mut self.links_lost, more.links_lost),
            (&mut self.deaths, more.deaths),
            (&mut self.preempted, more.preempted),
            (&mut self.cached_tokens, more.cached_tokens),
            (&mut self.frames_late, more.frames_late),
            (&mut self.frames_dropped, more.frames_dropped),
            (&mut self.handed_off, more.handed_off),
            (&mut self.frames_repeated, more.frames_repeated),
            (&mut self.busy, more.busy),
            (&mut self.audits, more.audits),
            (&mut self.audits_silent, more.audits_silent),
            (&mut self.tokens, more.tokens),
            (&mut self.virtual_us, more.virtual_us),
            (&mut self.events, more.events),
        ];
        self.longest_us = self.longest_us.max(more.longest_us);
        for (sum, more) in pairs {
            *sum += more;
        }
    }
}

/// See the head of the file.
pub struct World {
    pub(crate) scenario: Scenario,
    random: Random,
    start: Instant,
    now: Instant,
    queue: BinaryHeap<Reverse<Entry>>,
    next_event: u64,
    trace: Trace,
    network: Network,
    pub(crate) front: Front,
    nodes: Vec<Slot>,
    next_boot: u64,
    /// Connections between nodes, by the life that dialled and the node that was dialled.
    kv_conns: BTreeMap<(u64, usize), ConnId>,
    streams: BTreeMap<PushId, Stream>,
    /// The stream that a push uses now.
    stream_of: BTreeMap<PushId, PushId>,
    next_stream: u64,
    pub(crate) calls: Vec<Call>,
    /// When the last fault is over.
    quiet_from: Instant,
    pub(crate) tally: Tally,
}

impl World {
    /// The world of a seed before anything happens.
    pub fn new(seed: u64, scenario: Scenario, aloud: bool) -> anyhow::Result<Self> {
        let start = Clock.now();
        let calls = workload::calls(seed, &scenario)?;
        let nodes = (0..scenario.nodes()).map(|_| Slot {
            node: None,
            frozen_until: None,
            control: None,
            joined: false,
            waking: false,
            old_report: None,
        });
        let mut world = Self {
            random: Random::new(seed, "world"),
            start,
            now: start,
            queue: BinaryHeap::new(),
            next_event: 0,
            trace: Trace::new(aloud),
            network: Network::new(scenario.latency_us),
            front: Front::new(&scenario),
            nodes: nodes.collect(),
            next_boot: 1,
            kv_conns: BTreeMap::new(),
            streams: BTreeMap::new(),
            stream_of: BTreeMap::new(),
            next_stream: 0,
            calls,
            quiet_from: start,
            tally: Tally::default(),
            scenario,
        };
        for index in 0..world.nodes.len() {
            world.bring_up(index)?;
        }
        for index in 0..world.calls.len() {
            world.after(JOINED + world.calls[index].at, Event::Call(index));
        }
        world.after(JOINED, Event::Audit);
        world.plan_incidents();
        Ok(world)
    }

    /// Lets everything happen until all requests have ended and everything is quiet. An error says what is wrong.
    pub fn run(&mut self) -> anyhow::Result<()> {
        loop {
            let timeout = self.front.cluster.poll_timeout(self.now);
            let next = self.queue.peek().map(|Reverse(entry)| entry.at);
            let Some(at) = timeout.into_iter().chain(next).min() else {
                anyhow::bail!("nothing happens any more, and requests are open");
            };
            let over = self.front.open == 0 && self.front.waiting_calls == 0;
            if over && at > self.quiet_from.max(self.front.last_end.unwrap_or(self.start)) + SETTLE {
                break;
            }
            anyhow::ensure!(at < self.start + LONGEST, "{} requests hang", self.front.open);
            self.now = self.now.max(at);
            if timeout == Some(at) {
                self.coordinator_timeout();
            } else if let Some(Reverse(entry)) = self.queue.pop() {
                self.happen(entry.event)?;
            }
            if let Some(problem) = self.front.problem.take() {
                anyhow::bail!("after {:?}: {problem}", self.passed());
            }
        }
        self.tally.virtual_us = self.passed().as_micros() as u64;
        self.tally.events = self.trace.events();
        for index in 0..self.nodes.len() {
            if let Some(node) = self.nodes[index].node.take() {
                self.bury(&node);
                self.nodes[index].node = Some(node);
            }
        }
        Ok(())
    }

    /// Equal for equal histories.
    pub fn hash(&self) -> u64 {
        self.trace.hash()
    }

    /// The nodes that live.
    pub(crate) fn living(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter_map(|slot| slot.node.as_ref())
    }

    fn passed(&self) -> Duration {
        self.now - self.start
    }

    fn after(&mut self, delay: Duration, event: Event) {
        self.at(self.now + delay, event);
    }

    fn at(&mut self, at: Instant, event: Event) {
        let number = self.next_event;
        self.next_event += 1;
        self.queue.push(Reverse(Entry { at, number, event }));
    }

    fn note(&mut self, kind: u64, which: u64, words: std::fmt::Arguments<'_>) {
        self.trace.note(self.now - self.start, kind, which, words);
    }

    /// Counts of a life that is over, or of the last one.
    fn bury(&mut self, node: &Node) {
        let NodeCounts {
            frames_late,
            frames_dropped,
            frames_repeated,
            busy,
        } = node.counts;
        let (preempted, cached_tokens) = node.engine_counts();
        self.tally.add(&Tally {
            frames_late,
            frames_dropped,
            frames_repeated,
            busy,
            preempted,
            cached_tokens,
            ..Tally::default()
        });
    }

    fn happen(&mut self, event: Event) -> anyhow::Result<()> {
        if let Some(until) = self.frozen(&event) {
            self.at(until, event);
            return Ok(());
        }
        match event {
            Event::Arrive(conn, to, message) => self.arrive(conn, to, message)?,
            Event::Notice(conn, side) => self.notice(conn, side)?,
            Event::Call(index) => self.call(index),
            Event::Cancel(index) => self.cancel(index),
            Event::Own(index, boot, own) => self.own(index, boot, own)?,
            Event::Return(index) => {
                if self.nodes[index].node.is_none() {
                    self.bring_up(index)?;
                }
            }
            Event::Incident(incident) => self.befall(incident),
            Event::Audit => self.audit_blocks(),
        }
        Ok(())
    }

    /// Until when the node whom an event is for does nothing.
    fn frozen(&mut self, event: &Event) -> Option<Instant> {
        let index = match event {
            Event::Arrive(conn, side, _) | Event::Notice(conn, side) => match self.network.conn(*conn).end(*side).place
            {
                Place::Node(index) => index,
                Place::Coordinator => return None,
            },
            Event::Own(index, ..) => *index,
            Event::Call(_) | Event::Cancel(_) | Event::Return(_) | Event::Incident(_) | Event::Audit => return None,
        };
        self.nodes[index].frozen_until.filter(|until| *until > self.now)
    }
}
