//! How much of a sequence's KV is kept when every layer of a model sees a limited number of positions.
//!
//! Where all layers have a window, a block whose positions lie before the window of the next row is never read again: whoever has
//! it may let go of it, and a receiver of the sequence never needs it. Both ends of a handoff, the engine and the coordinator
//! reckon with what is here, so that all of them mean the same blocks.

/// Which blocks of a sequence are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Positions that are kept behind a row, its own included; `None`: all.
    window: Option<usize>,
    block_tokens: usize,
}

impl Kept {
    /// Everything is kept.
    pub const ALL: Self = Self {
        window: None,
        block_tokens: 1,
    };

    /// For a model whose rows see their last `window` positions, their own included, in blocks of `block_tokens` tokens (at
    /// least 1). `None`: rows see everything, in some layer at least.
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

    /// As [`Kept::first_block`], with so many full blocks computed.
    pub fn first_of_blocks(&self, blocks: usize) -> usize {
        self.first_block(blocks.saturating_mul(self.block_tokens))
    }

    /// Blocks that hold `tokens` tokens, kept or not.
    pub fn all_blocks(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens)
    }

    /// Most blocks that `sequences` sequences of up to `tokens` tokens have at once that begin with the same `shared` blocks, if
    /// up to `rows` rows of each are computed in a step. Never more than if they kept all.
    pub fn most_blocks_of(&self, sequences: usize, shared: usize, tokens: usize, rows: usize) -> usize {
        let together = |each: usize, common: usize| {
            let own = each - common.min(each);
            each.saturating_add(own.saturating_mul(sequences.saturating_sub(1)))
        };
        let kept = together(self.most_blocks(tokens, rows), self.common_blocks(shared, tokens));
        kept.min(together(self.all_blocks(tokens), shared))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_window_everything_is_kept() {
        let kept = Kept::new(None, 4);
        assert!(!kept.slides());
        assert_eq!((kept.first_block(1_000), kept.most_blocks(1_001, 7)), (0, 251));
        assert_eq!(kept.common_blocks(5, 1_000), 5);
    }

    #[test]
    fn a_block_goes_when_its_last_position_leaves_the_window() {
        let kept = Kept::new(Some(8), 4);
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
        let kept = Kept::new(Some(1), 4);
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
            let kept = Kept::new(Some(window), block);
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
}
