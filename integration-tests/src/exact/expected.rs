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

/// The stop string that ends first in `text` behind `passed`, the first of the list among equals: where the text is cut, and
/// which.
fn first_stop(text: &str, passed: usize, stops: &[String], keep: bool) -> Option<(usize, String)> {
    let place = |stop: &str| {
        let starts = text.char_indices().map(|(at, _)| at);
        let mut places = starts.filter(|&at| text[at..].starts_with(stop) && at + stop.len() > passed);
        places.next()
    };
    let found = stops
        .iter()
        .enumerate()
        .filter_map(|(i, stop)| place(stop).map(|at| (at + stop.len(), i, at)));
    found
        .min()
        .map(|(end, i, at)| (if keep { end } else { at }, stops[i].clone()))
}

/// How the answer to `query` must end, given what the engine generates if nothing stops it. `most`: the server's limit,
/// at most the length of `endless`.
pub fn ending(query: &Query, most: u32, endless: &[u32], model: &TextModel) -> Ending {
    let rules = query.stop_rules(most, &model.eos_token_ids);
    let mut passed = 0;
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
        let text = text_of(&model.tokenizer, &endless[..shown], query.skip_special, over);
        if i < query.min_tokens as usize {
            passed = text.len();
        }
        if let Some((at, stop)) = first_stop(&text, passed, &query.stop, query.keep_stop) {
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
pub fn check_numbers(
    answer: &Answer,
    query: &Query,
    reference: &Continuation,
    door: Door,
    model: &TextModel,
) -> Result<usize> {
    let mut compared = check_prompt(answer, reference)?;
    let mut pieces = model.tokenizer.incremental(false);
    for (i, token) in answer.tokens.iter().enumerate() {
        let expected = reference.tokens.get(i);
        let expected = expected.with_context(|| format!("token {i}, {token:?}, lies behind the end"))?;
        let (id, text) = (expected.token, pieces.push(token.id));
        ensure!(token.id == id, "token {i} is {}, not {id}", token.id);
        let tgi = door.is_tgi();
        let logprob = if tgi { expected.logprob } else { expected.raw_logprob };
        let equal = token.logprob.to_bits() == logprob.to_bits();
        ensure!(equal, "log-probability {i} is {}, not {logprob}", token.logprob);
        compared += 1;
        if tgi {
            let special = model.tokenizer.is_special(token.id);
            ensure!(
                token.special == Some(special),
                "token {i} is special: {:?}",
                token.special
            );
        } else {
            ensure!(token.text == text, "token {i} adds {:?}, not {text:?}", token.text);
            let alternatives = &expected.top_logprobs[..usize::from(query.top)];
            compared += check_top(&token.top, expected, alternatives, &text, &model.tokenizer)
                .with_context(|| format!("token {i}"))?;
        }
    }
    Ok(compared)
}

/// Checks what the answer tells of the prompt.
fn check_prompt(answer: &Answer, reference: &Continuation) -> Result<usize> {
    let (got, expected) = (answer.prompt_tokens, reference.prompt.len());
    ensure!(got == expected, "{got} prompt tokens, not {expected}");
    let same = answer.prompt.as_ref().is_none_or(|prompt| *prompt == reference.prompt);
    ensure!(same, "prompt {:?}, not {:?}", answer.prompt, reference.prompt);
    let Some(got) = &answer.prompt_logprobs else {
        return Ok(0);
    };
    let expected = reference
        .prompt_logprobs
        .as_ref()
        .context("the engine was not asked for the prompt's")?;
    let bits = |numbers: &[f32]| numbers.iter().map(|p| p.to_bits()).collect::<Vec<_>>();
    ensure!(
        bits(got) == bits(expected),
        "log-probabilities of the prompt {got:?}, not {expected:?}"
    );
    Ok(got.len())
}

/// The chosen token and the alternatives; of two with the same text the more probable one.
fn check_top(
    top: &BTreeMap<String, f32>,
    sampled: &SampledToken,
    alternatives: &[(u32, f32)],
    text: &str,
    tokenizer: &TextTokenizer,
) -> Result<usize> {
    let mut expected = BTreeMap::from([(text.to_owned(), sampled.raw_logprob)]);
    for &(id, logprob) in alternatives.iter().filter(|(id, _)| *id != sampled.token) {
        let known = expected.entry(tokenizer.token_text(id)).or_insert(logprob);
        *known = known.max(logprob);
    }
    let bits = |map: &BTreeMap<String, f32>| map.iter().map(|(t, p)| (t.clone(), p.to_bits())).collect::<Vec<_>>();
    ensure!(bits(top) == bits(&expected), "alternatives {top:?}, not {expected:?}");
    Ok(top.len())
}

#[cfg(test)]
mod tests {
    use protocol::sampling::FinishReason;

    use super::super::answer::Token;
    use super::*;
    use crate::files::tiny_model;

    fn model() -> TextModel {
        model_files::ModelFiles::open(tiny_model())
            .and_then(|files| files.text())
            .expect("the tiny model")
    }

    /// What an engine says, and the answer of `/v1/completions` that tells it.
    fn told(model: &TextModel, ids: &[u32]) -> (Continuation, Answer) {
        let mut pieces = model.tokenizer.incremental(false);
        let (mut sampled, mut tokens) = (Vec::new(), Vec::new());
        for (position, &id) in ids.iter().enumerate() {
            let logprob = -1.0 / (position + 3) as f32;
            let top_logprobs = vec![(7, -0.125), (id, logprob)];
            sampled.push(SampledToken {
                position: position as u32,
                token: id,
                logprob,
                raw_logprob: logprob,
                top_logprobs,
            });
            let text = pieces.push(id);
            let top = BTreeMap::from([(text.clone(), logprob), (model.tokenizer.token_text(7), -0.125)]);
            tokens.push(Token {
                id,
                text,
                logprob,
                special: None,
                offset: Some(position),
                top,
            });
        }
        let prompt = vec![5, 6];
        let answer = Answer {
            text: model.tokenizer.decode(ids, true),
            finish: "length".to_owned(),
            stop_reason: Value::Null,
            tokens,
            prompt_tokens: 2,
            prompt: Some(prompt.clone()),
            prompt_logprobs: Some(vec![-0.3]),
            cached_tokens: None,
            pieces: None,
        };
        let prompt_logprobs = Some(vec![-0.3]);
        (
            Continuation {
                prompt,
                prompt_logprobs,
                tokens: sampled,
                finish: FinishReason::Length,
            },
            answer,
        )
    }

    fn next_up(number: f32) -> f32 {
        f32::from_bits(number.to_bits() + 1)
    }

    #[test]
    fn one_bit_makes_a_difference() {
        let model = model();
        let (engine, right) = told(&model, &[70, 71, 72]);
        let query = Query {
            top: 2,
            ..Query::greedy("x", 3)
        };
        let check = |change: fn(&mut Answer)| {
            let mut answer = right.clone();
            change(&mut answer);
            check_numbers(&answer, &query, &engine, Door::Completions, &model)
        };
        assert_eq!(check(|_| {}).expect("equal"), 1 + 3 + 3 * 2);
        assert!(check(|a| a.tokens[2].logprob = next_up(a.tokens[2].logprob)).is_err());
        assert!(check(|a| a.tokens[1].id = 73).is_err());
        assert!(check(|a| a.tokens.push(a.tokens[0].clone())).is_err());
        assert!(check(|a| a.tokens[0].text.push(' ')).is_err());
        assert!(check(|a| a.tokens[0].top.values_mut().for_each(|p| *p = next_up(*p))).is_err());
        assert!(check(|a| a.prompt = Some(vec![5, 7])).is_err());
        assert!(check(|a| a.prompt_logprobs = Some(vec![next_up(-0.3)])).is_err());
    }

    #[test]
    fn ends_are_found_where_they_are() {
        let model = model();
        let eos = model.eos_token_ids[0];
        let ids = model.tokenizer.encode_plain("to be or not").expect("text");
        let text = model.tokenizer.decode(&ids, true);
        let end = |query: &Query, ids: &[u32], most| ending(query, most, ids, &model);
        let whole = end(&Query::greedy("x", 9), &ids, ids.len() as u32);
        assert_eq!(
            (whole.text.as_str(), whole.end.clone(), whole.limit_reached),
            (text.as_str(), End::Length, true)
        );
        assert_eq!(whole.reasons(Door::Completions).0, "length");

        let stopped = end(
            &Query {
                stop: vec!["r n".into(), "or".into()],
                ..Query::greedy("x", 9)
            },
            &ids,
            99,
        );
        assert_eq!(
            (stopped.text.as_str(), &stopped.end),
            ("to be ", &End::StopString("or".into()))
        );
        assert_eq!(stopped.reasons(Door::Generate), ("stop_sequence", Value::Null));
        assert_eq!(stopped.reasons(Door::Completions), ("stop", json!("or")));

        let ended = end(&Query::greedy("x", 9), &[&ids[..1], &[eos], &ids[1..]].concat(), 2);
        assert_eq!((ended.tokens, &ended.end, ended.limit_reached), (2, &End::Eos, true));
        assert_eq!(ended.text, model.tokenizer.decode(&ids[..1], true));
        assert_eq!(ended.reasons(Door::Generate).0, "length");
        assert_eq!(ended.reasons(Door::Completions), ("stop", Value::Null));
    }
}
