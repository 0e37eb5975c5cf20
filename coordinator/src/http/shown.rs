//! Which part of the visible text belongs to which token.
//!
//! While stop strings are matched the core releases text later than the token it came from, and drops text that became a
//! stop string. Every token still keeps an entry of its own: a token is passed on when all its text is released, and the
//! tokens at the end get what is left. So the shown texts always add up to the visible text, in a stream and in a whole
//! answer alike.

use std::collections::VecDeque;

use crate::core::types::{Completion, OutputToken};

/// A token, and the part of the visible text that is its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// The token.
    pub token: OutputToken,
    /// Its part of the visible text.
    pub text: String,
}

/// See the head of the file.
#[derive(Debug)]
pub struct Attribution {
    matches_stops: bool,
    skip_special: bool,
    /// Tokens whose text is not wholly released, oldest first.
    pending: VecDeque<OutputToken>,
    /// Visible text that belongs to the pending tokens.
    released: String,
}

impl Attribution {
    /// `matches_stops`: the request has stop strings. `skip_special`: its special tokens are not visible.
    pub fn new(matches_stops: bool, skip_special: bool) -> Self {
        Self {
            matches_stops,
            skip_special,
            pending: VecDeque::new(),
            released: String::new(),
        }
    }

    /// Takes the next token. `last`: it is known that no token follows; it then waits for [`Attribution::finish`].
    /// Returns the tokens that can be shown now.
    pub fn push(&mut self, token: OutputToken, last: bool) -> Vec<Shown> {
        self.released.push_str(&token.visible);
        self.pending.push_back(token);
        let mut shown = Vec::new();
        while let Some(front) = self.pending.front() {
            let only = self.pending.len() == 1;
            if last && only {
                break;
            }
            let Some(length) = self.complete_length(front, only) else {
                break;
            };
            shown.extend(self.pop(length));
        }
        shown
    }

    /// Length of the released text that belongs to `front`, if all of it is there.
    fn complete_length(&self, front: &OutputToken, only: bool) -> Option<usize> {
        if !self.matches_stops {
            return Some(front.visible.len());
        }
        let own = if front.special && self.skip_special {
            0
        } else {
            front.text.len()
        };
        if own > self.released.len() {
            return None;
        }
        // Nothing is held back: what a special token between the bytes of a character did to the lengths ends here.
        Some(if only {
            self.released.len()
        } else {
            floor_boundary(&self.released, own)
        })
    }

    fn pop(&mut self, length: usize) -> Option<Shown> {
        let token = self.pending.pop_front()?;
        let length = floor_boundary(&self.released, length);
        let text = self.released.drain(..length).collect();
        Some(Shown { token, text })
    }

    /// The tokens that are still to be shown, at least the one that was pushed as the last; their texts are cut to what is
    /// visible, and the last one takes the rest.
    pub fn finish(mut self, completion: &Completion) -> (Vec<Shown>, String) {
        self.released.push_str(&completion.tail);
        let mut shown = Vec::with_capacity(self.pending.len());
        while let Some(front) = self.pending.front() {
            let own = if front.special && self.skip_special {
                0
            } else {
                front.text.len()
            };
            let length = if self.pending.len() == 1 {
                self.released.len()
            } else {
                own
            };
            shown.extend(self.pop(length));
        }
        (shown, self.released)
    }
}

/// The largest character boundary of `text` that is at most `at`.
fn floor_boundary(text: &str, at: usize) -> usize {
    let mut at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use protocol::control::StepTiming;
    use protocol::sampling::SampledToken;

    use super::*;
    use crate::core::types::Finish;

    fn token(text: &str, visible: &str) -> OutputToken {
        OutputToken {
            sampled: SampledToken {
                position: 0,
                token: 1,
                logprob: -1.0,
                raw_logprob: -1.0,
                top_logprobs: vec![],
            },
            text: text.to_owned(),
            visible: visible.to_owned(),
            special: text.starts_with('<'),
            step: StepTiming::default(),
        }
    }

    fn end(tail: &str) -> Completion {
        Completion {
            finish: Finish::Length,
            generated_tokens: 0,
            tail: tail.to_owned(),
            limit_reached: true,
        }
    }

    fn texts(shown: &[Shown]) -> Vec<&str> {
        shown.iter().map(|shown| shown.text.as_str()).collect()
    }

    #[test]
    fn without_stops_every_token_is_shown_at_once() {
        let mut shown = Attribution::new(false, true);
        assert_eq!(texts(&shown.push(token("a", "a"), false)), ["a"]);
        assert_eq!(texts(&shown.push(token("", ""), false)), [""]);
        assert_eq!(texts(&shown.push(token("<s>", ""), false)), [""]);
        assert!(shown.push(token("b", "b"), true).is_empty());
        assert_eq!(texts(&shown.finish(&end("\u{fffd}")).0), ["b\u{fffd}"]);
    }

    #[test]
    fn a_token_is_held_until_its_text_is_known_not_to_be_a_stop() {
        // Stop string "bc d", tokens "ab", "c", "e".
        let mut shown = Attribution::new(true, true);
        assert!(shown.push(token("ab", "a"), false).is_empty());
        assert!(shown.push(token("c", ""), false).is_empty());
        assert_eq!(texts(&shown.push(token("e", "bce"), false)), ["ab", "c", "e"]);
    }

    #[test]
    fn a_stop_string_is_hidden_and_its_tokens_are_not() {
        // Stop string "bc", tokens "ab", "cd".
        let mut shown = Attribution::new(true, true);
        assert!(shown.push(token("ab", "a"), false).is_empty());
        assert!(shown.push(token("cd", ""), false).is_empty());
        assert_eq!(texts(&shown.finish(&end("")).0), ["a", ""]);
    }

    #[test]
    fn the_tail_goes_to_the_tokens_it_came_from() {
        let mut shown = Attribution::new(true, true);
        assert!(shown.push(token("x", ""), false).is_empty());
        assert!(shown.push(token("y", ""), true).is_empty());
        assert_eq!(texts(&shown.finish(&end("xy")).0), ["x", "y"]);
    }

    #[test]
    fn nothing_is_lost_where_lengths_do_not_fit() {
        // A special token between the bytes of one character: its literal text is longer than the visible one.
        let mut shown = Attribution::new(true, true);
        let mut all = shown.push(token("", ""), false);
        all.extend(shown.push(token("\u{fffd}<s>", ""), false));
        all.extend(shown.push(token("\u{fffd}\u{fffd}", "é"), false));
        all.extend(shown.push(token("z", "z"), true));
        all.extend(shown.finish(&end("")).0);
        assert_eq!(all.len(), 4);
        assert_eq!(texts(&all).concat(), "éz");
    }
}
