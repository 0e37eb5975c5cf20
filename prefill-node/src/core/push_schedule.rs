//! When which part of a prompt's KV is sent while later parts are computed.
//!
//! A chunk of the prompt fills some blocks, layer after layer. The layers of these blocks are collected until they are worth
//! a frame (message count costs more than bytes), and are due as soon as the last of them is computed. So after the last
//! chunk's last layer just one such piece is left: that is the exposed part of the transfer. Where a model's layers form several groups
//! ([`protocol::window::Groups`]), each has blocks of its own, and pieces are of one group. A block that a chunk fills only in
//! part is due with the chunk that completes it; the prompt's last block with the last chunk. What the prefix cache had of
//! the prompt is due, in all layers, before the first chunk is computed.
//!
//! Pieces are handed out from two lines. *Fresh* ones are written by the running step: only the compute thread may copy
//! them now. *Early* ones are complete and stay as they are, so anybody may copy them: cached blocks, and what nobody had
//! room for in an earlier step. Every (layer, block) is handed out once, also if the sequence is preempted in between: what
//! was due then and not taken is due again when it has been computed again (the same tokens give the same bits).

use std::collections::VecDeque;

use protocol::kv::{KvLayout, KvPlace};
use protocol::moved::{HaveBlocks, Moved};

/// Layers and blocks of a group to send together. Blocks are places in the group's list of the sequence's blocks, layers are those of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The group of layers.
    pub group: u32,
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
    piece_bytes: usize,
    moved: Moved,
    progress: Vec<Progress>,
    early: VecDeque<Piece>,
    fresh: VecDeque<Piece>,
    /// Due when the sequence lost its blocks.
    lost: VecDeque<Piece>,
}

/// How far a group is.
#[derive(Clone, Copy, Debug)]
struct Progress {
    /// Blocks below this place are due or taken, in all layers, or need not be sent.
    next_block: u32,
    /// First layer of the piece that is being collected.
    next_layer: u32,
}

impl PushSchedule {
    /// A schedule for `prompt_tokens` tokens, of which the receiver has some blocks. Layers are sent once they hold `piece_bytes`
    /// bytes. `None` if the receiver says that it has more blocks than there are.
    pub fn new(layout: KvLayout, prompt_tokens: u32, have: HaveBlocks, piece_bytes: usize) -> Option<Self> {
        let blocks = prompt_tokens.div_ceil(layout.block_tokens);
        let moved = Moved::new(layout.groups, have, blocks)?;
        let progress = (0..layout.groups.count()).map(|group| Progress {
            next_block: moved.places(group).start,
            next_layer: 0,
        });
        Some(Self {
            layout,
            prompt_tokens,
            piece_bytes,
            moved,
            progress: progress.collect(),
            early: VecDeque::new(),
            fresh: VecDeque::new(),
            lost: VecDeque::new(),
        })
    }

    /// The blocks that are sent.
    pub fn moved(&self) -> Moved {
        self.moved
    }

    /// Blocks of a group that hold the prompt.
    fn prompt_blocks(&self) -> u32 {
        self.prompt_tokens.div_ceil(self.layout.block_tokens)
    }

    /// A step is going to compute rows behind the first `computed_tokens` positions, which are in the pool in all layers.
    pub fn step_begins(&mut self, computed_tokens: u32) {
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
        for group in 0..self.progress.len() {
            let progress = &mut self.progress[group];
            progress.next_layer = 0;
            if end > progress.next_block {
                let start = std::mem::replace(&mut progress.next_block, end);
                self.cut(group as u32, start, end);
            }
        }
    }

    /// The layer at `place` of the positions `0..computed_tokens` is in the pool.
    pub fn layer_computed(&mut self, place: KvPlace, computed_tokens: u32) {
        let end = self.full_blocks(computed_tokens);
        // Places are those of the layout.
        let Some(progress) = self.progress.get_mut(place.group as usize) else {
            return;
        };
        if end <= progress.next_block {
            return;
        }
        let done = place.layer + 1;
        let layers = done.saturating_sub(progress.next_layer);
        let blocks = end - progress.next_block;
        let bytes = layers as usize * blocks as usize * self.layout.layer_block_bytes();
        let last = done == self.layout.layers_of(place.group as usize);
        if bytes < self.piece_bytes && !last {
            return;
        }
        self.fresh.push_back(Piece {
            group: place.group,
            first_layer: progress.next_layer,
            layers,
            first_block: progress.next_block,
            blocks,
        });
        progress.next_layer = done;
        if last {
            progress.next_block = end;
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
        let end = self.prompt_blocks();
        self.progress.iter().all(|group| group.next_block >= end)
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

    /// Makes all layers of a group's blocks `start..end` due: pieces of at most the size of one, or of one block in one layer.
    fn cut(&mut self, group: u32, start: u32, end: u32) {
        let room = self.piece_bytes / self.layout.layer_block_bytes().max(1);
        // At least 1 and at most all there are: 32 bits suffice.
        let most_blocks = room.clamp(1, (end - start) as usize) as u32;
        let all = self.layout.layers_of(group as usize).max(1);
        let most_layers = (room / most_blocks as usize).clamp(1, all as usize) as u32;
        for first_layer in (0..all).step_by(most_layers as usize) {
            for first_block in (start..end).step_by(most_blocks as usize) {
                self.early.push_back(Piece {
                    group,
                    first_layer,
                    layers: most_layers.min(all - first_layer),
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
    use kv_transfer::core::{Coverage, Extent, Part};
    use proptest::prelude::*;
    use protocol::kv::KvDtype;
    use protocol::window::Groups;
    use std::collections::{BTreeMap, HashSet};

    fn layout(num_layers: u32) -> KvLayout {
        KvLayout {
            num_layers,
            num_kv_heads: 3,
            head_dim: 64,
            block_tokens: 16,
            dtype: KvDtype::F16,
            latent: false,
            groups: Groups::ONE,
        }
    }

    fn piece(first_layer: u32, layers: u32, first_block: u32, blocks: u32) -> Piece {
        Piece {
            group: 0,
            first_layer,
            layers,
            first_block,
            blocks,
        }
    }

    fn scheduled(layout: KvLayout, tokens: u32, have: u32, piece_bytes: usize) -> PushSchedule {
        PushSchedule::new(layout, tokens, HaveBlocks::all(have), piece_bytes).unwrap()
    }

    fn place(layer: u32) -> KvPlace {
        KvPlace::in_one_group(layer)
    }

    #[test]
    fn a_short_prompt_goes_in_one_piece_after_the_last_layer() {
        // One block of 12,288 bytes a layer: all 30 layers stay below 512 KiB.
        let mut schedule = scheduled(layout(30), 10, 0, 512 << 10);
        schedule.step_begins(0);
        for layer in 0..29 {
            schedule.layer_computed(place(layer), 10);
            assert_eq!((schedule.fresh(), schedule.early()), (None, None));
        }
        schedule.layer_computed(place(29), 10);
        assert_eq!(schedule.take_fresh(), Some(piece(0, 30, 0, 1)));
        assert!(schedule.is_complete());
    }

    #[test]
    fn a_long_chunk_goes_in_layer_groups_and_leaves_one_group_at_the_end() {
        // 512 tokens = 32 blocks of 12,288 bytes: two layers reach 512 KiB.
        let mut schedule = scheduled(layout(30), 512, 0, 512 << 10);
        schedule.step_begins(0);
        schedule.layer_computed(place(0), 512);
        assert_eq!(schedule.fresh(), None);
        for layer in 1..29 {
            schedule.layer_computed(place(layer), 512);
            assert_eq!(
                schedule.take_fresh(),
                (layer % 2 == 1).then(|| piece(layer - 1, 2, 0, 32))
            );
        }
        schedule.layer_computed(place(29), 512);
        assert_eq!(schedule.take_fresh(), Some(piece(28, 2, 0, 32)));
        assert!(schedule.is_complete());
    }

    #[test]
    fn what_was_cached_is_due_before_anything_is_computed() {
        // 40 blocks a frame: 100 cached blocks are cut in each layer, 10 go four layers at a time.
        let mut schedule = scheduled(layout(30), 1_700, 0, 40 * 12_288);
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
        schedule.layer_computed(place(0), 1_700);
        assert_eq!((schedule.early(), schedule.fresh()), (None, None));
        let mut schedule = scheduled(layout(30), 200, 2, 40 * 12_288);
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
        /// Where the model's layers are.
        places: Vec<KvPlace>,
        prompt: u32,
        /// Tokens in the pool, by group and layer.
        in_pool: BTreeMap<(u32, u32), u32>,
        /// Layer and number of each block.
        sent: Vec<(u32, u32)>,
    }

    impl Journey {
        fn send(&mut self, piece: Piece) {
            for layer in piece.first_layer..piece.first_layer + piece.layers {
                for block in piece.first_block..piece.first_block + piece.blocks {
                    let end = ((block + 1) * 16).min(self.prompt);
                    let there = self.in_pool[&(piece.group, layer)];
                    assert!(there >= end, "layer {layer} of block {block} is not there");
                    let number = self.schedule.moved().number(piece.group as usize, block);
                    self.sent.push((layer, number));
                }
            }
        }

        /// Tokens in the pool in all layers.
        fn computed(&self) -> u32 {
            self.in_pool.values().copied().min().unwrap_or(0)
        }

        /// Computes up to `end` tokens; there is room for a piece as `room` says, in turn.
        fn step(&mut self, end: u32, room: &mut impl FnMut() -> bool) {
            let start = self.computed();
            self.schedule.step_begins(start);
            for place in self.places.clone() {
                self.in_pool.insert((place.group, place.layer), end);
                self.schedule.layer_computed(place, end);
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
            (layers, full, sliding, mixed) in (1u32..6, 1u32..3, 1u32..3, any::<bool>()),
            (spare_full, spare_sliding, turns) in (0u32..4, 0u32..4, any::<u64>()),
            chunks in proptest::collection::vec((1u32..60, proptest::option::weighted(0.2, 0u32..8)), 1..8),
            (have, have_more) in (0u32..4, 0u32..4),
            cached in 0u32..6,
            piece_bytes in 1usize..200_000,
            rooms in proptest::collection::vec(any::<bool>(), 1..40),
        ) {
            let prompt: u32 = chunks.iter().map(|(chunk, _)| chunk).sum();
            let blocks = prompt.div_ceil(16);
            let have = HaveBlocks { full: have.min(blocks), sliding: (have + have_more).min(blocks) };
            let spare = |layers_less: u32| layers_less.min(layers - 1);
            let groups = if mixed {
                Groups::mixed(full, sliding, 40).with_spare(spare(spare_full), spare(spare_sliding))
            } else {
                Groups::ONE
            };
            let hit = |blocks: u32| blocks.min((prompt - 1) / 16) * 16;
            let layout = KvLayout { groups, ..layout(layers) };
            let places = places(&layout, turns);
            let mut journey = Journey {
                schedule: PushSchedule::new(layout, prompt, have, piece_bytes).unwrap(),
                in_pool: places.iter().map(|place| ((place.group, place.layer), hit(cached))).collect(),
                places,
                prompt,
                sent: Vec::new(),
            };
            let mut turn = rooms.iter().cycle();
            let mut room = || *turn.next().unwrap();
            for (chunk, preempted) in chunks {
                let end = (journey.computed() + chunk).min(prompt);
                if end > journey.computed() {
                    journey.step(end, &mut room);
                }
                // It starts again with what the cache holds then.
                if let Some(cached) = preempted
                    && end < prompt
                {
                    journey.schedule.preempted();
                    journey.in_pool.values_mut().for_each(|tokens| *tokens = hit(cached));
                }
            }
            while journey.computed() < prompt {
                let end = (journey.computed() + 50).min(prompt);
                journey.step(end, &mut room);
            }
            journey.schedule.ends();
            while let Some(piece) = journey.schedule.take_early() {
                journey.send(piece);
            }
            prop_assert!(journey.schedule.is_complete());
            let distinct: HashSet<_> = journey.sent.iter().copied().collect();
            prop_assert_eq!(distinct.len(), journey.sent.len());
            // What the two ends of a handoff wait for.
            let moved = journey.schedule.moved();
            let mut coverage = Coverage::new(Extent::of(&layout, &moved));
            for (layer, number) in journey.sent {
                let part = Part { first_layer: layer, layers: 1, first_block: number, blocks: 1 };
                prop_assert!(coverage.insert(&part), "{}", part);
            }
            prop_assert_eq!(coverage.missing(), 0);
        }
    }

    /// Places for the layers of a model, whose groups come in an order that `turns` decides.
    fn places(layout: &KvLayout, mut turns: u64) -> Vec<KvPlace> {
        let count = layout.groups.count() as u32;
        let most = |group: u32| layout.layers_of(group as usize);
        let mut next = vec![0; count as usize];
        let mut places = Vec::new();
        loop {
            let open: Vec<u32> = (0..count)
                .filter(|group| next[*group as usize] < most(*group))
                .collect();
            if open.is_empty() {
                return places;
            }
            let group = open[(turns % open.len() as u64) as usize];
            turns = turns.rotate_right(7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let layer = next[group as usize];
            next[group as usize] += 1;
            places.push(KvPlace { group, layer });
        }
    }
}
