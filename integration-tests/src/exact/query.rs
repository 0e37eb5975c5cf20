//! A request, as a body of every endpoint and as the parameters of the engine.

use std::collections::BTreeSet;

use anyhow::Result;
use model_files::{TextModel, TextTokenizer};
use protocol::sampling::{Grammar, SamplingParams, StopRules};
use serde_json::{Value, json};

use crate::ask::{Door, MODEL_NAME};

/// `top_k` of a sampled request that gives none, where the model's files give none either.
const DEFAULT_TOP_K: u32 = 1_000;

/// How tokens are drawn; absent fields are not sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draw {
    /// Greedy if false; the other fields but `repetition_penalty` are then `None`.
    pub sample: bool,
    /// 1.0 if absent.
    pub temperature: Option<f64>,
    /// The server's default if absent.
    pub top_k: Option<u32>,
    /// Off if absent.
    pub top_p: Option<f64>,
    /// Off if absent; TGI only.
    pub typical_p: Option<f64>,
    /// Off if absent; OpenAI only.
    pub min_p: Option<f64>,
    /// Off if absent; a greedy request at `/v1` ignores it.
    pub repetition_penalty: Option<f64>,
    /// Off if absent; OpenAI only.
    pub presence_penalty: Option<f64>,
    /// Off if absent; OpenAI only.
    pub frequency_penalty: Option<f64>,
    /// At least 1.
    pub seed: u64,
    /// TGI only.
    pub watermark: bool,
    /// OpenAI only; ascending ids.
    pub logit_bias: Vec<(u32, f32)>,
    /// OpenAI only; ascending; empty = not sent.
    pub allowed_token_ids: Vec<u32>,
    /// What the text must be; OpenAI only if it is a choice or in Lark's notation.
    pub grammar: Option<Grammar>,
}

impl Draw {
    /// Greedy, without penalties.
    pub fn greedy() -> Self {
        Self {
            seed: 1,
            ..Self::default()
        }
    }

    /// True if only one of the two families has what is asked.
    pub fn belongs_to(&self, door: Door) -> bool {
        let openai_only = self.min_p.is_some()
            || self.presence_penalty.is_some()
            || self.frequency_penalty.is_some()
            || !self.logit_bias.is_empty()
            || !self.allowed_token_ids.is_empty()
            || matches!(self.grammar, Some(Grammar::Choice(_) | Grammar::Lark(_)));
        let tgi_only =
            self.watermark || self.typical_p.is_some() || (!self.sample && self.repetition_penalty.is_some());
        if door.is_tgi() { !openai_only } else { !tgi_only }
    }

    /// What the engine is to do, by the API's text. `top`: alternatives to report.
    pub fn params(&self, vocab_size: usize, top: Option<u8>) -> SamplingParams {
        let greedy = SamplingParams::greedy();
        let single = |value: Option<f64>, off: f32| value.map_or(off, |value| value as f32);
        let top_k = self.top_k.unwrap_or(DEFAULT_TOP_K);
        let keeps_all = !self.sample || top_k as usize >= vocab_size;
        SamplingParams {
            greedy: !self.sample,
            temperature: single(self.temperature, greedy.temperature),
            top_k: if keeps_all { 0 } else { top_k },
            top_p: single(self.top_p, greedy.top_p),
            typical_p: single(self.typical_p, greedy.typical_p),
            min_p: single(self.min_p, greedy.min_p),
            repetition_penalty: single(self.repetition_penalty, greedy.repetition_penalty),
            presence_penalty: single(self.presence_penalty, greedy.presence_penalty),
            frequency_penalty: single(self.frequency_penalty, greedy.frequency_penalty),
            seed: self.seed,
            choice: 0,
            top_logprobs: top,
            watermark: self.watermark,
            logit_bias: self.logit_bias.clone(),
            allowed_token_ids: self.allowed_token_ids.clone(),
            grammar: self.grammar.clone(),
            ..greedy
        }
    }
}

/// A request.
#[derive(Clone, Debug)]
pub struct Query {
    /// The prompt.
    pub prompt: String,
    /// Most tokens; absent fields are not sent.
    pub max_tokens: Option<u32>,
    /// How tokens are drawn.
    pub draw: Draw,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Tokens that end the answer; OpenAI only.
    pub stop_token_ids: Vec<u32>,
    /// Do not end at the model's end tokens; OpenAI only.
    pub ignore_eos: bool,
    /// Keep what ended the answer in its text; OpenAI only.
    pub keep_stop: bool,
    /// Leave special tokens out of the text; OpenAI only if false.
    pub skip_special: bool,
    /// Alternatives to every token, at most 5; OpenAI only.
    pub top: u8,
    /// Log-probabilities of the prompt; `/generate` only.
    pub prompt_logprobs: bool,
    /// Name of an adapter: the TGI paths' `adapter_id`, the others' model.
    pub adapter: Option<String>,
    /// Tokens before which nothing but the limit ends the answer; OpenAI only.
    pub min_tokens: u32,
    /// Words that must not appear; OpenAI only.
    pub bad_words: Vec<String>,
    /// Tokens that are kept at the end of the prompt.
    pub truncate: Option<u32>,
    /// The prompt is a conversation that a template has rendered: it brings its own special tokens. No door takes that.
    pub rendered: bool,
}

impl Query {
    /// Greedy, at most `max_tokens` tokens.
    pub fn greedy(prompt: impl Into<String>, max_tokens: u32) -> Self {
        Self {
            prompt: prompt.into(),
            max_tokens: Some(max_tokens),
            draw: Draw::greedy(),
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            keep_stop: false,
            skip_special: true,
            top: 0,
            prompt_logprobs: false,
            adapter: None,
            min_tokens: 0,
            bad_words: Vec::new(),
            truncate: None,
            rendered: false,
        }
    }

    /// The name under which the OpenAI paths are asked.
    pub fn model(&self) -> &str {
        self.adapter.as_deref().unwrap_or(MODEL_NAME)
    }

    /// The prompt's tokens.
    ///
    /// # Errors
    /// The tokenizer gives up.
    pub fn prompt_tokens(&self, tokenizer: &TextTokenizer) -> Result<Vec<u32>> {
        let mut tokens = if self.rendered {
            tokenizer.encode_plain(&self.prompt)?
        } else {
            tokenizer.encode(&self.prompt)?
        };
        if let Some(keep) = self.truncate {
            tokens.drain(..tokens.len().saturating_sub(keep as usize));
        }
        Ok(tokens)
    }

    /// What the engine is to do, by the API's text. `top`: alternatives to report.
    ///
    /// # Errors
    /// A bad word that cannot be tokenised.
    pub fn params(&self, model: &TextModel, top: Option<u8>) -> Result<SamplingParams> {
        let mut params = self.draw.params(model.vocab_size, top);
        for word in &self.bad_words {
            let bare = model.tokenizer.encode_plain(word)?;
            let spaced = model.tokenizer.encode_plain(&format!(" {word}"))?;
            let another = bare[0] != spaced[0] && bare.len() == spaced.len();
            params.bad_words.push(bare);
            params.bad_words.extend(another.then_some(spaced));
        }
        params.min_tokens = self.min_tokens;
        if self.min_tokens > 0 {
            let ends: BTreeSet<u32> = model
                .eos_token_ids
                .iter()
                .chain(&self.stop_token_ids)
                .copied()
                .collect();
            params.end_token_ids = ends.into_iter().collect();
        }
        Ok(params)
    }

    /// True if the answer at this door can be what is asked. `top` and `prompt_logprobs` change no token: a door that does
    /// not have them is asked without them.
    pub fn belongs_to(&self, door: Door) -> bool {
        let openai_only = self.ignore_eos
            || self.keep_stop
            || !self.skip_special
            || !self.stop_token_ids.is_empty()
            || self.min_tokens > 0
            || !self.bad_words.is_empty();
        !(self.rendered || door.is_tgi() && openai_only) && self.draw.belongs_to(door)
    }

    /// The rules by which the engine ends the answer; `most` is the limit that the server makes of `max_tokens`.
    pub fn stop_rules(&self, most: u32, eos_token_ids: &[u32]) -> StopRules {
        StopRules {
            max_tokens: most,
            eos_token_ids: eos_token_ids.to_vec(),
            ignore_eos: self.ignore_eos,
            stop_token_ids: self.stop_token_ids.clone(),
        }
    }

    /// The body of a request that asks for everything an answer can tell. See [`Query::belongs_to`] for
    /// fields that the door does not have.
    pub fn body(&self, door: Door) -> Value {
        let mut body = if door.is_tgi() {
            self.tgi(door)
        } else {
            self.openai(door)
        };
        drop_nulls(&mut body);
        body
    }

    fn tgi(&self, door: Door) -> Value {
        let draw = &self.draw;
        json!({
            "inputs": self.prompt,
            "parameters": {
                "details": true,
                "decoder_input_details": (door == Door::Generate).then_some(self.prompt_logprobs),
                "do_sample": draw.sample,
                "max_new_tokens": self.max_tokens,
                "temperature": draw.temperature,
                "top_k": draw.top_k,
                "top_p": draw.top_p,
                "typical_p": draw.typical_p,
                "repetition_penalty": draw.repetition_penalty,
                "seed": draw.seed,
                "adapter_id": self.adapter,
                "stop": (!self.stop.is_empty()).then_some(&self.stop),
                "truncate": self.truncate,
                "watermark": draw.watermark.then_some(true),
                "grammar": match &draw.grammar {
                    Some(Grammar::JsonSchema(schema)) => json!({ "type": "json", "value": schema }),
                    Some(Grammar::Regex(pattern)) => json!({ "type": "regex", "value": pattern }),
                    Some(Grammar::Choice(_) | Grammar::Lark(_)) | None => Value::Null,
                },
            },
        })
    }

    fn openai(&self, door: Door) -> Value {
        let draw = &self.draw;
        json!({
            "model": self.model(),
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": if draw.sample { draw.temperature } else { Some(0.0) },
            "top_k": draw.top_k,
            "top_p": draw.top_p,
            "min_p": draw.min_p,
            "repetition_penalty": draw.repetition_penalty,
            "presence_penalty": draw.presence_penalty,
            "frequency_penalty": draw.frequency_penalty,
            "seed": draw.seed,
            "stop": (!self.stop.is_empty()).then_some(&self.stop),
            "stop_token_ids": (!self.stop_token_ids.is_empty()).then_some(&self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "include_stop_str_in_output": self.keep_stop,
            "skip_special_tokens": self.skip_special,
            "logprobs": self.top,
            "return_token_ids": true,
            "stream": door.is_stream(),
            "truncate_prompt_tokens": self.truncate,
            "logit_bias": (!draw.logit_bias.is_empty()).then(|| bias_object(&draw.logit_bias)),
            "allowed_token_ids": (!draw.allowed_token_ids.is_empty()).then_some(&draw.allowed_token_ids),
            "min_tokens": self.min_tokens,
            "bad_words": (!self.bad_words.is_empty()).then_some(&self.bad_words),
            "structured_outputs": draw.grammar.as_ref().map(|grammar| match grammar {
                Grammar::JsonSchema(schema) => json!({ "json": schema }),
                Grammar::Regex(pattern) => json!({ "regex": pattern }),
                Grammar::Lark(text) => json!({ "grammar": text }),
                Grammar::Choice(choices) => json!({ "choice": choices }),
            }),
        })
    }
}

/// `logit_bias` as a body has it.
pub fn bias_object(bias: &[(u32, f32)]) -> Value {
    let entries = bias.iter().map(|(token, amount)| (token.to_string(), json!(amount)));
    Value::Object(entries.collect())
}

/// Null equals absent; half of the tests of a field should not depend on it.
fn drop_nulls(value: &mut Value) {
    if let Value::Object(object) = value {
        object.retain(|_, value| !value.is_null());
        object.values_mut().for_each(drop_nulls);
    }
}
