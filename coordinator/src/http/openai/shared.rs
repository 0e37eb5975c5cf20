//! The fields that completions and chat have in common: how tokens are drawn, and what ends an answer.
//!
//! [`read`] checks them; the body's list of known fields is made by [`with_shared`].

use std::collections::BTreeSet;

use protocol::sampling::SamplingParams;

use super::unbuilt;
use crate::http::error::ApiError;
use crate::http::json::fields::{FieldError, Fields, Range, StopLimits};
use crate::http::json::raw::{Kind, Raw};
use crate::http::sampling;
use crate::http::state::HttpState;

/// Most of the API's 31-bit integers.
pub const MAX_I31: i64 = 2_147_483_647;
/// Most different tokens in `stop_token_ids`: nodes look at each of them at every step.
const MAX_STOP_TOKENS: usize = 4_096;

/// Names of the fields: part of the list of known names of each body (see [`with_shared`]).
pub const NAMES: &[&str] = &[
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
    // Those that `unbuilt` refuses.
    "allowed_token_ids",
    "bad_words",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "logit_bias",
    "min_tokens",
    "response_format",
    "structured_outputs",
    "truncate_prompt_tokens",
];

/// The names of a body: its own, followed by [`NAMES`]. `N` is the length of both together.
pub const fn with_shared<const N: usize>(own: &[&'static str]) -> [&'static str; N] {
    let mut all = [""; N];
    let mut i = 0;
    while i < N {
        all[i] = if i < own.len() { own[i] } else { NAMES[i - own.len()] };
        i += 1;
    }
    all
}

/// What the checks need to know of configuration and model.
#[derive(Clone, Copy, Debug)]
pub struct SharedRules {
    /// Token ids are below this.
    pub vocab_size: usize,
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

impl SharedRules {
    /// The rules of a server; `fresh_seed` is drawn for this request.
    pub fn new(state: &HttpState, fresh_seed: u64) -> Self {
        Self {
            vocab_size: state.model.text.vocab_size,
            stops: state.openai_stop_limits(),
            least_seed: state.least_seed(),
            fresh_seed,
            default_temperature: state.model.text.generation_defaults.temperature.unwrap_or(1.0),
            default_top_k: state.default_top_k(),
        }
    }
}

/// The checked fields.
#[derive(Clone, Debug, PartialEq)]
pub struct Shared {
    /// How tokens are drawn. `top_logprobs` and `choice` are for the caller to set.
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
}

/// Reads the fields.
///
/// # Errors
/// What is wrong, with the field, its value and what would be right.
pub fn read(fields: &Fields<'_>, rules: &SharedRules) -> Result<Shared, ApiError> {
    let stop = fields.stop_strings("stop", rules.stops)?;
    let stop_token_ids = stop_token_ids(fields, rules.vocab_size)?;
    let keeps = fields.bool("include_stop_str_in_output")?.unwrap_or(false);
    let sampling = sampling_of(fields, rules)?;
    unbuilt::refuse_shared(fields)?;
    Ok(Shared {
        sampling,
        include_stop_str: keeps && !(stop.is_empty() && stop_token_ids.is_empty()),
        stop,
        stop_token_ids,
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        skip_special_tokens: fields.bool("skip_special_tokens")?.unwrap_or(true),
    })
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

fn sampling_of(fields: &Fields<'_>, rules: &SharedRules) -> Result<SamplingParams, FieldError> {
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
    // At temperature 0 every other parameter is ignored, penalties included.
    if temperature > 0.0 {
        sampling.greedy = false;
        sampling.temperature = sampling::factor(temperature);
        sampling.top_p = top_p.map_or(1.0, sampling::mass);
        sampling.top_k = sampling::top_k(top_k.unwrap_or(rules.default_top_k), rules.vocab_size);
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
