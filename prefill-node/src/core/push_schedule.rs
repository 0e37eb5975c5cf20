//! When which part of a prompt's KV is sent while later parts are computed.
//!
//! A chunk of the prompt fills some blocks, layer after layer. The layers of these blocks are grouped until a group is worth
//! a frame (message count costs more than bytes), and a group is sent as soon as its last layer is computed. So after the last
//! chunk's last layer just one group is left: that is the exposed part of the transfer. A block that a chunk fills only in
//! part is sent with the chunk that completes it; the prompt's last block with the last chunk. Every (layer, block) is sent
//! once, also if the sequence is preempted in between and computed again: the same tokens give the same bits.

use protocol::kv::KvLayout;

/// Layers and blocks to send together. Blocks are indices into the sequence's block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First layer.
    pub first_layer: u32,
    /// Number of layers.
    pub layers: u32,
    /// First block.
    pub first_block: u32,
    /// Number of blocks.
    pub blocks: u32,
}

/// The schedule of one prompt.
#[derive(Clone, Debug)]
pub struct PushSchedule {
    layout: KvLayout,
    prompt_tokens: u32,
    group_bytes: usize,
    /// Blocks below this index are sent, in all layers, or need not be.
    next_block: u32,
    /// First layer of the group that is being collected.
    group_start: u32,
}

impl PushSchedule {
    /// A schedule for `prompt_tokens` tokens, of which the receiver has the first `have_blocks` blocks. A group is sent once
    /// it holds `group_bytes` bytes.
    pub fn new(layout: KvLayout, prompt_tokens: u32, have_blocks: u32, group_bytes: usize) -> Self {
        Self {
            layout,
            prompt_tokens,
            group_bytes,
            next_block: have_blocks,
            group_start: 0,
        }
    }

    /// Blocks that hold the prompt.
    pub fn prompt_blocks(&self) -> u32 {
        self.prompt_tokens.div_ceil(self.layout.block_tokens)
    }

    /// `layer` of the positions `0..computed_tokens` is in the pool. What is to be sent now?
    pub fn layer_computed(&mut self, layer: u32, computed_tokens: u32) -> Option<Piece> {
        let end = if computed_tokens >= self.prompt_tokens {
            self.prompt_blocks()
        } else {
            computed_tokens / self.layout.block_tokens
        };
        if layer == 0 {
            self.group_start = 0;
        }
        if end <= self.next_block {
            return None;
        }
        let (layers, blocks) = (layer + 1 - self.group_start, end - self.next_block);
        let bytes = layers as usize * blocks as usize * self.layout.layer_block_bytes();
        let last = layer + 1 == self.layout.num_layers;
        if bytes < self.group_bytes && !last {
            return None;
        }
        let piece = Piece {
            first_layer: self.group_start,
            layers,
            first_block: self.next_block,
            blocks,
        };
        self.group_start = layer + 1;
        if last {
            self.next_block = end;
        }
        Some(piece)
    }

    /// True once everything has been handed out.
    pub fn is_complete(&self) -> bool {
        self.next_block >= self.prompt_blocks()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use protocol::kv::KvDtype;
    use std::collections::HashSet;

    fn layout(num_layers: u32) -> KvLayout {
        KvLayout {
            num_layers,
            num_kv_heads: 3,
            head_dim: 64,
            block_tokens: 16,
            dtype: KvDtype::F16,
        }
    }

    /// All (layer, block) pairs in the order in which they are sent, for chunks of the given lengths.
    fn sent(schedule: &mut PushSchedule, layers: u32, chunks: &[u32]) -> Vec<(u32, u32)> {
        let mut out = Vec::new();
        let mut computed = 0;
        for chunk in chunks {
            computed += chunk;
            for layer in 0..layers {
                if let Some(piece) = schedule.layer_computed(layer, computed) {
                    assert_eq!(
                        piece.first_layer + piece.layers,
                        layer + 1,
                        "only computed layers are sent"
                    );
                    for l in piece.first_layer..piece.first_layer + piece.layers {
                        out.extend((piece.first_block..piece.first_block + piece.blocks).map(|b| (l, b)));
                    }
                }
            }
        }
        out
    }

    #[test]
    fn a_short_prompt_goes_in_one_piece_after_the_last_layer() {
        // One block of 12,288 bytes a layer: all 30 layers stay below 512 KiB.
        let mut schedule = PushSchedule::new(layout(30), 10, 0, 512 << 10);
        for layer in 0..29 {
            assert_eq!(schedule.layer_computed(layer, 10), None);
        }
        let whole = Piece {
            first_layer: 0,
            layers: 30,
            first_block: 0,
            blocks: 1,
        };
        assert_eq!(schedule.layer_computed(29, 10), Some(whole));
        assert!(schedule.is_complete());
    }

    #[test]
    fn a_long_chunk_goes_in_layer_groups_and_leaves_one_group_at_the_end() {
        // 512 tokens = 32 blocks of 12,288 bytes: two layers reach 512 KiB.
        let mut schedule = PushSchedule::new(layout(30), 512, 0, 512 << 10);
        assert_eq!(schedule.layer_computed(0, 512), None);
        let group = Piece {
            first_layer: 0,
            layers: 2,
            first_block: 0,
            blocks: 32,
        };
        assert_eq!(schedule.layer_computed(1, 512), Some(group));
        for layer in 2..29 {
            schedule.layer_computed(layer, 512);
        }
        let last = Piece {
            first_layer: 28,
            layers: 2,
            first_block: 0,
            blocks: 32,
        };
        assert_eq!(schedule.layer_computed(29, 512), Some(last));
    }

    proptest! {
        #[test]
        fn every_layer_of_every_block_is_sent_once(
            layers in 1u32..6,
            chunks in proptest::collection::vec(1u32..60, 1..8),
            have in 0u32..4,
            group_bytes in 1usize..200_000,
            restart in any::<bool>(),
        ) {
            let prompt: u32 = chunks.iter().sum();
            let layout = layout(layers);
            let blocks = prompt.div_ceil(16);
            let have = have.min(blocks.saturating_sub(1));
            let mut schedule = PushSchedule::new(layout, prompt, have, group_bytes);
            let mut pairs = Vec::new();
            if restart {
                // Preempted after the first chunk: everything is computed again.
                pairs.extend(sent(&mut schedule, layers, &chunks[..1]));
            }
            pairs.extend(sent(&mut schedule, layers, &chunks));
            let distinct: HashSet<_> = pairs.iter().copied().collect();
            prop_assert_eq!(distinct.len(), pairs.len());
            prop_assert_eq!(pairs.len() as u32, layers * (blocks - have));
            prop_assert!(schedule.is_complete());
        }
    }
}
