//! The body of `/generate` and its relatives, field by field.

use std::borrow::Cow;

use config::LogprobsConfig;
use protocol::sampling::{Grammar, SamplingParams};

use crate::http::error::{ApiError, ErrorKind};
use crate::http::json::fields::{FieldError, Fields, Range, StopLimits, quoted};
use crate::http::json::raw::{Kind, Raw};
use crate::http::json::scan;
use crate::http::sampling;
use crate::http::state::HttpState;
use crate::http::{media, mindie};
use crate::media::policy::Policy;

/// Most characters of an `adapter_id`.
const MAX_ADAPTER_ID: usize = 256;
/// Tokens generated if the client does not say.
const DEFAULT_MAX_NEW_TOKENS: u32 = 20;
/// Most of the API's 31-bit integers.
const MAX_I31: i64 = 2_147_483_647;

/// What a body may have.
pub const BODY_FIELDS: &[&str] = &["inputs", "parameters", "stream"];
/// What its `parameters` may have.
pub const PARAMETER_FIELDS: &[&str] = &[
    "adapter_id",
    "best_of",
    "decoder_input_details",
    "details",
    "do_sample",
    "grammar",
    "max_new_tokens",
    "repetition_penalty",
    "return_full_text",
    "seed",
    "stop",
    "stop_sequences",
    "temperature",
    "top_k",
    "top_p",
    "truncate",
    "typical_p",
    "watermark",
];

const ITEM_FIELDS: &[&str] = &["audio_url", "image_url", "text", "type", "video_url"];

/// What is right for `inputs`.
const INPUTS: &str = "a non-empty string, or a non-empty list of {\"type\": \"text\", \"text\": ...}";

/// What the checks need to know of configuration and model.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Longest prompt, in characters.
    pub max_input_chars: usize,
    /// Bounds of stop strings.
    pub stops: StopLimits,
    /// 1, or 0 where seed 0 is allowed.
    pub least_seed: u64,
    /// The seed of a request that brings none.
    pub fresh_seed: u64,
    /// Most sequences to choose from.
    pub max_best_of: usize,
    /// `top_k` of a sampled request that brings none.
    pub default_top_k: u32,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Refuse and ignore what MindIE refuses and ignores.
    pub strict: bool,
    /// Longest grammar, in bytes.
    pub max_grammar_bytes: usize,
    /// Report log-probabilities of what tokens are drawn from, not the model's.
    pub processed_logprobs: bool,
}

impl Rules {
    /// The rules of a server; `fresh_seed` is drawn for this request.
    pub fn new(state: &HttpState, fresh_seed: u64) -> Self {
        Self {
            max_input_chars: state.limits.max_input_chars,
            stops: state.tgi_stop_limits(),
            least_seed: state.least_seed(),
            fresh_seed,
            max_best_of: state.limits.max_best_of,
            default_top_k: state.default_top_k(),
            vocab_size: state.model.text.vocab_size,
            strict: state.front.strict_mindie,
            max_grammar_bytes: state.limits.max_grammar_bytes,
            processed_logprobs: state.front.generate_logprobs == LogprobsConfig::Processed,
        }
    }
}

/// A checked request.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// The prompt.
    pub inputs: String,
    /// `stream` of the body, for the paths that have it.
    pub stream: bool,
    /// Tell about the tokens.
    pub details: bool,
    /// Tell about the prompt's tokens too.
    pub prompt_details: bool,
    /// Put the prompt in front of the answer.
    pub return_full_text: bool,
    /// Most tokens to generate.
    pub max_new_tokens: u32,
    /// Sequences to choose the answer from.
    pub best_of: u32,
    /// Name of the adapter; legal, but perhaps of none that is served.
    pub adapter: Option<String>,
    /// Keep only so many tokens at the end of the prompt.
    pub truncate: Option<usize>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Strings that end the answer.
    pub stop: Vec<String>,
}

/// Checks a body.
///
/// # Errors
/// What is wrong, with the field, its value and what would be right.
pub fn parse(body: &[u8], rules: &Rules, media: &Policy) -> Result<GenerateRequest, ApiError> {
    let raw = scan::check(body)?;
    if raw.kind() != Kind::Object {
        let message = format!("the body is {}, but must be a JSON object", raw.shown());
        return Err(ApiError::new(ErrorKind::Invalid, message));
    }
    let fields = Fields::of_object(raw, "", BODY_FIELDS)?;
    let inputs = inputs(&fields, rules.max_input_chars, media)?;
    let stream = fields.bool("stream")?.unwrap_or(false);
    let parameters = match fields.object("parameters", "parameters.", PARAMETER_FIELDS)? {
        Some(parameters) => parameters,
        None => Fields::of_object(Raw::EMPTY_OBJECT, "parameters.", PARAMETER_FIELDS)?,
    };
    if rules.strict {
        mindie::refuse_generate(&parameters)?;
    }
    let prompt_details = parameters.bool("decoder_input_details")?.unwrap_or(false);
    let sampling = sampling_of(&parameters, rules)?;
    Ok(GenerateRequest {
        inputs,
        stream,
        details: parameters.bool("details")?.unwrap_or(false) || prompt_details,
        prompt_details,
        return_full_text: parameters.bool("return_full_text")?.unwrap_or(false),
        max_new_tokens: positive(&parameters, "max_new_tokens")?.unwrap_or(DEFAULT_MAX_NEW_TOKENS),
        adapter: adapter(&parameters)?,
        truncate: positive(&parameters, "truncate")?.map(|tokens| tokens as usize),
        best_of: best_of(&parameters, rules.max_best_of, sampling.greedy)?,
        sampling,
        stop: stop(&parameters, rules.stops)?,
    })
}

fn positive(fields: &Fields<'_>, name: &str) -> Result<Option<u32>, FieldError> {
    Ok(fields
        .int(name, 1, MAX_I31)?
        .and_then(|value| u32::try_from(value).ok()))
}

fn inputs(fields: &Fields<'_>, max_chars: usize, policy: &Policy) -> Result<String, FieldError> {
    let raw = fields.get("inputs").ok_or_else(|| fields.missing("inputs", INPUTS))?;
    let inputs = match raw.kind() {
        Kind::String => raw.string().map(Cow::into_owned).unwrap_or_default(),
        Kind::List => concatenated(raw, policy)?,
        Kind::Null | Kind::Bool | Kind::Number | Kind::Object => return Err(FieldError::wrong("inputs", raw, INPUTS)),
    };
    if inputs.is_empty() {
        return Err(FieldError::wrong("inputs", raw, INPUTS));
    }
    let chars = inputs.chars().count();
    if chars > max_chars {
        let problem = format!("has {chars} characters, but must have at most {max_chars}");
        return Err(FieldError::rule("inputs", problem));
    }
    Ok(inputs)
}

/// The texts of a list of items, without anything between them. An item that names a medium is refused without touching
/// what it names.
fn concatenated(list: Raw<'_>, policy: &Policy) -> Result<String, FieldError> {
    let mut text = String::new();
    for (index, item) in list.elements().enumerate() {
        let path = |name: &str| format!("inputs[{index}]{name}");
        if item.kind() != Kind::Object {
            return Err(FieldError::wrong(
                path(""),
                item,
                "an object with \"type\": \"text\" and a non-empty \"text\"",
            ));
        }
        let within = |error: FieldError| FieldError::rule(path(&format!(".{}", error.field)), error.problem);
        let fields = Fields::of_object(item, "", ITEM_FIELDS).map_err(within)?;
        let kind = fields.get("type").and_then(Raw::string);
        match kind.as_deref() {
            Some("text") => {}
            Some(kind) => {
                if let Some(refusal) = media::refusal(policy, &fields, kind) {
                    return Err(within(refusal));
                }
                let problem = format!("is {}, but must be \"text\"", quoted(kind));
                return Err(FieldError::rule(path(".type"), problem));
            }
            None => {
                return Err(FieldError::rule(
                    path(".type"),
                    "is missing or not a string: it must be \"text\"",
                ));
            }
        }
        match fields.get("text").and_then(Raw::string) {
            Some(part) if !part.is_empty() => text.push_str(&part),
            _ => {
                return Err(FieldError::rule(
                    path(".text"),
                    "is missing or empty: it must be a non-empty string",
                ));
            }
        }
    }
    Ok(text)
}

/// `adapter_id`; the word None means none.
fn adapter(fields: &Fields<'_>) -> Result<Option<String>, FieldError> {
    let expected = "a string of 1 to 256 letters, digits or any of . - _ /";
    let Some(adapter) = fields.string("adapter_id", expected)? else {
        return Ok(None);
    };
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '/');
    if adapter.is_empty() || adapter.len() > MAX_ADAPTER_ID || !adapter.chars().all(legal) {
        let problem = format!("is {}, but must be {expected}", quoted(&adapter));
        return Err(FieldError::rule(fields.path("adapter_id"), problem));
    }
    Ok((adapter != "None").then(|| adapter.into_owned()))
}

/// The message for a request that names an adapter which is not served.
pub fn refuse_unknown_adapter(request: &GenerateRequest, served: &[String]) -> Result<(), ApiError> {
    let Some(name) = request.adapter.as_ref().filter(|name| !served.contains(name)) else {
        return Ok(());
    };
    let name = quoted(name);
    let problem = format!("is {name}, but must be the name of a served adapter; GET /v1/models lists them");
    Err(FieldError::rule("parameters.adapter_id", problem).into())
}

/// `stop`, followed by its alias `stop_sequences`.
fn stop(fields: &Fields<'_>, limits: StopLimits) -> Result<Vec<String>, FieldError> {
    let mut stops = fields.stop_strings("stop", limits)?;
    let more = fields.stop_strings("stop_sequences", limits)?;
    stops.extend(more);
    // Each list has been checked alone; the limits are the request's.
    let chars: usize = stops.iter().map(|stop| stop.chars().count()).sum();
    if stops.len() > limits.strings || chars > limits.total_chars {
        let problem = format!(
            "and stop have {} strings of {chars} characters together, but must have at most {} strings of {} characters",
            stops.len(),
            limits.strings,
            limits.total_chars
        );
        return Err(FieldError::rule(fields.path("stop_sequences"), problem));
    }
    Ok(stops)
}

/// `grammar`, as later versions of TGI have it: `{"type": "json" or "regex", "value": ...}`. TGI 0.9.4 does not know the
/// field, so anything else is ignored as there. Whether a grammar can be used is for its compiler to say.
fn grammar(fields: &Fields<'_>, max_bytes: usize) -> Result<Option<Grammar>, FieldError> {
    let Some(raw) = fields.get("grammar").filter(|raw| raw.kind() == Kind::Object) else {
        return Ok(None);
    };
    let object = Fields::of_object(raw, "parameters.grammar.", &["type", "value"])?;
    let value = |expected: &str| object.get("value").ok_or_else(|| object.missing("value", expected));
    let wrong = |value, expected: &str| Err(FieldError::wrong(object.path("value"), value, expected));
    let grammar = match object.get("type").and_then(Raw::string).as_deref() {
        Some("json" | "json_object") => {
            let expected = "a JSON schema";
            let schema = value(expected)?;
            match schema.kind() {
                Kind::Object | Kind::Bool => Grammar::JsonSchema(schema.text().to_owned()),
                Kind::String => Grammar::JsonSchema(schema.string().unwrap_or_default().into_owned()),
                Kind::Null | Kind::Number | Kind::List => return wrong(schema, expected),
            }
        }
        Some("regex") => {
            let expected = "a non-empty regular expression";
            let pattern = value(expected)?;
            match pattern.string() {
                Some(text) if !text.is_empty() => Grammar::Regex(text.into_owned()),
                _ => return wrong(pattern, expected),
            }
        }
        Some(_) | None => return Ok(None),
    };
    if grammar.len() > max_bytes {
        let problem = format!("has {} bytes, but must have at most {max_bytes}", grammar.len());
        return Err(FieldError::rule(object.path("value"), problem));
    }
    Ok(Some(grammar))
}

fn sampling_of(fields: &Fields<'_>, rules: &Rules) -> Result<SamplingParams, FieldError> {
    let do_sample = fields.bool("do_sample")?;
    let temperature = fields.float("temperature", Range::above(1e-6))?;
    let top_k = positive(fields, "top_k")?;
    let top_p = fields.float("top_p", Range::between(1e-6, 1.0))?;
    let typical_p = fields
        .float("typical_p", Range::above_to(0.0, 1.0))?
        .filter(|_| !rules.strict);
    let penalty = fields.float("repetition_penalty", Range::above(0.0))?;
    let seed = fields.u64_from("seed", rules.least_seed)?.unwrap_or(rules.fresh_seed);

    let mut sampling = sampling::greedy(seed);
    sampling.processed_logprobs = rules.processed_logprobs;
    sampling.repetition_penalty = penalty.map_or(1.0, sampling::factor);
    sampling.watermark = fields.bool("watermark")?.unwrap_or(false) && !rules.strict;
    sampling.grammar = grammar(fields, rules.max_grammar_bytes)?;
    // Only what the client itself sets asks for sampling; the model's own defaults do not.
    let asked = temperature.is_some_and(|temperature| temperature != 1.0)
        || top_k.is_some()
        || top_p.is_some()
        || typical_p.is_some_and(|typical_p| typical_p < 1.0);
    if do_sample.unwrap_or(asked) {
        sampling.greedy = false;
        sampling.temperature = temperature.map_or(1.0, sampling::factor);
        sampling.top_k = sampling::top_k(top_k.unwrap_or(rules.default_top_k), rules.vocab_size);
        sampling.top_p = top_p.map_or(1.0, sampling::mass);
        sampling.typical_p = typical_p.map_or(1.0, sampling::mass);
    }
    Ok(sampling)
}

/// Each sequence has a seed of its own that is drawn: more than one needs sampling, and forbids a seed.
fn best_of(fields: &Fields<'_>, most: usize, greedy: bool) -> Result<u32, FieldError> {
    let most = i64::try_from(most).unwrap_or(i64::MAX);
    let best_of = fields.int("best_of", 1, most)?;
    let best_of = best_of.and_then(|count| u32::try_from(count).ok()).unwrap_or(1);
    let refuse = |why: &str| {
        let problem = format!("is {best_of}, but must be 1 {why}");
        Err(FieldError::rule(fields.path("best_of"), problem))
    };
    match best_of {
        1 => Ok(1),
        _ if greedy => refuse("where tokens are not sampled (`do_sample`)"),
        _ if fields.get("seed").is_some() => refuse("where `seed` is given"),
        _ => Ok(best_of),
    }
}

/// What only a whole answer can have: the details of the prompt's tokens, and a choice among several sequences.
///
/// # Errors
/// The request wants it.
pub fn refuse_in_stream(request: &GenerateRequest) -> Result<(), ApiError> {
    if request.prompt_details {
        let problem = "is true, but must be false or absent in a stream";
        return Err(FieldError::rule("parameters.decoder_input_details", problem).into());
    }
    if request.best_of > 1 {
        let problem = format!("is {}, but must be 1 in a stream", request.best_of);
        return Err(FieldError::rule("parameters.best_of", problem).into());
    }
    Ok(())
}
