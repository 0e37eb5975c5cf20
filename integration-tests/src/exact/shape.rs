//! The JSON of answers, field by field: an unknown or missing field is an error. Numbers that a client may want to the
//! last bit are kept as they were printed.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// A single-precision number as it was printed.
#[derive(Debug, Deserialize)]
#[serde(transparent)]
pub struct Printed(Box<RawValue>);

impl Printed {
    /// The number. Errors if a client that reads double precision gets another one.
    pub fn value(&self) -> Result<f32> {
        let text = self.0.get();
        let single: f32 = text.parse().with_context(|| format!("{text} is no number"))?;
        let double: f64 = text.parse()?;
        ensure!(single.is_finite(), "{text} is not finite");
        ensure!(
            (double as f32).to_bits() == single.to_bits(),
            "{text} is another number in double precision"
        );
        Ok(single)
    }
}

/// One token of TGI.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TgiToken {
    /// Id.
    pub id: u32,
    /// Its part of the text; a special token's name.
    pub text: String,
    /// Null for the first token of a prompt.
    pub logprob: Option<Printed>,
    /// Not part of the text.
    pub special: bool,
}

/// `details` of `/generate`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct TgiDetails {
    pub finish_reason: String,
    pub generated_tokens: usize,
    pub prompt_tokens: usize,
    pub input_length: usize,
    pub seed: u64,
    pub prefill: Vec<TgiToken>,
    pub tokens: Vec<TgiToken>,
}

/// The answer of `/generate`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct TgiWhole {
    pub details: TgiDetails,
    pub generated_text: String,
}

/// `details` of the last event of `/generate_stream`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct TgiLast {
    pub finish_reason: String,
    pub generated_tokens: usize,
    pub prompt_tokens: usize,
    pub input_length: usize,
    pub seed: u64,
}

/// An event of `/generate_stream`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct TgiEvent {
    pub token: TgiToken,
    pub generated_text: Option<String>,
    pub details: Option<TgiLast>,
}

/// `logprobs` of completions.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct Logprobs {
    pub text_offset: Vec<usize>,
    pub token_logprobs: Vec<Printed>,
    pub tokens: Vec<String>,
    pub top_logprobs: Vec<BTreeMap<String, Printed>>,
}

/// A choice of `/v1/completions`, whole or a part.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct Choice {
    pub index: u32,
    pub text: String,
    pub logprobs: Option<Logprobs>,
    pub finish_reason: Option<String>,
    pub stop_reason: Value,
    pub token_ids: Option<Vec<u32>>,
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// `usage` of `/v1/completions`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct Usage {
    pub prompt_tokens: usize,
    pub prompt_tokens_details: CachedTokens,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub batch_size: Vec<u32>,
    pub queue_wait_time: Vec<u64>,
}

/// Part of [`Usage`].
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct CachedTokens {
    pub cached_tokens: usize,
}

/// The answer of `/v1/completions`, or a chunk of it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(missing_docs, reason = "the names are the API's")]
pub struct Completion {
    pub id: String,
    pub object: String,
    pub created: u64,
    pub model: String,
    pub choices: Vec<Choice>,
    #[serde(default)]
    pub usage: Option<Usage>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_numbers_keep_every_bit() {
        let read = |text: &str| serde_json::from_str::<Printed>(text).expect("JSON").value();
        for bits in (0..1_000_000_u32).map(|i| 0xbd00_0000 + i * 97) {
            let number = f32::from_bits(bits);
            let printed = serde_json::to_string(&number).expect("a number");
            assert_eq!(read(&printed).expect("printed").to_bits(), bits, "{printed}");
        }
        assert!(read("1e40").is_err());
        assert!(read("\"a\"").is_err());
    }
}
