//! When which part of a prompt's KV is sent while later parts are computed.
//!
//! A chunk of the prompt fills some blocks, layer after layer. The layers of these blocks are grouped until a group is worth
//! a frame (message count costs more than bytes), and a group is due as soon as its last layer is computed. So after the last
//! chunk's last layer just one group is left: that is the exposed part of the transfer. A block that a chunk fills only in
//! part is due with the chunk that completes it; the prompt's last block with the last chunk. What the prefix cache had of
//! the prompt is due, in all layers, before the first chunk is computed.
//!
//! Pieces are handed out from two lines. *Fresh* ones are written by the running step: only the compute thread may copy
//! them now. *Early* ones are complete and stay as they are, so anybody may copy them: cached blocks, and what nobody had
//! room for in an earlier step. Every (layer, block) is handed out once, also if the sequence is preempted in between: what
//! was due then and not taken is due again when it has been computed again (the same tokens give the same bits).

use std::collections::VecDeque;

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
    /// Blocks below this index are due or taken, in all layers, or need not be sent.
    next_block: u32,
    /// First layer of the group that is being collected.
    group_start: u32,
    early: VecDeque<Piece>,
    fresh: VecDeque<Piece>,
    /// Due when the sequence lost its blocks.
    lost: VecDeque<Piece>,
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
            early: VecDeque::new(),
            fresh: VecDeque::new(),
            lost: VecDeque::new(),
        }
    }

    /// Blocks that hold the prompt.
    pub fn prompt_blocks(&self) -> u32 {
        self.prompt_tokens.div_ceil(self.layout.block_tokens)
    }

    /// A step is going to compute rows behind the first `computed_tokens` positions, which are in the pool in all layers.
    pub fn step_begins(&mut self, computed_tokens: u32) {
        self.group_start = 0;
        self.early.append(&mut self.fresh);
        let end = self.full_blocks(computed_tokens);
        let (early, block_tokens) = (&mut self.early, self.layout.block_tokens);
        self.lost.retain(|piece| {
            let waits = (piece.first_block + piece.blocks) * block_tokens > computed_tokens;
            if !waits {
                early.push_back(*piece);
            }
            waits
        });
        if end > self.next_block {
            self.cut(self.next_block, end);
            self.next_block = end;
        }
    }

    /// `layer` of the positions `0..computed_tokens` is in the pool.
    pub fn layer_computed(&mut self, layer: u32, computed_tokens: u32) {
        let end = self.full_blocks(computed_tokens);
        if end <= self.next_block {
            return;
        }
        let (layers, blocks) = (layer + 1 - self.group_start, end - self.next_block);
        let bytes = layers as usize * blocks as usize * self.layout.layer_block_bytes();
        let last = layer + 1 == self.layout.num_layers;
        if bytes < self.group_bytes && !last {
            return;
        }
        self.fresh.push_back(Piece {
            first_layer: self.group_start,
            layers,
            first_block: self.next_block,
            blocks,
        });
        self.group_start = layer + 1;
        if last {
            self.next_block = end;
        }
    }

    /// The sequence lost its blocks, and what they held; it begins again. Not within a step.
    pub fn preempted(&mut self) {
        self.lost.append(&mut self.early);
        self.lost.append(&mut self.fresh);
    }

    /// The whole prompt is in the pool, and no step writes it any more.
    pub fn ends(&mut self) {
        self.early.append(&mut self.fresh);
        self.early.append(&mut self.lost);
    }

    /// The next piece that the compute thread may take within the step.
    pub fn fresh(&self) -> Option<Piece> {
        self.fresh.front().copied()
    }

    /// The next piece that anybody may take.
    pub fn early(&self) -> Option<Piece> {
        self.early.front().copied()
    }

    /// The next fresh piece is taken.
    pub fn take_fresh(&mut self) -> Option<Piece> {
        self.fresh.pop_front()
    }

    /// The next early piece is taken.
    pub fn take_early(&mut self) -> Option<Piece> {
        self.early.pop_front()
    }

    /// True once everything has been due and taken.
    pub fn is_complete(&self) -> bool {
        self.next_block >= self.prompt_blocks()
            && self.early.is_empty()
            && self.fresh.is_empty()
            && self.lost.is_empty()
    }

    /// Blocks that need no further token, of those that hold the first `tokens` positions.
    fn full_blocks(&self, tokens: u32) -> u32 {
        if tokens >= self.prompt_tokens {
            self.prompt_blocks()
        } else {
            tokens / self.layout.block_tokens
        }
    }

    /// Makes all layers of the blocks `start..end` due: pieces of at most a group's size, or of one block in one layer.
    fn cut(&mut self, start: u32, end: u32) {
        let room = self.group_bytes / self.layout.layer_block_bytes().max(1);
        // At least 1 and at most all there are: 32 bits suffice.
        let most_blocks = room.clamp(1, (end - start) as usize) as u32;
        let most_layers = (room / most_blocks as usize).clamp(1, self.layout.num_layers as usize) as u32;
        for first_layer in (0..self.layout.num_layers).step_by(most_layers as usize) {
            for first_block in (start..end).step_by(most_blocks as usize) {
                self.early.push_back(Piece {
                    first_layer,
                    layers: most_layers.min(self.layout.num_layers - first_layer),
                    first_block,
                    blocks: most_blocks.min(end - first_block),
                });
            }
        }
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
            latent: false,
            window: None,
        }
    }

    fn piece(first_layer: u32, layers: u32, first_block: u32, blocks: u32) -> Piece {
        Piece {
            first_layer,
            layers,
            first_block,
            blocks,
        }
    }

    #[test]
    fn a_short_prompt_goes_in_one_piece_after_the_last_layer() {
        // One block of 12,288 bytes a layer: all 30 layers stay below 512 KiB.
        let mut schedule = PushSchedule::new(layout(30), 10, 0, 512 << 10);
        schedule.step_begins(0);
        for layer in 0..29 {
            schedule.layer_computed(layer, 10);
            assert_eq!((schedule.fresh(), schedule.early()), (None, None));
        }
        schedule.layer_computed(29, 10);
        assert_eq!(schedule.take_fresh(), Some(piece(0, 30, 0, 1)));
        assert!(schedule.is_complete());
    }

    #[test]
    fn a_long_chunk_goes_in_layer_groups_and_leaves_one_group_at_the_end() {
        // 512 tokens = 32 blocks of 12,288 bytes: two layers reach 512 KiB.
        let mut schedule = PushSchedule::new(layout(30), 512, 0, 512 << 10);
        schedule.step_begins(0);
        schedule.layer_computed(0, 512);
        assert_eq!(schedule.fresh(), None);
        for layer in 1..29 {
            schedule.layer_computed(layer, 512);
            assert_eq!(
                schedule.take_fresh(),
                (layer % 2 == 1).then(|| piece(layer - 1, 2, 0, 32))
            );
        }
        schedule.layer_computed(29, 512);
        assert_eq!(schedule.take_fresh(), Some(piece(28, 2, 0, 32)));
        assert!(schedule.is_complete());
    }

    #[test]
    fn what_was_cached_is_due_before_anything_is_computed() {
        // 40 blocks a frame: 100 cached blocks are cut in each layer, 10 go four layers at a time.
        let mut schedule = PushSchedule::new(layout(30), 1_700, 0, 40 * 12_288);
        schedule.step_begins(1_600);
        let due: Vec<Piece> = std::iter::from_fn(|| schedule.take_early()).collect();
        assert_eq!(due.len(), 90);
        assert_eq!(
            due[..4],
            [
                piece(0, 1, 0, 40),
                piece(0, 1, 40, 40),
                piece(0, 1, 80, 20),
                piece(1, 1, 0, 40)
            ]
        );
        schedule.layer_computed(0, 1_700);
        assert_eq!((schedule.early(), schedule.fresh()), (None, None));
        let mut schedule = PushSchedule::new(layout(30), 200, 2, 40 * 12_288);
        schedule.step_begins(12 * 16);
        let due: Vec<Piece> = std::iter::from_fn(|| schedule.take_early()).collect();
        assert_eq!(
            (due.len(), due[0], due[7]),
            (8, piece(0, 4, 2, 10), piece(28, 2, 2, 10))
        );
    }

    /// A prompt on its way through a node: what is in the pool, and what has been sent.
    struct Journey {
        schedule: PushSchedule,
        layers: u32,
        prompt: u32,
        /// Tokens in the pool, by layer.
        in_pool: Vec<u32>,
        sent: Vec<(u32, u32)>,
    }

    impl Journey {
        fn send(&mut self, piece: Piece) {
            for layer in piece.first_layer..piece.first_layer + piece.layers {
                for block in piece.first_block..piece.first_block + piece.blocks {
                    let end = ((block + 1) * 16).min(self.prompt);
                    assert!(
                        self.in_pool[layer as usize] >= end,
                        "layer {layer} of block {block} is not there"
                    );
                    self.sent.push((layer, block));
                }
            }
        }

        /// Computes up to `end` tokens; there is room for a piece as `room` says, in turn.
        fn step(&mut self, end: u32, room: &mut impl FnMut() -> bool) {
            let start = self.in_pool[0];
            self.schedule.step_begins(start);
            for layer in 0..self.layers {
                self.in_pool[layer as usize] = end;
                self.schedule.layer_computed(layer, end);
                while self.schedule.fresh().is_some() && room() {
                    let piece = self.schedule.take_fresh().unwrap();
                    self.send(piece);
                }
                while self.schedule.early().is_some() && room() {
                    let piece = self.schedule.take_early().unwrap();
                    assert!(
                        ((piece.first_block + piece.blocks) * 16).min(self.prompt) <= start,
                        "an early piece is not written by the step"
                    );
                    self.send(piece);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn every_layer_of_every_block_is_sent_once_and_when_it_is_there(
            layers in 1u32..6,
            chunks in proptest::collection::vec((1u32..60, proptest::option::weighted(0.2, 0u32..8)), 1..8),
            have in 0u32..4,
            cached in 0u32..6,
            group_bytes in 1usize..200_000,
            rooms in proptest::collection::vec(any::<bool>(), 1..40),
        ) {
            let prompt: u32 = chunks.iter().map(|(chunk, _)| chunk).sum();
            let blocks = prompt.div_ceil(16);
            let have = have.min(blocks);
            let hit = |blocks: u32| blocks.min((prompt - 1) / 16) * 16;
            let mut journey = Journey {
                schedule: PushSchedule::new(layout(layers), prompt, have, group_bytes),
                layers,
                prompt,
                in_pool: vec![hit(cached); layers as usize],
                sent: Vec::new(),
            };
            let mut turn = rooms.iter().cycle();
            let mut room = || *turn.next().unwrap();
            for (chunk, preempted) in chunks {
                let end = (journey.in_pool[0] + chunk).min(prompt);
                if end > journey.in_pool[0] {
                    journey.step(end, &mut room);
                }
                // It starts again with what the cache holds then.
                if let Some(cached) = preempted
                    && end < prompt
                {
                    journey.schedule.preempted();
                    journey.in_pool.fill(hit(cached));
                }
            }
            while journey.in_pool[0] < prompt {
                let end = (journey.in_pool[0] + 50).min(prompt);
                journey.step(end, &mut room);
            }
            journey.schedule.ends();
            while let Some(piece) = journey.schedule.take_early() {
                journey.send(piece);
            }
            prop_assert!(journey.schedule.is_complete());
            let distinct: HashSet<_> = journey.sent.iter().copied().collect();
            prop_assert_eq!(distinct.len(), journey.sent.len());
            prop_assert_eq!(journey.sent.len() as u32, layers * (blocks - have));
        }
    }
}
