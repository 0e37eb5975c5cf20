//! The KV blocks as names: which are free, and how many tables name each of the others. Bytes are the model's business.

use thiserror::Error;

use crate::plan::BlockId;

/// The ordered blocks of one sequence. Not `Clone`: who has the table owns its references, and only
/// [`BlockManager::release`] gives them back.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    blocks: Vec<BlockId>,
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
}

/// Fewer blocks are free than were asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{needed} blocks are needed, {free} are free")]
pub(crate) struct NoBlocks {
    pub(crate) needed: usize,
    pub(crate) free: usize,
}

/// Owner of all blocks of a pool.
#[derive(Debug)]
pub(crate) struct BlockManager {
    /// Used as a stack: the block freed last is the one most likely to be in a cache of the processor.
    free: Vec<BlockId>,
    /// How many tables name each block.
    ref_counts: Vec<u32>,
}

impl BlockManager {
    /// A pool of `total` blocks, all free; block 0 is handed out first. `total` fits into 32 bits (`EngineLimits`).
    pub(crate) fn new(total: usize) -> Self {
        Self {
            free: (0..total as u32).rev().map(BlockId).collect(),
            ref_counts: vec![0; total],
        }
    }

    pub(crate) fn total(&self) -> usize {
        self.ref_counts.len()
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks kept only for reuse. Nothing is cached yet: a block whose last reference goes is free.
    pub(crate) fn cached(&self) -> usize {
        0
    }

    pub(crate) fn owned(&self) -> usize {
        self.total() - self.free() - self.cached()
    }

    /// Appends `count` free blocks to `table`, or changes nothing.
    pub(crate) fn grow(&mut self, table: &mut BlockTable, count: usize) -> Result<(), NoBlocks> {
        let free = self.free.len();
        if count > free {
            return Err(NoBlocks { needed: count, free });
        }
        for block in self.free.drain(free - count..).rev() {
            self.ref_counts[block.0 as usize] += 1;
            table.blocks.push(block);
        }
        Ok(())
    }

    /// Gives back the references of a table; blocks without any are free.
    pub(crate) fn release(&mut self, table: BlockTable) {
        for block in table.blocks.into_iter().rev() {
            let count = &mut self.ref_counts[block.0 as usize];
            *count -= 1;
            if *count == 0 {
                self.free.push(block);
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
        for block in tables.flat_map(|table| &table.blocks) {
            unexplained[block.0 as usize] -= 1;
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
        if unused != self.free() + self.cached() {
            problems.push(format!(
                "{unused} blocks have no reference, but {} are free and {} cached",
                self.free(),
                self.cached()
            ));
        }
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
        let mut manager = BlockManager::new(4);
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
        let mut manager = BlockManager::new(2);
        let mut a = BlockTable::default();
        assert_eq!(manager.grow(&mut a, 3), Err(NoBlocks { needed: 3, free: 2 }));
        assert!(a.is_empty());
        assert_eq!(manager.free(), 2);
    }

    #[test]
    fn a_lost_table_is_found() {
        let mut manager = BlockManager::new(3);
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
        let mut manager = BlockManager::new(3);
        let mut a = BlockTable::default();
        manager.grow(&mut a, 1).unwrap();
        let copy = BlockTable {
            blocks: a.blocks.clone(),
        };
        assert_eq!(
            audit(&manager, &[&a, &copy], 0),
            ["block 0 is in 1 tables more than are counted"]
        );
    }
}
