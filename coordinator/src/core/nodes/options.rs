//! The nodes that could take a request, and what it would cost there.

use std::time::Instant;

use protocol::ids::{NodeId, Role};

use super::cost::StepTimes;
use super::{LinkId, Node, Nodes, Shape, Work};
use crate::core::prefix_index::Matches;
use crate::core::routing::{Candidate, DecodeOption, Options, PrefillOption};

/// Steps for which a sequence that joins a decode node is counted: how long an answer will be is not known.
const FORESEEN_STEPS: usize = 32;

/// Microseconds that are counted for a reservation, there and back, and for the way of the KV's commit.
const GRANT_US: u64 = 1_000;

/// What is to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// What it takes on a prefill node; `None` if none is wanted.
    pub prefill: Option<&'a Shape>,
    /// What it takes on a decode node; `None` if none is wanted.
    pub decode: Option<&'a Shape>,
    /// Steps that it can take at most on the decode node.
    pub most_steps: usize,
    /// What nodes have of the prompt.
    pub cached: &'a Matches,
    /// The node where it has failed before: only if there is no other.
    pub avoid: Option<&'a NodeId>,
}

impl Nodes {
    /// Every node that could take the request, now or once it has room, with the costs.
    pub fn options(&self, now: Instant, wanted: &Wanted<'_>) -> Options {
        let mut options = Options::default();
        if let Some(shape) = wanted.prefill {
            let of_role = self.open(now, Role::Prefill, shape);
            options.prefill = of_role
                .map(|(link, node)| self.prefill_option(link, node, shape, wanted))
                .collect();
        }
        if let Some(shape) = wanted.decode {
            let of_role = self.open(now, Role::Decode, shape);
            options.decode = of_role
                .map(|(link, node)| self.decode_option(link, node, shape, wanted))
                .collect();
        }
        for from in &options.prefill {
            let transfers = &self.nodes[&from.node.link].transfers;
            options.transfer_us.extend(options.decode.iter().map(|to| {
                let pair = transfers.get(&to.node.link).copied().unwrap_or_default();
                pair.predict(to.missing_bytes)
            }));
        }
        options
    }

    fn prefill_option(&self, link: LinkId, node: &Node, shape: &Shape, wanted: &Wanted<'_>) -> PrefillOption {
        let left = node.free_blocks() - node.blocks_of(shape, self.limits.chunk_tokens);
        let work = self.work(node, node.usable(wanted.cached.blocks(link), shape), shape.prompt);
        let (load, credit) = (
            thousandths(node.outstanding_tokens, self.credit.window_tokens),
            self.has_credit(node, work),
        );
        PrefillOption {
            cached_tokens: shape.prompt - work.tokens,
            node: node.candidate(link, load, left, credit, wanted.avoid),
            queue_us: node.queue.us(&self.times(node)),
            work,
        }
    }

    /// True if a node may be sent so much more to compute: little is sent ahead, so that requests wait where another node can
    /// still be chosen.
    fn has_credit(&self, node: &Node, work: Work) -> bool {
        let (ahead, tokens) = (node.outstanding_tokens, work.tokens);
        let shares = node.computing < self.credit.sharing_jobs && tokens * 2 <= ahead;
        ahead == 0 || shares || ahead + tokens <= self.credit.window_tokens
    }

    fn decode_option(&self, link: LinkId, node: &Node, shape: &Shape, wanted: &Wanted<'_>) -> DecodeOption {
        // Every sequence that runs there may need another block before it ends.
        let left = node.free_blocks() - node.blocks_of(shape, 1) - node.sequences as i64;
        let load = thousandths(node.sequences, node.hello.max_num_seqs as usize);
        let (times, running) = (self.times(node), node.generating());
        let steps = wanted.most_steps.min(FORESEEN_STEPS);
        let sequences = shape.held.sequences();
        let has = wanted.cached.blocks(link);
        let missing = node.missing_blocks(shape.prompt, has);
        let (cached, tokens) = (node.usable(has, shape), shape.tokens());
        let work = self.work(node, cached, tokens);
        DecodeOption {
            cached_blocks: has,
            node: node.candidate(link, load, left, true, wanted.avoid),
            missing_bytes: missing.saturating_mul(node.hello.layout.block_bytes() as u64),
            join_us: times.join_us((sequences, shape.prompt), running, steps),
            queue_us: node.queue.us(&times),
            grant_us: GRANT_US,
            has_credit: self.has_credit(node, work),
            work,
            beside: times.beside((cached, tokens - cached), running, &self.limits),
        }
    }

    /// What computing `tokens` tokens of which `cached` are cached takes on a node by itself.
    fn work(&self, node: &Node, cached: usize, tokens: usize) -> Work {
        let rows = tokens - cached;
        Work {
            tokens: rows,
            us: self.times(node).prompt_us(cached, rows, &self.limits),
        }
    }

    fn times(&self, node: &Node) -> StepTimes {
        node.times.or(&self.measured)
    }

    /// Nodes of `role` that take jobs, could hold `shape`, and have free slots.
    fn open<'a>(&'a self, now: Instant, role: Role, shape: &'a Shape) -> impl Iterator<Item = (LinkId, &'a Node)> {
        let (nodes, fit) = (self.nodes.iter().map(|(link, node)| (*link, node)), self.fit(now, role));
        nodes.filter(move |(_, node)| {
            fit(node)
                && node.busy_until.is_none_or(|until| until <= now)
                && node.sequences + shape.held.sequences() <= node.hello.max_num_seqs as usize
                && node.could_hold(shape, self.limits.chunk_tokens)
        })
    }
}

impl Node {
    /// Tokens of a prompt that need not be computed if so many blocks are cached: its last row always is.
    fn usable(&self, blocks: usize, shape: &Shape) -> usize {
        let block_tokens = self.hello.layout.block_tokens as usize;
        blocks.min(shape.prompt.saturating_sub(1) / block_tokens) * block_tokens
    }

    fn candidate(&self, link: LinkId, load: u64, left: i64, credit: bool, avoid: Option<&NodeId>) -> Candidate {
        Candidate {
            link,
            name: self.name.clone(),
            both: self.role == Role::Both,
            avoided: avoid.is_some_and(|avoid| *avoid.0 == *self.name),
            free: left >= 0 && credit,
            load,
            blocks_left: u64::try_from(left).unwrap_or(0),
        }
    }
}

fn thousandths(part: usize, whole: usize) -> u64 {
    (part as u64 * 1000) / whole.max(1) as u64
}
