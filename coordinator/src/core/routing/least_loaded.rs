//! The node with the least work ahead; among equals the one with the most blocks left; then by name. A node where the
//! request has failed before is the last choice.

use std::cmp::Reverse;

use super::Candidate;

/// Chooses among nodes that have room, by number; `None` if there are none.
pub fn choose<'a>(candidates: impl Iterator<Item = &'a Candidate>) -> Option<usize> {
    candidates
        .enumerate()
        .filter(|(_, c)| c.free)
        .min_by_key(|(_, c)| (c.avoided, c.load, Reverse(c.blocks_left), &c.name))
        .map(|(number, _)| number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::nodes::LinkId;

    fn candidate(name: &str, avoided: bool, load: u64, blocks_left: u64) -> Candidate {
        Candidate {
            link: LinkId(0),
            name: name.into(),
            both: false,
            avoided,
            free: true,
            load,
            blocks_left,
        }
    }

    #[test]
    fn load_decides_then_blocks_then_the_name_and_a_failed_node_comes_last() {
        let chosen =
            |candidates: &[Candidate]| choose(candidates.iter()).map(|number| candidates[number].name.to_string());
        let chosen = |candidates: &[Candidate]| chosen(candidates).unwrap_or_default();
        assert_eq!(chosen(&[]), "");
        assert_eq!(
            chosen(&[candidate("a", false, 500, 9), candidate("b", false, 250, 1)]),
            "b"
        );
        assert_eq!(
            chosen(&[candidate("a", false, 250, 1), candidate("b", false, 250, 9)]),
            "b"
        );
        assert_eq!(chosen(&[candidate("b", false, 0, 1), candidate("a", false, 0, 1)]), "a");
        assert_eq!(
            chosen(&[candidate("a", true, 0, 9), candidate("b", false, 900, 1)]),
            "b"
        );
        assert_eq!(chosen(&[candidate("a", true, 0, 9)]), "a");
        let full = Candidate {
            free: false,
            ..candidate("a", false, 0, 9)
        };
        assert_eq!(chosen(&[full.clone(), candidate("b", true, 900, 1)]), "b");
        assert_eq!(chosen(&[full]), "");
    }
}
