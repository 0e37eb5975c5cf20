//! The bodies of requests, as types that only describe: the handlers read bodies field by field (see `json`), and a
//! test holds these types to the names that they know. `null` equals absent, and unknown members are ignored, in all of
//! them.
#![allow(
    missing_docs,
    reason = "the fields' documentation is the text of the API document; every field has it"
)]

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::custom::{
    allowed, arguments, bias, inputs, kept_tokens, model, no_calls, prompt, seed, stop, top_k, words, words_or_none,
};
use super::parts::{FunctionWord, GenerateParameters, ResponseFormat, StreamOptions};

/// The body of `/generate`, `/generate_stream`, `/` and `/invocations`.
#[derive(Deserialize, ToSchema)]
pub struct GenerateRequest {
    #[schema(schema_with = inputs, required = true)]
    pub inputs: Value,
    /// How the answer is made.
    pub parameters: Option<GenerateParameters>,
    /// On `/` and `/invocations`: answer as an event stream. The other paths ignore it.
    #[schema(default = false)]
    pub stream: Option<bool>,
}

/// Fields that completions and chats have in common.
#[derive(Deserialize, ToSchema)]
pub struct Sampling {
    #[schema(schema_with = allowed)]
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Strings that must not be generated.
    pub bad_words: Option<Vec<String>>,
    /// -2 .. 2: makes tokens of the answer less probable by their number if above 0.
    #[schema(minimum = -2.0, maximum = 2.0, default = 0.0)]
    pub frequency_penalty: Option<f64>,
    /// One of these texts is the answer (older name of `structured_outputs.choice`).
    pub guided_choice: Option<Value>,
    /// Grammar of the answer (older name of `structured_outputs.grammar`).
    pub guided_grammar: Option<Value>,
    /// JSON schema of the answer (older name of `structured_outputs.json`).
    pub guided_json: Option<Value>,
    /// Regular expression of the answer (older name of `structured_outputs.regex`).
    pub guided_regex: Option<Value>,
    /// Do not end at the model's end tokens.
    #[schema(default = false)]
    pub ignore_eos: Option<bool>,
    /// Keep what ended the answer in its text; ignored unless `stop` or `stop_token_ids` is given.
    #[schema(default = false)]
    pub include_stop_str_in_output: Option<bool>,
    #[schema(schema_with = bias)]
    pub logit_bias: Option<Value>,
    /// Drop tokens below this fraction of the best token's probability.
    #[schema(minimum = 0.0, maximum = 1.0, default = 0.0)]
    pub min_p: Option<f64>,
    /// Nothing ends the answer before so many tokens.
    #[schema(minimum = 0, maximum = 2147483647, default = 0)]
    pub min_tokens: Option<u32>,
    /// Makes tokens of the answer less probable, once, if above 0.
    #[schema(minimum = -2.0, maximum = 2.0, default = 0.0)]
    pub presence_penalty: Option<f64>,
    /// Makes tokens of the prompt and the answer less probable if above 1.
    #[schema(exclusive_minimum = 0.0, maximum = 2.0, default = 1.0)]
    pub repetition_penalty: Option<f64>,
    /// Form of the answer.
    pub response_format: Option<ResponseFormat>,
    #[schema(schema_with = seed)]
    pub seed: Option<u64>,
    /// Leave special tokens out of the text.
    #[schema(default = true)]
    pub skip_special_tokens: Option<bool>,
    #[schema(schema_with = stop)]
    pub stop: Option<Value>,
    /// Tokens that end the answer; what can be no token is skipped.
    pub stop_token_ids: Option<Vec<Value>>,
    /// Form of the answer: one of `json`, `regex`, `choice`, `grammar` (Lark or GBNF), `json_object`.
    pub structured_outputs: Option<BTreeMap<String, Value>>,
    /// Divides the logits. 0: the most probable token always; everything else about drawing is ignored then.
    #[schema(minimum = 0.0, default = 1.0)]
    pub temperature: Option<f64>,
    #[schema(schema_with = top_k)]
    pub top_k: Option<i64>,
    /// Draw among the smallest set of tokens whose probabilities reach this sum.
    #[schema(exclusive_minimum = 0.000001, maximum = 1.0, default = 1.0)]
    pub top_p: Option<f64>,
    #[schema(schema_with = kept_tokens)]
    pub truncate_prompt_tokens: Option<i64>,
}

/// The body of `/v1/completions`.
#[derive(Deserialize, ToSchema)]
pub struct CompletionRequest {
    #[schema(schema_with = model, required = true)]
    pub model: String,
    #[schema(schema_with = prompt, required = true)]
    pub prompt: Value,
    /// Draws so many choices. More than 1 needs a temperature above 0; at least `n`; in a stream equal to `n`.
    #[schema(minimum = 1, maximum = 128)]
    pub best_of: Option<u32>,
    /// Put the prompt in front of each choice.
    #[schema(default = false)]
    pub echo: Option<bool>,
    /// Report the log-probabilities of the tokens and of so many alternatives.
    #[schema(minimum = 0, maximum = 5)]
    pub logprobs: Option<u32>,
    /// Most tokens to generate; the server's own limits cut it, without an error. 0 only with `echo`.
    #[schema(minimum = 0, maximum = 2147483647)]
    pub max_tokens: Option<u32>,
    /// Number of choices. More than 1 needs a temperature above 0, or beam search.
    #[schema(minimum = 1, maximum = 8192, default = 1)]
    pub n: Option<u32>,
    /// Report the log-probabilities of the prompt's tokens and of so many alternatives; not in a stream.
    #[schema(minimum = 0, maximum = 20)]
    pub prompt_logprobs: Option<u32>,
    /// Report token ids.
    #[schema(default = false)]
    pub return_token_ids: Option<bool>,
    /// Answer as an event stream.
    #[schema(default = false)]
    pub stream: Option<bool>,
    /// What the stream says about usage.
    pub stream_options: Option<StreamOptions>,
    /// Text after the answer; only models made for it can use one.
    pub suffix: Option<String>,
    /// Search for the most probable choices; not with `stop`.
    #[schema(default = false)]
    pub use_beam_search: Option<bool>,
    #[serde(flatten)]
    pub sampling: Sampling,
}

/// A message of a conversation.
#[derive(Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ChatMessage {
    Words(WordsMessage),
    Calls(CallsMessage),
}

/// What somebody said.
#[derive(Deserialize, ToSchema)]
pub struct WordsMessage {
    /// Who said it.
    #[schema(required = true)]
    pub role: ChatRole,
    #[schema(schema_with = words, required = true)]
    pub content: Value,
    /// Name of who said it.
    pub name: Option<String>,
    /// What an assistant thought before it spoke.
    pub reasoning_content: Option<String>,
    /// In a tool's message: the call that it answers.
    pub tool_call_id: Option<String>,
    #[schema(schema_with = no_calls)]
    pub tool_calls: Option<Value>,
}

/// What an assistant called, and perhaps said.
#[derive(Deserialize, ToSchema)]
pub struct CallsMessage {
    /// Who called.
    #[schema(required = true)]
    pub role: AssistantWord,
    #[schema(schema_with = words_or_none)]
    pub content: Option<Value>,
    /// Name of who called.
    pub name: Option<String>,
    /// What the assistant thought before.
    pub reasoning_content: Option<String>,
    /// Without effect here.
    pub tool_call_id: Option<String>,
    /// The functions it called.
    #[schema(required = true, min_items = 1)]
    pub tool_calls: Vec<EarlierCall>,
}

/// The word `assistant`.
#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AssistantWord {
    Assistant,
}

/// Who said a message.
#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ChatRole {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

/// A call that an assistant made earlier.
#[derive(Deserialize, ToSchema)]
pub struct EarlierCall {
    /// Its name.
    pub id: Option<String>,
    /// `function`.
    #[serde(rename = "type")]
    pub kind: Option<FunctionWord>,
    /// What it called.
    #[schema(required = true)]
    pub function: CalledFunction,
}

/// Name and arguments of a call.
#[derive(Deserialize, ToSchema)]
pub struct CalledFunction {
    /// The function.
    #[schema(required = true)]
    pub name: String,
    /// A JSON object, in a string or as it is.
    #[schema(schema_with = arguments)]
    pub arguments: Option<Value>,
}

/// A function that the model may call.
#[derive(Deserialize, ToSchema)]
pub struct Tool {
    /// `function`.
    #[serde(rename = "type")]
    #[schema(required = true)]
    pub kind: FunctionWord,
    /// The function.
    #[schema(required = true)]
    pub function: ToolFunction,
}

/// Description of a function.
#[derive(Deserialize, ToSchema)]
pub struct ToolFunction {
    /// Its name, different from every other.
    #[schema(required = true, min_length = 1, max_length = 64, pattern = "^[A-Za-z0-9_.-]+$")]
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments.
    pub parameters: Option<BTreeMap<String, Value>>,
    /// Arguments follow the schema exactly; calls that are forced always do.
    pub strict: Option<bool>,
}
