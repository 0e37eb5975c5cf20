//! The JSON of chats: whole answers and chunks.

use serde::Serialize;
use utoipa::ToSchema;

use super::logprobs::ChatLogprobs;
use super::tools::format::Call;
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
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct ChatChoice {
    /// Its place, from 0 on.
    pub index: usize,
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

/// Who answers.
pub const ROLE: &str = "assistant";

/// A message of the assistant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct Message {
    /// `assistant`.
    pub role: &'static str,
    /// Its text; null if it only calls.
    pub content: Option<String>,
    /// The functions it calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

impl Message {
    /// Adds to the text.
    pub fn add_text(&mut self, text: &str) {
        self.content.get_or_insert_default().push_str(text);
    }

    /// True if nothing has been said.
    pub fn is_silent(&self) -> bool {
        self.content.as_ref().is_none_or(String::is_empty) && self.tool_calls.is_empty()
    }

    /// The message when nothing is added any more.
    pub fn whole(mut self) -> Self {
        self.role = ROLE;
        if self.tool_calls.is_empty() {
            self.content.get_or_insert_default();
        }
        self
    }
}

/// A call of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ToolCall {
    /// Its place among the calls of its answer.
    pub index: usize,
    /// A name for it, by which its result is told.
    pub id: String,
    /// `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// What is called.
    pub function: Call,
}

/// What a chunk adds to one answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChunkChoice {
    /// The answer's place, from 0 on.
    pub index: usize,
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
    /// Calls that are whole now.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

impl From<Message> for Delta {
    fn from(said: Message) -> Self {
        // A chunk that has a call and no text says nothing about the text.
        let content = if said.tool_calls.is_empty() {
            Some(said.content.unwrap_or_default())
        } else {
            said.content
        };
        Self {
            role: None,
            content,
            tool_calls: said.tool_calls,
        }
    }
}
