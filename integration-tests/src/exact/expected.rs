//! Where an answer must end, and what it must say: a plain search of the whole text, token by token, and a comparison
//! with an engine's output bit by bit.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use model_files::{TextModel, TextTokenizer};
use protocol::sampling::SampledToken;
use serde_json::{Value, json};

use super::answer::Answer;
use super::query::Query;
use super::reference::Continuation;
use crate::ask::Door;

/// Why an answer ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The token limit.
    Length,
    /// An end token of the model.
    Eos,
    /// A token of `stop_token_ids`.
    StopToken(u32),
    /// A stop string.
    StopString(String),
}

/// How an answer must end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Number of tokens.
    pub tokens: usize,
    /// The visible text.
    pub text: String,
    /// Why.
    pub end: End,
    /// The last token was the last permitted one.
    pub limit_reached: bool,
}

impl Ending {
    /// The finish reason and the stop reason that a door must give.
    pub fn reasons(&self, door: Door) -> (&'static str, Value) {
        if door.is_tgi() {
            let word = match self.end {
                _ if self.limit_reached => "length",
                End::Length => "length",
                End::Eos => "eos_token",
                End::StopToken(_) | End::StopString(_) => "stop_sequence",
            };
            return (word, Value::Null);
        }
        match &self.end {
            End::Length => ("length", Value::Null),
            End::Eos => ("stop", Value::Null),
            End::StopToken(token) => ("stop", json!(token)),
            End::StopString(string) => ("stop", json!(string)),
        }
    }
}

/// The text of `ids`. Unless it is complete, the beginning of a character at its end is left out.
fn text_of(tokenizer: &TextTokenizer, ids: &[u32], skip_special: bool, complete: bool) -> String {
    let shown = ids.iter().filter(|id| !(skip_special && tokenizer.is_special(**id)));
    let mut bytes: Vec<u8> = shown.flat_map(|id| tokenizer.token_bytes(*id)).copied().collect();
    if !complete {
        let unfinished = (1..=3.min(bytes.len())).find(|n| {
            let tail = &bytes[bytes.len() - n..];
            std::str::from_utf8(tail).is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
        });
        bytes.truncate(bytes.len() - unfinished.unwrap_or(0));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The stop string that ends first in `text`, the first of the list among equals: where the text is cut, and which.
fn first_stop(text: &str, stops: &[String], keep: bool) -> Option<(usize, String)> {
    let found = stops
        .iter()
        .enumerate()
        .filter_map(|(i, stop)| text.find(stop.as_str()).map(|at| (at + stop.len(), i, at)));
    found
        .min()
        .map(|(end, i, at)| (if keep { end } else { at }, stops[i].clone()))
}

/// How the answer to `query` must end, given what the engine generates if nothing stops it. `most`: the server's limit,
/// at most the length of `endless`.
pub fn ending(query: &Query, most: u32, endless: &[u32], model: &TextModel) -> Ending {
    let rules = query.stop_rules(most, &model.eos_token_ids);
    for (i, &token) in endless.iter().enumerate() {
        let tokens = i + 1;
        let by_token = if !rules.ignore_eos && rules.eos_token_ids.contains(&token) {
            Some(End::Eos)
        } else {
            rules.stop_token_ids.contains(&token).then_some(End::StopToken(token))
        };
        let limit_reached = tokens >= most as usize;
        let shown = if by_token.is_some() && !query.keep_stop {
            i
        } else {
            tokens
        };
        let over = by_token.is_some() || limit_reached;
        let text = text_of(&model.tokenizer, &endless[..shown], true, over);
        if let Some((at, stop)) = first_stop(&text, &query.stop, query.keep_stop) {
            return Ending {
                tokens,
                text: text[..at].to_owned(),
                end: End::StopString(stop),
                limit_reached,
            };
        }
        if over {
            return Ending {
                tokens,
                text,
                end: by_token.unwrap_or(End::Length),
                limit_reached,
            };
        }
    }
    panic!(
        "{} tokens are not enough to see the end of {query:?} at {most}",
        endless.len()
    );
}

/// Checks text, counts and reasons. Whether numbers are right says [`check_numbers`].
pub fn check_ending(answer: &Answer, ending: &Ending, door: Door) -> Result<()> {
    ensure!(
        answer.text == ending.text,
        "the text is {:?}, not {:?}",
        answer.text,
        ending.text
    );
    ensure!(
        answer.tokens.len() == ending.tokens,
        "{} tokens, not {}",
        answer.tokens.len(),
        ending.tokens
    );
    let (finish, stop_reason) = ending.reasons(door);
    ensure!(answer.finish == finish, "finish reason {}, not {finish}", answer.finish);
    ensure!(
        answer.stop_reason == stop_reason,
        "stop reason {}, not {stop_reason}",
        answer.stop_reason
    );
    Ok(())
}

/// Checks token ids and log-probabilities, bit by bit. The answer may be shorter than the continuation. Returns how many
/// numbers were compared.
pub fn check_numbers(answer: &Answer, reference: &Continuation, door: Door, model: &TextModel) -> Result<usize> {
    ensure!(
        answer.prompt_tokens == reference.prompt.len(),
        "{} prompt tokens",
        answer.prompt_tokens
    );
    if let Some(prompt) = &answer.prompt {
        ensure!(
            *prompt == reference.prompt,
            "prompt {prompt:?}, not {:?}",
            reference.prompt
        );
    }
    let mut compared = 0;
    if answer.prompt_logprobs.is_some() {
        let bits = |numbers: &Option<Vec<f32>>| numbers.iter().flatten().map(|p| p.to_bits()).collect::<Vec<_>>();
        let (got, expected) = (bits(&answer.prompt_logprobs), bits(&reference.prompt_logprobs));
        ensure!(
            got == expected,
            "the prompt's log-probabilities differ: {answer:?}, not {reference:?}"
        );
        compared += got.len();
    }
    let mut pieces = model.tokenizer.incremental(false);
    for (i, token) in answer.tokens.iter().enumerate() {
        let expected = reference
            .tokens
            .get(i)
            .with_context(|| format!("a token behind the end: {token:?}"))?;
        ensure!(
            token.id == expected.token,
            "token {i} is {}, not {}",
            token.id,
            expected.token
        );
        let logprob = if door.is_tgi() {
            expected.logprob
        } else {
            expected.raw_logprob
        };
        let equal = token.logprob.to_bits() == logprob.to_bits();
        ensure!(equal, "log-probability {i} is {}, not {logprob}", token.logprob);
        compared += 1;
        let text = pieces.push(token.id);
        if door.is_tgi() {
            let special = model.tokenizer.is_special(token.id);
            ensure!(
                token.special == Some(special),
                "token {i} is special: {:?}",
                token.special
            );
        } else {
            ensure!(token.text == text, "token {i} adds {:?}, not {text:?}", token.text);
            compared +=
                check_top(&token.top, expected, &text, &model.tokenizer).with_context(|| format!("token {i}"))?;
        }
    }
    Ok(compared)
}

/// The chosen token and the alternatives; of two with the same text the more probable one.
fn check_top(
    top: &BTreeMap<String, f32>,
    sampled: &SampledToken,
    text: &str,
    tokenizer: &TextTokenizer,
) -> Result<usize> {
    let mut expected = BTreeMap::from([(text.to_owned(), sampled.raw_logprob)]);
    for &(id, logprob) in sampled.top_logprobs.iter().filter(|(id, _)| *id != sampled.token) {
        let known = expected.entry(tokenizer.token_text(id)).or_insert(logprob);
        *known = known.max(logprob);
    }
    let bits = |map: &BTreeMap<String, f32>| map.iter().map(|(t, p)| (t.clone(), p.to_bits())).collect::<Vec<_>>();
    ensure!(bits(top) == bits(&expected), "alternatives {top:?}, not {expected:?}");
    Ok(top.len())
}
