//! The node whose name follows that of the last one. A node where the request has failed before is the last choice.

use super::Candidate;

/// Chooses among nodes that have room, by number; `None` if there are none. `last`: name of the node chosen before.
pub fn choose<'a>(candidates: impl Iterator<Item = &'a Candidate>, last: Option<&str>) -> Option<usize> {
    candidates
        .enumerate()
        .filter(|(_, c)| c.free)
        .min_by_key(|(_, c)| (c.avoided, last.is_some_and(|last| *c.name <= *last), &c.name))
        .map(|(number, _)| number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::nodes::LinkId;

    fn candidate(name: &str, avoided: bool, free: bool) -> Candidate {
        Candidate {
            link: LinkId(0),
            name: name.into(),
            both: false,
            avoided,
            free,
            load: 0,
            blocks_left: 0,
        }
    }

    #[test]
    fn nodes_take_turns_and_those_without_room_are_skipped() {
        let mut nodes = ["b", "c", "a"].map(|name| candidate(name, false, true));
        let mut last: Option<String> = None;
        let mut turn = |nodes: &[Candidate]| {
            let number = choose(nodes.iter(), last.as_deref())?;
            last = Some(nodes[number].name.to_string());
            last.clone()
        };
        let order: Vec<_> = (0..5).filter_map(|_| turn(&nodes)).collect();
        assert_eq!(order, ["a", "b", "c", "a", "b"]);
        nodes[1].free = false;
        assert_eq!(turn(&nodes).as_deref(), Some("a"));
        nodes[0].avoided = true;
        assert_eq!(turn(&nodes).as_deref(), Some("a"), "b has failed before");
        nodes[2].free = false;
        assert_eq!(turn(&nodes).as_deref(), Some("b"), "but is better than none");
        nodes[0].free = false;
        assert_eq!(turn(&nodes), None);
    }
}
