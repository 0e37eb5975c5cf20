//! The KV blocks as names: which are free, which are kept for reuse, and how many tables name each of the others. Bytes
//! are the model's business.

use protocol::window::Kept;
use thiserror::Error;

use crate::event::CacheEvent;
use crate::plan::BlockId;
use crate::prefix_cache::{Found, NodeId, PrefixCache};

mod audit;
mod table;
#[cfg(test)]
mod tests;

pub(crate) use table::BlockTable;

/// What a sequence's blocks are to hold.
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

/// Owner of all blocks of a pool.
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
            cache: prefix_cache.then(|| PrefixCache::new(total, block_tokens)),
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

    /// Appends `count` blocks to `table`, or changes nothing: free ones first, then cached ones, which are forgotten.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, count: usize) -> Result<(), NoBlocks> {
        let available = self.available();
        if count > available {
            return Err(NoBlocks {
                needed: count,
                available,
            });
        }
        for _ in 0..count {
            let evict = || self.cache.as_mut().and_then(PrefixCache::evict);
            // There is one: they have been counted.
            let Some(block) = self.free.pop().or_else(evict) else {
                break;
            };
            self.ref_counts[block.0 as usize] += 1;
            table.blocks.push(block);
        }
        Ok(())
    }

    /// Fills an empty table with the longest cached beginning of `content`, `limit` blocks at most. Of a beginning of n blocks
    /// those from `first(n)` on have to be there, and the others are gone in the table. Returns how many the beginning has.
    pub(crate) fn attach(
        &mut self,
        table: &mut BlockTable,
        content: &Content<'_>,
        limit: usize,
        first: impl Fn(usize) -> usize,
    ) -> usize {
        let Some(cache) = &mut self.cache else { return 0 };
        let mut walk = BlockTable::default();
        let (mut found, mut present_from, mut best) = (Vec::new(), 0, 0);
        while walk.indexed < limit
            && let Some(wanted) = walk.wanted(content, self.block_tokens)
        {
            let name = cache.name(walk.name(), &wanted);
            let Found::Node(node) = cache.find(name, &wanted) else {
                break;
            };
            walk.extend_index(node, name);
            let block = cache.block_of(node);
            found.push((node, name, block));
            if block.is_none() {
                present_from = found.len();
            }
            if first(found.len()) >= present_from && first(found.len()) < found.len() {
                best = found.len();
            }
        }
        let Some((node, name, _)) = best.checked_sub(1).and_then(|last| found.get(last)).copied() else {
            return 0;
        };
        *table = BlockTable::without(first(best));
        (table.indexed, table.tail) = (best, Some((node, name)));
        for block in found[table.gone..best].iter().filter_map(|(.., block)| *block) {
            refer(&mut self.ref_counts, cache, block);
            table.blocks.push(block);
        }
        best
    }

    /// Whether the indexed blocks of a table hold the beginning of `content`.
    pub(crate) fn holds(&self, table: &BlockTable, content: &Content<'_>) -> bool {
        let last = table.tail.map(|(node, _)| node);
        let cache = self.cache.as_ref();
        table.indexed == 0 || cache.is_some_and(|cache| cache.holds(last, table.indexed, content.key, content.tokens))
    }

    /// Indexes the blocks of a table that are full, the first `computed` tokens of `content` being computed. Where another
    /// block is indexed that holds the same, the first one to be computed stays; with `adopt` the table then refers to
    /// that one instead of its own, which is free (its bytes are the same), otherwise the rest of the table stays out.
    pub(crate) fn publish(&mut self, table: &mut BlockTable, content: &Content<'_>, computed: usize, adopt: bool) {
        let Some(cache) = &mut self.cache else { return };
        let full = computed / self.block_tokens;
        if table.closed || full <= table.indexed {
            return;
        }
        let room = cache.make_room(full - table.indexed, &mut self.free);
        while room
            && table.indexed < full
            && let Some(wanted) = table.wanted(content, self.block_tokens)
        {
            let name = cache.name(table.name(), &wanted);
            let node = match cache.find(name, &wanted) {
                Found::Nothing => cache.insert(name, &wanted),
                Found::Node(node) => node,
                Found::Collision => break,
            };
            let own = table.blocks[table.indexed];
            match cache.block_of(node) {
                // What is gone here may be anywhere, or nowhere: what it held is known.
                _ if !own.is_some() => {}
                None => cache.fill(node, own),
                // A table that was forked from this one came first.
                Some(other) if other == own => {}
                Some(other) if adopt => {
                    refer(&mut self.ref_counts, cache, other);
                    table.blocks[table.indexed] = other;
                    let count = &mut self.ref_counts[own.0 as usize];
                    *count -= 1;
                    if *count == 0 {
                        self.free.push(own);
                    }
                }
                Some(_) => break,
            }
            table.extend_index(node, name);
        }
        // The table has no block that would keep the last node.
        if table.gone > 0 && table.indexed <= table.gone {
            if let Some((node, _)) = table.tail {
                cache.prune(node);
            }
            table.close();
        }
    }

    /// Lets go of the blocks of a table before its block number `first`, which nobody will ask the sequence for.
    pub(crate) fn slide(&mut self, table: &mut BlockTable, first: usize) {
        if first <= table.gone {
            return;
        }
        self.releases += 1;
        if first >= table.indexed {
            // The last indexed block goes too.
            table.close();
        }
        for place in table.gone..first {
            let block = std::mem::replace(&mut table.blocks[place], BlockId::NONE);
            self.let_go(block, false);
        }
        table.gone = first;
    }

    /// A table of the first `count` blocks of `table`, which both name from now on. Neither may write one of them: see
    /// [`BlockManager::own_copy`].
    pub(crate) fn fork(&mut self, table: &BlockTable, count: usize) -> BlockTable {
        let blocks = table.blocks[..count].to_vec();
        let gone = table.gone.min(count);
        for block in &blocks[gone..] {
            self.ref_counts[block.0 as usize] += 1;
        }
        let indexed = table.indexed.min(count);
        let cache = self.cache.as_ref();
        let node = indexed.checked_sub(1).and_then(|last| cache?.node_of(blocks[last]));
        let tail = node.and_then(|node| Some((node, cache?.name_of(node))));
        let mut forked = BlockTable {
            blocks,
            gone,
            indexed,
            tail,
            closed: table.closed,
            spoilt: false,
        };
        if indexed > 0 && tail.is_none() {
            forked.close();
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
        self.ref_counts[block.0 as usize] > 1
    }

    /// Puts a new block in the place `index` of a table, where it has a shared one, and returns both: the bytes of `from`
    /// are to be copied.
    pub(crate) fn own_copy(&mut self, table: &mut BlockTable, index: usize) -> Result<(BlockId, BlockId), NoBlocks> {
        self.grow(table, 1)?;
        let to = table.blocks.swap_remove(index);
        let (from, to) = (to, table.blocks[index]);
        self.ref_counts[from.0 as usize] -= 1;
        Ok((from, to))
    }

    /// Gives back the references of a table. Blocks without any are cached if they are indexed, else free. Those of a
    /// spoilt table are free, unless cached ones continue them, and so are those that it has let go of before.
    pub(crate) fn release(&mut self, table: BlockTable) {
        self.releases += 1;
        let left_before: Vec<NodeId> = match (&self.cache, table.present().first()) {
            (Some(cache), Some(first)) if table.spoilt && table.gone > 0 => cache.before(*first).collect(),
            _ => Vec::new(),
        };
        // From the end: a block is not left by its descendants' last users later than they are.
        for block in table.present().iter().rev() {
            self.let_go(*block, table.spoilt);
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
