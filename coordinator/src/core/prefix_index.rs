//! Which nodes have which prefixes cached, by what they tell.
//!
//! A block is known by the hash that `protocol::prefix` chains over everything before it, so a node that has block number
//! n of a prompt has the n before it, too: nodes forget prefixes from their ends, unless blocks leave a window. What stands here is a hint. It may be a
//! report behind, and two prefixes may share a hash; the node's engine compares tokens and is always right, so that a
//! wrong hint costs time and never an answer.
//!
//! Memory is bounded: a node has at most as many blocks as it said when it joined, and more are not taken in.

use std::collections::{BTreeMap, HashMap};

use protocol::control::CacheChange;
use protocol::window::GroupKept;

use super::nodes::LinkId;

/// A connected node in the index.
#[derive(Debug)]
struct Member {
    group: usize,
    bit: u64,
    /// Blocks that stand in the index.
    blocks: usize,
    most_blocks: usize,
    /// Number of its last change.
    sequence: u64,
}

/// Up to 64 nodes: which of them have a block.
#[derive(Debug, Default)]
struct Group {
    taken: u64,
    holders: HashMap<u64, u64>,
}

/// See the head of the file.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    members: BTreeMap<LinkId, Member>,
    groups: Vec<Group>,
    version: u64,
}

/// How many blocks of a prompt each node has, from the first on without a gap, or as far as a row behind them sees. Nodes that have none are not in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matches(BTreeMap<LinkId, usize>);

impl Matches {
    /// No node has anything.
    pub const NONE: Self = Self(BTreeMap::new());

    /// Leading blocks of the prompt that a node has.
    pub fn blocks(&self, link: LinkId) -> usize {
        self.0.get(&link).copied().unwrap_or(0)
    }
}

impl PrefixIndex {
    /// A node with a pool of so many blocks has joined. Nothing is known of it yet.
    pub fn join(&mut self, link: LinkId, total_blocks: usize) {
        let free = self.groups.iter().position(|group| group.taken != u64::MAX);
        let group = free.unwrap_or_else(|| {
            self.groups.push(Group::default());
            self.groups.len() - 1
        });
        let bit = 1 << self.groups[group].taken.trailing_ones();
        self.groups[group].taken |= bit;
        let member = Member {
            group,
            bit,
            blocks: 0,
            most_blocks: total_blocks,
            sequence: 0,
        };
        self.members.insert(link, member);
    }

    /// A node has left.
    pub fn leave(&mut self, link: LinkId) {
        if let Some(member) = self.members.remove(&link) {
            let group = &mut self.groups[member.group];
            group.forget(member.bit);
            group.taken &= !member.bit;
            self.version += 1;
        }
    }

    /// A node tells what it has cached and what not any more. False if that says nothing: it is not newer than what is known,
    /// or comes from nobody.
    pub fn change(&mut self, link: LinkId, change: &CacheChange) -> bool {
        let Some(member) = self.members.get_mut(&link) else {
            return false;
        };
        if change.sequence <= member.sequence {
            return false;
        }
        let group = &mut self.groups[member.group];
        // A change that is missing may have been one that took blocks away: what is known is not true any more.
        let gap = change.sequence != member.sequence + 1;
        member.sequence = change.sequence;
        if change.reset || gap {
            group.forget(member.bit);
            member.blocks = 0;
        }
        for hash in &change.removed {
            member.blocks -= usize::from(group.remove(*hash, member.bit));
        }
        for hash in &change.added {
            if member.blocks < member.most_blocks {
                member.blocks += usize::from(group.add(*hash, member.bit));
            }
        }
        self.version += 1;
        true
    }

    /// Changes whenever what [`PrefixIndex::matches`] says may change.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// For each node, how many of the blocks named `hashes` it has, which are those of the group of layers that nodes tell of, from the first on; where blocks leave a window, it need
    /// not have those that a row behind them does not see.
    pub fn matches(&self, hashes: &[u64], kept: GroupKept) -> Matches {
        let mut matches = BTreeMap::new();
        for (number, group) in self.groups.iter().enumerate() {
            let depths = if kept.slides() {
                group.windows(hashes, |blocks| kept.first_of_blocks(blocks))
            } else {
                group.beginnings(hashes)
            };
            let of_group = self.members.iter().filter(|(_, member)| member.group == number);
            for (link, member) in of_group {
                let depth = depths[member.bit.trailing_zeros() as usize];
                if depth > 0 {
                    matches.insert(*link, depth);
                }
            }
        }
        Matches(matches)
    }

    /// Blocks in the index, each counted once for each node that has it.
    pub fn blocks(&self) -> usize {
        self.members.values().map(|member| member.blocks).sum()
    }

    /// Blocks of a node in the index.
    pub fn blocks_of(&self, link: LinkId) -> usize {
        self.members.get(&link).map_or(0, |member| member.blocks)
    }
}

/// Of each node of a group, by its bit.
type Depths = [usize; 64];

/// Writes a number for all nodes of a set.
fn put(depths: &mut Depths, bits: u64, value: usize) {
    let mut rest = bits;
    while rest != 0 {
        depths[rest.trailing_zeros() as usize] = value;
        rest &= rest - 1;
    }
}

impl Group {
    fn holders(&self, hash: u64) -> u64 {
        self.taken & self.holders.get(&hash).copied().unwrap_or(0)
    }

    /// How many of the first blocks each has.
    fn beginnings(&self, hashes: &[u64]) -> Depths {
        let mut depths = [0; 64];
        let mut having = self.taken;
        for (depth, hash) in hashes.iter().enumerate() {
            let still = having & self.holders(*hash);
            put(&mut depths, having & !still, depth);
            having = still;
            if having == 0 {
                return depths;
            }
        }
        put(&mut depths, having, hashes.len());
        depths
    }

    /// Up to which block each has those from `first` of their number on.
    fn windows(&self, hashes: &[u64], first: impl Fn(usize) -> usize) -> Depths {
        let (mut depths, mut present_from) = ([0; 64], [0; 64]);
        for (at, hash) in hashes.iter().enumerate() {
            let having = self.holders(*hash);
            put(&mut present_from, self.taken & !having, at + 1);
            let needed = first(at + 1);
            let mut rest = having;
            while rest != 0 {
                let node = rest.trailing_zeros() as usize;
                if present_from[node] <= needed {
                    depths[node] = at + 1;
                }
                rest &= rest - 1;
            }
        }
        depths
    }

    fn add(&mut self, hash: u64, bit: u64) -> bool {
        let holders = self.holders.entry(hash).or_default();
        let new = *holders & bit == 0;
        *holders |= bit;
        new
    }

    fn remove(&mut self, hash: u64, bit: u64) -> bool {
        let Some(holders) = self.holders.get_mut(&hash) else {
            return false;
        };
        let had = *holders & bit != 0;
        *holders &= !bit;
        if *holders == 0 {
            self.holders.remove(&hash);
        }
        had
    }

    fn forget(&mut self, bit: u64) {
        self.holders.retain(|_, holders| {
            *holders &= !bit;
            *holders != 0
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};

    use proptest::prelude::*;

    use super::*;

    const ALL: GroupKept = GroupKept::ALL;

    fn change(sequence: u64, reset: bool, added: &[u64], removed: &[u64]) -> CacheChange {
        CacheChange {
            sequence,
            reset,
            added: added.to_vec(),
            removed: removed.to_vec(),
        }
    }

    fn index(nodes: u64, blocks: usize) -> PrefixIndex {
        let mut index = PrefixIndex::default();
        (0..nodes).for_each(|link| index.join(LinkId(link), blocks));
        index
    }

    #[test]
    fn the_longest_prefix_of_each_node_is_found() {
        let mut index = index(3, 10);
        index.change(LinkId(0), &change(1, true, &[1, 2, 3], &[]));
        index.change(LinkId(1), &change(1, true, &[1, 2, 3, 4, 5], &[]));
        index.change(LinkId(2), &change(1, true, &[2, 3, 4], &[]));
        let found = index.matches(&[1, 2, 3, 4, 9], ALL);
        assert_eq!([0, 1, 2, 7].map(|link| found.blocks(LinkId(link))), [3, 4, 0, 0]);
        assert_eq!(index.matches(&[], ALL), Matches::default());
        index.change(LinkId(1), &change(2, false, &[], &[5, 4, 3]));
        assert_eq!(index.matches(&[1, 2, 3], ALL).blocks(LinkId(1)), 2);
        assert_eq!(index.blocks(), 3 + 2 + 3);
    }

    #[test]
    fn what_is_late_repeated_or_unknown_says_nothing_and_a_gap_forgets() {
        let mut index = index(1, 10);
        let link = LinkId(0);
        assert!(index.change(link, &change(1, false, &[1, 2], &[])));
        let version = index.version();
        assert!(!index.change(link, &change(1, true, &[], &[])));
        assert!(!index.change(LinkId(9), &change(1, false, &[1], &[])));
        assert_eq!((index.version(), index.blocks()), (version, 2));
        assert!(index.change(link, &change(3, false, &[3], &[8])));
        assert_eq!(
            (
                index.blocks(),
                index.matches(&[1], ALL).blocks(link),
                index.matches(&[3], ALL).blocks(link)
            ),
            (1, 0, 1)
        );
        index.leave(link);
        assert_eq!((index.blocks(), index.groups[0].holders.len()), (0, 0));
        assert!(!index.change(link, &change(4, false, &[1], &[])));
    }

    #[test]
    fn a_node_takes_no_more_room_than_it_has_blocks() {
        let mut index = index(1, 3);
        index.change(LinkId(0), &change(1, true, &(0..100).collect::<Vec<_>>(), &[]));
        assert_eq!((index.blocks(), index.groups[0].holders.len()), (3, 3));
        index.change(LinkId(0), &change(2, true, &[7, 8], &[]));
        assert_eq!(index.blocks(), 2);
    }

    #[test]
    fn more_nodes_than_a_group_has_bits_and_places_are_used_again() {
        let mut index = index(130, 4);
        for link in 0..130 {
            index.change(LinkId(link), &change(1, true, &[1, 2 + link % 2], &[]));
        }
        let found = index.matches(&[1, 3], ALL);
        assert!((0..130).all(|link| found.blocks(LinkId(link)) == 1 + (link % 2) as usize));
        (0..130).for_each(|link| index.leave(LinkId(link)));
        (200..264).for_each(|link| index.join(LinkId(link), 4));
        assert_eq!((index.groups.len(), index.blocks()), (3, 0));
        assert_eq!(index.matches(&[1], ALL), Matches::default());
    }

    #[test]
    fn a_node_needs_the_blocks_of_a_window_only() {
        // Blocks of 4 tokens: behind the third block all but the first are seen, behind the fourth the last two.
        let kept = GroupKept::new(Some(8), 4);
        let mut index = PrefixIndex::default();
        for (link, names) in [(1, &[3, 4][..]), (2, &[1, 2, 4]), (3, &[4, 5]), (4, &[1, 2, 3, 4, 5])] {
            index.join(LinkId(link), 8);
            assert!(index.change(LinkId(link), &change(1, true, names, &[])));
        }
        let found = index.matches(&[1, 2, 3, 4, 5], kept);
        let blocks: Vec<usize> = (1..5).map(|link| found.blocks(LinkId(link))).collect();
        assert_eq!(blocks, [4, 2, 5, 5]);
        let found = index.matches(&[1, 2, 3, 4, 5], ALL);
        let blocks: Vec<usize> = (1..5).map(|link| found.blocks(LinkId(link))).collect();
        assert_eq!(blocks, [0, 2, 0, 5]);
    }

    proptest! {
        /// Whatever nodes tell, the index says what sets of hashes would.
        #[test]
        fn the_index_is_the_sets_of_the_nodes(
            changes in proptest::collection::vec(
                (0_u64..4, proptest::bool::weighted(0.1), proptest::collection::vec(0_u64..12, 0..6), proptest::collection::vec(0_u64..12, 0..6)),
                0..60,
            ),
            prompt in proptest::collection::vec(0_u64..12, 0..8),
        ) {
            let mut index = index(4, 100);
            let mut sets = vec![BTreeSet::new(); 4];
            let mut sequences: VecDeque<u64> = vec![0; 4].into();
            for (link, reset, added, removed) in changes {
                let at = link as usize;
                sequences[at] += 1;
                index.change(LinkId(link), &change(sequences[at], reset, &added, &removed));
                if reset {
                    sets[at].clear();
                }
                for hash in &removed {
                    sets[at].remove(hash);
                }
                sets[at].extend(added);
            }
            let found = index.matches(&prompt, ALL);
            for (link, set) in (0..).zip(&sets) {
                let expected = prompt.iter().take_while(|hash| set.contains(*hash)).count();
                prop_assert_eq!(found.blocks(LinkId(link)), expected);
                prop_assert_eq!(index.blocks_of(LinkId(link)), set.len());
            }
        }
    }
}
