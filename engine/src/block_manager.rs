//! The KV blocks as names: which are free, which are kept for reuse, and how many tables name each of the others. Bytes
//! are the model's business.

use protocol::prefix::BlockName;
use thiserror::Error;

use crate::event::CacheEvent;
use crate::plan::BlockId;
use crate::prefix_cache::{Found, PrefixCache, Wanted};

/// The ordered blocks of one sequence. Not `Clone`: who has the table owns its references, and only
/// [`BlockManager::release`] gives them back.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    blocks: Vec<BlockId>,
    /// How many of the first blocks are indexed in the prefix cache. The others are its own, or those of the tables that
    /// were forked from it and from which it was forked ([`BlockManager::fork`]).
    indexed: usize,
    /// Name of the last indexed block; 0 if there is none.
    name: BlockName,
    /// Nobody should use its blocks again.
    spoilt: bool,
}

impl BlockTable {
    pub(crate) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// How many of the first blocks are indexed, as far as the table knows.
    pub(crate) fn indexed(&self) -> usize {
        self.indexed
    }

    /// The table of a sequence that failed: released, its blocks are not kept for others.
    pub(crate) fn spoilt(mut self) -> Self {
        self.spoilt = true;
        self
    }

    /// The block after the indexed ones, as one looks for it.
    fn wanted<'a>(&self, content: &Content<'a>, block_tokens: usize) -> Option<Wanted<'a>> {
        let start = self.indexed * block_tokens;
        Some(Wanted {
            parent: self.indexed.checked_sub(1).map(|last| self.blocks[last]),
            key: content.key,
            tokens: content.tokens.get(start..start + block_tokens)?,
        })
    }
}

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
    /// Used as a stack: the block freed last is the one most likely to be in a cache of the processor.
    free: Vec<BlockId>,
    /// How many tables name each block.
    ref_counts: Vec<u32>,
    /// `None`: blocks are never used again.
    cache: Option<PrefixCache>,
    /// Tables released since the start: the cache's notion of time.
    releases: u64,
}

impl BlockManager {
    /// A pool of `total` blocks, all free; block 0 is handed out first. `total` fits into 32 bits (`EngineLimits`).
    pub(crate) fn new(total: usize, block_tokens: usize, prefix_cache: bool) -> Self {
        Self {
            block_tokens,
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

    /// Fills an empty table with the longest cached beginning of `content`, `limit` blocks at most. Returns how many.
    pub(crate) fn attach(&mut self, table: &mut BlockTable, content: &Content<'_>, limit: usize) -> usize {
        let Some(cache) = &mut self.cache else { return 0 };
        while table.indexed < limit
            && let Some(wanted) = table.wanted(content, self.block_tokens)
        {
            let name = cache.name(table.name, &wanted);
            let Found::Block(block) = cache.find(name, &wanted) else {
                break;
            };
            refer(&mut self.ref_counts, cache, block);
            table.blocks.push(block);
            (table.indexed, table.name) = (table.indexed + 1, name);
        }
        table.indexed
    }

    /// Whether the indexed blocks of a table hold the beginning of `content`.
    pub(crate) fn holds(&self, table: &BlockTable, content: &Content<'_>) -> bool {
        let mut chunks = content.tokens.chunks_exact(self.block_tokens);
        table.blocks[..table.indexed].iter().all(|block| {
            let (cache, tokens) = (self.cache.as_ref(), chunks.next());
            tokens.is_some_and(|tokens| cache.is_some_and(|cache| cache.holds(*block, content.key, tokens)))
        })
    }

    /// Indexes the blocks of a table that are full, the first `computed` tokens of `content` being computed. Where another
    /// block is indexed that holds the same, the first one to be computed stays; with `adopt` the table then refers to
    /// that one instead of its own, which is free (its bytes are the same), otherwise the rest of the table stays out.
    pub(crate) fn publish(&mut self, table: &mut BlockTable, content: &Content<'_>, computed: usize, adopt: bool) {
        let Some(cache) = &mut self.cache else { return };
        while (table.indexed + 1) * self.block_tokens <= computed
            && let Some(wanted) = table.wanted(content, self.block_tokens)
        {
            let name = cache.name(table.name, &wanted);
            let own = table.blocks[table.indexed];
            match cache.find(name, &wanted) {
                Found::Nothing => cache.insert(own, name, &wanted),
                // A table that was forked from this one came first.
                Found::Block(other) if other == own => {}
                Found::Block(other) if adopt => {
                    refer(&mut self.ref_counts, cache, other);
                    table.blocks[table.indexed] = other;
                    let count = &mut self.ref_counts[own.0 as usize];
                    *count -= 1;
                    if *count == 0 {
                        self.free.push(own);
                    }
                }
                Found::Block(_) | Found::Collision => return,
            }
            (table.indexed, table.name) = (table.indexed + 1, name);
        }
    }

    /// A table of the first `count` blocks of `table`, which both name from now on. Neither may write one of them: see
    /// [`BlockManager::own_copy`].
    pub(crate) fn fork(&mut self, table: &BlockTable, count: usize) -> BlockTable {
        let blocks = table.blocks[..count].to_vec();
        for block in &blocks {
            self.ref_counts[block.0 as usize] += 1;
        }
        let indexed = table.indexed.min(count);
        let last = indexed.checked_sub(1).map(|last| blocks[last]);
        let name = last.and_then(|last| Some(self.cache.as_ref()?.name_of(last)));
        BlockTable {
            blocks,
            indexed,
            name: name.unwrap_or(0),
            spoilt: false,
        }
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
    /// spoilt table are free, unless cached ones continue them.
    pub(crate) fn release(&mut self, table: BlockTable) {
        self.releases += 1;
        // From the end: a block is not left by its descendants' last users later than they are.
        for block in table.blocks.into_iter().rev() {
            let count = &mut self.ref_counts[block.0 as usize];
            *count -= 1;
            if *count > 0 {
                continue;
            }
            match &mut self.cache {
                Some(cache) if cache.is_indexed(block) => {
                    if table.spoilt && cache.forget(block) {
                        self.free.push(block);
                    } else {
                        cache.fall_idle(block, self.releases);
                    }
                }
                _ => self.free.push(block),
            }
        }
    }

    /// Compares the books with the tables that exist. `elsewhere` is the number of references that tables outside of
    /// the engine (reservations) hold.
    pub(crate) fn audit<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable>,
        elsewhere: usize,
        problems: &mut Vec<String>,
    ) {
        let mut unexplained: Vec<i64> = self.ref_counts.iter().map(|&count| i64::from(count)).collect();
        let mut places = vec![None; self.total()];
        for table in tables {
            self.audit_table(table, &mut places, problems);
            for block in &table.blocks {
                unexplained[block.0 as usize] -= 1;
            }
        }
        for (block, &count) in unexplained.iter().enumerate().filter(|(_, count)| **count < 0) {
            problems.push(format!("block {block} is in {} tables more than are counted", -count));
        }
        let rest: i64 = unexplained.iter().filter(|count| **count > 0).sum();
        if rest != elsewhere as i64 {
            problems.push(format!(
                "{rest} block references are in no table, reservations explain {elsewhere}"
            ));
        }
        self.audit_free(problems);
        if let Some(cache) = &self.cache {
            cache.audit(&self.ref_counts, problems);
        }
    }

    /// The indexed blocks of a table are its first ones. A forked one may not know yet that another has indexed its block.
    /// Who shares a block has it in the same place.
    fn audit_table(&self, table: &BlockTable, places: &mut [Option<usize>], problems: &mut Vec<String>) {
        for (place, block) in table.blocks.iter().enumerate() {
            let elsewhere = places[block.0 as usize].replace(place);
            if elsewhere.is_some_and(|elsewhere| elsewhere != place) {
                problems.push(format!(
                    "block {} is number {place} of a table, and another number of another one",
                    block.0
                ));
            }
            let indexed = self.cache.as_ref().is_some_and(|cache| cache.is_indexed(*block));
            let references = self.ref_counts[block.0 as usize];
            if indexed != (place < table.indexed) && !(indexed && references > 1) {
                problems.push(format!(
                    "block {} is number {place} of a table with {} indexed blocks; indexed is {indexed}, with \
                     {references} references",
                    block.0, table.indexed
                ));
            }
        }
    }

    fn audit_free(&self, problems: &mut Vec<String>) {
        let mut listed = vec![false; self.total()];
        for block in &self.free {
            let index = block.0 as usize;
            if listed[index] {
                problems.push(format!("block {index} is in the free list twice"));
            }
            listed[index] = true;
            if self.ref_counts[index] != 0 {
                problems.push(format!(
                    "block {index} is free and has {} references",
                    self.ref_counts[index]
                ));
            }
        }
        let unused = self.ref_counts.iter().filter(|count| **count == 0).count();
        if unused != self.available() {
            problems.push(format!(
                "{unused} blocks have no reference, but {} are free and {} cached",
                self.free(),
                self.cached()
            ));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn audit(manager: &BlockManager, tables: &[&BlockTable], elsewhere: usize) -> Vec<String> {
        let mut problems = Vec::new();
        manager.audit(tables.iter().copied(), elsewhere, &mut problems);
        problems
    }

    #[test]
    fn blocks_go_out_once_and_come_back() {
        let mut manager = BlockManager::new(4, 2, false);
        let (mut a, mut b) = (BlockTable::default(), BlockTable::default());
        manager.grow(&mut a, 2).unwrap();
        manager.grow(&mut b, 1).unwrap();
        manager.grow(&mut a, 1).unwrap();
        assert_eq!(a.blocks(), [BlockId(0), BlockId(1), BlockId(3)]);
        assert_eq!(b.blocks(), [BlockId(2)]);
        assert_eq!((manager.free(), manager.owned(), manager.total()), (0, 4, 4));
        assert_eq!(audit(&manager, &[&a, &b], 0), [""; 0]);
        manager.release(a);
        assert_eq!((manager.free(), manager.owned()), (3, 1));
        manager.release(b);
        assert_eq!((manager.free(), manager.owned()), (4, 0));
        assert_eq!(audit(&manager, &[], 0), [""; 0]);
    }

    #[test]
    fn grows_all_or_nothing() {
        let mut manager = BlockManager::new(2, 2, false);
        let mut a = BlockTable::default();
        assert_eq!(
            manager.grow(&mut a, 3),
            Err(NoBlocks {
                needed: 3,
                available: 2
            })
        );
        assert!(a.is_empty());
        assert_eq!(manager.free(), 2);
    }

    #[test]
    fn a_lost_table_is_found() {
        let mut manager = BlockManager::new(3, 2, false);
        let (mut lost, mut kept) = (BlockTable::default(), BlockTable::default());
        manager.grow(&mut lost, 2).unwrap();
        manager.grow(&mut kept, 1).unwrap();
        drop(lost);
        assert_eq!(
            audit(&manager, &[&kept], 0),
            ["2 block references are in no table, reservations explain 0"]
        );
        assert_eq!(audit(&manager, &[&kept], 2), [""; 0]);
    }

    #[test]
    fn a_foreign_table_is_found() {
        let mut manager = BlockManager::new(3, 2, false);
        let mut a = BlockTable::default();
        manager.grow(&mut a, 1).unwrap();
        let copy = BlockTable {
            blocks: a.blocks.clone(),
            ..BlockTable::default()
        };
        assert_eq!(
            audit(&manager, &[&a, &copy], 0),
            ["block 0 is in 1 tables more than are counted"]
        );
    }
}
