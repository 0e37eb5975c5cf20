//! The JSON of `/generate`'s answers, whole and in events.

use model_files::TextTokenizer;
use protocol::sampling::PromptLogprob;
use serde::Serialize;
use utoipa::ToSchema;

use crate::core::types::{Completion, Finish};
use crate::http::shown::Shown;

/// One token of the prompt or of the answer.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Token {
    /// Token id.
    pub id: u32,
    /// Text the token adds; special tokens literally. Null only where MindIE is imitated.
    pub text: Option<String>,
    /// Natural logarithm of its probability; none for the first token of a prompt.
    pub logprob: Option<f32>,
    /// Not part of the text. Null only where MindIE is imitated.
    pub special: Option<bool>,
}

impl Token {
    /// A token of the answer. Its text is its part of the answer's text; a special token, which has none, is shown
    /// literally.
    pub fn generated(shown: &Shown) -> Self {
        let token = &shown.token;
        let literal = if token.special { token.text.as_str() } else { "" };
        Self {
            id: token.sampled.token,
            text: Some(format!("{}{literal}", shown.text)),
            logprob: Some(finite(token.sampled.logprob)),
            special: Some(token.special),
        }
    }

    /// The tokens of a prompt. `logprobs`: those of the second token and the following ones.
    pub fn of_prompt(prompt: &[u32], logprobs: &[PromptLogprob], tokenizer: &TextTokenizer) -> Vec<Self> {
        let mut decoder = tokenizer.incremental(false);
        let token = |(index, &id): (usize, &u32)| Self {
            id,
            text: Some(decoder.push(id)),
            logprob: index
                .checked_sub(1)
                .and_then(|index| logprobs.get(index))
                .map(|of| finite(of.logprob)),
            special: Some(tokenizer.is_special(id)),
        };
        prompt.iter().enumerate().map(token).collect()
    }
}

/// MindIE tells nothing of a token but its id.
pub fn only_ids(tokens: &mut [Token]) {
    for token in tokens {
        token.text = None;
        token.logprob = None;
        token.special = None;
    }
}

/// JSON has no infinity.
pub fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

/// Why an answer ended, in TGI's words. The limit wins over what else the last permitted token was.
pub fn finish_reason(completion: &Completion) -> &'static str {
    if completion.limit_reached {
        return "length";
    }
    match completion.finish {
        Finish::Length => "length",
        Finish::Eos => "eos_token",
        Finish::StopToken(_) | Finish::StopString(_) => "stop_sequence",
    }
}

/// `details` of a whole answer.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Details {
    /// `length`, `eos_token` or `stop_sequence`.
    pub finish_reason: &'static str,
    /// Tokens sampled on all nodes.
    pub generated_tokens: u32,
    /// Tokens of the prompt, after truncation.
    pub prompt_tokens: usize,
    /// The same, for newer clients.
    pub input_length: usize,
    /// Seed, given or drawn.
    pub seed: u64,
    /// The prompt's tokens, if asked for.
    pub prefill: Vec<Token>,
    /// The answer's tokens.
    pub tokens: Vec<Token>,
    /// The sequences that were not chosen, if there were several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub best_of_sequences: Vec<BestOfSequence>,
}

/// One of several sequences to choose from.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct BestOfSequence {
    /// Its text.
    pub generated_text: String,
    /// `length`, `eos_token` or `stop_sequence`.
    pub finish_reason: &'static str,
    /// Tokens sampled on all nodes.
    pub generated_tokens: u32,
    /// Its seed: a request with this one gets this sequence.
    pub seed: u64,
    /// The prompt's tokens, if asked for.
    pub prefill: Vec<Token>,
    /// Its tokens.
    pub tokens: Vec<Token>,
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Generated {
    /// Present if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Details>,
    /// The text.
    pub generated_text: String,
}

impl Generated {
    /// The answer that `winner` is, with `others` beside it.
    pub fn new(winner: BestOfSequence, others: Vec<BestOfSequence>, details: bool, prompt_tokens: usize) -> Self {
        let BestOfSequence {
            generated_text,
            finish_reason,
            generated_tokens,
            seed,
            prefill,
            tokens,
        } = winner;
        let details = details.then_some(Details {
            finish_reason,
            generated_tokens,
            prompt_tokens,
            input_length: prompt_tokens,
            seed,
            prefill,
            tokens,
            best_of_sequences: others,
        });
        Self {
            details,
            generated_text,
        }
    }
}

/// One event of a stream.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StreamEvent<'a> {
    /// The token.
    pub token: &'a Token,
    /// The whole text, in the last event.
    pub generated_text: Option<&'a str>,
    /// In the last event, if asked for.
    pub details: Option<StreamDetails>,
}

/// `details` of a stream's last event.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StreamDetails {
    /// `length`, `eos_token` or `stop_sequence`.
    pub finish_reason: &'static str,
    /// Tokens sampled on all nodes.
    pub generated_tokens: u32,
    /// Seed, given or drawn.
    pub seed: u64,
    /// Tokens of the prompt, after truncation.
    pub prompt_tokens: usize,
    /// The same, for newer clients.
    pub input_length: usize,
}
