//! The fields that completions and chat have in common: how tokens are drawn, and what ends an answer.
//!
//! [`read`] checks them while the body is at hand, whose list of known fields is made by [`with_shared`];
//! [`Shared::complete`] does what takes the tokenizer, or long.

use std::collections::{BTreeMap, BTreeSet};

use config::LogprobsConfig;
use protocol::sampling::SamplingParams;

use super::structured::{self, Constraint};
use crate::http::error::ApiError;
use crate::http::json::fields::{FieldError, Fields, Range, StopLimits, quoted, wrong_element};
use crate::http::json::raw::{Kind, Raw};
use crate::http::sampling;
use crate::http::state::HttpState;

/// Most of the API's 31-bit integers.
pub const MAX_I31: i64 = 2_147_483_647;
/// Most different tokens in `stop_token_ids`: nodes look at each of them at every step.
const MAX_STOP_TOKENS: usize = 4_096;

/// Most entries of `logit_bias`, and tokens of `bad_words`: nodes look at each of them at every step.
const MAX_BIASED: usize = 65_536;
/// Most words in `bad_words`.
const MAX_BAD_WORDS: usize = 4_096;

/// Names of the fields: part of the list of known names of each body (see [`with_shared`]).
pub const NAMES: &[&str] = &[
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "response_format",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "structured_outputs",
    "temperature",
    "top_k",
    "top_p",
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
    /// Longest description of a format, in bytes.
    pub max_grammar_bytes: usize,
    /// Report log-probabilities of what tokens are drawn from, not the model's.
    pub processed_logprobs: bool,
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
            max_grammar_bytes: state.limits.max_grammar_bytes,
            processed_logprobs: state.front.completions_logprobs == LogprobsConfig::Processed,
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
    /// Words that must not appear; [`Shared::complete`] makes tokens of them.
    pub bad_words: Vec<String>,
    /// What the text must be; [`Shared::complete`] checks it.
    pub constraint: Option<Constraint>,
    /// Keep only so many tokens at the end of the prompt.
    pub truncate_prompt: Option<usize>,
}

impl Shared {
    /// Does what takes the tokenizer, or long: `sampling` is complete afterwards.
    ///
    /// # Errors
    /// A format that cannot be used, a word that cannot be tokenised, or the process stops.
    pub async fn complete(mut self, state: &HttpState) -> Result<Self, ApiError> {
        if !self.bad_words.is_empty() {
            self.sampling.bad_words = state
                .bad_words("bad_words", std::mem::take(&mut self.bad_words))
                .await?;
        }
        if let Some(Constraint { field, grammar }) = self.constraint.take() {
            state.check_grammar(&field, &grammar).await?;
            self.sampling.grammar = Some(grammar);
        }
        Ok(self)
    }

    /// Cuts a prompt to the end that is to be kept; true if something was cut.
    pub fn truncate(&self, tokens: &mut Vec<u32>) -> bool {
        let keep = self.truncate_prompt.unwrap_or(usize::MAX);
        let cut = tokens.len().saturating_sub(keep);
        tokens.drain(..cut);
        cut > 0
    }
}

/// Reads the fields. `max_tokens`: the client's own limit.
///
/// # Errors
/// What is wrong, with the field, its value and what would be right.
pub fn read(fields: &Fields<'_>, rules: &SharedRules, max_tokens: Option<u32>) -> Result<Shared, ApiError> {
    let stop = fields.stop_strings("stop", rules.stops)?;
    let stop_token_ids = stop_token_ids(fields, rules.vocab_size)?;
    let keeps = fields.bool("include_stop_str_in_output")?.unwrap_or(false);
    let mut sampling = sampling_of(fields, rules)?;
    // What may be said holds at every temperature.
    sampling.logit_bias = logit_bias(fields, rules.vocab_size)?;
    sampling.allowed_token_ids = allowed_token_ids(fields, rules.vocab_size)?;
    sampling.min_tokens = min_tokens(fields, max_tokens)?;
    Ok(Shared {
        sampling,
        include_stop_str: keeps && !(stop.is_empty() && stop_token_ids.is_empty()),
        stop,
        stop_token_ids,
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        skip_special_tokens: fields.bool("skip_special_tokens")?.unwrap_or(true),
        bad_words: bad_words(fields, rules.stops)?,
        constraint: structured::read(fields, rules.max_grammar_bytes)?,
        truncate_prompt: truncate_prompt(fields)?,
    })
}

fn min_tokens(fields: &Fields<'_>, max_tokens: Option<u32>) -> Result<u32, FieldError> {
    let most = max_tokens.map_or(MAX_I31, i64::from);
    let least = fields.int("min_tokens", 0, most)?.unwrap_or(0);
    Ok(u32::try_from(least).unwrap_or(u32::MAX))
}

/// Sums of several entries for one token make no sense; a token that is named twice ("1", "01") is refused.
fn logit_bias(fields: &Fields<'_>, vocab_size: usize) -> Result<Vec<(u32, f32)>, FieldError> {
    const NAME: &str = "logit_bias";
    let Some(object) = fields.object_raw(NAME, "an object of token ids and numbers")? else {
        return Ok(Vec::new());
    };
    let mut bias = BTreeMap::new();
    for (key, value) in object.members() {
        let refuse = |problem: String| {
            Err(FieldError::rule(
                NAME,
                format!("has the key {} {problem}", quoted(&key)),
            ))
        };
        let digits = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_digit());
        let id = key
            .parse::<u32>()
            .ok()
            .filter(|&id| digits && (id as usize) < vocab_size);
        let Some(id) = id else {
            return refuse(format!(
                "which must be a token id, an integer from 0 to {}",
                vocab_size.saturating_sub(1)
            ));
        };
        let amount = if value.kind() == Kind::Number {
            value.text().parse::<f64>().ok().filter(|amount| amount.is_finite())
        } else {
            None
        };
        let Some(amount) = amount else {
            return refuse(format!("with {}, which must be a number", value.shown()));
        };
        if bias.insert(id, amount.clamp(-100.0, 100.0) as f32).is_some() {
            return refuse("whose token must be named once only".to_owned());
        }
        if bias.len() > MAX_BIASED {
            return Err(FieldError::rule(
                NAME,
                format!("must have at most {MAX_BIASED} entries"),
            ));
        }
    }
    Ok(bias.into_iter().collect())
}

fn allowed_token_ids(fields: &Fields<'_>, vocab_size: usize) -> Result<Vec<u32>, FieldError> {
    const NAME: &str = "allowed_token_ids";
    let Some(list) = fields.list(NAME, "a non-empty list of token ids")? else {
        return Ok(Vec::new());
    };
    let mut ids = BTreeSet::new();
    for (index, element) in list.elements().enumerate() {
        let id = if element.kind() == Kind::Number {
            element
                .text()
                .parse::<u32>()
                .ok()
                .filter(|&id| (id as usize) < vocab_size)
        } else {
            None
        };
        let expected = || format!("a token id, an integer from 0 to {}", vocab_size.saturating_sub(1));
        ids.insert(id.ok_or_else(|| wrong_element(NAME, index, element, &expected()))?);
    }
    if ids.is_empty() {
        return Err(FieldError::wrong(NAME, list, "a non-empty list of token ids"));
    }
    Ok(ids.into_iter().collect())
}

fn bad_words(fields: &Fields<'_>, stops: StopLimits) -> Result<Vec<String>, FieldError> {
    fields.list("bad_words", "a list of strings")?;
    let limits = StopLimits {
        strings: MAX_BAD_WORDS,
        ..stops
    };
    fields.stop_strings("bad_words", limits)
}

/// -1: as many as the model takes, which longer prompts than that are refused for anyway.
fn truncate_prompt(fields: &Fields<'_>) -> Result<Option<usize>, FieldError> {
    const NAME: &str = "truncate_prompt_tokens";
    let expected = "an integer from 1 to 2147483647, or -1 for no limit";
    let wrong = || FieldError::wrong(NAME, fields.get(NAME).unwrap_or(Raw::NULL), expected);
    match fields.int(NAME, -1, MAX_I31).map_err(|_| wrong())? {
        None | Some(-1) => Ok(None),
        Some(0) => Err(wrong()),
        Some(count) => Ok(usize::try_from(count).ok()),
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
    sampling.processed_logprobs = rules.processed_logprobs;
    // At temperature 0 every other parameter here is ignored, penalties included.
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
