//! The JSON of chats: whole answers and chunks.

use serde::Serialize;

use super::logprobs::ChatLogprobs;
use crate::http::openai::answer::{Head, StopReason, UsageField};

/// A whole answer, or one chunk of a stream. `C`: [`ChatChoice`] or [`ChunkChoice`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatReply<'a, C> {
    /// Id, time, model.
    #[serde(flatten)]
    pub head: &'a Head,
    /// The answers, or what one of them adds; none in a chunk that carries usage only.
    pub choices: Vec<C>,
    /// Counts.
    #[serde(skip_serializing_if = "UsageField::is_absent")]
    pub usage: UsageField,
    /// Ids of the prompt's tokens, if asked for; in a stream in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// One answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChoice {
    /// Its place, from 0 on.
    pub index: u32,
    /// What the assistant says.
    pub message: Message,
    /// Null unless asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// `length`, `stop` or `tool_calls`.
    pub finish_reason: &'static str,
    /// Stop string or stop token that ended it.
    pub stop_reason: Option<StopReason>,
    /// Ids of its tokens, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// A message of the assistant.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Message {
    /// `assistant`.
    pub role: &'static str,
    /// Its text.
    pub content: Option<String>,
}

/// What a chunk adds to one answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChunkChoice {
    /// The answer's place, from 0 on.
    pub index: u32,
    /// What is added.
    pub delta: Delta,
    /// Of the tokens of this chunk; null unless asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// In the last chunk of the answer.
    pub finish_reason: Option<&'static str>,
    /// In the last chunk of the answer: stop string or stop token that ended it.
    pub stop_reason: Option<StopReason>,
    /// Ids of the tokens of this chunk, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// What a chunk adds to a message.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Delta {
    /// `assistant`, in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}
