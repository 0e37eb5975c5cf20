//! The bodies of chats and of the tokenizer's paths (see [`super::fields`]).
#![allow(
    missing_docs,
    reason = "the fields' documentation is the text of the API document; every field has it"
)]

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::custom::tool_choice;
use super::fields::{ChatMessage, Sampling, Tool};
use super::parts::StreamOptions;

/// The body of `/v1/chat/completions`.
#[derive(Deserialize, ToSchema)]
pub struct ChatRequest {
    /// Name of the model, one of its aliases, or of an adapter.
    #[schema(required = true, min_length = 1)]
    pub model: String,
    /// The conversation.
    #[schema(required = true, min_items = 1)]
    pub messages: Vec<ChatMessage>,
    /// End the prompt with the opening of the assistant's answer.
    #[schema(default = true)]
    pub add_generation_prompt: Option<bool>,
    /// Further variables of the chat template.
    pub chat_template_kwargs: Option<BTreeMap<String, Value>>,
    /// Report the log-probabilities of the tokens.
    #[schema(default = false)]
    pub logprobs: Option<bool>,
    /// Most tokens to generate; the server's own limits cut it, without an error. Wins over `max_tokens`.
    #[schema(minimum = 1, maximum = 2147483647)]
    pub max_completion_tokens: Option<u32>,
    /// Older name of `max_completion_tokens`.
    #[schema(minimum = 1, maximum = 2147483647)]
    pub max_tokens: Option<u32>,
    /// `["text"]`: models write text only.
    pub modalities: Option<Vec<TextWord>>,
    /// Number of choices. More than 1 needs a temperature above 0.
    #[schema(minimum = 1, maximum = 8192, default = 1)]
    pub n: Option<u32>,
    /// Read and checked; a model may call several functions at once in any case.
    pub parallel_tool_calls: Option<bool>,
    /// Report token ids.
    #[schema(default = false)]
    pub return_token_ids: Option<bool>,
    /// Answer as an event stream.
    #[schema(default = false)]
    pub stream: Option<bool>,
    /// What the stream says about usage.
    pub stream_options: Option<StreamOptions>,
    #[schema(schema_with = tool_choice)]
    pub tool_choice: Option<Value>,
    /// Functions that the model may call.
    #[schema(max_items = 128)]
    pub tools: Option<Vec<Tool>>,
    /// With `logprobs`: so many alternatives for each token.
    #[schema(minimum = 0, maximum = 20, default = 0)]
    pub top_logprobs: Option<u32>,
    #[serde(flatten)]
    pub sampling: Sampling,
}

/// The word `text`.
#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TextWord {
    Text,
}

/// The body of `/tokenize`: `prompt`, or `messages` in its place.
#[derive(Deserialize, ToSchema)]
pub struct TokenizeRequest {
    /// With `messages`: end the prompt with the opening of the assistant's answer.
    #[schema(default = true)]
    pub add_generation_prompt: Option<bool>,
    /// With `prompt`: add the special tokens that the model puts around texts.
    #[schema(default = true)]
    pub add_special_tokens: Option<bool>,
    /// With `messages`: further variables of the chat template.
    pub chat_template_kwargs: Option<BTreeMap<String, Value>>,
    /// A conversation.
    #[schema(min_items = 1)]
    pub messages: Option<Vec<ChatMessage>>,
    /// Name of the model.
    pub model: Option<String>,
    /// A text.
    pub prompt: Option<String>,
    /// Also return each token as the vocabulary writes it.
    #[schema(default = false)]
    pub return_token_strs: Option<bool>,
    /// With `messages`: functions that the model may call.
    #[schema(max_items = 128)]
    pub tools: Option<Vec<Tool>>,
}

/// The body of `/detokenize`.
#[derive(Deserialize, ToSchema)]
pub struct DetokenizeRequest {
    /// Name of the model.
    pub model: Option<String>,
    /// Token ids of the model.
    #[schema(required = true, max_items = 1048576)]
    pub tokens: Vec<u32>,
}
