//! Which addresses are dialled, and when they are let go.

use std::collections::{BTreeMap, BTreeSet};

/// What to do about an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Dial it, again after every loss, until it is let go.
    Dial(String),
    /// Let it go: end the dialling once there is no link. A link that exists is not touched.
    LetGo(String),
    /// It is there again before it was gone: dial it after a loss, as before.
    Keep(String),
}

/// The addresses that are being dialled; true: they are still wanted.
#[derive(Debug, Default)]
pub struct Directory {
    dialled: BTreeMap<String, bool>,
    wanted: BTreeSet<String>,
}

impl Directory {
    /// These are all the addresses there are now.
    pub fn found(&mut self, addresses: &BTreeSet<String>) -> Vec<Action> {
        self.wanted.clone_from(addresses);
        let mut actions = Vec::new();
        for (address, wanted) in &mut self.dialled {
            let still = addresses.contains(address);
            match (*wanted, still) {
                (true, false) => actions.push(Action::LetGo(address.clone())),
                (false, true) => actions.push(Action::Keep(address.clone())),
                (true, true) | (false, false) => {}
            }
            *wanted = still;
        }
        for address in addresses {
            if !self.dialled.contains_key(address) {
                self.dialled.insert(address.clone(), true);
                actions.push(Action::Dial(address.clone()));
            }
        }
        actions
    }

    /// The dialling of an address has ended. If it was wanted again meanwhile, it begins anew.
    pub fn ended(&mut self, address: &str) -> Option<Action> {
        self.dialled.remove(address)?;
        self.wanted.contains(address).then(|| {
            self.dialled.insert(address.to_owned(), true);
            Action::Dial(address.to_owned())
        })
    }

    /// How many addresses are wanted now.
    pub fn wanted(&self) -> usize {
        self.wanted.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(words: &[&str]) -> BTreeSet<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    fn dial(address: &str) -> Action {
        Action::Dial(address.to_owned())
    }

    fn let_go(address: &str) -> Action {
        Action::LetGo(address.to_owned())
    }

    #[test]
    fn all_are_dialled_once_and_vanished_ones_let_go() {
        let mut directory = Directory::default();
        assert_eq!(directory.found(&set(&["a:1", "b:1"])), [dial("a:1"), dial("b:1")]);
        assert_eq!(directory.found(&set(&["a:1", "b:1"])), []);
        assert_eq!(directory.found(&set(&["b:1", "c:1"])), [let_go("a:1"), dial("c:1")]);
        assert_eq!(directory.found(&set(&["b:1", "c:1"])), [], "told once");
        assert_eq!(directory.ended("a:1"), None);
        assert_eq!(
            directory.found(&set(&["a:1", "b:1", "c:1"])),
            [dial("a:1")],
            "a new one"
        );
    }

    #[test]
    fn an_address_that_comes_back_is_kept_and_never_dialled_twice() {
        let mut directory = Directory::default();
        directory.found(&set(&["a:1"]));
        assert_eq!(directory.found(&set(&[])), [let_go("a:1")]);
        assert_eq!(directory.found(&set(&["a:1"])), [Action::Keep("a:1".to_owned())]);
        // It ended in the moment before it heard of that.
        assert_eq!(directory.ended("a:1"), Some(dial("a:1")));
        assert_eq!(directory.ended("b:1"), None, "never dialled");
    }

    #[test]
    fn every_address_ends_dialled_exactly_if_it_is_wanted() {
        // All orders of 6 steps over two addresses: appear, vanish, and the end of a dialling that was let go.
        for script in 0..6_usize.pow(6) {
            let mut directory = Directory::default();
            // What a shell does: address -> (running, told to end).
            let mut tasks: BTreeMap<String, bool> = BTreeMap::new();
            let mut wanted = BTreeSet::new();
            let mut rest = script;
            for _ in 0..6 {
                let (step, address) = (rest % 3, if rest % 6 < 3 { "a:1" } else { "b:1" });
                rest /= 6;
                let actions = match step {
                    0 => {
                        wanted.insert(address.to_owned());
                        directory.found(&wanted)
                    }
                    1 => {
                        wanted.remove(address);
                        directory.found(&wanted)
                    }
                    _ if tasks.get(address) == Some(&true) => {
                        tasks.remove(address);
                        directory.ended(address).into_iter().collect()
                    }
                    _ => Vec::new(),
                };
                for action in actions {
                    match action {
                        Action::Dial(address) => assert_eq!(tasks.insert(address, false), None, "twice: {script}"),
                        Action::LetGo(address) => assert_eq!(tasks.insert(address, true), Some(false)),
                        Action::Keep(address) => assert_eq!(tasks.insert(address, false), Some(true)),
                    }
                }
            }
            let dialled: BTreeSet<String> = tasks
                .iter()
                .filter(|(_, ends)| !**ends)
                .map(|(a, _)| a.clone())
                .collect();
            assert_eq!(dialled, wanted, "script {script}");
        }
    }
}
