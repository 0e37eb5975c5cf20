//! Which (layer, block) of a handoff has been seen: one bit each.

use std::fmt;

use protocol::kv::KvLayout;
use protocol::moved::Moved;
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
    /// Blocks of one group of layers that hold the prompt, those that the receiver has included.
    pub places: u32,
    /// What lies within and is not moved: layers that blocks have room for and the model has not.
    pub unused: [Part; 2],
}

impl Extent {
    /// For a model whose layers are all in one group.
    pub const fn of_one_group(layers: u32, first_block: u32, blocks: u32) -> Self {
        Self {
            layers,
            first_block,
            blocks,
            places: first_block.saturating_add(blocks),
            unused: [Part::NOTHING; 2],
        }
    }

    /// What is moved of a prompt's blocks.
    pub fn of(layout: &KvLayout, moved: &Moved) -> Self {
        let unused = |group: usize| {
            let (places, layers) = (moved.places(group), layout.layers_of(group));
            if places.is_empty() || layers == layout.num_layers {
                return None;
            }
            Some(Part {
                first_layer: layers,
                layers: layout.num_layers - layers,
                first_block: moved.number(group, places.start),
                blocks: places.end - places.start,
            })
        };
        // The last group of each kind may be short of layers.
        let mut short = (0..layout.groups.count()).filter_map(unused);
        let mut next = || short.next().unwrap_or(Part::NOTHING);
        Self {
            layers: layout.num_layers,
            first_block: moved.first(),
            blocks: moved.len(),
            places: moved.end_place(),
            unused: [next(), next()],
        }
    }

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
    /// No layers and no blocks.
    pub const NOTHING: Self = Self {
        first_layer: 0,
        layers: 0,
        first_block: 0,
        blocks: 0,
    };

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
    /// Nothing seen, but for what is not moved. Takes one bit per (layer, block) of `extent`, which the caller has from its own side, not from the
    /// peer's.
    pub fn new(extent: Extent) -> Self {
        let words = usize::try_from(extent.parts().div_ceil(64)).unwrap_or(usize::MAX);
        let mut coverage = Self {
            extent,
            words: vec![0; words],
            covered: 0,
        };
        for part in extent.unused {
            // Nobody waits for it, and nobody may send it.
            coverage.insert(&part);
        }
        coverage
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
