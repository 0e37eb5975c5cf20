//! The blocks of one sequence, in order.

use crate::block_manager::Content;
use crate::plan::BlockId;
use crate::prefix_cache::{NodeId, Wanted};
use protocol::prefix::BlockName;

/// The ordered blocks of one sequence: for each `block_tokens` tokens a *place* in the list of every group of layers
/// ([`protocol::window::Groups`]). Not `Clone`: who has the table owns its references, and only
/// [`BlockManager::release`](super::BlockManager::release) gives them back.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    /// Place after place, each with a block for every group. [`BlockId::NONE`] where a group's block is gone.
    pub(super) blocks: Vec<BlockId>,
    /// What is known of each group; none in a table that never had a block.
    pub(super) groups: Vec<GroupTable>,
    /// Nobody should use its blocks again.
    pub(super) spoilt: bool,
}

/// What a table knows of the blocks of one group.
#[derive(Clone, Debug, Default)]
pub(super) struct GroupTable {
    /// Blocks that it has let go of, or never had: they lie before the window.
    pub(super) gone: usize,
    /// How many of the first blocks are indexed in the prefix cache, those that are gone included. The others are its own, or those of the tables that
    /// were forked from it and from which it was forked ([`BlockManager::fork`](super::BlockManager::fork)).
    pub(super) indexed: usize,
    /// The node and the name of the last indexed block. As long as anything can still be indexed, the table has that block.
    pub(super) tail: Option<(NodeId, BlockName)>,
    /// Nothing more is indexed, as a block before those that it has is not.
    pub(super) closed: bool,
}

impl BlockTable {
    /// The blocks of all groups, place by place, from the first position on; [`BlockId::NONE`] where they are gone.
    pub(crate) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The blocks that it has.
    pub(crate) fn present(&self) -> impl Iterator<Item = BlockId> {
        self.blocks.iter().copied().filter(|block| block.is_some())
    }

    /// How many blocks it has.
    pub(crate) fn num_present(&self) -> usize {
        let places = self.places();
        // Before a table has grown, it may lack blocks that it has no place for.
        let gone = self.groups.iter().map(|group| group.gone.min(places));
        self.blocks.len() - gone.sum::<usize>()
    }

    /// How many of the first blocks of a group are gone.
    pub(crate) fn gone(&self, group: usize) -> usize {
        self.groups.get(group).map_or(0, |group| group.gone)
    }

    /// Places, those whose blocks are gone included.
    pub(crate) fn places(&self) -> usize {
        self.blocks.len() / self.groups.len().max(1)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// How many of the first blocks are indexed in every group that does not do without them, as far as the table knows.
    pub(crate) fn indexed(&self) -> usize {
        self.groups.iter().map(|group| group.indexed).max().unwrap_or(0)
    }

    /// How many of the first blocks of a group need not be filled: they are gone, or their KV is there.
    pub(crate) fn ready(&self, group: usize) -> usize {
        self.groups.get(group).map_or(0, |group| group.indexed.max(group.gone))
    }

    /// The table of a sequence that failed: released, its blocks are not kept for others.
    pub(crate) fn spoilt(mut self) -> Self {
        self.spoilt = true;
        self
    }

    /// The blocks of a group in the places from `first` to before `end`.
    pub(super) fn of_group(
        &self,
        group: usize,
        places: std::ops::Range<usize>,
    ) -> impl DoubleEndedIterator<Item = BlockId> + ExactSizeIterator {
        let count = self.groups.len();
        places.map(move |place| self.blocks[place * count + group])
    }

    /// The block of a group in a place.
    pub(super) fn at(&mut self, group: usize, place: usize) -> &mut BlockId {
        let count = self.groups.len();
        &mut self.blocks[place * count + group]
    }
}

impl GroupTable {
    /// What is known of a group whose first `gone` blocks a sequence will not need.
    pub(super) fn without(gone: usize) -> Self {
        Self {
            gone,
            ..Self::default()
        }
    }

    /// The block after the indexed ones, as one looks for it.
    pub(super) fn wanted<'a>(&self, content: &Content<'a>, group: usize, block_tokens: usize) -> Option<Wanted<'a>> {
        let start = self.indexed * block_tokens;
        Some(Wanted {
            parent: self.tail.map(|(node, _)| node),
            group: group as u32,
            key: content.key,
            tokens: content.tokens.get(start..start + block_tokens)?,
        })
    }

    /// One more block is indexed.
    pub(super) fn extend_index(&mut self, node: NodeId, name: BlockName) {
        self.indexed += 1;
        self.tail = Some((node, name));
    }

    /// Nothing more is indexed: none of its blocks follows one that keeps its node.
    pub(super) fn close(&mut self) {
        (self.closed, self.indexed, self.tail) = (true, 0, None);
    }

    /// The name that the next block's is chained to, if it is not the first one.
    pub(super) fn name(&self) -> Option<BlockName> {
        self.tail.map(|(_, name)| name)
    }
}
