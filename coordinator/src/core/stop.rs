//! Stop strings: where generated text ends.
//!
//! An Aho-Corasick automaton (Aho and Corasick, "Efficient string matching: an aid to bibliographic search", CACM 18,
//! 1975) over the bytes of the stop strings, fed with new text only. Its state is the longest tail of the text that is
//! the beginning of a stop string: exactly what has to be held back, and nothing more. Text and stop strings are whole
//! UTF-8, and no beginning of a character looks like the middle of one, so tails and matches lie on character borders.
//!
//! The match that ends first wins; among those that end together, the first in the client's list. The result does not
//! depend on how the text was cut into pieces.

use std::sync::Arc;

/// No node, no pattern.
const NONE: u32 = u32::MAX;

/// A place in the tree of all stop strings.
#[derive(Clone, Debug)]
struct Node {
    /// The byte that leads here.
    byte: u8,
    /// Bytes from the root: length of the stop string's beginning that this node stands for.
    depth: u32,
    first_child: u32,
    next_sibling: u32,
    /// Node of the longest proper tail of this beginning that is a beginning too.
    fail: u32,
    /// Smallest index among the stop strings that end here.
    pattern: u32,
}

/// The tree of all stop strings with its fail links: the same for every text.
#[derive(Debug)]
struct Automaton {
    nodes: Vec<Node>,
    /// Children of the root by their byte: most text never leaves the root.
    root: Box<[u32; 256]>,
    patterns: Vec<String>,
}

/// Finds the first stop string in a text that arrives in pieces. A clone of a fresh matcher is for another text and
/// shares the automaton.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    automaton: Arc<Automaton>,
    state: u32,
    /// The tail of the text that may still become a stop string.
    held: String,
    keep_stop: bool,
}

/// What a piece of text led to.
#[derive(Debug, PartialEq, Eq)]
pub struct Released {
    /// Text that belongs to the answer for good.
    pub text: String,
    /// The stop string that ended the text.
    pub stop: Option<String>,
}

impl StopMatcher {
    /// A matcher for `patterns` (empty ones never match). `keep_stop`: the text ends behind the stop string, not before.
    pub fn new(patterns: &[String], keep_stop: bool) -> Self {
        Self {
            automaton: Arc::new(Automaton::new(patterns)),
            state: 0,
            held: String::new(),
            keep_stop,
        }
    }

    /// Adds text. After a stop string has been found nothing more is to be added.
    pub fn push(&mut self, text: &str) -> Released {
        let nodes = &self.automaton.nodes;
        if nodes.len() == 1 {
            return Released {
                text: text.to_owned(),
                stop: None,
            };
        }
        let seen = self.held.len();
        self.held.push_str(text);
        for at in seen..self.held.len() {
            self.state = self.automaton.next(self.state, self.held.as_bytes()[at]);
            let pattern = nodes[self.state as usize].pattern;
            if pattern != NONE {
                return self.matched(pattern as usize, at + 1);
            }
        }
        Released {
            text: self.release(),
            stop: None,
        }
    }

    /// Adds text within which no stop string may end. One that begins in it may end in what comes later.
    pub fn pass(&mut self, text: &str) -> Released {
        self.held.push_str(text);
        let automaton = &self.automaton;
        for &byte in text.as_bytes() {
            self.state = automaton.next(self.state, byte);
        }
        // A whole stop string is nothing to wait for unless it is the beginning of another one.
        while self.state != 0 && automaton.nodes[self.state as usize].first_child == NONE {
            self.state = automaton.nodes[self.state as usize].fail;
        }
        Released {
            text: self.release(),
            stop: None,
        }
    }

    /// What is held back and cannot become a part of a stop string any more.
    fn release(&mut self) -> String {
        let hold = self.automaton.nodes[self.state as usize].depth as usize;
        let kept = self.held.split_off(self.held.len() - hold);
        std::mem::replace(&mut self.held, kept)
    }

    /// The text has ended without a stop string: what was held back.
    pub fn finish(&mut self) -> String {
        self.state = 0;
        std::mem::take(&mut self.held)
    }

    fn matched(&mut self, pattern: usize, end: usize) -> Released {
        let stop = self.automaton.patterns[pattern].clone();
        let cut = if self.keep_stop { end } else { end - stop.len() };
        self.state = 0;
        let mut text = std::mem::take(&mut self.held);
        text.truncate(cut);
        Released { text, stop: Some(stop) }
    }
}

impl Automaton {
    fn new(patterns: &[String]) -> Self {
        let root = Node {
            byte: 0,
            depth: 0,
            first_child: NONE,
            next_sibling: NONE,
            fail: 0,
            pattern: NONE,
        };
        let mut automaton = Self {
            nodes: vec![root],
            root: Box::new([NONE; 256]),
            patterns: patterns.to_vec(),
        };
        for (index, pattern) in patterns.iter().enumerate().filter(|(_, pattern)| !pattern.is_empty()) {
            automaton.insert(pattern.as_bytes(), index as u32);
        }
        automaton.link();
        automaton
    }

    fn next(&self, state: u32, byte: u8) -> u32 {
        let mut at = state;
        while at != 0 {
            let child = self.child(at, byte);
            if child != NONE {
                return child;
            }
            at = self.nodes[at as usize].fail;
        }
        match self.root[usize::from(byte)] {
            NONE => 0,
            child => child,
        }
    }

    fn child(&self, parent: u32, byte: u8) -> u32 {
        if parent == 0 {
            return self.root[usize::from(byte)];
        }
        let mut child = self.nodes[parent as usize].first_child;
        while child != NONE && self.nodes[child as usize].byte != byte {
            child = self.nodes[child as usize].next_sibling;
        }
        child
    }

    fn insert(&mut self, pattern: &[u8], index: u32) {
        let mut at = 0;
        for &byte in pattern {
            let child = self.child(at, byte);
            at = if child == NONE { self.add_child(at, byte) } else { child };
        }
        let node = &mut self.nodes[at as usize];
        node.pattern = node.pattern.min(index);
    }

    fn add_child(&mut self, parent: u32, byte: u8) -> u32 {
        let new = self.nodes.len() as u32;
        let depth = self.nodes[parent as usize].depth + 1;
        let next_sibling = std::mem::replace(&mut self.nodes[parent as usize].first_child, new);
        if parent == 0 {
            self.root[usize::from(byte)] = new;
        }
        self.nodes.push(Node {
            byte,
            depth,
            first_child: NONE,
            next_sibling,
            fail: 0,
            pattern: NONE,
        });
        new
    }

    /// Sets the fail links, in breadth-first order, and hands every node the best stop string of its tails.
    fn link(&mut self) {
        let mut order = Vec::with_capacity(self.nodes.len());
        order.push(0_u32);
        let mut done = 0;
        while done < order.len() {
            let parent = order[done];
            done += 1;
            let mut child = self.nodes[parent as usize].first_child;
            while child != NONE {
                order.push(child);
                if parent != 0 {
                    let byte = self.nodes[child as usize].byte;
                    let fail = self.next(self.nodes[parent as usize].fail, byte);
                    let inherited = self.nodes[fail as usize].pattern;
                    let node = &mut self.nodes[child as usize];
                    node.fail = fail;
                    node.pattern = node.pattern.min(inherited);
                }
                child = self.nodes[child as usize].next_sibling;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The whole-text definition: the match that ends first; among equals the first of the list.
    fn naive(patterns: &[String], text: &str, keep_stop: bool) -> (String, Option<String>) {
        let ends = |p: &String| text.find(p.as_str()).map(|start| (start + p.len(), start));
        let found = patterns.iter().enumerate().filter(|(_, p)| !p.is_empty());
        let best = found
            .filter_map(|(i, p)| ends(p).map(|(end, start)| (end, i, start, p)))
            .min();
        match best {
            None => (text.to_owned(), None),
            Some((end, _, start, p)) => (text[..if keep_stop { end } else { start }].to_owned(), Some(p.clone())),
        }
    }

    /// Longest tail of `text` that is a proper beginning of a pattern.
    fn must_hold(patterns: &[String], text: &str) -> usize {
        let lengths = (0..=text.len())
            .rev()
            .filter(|&l| text.is_char_boundary(text.len() - l));
        let mut tails = lengths.map(|l| &text[text.len() - l..]);
        tails
            .find(|tail| patterns.iter().any(|p| p.len() > tail.len() && p.starts_with(tail)))
            .map_or(0, str::len)
    }

    fn run(patterns: &[String], pieces: &[String], keep_stop: bool) -> (String, Option<String>) {
        let mut matcher = StopMatcher::new(patterns, keep_stop);
        let mut out = String::new();
        let mut fed = String::new();
        for piece in pieces {
            fed.push_str(piece);
            let released = matcher.push(piece);
            out.push_str(&released.text);
            if released.stop.is_some() {
                return (out, released.stop);
            }
            assert_eq!(
                fed.len() - out.len(),
                must_hold(patterns, &fed),
                "held back after {fed:?}"
            );
        }
        out.push_str(&matcher.finish());
        (out, None)
    }

    fn strings(of: &[&str]) -> Vec<String> {
        of.iter().map(|s| (*s).to_owned()).collect()
    }

    #[test]
    fn a_stop_across_pieces_is_found_and_nothing_is_retracted() {
        let (text, stop) = run(
            &strings(&["END"]),
            &strings(&["to be E", "NOT E", "N", "D and more"]),
            false,
        );
        assert_eq!((text.as_str(), stop.as_deref()), ("to be ENOT ", Some("END")));
    }

    #[test]
    fn the_match_that_ends_first_wins_then_the_order_of_the_list() {
        assert_eq!(
            run(&strings(&["abcd", "bc"]), &strings(&["xabcd"]), false),
            ("xa".into(), Some("bc".into()))
        );
        assert_eq!(
            run(&strings(&["b", "ab"]), &strings(&["ab"]), false),
            ("a".into(), Some("b".into()))
        );
        assert_eq!(
            run(&strings(&["ab", "b"]), &strings(&["ab"]), false),
            (String::new(), Some("ab".into()))
        );
    }

    #[test]
    fn the_stop_is_kept_on_request_and_what_follows_is_not() {
        assert_eq!(
            run(&strings(&["\n\n"]), &strings(&["a\n", "\nb"]), true),
            ("a\n\n".into(), Some("\n\n".into()))
        );
    }

    #[test]
    fn no_and_empty_patterns_never_match() {
        assert_eq!(run(&[], &strings(&["a", "b"]), false), ("ab".into(), None));
        assert_eq!(run(&strings(&[""]), &strings(&["a", "b"]), false), ("ab".into(), None));
    }

    #[test]
    fn many_long_patterns_stay_linear() {
        // 1024 strings of 1024 characters that share all but their end: a matcher that looked at every pattern for
        // every character would need 10^12 steps for the text below.
        let patterns: Vec<String> = (0..1024).map(|i| format!("{}{i:04}", "a".repeat(1020))).collect();
        let mut matcher = StopMatcher::new(&patterns, false);
        for _ in 0..1000 {
            assert_eq!(matcher.push(&"a".repeat(1000)).stop, None);
        }
        let end = matcher.push("0777tail");
        assert_eq!(end.stop.as_deref(), Some(patterns[777].as_str()));
        assert_eq!(end.text, "", "everything but the stop string had been released");
    }

    /// Few letters, of one to four bytes each, so that beginnings and tails overlap often.
    fn letters(most: usize) -> impl Strategy<Value = String> {
        prop::collection::vec(prop::sample::select(vec!['a', 'b', 'é', '水', '🦀']), 0..most)
            .prop_map(|chars| chars.into_iter().collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
        #[test]
        fn equals_the_whole_text_search_however_the_text_is_cut(
            patterns in prop::collection::vec(letters(5), 0..5),
            pieces in prop::collection::vec(letters(4), 0..12),
            keep_stop: bool,
        ) {
            let whole: String = pieces.concat();
            prop_assert_eq!(run(&patterns, &pieces, keep_stop), naive(&patterns, &whole, keep_stop));
            let chars: Vec<String> = whole.chars().map(String::from).collect();
            prop_assert_eq!(run(&patterns, &chars, keep_stop), naive(&patterns, &whole, keep_stop));
        }
    }
}
