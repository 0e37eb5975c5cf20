//! The `logprobs` object of completions.

use model_files::TextTokenizer;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

use crate::http::answer::PromptPart;
use crate::http::shown::Shown;

/// JSON has no infinity; this is what OpenAI-style servers write instead.
const IMPOSSIBLE: f32 = -9999.0;

/// `logprobs` of a choice or of a part of it; four lists of the same length.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct Logprobs {
    /// Where each token's text begins, in characters.
    pub text_offset: Vec<usize>,
    /// Each token's raw log-probability (nats); none for the first token of a prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// Each token's text; special tokens literally.
    pub tokens: Vec<String>,
    /// For each token: itself, then the most probable ones; nothing for the first token of a prompt.
    #[schema(value_type = Vec<Option<BTreeMap<String, f32>>>)]
    pub top_logprobs: Vec<Option<Top>>,
}

impl Logprobs {
    fn push(&mut self, text: String, entry: Option<(f32, Top)>, offset: usize) {
        let (logprob, top) = entry.unzip();
        self.text_offset.push(offset);
        self.token_logprobs.push(logprob);
        self.tokens.push(text);
        self.top_logprobs.push(top);
    }
}

/// Texts with their log-probabilities, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Top(Vec<(String, f32)>);

impl Serialize for Top {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (text, logprob) in &self.0 {
            map.serialize_entry(text, logprob)?;
        }
        map.end()
    }
}

impl Top {
    /// Two tokens may have the same text: the higher value stays.
    fn add(&mut self, text: String, logprob: f32) {
        match self.0.iter_mut().find(|(known, _)| *known == text) {
            Some((_, known)) => *known = known.max(logprob),
            None => self.0.push((text, logprob)),
        }
    }
}

/// Writes the entries of tokens. `offset`: characters of the text before the next token; each writes on where the last one
/// stopped.
pub struct LogprobsWriter {
    tokenizer: TextTokenizer,
    /// Most alternatives of each token.
    count: usize,
}

impl LogprobsWriter {
    /// `count`: how many alternatives were asked for.
    pub fn new(tokenizer: TextTokenizer, count: u8) -> Self {
        Self {
            tokenizer,
            count: usize::from(count),
        }
    }

    /// Adds the entry of one token of an answer.
    pub fn add(&self, shown: &Shown, offset: &mut usize, logprobs: &mut Logprobs) {
        let sampled = &shown.token.sampled;
        let text = shown.token.text.clone();
        let entry = self.entry(&text, sampled.token, sampled.raw_logprob, &sampled.top_logprobs);
        logprobs.push(text, Some(entry), *offset);
        *offset += shown.text.chars().count();
    }

    /// Adds the entries of a prompt that stands in front of the answer with `chars` characters.
    pub fn add_prompt(&self, prompt: &PromptPart, chars: usize, offset: &mut usize, logprobs: &mut Logprobs) {
        let (mut literal, mut visible) = (self.tokenizer.incremental(false), self.tokenizer.incremental(true));
        let known = prompt.logprobs.as_deref().unwrap_or_default();
        let mut before = 0;
        for (index, &id) in prompt.tokens.iter().enumerate() {
            let text = literal.push(id);
            let of = index.checked_sub(1).and_then(|index| known.get(index));
            let entry = of.map(|of| self.entry(&text, id, of.logprob, &of.top));
            logprobs.push(text, entry, *offset + before.min(chars));
            before += visible.push(id).chars().count();
        }
        *offset += chars;
    }

    fn entry(&self, text: &str, token: u32, logprob: f32, alternatives: &[(u32, f32)]) -> (f32, Top) {
        let mut top = Top::default();
        top.add(text.to_owned(), finite(logprob));
        let others = alternatives.iter().take(self.count).filter(|(id, _)| *id != token);
        for (id, logprob) in others {
            top.add(self.tokenizer.token_text(*id), finite(*logprob));
        }
        (finite(logprob), top)
    }
}

/// `prompt_logprobs` of a choice: for each token of the prompt but the first, which has none, the token itself and then the
/// most probable ones.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprobs(Vec<Option<Vec<(u32, RankedToken)>>>);

/// A token at a place of the prompt.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct RankedToken {
    /// Raw log-probability (nats).
    logprob: f32,
    /// Its place among all tokens, from 1; null if it is not among those that were asked for.
    rank: Option<usize>,
    /// Its text; special tokens literally.
    decoded_token: String,
}

impl PromptLogprobs {
    /// With at most `count` alternatives for each token.
    pub fn new(prompt: &PromptPart, count: u8, tokenizer: &TextTokenizer) -> Self {
        let known = prompt.logprobs.as_deref().unwrap_or_default();
        let place = |index: usize, id: u32| {
            let of = known.get(index.checked_sub(1)?)?;
            let ranked = |id: u32, logprob: f32| RankedToken {
                logprob: finite(logprob),
                rank: of.top.iter().position(|(of, _)| *of == id).map(|place| place + 1),
                decoded_token: tokenizer.token_text(id),
            };
            let top = of.top.iter().take(usize::from(count)).filter(|(of, _)| *of != id);
            let others = top.map(|&(id, logprob)| (id, ranked(id, logprob)));
            Some(std::iter::once((id, ranked(id, of.logprob))).chain(others).collect())
        };
        let tokens = prompt.tokens.iter().enumerate();
        Self(tokens.map(|(index, &id)| place(index, id)).collect())
    }
}

impl Serialize for PromptLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Place<'a>(&'a [(u32, RankedToken)]);
        impl Serialize for Place<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_map(self.0.iter().map(|(id, token)| (id, token)))
            }
        }
        serializer.collect_seq(self.0.iter().map(|place| place.as_deref().map(Place)))
    }
}

/// A log-probability that JSON can carry.
pub fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}
