//! What the prefix cache has of a prompt.

use protocol::prefix::BlockName;
use protocol::window::GroupKept;

use super::table::GroupTable;
use super::{BlockManager, BlockTable, Content, refer};
use crate::plan::BlockId;
use crate::prefix_cache::{Found, NodeId, PrefixCache};

/// The beginning of a prompt as the index knows it, for one group of layers.
struct Walk {
    nodes: Vec<(NodeId, BlockName, Option<BlockId>)>,
    /// For each beginning, of one block and more: from which block on all of it are there.
    present_from: Vec<usize>,
}

impl Walk {
    fn through(
        cache: &mut PrefixCache,
        content: &Content<'_>,
        group: usize,
        block_tokens: usize,
        limit: usize,
    ) -> Self {
        let mut at = GroupTable::default();
        let mut walk = Self {
            nodes: Vec::new(),
            present_from: Vec::new(),
        };
        let mut present_from = 0;
        while at.indexed < limit
            && let Some(wanted) = at.wanted(content, group, block_tokens)
        {
            let name = cache.name(at.name(), &wanted);
            let Found::Node(node) = cache.find(name, &wanted) else {
                break;
            };
            at.extend_index(node, name);
            let block = cache.block_of(node);
            if block.is_none() {
                present_from = at.indexed;
            }
            walk.nodes.push((node, name, block));
            walk.present_from.push(present_from);
        }
        walk
    }

    /// Whether the blocks from `first` to before `end` are there.
    fn has(&self, first: usize, end: usize) -> bool {
        first >= end || self.present_from.get(end - 1).is_some_and(|from| *from <= first)
    }
}

impl BlockManager {
    /// Fills an empty table with the longest cached beginning of `content`, `limit` places at most. Of a beginning of n places
    /// those of a group from `first(group, n)` on have to be there, and the others are gone in the table. Returns how many the
    /// beginning has.
    pub(crate) fn attach(
        &mut self,
        table: &mut BlockTable,
        content: &Content<'_>,
        limit: usize,
        first: impl Fn(GroupKept, usize) -> usize,
    ) -> usize {
        let Some(cache) = &mut self.cache else { return 0 };
        let walk = |group| Walk::through(cache, content, group, self.block_tokens, limit);
        let walks: Vec<Walk> = (0..self.kept.count()).map(walk).collect();
        let longest = walks.iter().map(|walk| walk.nodes.len()).max().unwrap_or(0);
        let groups = || walks.iter().zip(self.kept.groups());
        let serves = |places: &usize| {
            let something = groups().any(|(_, kept)| first(kept, *places) < *places);
            something && groups().all(|(walk, kept)| walk.has(first(kept, *places), *places))
        };
        let Some(best) = (1..=longest).rev().find(serves) else {
            return 0;
        };
        let state = |(walk, kept): (&Walk, GroupKept)| {
            let gone = first(kept, best);
            match walk.nodes.get(best - 1) {
                Some((node, name, _)) if gone < best => GroupTable {
                    gone,
                    indexed: best,
                    tail: Some((*node, *name)),
                    closed: false,
                },
                _ => GroupTable::without(gone),
            }
        };
        *table = BlockTable {
            blocks: Vec::with_capacity(best * walks.len()),
            groups: groups().map(state).collect(),
            spoilt: false,
        };
        for place in 0..best {
            for (walk, of) in walks.iter().zip(&table.groups) {
                let there = walk.nodes.get(place).and_then(|(.., block)| *block);
                let block = there.filter(|_| place >= of.gone).unwrap_or(BlockId::NONE);
                if block.is_some() {
                    refer(&mut self.ref_counts, cache, block);
                }
                table.blocks.push(block);
            }
        }
        best
    }
}
