//! The blocks of one sequence, in order.

use crate::block_manager::Content;
use crate::plan::BlockId;
use crate::prefix_cache::{NodeId, Wanted};
use protocol::prefix::BlockName;

/// The ordered blocks of one sequence. Not `Clone`: who has the table owns its references, and only
/// [`BlockManager::release`](super::BlockManager::release) gives them back.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    /// The first [`BlockTable::gone`] of them are [`BlockId::NONE`].
    pub(super) blocks: Vec<BlockId>,
    /// Blocks that it has let go of, or never had: they lie before the window.
    pub(super) gone: usize,
    /// How many of the first blocks are indexed in the prefix cache, those that are gone included. The others are its own, or those of the tables that
    /// were forked from it and from which it was forked ([`BlockManager::fork`](super::BlockManager::fork)).
    pub(super) indexed: usize,
    /// The node and the name of the last indexed block. As long as anything can still be indexed, the table has that block.
    pub(super) tail: Option<(NodeId, BlockName)>,
    /// Nothing more is indexed, as a block before those that it has is not.
    pub(super) closed: bool,
    /// Nobody should use its blocks again.
    pub(super) spoilt: bool,
}

impl BlockTable {
    /// An empty table of a sequence whose first `gone` blocks will not be needed.
    pub(crate) fn without(gone: usize) -> Self {
        Self {
            blocks: vec![BlockId::NONE; gone],
            gone,
            ..Self::default()
        }
    }

    /// All places, from the first position on; [`BlockId::NONE`] in those whose blocks are gone.
    pub(crate) fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The blocks that it has.
    pub(crate) fn present(&self) -> &[BlockId] {
        &self.blocks[self.gone..]
    }

    /// How many of the first blocks are gone.
    pub(crate) fn gone(&self) -> usize {
        self.gone
    }

    /// Places, those of blocks that are gone included.
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

    /// How many of the first blocks need not be filled: they are gone, or their KV is there.
    pub(crate) fn ready(&self) -> usize {
        self.indexed.max(self.gone)
    }

    /// The table of a sequence that failed: released, its blocks are not kept for others.
    pub(crate) fn spoilt(mut self) -> Self {
        self.spoilt = true;
        self
    }

    /// The block after the indexed ones, as one looks for it.
    pub(super) fn wanted<'a>(&self, content: &Content<'a>, block_tokens: usize) -> Option<Wanted<'a>> {
        let start = self.indexed * block_tokens;
        Some(Wanted {
            parent: self.tail.map(|(node, _)| node),
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

    /// The name that the next block's is chained to.
    pub(super) fn name(&self) -> BlockName {
        self.tail.map_or(0, |(_, name)| name)
    }
}
