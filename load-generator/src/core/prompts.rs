//! Prompts of a wanted number of tokens, out of common words.

use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Words that most tokenizers have as one token, at the start of a text and after a space. Single letters are for tokenizers
/// with small vocabularies.
pub const CANDIDATES: &str = "the of and to in is you that it he was for on are as with his they at be this have from or one \
    had by but not what all were we when your can said there use an each which she do how their if will up other about out \
    many then them these so some her would make like him into time has look two more write go see number no way could people \
    my than first water been call who its now find long down day did get come made may part over new sound take only little \
    work know place year live me back give most very after thing our just name good man think say great where help through \
    much before line right too mean old any same tell boy follow came want show also around form three small set put end \
    does another well large must big even such because turn here why ask went men read need land different home us move try \
    kind hand picture again change off play spell air away animal house point page letter mother answer found study still \
    learn should world high every near add food between own below country plant last school father keep tree never start \
    city earth eye light thought head under story saw left few while along might close something seem next hard open example \
    a b c d e f g h i j k l m n o p q r s t u v w x y z";

/// Longest prompt, and longest answer, in tokens: several times what any model takes.
pub const MAX_TOKENS: u32 = 10_000_000;
/// No tokenizer makes less of a word; a server that seems to is not counting.
pub const MIN_TOKENS_PER_WORD: f64 = 0.1;

/// What a prompt says.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Words that follow from a number; other numbers, other words from the first on.
    Seeded(u64),
    /// Blocks of text, each of which follows from its id: equal ids at the same place are equal text.
    Blocks {
        /// One for each block, in order.
        ids: Arc<[u64]>,
        /// Tokens of a block; blocks end at multiples of it, rounded.
        block_tokens: f64,
        /// Other seeds, other texts.
        seed: u64,
    },
    /// A text.
    Given(Arc<str>),
}

/// Words, and how many tokens they are for one server and one way to ask it.
#[derive(Clone, Debug)]
pub struct Lexicon {
    words: Vec<String>,
    tokens_per_word: f64,
    overhead: f64,
}

/// There are too few words to make texts that differ.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} words are too few to write prompts with")]
pub struct TooFewWords(usize);

impl Lexicon {
    /// `tokens_per_word` and `overhead` (tokens of a prompt without words, as of a chat template) must be numbers at least 0.
    pub fn new(words: Vec<String>, tokens_per_word: f64, overhead: f64) -> Result<Self, TooFewWords> {
        if words.len() < 2 {
            return Err(TooFewWords(words.len()));
        }
        Ok(Self {
            words,
            tokens_per_word: tokens_per_word.max(MIN_TOKENS_PER_WORD),
            overhead: overhead.max(0.0),
        })
    }

    /// All candidates, for servers of which nothing is known; a token each, until something is.
    pub fn unknown() -> Self {
        Self {
            words: CANDIDATES.split_whitespace().map(str::to_owned).collect(),
            tokens_per_word: 1.0,
            overhead: 0.0,
        }
    }

    /// Tokens of a word, on average.
    pub fn tokens_per_word(&self) -> f64 {
        self.tokens_per_word
    }

    /// Tokens that a prompt has without any words.
    pub fn overhead(&self) -> f64 {
        self.overhead
    }

    /// The same words, counted otherwise.
    #[must_use]
    pub fn counted(mut self, tokens_per_word: f64, overhead: f64) -> Self {
        self.tokens_per_word = tokens_per_word.max(MIN_TOKENS_PER_WORD);
        self.overhead = overhead.max(0.0);
        self
    }

    /// Number of words of a prompt of `tokens` tokens: at least one, since no server takes an empty prompt.
    pub fn words_for(&self, tokens: u32) -> usize {
        let words = (f64::from(tokens) - self.overhead) / self.tokens_per_word;
        words.round().max(1.0) as usize
    }

    /// A text of that many words, by a seed.
    pub fn text(&self, seed: u64, words: usize) -> String {
        let mut text = String::with_capacity(words * 6);
        self.write(&mut text, seed, words);
        text
    }

    /// The text of a prompt of `tokens` tokens.
    pub fn prompt(&self, content: &Content, tokens: u32) -> String {
        match content {
            Content::Given(text) => text.to_string(),
            Content::Seeded(seed) => self.text(*seed, self.words_for(tokens)),
            Content::Blocks {
                ids,
                block_tokens,
                seed,
            } => {
                let total = self.words_for(tokens);
                let mut text = String::with_capacity(total * 6);
                let end_of = |block: usize| {
                    let words = (block as f64 * block_tokens / self.tokens_per_word).round();
                    (words as usize).min(total)
                };
                for (block, id) in ids.iter().enumerate() {
                    let words = end_of(block + 1) - end_of(block);
                    // Whatever the last block lacks by rounding, it gets.
                    let words = if block + 1 == ids.len() {
                        total - end_of(block)
                    } else {
                        words
                    };
                    self.write(&mut text, mix(*seed, *id), words);
                }
                text
            }
        }
    }

    fn write(&self, text: &mut String, seed: u64, words: usize) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        for _ in 0..words {
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(&self.words[random.random_range(0..self.words.len())]);
        }
    }
}

/// A number that follows from two, by the steps of SplitMix64.
pub fn mix(seed: u64, value: u64) -> u64 {
    let mut z = seed.wrapping_add(value.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lexicon(tokens_per_word: f64, overhead: f64) -> Lexicon {
        Lexicon::unknown().counted(tokens_per_word, overhead)
    }

    fn words(text: &str) -> Vec<&str> {
        text.split(' ').collect()
    }

    #[test]
    fn prompts_have_the_words_that_their_tokens_need() {
        for (per_word, overhead, tokens, expected) in [
            (1.0, 0.0, 100, 100),
            (1.0, 9.0, 100, 91),
            (1.5, 1.0, 100, 66),
            (1.0, 30.0, 9, 1),
        ] {
            let text = lexicon(per_word, overhead).prompt(&Content::Seeded(3), tokens);
            assert_eq!(words(&text).len(), expected, "{per_word} {overhead} {tokens}");
        }
        let given = lexicon(1.0, 0.0).prompt(&Content::Given("as  it is".into()), 100);
        assert_eq!(given, "as  it is");
    }

    #[test]
    fn seeds_decide_and_texts_differ_early() {
        let lexicon = lexicon(1.0, 0.0);
        assert_eq!(lexicon.text(1, 50), lexicon.text(1, 50));
        let starts: std::collections::BTreeSet<_> = (0..500).map(|seed| lexicon.text(mix(1, seed), 4)).collect();
        assert!(starts.len() > 495, "{}", starts.len());
    }

    #[test]
    fn equal_blocks_at_equal_places_are_equal_text() {
        for (per_word, block_tokens) in [(1.0, 512.0), (1.3, 51.2), (1.0, 5.12)] {
            let lexicon = lexicon(per_word, 3.0);
            let prompt = |ids: &[u64], tokens| {
                lexicon.prompt(
                    &Content::Blocks {
                        ids: ids.into(),
                        block_tokens,
                        seed: 9,
                    },
                    tokens,
                )
            };
            let tokens = (3.6 * block_tokens) as u32;
            let (a, b, c) = (
                prompt(&[0, 1, 2, 3], tokens),
                prompt(&[0, 1, 7, 8], tokens),
                prompt(&[5, 1, 2, 3], tokens),
            );
            let (a, b, c) = (words(&a), words(&b), words(&c));
            assert_eq!(a.len(), lexicon.words_for(tokens));
            let shared = (2.0 * block_tokens / per_word).round() as usize;
            let common = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
            // Random words may happen to agree a little longer.
            assert!((shared..shared + 3).contains(&common), "{shared} {common}");
            let first = (block_tokens / per_word).round() as usize;
            assert_ne!(a[..first], c[..first]);
            assert_eq!(a[first..], c[first..], "blocks do not depend on those before");
        }
    }

    #[test]
    fn too_few_words_are_refused() {
        assert!(Lexicon::new(vec!["one".to_owned()], 1.0, 0.0).is_err());
        assert_eq!(
            lexicon(0.0, 0.0).words_for(7),
            70,
            "a server that does not count asks for no endless prompts"
        );
    }
}
