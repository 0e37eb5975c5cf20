//! The truth about nodes: who is connected, what they can hold, what they reported, what is booked on them.
//!
//! A booking belongs to a *leg*: one job of one request on one link. Legs end once; whatever arrives for a leg that
//! has ended is late.

mod ask;
mod check;
mod shape;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use protocol::control::{Hello, LoadReport};
use protocol::ids::{NodeId, RequestId, Role};
use protocol::kv::{KvLayout, ModelIdentity};

pub use self::check::{PeerName, TextIdentity};
pub use self::shape::{Held, Shape};
use super::routing::{Candidate, least_loaded};
use super::types::NodeStatus;

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
    /// Prompt tokens that the node has yet to compute, as far as is known.
    outstanding_tokens: usize,
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
    /// What it serves now, by its own word and within its certificate.
    role: Role,
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
    busy_until: Option<Instant>,
    backoff: Duration,
}

/// All connected nodes and all running legs.
#[derive(Debug)]
pub struct Nodes {
    text: TextIdentity,
    credit: PrefillCredit,
    nodes: BTreeMap<LinkId, Node>,
    legs: HashMap<LegId, Leg>,
    next_leg: u64,
    last_seen: HashMap<Role, Instant>,
}

impl Nodes {
    /// No node yet.
    pub fn new(text: TextIdentity, credit: PrefillCredit) -> Self {
        Self {
            text,
            credit,
            nodes: BTreeMap::new(),
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
            role: hello.role,
            hello,
            certified,
            report,
            draining: false,
            legs: BTreeSet::new(),
            booked_blocks: 0,
            sequences: 0,
            unreported_blocks: 0,
            outstanding_tokens: 0,
            computing: 0,
            busy_until: None,
            backoff: BACKOFF_MIN,
        };
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
        }
        true
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
        let served = [Role::Prefill, Role::Decode]
            .into_iter()
            .filter(|role| node.serves(*role));
        self.last_seen.extend(served.map(|role| (role, now)));
        node.legs.into_iter().collect()
    }

    /// A decode node with room for `shape` now; `avoid` only if there is no other.
    pub fn choose_decode(&self, now: Instant, shape: &Shape, avoid: Option<&NodeId>) -> Option<LinkId> {
        least_loaded::choose(self.open(now, Role::Decode, shape).filter_map(|(link, node)| {
            // Every sequence that runs there may need another block before it ends.
            let left = node.free_blocks() - node.blocks_of(shape) - node.sequences as i64;
            let load = thousandths(node.sequences, node.hello.max_num_seqs as usize);
            (left >= 0).then(|| node.candidate(link, load, left, avoid))
        }))
    }

    /// A prefill node with credit for `shape` now; `avoid` only if there is no other.
    pub fn choose_prefill(&self, now: Instant, shape: &Shape, avoid: Option<&NodeId>) -> Option<LinkId> {
        let PrefillCredit {
            window_tokens,
            sharing_jobs,
        } = self.credit;
        least_loaded::choose(self.open(now, Role::Prefill, shape).filter_map(|(link, node)| {
            let left = node.free_blocks() - node.blocks_of(shape);
            let (ahead, tokens) = (node.outstanding_tokens, shape.most_tokens);
            let shares = node.computing < sharing_jobs && tokens * 2 <= ahead;
            let credit = ahead == 0 || shares || ahead + tokens <= window_tokens;
            let load = thousandths(ahead, window_tokens);
            (left >= 0 && credit).then(|| node.candidate(link, load, left, avoid))
        }))
    }

    /// Nodes of `role` that take jobs, could hold `shape`, and have free slots.
    fn open<'a>(&'a self, now: Instant, role: Role, shape: &'a Shape) -> impl Iterator<Item = (LinkId, &'a Node)> {
        let nodes = self.nodes.iter().map(|(link, node)| (*link, node));
        nodes.filter(move |(_, node)| {
            node.serves(role)
                && !node.draining
                && node.busy_until.is_none_or(|until| until <= now)
                && node.sequences + shape.held.sequences() <= node.hello.max_num_seqs as usize
                && node.could_hold(shape)
        })
    }

    /// Says what is too much if none of the nodes of `role` can ever hold `shape`, and there are some.
    pub fn too_large(&self, role: Role, shape: &Shape) -> Option<String> {
        let mut of_role = self.nodes.values().filter(|node| node.serves(role)).peekable();
        of_role.peek()?;
        let (mut tokens, mut slots) = (0, 0);
        for node in of_role {
            if node.could_hold(shape) {
                return None;
            }
            let pool = node.hello.total_blocks as usize * node.hello.layout.block_tokens as usize;
            tokens = tokens.max(pool.min(node.hello.max_seq_len as usize));
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
            .filter_map(|node| node.busy_until)
            .filter(|until| *until > now)
            .min()
    }

    /// Books a job. `outstanding_tokens`: prompt tokens the node will have to compute before its first token.
    pub fn book(&mut self, link: LinkId, request: RequestId, shape: &Shape, outstanding_tokens: usize) -> LegId {
        let id = LegId(self.next_leg);
        self.next_leg += 1;
        let node = self
            .nodes
            .get_mut(&link)
            .expect("a job is booked on a node that was just chosen");
        let (blocks, sequences) = (node.blocks_of(shape) as u32, shape.held.sequences());
        node.legs.insert(id);
        node.sequences += sequences;
        node.booked_blocks += blocks;
        node.unreported_blocks += i64::from(blocks);
        node.outstanding_tokens += outstanding_tokens;
        node.computing += usize::from(outstanding_tokens > 0);
        self.legs.insert(
            id,
            Leg {
                request,
                link,
                sent: false,
                taken: false,
                blocks,
                sequences,
                outstanding_tokens,
            },
        );
        id
    }

    /// The job of a leg is being sent; where to. `None` if the leg is over.
    pub fn send(&mut self, leg: LegId) -> Option<LinkId> {
        let booked = self.legs.get_mut(&leg)?;
        booked.sent = true;
        Some(booked.link)
    }

    /// A sequence of a leg holds `tokens` tokens, one more than before.
    pub fn grow(&mut self, leg: LegId, tokens: usize) {
        let Some(booked) = self.legs.get_mut(&leg) else { return };
        let Some(node) = self.nodes.get_mut(&booked.link) else {
            return;
        };
        let more = (node.blocks(tokens) - node.blocks(tokens.saturating_sub(1))) as u32;
        booked.blocks += more;
        node.booked_blocks += more;
    }

    /// A sequence of a leg, one of several, has ended with `tokens` tokens, of which `prompt` are the prompt's.
    pub fn shrink(&mut self, leg: LegId, prompt: usize, tokens: usize) {
        let Some(booked) = self.legs.get_mut(&leg) else { return };
        let Some(node) = self.nodes.get_mut(&booked.link) else {
            return;
        };
        let own = (node.blocks(tokens) - node.shared_blocks(prompt)) as u32;
        booked.blocks -= own;
        booked.sequences -= 1;
        node.booked_blocks -= own;
        node.unreported_blocks -= i64::from(own);
        node.sequences -= 1;
    }

    /// The prompt of a leg has been computed: the node may have the next one.
    pub fn computed(&mut self, leg: LegId) {
        let Some(booked) = self.legs.get_mut(&leg) else { return };
        booked.taken = true;
        let done = std::mem::take(&mut booked.outstanding_tokens);
        if let Some(node) = self.nodes.get_mut(&booked.link) {
            node.outstanding_tokens -= done;
            node.computing -= usize::from(done > 0);
        }
    }

    /// A leg is over; gives back what was booked. `None` if it was over before.
    pub fn end(&mut self, leg: LegId) -> Option<Leg> {
        let ended = self.legs.remove(&leg)?;
        if let Some(node) = self.nodes.get_mut(&ended.link) {
            node.legs.remove(&leg);
            node.booked_blocks -= ended.blocks;
            node.sequences -= ended.sequences;
            node.unreported_blocks -= i64::from(ended.blocks);
            node.outstanding_tokens -= ended.outstanding_tokens;
            node.computing -= usize::from(ended.outstanding_tokens > 0);
            if ended.taken {
                // What it held is free: the node's last word does not count any more.
                node.busy_until = None;
                node.backoff = BACKOFF_MIN;
            }
        }
        Some(ended)
    }

    /// A leg that is not over.
    pub fn leg(&self, leg: LegId) -> Option<&Leg> {
        self.legs.get(&leg)
    }

    /// The node at the other end of a link.
    pub fn hello(&self, link: LinkId) -> Option<&Hello> {
        self.nodes.get(&link).map(|node| &node.hello)
    }

    /// Panics if the books do not add up; all legs with their requests.
    #[cfg(test)]
    pub(crate) fn assert_consistent(&self) -> Vec<(LegId, RequestId)> {
        for (link, node) in &self.nodes {
            let legs: Vec<_> = self.legs.iter().filter(|(_, leg)| leg.link == *link).collect();
            assert_eq!(
                legs.iter().map(|(id, _)| **id).collect::<BTreeSet<_>>(),
                node.legs,
                "legs of {link:?}"
            );
            assert_eq!(
                legs.iter().map(|(_, leg)| leg.blocks).sum::<u32>(),
                node.booked_blocks,
                "blocks on {link:?}"
            );
            assert_eq!(
                legs.iter().map(|(_, leg)| leg.sequences).sum::<usize>(),
                node.sequences,
                "sequences on {link:?}"
            );
            let outstanding: usize = legs.iter().map(|(_, leg)| leg.outstanding_tokens).sum();
            let computing = legs.iter().filter(|(_, leg)| leg.outstanding_tokens > 0).count();
            let booked = (node.outstanding_tokens, node.computing);
            assert_eq!(booked, (outstanding, computing), "prompts on {link:?}");
        }
        assert!(
            self.legs.values().all(|leg| self.nodes.contains_key(&leg.link)),
            "a leg on no node"
        );
        self.legs.iter().map(|(id, leg)| (*id, leg.request)).collect()
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

    fn candidate(&self, link: LinkId, load: u64, left: i64, avoid: Option<&NodeId>) -> Candidate {
        let blocks_left = u64::try_from(left).unwrap_or(0);
        Candidate {
            link,
            avoided: avoid == Some(&self.hello.node),
            load,
            blocks_left,
        }
    }

    fn status(&self) -> NodeStatus {
        NodeStatus {
            node: self.hello.node.0.clone(),
            role: self.role,
            draining: self.draining,
            total_blocks: self.hello.total_blocks,
            free_blocks: self.report.free_blocks,
            cached_blocks: self.report.cached_blocks,
            booked_blocks: self.booked_blocks,
            jobs: self.legs.len() as u32,
            running: self.report.running,
            waiting: self.report.waiting,
            max_seq_len: self.hello.max_seq_len,
            pool_tokens: u64::from(self.hello.total_blocks) * u64::from(self.hello.layout.block_tokens),
            weights_hash: self.hello.model.weights_hash,
        }
    }
}

/// Blocks that a node could give away by its own word.
fn available(report: &LoadReport) -> i64 {
    i64::from(report.free_blocks) + i64::from(report.cached_blocks)
}

fn thousandths(part: usize, whole: usize) -> u64 {
    (part as u64 * 1000) / whole.max(1) as u64
}
