//! The KV blocks as names: which are free, which are kept for reuse, and how many tables name each of the others. Bytes
//! are the model's business.

use std::ops::Range;

use protocol::window::Kept;
use thiserror::Error;

use crate::event::CacheEvent;
use crate::plan::BlockId;
use crate::prefix_cache::{Found, NodeId, PrefixCache};
use table::GroupTable;

mod attach;
mod audit;
mod table;
#[cfg(test)]
mod tests;

pub(crate) use table::BlockTable;

/// What a sequence's blocks are to hold, in every group of layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Content<'a> {
    pub(crate) tokens: &'a [u32],
    /// What else the KV depends on.
    pub(crate) key: u64,
}

/// Fewer blocks can be had than were asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{needed} blocks are needed, {available} can be had")]
pub(crate) struct NoBlocks {
    pub(crate) needed: usize,
    pub(crate) available: usize,
}

/// Owner of all blocks of a pool. Any of them may serve any group of layers.
#[derive(Debug)]
pub(crate) struct BlockManager {
    block_tokens: usize,
    kept: Kept,
    /// Used as a stack: the block freed last is the one most likely to be in a cache of the processor.
    free: Vec<BlockId>,
    /// How many tables name each block.
    ref_counts: Vec<u32>,
    /// `None`: blocks are never used again.
    cache: Option<PrefixCache>,
    /// Times that blocks were given back since the start: the cache's notion of time.
    releases: u64,
}

impl BlockManager {
    /// A pool of `total` blocks, all free; block 0 is handed out first. `total` fits into 32 bits (`EngineLimits`).
    pub(crate) fn new(total: usize, block_tokens: usize, kept: Kept, prefix_cache: bool) -> Self {
        Self {
            block_tokens,
            kept,
            free: (0..total as u32).rev().map(BlockId).collect(),
            ref_counts: vec![0; total],
            cache: prefix_cache.then(|| PrefixCache::new(total, block_tokens, kept.told_group())),
            releases: 0,
        }
    }

    pub(crate) fn total(&self) -> usize {
        self.ref_counts.len()
    }

    /// Blocks that nobody uses and that hold nothing of use.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that nobody uses, kept in case somebody will.
    pub(crate) fn cached(&self) -> usize {
        self.cache.as_ref().map_or(0, PrefixCache::idle)
    }

    /// Blocks that can be given away.
    pub(crate) fn available(&self) -> usize {
        self.free() + self.cached()
    }

    pub(crate) fn owned(&self) -> usize {
        self.total() - self.available()
    }

    /// Cached blocks that were given away since the start.
    pub(crate) fn evictions(&self) -> u64 {
        self.cache.as_ref().map_or(0, PrefixCache::evictions)
    }

    pub(crate) fn has_cache(&self) -> bool {
        self.cache.is_some()
    }

    pub(crate) fn cache(&self) -> Option<&PrefixCache> {
        self.cache.as_ref()
    }

    /// Appends what has changed in the prefix cache. False if there was more than is remembered.
    pub(crate) fn take_cache_changes(&mut self, changes: &mut Vec<CacheEvent>) -> bool {
        self.cache.as_mut().is_none_or(|cache| cache.take_changes(changes))
    }

    /// Appends `count` places to `table`, or changes nothing. Each gets a block for every group that has not let go of it: free
    /// ones first, then cached ones, which are forgotten.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, count: usize) -> Result<(), NoBlocks> {
        if table.groups.is_empty() {
            table.groups.resize_with(self.kept.count(), GroupTable::default);
        }
        let places = table.places()..table.places() + count;
        let of_group = |group: &GroupTable| places.end - places.end.min(group.gone.max(places.start));
        let (available, needed) = (self.available(), table.groups.iter().map(of_group).sum());
        if needed > available {
            return Err(NoBlocks { needed, available });
        }
        for place in places {
            for group in 0..table.groups.len() {
                let block = if place < table.groups[group].gone {
                    None
                } else {
                    self.take()
                };
                table.blocks.push(block.unwrap_or(BlockId::NONE));
            }
        }
        Ok(())
    }

    /// A block that can be given away, with a reference.
    fn take(&mut self) -> Option<BlockId> {
        let evict = || self.cache.as_mut().and_then(PrefixCache::evict);
        let block = self.free.pop().or_else(evict)?;
        self.ref_counts[block.0 as usize] += 1;
        Some(block)
    }

    /// An empty table of a sequence that needs nothing of what lies before the row of position `computed`.
    pub(crate) fn without(&self, computed: usize) -> BlockTable {
        let groups = self.kept.groups();
        BlockTable {
            groups: groups
                .map(|kept| GroupTable::without(kept.first_block(computed)))
                .collect(),
            ..BlockTable::default()
        }
    }

    /// Whether the indexed blocks of a table hold the beginning of `content`.
    pub(crate) fn holds(&self, table: &BlockTable, content: &Content<'_>) -> bool {
        let cache = self.cache.as_ref();
        table.groups.iter().all(|group| {
            let last = group.tail.map(|(node, _)| node);
            let held = |cache: &PrefixCache| cache.holds(last, group.indexed, content.key, content.tokens);
            group.indexed == 0 || cache.is_some_and(held)
        })
    }

    /// Indexes the blocks of a table that are full, the first `computed` tokens of `content` being computed. Where another
    /// block is indexed that holds the same, the first one to be computed stays; with `adopt` the table then refers to
    /// that one instead of its own, which is free (its bytes are the same), otherwise the rest of the table stays out.
    pub(crate) fn publish(&mut self, table: &mut BlockTable, content: &Content<'_>, computed: usize, adopt: bool) {
        let full = computed / self.block_tokens;
        for group in 0..table.groups.len() {
            self.publish_group(table, group, content, (full, adopt));
        }
    }

    fn publish_group(
        &mut self,
        table: &mut BlockTable,
        group: usize,
        content: &Content<'_>,
        (full, adopt): (usize, bool),
    ) {
        let Some(cache) = &mut self.cache else { return };
        let of = &table.groups[group];
        if of.closed || full <= of.indexed {
            return;
        }
        let room = cache.make_room(full - of.indexed, &mut self.free);
        while room
            && let of = &table.groups[group]
            && of.indexed < full
            && let Some(wanted) = of.wanted(content, group, self.block_tokens)
        {
            let name = cache.name(of.name(), &wanted);
            let node = match cache.find(name, &wanted) {
                Found::Nothing => cache.insert(name, &wanted),
                Found::Node(node) => node,
                Found::Collision => break,
            };
            let place = of.indexed;
            let own = *table.at(group, place);
            match cache.block_of(node) {
                // What is gone here may be anywhere, or nowhere: what it held is known.
                _ if !own.is_some() => {}
                None => cache.fill(node, own),
                // A table that was forked from this one came first.
                Some(other) if other == own => {}
                Some(other) if adopt => {
                    refer(&mut self.ref_counts, cache, other);
                    *table.at(group, place) = other;
                    let count = &mut self.ref_counts[own.0 as usize];
                    *count -= 1;
                    if *count == 0 {
                        self.free.push(own);
                    }
                }
                Some(_) => break,
            }
            table.groups[group].extend_index(node, name);
        }
        // The table has no block that would keep the last node.
        let of = &mut table.groups[group];
        if of.gone > 0 && of.indexed <= of.gone {
            if let Some((node, _)) = of.tail {
                cache.prune(node);
            }
            of.close();
        }
    }

    /// Lets go of the blocks of a table that the row of position `computed`, and all later ones, do not see.
    pub(crate) fn slide(&mut self, table: &mut BlockTable, computed: usize) {
        for group in 0..table.groups.len() {
            let first = self.kept.group(group).first_block(computed);
            let of = &mut table.groups[group];
            if first <= of.gone {
                continue;
            }
            self.releases += 1;
            if first >= of.indexed {
                // The last indexed block goes too.
                of.close();
            }
            let gone = std::mem::replace(&mut of.gone, first);
            for place in gone..first {
                let block = std::mem::replace(table.at(group, place), BlockId::NONE);
                self.let_go(block, false);
            }
        }
    }

    /// A table of the first `count` places of `table`, whose blocks both name from now on. Neither may write one of them: see
    /// [`BlockManager::own_copies`].
    pub(crate) fn fork(&mut self, table: &BlockTable, count: usize) -> BlockTable {
        let blocks = table.blocks[..count * table.groups.len()].to_vec();
        for block in blocks.iter().filter(|block| block.is_some()) {
            self.ref_counts[block.0 as usize] += 1;
        }
        let mut forked = BlockTable {
            blocks,
            groups: table.groups.clone(),
            spoilt: false,
        };
        let cache = self.cache.as_ref();
        for group in 0..forked.groups.len() {
            let indexed = forked.groups[group].indexed.min(count);
            let last = indexed.checked_sub(1).map(|last| *forked.at(group, last));
            let node = last.and_then(|last| cache?.node_of(last));
            let of = &mut forked.groups[group];
            of.gone = of.gone.min(count);
            of.indexed = indexed;
            of.tail = node.and_then(|node| Some((node, cache?.name_of(node))));
            if indexed > 0 && of.tail.is_none() {
                of.close();
            }
        }
        forked
    }

    /// Whether a table names a block, by the books.
    pub(crate) fn is_referred_to(&self, block: BlockId) -> bool {
        self.ref_counts[block.0 as usize] > 0
    }

    /// Frees blocks that a table has: a fault that audits must show.
    #[cfg(test)]
    pub(crate) fn forget_references(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            self.ref_counts[block.0 as usize] = 0;
            self.free.push(*block);
        }
    }

    /// Whether other tables name a block too.
    pub(crate) fn is_shared(&self, block: BlockId) -> bool {
        block.is_some() && self.ref_counts[block.0 as usize] > 1
    }

    /// How many of the blocks in a place of a table others name too.
    pub(crate) fn shared_in(&self, table: &BlockTable, place: usize) -> usize {
        let count = table.groups.len();
        let blocks = table.blocks.iter().skip(place * count).take(count);
        blocks.filter(|block| self.is_shared(**block)).count()
    }

    /// Puts new blocks in a place of a table where it has shared ones, and tells `copy` each old one with the new one: the bytes
    /// are to be copied. Nothing happens in a place that the table does not have yet.
    pub(crate) fn own_copies(
        &mut self,
        table: &mut BlockTable,
        place: usize,
        mut copy: impl FnMut(BlockId, BlockId),
    ) -> Result<(), NoBlocks> {
        let (available, needed) = (self.available(), self.shared_in(table, place));
        if needed == 0 {
            return Ok(());
        }
        if needed > available {
            return Err(NoBlocks { needed, available });
        }
        for group in 0..table.groups.len() {
            let from = *table.at(group, place);
            if !self.is_shared(from) {
                continue;
            }
            // There is one: they have been counted.
            let Some(to) = self.take() else { break };
            *table.at(group, place) = to;
            self.ref_counts[from.0 as usize] -= 1;
            copy(from, to);
        }
        Ok(())
    }

    /// Gives back the references of a table. Blocks without any are cached if they are indexed, else free. Those of a
    /// spoilt table are free, unless cached ones continue them, and so are those that it has let go of before.
    pub(crate) fn release(&mut self, table: BlockTable) {
        self.releases += 1;
        for (group, of) in table.groups.iter().enumerate() {
            self.release_group(&table, group, of.gone.min(table.places())..table.places());
        }
    }

    fn release_group(&mut self, table: &BlockTable, group: usize, places: Range<usize>) {
        let first = table.of_group(group, places.clone()).next();
        let left_before: Vec<NodeId> = match (&self.cache, first) {
            (Some(cache), Some(first)) if table.spoilt && places.start > 0 => cache.before(first).collect(),
            _ => Vec::new(),
        };
        // From the end: a block is not left by its descendants' last users later than they are.
        for block in table.of_group(group, places).rev() {
            self.let_go(block, table.spoilt);
        }
        for node in left_before {
            let Some(cache) = &mut self.cache else { return };
            match cache.forget_idle(node) {
                Some(block) => self.free.push(block),
                None if cache.is_alive(node) => return,
                None => {}
            }
        }
    }

    /// A table names a block no more.
    fn let_go(&mut self, block: BlockId, spoilt: bool) {
        let count = &mut self.ref_counts[block.0 as usize];
        *count -= 1;
        if *count > 0 {
            return;
        }
        match &mut self.cache {
            Some(cache) if cache.is_indexed(block) => {
                if spoilt && cache.forget(block) {
                    self.free.push(block);
                } else {
                    cache.fall_idle(block, self.releases);
                }
            }
            _ => self.free.push(block),
        }
    }
}

/// One more table names an indexed block.
fn refer(ref_counts: &mut [u32], cache: &mut PrefixCache, block: BlockId) {
    let count = &mut ref_counts[block.0 as usize];
    *count += 1;
    if *count == 1 {
        cache.awake(block);
    }
}
