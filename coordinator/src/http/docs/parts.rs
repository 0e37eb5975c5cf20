//! Objects inside of bodies (see [`super::fields`]).
#![allow(
    missing_docs,
    reason = "the fields' documentation is the text of the API document; every field has it"
)]

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::custom::{adapter, seed, stop};

/// `parameters` of `/generate`.
#[derive(Deserialize, ToSchema)]
pub struct GenerateParameters {
    #[schema(schema_with = adapter)]
    pub adapter_id: Option<String>,
    /// Draws so many answers and returns the most probable one, the others in `details.best_of_sequences`. More than 1
    /// needs sampling, forbids `seed`, and cannot be streamed.
    #[schema(minimum = 1, maximum = 128, default = 1)]
    pub best_of: Option<u32>,
    /// Tell about the prompt's tokens, and all other details. Not in a stream.
    #[schema(default = false)]
    pub decoder_input_details: Option<bool>,
    /// Tell about the answer's tokens.
    #[schema(default = false)]
    pub details: Option<bool>,
    /// true: draw. false: the most probable token always, whatever else is given. Absent: draw if and only if
    /// `temperature` is not 1, or `top_k` or `top_p` is given, or `typical_p` is below 1.
    pub do_sample: Option<bool>,
    /// Form of the answer, if it is an object with a `type` of `json` or `regex` and a `value`, the JSON schema or the regular
    /// expression; anything else changes nothing.
    pub grammar: Option<Value>,
    /// Most tokens to generate; the server's own limits cut it, without an error.
    #[schema(minimum = 1, maximum = 2147483647, default = 20)]
    pub max_new_tokens: Option<u32>,
    /// Makes tokens of the prompt and the answer less probable if above 1.
    #[schema(exclusive_minimum = 0.0, default = 1.0)]
    pub repetition_penalty: Option<f64>,
    /// Put the whole prompt in front of the text.
    #[schema(default = false)]
    pub return_full_text: Option<bool>,
    #[schema(schema_with = seed)]
    pub seed: Option<u64>,
    #[schema(schema_with = stop)]
    pub stop: Option<Value>,
    /// Further stop strings, under their name in TGI.
    #[schema(schema_with = stop)]
    pub stop_sequences: Option<Value>,
    /// Divides the logits.
    #[schema(exclusive_minimum = 0.000001, default = 1.0)]
    pub temperature: Option<f64>,
    /// Draw among the k most probable tokens only.
    #[schema(minimum = 1, maximum = 2147483647)]
    pub top_k: Option<u32>,
    /// Draw among the smallest set of tokens whose probabilities reach this sum.
    #[schema(exclusive_minimum = 0.000001, exclusive_maximum = 1.0)]
    pub top_p: Option<f64>,
    /// Keep only so many tokens at the end of the prompt.
    #[schema(minimum = 1, maximum = 2147483647)]
    pub truncate: Option<u32>,
    /// Locally typical sampling.
    #[schema(exclusive_minimum = 0.0, maximum = 1.0, default = 1.0)]
    pub typical_p: Option<f64>,
    /// Mark the answer's tokens with TGI's watermark.
    #[schema(default = false)]
    pub watermark: Option<bool>,
}

/// `response_format`.
#[derive(Deserialize, ToSchema)]
pub struct ResponseFormat {
    /// `text`, `json_object`, `json_schema` or `regex`.
    #[serde(rename = "type")]
    #[schema(required = true)]
    pub kind: String,
    /// With `json_schema`: an object whose `schema` is the JSON schema.
    pub json_schema: Option<BTreeMap<String, Value>>,
    /// With `json_object`: the JSON schema of the object.
    pub schema: Option<Value>,
    /// With `regex`: the regular expression.
    pub value: Option<Value>,
}

/// `stream_options`; only with `stream`.
#[derive(Deserialize, ToSchema)]
pub struct StreamOptions {
    /// Every chunk has the counts so far.
    #[schema(default = false)]
    pub continuous_usage_stats: Option<bool>,
    /// One more chunk, with the counts and no choice.
    #[schema(default = false)]
    pub include_usage: Option<bool>,
}

/// The word `function`.
#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FunctionWord {
    Function,
}
