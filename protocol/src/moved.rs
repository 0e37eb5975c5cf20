//! Which blocks of a prompt a handoff moves.

use std::fmt;
use std::ops::Range;

use bincode::{Decode, Encode};

use crate::window::Groups;

/// The blocks of a prompt that a handoff moves: in each group those from the first that the receiver lacks to the prompt's last.
///
/// In frames they are numbered one group after another, from [`HaveBlocks::full`] on, or [`HaveBlocks::sliding`] where every group slides.
/// Thus in a model of one group a block's number is its place in the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    groups: Groups,
    have: HaveBlocks,
    blocks: u32,
}

/// Leading blocks of a prompt that the receiver needs not be sent: it has them already, or nobody will see them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Encode, Decode)]
pub struct HaveBlocks {
    /// In groups whose layers see everything.
    pub full: u32,
    /// In groups whose layers have a window.
    pub sliding: u32,
}

impl HaveBlocks {
    /// None.
    pub const NONE: Self = Self { full: 0, sliding: 0 };

    /// So many in every group.
    pub const fn all(blocks: u32) -> Self {
        Self {
            full: blocks,
            sliding: blocks,
        }
    }
}

impl fmt::Display for HaveBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.full == self.sliding {
            write!(f, "{}", self.full)
        } else {
            write!(f, "{} (in layers with a window {})", self.full, self.sliding)
        }
    }
}

impl Moved {
    /// Of a prompt that fills `blocks` blocks of each group. `None` if the receiver says that it has more, or if they cannot be counted.
    pub fn new(groups: Groups, have: HaveBlocks, blocks: u32) -> Option<Self> {
        let moved = Self { groups, have, blocks };
        let mut end = moved.first();
        for group in 0..groups.count() {
            end = end.checked_add(blocks.checked_sub(moved.have(group))?)?;
        }
        Some(moved)
    }

    fn have(&self, group: usize) -> u32 {
        if self.groups.slides(group) {
            self.have.sliding
        } else {
            self.have.full
        }
    }

    /// The groups of layers.
    pub fn groups(&self) -> Groups {
        self.groups
    }

    /// The number of the first one.
    pub fn first(&self) -> u32 {
        self.groups.first_number(self.have)
    }

    /// How many they are.
    pub fn len(&self) -> u32 {
        (0..self.groups.count())
            .map(|group| self.blocks - self.have(group))
            .sum()
    }

    /// Whether nothing is moved.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many blocks of a group hold the prompt.
    pub fn end_place(&self) -> u32 {
        self.blocks
    }

    /// Which places of a group's list of blocks are moved.
    pub fn places(&self, group: usize) -> Range<u32> {
        self.have(group)..self.blocks
    }

    /// The number of a block that is moved, by its group and its place in the group's list.
    pub fn number(&self, group: usize, place: u32) -> u32 {
        let before: u32 = (0..group).map(|group| self.blocks - self.have(group)).sum();
        self.first() + before + (place - self.have(group))
    }

    /// All of them in the order of their numbers: group, and place in its list.
    pub fn iter(&self) -> impl Iterator<Item = (usize, u32)> + use<> {
        let moved = *self;
        (0..moved.groups.count()).flat_map(move |group| moved.places(group).map(move |place| (group, place)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moved_blocks_have_numbers_without_gaps() {
        let groups = Groups::mixed(2, 1, 8);
        let have = HaveBlocks { full: 3, sliding: 7 };
        let moved = Moved::new(groups, have, 9).expect("no more than there are");
        assert_eq!((moved.first(), moved.len()), (3, 6 + 6 + 2));
        let listed: Vec<_> = moved.iter().collect();
        assert_eq!((listed[0], listed[6], listed[12]), ((0, 3), (1, 3), (2, 7)));
        for (number, (group, place)) in (3..).zip(&listed) {
            assert_eq!(moved.number(*group, *place), number);
            assert!(moved.places(*group).contains(place));
        }
        // One group: the number is the place.
        for groups in [Groups::ONE, Groups::sliding(8)] {
            let moved = Moved::new(groups, HaveBlocks::all(7), 9).expect("no more than there are");
            assert_eq!((moved.first(), moved.len(), moved.number(0, 8)), (7, 2, 8));
        }
        for have in [HaveBlocks { full: 10, sliding: 0 }, HaveBlocks { full: 0, sliding: 10 }] {
            assert_eq!(Moved::new(groups, have, 9), None);
        }
        let many = Groups::mixed(60, 4, 8);
        assert_eq!(Moved::new(many, HaveBlocks::NONE, u32::MAX), None);
    }
}
