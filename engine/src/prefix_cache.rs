//! Which blocks hold which tokens: computed blocks that later sequences with the same beginning use again.
//!
//! A block is *indexed* once it is full and computed. Its name is a chained hash over everything its KV depends on
//! ([`protocol::prefix`]). The hash only finds candidates. A block is taken for another one if the block before it **is the same block** and its
//! tokens and key are equal, so by induction from the first block on the whole prefix is: clients choose tokens, and
//! xxh3 does not withstand somebody who looks for collisions. The comparison costs a few words a block.
//!
//! Rules, which the audit checks:
//!
//! * The indexed blocks of a table are its first ones, and each one's *parent* is the block before it in that table. So
//!   whoever refers to a block refers to its parent too, and an indexed block without a reference (*cached*) has no
//!   descendant with one: every cached block can be given away, if its descendants are first.
//! * Only *leaves* are given away: cached blocks that are no other block's parent. Of these the one used longest ago goes
//!   first. Thus a prefix is forgotten from its end on, no indexed block is ever unreachable, and the beginning that
//!   many prompts share goes last.
//! * What a sequence that failed has computed is not kept, or whatever spoilt it would spoil all that begin alike. Only
//!   blocks that others refer to, or that cached blocks continue, stay.

use std::collections::{BTreeMap, BTreeSet};

use protocol::prefix::{BlockName, BlockNames, wire_name};

use crate::event::CacheEvent;
use crate::plan::BlockId;

/// What is known of an indexed block.
#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: BlockName,
    key: u64,
    /// The block before it; `None` for the first one of a sequence.
    parent: Option<BlockId>,
    /// Indexed blocks whose parent it is.
    children: u32,
    /// Referred to by no table.
    idle: bool,
    /// When it became idle: a count of releases.
    last_use: u64,
}

/// A full block as one looks for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) parent: Option<BlockId>,
    pub(crate) key: u64,
    pub(crate) tokens: &'a [u32],
}

/// What the index says about a block one looks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// This one is equal.
    Block(BlockId),
    /// There is none.
    Nothing,
    /// Another block has its hash.
    Collision,
}

/// The index over all blocks of a pool.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    block_tokens: usize,
    /// By block.
    entries: Vec<Option<Entry>>,
    /// Tokens of the indexed blocks: `block_tokens` for each block.
    tokens: Vec<u32>,
    index: BTreeMap<BlockName, BlockId>,
    /// What can be given away now, longest unused first.
    leaves: BTreeSet<(u64, BlockId)>,
    idle: usize,
    evictions: u64,
    names: BlockNames,
    /// What nobody has been told yet: as much as there are blocks, at most.
    changes: Vec<CacheEvent>,
    /// There was more.
    overflown: bool,
}

impl PrefixCache {
    /// An empty index for `total` blocks of `block_tokens` tokens.
    pub(crate) fn new(total: usize, block_tokens: usize) -> Self {
        Self {
            block_tokens,
            entries: vec![None; total],
            tokens: vec![0; total * block_tokens],
            index: BTreeMap::new(),
            leaves: BTreeSet::new(),
            idle: 0,
            evictions: 0,
            names: BlockNames::default(),
            changes: Vec::new(),
            overflown: false,
        }
    }

    fn note(&mut self, event: CacheEvent) {
        if self.changes.len() < self.entries.len() {
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

    /// The names of all indexed blocks, on the wire.
    pub(crate) fn wire_names(&self) -> impl Iterator<Item = u64> {
        self.index.keys().map(|name| wire_name(*name))
    }

    /// Indexed blocks without a reference.
    pub(crate) fn idle(&self) -> usize {
        self.idle
    }

    /// Blocks given away since the start.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions
    }

    pub(crate) fn is_indexed(&self, block: BlockId) -> bool {
        self.entries[block.0 as usize].is_some()
    }

    /// Whether a block is indexed with these tokens and this key.
    pub(crate) fn holds(&self, block: BlockId, key: u64, tokens: &[u32]) -> bool {
        let entry = self.entries[block.0 as usize];
        entry.is_some_and(|entry| entry.key == key) && self.tokens_of(block) == tokens
    }

    /// The name of an indexed block; 0 for others.
    pub(crate) fn name_of(&self, block: BlockId) -> BlockName {
        self.entries[block.0 as usize].map_or(0, |entry| entry.hash)
    }

    /// The name of a block after the one named `before` (0 for none).
    pub(crate) fn name(&mut self, before: BlockName, wanted: &Wanted<'_>) -> BlockName {
        self.names.next(before, wanted.key, wanted.tokens)
    }

    /// Looks for a block by its name.
    pub(crate) fn find(&self, hash: BlockName, wanted: &Wanted<'_>) -> Found {
        let Some(block) = self.index.get(&hash) else {
            return Found::Nothing;
        };
        let same = self.entries[block.0 as usize]
            .is_some_and(|entry| entry.parent == wanted.parent && entry.key == wanted.key)
            && self.tokens_of(*block) == wanted.tokens;
        if same { Found::Block(*block) } else { Found::Collision }
    }

    /// Indexes a block that somebody refers to. Its parent is indexed, its name is not taken.
    pub(crate) fn insert(&mut self, block: BlockId, hash: BlockName, wanted: &Wanted<'_>) {
        let start = block.0 as usize * self.block_tokens;
        self.tokens[start..start + self.block_tokens].copy_from_slice(wanted.tokens);
        self.entries[block.0 as usize] = Some(Entry {
            hash,
            key: wanted.key,
            parent: wanted.parent,
            children: 0,
            idle: false,
            last_use: 0,
        });
        self.index.insert(hash, block);
        self.note(CacheEvent::Added(wire_name(hash)));
        if let Some(parent) = wanted.parent.and_then(|parent| self.entry(parent)) {
            parent.children += 1;
        }
    }

    /// Somebody refers to an indexed block to which nobody did.
    pub(crate) fn awake(&mut self, block: BlockId) {
        if let Some(entry) = self.entry(block) {
            entry.idle = false;
            let last_use = entry.last_use;
            self.idle -= 1;
            self.leaves.remove(&(last_use, block));
        }
    }

    /// Nobody refers to an indexed block any more since `now`.
    pub(crate) fn fall_idle(&mut self, block: BlockId, now: u64) {
        if let Some(entry) = self.entry(block) {
            (entry.idle, entry.last_use) = (true, now);
            let leaf = entry.children == 0;
            self.idle += 1;
            if leaf {
                self.leaves.insert((now, block));
            }
        }
    }

    /// Forgets the leaf that was used longest ago; it is the caller's now.
    pub(crate) fn evict(&mut self) -> Option<BlockId> {
        let (_, block) = self.leaves.pop_first()?;
        let entry = self.entries[block.0 as usize].take()?;
        self.idle -= 1;
        self.evictions += 1;
        self.detach(&entry);
        Some(block)
    }

    /// Forgets an indexed block to which nobody refers any more and which has not fallen idle: it is free then. False, and
    /// nothing happens, if other blocks continue it.
    pub(crate) fn forget(&mut self, block: BlockId) -> bool {
        let Some(entry) = self.entries[block.0 as usize].take_if(|entry| entry.children == 0) else {
            return false;
        };
        self.detach(&entry);
        true
    }

    /// Takes what was an entry without children out of the index.
    fn detach(&mut self, entry: &Entry) {
        self.index.remove(&entry.hash);
        self.note(CacheEvent::Removed(wire_name(entry.hash)));
        if let Some(parent) = entry.parent
            && let Some(above) = self.entry(parent)
        {
            above.children -= 1;
            if above.idle && above.children == 0 {
                let last_use = above.last_use;
                self.leaves.insert((last_use, parent));
            }
        }
    }

    fn entry(&mut self, block: BlockId) -> Option<&mut Entry> {
        self.entries[block.0 as usize].as_mut()
    }

    fn tokens_of(&self, block: BlockId) -> &[u32] {
        let start = block.0 as usize * self.block_tokens;
        &self.tokens[start..start + self.block_tokens]
    }

    /// Compares the index with the reference counts, by block.
    pub(crate) fn audit(&self, ref_counts: &[u32], problems: &mut Vec<String>) {
        let mut children = vec![0; self.entries.len()];
        let (mut idle, mut indexed) = (0, 0);
        for (index, entry) in self.entries.iter().enumerate() {
            let Some(entry) = entry else { continue };
            let block = BlockId(index as u32);
            indexed += 1;
            idle += usize::from(entry.idle);
            if self.index.get(&entry.hash) != Some(&block) {
                problems.push(format!("block {index} is not found under its hash"));
            }
            if entry.idle != (ref_counts[index] == 0) {
                problems.push(format!(
                    "block {index} has {} references, idle is {}",
                    ref_counts[index], entry.idle
                ));
            }
            let Some(parent) = entry.parent else { continue };
            children[parent.0 as usize] += 1;
            if !self.is_indexed(parent) || ref_counts[parent.0 as usize] < ref_counts[index] {
                problems.push(format!(
                    "block {index} follows block {}, which is not indexed or has fewer references",
                    parent.0
                ));
            }
        }
        for (index, entry) in self.entries.iter().enumerate() {
            let Some(entry) = entry else { continue };
            let leaf = entry.idle && entry.children == 0;
            let listed = self.leaves.contains(&(entry.last_use, BlockId(index as u32)));
            if entry.children != children[index] || leaf != listed {
                problems.push(format!(
                    "block {index} has {} children and counts {}; listed as a leaf is {listed}",
                    children[index], entry.children
                ));
            }
        }
        if idle != self.idle || indexed != self.index.len() || self.leaves.len() > idle {
            problems.push(format!(
                "{indexed} blocks are indexed, {idle} of them idle; counted are {} and {}, with {} leaves",
                self.index.len(),
                self.idle,
                self.leaves.len()
            ));
        }
    }
}
