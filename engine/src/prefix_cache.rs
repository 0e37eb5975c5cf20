//! Which blocks hold which tokens: computed blocks that later sequences with the same beginning use again.
//!
//! A block is *indexed* once it is full and computed. What is indexed is a tree of *nodes*: a node is a block's worth of tokens
//! after those of its parent. Its name is a chained hash over everything its KV depends on ([`protocol::prefix`]). The
//! hash only finds candidates. A node is taken for another one if its parent **is the same node** and its
//! tokens and key are equal, so by induction from the first block on the whole prefix is: clients choose tokens, and
//! xxh3 does not withstand somebody who looks for collisions. The comparison costs a few words a block.
//!
//! Groups of layers ([`protocol::window::Groups`]) have trees of their own, and blocks of all of them are given away in one
//! order.
//!
//! Rules, which the audit checks:
//!
//! * The indexed blocks of a table are its first ones, and each one's node is the child of the one before it in that table.
//! * A cached block (an indexed one without a reference) can be given away. The one used longest ago goes first, of
//!   those used last at the same time the one that is farthest from the beginning.
//! * Where everything of a sequence is kept, whoever refers to a block refers to those before it too. So by the rule above a
//!   prefix is forgotten from its end on, no indexed block is ever unreachable, and the beginning that many prompts share
//!   goes last.
//! * Where blocks leave a window ([`protocol::window`]), a block may go before those that continue it. Its node stays, without
//!   a block, as long as it has children: it proves what their prefix is. A sequence needs the blocks of its window only, so
//!   they are of use without those before them. The number of nodes is bounded ([`PrefixCache::make_room`]).
//! * What a sequence that failed has computed is not kept, or whatever spoilt it would spoil all that begin alike. Only
//!   blocks that others refer to, or that cached blocks continue, stay.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use protocol::prefix::{BlockName, BlockNames, wire_name};

use crate::event::CacheEvent;
use crate::plan::BlockId;

mod audit;

/// Most nodes for each block of the pool. A node takes about as many bytes as its tokens, a block thousands of times more.
const NODES_PER_BLOCK: usize = 32;

/// A place in the tree. Valid as long as somebody refers to its block, or to that of a descendant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NodeId(u32);

/// What is known of a node.
#[derive(Clone, Copy, Debug)]
struct Node {
    name: BlockName,
    /// Which group of layers its KV is of.
    group: u32,
    key: u64,
    /// The one before it; `None` for the first one of a sequence.
    parent: Option<NodeId>,
    /// Nodes before it.
    depth: u32,
    /// Nodes whose parent it is.
    children: u32,
    /// Where its KV is.
    block: Option<BlockId>,
    /// Its block is referred to by no table.
    idle: bool,
    /// When it became idle: a count of releases.
    last_use: u64,
}

/// A full block as one looks for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) parent: Option<NodeId>,
    pub(crate) group: u32,
    pub(crate) key: u64,
    pub(crate) tokens: &'a [u32],
}

/// What the index says about a block one looks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// This node is equal.
    Node(NodeId),
    /// There is none.
    Nothing,
    /// Another node has its name.
    Collision,
}

/// The index over all blocks of a pool.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    block_tokens: usize,
    told: u32,
    /// By block.
    nodes_of: Vec<Option<NodeId>>,
    nodes: Vec<Option<Node>>,
    /// Places of `nodes` that are free.
    unused: Vec<NodeId>,
    /// Tokens of the nodes: `block_tokens` for each.
    tokens: Vec<u32>,
    index: BTreeMap<BlockName, NodeId>,
    /// What can be given away, in this order.
    idle: BTreeSet<(u64, Reverse<u32>, BlockId)>,
    evictions: u64,
    names: BlockNames,
    /// What nobody has been told yet: as much as there are blocks, at most.
    changes: Vec<CacheEvent>,
    /// There was more.
    overflown: bool,
}

impl PrefixCache {
    /// An empty index for `total` blocks of `block_tokens` tokens. Others are told of the group of layers `told`.
    pub(crate) fn new(total: usize, block_tokens: usize, told: usize) -> Self {
        Self {
            block_tokens,
            told: told as u32,
            nodes_of: vec![None; total],
            nodes: Vec::new(),
            unused: Vec::new(),
            tokens: Vec::new(),
            index: BTreeMap::new(),
            idle: BTreeSet::new(),
            evictions: 0,
            names: BlockNames::default(),
            changes: Vec::new(),
            overflown: false,
        }
    }

    /// Remembers a change in the group that others are told of: they know by it what a prompt finds here, unless blocks of other
    /// groups have gone before.
    fn note(&mut self, group: u32, event: CacheEvent) {
        if group != self.told {
            return;
        }
        if self.changes.len() < self.nodes_of.len() {
            self.changes.push(event);
        } else {
            self.overflown = true;
        }
    }

    /// Whether anything has changed since [`PrefixCache::take_changes`].
    pub(crate) fn has_changes(&self) -> bool {
        !self.changes.is_empty()
    }

    /// Appends what has changed, in order. False if there was more than is remembered.
    pub(crate) fn take_changes(&mut self, changes: &mut Vec<CacheEvent>) -> bool {
        changes.append(&mut self.changes);
        !std::mem::take(&mut self.overflown)
    }

    /// The names of all indexed blocks of the group that others are told of, on the wire.
    pub(crate) fn wire_names(&self) -> impl Iterator<Item = u64> {
        let told = |node: &Node| node.group == self.told && node.block.is_some();
        let nodes = self.nodes.iter().flatten().filter(move |node| told(node));
        nodes.map(|node| wire_name(node.name))
    }

    /// Indexed blocks without a reference.
    pub(crate) fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Blocks given away since the start.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions
    }

    pub(crate) fn is_indexed(&self, block: BlockId) -> bool {
        self.node_of(block).is_some()
    }

    /// The node of an indexed block.
    pub(crate) fn node_of(&self, block: BlockId) -> Option<NodeId> {
        self.nodes_of.get(block.0 as usize).copied().flatten()
    }

    /// Where a node's KV is, if it is somewhere.
    pub(crate) fn block_of(&self, node: NodeId) -> Option<BlockId> {
        self.get(node)?.block
    }

    /// The nodes before the node of a block, the nearest first.
    pub(crate) fn before(&self, block: BlockId) -> impl Iterator<Item = NodeId> {
        let parent = |node: NodeId| self.get(node).and_then(|node| node.parent);
        std::iter::successors(self.node_of(block).and_then(parent), move |node| parent(*node))
    }

    /// Whether the `count` nodes from the first one to `last` have the first tokens of `tokens`, and this key.
    pub(crate) fn holds(&self, last: Option<NodeId>, count: usize, key: u64, tokens: &[u32]) -> bool {
        let (mut at, mut count) = (last, count);
        while let Some(id) = at {
            let Some(node) = self.get(id).filter(|_| count > 0) else {
                return false;
            };
            count -= 1;
            let start = count * self.block_tokens;
            if node.key != key || tokens.get(start..start + self.block_tokens) != Some(self.tokens_of(id)) {
                return false;
            }
            at = node.parent;
        }
        count == 0
    }

    /// The name of a node; 0 where there is none.
    pub(crate) fn name_of(&self, node: NodeId) -> BlockName {
        self.get(node).map_or(0, |node| node.name)
    }

    /// The name of a block after the one named `before`; `None`: of a first block.
    pub(crate) fn name(&mut self, before: Option<BlockName>, wanted: &Wanted<'_>) -> BlockName {
        // First names of groups differ as those after different blocks do. Others know the name that follows 0.
        let first = if wanted.group == self.told {
            0
        } else {
            BlockName::from(wanted.group) + 1
        };
        self.names.next(before.unwrap_or(first), wanted.key, wanted.tokens)
    }

    /// Looks for a node by its name.
    pub(crate) fn find(&self, name: BlockName, wanted: &Wanted<'_>) -> Found {
        let Some(id) = self.index.get(&name) else {
            return Found::Nothing;
        };
        let same = self
            .get(*id)
            .is_some_and(|node| (node.parent, node.group, node.key) == (wanted.parent, wanted.group, wanted.key))
            && self.tokens_of(*id) == wanted.tokens;
        if same { Found::Node(*id) } else { Found::Collision }
    }

    /// Gives cached blocks up until `count` nodes can be made. They are the caller's. False if that does not suffice: nothing
    /// more should be indexed then.
    pub(crate) fn make_room(&mut self, count: usize, free: &mut Vec<BlockId>) -> bool {
        let most = self
            .nodes_of
            .len()
            .saturating_mul(NODES_PER_BLOCK)
            .min(u32::MAX as usize);
        while self.index.len().saturating_add(count) > most {
            let Some(block) = self.evict() else { return false };
            free.push(block);
        }
        true
    }

    /// Makes a node. Its parent is one, its name is not taken. It has to get a block or a child before anything is
    /// forgotten.
    pub(crate) fn insert(&mut self, name: BlockName, wanted: &Wanted<'_>) -> NodeId {
        let parent = wanted.parent.and_then(|parent| self.get_mut(parent));
        let depth = parent.map_or(0, |parent| {
            parent.children += 1;
            parent.depth + 1
        });
        let id = self.unused.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            self.tokens.resize(self.nodes.len() * self.block_tokens, 0);
            // `make_room` keeps their number within 32 bits.
            NodeId((self.nodes.len() - 1) as u32)
        });
        let start = id.0 as usize * self.block_tokens;
        self.tokens[start..start + self.block_tokens].copy_from_slice(wanted.tokens);
        self.nodes[id.0 as usize] = Some(Node {
            name,
            group: wanted.group,
            key: wanted.key,
            parent: wanted.parent,
            depth,
            children: 0,
            block: None,
            idle: false,
            last_use: 0,
        });
        self.index.insert(name, id);
        id
    }

    /// The KV of a node without a block is in this one, to which somebody refers.
    pub(crate) fn fill(&mut self, id: NodeId, block: BlockId) {
        if let Some(node) = self.get_mut(id) {
            node.block = Some(block);
            let (name, group) = (node.name, node.group);
            self.nodes_of[block.0 as usize] = Some(id);
            self.note(group, CacheEvent::Added(wire_name(name)));
        }
    }

    /// Somebody refers to an indexed block to which nobody did.
    pub(crate) fn awake(&mut self, block: BlockId) {
        if let Some(node) = self.node_of(block).and_then(|id| self.get_mut(id)) {
            node.idle = false;
            let place = (node.last_use, Reverse(node.depth), block);
            self.idle.remove(&place);
        }
    }

    /// Nobody refers to an indexed block any more since `now`.
    pub(crate) fn fall_idle(&mut self, block: BlockId, now: u64) {
        if let Some(node) = self.node_of(block).and_then(|id| self.get_mut(id)) {
            (node.idle, node.last_use) = (true, now);
            let place = (now, Reverse(node.depth), block);
            self.idle.insert(place);
        }
    }

    /// Forgets the block that was used longest ago; it is the caller's now.
    pub(crate) fn evict(&mut self) -> Option<BlockId> {
        let (_, _, block) = self.idle.pop_first()?;
        self.evictions += 1;
        self.empty(block);
        Some(block)
    }

    /// Forgets an indexed block to which nobody refers any more and which has not fallen idle: it is free then. False, and
    /// nothing happens, if other blocks continue it.
    pub(crate) fn forget(&mut self, block: BlockId) -> bool {
        let node = self.node_of(block).and_then(|id| self.get(id));
        let last = node.is_some_and(|node| node.children == 0);
        if last {
            self.empty(block);
        }
        last
    }

    /// Forgets the block of a node if it is cached and nothing continues it; it is the caller's now.
    pub(crate) fn forget_idle(&mut self, id: NodeId) -> Option<BlockId> {
        let node = self.get(id).filter(|node| node.idle && node.children == 0)?;
        let (block, place) = (node.block?, (node.last_use, Reverse(node.depth)));
        self.idle.remove(&(place.0, place.1, block));
        self.empty(block);
        Some(block)
    }

    /// Whether a node is there.
    pub(crate) fn is_alive(&self, id: NodeId) -> bool {
        self.get(id).is_some()
    }

    /// Takes the block from its node.
    fn empty(&mut self, block: BlockId) {
        let Some(id) = self.nodes_of[block.0 as usize].take() else {
            return;
        };
        if let Some(node) = self.get_mut(id) {
            (node.block, node.idle) = (None, false);
            let (name, group) = (node.name, node.group);
            self.note(group, CacheEvent::Removed(wire_name(name)));
        }
        self.prune(id);
    }

    /// Takes out a node that has neither a block nor children, and those before it of which the same is true then.
    pub(crate) fn prune(&mut self, last: NodeId) {
        let mut at = Some(last);
        while let Some(id) = at {
            let bare = |node: &mut Node| node.block.is_none() && node.children == 0;
            let Some(node) = self.nodes.get_mut(id.0 as usize).and_then(|node| node.take_if(bare)) else {
                return;
            };
            self.index.remove(&node.name);
            self.unused.push(id);
            if let Some(parent) = node.parent.and_then(|parent| self.get_mut(parent)) {
                parent.children -= 1;
            }
            at = node.parent;
        }
    }

    fn get(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.0 as usize)?.as_ref()
    }

    fn get_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(id.0 as usize)?.as_mut()
    }

    fn tokens_of(&self, id: NodeId) -> &[u32] {
        let start = id.0 as usize * self.block_tokens;
        &self.tokens[start..start + self.block_tokens]
    }
}
