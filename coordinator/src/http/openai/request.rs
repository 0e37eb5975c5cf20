//! The body of `/v1/completions`, field by field.

use super::choices::{self, Beside, ChoiceRules, Choices};
use super::prompt::{self, Prompt, PromptLimits};
use super::shared::{self, MAX_I31, Shared, SharedRules};
use crate::http::error::{ApiError, ErrorKind};
use crate::http::json::fields::{FieldError, Fields};
use crate::http::json::raw::Kind;
use crate::http::json::scan;
use crate::http::mindie;
use crate::http::state::HttpState;

/// Fields that only completions have.
const OWN: &[&str] = &[
    "best_of",
    "echo",
    "logprobs",
    "max_tokens",
    "model",
    "n",
    "prompt",
    "prompt_logprobs",
    "return_token_ids",
    "stream",
    "stream_options",
    "suffix",
    "use_beam_search",
];
/// Most alternatives in `prompt_logprobs`.
const MAX_PROMPT_LOGPROBS: i64 = 20;
/// What the body of a completion may have.
pub const FIELDS: &[&str] = &shared::with_shared::<{ OWN.len() + shared::NAMES.len() }>(OWN);

/// What the checks need to know of configuration and model.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Bounds of the prompt.
    pub prompt: PromptLimits,
    /// Bounds of the number of choices.
    pub choices: ChoiceRules,
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
                prompts: state.limits.max_prompts,
                chars: state.limits.max_input_chars,
                tokens: state.lengths.input,
                vocab_size: state.model.text.vocab_size,
            },
            choices: ChoiceRules::new(state),
            shared: SharedRules::new(state, fresh_seed),
            strict: state.front.strict_mindie,
        }
    }
}

/// Which chunks of a stream carry `usage`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamUsage {
    /// The one that ends the last open choice: nothing was said about it.
    LastChunk,
    /// None, and each says so with null.
    Never,
    /// One more chunk without choices after the others, which say null.
    ExtraChunk,
    /// Every chunk has the counts of its choice so far, and the extra chunk.
    EveryChunk,
}

/// A checked request.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// Name the client uses for the model.
    pub model: String,
    /// The prompts; at least one.
    pub prompts: Vec<Prompt>,
    /// How many answers to each.
    pub choices: Choices,
    /// Put the prompt in front of every answer.
    pub echo: bool,
    /// Most tokens to generate, if the client says; 0 only with `echo`.
    pub max_tokens: Option<u32>,
    /// How tokens are drawn, and what ends the answer.
    pub shared: Shared,
    /// As a stream, with this usage.
    pub stream: Option<StreamUsage>,
    /// Alternatives to report for every token, if log-probabilities are asked for.
    pub logprobs: Option<u8>,
    /// Alternatives to report for every token of the prompt in a list of their own, if that is asked for.
    pub prompt_logprobs: Option<u8>,
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
    let prompts = prompt::read(&fields, rules.prompt)?;
    if rules.strict {
        mindie::refuse_openai(&fields, &["logprobs", "n", "best_of", "use_beam_search"])?;
    }
    let echo = fields.bool("echo")?.unwrap_or(false);
    let max_tokens = max_tokens(&fields, echo)?;
    let mut shared = shared::read(&fields, &rules.shared, max_tokens)?;
    let logprobs = fields.int("logprobs", 0, 5)?.and_then(|count| u8::try_from(count).ok());
    shared.sampling.top_logprobs = logprobs;
    let stream = stream(&fields)?;
    let beside = Beside {
        greedy: shared.sampling.greedy,
        has_stop: !shared.stop.is_empty(),
        stream: stream.is_some(),
    };
    refuse_suffix(&fields, echo)?;
    let choices = choices::read(&fields, rules.choices, beside)?;
    if choices.beam {
        refuse_beside_beams(&shared)?;
    }
    Ok(CompletionRequest {
        model,
        prompts,
        choices,
        echo,
        max_tokens,
        shared,
        logprobs,
        prompt_logprobs: prompt_logprobs(&fields, stream.is_some())?,
        stream,
        return_token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
    })
}

/// A beam search ranks hypotheses by the model's own probabilities: what depends on the tokens before has no place in it.
fn refuse_beside_beams(shared: &Shared) -> Result<(), FieldError> {
    let sampling = &shared.sampling;
    let constraint = shared.constraint.as_ref().map(|constraint| constraint.field.as_str());
    let given = [
        ("repetition_penalty", sampling.repetition_penalty != 1.0),
        ("presence_penalty", sampling.presence_penalty != 0.0),
        ("frequency_penalty", sampling.frequency_penalty != 0.0),
        ("bad_words", !shared.bad_words.is_empty()),
        (constraint.unwrap_or_default(), constraint.is_some()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((field, _)) => {
            let problem = "is given, but must be absent where `use_beam_search` is true";
            Err(FieldError::rule(field.to_owned(), problem))
        }
        None => Ok(()),
    }
}

pub(super) fn positive(fields: &Fields<'_>, name: &str) -> Result<Option<u32>, FieldError> {
    Ok(fields
        .int(name, 1, MAX_I31)?
        .and_then(|value| u32::try_from(value).ok()))
}

/// At least one token, unless the prompt is what is wanted.
fn max_tokens(fields: &Fields<'_>, echo: bool) -> Result<Option<u32>, FieldError> {
    let least = i64::from(!echo);
    Ok(fields
        .int("max_tokens", least, MAX_I31)?
        .and_then(|value| u32::try_from(value).ok()))
}

fn prompt_logprobs(fields: &Fields<'_>, stream: bool) -> Result<Option<u8>, FieldError> {
    let count = fields.int("prompt_logprobs", 0, MAX_PROMPT_LOGPROBS)?;
    if count.is_some() && stream {
        let problem = "is given, but must be absent in a stream";
        return Err(FieldError::rule("prompt_logprobs", problem));
    }
    Ok(count.and_then(|count| u8::try_from(count).ok()))
}

fn refuse_suffix(fields: &Fields<'_>, echo: bool) -> Result<(), FieldError> {
    let suffix = fields.string("suffix", "a string")?;
    if suffix.is_none_or(|suffix| suffix.is_empty()) {
        return Ok(());
    }
    let problem = if echo {
        "is given, but must be absent where `echo` is true"
    } else {
        "is given, but must be absent or empty: this server does not fill in the middle of a text"
    };
    Err(FieldError::rule("suffix", problem))
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
