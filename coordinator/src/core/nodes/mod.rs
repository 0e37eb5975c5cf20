//! The truth about nodes: who is connected, what they can hold, what they reported, what is booked on them.
//!
//! A booking belongs to a *leg*: one job of one request on one link. Legs end once; whatever arrives for a leg that
//! has ended is late.

mod ask;
mod books;
mod breaker;
mod check;
mod cost;
mod health;
mod options;
mod shape;
mod transfer;
mod watch;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::control::{CacheChange, HandoffStats, Hello, LoadReport};
use protocol::ids::{NodeId, RequestId, Role};
use protocol::kv::{KvLayout, ModelIdentity};
use protocol::prefix::block_hashes;
use protocol::window::Kept;

pub use self::books::Work;
use self::breaker::Breaker;
pub use self::breaker::BreakerLimits;
pub use self::check::{PeerName, TextIdentity};
pub use self::cost::{Beside, StepLimits, StepTimes};
use self::cost::{Queue, rows_of_prompts};
use self::health::{Health, RunningTime};
pub use self::options::Wanted;
pub use self::shape::{Held, Shape};
use self::transfer::Transfers;
pub use self::watch::HealthLimits;
use super::prefix_index::PrefixIndex;
use super::types::{NodeStatus, Rates};

/// Name of one connection to a node; never used twice by a coordinator.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LinkId(pub u64);

/// Name of one job on one node; never used twice by a coordinator.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LegId(pub u64);

/// How much prefill work a node gets at once: little, so that requests wait here, where another node can still be chosen.
#[derive(Clone, Copy, Debug)]
pub struct PrefillCredit {
    /// Prompt tokens that several prompts together may be ahead of what has been computed.
    pub window_tokens: usize,
    /// Prompts that share a step: this many may be computed if the next one is less than half of what is there, so that
    /// a short prompt does not wait for a long one.
    pub sharing_jobs: usize,
}

/// A job on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leg {
    /// Whose.
    pub request: RequestId,
    /// Where.
    pub link: LinkId,
    /// Its job has been sent.
    pub sent: bool,
    /// The node has taken the job: it holds blocks there.
    taken: bool,
    blocks: u32,
    /// Sequences that have not ended.
    sequences: usize,
    /// What the node has yet to compute, as far as is known.
    work: Work,
    /// The node has reported since the job was sent.
    seen: bool,
}

/// First pause after a node said that it is busy.
const BACKOFF_MIN: Duration = Duration::from_millis(10);
/// Longest pause.
const BACKOFF_MAX: Duration = Duration::from_millis(500);

#[derive(Debug)]
struct Node {
    hello: Hello,
    /// The role in its certificate.
    certified: Role,
    /// What it does now: what it said when it joined, or said last.
    role: Role,
    /// Its name, cheap to hand on.
    name: Arc<str>,
    report: LoadReport,
    draining: bool,
    legs: BTreeSet<LegId>,
    booked_blocks: u32,
    /// Sequences of all legs that have not ended.
    sequences: usize,
    /// Blocks booked minus blocks given back since the last report.
    unreported_blocks: i64,
    outstanding_tokens: usize,
    /// Legs with outstanding tokens.
    computing: usize,
    queue: Queue,
    /// What is known of its steps.
    times: StepTimes,
    /// Of its handoffs, if it computes prompts: by decode node.
    transfers: BTreeMap<LinkId, Transfers>,
    breaker: Breaker,
    health: Health,
    busy_until: Option<Instant>,
    backoff: Duration,
}

/// All connected nodes and all running legs.
#[derive(Debug)]
pub struct Nodes {
    text: TextIdentity,
    credit: PrefillCredit,
    limits: StepLimits,
    health: HealthLimits,
    time: RunningTime,
    /// For each part of a step's time the last word of whoever had measured it.
    measured: StepTimes,
    nodes: BTreeMap<LinkId, Node>,
    prefixes: PrefixIndex,
    legs: HashMap<LegId, Leg>,
    next_leg: u64,
    last_seen: HashMap<Role, Instant>,
}

impl Nodes {
    /// No node yet.
    pub fn new(text: TextIdentity, credit: PrefillCredit, limits: StepLimits, health: HealthLimits) -> Self {
        Self {
            time: RunningTime::new(health.stall),
            health,
            text,
            credit,
            limits,
            measured: StepTimes::default(),
            nodes: BTreeMap::new(),
            prefixes: PrefixIndex::default(),
            legs: HashMap::new(),
            next_leg: 0,
            last_seen: HashMap::new(),
        }
    }

    /// The link over which a node of this name is connected.
    pub fn link_of(&self, node: &NodeId) -> Option<LinkId> {
        self.nodes
            .iter()
            .find(|(_, n)| n.hello.node == *node)
            .map(|(link, _)| *link)
    }

    /// Takes in a node that has been checked.
    pub fn join(&mut self, link: LinkId, certified: Role, hello: Hello) {
        let report = LoadReport {
            free_blocks: hello.total_blocks,
            role: hello.role,
            ..LoadReport::default()
        };
        let node = Node {
            name: hello.node.0.as_str().into(),
            hello,
            certified,
            role: report.role,
            report,
            draining: false,
            legs: BTreeSet::new(),
            booked_blocks: 0,
            sequences: 0,
            unreported_blocks: 0,
            outstanding_tokens: 0,
            computing: 0,
            queue: Queue::default(),
            times: StepTimes::default(),
            transfers: BTreeMap::new(),
            breaker: Breaker::default(),
            health: Health::new(self.time.now()),
            busy_until: None,
            backoff: BACKOFF_MIN,
        };
        self.prefixes.join(link, node.hello.total_blocks as usize);
        self.nodes.insert(link, node);
    }

    /// Takes in a report, unless it is older than the last. False if the link is not known.
    pub fn report(&mut self, link: LinkId, report: LoadReport) -> bool {
        let Some(node) = self.nodes.get_mut(&link) else {
            return false;
        };
        if report.sequence > node.report.sequence {
            if available(&report) > available(&node.report) {
                node.busy_until = None;
            }
            node.report = report;
            node.draining = report.draining;
            if node.certified.may_act_as(report.role) {
                node.role = report.role;
            }
            node.unreported_blocks = 0;
            node.health.report(self.time.now(), report.steps, report.pending);
            node.times = report.step_times.into();
            node.queue.left = Some(rows_of_prompts(&report));
            self.measured = node.times.or(&self.measured);
            self.see(link);
        }
        true
    }

    /// The node has reported: whatever was sent before is part of what it says.
    fn see(&mut self, link: LinkId) {
        let Some(node) = self.nodes.get_mut(&link) else { return };
        for leg in &node.legs {
            let Some(leg) = self.legs.get_mut(leg) else { continue };
            if leg.sent && !leg.seen {
                leg.seen = true;
                node.queue.unseen_us -= leg.work.us;
                node.queue.seen_us += leg.work.us;
                node.queue.seen_tokens += leg.work.tokens as u64;
            }
        }
    }

    /// A node tells what it has cached.
    pub fn cache_changed(&mut self, link: LinkId, change: &CacheChange) {
        self.prefixes.change(link, change);
    }

    /// What nodes have cached.
    pub fn prefixes(&self) -> &PrefixIndex {
        &self.prefixes
    }

    /// Which blocks of a sequence nodes keep. The nodes of a cluster agree about it.
    pub fn kept(&self) -> Kept {
        let node = self.nodes.values().next();
        node.map_or(Kept::ALL, Node::kept)
    }

    /// Names of the full blocks of a prompt. The nodes of a cluster agree about them; without a node there are none.
    pub fn block_names(&self, token_ids: &[u32], adapter: Option<&str>) -> Vec<u64> {
        let Some(node) = self.nodes.values().next() else {
            return Vec::new();
        };
        let block_tokens = node.hello.layout.block_tokens as usize;
        match node.hello.model.cache_key(adapter) {
            Some(key) => block_hashes(token_ids, block_tokens, key),
            None => Vec::new(),
        }
    }

    /// A handoff between two nodes is over.
    pub fn handed_off(&mut self, prefill: LinkId, decode: LinkId, stats: &HandoffStats) {
        if self.nodes.contains_key(&decode)
            && let Some(node) = self.nodes.get_mut(&prefill)
        {
            node.transfers.entry(decode).or_default().note(stats);
        }
    }

    /// The node said that it has no room: nothing is sent to it for a while, longer each time, unless it gets room before:
    /// one of its jobs ends, or it reports more free blocks.
    pub fn busy(&mut self, now: Instant, link: LinkId, free_blocks: Option<u32>) {
        let Some(node) = self.nodes.get_mut(&link) else { return };
        node.busy_until = Some(now + node.backoff);
        node.backoff = (node.backoff * 2).min(BACKOFF_MAX);
        if let Some(free) = free_blocks {
            node.report.free_blocks = free;
            node.report.cached_blocks = 0;
            node.unreported_blocks = 0;
        }
    }

    /// The node took the job of a leg: its next pause is a short one again.
    pub fn accepted(&mut self, leg: LegId) {
        let Some(taken) = self.legs.get_mut(&leg) else { return };
        taken.taken = true;
        if let Some(node) = self.nodes.get_mut(&taken.link) {
            node.backoff = BACKOFF_MIN;
        }
    }

    /// The node takes no new jobs.
    pub fn draining(&mut self, link: LinkId) {
        if let Some(node) = self.nodes.get_mut(&link) {
            node.draining = true;
        }
    }

    /// The node is gone; its legs, which are still booked, in the order of their start.
    pub fn leave(&mut self, now: Instant, link: LinkId) -> Vec<LegId> {
        let Some(node) = self.nodes.remove(&link) else {
            return Vec::new();
        };
        self.prefixes.leave(link);
        for role in [Role::Prefill, Role::Decode] {
            if node.serves(role) {
                self.last_seen.insert(role, now);
            }
        }
        for other in self.nodes.values_mut() {
            other.transfers.remove(&link);
        }
        node.legs.into_iter().collect()
    }

    /// Says what is too much if none of the nodes of `role` can ever hold `shape`, and there are some.
    pub fn too_large(&self, role: Role, shape: &Shape) -> Option<String> {
        let mut of_role = self.nodes.values().filter(|node| node.serves(role)).peekable();
        of_role.peek()?;
        let (mut tokens, mut slots) = (0, 0);
        for node in of_role {
            if node.could_hold(shape, self.limits.chunk_tokens) {
                return None;
            }
            let layout = &node.hello.layout;
            let pool = node.hello.total_blocks as usize / layout.groups.count() * layout.block_tokens as usize;
            let longest = node.hello.max_seq_len as usize;
            // Where blocks leave a window, the longest sequence fits.
            tokens = tokens.max(if node.kept().slides() {
                longest
            } else {
                pool.min(longest)
            });
            slots = slots.max(node.hello.max_num_seqs as usize);
        }
        let sequences = shape.held.sequences();
        Some(match sequences {
            1 => format!(
                "the request may grow to {} tokens; the connected nodes hold {tokens}",
                shape.most_tokens
            ),
            _ if sequences > slots => {
                format!("the request has {sequences} choices; the connected nodes run {slots} sequences")
            }
            _ => format!(
                "the request has {sequences} choices that may grow to {} tokens each; the connected nodes cannot hold them",
                shape.most_tokens
            ),
        })
    }

    /// True if a node of `role` is connected.
    pub fn is_present(&self, role: Role) -> bool {
        self.nodes.values().any(|node| node.serves(role))
    }

    /// When the last node of `role` that was lost was lost.
    pub fn last_seen(&self, role: Role) -> Option<Instant> {
        self.last_seen.get(&role).copied()
    }

    /// When the first pause ends that lies in the future.
    pub fn next_pause_end(&self, now: Instant) -> Option<Instant> {
        self.nodes
            .values()
            .flat_map(|node| {
                let busy = node.busy_until.filter(|until| *until > now);
                [busy, node.breaker.opens_up(now, &self.health.breaker)]
            })
            .flatten()
            .min()
    }

    /// A leg that is not over.
    pub fn leg(&self, leg: LegId) -> Option<&Leg> {
        self.legs.get(&leg)
    }

    /// The node at the other end of a link.
    pub fn hello(&self, link: LinkId) -> Option<&Hello> {
        self.nodes.get(&link).map(|node| &node.hello)
    }

    /// Snapshot by role and name.
    pub fn status(&self) -> Vec<NodeStatus> {
        let mut all: Vec<NodeStatus> = self.nodes.values().map(Node::status).collect();
        all.sort_by(|a, b| (a.role, &a.node).cmp(&(b.role, &b.node)));
        all
    }
}

impl Node {
    fn identity(&self) -> (&ModelIdentity, &KvLayout) {
        (&self.hello.model, &self.hello.layout)
    }

    /// True if it takes jobs for `role`.
    fn serves(&self, role: Role) -> bool {
        self.role.may_act_as(role)
    }

    /// Blocks that are free by the node's word and by our books, whichever is less.
    fn free_blocks(&self) -> i64 {
        let by_books = i64::from(self.hello.total_blocks) - i64::from(self.booked_blocks);
        let by_word = available(&self.report) - self.unreported_blocks;
        by_books.min(by_word)
    }

    fn status(&self) -> NodeStatus {
        NodeStatus {
            node: self.hello.node.0.clone(),
            role: self.role,
            draining: self.draining,
            stalled: self.health.is_stalled(),
            breaker: self.breaker.as_str(),
            total_blocks: self.hello.total_blocks,
            free_blocks: self.report.free_blocks,
            cached_blocks: self.report.cached_blocks,
            booked_blocks: self.booked_blocks,
            jobs: self.legs.len() as u32,
            running: self.report.running,
            waiting: self.report.waiting,
            preempted: self.report.preempted,
            oldest_wait: Duration::from_millis(self.report.oldest_wait_ms),
            queued_tokens: self.report.queued_tokens,
            owned_blocks: self.report.owned_blocks,
            reservations: self.report.reservations,
            steps: self.report.steps,
            done: self.report.done,
            rates: Rates::default(),
            max_seq_len: self.hello.max_seq_len,
            pool_tokens: u64::from(self.hello.total_blocks) * u64::from(self.hello.layout.block_tokens)
                / self.hello.layout.groups.count() as u64,
            weights_hash: self.hello.model.weights_hash,
        }
    }
}

/// Blocks that a node could give away by its own word.
fn available(report: &LoadReport) -> i64 {
    i64::from(report.free_blocks) + i64::from(report.cached_blocks)
}
