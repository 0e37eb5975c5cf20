//! How much of a sequence's KV is kept when layers of a model see a limited number of positions.
//!
//! Where a layer has a window, its KV of positions before the window of the next row is never read again: whoever has it may
//! let go of it, and a receiver of the sequence never needs it. A block can only be let go of as a whole, so layers that see
//! everything and layers that do not are in different blocks: the layers of a model form [`Groups`], and a sequence has a list
//! of blocks for each group. All blocks of a pool are of one size, whatever group they serve (the idea is that of vLLM's hybrid
//! KV cache manager), so that there is one number of free blocks, and a block that one group lets go of is room for all.
//! Both ends of a handoff, the engine and the coordinator reckon with what is here, so that all of them mean the same blocks.

use std::fmt;

use bincode::{Decode, Encode};

use crate::moved::HaveBlocks;

/// Most groups of layers that a layout may have.
pub const MAX_GROUPS: u32 = 64;

/// The groups of a model's layers. Those whose layers see all positions come first, those with a window after them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub struct Groups {
    full: u32,
    sliding: u32,
    /// Positions that a row sees in the layer with a window that sees most, its own included. 0 where no layer has one.
    window: u32,
    /// Layers that the last group without a window has less than the others, and those that the last one with a window has less.
    spare: (u32, u32),
}

impl Groups {
    /// All layers are in one group, and everything is kept.
    pub const ONE: Self = Self {
        full: 1,
        sliding: 0,
        window: 0,
        spare: (0, 0),
    };

    /// All layers are in one group, and see so many positions at most.
    pub const fn sliding(window: u32) -> Self {
        Self {
            full: 0,
            sliding: 1,
            window,
            spare: (0, 0),
        }
    }

    /// So many groups of layers that see everything, and so many of layers that see `window` positions at most.
    pub const fn mixed(full: u32, sliding: u32, window: u32) -> Self {
        Self {
            full,
            sliding,
            window,
            spare: (0, 0),
        }
    }

    /// The same, whose last group of each kind lacks some layers: of those without a window, and of those with one.
    pub const fn with_spare(self, full: u32, sliding: u32) -> Self {
        Self {
            spare: (full, sliding),
            ..self
        }
    }

    /// How many layers a group has less than its blocks have room for.
    pub const fn spare(self, group: usize) -> u32 {
        if group + 1 == self.full as usize {
            self.spare.0
        } else if group + 1 == self.count() {
            self.spare.1
        } else {
            0
        }
    }

    /// The group of which a node tells others what it has cached. Windows are forgotten first, so that one with a window decides what a
    /// prompt finds.
    pub const fn told(self) -> usize {
        if self.sliding > 0 { self.full as usize } else { 0 }
    }

    /// One group, with this window if there is one.
    pub fn of_window(window: Option<u32>) -> Self {
        window.map_or(Self::ONE, Self::sliding)
    }

    /// As many groups, of which everything is kept.
    pub const fn whole(self) -> Self {
        Self {
            full: self.full + self.sliding,
            sliding: 0,
            window: 0,
            spare: (0, 0),
        }
    }

    /// How many groups.
    pub const fn count(self) -> usize {
        self.full as usize + self.sliding as usize
    }

    /// Whether the layers of a group, by its number, have a window.
    pub const fn slides(self, group: usize) -> bool {
        group >= self.full as usize
    }

    /// The window of the groups that have one. `None`: everything is kept.
    pub fn window(self) -> Option<u32> {
        (self.sliding > 0).then_some(self.window)
    }

    /// The window of a group, by its number; `None`: its layers see everything.
    pub fn window_of(self, group: usize) -> Option<u32> {
        self.window().filter(|_| self.slides(group))
    }

    /// The number of the first block of a handoff ([`crate::moved::Moved`]) to somebody who has some.
    pub fn first_number(self, have: HaveBlocks) -> u32 {
        if self.slides(0) { have.sliding } else { have.full }
    }

    /// What is wrong with groups that somebody else names.
    pub fn check(self) -> Result<(), String> {
        let count = u64::from(self.full) + u64::from(self.sliding);
        if count == 0 || count > u64::from(MAX_GROUPS) {
            return Err(format!("groups: are {count}, must be 1 to {MAX_GROUPS}"));
        }
        if (self.sliding > 0) != (self.window > 0) {
            return Err(format!(
                "window: is {} with {} groups that have one",
                self.window, self.sliding
            ));
        }
        Ok(())
    }
}

impl fmt::Display for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self {
                sliding: 0, full: 1, ..
            } => write!(f, "no window"),
            Self { sliding: 0, full, .. } => write!(f, "{full} groups of layers, no window"),
            Self { full: 0, window, .. } => write!(f, "a window of {window} tokens"),
            Self {
                full, sliding, window, ..
            } => write!(
                f,
                "a window of {window} tokens in {sliding} of {} groups of layers",
                u64::from(full) + u64::from(sliding)
            ),
        }
    }
}

/// Which blocks of a sequence are kept for one group of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupKept {
    /// Positions that are kept behind a row, its own included; `None`: all.
    window: Option<usize>,
    block_tokens: usize,
}

impl GroupKept {
    /// Everything is kept.
    pub const ALL: Self = Self {
        window: None,
        block_tokens: 1,
    };

    /// For layers whose rows see their last `window` positions, their own included, in blocks of `block_tokens` tokens (at
    /// least 1). `None`: rows see everything.
    ///
    /// One full block at least is kept, whatever the window: new blocks are named after the one before them.
    pub fn new(window: Option<usize>, block_tokens: usize) -> Self {
        let block_tokens = block_tokens.max(1);
        Self {
            window: window.map(|window| window.max(block_tokens.saturating_add(1))),
            block_tokens,
        }
    }

    /// Whether blocks are ever let go of.
    pub fn slides(&self) -> bool {
        self.window.is_some()
    }

    /// The first block that is kept of a sequence of which `computed` tokens are computed: the row of that position and all
    /// later ones see nothing before it. It is one of the full ones; 0 where nothing may go.
    pub fn first_block(&self, computed: usize) -> usize {
        let start = self
            .window
            .map_or(0, |window| computed.saturating_add(1).saturating_sub(window));
        start / self.block_tokens
    }

    /// As [`GroupKept::first_block`], with so many full blocks computed.
    pub fn first_of_blocks(&self, blocks: usize) -> usize {
        self.first_block(blocks.saturating_mul(self.block_tokens))
    }

    /// Blocks that hold `tokens` tokens, kept or not.
    pub fn all_blocks(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    /// Most blocks that a sequence of up to `tokens` tokens has at once, if up to `rows` rows are computed in a step. Never
    /// less for more tokens.
    pub fn most_blocks(&self, tokens: usize, rows: usize) -> usize {
        let all = self.all_blocks(tokens);
        // From the block of position `computed + 1 - window` to that of `computed + rows - 1`, however they lie.
        let slack = 2 * self.block_tokens;
        let kept = |window: usize| (window.saturating_add(rows.max(1)).saturating_add(slack) - 3) / self.block_tokens;
        self.window.map_or(all, |window| all.min(kept(window)))
    }

    /// Blocks in common of sequences that begin with the same `shared` blocks and of which `tokens` tokens or fewer are
    /// there: those that the longest of them still has.
    pub fn common_blocks(&self, shared: usize, tokens: usize) -> usize {
        shared.saturating_sub(self.first_block(tokens.saturating_sub(1)))
    }
}

/// Which blocks of a sequence are kept, in all groups together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    groups: Groups,
    full: GroupKept,
    sliding: GroupKept,
}

impl Kept {
    /// Everything is kept, in one group.
    pub const ALL: Self = Self {
        groups: Groups::ONE,
        full: GroupKept::ALL,
        sliding: GroupKept::ALL,
    };

    /// In blocks of `block_tokens` tokens (at least 1).
    pub fn new(groups: Groups, block_tokens: usize) -> Self {
        Self {
            groups,
            full: GroupKept::new(None, block_tokens),
            sliding: GroupKept::new(groups.window().map(|window| window as usize), block_tokens),
        }
    }

    /// How many groups.
    pub fn count(&self) -> usize {
        self.groups.count()
    }

    /// One group, by its number.
    pub fn group(&self, group: usize) -> GroupKept {
        if self.groups.slides(group) {
            self.sliding
        } else {
            self.full
        }
    }

    /// All groups.
    pub fn groups(&self) -> impl Iterator<Item = GroupKept> + use<> {
        let kept = *self;
        (0..kept.count()).map(move |group| kept.group(group))
    }

    /// Whether blocks are ever let go of.
    pub fn slides(&self) -> bool {
        self.groups.window().is_some()
    }

    fn sum(&self, of: impl Fn(&GroupKept) -> usize) -> usize {
        let (full, sliding) = (self.groups.full as usize, self.groups.sliding as usize);
        let of_full = if full > 0 {
            of(&self.full).saturating_mul(full)
        } else {
            0
        };
        let of_sliding = if sliding > 0 {
            of(&self.sliding).saturating_mul(sliding)
        } else {
            0
        };
        of_full.saturating_add(of_sliding)
    }

    /// The number of the group of which nodes tell what they have cached.
    pub fn told_group(&self) -> usize {
        self.groups.told()
    }

    /// The group of which nodes tell what they have cached.
    pub fn told(&self) -> GroupKept {
        self.group(self.told_group())
    }

    /// About how many tokens `sequences` sequences with `blocks` blocks have; where all layers have a window, at least.
    pub fn tokens_in(&self, sequences: usize, blocks: usize) -> usize {
        let (full, sliding) = (self.groups.full as usize, self.groups.sliding as usize);
        let places = if full == 0 || sliding == 0 {
            blocks / self.count()
        } else {
            // Those of long texts, and those of short ones.
            // A node may say anything of its window.
            let each = self.sliding.most_blocks(usize::MAX / 2, 1).saturating_mul(sliding);
            let windows = each.saturating_mul(sequences);
            (blocks.saturating_sub(windows) / full).max(blocks / self.count())
        };
        places.saturating_mul(self.full.block_tokens)
    }

    /// Blocks that hold `tokens` tokens, kept or not.
    pub fn all_blocks(&self, tokens: usize) -> usize {
        self.sum(|kept| kept.all_blocks(tokens))
    }

    /// Blocks of so many blocks' worth of tokens, kept or not.
    pub fn in_all_groups(&self, blocks: usize) -> usize {
        blocks.saturating_mul(self.count())
    }

    /// Most blocks that `sequences` sequences of up to `tokens` tokens have at once whose first `shared` blocks' worth of tokens are the same,
    /// if up to `rows` rows of each are computed in a step. Never more than if they kept all.
    pub fn most_blocks_of(&self, sequences: usize, shared: usize, tokens: usize, rows: usize) -> usize {
        let together = |each: usize, common: usize| {
            let own = each - common.min(each);
            each.saturating_add(own.saturating_mul(sequences.saturating_sub(1)))
        };
        self.sum(|group| {
            let kept = together(group.most_blocks(tokens, rows), group.common_blocks(shared, tokens));
            kept.min(together(group.all_blocks(tokens), shared))
        })
    }

    /// Most blocks that a sequence of up to `tokens` tokens has at once, if up to `rows` rows are computed in a step. Never
    /// less for more tokens.
    pub fn most_blocks(&self, tokens: usize, rows: usize) -> usize {
        self.sum(|kept| kept.most_blocks(tokens, rows))
    }

    /// Blocks in common of sequences whose first `shared` blocks' worth of tokens are the same and of which `tokens` tokens or fewer are there:
    /// those that the longest of them still has.
    pub fn common_blocks(&self, shared: usize, tokens: usize) -> usize {
        self.sum(|kept| kept.common_blocks(shared, tokens))
    }

    /// Blocks of a prompt of `tokens` tokens that a receiver lacks which has the first `cached` blocks' worth, up to the row of position
    /// `computed`.
    pub fn missing_blocks(&self, tokens: usize, cached: usize, computed: usize) -> usize {
        self.sum(|kept| {
            let first = cached.max(kept.first_block(computed));
            kept.all_blocks(tokens).saturating_sub(first)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_window_everything_is_kept() {
        let kept = GroupKept::new(None, 4);
        assert!(!kept.slides());
        assert_eq!((kept.first_block(1_000), kept.most_blocks(1_001, 7)), (0, 251));
        assert_eq!(kept.common_blocks(5, 1_000), 5);
    }

    #[test]
    fn a_block_goes_when_its_last_position_leaves_the_window() {
        let kept = GroupKept::new(Some(8), 4);
        // The row of position 10 sees 3..=10, that of position 11 sees 4..=11.
        assert_eq!((kept.first_block(10), kept.first_block(11)), (0, 1));
        assert_eq!((kept.first_block(14), kept.first_block(15)), (1, 2));
        assert_eq!(
            (
                kept.common_blocks(3, 11),
                kept.common_blocks(3, 12),
                kept.common_blocks(3, 40)
            ),
            (3, 2, 0)
        );
    }

    #[test]
    fn small_windows_keep_the_last_full_block() {
        let kept = GroupKept::new(Some(1), 4);
        for computed in 0..40 {
            assert_eq!(
                kept.first_block(computed),
                (computed / 4).saturating_sub(1),
                "{computed}"
            );
        }
    }

    #[test]
    fn no_sequence_has_more_than_the_most() {
        for (window, block) in [(1, 1_usize), (1, 4), (5, 4), (8, 4), (9, 4), (16, 16), (33, 16), (7, 3)] {
            let kept = GroupKept::new(Some(window), block);
            for rows in [1_usize, 2, 5, 16, 30] {
                let mut most = 0;
                for computed in 0..200 {
                    let end = computed + rows;
                    let has = end.div_ceil(block) - kept.first_block(computed);
                    assert!(has <= kept.most_blocks(end, rows), "{window} {block} {rows} {computed}");
                    most = most.max(has);
                }
                assert_eq!(
                    most,
                    kept.most_blocks(200, rows),
                    "{window} {block} {rows}: no more than needed"
                );
            }
        }
    }

    #[test]
    fn groups_count_together_and_each_by_its_own_window() {
        let kept = Kept::new(Groups::mixed(1, 5, 8), 4);
        let (full, sliding) = (GroupKept::new(None, 4), GroupKept::new(Some(8), 4));
        assert_eq!((kept.count(), kept.slides()), (6, true));
        assert_eq!((kept.group(0), kept.group(1), kept.group(5)), (full, sliding, sliding));
        assert_eq!(kept.groups().filter(GroupKept::slides).count(), 5);
        assert_eq!(kept.all_blocks(41), 6 * 11);
        assert_eq!(kept.most_blocks(400, 1), 100 + 5 * sliding.most_blocks(400, 1));
        assert_eq!(kept.common_blocks(3, 12), 3 + 5 * 2);
        // Two sequences that share nine blocks, of which windows still have one.
        assert_eq!(kept.most_blocks_of(2, 9, 40, 1), 11 + 5 * (3 + 2));
        assert_eq!(kept.missing_blocks(41, 2, 40), 9 + 5 * (11 - 8));
        assert_eq!(kept.told(), sliding);
        for (sequences, tokens) in [(1, 8), (1, 400), (3, 400)] {
            let blocks = sequences * kept.most_blocks(tokens, 1);
            assert_eq!(kept.tokens_in(sequences, blocks), sequences * tokens);
        }
        let nonsense = Kept::new(Groups::mixed(1, 63, u32::MAX), 1);
        assert_eq!(nonsense.tokens_in(u32::MAX as usize, 640), 10);
        for groups in [Groups::ONE, Groups::sliding(8)] {
            assert_eq!((groups.told(), Kept::new(groups, 4).tokens_in(2, 5)), (0, 20));
        }
    }

    #[test]
    fn nonsense_of_others_is_named() {
        let wrong = [
            Groups::mixed(0, 0, 0),
            Groups::mixed(60, 5, 8),
            Groups::mixed(u32::MAX, u32::MAX, 8),
            Groups::sliding(0),
            Groups::mixed(1, 0, 8),
        ];
        assert!(wrong.iter().all(|groups| groups.check().is_err()), "{wrong:?}");
        for groups in [Groups::ONE, Groups::sliding(1), Groups::mixed(1, 5, 512)] {
            assert_eq!(groups.check(), Ok(()));
        }
    }
}
