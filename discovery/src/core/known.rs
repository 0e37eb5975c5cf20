//! Which addresses are known, from sources that answer, fail, and answer again.

use std::collections::{BTreeMap, BTreeSet};

/// Most addresses that are kept of one source: more are no coordinators but a mistake.
pub const MAX_ADDRESSES: usize = 256;

/// What each source answered last.
#[derive(Debug, Default)]
pub struct Known {
    by_source: BTreeMap<String, BTreeSet<String>>,
}

/// What an answer changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learnt {
    /// Nothing.
    Same,
    /// The set of addresses.
    Changed,
    /// Nothing yet: more than [`MAX_ADDRESSES`] addresses were answered, and the first of them are taken.
    TooMany,
}

impl Known {
    /// A source has answered: these are all its addresses now. An answer without addresses is an answer: they have vanished.
    /// (A source that fails answers nothing, and what it said before holds.)
    pub fn answered(&mut self, source: &str, addresses: impl IntoIterator<Item = String>) -> Learnt {
        let mut all: BTreeSet<String> = addresses.into_iter().collect();
        let too_many = all.len() > MAX_ADDRESSES;
        if too_many {
            all = all.into_iter().take(MAX_ADDRESSES).collect();
        }
        let before = self.by_source.insert(source.to_owned(), all);
        let same = before.as_ref() == self.by_source.get(source);
        match (too_many, same) {
            (true, false) => Learnt::TooMany,
            (false, false) => Learnt::Changed,
            (_, true) => Learnt::Same,
        }
    }

    /// All addresses that any source has.
    pub fn addresses(&self) -> BTreeSet<String> {
        self.by_source.values().flatten().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(words: &[&str]) -> BTreeSet<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn sources_are_added_up_and_each_keeps_its_last_answer() {
        let mut known = Known::default();
        assert_eq!(
            known.answered("x:1", set(&["10.0.0.1:1", "10.0.0.2:1"])),
            Learnt::Changed
        );
        assert_eq!(
            known.answered("y:1", set(&["10.0.0.2:1", "10.0.0.3:1"])),
            Learnt::Changed
        );
        assert_eq!(known.addresses(), set(&["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]));
        assert_eq!(known.answered("x:1", set(&["10.0.0.2:1", "10.0.0.1:1"])), Learnt::Same);
        assert_eq!(known.answered("x:1", set(&[])), Learnt::Changed);
        assert_eq!(
            known.addresses(),
            set(&["10.0.0.2:1", "10.0.0.3:1"]),
            "y still has one of x's"
        );
    }

    #[test]
    fn a_mistake_does_not_dial_the_whole_network() {
        let mut known = Known::default();
        let many = (0..5_000).map(|n| format!("10.0.{}.{}:1", n / 256, n % 256));
        assert_eq!(known.answered("x:1", many), Learnt::TooMany);
        assert_eq!(known.addresses().len(), MAX_ADDRESSES);
    }
}
