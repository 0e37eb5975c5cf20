//! The shapes of answers that are put together from several types, and those of errors.
#![allow(
    missing_docs,
    reason = "the fields' documentation is the text of the API document; every field has it"
)]

use serde::Serialize;
use utoipa::ToSchema;

use crate::http::openai::answer::{Choice, Usage};
use crate::http::openai::chat::answer::ChatChoice;

/// An error on `/`, `/generate`, `/generate_stream`, `/invocations`, `/info`, `/health`, `/ping`.
#[derive(Serialize, ToSchema)]
pub struct TgiError {
    /// What is wrong.
    pub error: String,
    /// `validation`, `generation`, `overloaded`, `incomplete_generation`, `unavailable` or `healthcheck`.
    pub error_type: String,
}

/// An error on `/v1/*` and the tokenizer's paths; a missing API key is told so everywhere.
#[derive(Serialize, ToSchema)]
pub struct OpenAiError {
    pub error: OpenAiErrorBody,
}

/// What is wrong.
#[derive(Serialize, ToSchema)]
pub struct OpenAiErrorBody {
    /// In words.
    pub message: String,
    /// `BadRequestError`, `NotFoundError`, `rate_limit_exceeded`, `ServiceUnavailableError`, ...
    #[serde(rename = "type")]
    pub kind: String,
    /// The field at fault.
    #[schema(required = true)]
    pub param: Option<String>,
    /// The status.
    pub code: u16,
}

/// A whole answer of `/v1/completions`.
#[derive(Serialize, ToSchema)]
pub struct CompletionAnswer {
    /// Name of the request.
    pub id: String,
    /// `text_completion`.
    pub object: String,
    /// Seconds since 1970-01-01 UTC.
    pub created: u64,
    /// The model's name, as the client wrote it.
    pub model: String,
    pub choices: Vec<Choice>,
    pub usage: Usage,
}

/// A whole answer of `/v1/chat/completions`.
#[derive(Serialize, ToSchema)]
pub struct ChatAnswer {
    /// Name of the request.
    pub id: String,
    /// `chat.completion`.
    pub object: String,
    /// Seconds since 1970-01-01 UTC.
    pub created: u64,
    /// The model's name, as the client wrote it.
    pub model: String,
    pub choices: Vec<ChatChoice>,
    pub usage: Usage,
    /// Ids of the prompt's tokens, if asked for.
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// One event of a stream. `/generate_stream` sends one for every token and the whole text in the last; the `/v1` paths send
/// chunks and at last `data: [DONE]`. A line `:` is sent in long silences. A failure is one event with an error body, and the
/// end.
#[derive(Serialize, ToSchema)]
pub struct EventStream {
    /// What follows `data: ` on the event's line: a JSON object, or `[DONE]`.
    pub data: String,
}
