//! The bodies of chats and of the tokenizer's paths (see [`super::fields`]).
#![allow(
    missing_docs,
    reason = "the fields' documentation is the text of the API document; every field has it"
)]

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::custom::{
    absent, known_model, model, no_tools, no_variables, nothing_to_continue, templates_own, tokens, tool_choice,
};
use super::fields::{ChatMessage, Sampling, Tool};
use super::parts::StreamOptions;

/// The body of `/v1/chat/completions`.
#[derive(Deserialize, ToSchema)]
pub struct ChatRequest {
    #[schema(schema_with = model, required = true)]
    pub model: String,
    /// The conversation.
    #[schema(required = true, min_items = 1)]
    pub messages: Vec<ChatMessage>,
    /// End the prompt with the opening of the assistant's answer.
    #[schema(default = true)]
    pub add_generation_prompt: Option<bool>,
    /// Further variables of the chat template.
    pub chat_template_kwargs: Option<BTreeMap<String, Value>>,
    /// The answer goes on with the last message's words, without repeating them; not with `add_generation_prompt: true`.
    #[schema(default = false)]
    pub continue_final_message: Option<bool>,
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

/// The body of `/tokenize`.
#[derive(Deserialize, ToSchema)]
#[serde(untagged)]
pub enum TokenizeRequest {
    Prompt(TokenizePrompt),
    Chat(TokenizeChat),
}

/// A text to tokenise.
#[derive(Deserialize, ToSchema)]
pub struct TokenizePrompt {
    /// Only with `messages`, and without effect here.
    pub add_generation_prompt: Option<bool>,
    /// Add the special tokens that the model puts around texts.
    #[schema(default = true)]
    pub add_special_tokens: Option<bool>,
    #[schema(schema_with = no_variables)]
    pub chat_template_kwargs: Option<Value>,
    #[schema(schema_with = nothing_to_continue)]
    pub continue_final_message: Option<bool>,
    #[schema(schema_with = absent)]
    pub messages: Option<Value>,
    #[schema(schema_with = known_model)]
    pub model: Option<String>,
    /// The text.
    #[schema(required = true)]
    pub prompt: String,
    /// Also return each token as the vocabulary writes it.
    #[schema(default = false)]
    pub return_token_strs: Option<bool>,
    #[schema(schema_with = no_tools)]
    pub tools: Option<Value>,
}

/// A conversation to tokenise.
#[derive(Deserialize, ToSchema)]
pub struct TokenizeChat {
    /// End the prompt with the opening of the assistant's answer.
    #[schema(default = true)]
    pub add_generation_prompt: Option<bool>,
    #[schema(schema_with = templates_own)]
    pub add_special_tokens: Option<bool>,
    /// Further variables of the chat template.
    pub chat_template_kwargs: Option<BTreeMap<String, Value>>,
    /// End the prompt with the last message's words; not with `add_generation_prompt: true`.
    #[schema(default = false)]
    pub continue_final_message: Option<bool>,
    /// The conversation.
    #[schema(required = true, min_items = 1)]
    pub messages: Vec<ChatMessage>,
    #[schema(schema_with = known_model)]
    pub model: Option<String>,
    #[schema(schema_with = absent)]
    pub prompt: Option<Value>,
    /// Also return each token as the vocabulary writes it.
    #[schema(default = false)]
    pub return_token_strs: Option<bool>,
    /// Functions that the model may call.
    #[schema(max_items = 128)]
    pub tools: Option<Vec<Tool>>,
}

/// The body of `/detokenize`.
#[derive(Deserialize, ToSchema)]
pub struct DetokenizeRequest {
    #[schema(schema_with = known_model)]
    pub model: Option<String>,
    #[schema(schema_with = tokens, required = true)]
    pub tokens: Vec<u32>,
}
