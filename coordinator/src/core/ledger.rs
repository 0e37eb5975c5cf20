//! The ledger of a choice: which tokens it has, what text they make, and whether they end it. A request has one for each
//! of its choices.
//!
//! Position k is accepted exactly once, from whichever node and attempt it comes; everything a client is told (text,
//! usage, finish reason, log-probabilities) derives from accepted tokens. Detokeniser and stop matcher live here, so
//! nothing of them ever moves between nodes.

use std::sync::Arc;

use protocol::control::StepTiming;
use protocol::sampling::{FinishReason, SampledToken, StopRules};

use super::stop::{Released, StopMatcher};
use super::types::{Completion, Finish, OutputToken, ServeRequest};

/// Makes decoders: the tokenizer, as the ledger sees it.
pub trait Detokenizer: Send + Sync {
    /// A decoder for one request. `skip_special`: special tokens add nothing to its text.
    fn decoder(&self, skip_special: bool) -> Box<dyn TextDecoder>;
    /// True for special tokens.
    fn is_special(&self, token: u32) -> bool;
}

/// Turns the tokens of one request into text, one at a time.
pub trait TextDecoder: Send {
    /// The text `token` adds: whole characters only.
    fn push(&mut self, token: u32) -> String;
    /// The text of bytes that will never become a character.
    fn finish(&mut self) -> String;
}

/// What the ledger says to a token.
#[derive(Debug, PartialEq)]
pub enum Verdict {
    /// It is new; `completion` if it ends the choice.
    Accepted {
        /// The token and its text.
        token: OutputToken,
        /// How the choice ends with it.
        completion: Option<Completion>,
    },
    /// Its position has been accepted before, or lies behind the end.
    Known {
        /// False if the earlier token of this position was another one: the nodes do not agree.
        same: bool,
    },
    /// Its position lies beyond the next one.
    Gap {
        /// The next position.
        expected: u32,
    },
}

/// See the head of the file.
pub struct Ledger {
    tokens: Vec<u32>,
    stop: Arc<StopRules>,
    keep_terminator: bool,
    /// Tokens before which no stop string ends the request.
    min_tokens: usize,
    detokenizer: Arc<dyn Detokenizer>,
    /// Of all tokens, special ones by their names.
    literal: Box<dyn TextDecoder>,
    /// Of the tokens that the client is to see: special ones if it wants them, the terminating one if it wants that.
    visible: Box<dyn TextDecoder>,
    matcher: StopMatcher,
    closed: bool,
    finish: Option<&'static str>,
}

impl Ledger {
    /// The empty ledger of one choice of `request`; `matcher` is built from its stop strings.
    pub fn new(request: &ServeRequest, matcher: StopMatcher, detokenizer: Arc<dyn Detokenizer>) -> Self {
        Self::with_rules(request, Arc::new(request.stop.clone()), matcher, detokenizer)
    }

    /// The empty ledgers of all choices of `request`, in their order.
    pub fn of_choices(request: &ServeRequest, matcher: &StopMatcher, detokenizer: &Arc<dyn Detokenizer>) -> Vec<Self> {
        let rules = Arc::new(request.stop.clone());
        let one = |_| Self::with_rules(request, Arc::clone(&rules), matcher.clone(), Arc::clone(detokenizer));
        (0..request.choices).map(one).collect()
    }

    fn with_rules(
        request: &ServeRequest,
        stop: Arc<StopRules>,
        matcher: StopMatcher,
        detokenizer: Arc<dyn Detokenizer>,
    ) -> Self {
        Self {
            tokens: Vec::new(),
            stop,
            keep_terminator: request.include_stop_str,
            min_tokens: request.sampling.min_tokens as usize,
            literal: detokenizer.decoder(false),
            visible: detokenizer.decoder(request.skip_special_tokens),
            detokenizer,
            matcher,
            closed: false,
            finish: None,
        }
    }

    /// True if the choice has ended.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Why the choice has ended, in OpenAI's word; `None` while it has not.
    pub fn finish(&self) -> Option<&'static str> {
        self.finish
    }

    /// Accepted tokens, by position.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Takes a token, if it is the next one.
    pub fn accept(&mut self, sampled: SampledToken, step: StepTiming) -> Verdict {
        let expected = self.tokens.len() as u32;
        if let Some(&earlier) = self.tokens.get(sampled.position as usize) {
            return Verdict::Known {
                same: earlier == sampled.token,
            };
        }
        if self.closed {
            return Verdict::Known { same: true };
        }
        if sampled.position != expected {
            return Verdict::Gap { expected };
        }
        self.tokens.push(sampled.token);
        let special = self.detokenizer.is_special(sampled.token);
        let text = self.literal.push(sampled.token);
        let finish = self.stop.finish(sampled.token, expected + 1);
        let (visible, completion) = self.advance(sampled.token, finish);
        self.closed = completion.is_some();
        self.finish = completion.as_ref().map(|completion| completion.finish.as_str());
        Verdict::Accepted {
            token: OutputToken {
                sampled,
                text,
                visible,
                special,
                step,
            },
            completion,
        }
    }

    /// Feeds the visible text of `token` to the stop matcher and decides whether the request ends.
    fn advance(&mut self, token: u32, reason: Option<FinishReason>) -> (String, Option<Completion>) {
        let terminates = match reason {
            Some(FinishReason::Eos | FinishReason::StopToken(_)) => true,
            Some(FinishReason::Length) | None => false,
        };
        // The text of a terminating token is no part of the answer, unless the client wants it.
        let added = if terminates && !self.keep_terminator {
            String::new()
        } else {
            self.visible.push(token)
        };
        let released = self.feed(&added);
        if let Some(string) = released.stop {
            return (
                released.text,
                Some(self.completion(Finish::StopString(string), String::new())),
            );
        }
        let finish = match reason {
            None => return (released.text, None),
            Some(FinishReason::Length) => Finish::Length,
            Some(FinishReason::Eos) => Finish::Eos,
            Some(FinishReason::StopToken(token)) => Finish::StopToken(token),
        };
        // Bytes that wait for the rest of a character become text now, and that text may complete a stop string.
        let rest = self.visible.finish();
        let last = self.feed(&rest);
        let completion = match last.stop {
            Some(string) => self.completion(Finish::StopString(string), last.text),
            None => {
                let tail = last.text + &self.matcher.finish();
                self.completion(finish, tail)
            }
        };
        (released.text, Some(completion))
    }

    /// Gives text to the stop matcher.
    fn feed(&mut self, text: &str) -> Released {
        if self.tokens.len() <= self.min_tokens {
            self.matcher.pass(text)
        } else {
            self.matcher.push(text)
        }
    }

    fn completion(&self, finish: Finish, tail: String) -> Completion {
        let generated_tokens = self.tokens.len() as u32;
        Completion {
            finish,
            generated_tokens,
            tail,
            limit_reached: generated_tokens >= self.stop.max_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{ByteText, EOS, SPECIAL, request, sampled};
    use super::*;
    use proptest::prelude::*;

    fn ledger(change: impl FnOnce(&mut ServeRequest)) -> Ledger {
        let mut request = request(1, 4, 64);
        change(&mut request);
        let matcher = StopMatcher::new(&request.stop_strings, request.include_stop_str);
        Ledger::new(&request, matcher, Arc::new(ByteText))
    }

    /// Feeds `tokens` until the request ends; visible text, and the completion if there was one.
    fn feed(ledger: &mut Ledger, tokens: &[u32]) -> (String, Option<Completion>) {
        let mut text = String::new();
        for (position, &token) in tokens.iter().enumerate() {
            match ledger.accept(sampled(position as u32, token), StepTiming::default()) {
                Verdict::Accepted { token, completion } => {
                    text.push_str(&token.visible);
                    if let Some(completion) = completion {
                        text.push_str(&completion.tail);
                        return (text, Some(completion));
                    }
                }
                other @ (Verdict::Known { .. } | Verdict::Gap { .. }) => panic!("token {position}: {other:?}"),
            }
        }
        (text, None)
    }

    fn bytes(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[test]
    fn a_position_is_accepted_once() {
        let mut ledger = ledger(|_| {});
        let accept =
            |ledger: &mut Ledger, position, token| ledger.accept(sampled(position, token), StepTiming::default());
        assert!(matches!(accept(&mut ledger, 0, 65), Verdict::Accepted { .. }));
        assert_eq!(accept(&mut ledger, 0, 65), Verdict::Known { same: true });
        assert_eq!(accept(&mut ledger, 0, 66), Verdict::Known { same: false });
        assert_eq!(accept(&mut ledger, 2, 67), Verdict::Gap { expected: 1 });
        assert!(matches!(accept(&mut ledger, 1, 66), Verdict::Accepted { .. }));
        assert_eq!(ledger.tokens(), [65, 66]);
    }

    #[test]
    fn nothing_is_accepted_behind_the_end() {
        let mut ledger = ledger(|request| request.stop.max_tokens = 1);
        let (_, completion) = feed(&mut ledger, &[65]);
        assert!(completion.expect("the limit ends it").limit_reached);
        assert_eq!(
            ledger.accept(sampled(1, 66), StepTiming::default()),
            Verdict::Known { same: true }
        );
    }

    #[test]
    fn a_terminating_token_is_counted_and_not_shown() {
        for (token, finish) in [(EOS, Finish::Eos), (u32::from(b'.'), Finish::StopToken(46))] {
            let mut ledger = ledger(|request| request.stop.stop_token_ids = vec![46]);
            let (text, completion) = feed(&mut ledger, &[65, token]);
            let completion = completion.expect("ended");
            assert_eq!(
                (text.as_str(), completion.finish, completion.generated_tokens),
                ("A", finish, 2)
            );
            assert!(!completion.limit_reached);
        }
        let mut kept = ledger(|request| {
            request.stop.stop_token_ids = vec![46];
            request.include_stop_str = true;
        });
        assert_eq!(feed(&mut kept, &[65, 46]).0, "A.");
    }

    #[test]
    fn special_tokens_are_shown_literally_and_hidden_from_visible_text() {
        let mut hidden = ledger(|_| {});
        let Verdict::Accepted { token, .. } = hidden.accept(sampled(0, SPECIAL), StepTiming::default()) else {
            panic!("the first token is accepted")
        };
        assert_eq!(
            (token.text.as_str(), token.visible.as_str(), token.special),
            ("<s>", "", true)
        );
        let mut shown = ledger(|request| {
            request.skip_special_tokens = false;
            request.stop_strings = ["<s>".to_owned()].into();
        });
        let (text, completion) = feed(&mut shown, &[65, SPECIAL]);
        assert_eq!(text, "A");
        assert_eq!(completion.map(|c| c.finish), Some(Finish::StopString("<s>".to_owned())));
    }

    #[test]
    fn a_stop_on_the_last_permitted_token_is_a_stop_and_says_that_the_limit_was_reached() {
        let mut ledger = ledger(|request| {
            request.stop.max_tokens = 2;
            request.stop_strings = ["B".to_owned()].into();
        });
        let (text, completion) = feed(&mut ledger, &bytes("AB"));
        let completion = completion.expect("ended");
        assert_eq!(
            (text.as_str(), completion.finish),
            ("A", Finish::StopString("B".to_owned()))
        );
        assert!(completion.limit_reached);
    }

    #[test]
    fn an_unfinished_character_at_the_end_becomes_one_replacement_character() {
        let mut ledger = ledger(|request| request.stop.max_tokens = 3);
        let (text, completion) = feed(&mut ledger, &[65, 0xf0, 0x9f]);
        assert_eq!(text, "A\u{fffd}");
        assert_eq!(completion.map(|c| c.tail), Some("\u{fffd}".to_owned()));
    }

    #[test]
    fn an_unfinished_character_before_a_hidden_end_token_stays_whatever_is_skipped() {
        for skip_special in [true, false] {
            let mut ledger = ledger(|request| request.skip_special_tokens = skip_special);
            let (text, completion) = feed(&mut ledger, &[65, 0xf0, 0x9f, EOS]);
            assert_eq!(
                (text.as_str(), completion.map(|c| c.finish)),
                ("A\u{fffd}", Some(Finish::Eos))
            );
        }
    }

    #[test]
    fn what_was_held_back_comes_with_the_end() {
        let mut ledger = ledger(|request| request.stop_strings = ["BCD".to_owned()].into());
        let (text, completion) = feed(&mut ledger, &[65, 66, 67, EOS]);
        assert_eq!(text, "ABC");
        assert_eq!(completion.map(|c| c.tail), Some("BC".to_owned()));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]
        /// Every token is one byte, so stop strings and characters are cut at every possible place.
        #[test]
        fn text_and_end_equal_a_search_of_the_whole_text(
            text in "[abé水🦀]{0,24}",
            stops in prop::collection::vec("[abé水🦀]{1,4}", 0..4),
            limit in 1_u32..80,
            keep: bool,
        ) {
            let tokens = bytes(&text);
            let mut ledger = ledger(|request| {
                request.stop.max_tokens = limit;
                request.stop_strings = stops.clone().into();
                request.include_stop_str = keep;
            });
            let (got, completion) = feed(&mut ledger, &tokens);

            let cut = tokens.len().min(limit as usize);
            let whole = String::from_utf8_lossy(&text.as_bytes()[..cut]).into_owned();
            let ends = |stop: &String| whole.find(stop.as_str()).map(|at| (at + stop.len(), at));
            let found = stops.iter().enumerate().filter_map(|(i, s)| ends(s).map(|(end, at)| (end, i, at)));
            match found.min() {
                Some((end, index, at)) => {
                    prop_assert_eq!(&got, &whole[..if keep { end } else { at }]);
                    let completion = completion.expect("a stop string ends it");
                    prop_assert_eq!(completion.finish, Finish::StopString(stops[index].clone()));
                    // Every character is whole when its last byte is there: the end of the match is the token count.
                    prop_assert_eq!(completion.generated_tokens as usize, end);
                }
                None if tokens.len() >= limit as usize => {
                    prop_assert_eq!(&got, &whole);
                    prop_assert_eq!(completion.map(|c| (c.finish, c.limit_reached)), Some((Finish::Length, true)));
                }
                None => {
                    prop_assert!(completion.is_none());
                    prop_assert!(whole.starts_with(&got), "nothing but the held tail may be missing");
                }
            }
        }
    }
}
