//! Whether a newcomer may take blocks: the one policy for reservations and for waiting sequences.
//!
//! A sequence keeps growing after it has started, and one that finds no block costs somebody a preemption. So a newcomer
//! gets blocks only if the pool suffices even when nobody ends early: everyone grows by one token a step up to its limit
//! and then leaves. The most blocks that are in use at once on that way, up to a horizon, is the *peak*.
//!
//! * A waiting sequence starts if the peak of all that own blocks, and itself, fits the pool.
//! * A reservation is granted if the peak of all that own blocks **or wait**, and itself, fits the pool.
//!
//! Hence reservations cannot starve sequences: they never take what an older sequence, running or waiting, may need
//! within the horizon. And sequences cannot starve reservations for longer than they live, because every sequence ends at
//! its token limit and a reservation that was refused competes with the next add on equal terms. A sequence alone always
//! fits (`EngineLimits` demands it), so whoever is oldest starts at the latest when the others are gone.

use protocol::window::Kept;

/// How far ahead the forecast looks, in tokens. Further away the assumption that nobody ends early is worth little, and
/// the price of being wrong is a preemption.
pub(crate) const GROWTH_HORIZON_TOKENS: usize = 256;

/// Sequences that begin with the same tokens and have the blocks of that beginning in common, as far as they have any.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Kin {
    /// The same for all of them, and for nobody else.
    pub(crate) family: u64,
    /// Blocks of the common beginning in each group of layers, all full.
    pub(crate) blocks: usize,
}

/// Somebody who owns blocks, or is about to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holder {
    /// Blocks it owns now.
    pub(crate) blocks: usize,
    /// Tokens whose KV it needs to have now.
    pub(crate) tokens: usize,
    /// Most tokens whose KV it may add, one a step.
    pub(crate) growth: usize,
    /// Rows that it lacks before its next token: as many of them as a step takes may need their blocks at once.
    pub(crate) rows: usize,
    /// Leaves after its growth; otherwise it stays for a time nobody knows.
    pub(crate) leaves: bool,
    /// Whose blocks are among its own: they are counted once for all kin.
    pub(crate) kin: Option<Kin>,
}

/// Reckons with everybody's growth. Keeps its buffer from one question to the next.
#[derive(Debug)]
pub(crate) struct Forecast {
    kept: Kept,
    /// Most rows of a sequence in a step.
    most_rows: usize,
    horizon: usize,
    holders: Vec<Holder>,
    /// Families that have been met in a count.
    met: Vec<Family>,
}

/// Kin in a count.
#[derive(Clone, Copy, Debug)]
struct Family {
    name: u64,
    /// Blocks that they keep.
    kept: usize,
    /// How many of these are of the common beginning.
    common: usize,
    /// Blocks that they would have if they kept all.
    whole: usize,
}

impl Forecast {
    pub(crate) fn new(kept: Kept, most_rows: usize, horizon: usize) -> Self {
        Self {
            kept,
            most_rows,
            horizon,
            holders: Vec::new(),
            met: Vec::new(),
        }
    }

    /// The peak of `holders` in blocks; exact if it exceeds `total`, else some number that does not.
    pub(crate) fn peak(&mut self, holders: impl Iterator<Item = Holder>, total: usize) -> usize {
        self.holders.clear();
        self.holders.extend(holders);
        // Nobody leaves: cheap, and enough whenever the pool is not crowded.
        let bound = self.sum(usize::MAX, |_| true);
        if bound <= total {
            return bound;
        }
        // Use only falls when somebody leaves, so it is highest in a step in which somebody has just reached its limit.
        let mut peak = self.in_use(self.horizon);
        for index in 0..self.holders.len() {
            let last_step = self.holders[index].growth;
            if last_step < self.horizon {
                peak = peak.max(self.in_use(last_step));
            }
        }
        peak
    }

    /// Blocks in use after `step` steps.
    fn in_use(&mut self, step: usize) -> usize {
        self.sum(step, |holder| !holder.leaves || holder.growth >= step)
    }

    /// Blocks of those who are `present`, after `step` steps; what kin have in common is counted once.
    fn sum(&mut self, step: usize, present: impl Fn(&Holder) -> bool) -> usize {
        let mut met = std::mem::take(&mut self.met);
        met.clear();
        let mut blocks = 0;
        for holder in self.holders.iter().filter(|holder| present(holder)) {
            let has = self.blocks_at(holder, step);
            let Some(kin) = holder.kin else {
                blocks += has;
                continue;
            };
            let tokens = self.tokens_at(holder, step);
            // Those who are farther have fewer of the common blocks left.
            let common = self.kept.common_blocks(kin.blocks, tokens);
            let all = self.kept.all_blocks(tokens).max(holder.blocks);
            match met.iter_mut().find(|family| family.name == kin.family) {
                Some(family) => {
                    family.kept += has - common.min(family.common);
                    family.common = common.max(family.common);
                    family.whole += all - self.kept.in_all_groups(kin.blocks).min(all);
                }
                None => met.push(Family {
                    name: kin.family,
                    kept: has,
                    common,
                    whole: all,
                }),
            }
        }
        // What has left a window was common, or is made up for: together they never have more than if all were kept.
        blocks += met.iter().map(|family| family.kept.min(family.whole)).sum::<usize>();
        self.met = met;
        blocks
    }

    fn tokens_at(&self, holder: &Holder, step: usize) -> usize {
        holder.tokens + holder.growth.min(step).min(self.horizon)
    }

    /// Where blocks leave a window: the most at once until then, so that nobody has fewer later on.
    fn blocks_at(&self, holder: &Holder, step: usize) -> usize {
        let tokens = self.tokens_at(holder, step);
        let rows = holder.rows.min(self.most_rows);
        self.kept.most_blocks(tokens, rows).max(holder.blocks)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use protocol::window::Groups;

    use super::*;

    fn holder(tokens: usize, growth: usize) -> Holder {
        Holder {
            blocks: 0,
            tokens,
            growth,
            rows: 1,
            leaves: true,
            kin: None,
        }
    }

    fn peak(horizon: usize, holders: &[Holder]) -> usize {
        Forecast::new(Kept::new(Groups::ONE, 4), 8, horizon).peak(holders.iter().copied(), 0)
    }

    #[test]
    fn counts_growth_until_someone_leaves() {
        // 8 tokens growing to 16 (4 blocks), and 4 growing to 8 (2 blocks), which leaves after 4 steps.
        assert_eq!(peak(100, &[holder(8, 8), holder(4, 4)]), 3 + 2);
        assert_eq!(peak(100, &[holder(8, 8)]), 4);
        assert_eq!(peak(100, &[holder(4, 0), holder(4, 8)]), 3);
    }

    #[test]
    fn those_who_hold_do_not_leave() {
        let held = Holder {
            blocks: 2,
            tokens: 0,
            growth: 0,
            rows: 1,
            leaves: false,
            kin: None,
        };
        assert_eq!(peak(100, &[held, holder(4, 8)]), 2 + 3);
    }

    #[test]
    fn what_kin_share_is_counted_once() {
        let kin = |tokens, growth, family| Holder {
            kin: Some(Kin { family, blocks: 2 }),
            ..holder(tokens, growth)
        };
        // Two shared blocks, and for each of three the partial one and what it grows into.
        assert_eq!(peak(100, &[kin(9, 6, 7), kin(9, 6, 7), kin(9, 6, 7)]), 2 + 3 * 2);
        assert_eq!(peak(100, &[kin(9, 6, 7), kin(9, 6, 8)]), 2 * (2 + 2));
        // The last one to go takes the shared ones along.
        assert_eq!(peak(100, &[kin(9, 1, 7), kin(9, 14, 7), holder(4, 14)]), 2 + 4 + 5);
    }

    #[test]
    fn looks_no_further_than_the_horizon() {
        assert_eq!(peak(4, &[holder(4, 400)]), 2);
        assert_eq!(peak(0, &[holder(4, 400), holder(5, 400)]), 3);
    }

    proptest! {
        /// Against the definition: walk through every step up to the horizon.
        #[test]
        fn equals_a_walk_through_all_steps(
            horizon in 0usize..40,
            block_tokens in 1usize..6,
            raw in prop::collection::vec((0usize..12, 1usize..40, 0usize..60, any::<bool>()), 1..8),
            total in 0usize..80,
        ) {
            let holders: Vec<Holder> = raw
                .iter()
                .map(|&(blocks, tokens, growth, leaves)| Holder { blocks, tokens, growth, rows: 1, leaves, kin: None })
                .collect();
            let walk = (0..=horizon).map(|step| {
                let present = holders.iter().filter(|h| !h.leaves || h.growth >= step);
                present.map(|h| (h.tokens + h.growth.min(step)).div_ceil(block_tokens).max(h.blocks)).sum::<usize>()
            });
            let expected = walk.max().unwrap();
            let got = Forecast::new(Kept::new(Groups::ONE, block_tokens), 8, horizon).peak(holders.iter().copied(), total);
            if expected > total {
                prop_assert_eq!(got, expected);
            } else {
                prop_assert!(got <= total);
            }
        }
    }
}
