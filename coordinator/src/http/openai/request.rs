//! The body of `/v1/completions`, field by field.

use super::prompt::{self, Prompt, PromptLimits};
use super::shared::{self, MAX_I31, Shared, SharedRules};
use super::unbuilt;
use crate::http::error::{ApiError, ErrorKind};
use crate::http::json::fields::{FieldError, Fields};
use crate::http::json::raw::Kind;
use crate::http::json::scan;
use crate::http::mindie;
use crate::http::state::HttpState;

/// Fields that only completions have.
const OWN: &[&str] = &[
    "logprobs",
    "max_tokens",
    "model",
    "prompt",
    "return_token_ids",
    "stream",
    "stream_options",
    // Those of `unbuilt`.
    "best_of",
    "echo",
    "n",
    "prompt_logprobs",
    "suffix",
    "use_beam_search",
];
/// What the body of a completion may have.
pub const FIELDS: &[&str] = &shared::with_shared::<{ OWN.len() + shared::NAMES.len() }>(OWN);

/// What the checks need to know of configuration and model.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Bounds of the prompt.
    pub prompt: PromptLimits,
    /// For the fields that chat has too.
    pub shared: SharedRules,
    /// Refuse what MindIE refuses.
    pub strict: bool,
}

impl Rules {
    /// The rules of a server; `fresh_seed` is drawn for this request.
    pub fn new(state: &HttpState, fresh_seed: u64) -> Self {
        Self {
            prompt: PromptLimits {
                chars: state.limits.max_input_chars,
                tokens: state.lengths.input,
                vocab_size: state.model.text.vocab_size,
            },
            shared: SharedRules::new(state, fresh_seed),
            strict: state.front.strict_mindie,
        }
    }
}

/// Which chunks of a stream carry `usage`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamUsage {
    /// The one that ends the choice: nothing was said about it.
    LastChunk,
    /// None, and each says so with null.
    Never,
    /// One more chunk without choices after the others, which say null.
    ExtraChunk,
    /// Every chunk has the counts so far, and the extra chunk.
    EveryChunk,
}

/// A checked request.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// Name the client uses for the model.
    pub model: String,
    /// The prompt.
    pub prompt: Prompt,
    /// Most tokens to generate, if the client says.
    pub max_tokens: Option<u32>,
    /// How tokens are drawn, and what ends the answer.
    pub shared: Shared,
    /// As a stream, with this usage.
    pub stream: Option<StreamUsage>,
    /// Alternatives to report for every token, if log-probabilities are asked for.
    pub logprobs: Option<u8>,
    /// Report token ids.
    pub return_token_ids: bool,
}

/// Checks a body, except for the model's name.
///
/// # Errors
/// What is wrong, with the field, its value and what would be right.
pub fn parse(body: &[u8], rules: &Rules) -> Result<CompletionRequest, ApiError> {
    let raw = scan::check(body)?;
    if raw.kind() != Kind::Object {
        let message = format!("the body is {}, but must be a JSON object", raw.shown());
        return Err(ApiError::new(ErrorKind::Invalid, message));
    }
    let fields = Fields::of_object(raw, "", FIELDS)?;
    let model = model(&fields)?;
    let prompt = prompt::read(&fields, rules.prompt)?;
    if rules.strict {
        mindie::refuse_openai(&fields, &["logprobs", "n", "best_of", "use_beam_search"])?;
    }
    let mut shared = shared::read(&fields, &rules.shared)?;
    let logprobs = fields.int("logprobs", 0, 5)?.and_then(|count| u8::try_from(count).ok());
    shared.sampling.top_logprobs = logprobs;
    unbuilt::refuse(&fields, shared.sampling.greedy, !shared.stop.is_empty())?;
    Ok(CompletionRequest {
        model,
        prompt,
        max_tokens: positive(&fields, "max_tokens")?,
        shared,
        stream: stream(&fields)?,
        logprobs,
        return_token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
    })
}

pub(super) fn positive(fields: &Fields<'_>, name: &str) -> Result<Option<u32>, FieldError> {
    Ok(fields
        .int(name, 1, MAX_I31)?
        .and_then(|value| u32::try_from(value).ok()))
}

pub(super) fn model(fields: &Fields<'_>) -> Result<String, FieldError> {
    let expected = "the name of the served model";
    match fields.string("model", expected)? {
        None => Err(fields.missing("model", expected)),
        Some(name) if name.is_empty() => Err(FieldError::rule("model", format!("is \"\", but must be {expected}"))),
        Some(name) => Ok(name.into_owned()),
    }
}

pub(super) fn stream(fields: &Fields<'_>) -> Result<Option<StreamUsage>, FieldError> {
    let stream = fields.bool("stream")?.unwrap_or(false);
    let known: &[&str] = &["continuous_usage_stats", "include_usage"];
    let options = fields.object("stream_options", "stream_options.", known)?;
    let Some(options) = options else {
        return Ok(stream.then_some(StreamUsage::LastChunk));
    };
    if !stream {
        return Err(FieldError::rule(
            "stream_options",
            "is given, but must be absent where `stream` is false",
        ));
    }
    let include = options.bool("include_usage")?.unwrap_or(false);
    let continuous = options.bool("continuous_usage_stats")?.unwrap_or(false);
    Ok(Some(match (include, continuous) {
        (false, _) => StreamUsage::Never,
        (true, false) => StreamUsage::ExtraChunk,
        (true, true) => StreamUsage::EveryChunk,
    }))
}
