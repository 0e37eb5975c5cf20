//! Which (layer, block) of a handoff has been seen: one bit each.

use std::fmt;

use protocol::kv::KvLayout;
use protocol::transfer::FrameHeader;

/// What a handoff moves: all layers of a range of blocks, which have numbers ([`protocol::moved::Moved`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Number of layers.
    pub layers: u32,
    /// First block that is moved: the receiver has those before it.
    pub first_block: u32,
    /// Number of blocks.
    pub blocks: u32,
}

impl Extent {
    /// Number of (layer, block) pairs, which is also the largest number of frames.
    pub fn parts(&self) -> u64 {
        u64::from(self.layers) * u64::from(self.blocks)
    }

    /// Index of the block after the last.
    pub fn end_block(&self) -> u64 {
        u64::from(self.first_block) + u64::from(self.blocks)
    }

    /// True if `part` is not empty and lies within.
    pub fn contains(&self, part: &Part) -> bool {
        part.layers > 0
            && part.blocks > 0
            && part.first_block >= self.first_block
            && u64::from(part.first_layer) + u64::from(part.layers) <= u64::from(self.layers)
            && u64::from(part.first_block) + u64::from(part.blocks) <= self.end_block()
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "layers 0..{}, blocks {}..{}",
            self.layers,
            self.first_block,
            self.end_block()
        )
    }
}

/// A rectangle of layers and blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// First layer.
    pub first_layer: u32,
    /// Number of layers.
    pub layers: u32,
    /// First block.
    pub first_block: u32,
    /// Number of blocks.
    pub blocks: u32,
}

impl Part {
    /// Bytes of its payload, if they can be counted.
    pub fn payload_bytes(&self, layout: &KvLayout) -> Option<u64> {
        (u64::from(self.layers) * u64::from(self.blocks)).checked_mul(layout.layer_block_bytes() as u64)
    }
}

impl From<&FrameHeader> for Part {
    fn from(header: &FrameHeader) -> Self {
        let &FrameHeader {
            first_layer,
            layers,
            first_block,
            blocks,
            ..
        } = header;
        Self {
            first_layer,
            layers,
            first_block,
            blocks,
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end_layer = u64::from(self.first_layer) + u64::from(self.layers);
        let end_block = u64::from(self.first_block) + u64::from(self.blocks);
        write!(
            f,
            "layers {}..{end_layer}, blocks {}..{end_block}",
            self.first_layer, self.first_block
        )
    }
}

/// The set of (layer, block) pairs of an extent that have been seen.
#[derive(Clone, Debug)]
pub struct Coverage {
    extent: Extent,
    words: Vec<u64>,
    covered: u64,
}

impl Coverage {
    /// Nothing seen. Takes one bit per (layer, block) of `extent`, which the caller has from its own side, not from the
    /// peer's.
    pub fn new(extent: Extent) -> Self {
        let words = usize::try_from(extent.parts().div_ceil(64)).unwrap_or(usize::MAX);
        Self {
            extent,
            words: vec![0; words],
            covered: 0,
        }
    }

    /// The extent.
    pub fn extent(&self) -> Extent {
        self.extent
    }

    fn index(&self, layer: u32, block: u32) -> u64 {
        u64::from(layer) * u64::from(self.extent.blocks) + u64::from(block - self.extent.first_block)
    }

    fn has(&self, index: u64) -> bool {
        self.words[(index / 64) as usize] >> (index % 64) & 1 == 1
    }

    fn indices(&self, part: Part) -> impl Iterator<Item = u64> + use<> {
        let first = self.index(part.first_layer, part.first_block);
        let stride = u64::from(self.extent.blocks);
        (0..u64::from(part.layers))
            .flat_map(move |layer| (0..u64::from(part.blocks)).map(move |block| first + layer * stride + block))
    }

    /// True if `part` lies within the extent and nothing of it has been seen.
    pub fn is_free(&self, part: &Part) -> bool {
        self.extent.contains(part) && self.indices(*part).all(|index| !self.has(index))
    }

    /// Marks `part` as seen. Returns false and changes nothing unless [`is_free`](Self::is_free).
    pub fn insert(&mut self, part: &Part) -> bool {
        if !self.is_free(part) {
            return false;
        }
        for index in self.indices(*part) {
            self.words[(index / 64) as usize] |= 1 << (index % 64);
        }
        self.covered += u64::from(part.layers) * u64::from(part.blocks);
        true
    }

    /// Number of (layer, block) pairs not seen.
    pub fn missing(&self) -> u64 {
        self.extent.parts() - self.covered
    }

    /// The first (layer, block) not seen, the block by its number.
    pub fn first_missing(&self) -> Option<(u32, u32)> {
        if self.missing() == 0 {
            return None;
        }
        (0..self.extent.layers)
            .flat_map(|layer| (0..self.extent.blocks).map(move |block| (layer, self.extent.first_block + block)))
            .find(|&(layer, block)| !self.has(self.index(layer, block)))
    }
}
