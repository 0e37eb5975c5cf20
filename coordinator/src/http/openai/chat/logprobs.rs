//! The `logprobs` object of chats: lists where completions have maps, so that tokens of the same text stay apart.

use model_files::TextTokenizer;
use serde::Serialize;
use utoipa::ToSchema;

use crate::http::openai::logprobs::finite;
use crate::http::shown::Shown;

/// `logprobs` of a choice or of a part of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct ChatLogprobs {
    /// One entry for every token.
    pub content: Vec<TokenLogprob>,
}

/// A token of the answer.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct TokenLogprob {
    /// The token.
    #[serde(flatten)]
    pub own: Alternative,
    /// The most probable tokens at its place, best first, as many as were asked for.
    pub top_logprobs: Vec<Alternative>,
}

/// A token and its probability.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Alternative {
    /// Its text; what is only a part of a character shows as U+FFFD.
    pub token: String,
    /// Its raw log-probability (nats).
    pub logprob: f32,
    /// Its bytes.
    #[schema(value_type = Vec<u32>)]
    pub bytes: Vec<u8>,
}

/// Writes the entries of a choice's tokens.
pub struct ChatLogprobsWriter {
    tokenizer: TextTokenizer,
    count: usize,
}

impl ChatLogprobsWriter {
    /// `count`: how many alternatives were asked for.
    pub fn new(tokenizer: TextTokenizer, count: u8) -> Self {
        Self {
            tokenizer,
            count: usize::from(count),
        }
    }

    /// The entry of one token.
    pub fn entry(&self, shown: &Shown) -> TokenLogprob {
        let sampled = &shown.token.sampled;
        let best = sampled.top_logprobs.iter().take(self.count);
        TokenLogprob {
            own: self.alternative(sampled.token, sampled.raw_logprob),
            top_logprobs: best.map(|&(id, logprob)| self.alternative(id, logprob)).collect(),
        }
    }

    fn alternative(&self, id: u32, logprob: f32) -> Alternative {
        Alternative {
            token: self.tokenizer.token_text(id),
            logprob: finite(logprob),
            bytes: self.tokenizer.token_bytes(id).to_vec(),
        }
    }
}
