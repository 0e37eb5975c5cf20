//! The `logprobs` object of completions.

use model_files::TextTokenizer;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

use crate::http::shown::Shown;

/// JSON has no infinity; this is what OpenAI-style servers write instead.
const IMPOSSIBLE: f32 = -9999.0;

/// `logprobs` of a choice or of a part of it; four lists of the same length.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct Logprobs {
    /// Where each token's text begins, in characters.
    pub text_offset: Vec<usize>,
    /// Each token's raw log-probability (nats).
    pub token_logprobs: Vec<f32>,
    /// Each token's text; special tokens literally.
    pub tokens: Vec<String>,
    /// For each token: itself, then the most probable ones.
    #[schema(value_type = Vec<BTreeMap<String, f32>>)]
    pub top_logprobs: Vec<Top>,
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

/// Writes the entries of a choice's tokens, wherever they go.
pub struct LogprobsWriter {
    tokenizer: TextTokenizer,
    /// Most alternatives of each token.
    count: usize,
    /// Characters of the text before the next token.
    offset: usize,
}

impl LogprobsWriter {
    /// `count`: how many alternatives were asked for. The text begins at offset 0.
    pub fn new(tokenizer: TextTokenizer, count: u8) -> Self {
        Self {
            tokenizer,
            count: usize::from(count),
            offset: 0,
        }
    }

    /// Adds the entry of one token.
    pub fn add(&mut self, shown: &Shown, logprobs: &mut Logprobs) {
        let sampled = &shown.token.sampled;
        let mut top = Top::default();
        top.add(shown.token.text.clone(), finite(sampled.raw_logprob));
        let others = sampled
            .top_logprobs
            .iter()
            .take(self.count)
            .filter(|(id, _)| *id != sampled.token);
        for (id, logprob) in others {
            top.add(self.tokenizer.token_text(*id), finite(*logprob));
        }
        logprobs.text_offset.push(self.offset);
        logprobs.token_logprobs.push(finite(sampled.raw_logprob));
        logprobs.tokens.push(shown.token.text.clone());
        logprobs.top_logprobs.push(top);
        self.offset += shown.text.chars().count();
    }
}

/// A log-probability that JSON can carry.
pub fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}
