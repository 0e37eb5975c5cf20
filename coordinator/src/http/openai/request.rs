//! The body of `/v1/completions`, field by field.

use std::collections::BTreeSet;

use protocol::sampling::SamplingParams;

use super::prompt::{self, Prompt, PromptLimits};
use super::unbuilt;
use crate::http::error::{ApiError, ErrorKind};
use crate::http::json::fields::{FieldError, Fields, Range, StopLimits};
use crate::http::json::raw::{Kind, Raw};
use crate::http::json::scan;
use crate::http::sampling;
use crate::http::state::HttpState;

/// Most of the API's 31-bit integers.
const MAX_I31: i64 = 2_147_483_647;
/// Most different tokens in `stop_token_ids`: nodes look at each of them at every step.
const MAX_STOP_TOKENS: usize = 4_096;

const FIELDS: &[&str] = &[
    // Built.
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logprobs",
    "max_tokens",
    "min_p",
    "model",
    "presence_penalty",
    "prompt",
    "repetition_penalty",
    "return_token_ids",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
    // Those of `unbuilt`.
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "echo",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "logit_bias",
    "min_tokens",
    "n",
    "prompt_logprobs",
    "response_format",
    "structured_outputs",
    "suffix",
    "truncate_prompt_tokens",
    "use_beam_search",
];

/// What the checks need to know of configuration and model.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Bounds of the prompt.
    pub prompt: PromptLimits,
    /// Bounds of stop strings.
    pub stops: StopLimits,
    /// 1, or 0 where seed 0 is allowed.
    pub least_seed: u64,
    /// The seed of a request that brings none.
    pub fresh_seed: u64,
    /// Temperature of a request that brings none.
    pub default_temperature: f32,
    /// `top_k` of a request that brings none.
    pub default_top_k: u32,
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
            stops: state.openai_stop_limits(),
            least_seed: state.least_seed(),
            fresh_seed,
            default_temperature: state.model.text.generation_defaults.temperature.unwrap_or(1.0),
            default_top_k: state.default_top_k(),
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
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Tokens that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// Keep what ended the answer in its text.
    pub include_stop_str: bool,
    /// Do not end at the model's end tokens.
    pub ignore_eos: bool,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
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
    let stop = fields.stop_strings("stop", rules.stops)?;
    let stop_token_ids = stop_token_ids(&fields, rules.prompt.vocab_size)?;
    let keeps = fields.bool("include_stop_str_in_output")?.unwrap_or(false);
    let logprobs = fields.int("logprobs", 0, 5)?.and_then(|count| u8::try_from(count).ok());
    let sampling = sampling_of(&fields, rules, logprobs)?;
    unbuilt::refuse(&fields, sampling.greedy, !stop.is_empty())?;
    Ok(CompletionRequest {
        model,
        prompt,
        max_tokens: positive(&fields, "max_tokens")?,
        sampling,
        include_stop_str: keeps && !(stop.is_empty() && stop_token_ids.is_empty()),
        stop,
        stop_token_ids,
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        skip_special_tokens: fields.bool("skip_special_tokens")?.unwrap_or(true),
        stream: stream(&fields)?,
        logprobs,
        return_token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
    })
}

fn positive(fields: &Fields<'_>, name: &str) -> Result<Option<u32>, FieldError> {
    Ok(fields
        .int(name, 1, MAX_I31)?
        .and_then(|value| u32::try_from(value).ok()))
}

fn model(fields: &Fields<'_>) -> Result<String, FieldError> {
    let expected = "the name of the served model";
    match fields.string("model", expected)? {
        None => Err(fields.missing("model", expected)),
        Some(name) if name.is_empty() => Err(FieldError::rule("model", format!("is \"\", but must be {expected}"))),
        Some(name) => Ok(name.into_owned()),
    }
}

/// Elements that are no token of this model can never match, whatever they are: they are skipped, as the API says.
fn stop_token_ids(fields: &Fields<'_>, vocab_size: usize) -> Result<Vec<u32>, FieldError> {
    let Some(list) = fields.list("stop_token_ids", "a list of token ids")? else {
        return Ok(Vec::new());
    };
    let mut ids = BTreeSet::new();
    let tokens = list.elements().filter(|element| element.kind() == Kind::Number);
    for id in tokens.filter_map(|element| element.text().parse::<u32>().ok()) {
        if (id as usize) < vocab_size && ids.insert(id) && ids.len() > MAX_STOP_TOKENS {
            let problem = format!("must have at most {MAX_STOP_TOKENS} different tokens");
            return Err(FieldError::rule("stop_token_ids", problem));
        }
    }
    Ok(ids.into_iter().collect())
}

fn stream(fields: &Fields<'_>) -> Result<Option<StreamUsage>, FieldError> {
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

fn sampling_of(fields: &Fields<'_>, rules: &Rules, logprobs: Option<u8>) -> Result<SamplingParams, FieldError> {
    let temperature = fields.float("temperature", Range::from(0.0))?;
    let top_p = fields.float("top_p", Range::above_to(1e-6, 1.0))?;
    let top_k = top_k(fields)?;
    let min_p = fields.float("min_p", Range::from_to(0.0, 1.0))?;
    let repetition = fields.float("repetition_penalty", Range::above_to(0.0, 2.0))?;
    let presence = fields.float("presence_penalty", Range::from_to(-2.0, 2.0))?;
    let frequency = fields.float("frequency_penalty", Range::from_to(-2.0, 2.0))?;
    let seed = fields.u64_from("seed", rules.least_seed)?.unwrap_or(rules.fresh_seed);

    let temperature = temperature.unwrap_or_else(|| f64::from(rules.default_temperature));
    let mut sampling = sampling::greedy(seed);
    sampling.top_logprobs = logprobs;
    // At temperature 0 every other parameter is ignored, penalties included.
    if temperature > 0.0 {
        sampling.greedy = false;
        sampling.temperature = sampling::factor(temperature);
        sampling.top_p = top_p.map_or(1.0, sampling::mass);
        sampling.top_k = sampling::top_k(top_k.unwrap_or(rules.default_top_k), rules.prompt.vocab_size);
        sampling.min_p = min_p.unwrap_or(0.0) as f32;
        sampling.repetition_penalty = repetition.map_or(1.0, sampling::factor);
        sampling.presence_penalty = presence.unwrap_or(0.0) as f32;
        sampling.frequency_penalty = frequency.unwrap_or(0.0) as f32;
    }
    Ok(sampling)
}

/// `top_k`: -1 is off.
fn top_k(fields: &Fields<'_>) -> Result<Option<u32>, FieldError> {
    let expected = "an integer from 1 to 2147483647, or -1 for no limit";
    let value = fields.int("top_k", -1, MAX_I31);
    let wrong = || FieldError::wrong("top_k", fields.get("top_k").unwrap_or(Raw::NULL), expected);
    match value.map_err(|_| wrong())? {
        None => Ok(None),
        Some(-1) => Ok(Some(0)),
        Some(0) => Err(wrong()),
        Some(count) => Ok(u32::try_from(count).ok()),
    }
}
