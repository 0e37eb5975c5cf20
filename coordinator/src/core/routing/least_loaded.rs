//! The node with the least work ahead; among equals the one with the most blocks left; then the one that came first.
//! A node where the request has failed before is the last choice.

use std::cmp::Reverse;

use super::Candidate;
use crate::core::nodes::LinkId;

/// Chooses among nodes that have room; `None` if there are none.
pub fn choose(candidates: impl Iterator<Item = Candidate>) -> Option<LinkId> {
    candidates
        .min_by_key(|c| (c.avoided, c.load, Reverse(c.blocks_left), c.link))
        .map(|c| c.link)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(link: u64, avoided: bool, load: u64, blocks_left: u64) -> Candidate {
        Candidate {
            link: LinkId(link),
            avoided,
            load,
            blocks_left,
        }
    }

    #[test]
    fn load_decides_then_blocks_then_age_and_a_failed_node_comes_last() {
        let chosen = |candidates: &[Candidate]| choose(candidates.iter().copied()).map(|link| link.0);
        assert_eq!(chosen(&[]), None);
        assert_eq!(
            chosen(&[candidate(1, false, 500, 9), candidate(2, false, 250, 1)]),
            Some(2)
        );
        assert_eq!(
            chosen(&[candidate(1, false, 250, 1), candidate(2, false, 250, 9)]),
            Some(2)
        );
        assert_eq!(chosen(&[candidate(2, false, 0, 1), candidate(1, false, 0, 1)]), Some(1));
        assert_eq!(
            chosen(&[candidate(1, true, 0, 9), candidate(2, false, 900, 1)]),
            Some(2)
        );
        assert_eq!(chosen(&[candidate(1, true, 0, 9)]), Some(1));
    }
}
