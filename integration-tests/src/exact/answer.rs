//! An answer of any endpoint. Reading one checks what must hold inside every answer: counts agree with each other, with
//! the tokens and with the events; texts add up; only the last event has an end.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use reqwest::Client;
use serde_json::Value;

use super::query::Query;
use super::shape::{Choice, Completion, Logprobs, TgiEvent, TgiToken, TgiWhole, Usage};
use crate::ask::Door;
use crate::client::events;

/// One token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Id.
    pub id: u32,
    /// TGI: its part of the visible text, or a special token's name. OpenAI: what it adds, special tokens by their name.
    pub text: String,
    /// TGI: after penalties, temperature and filters. OpenAI: raw.
    pub logprob: f32,
    /// TGI only.
    pub special: Option<bool>,
    /// OpenAI only: characters of the visible text before it.
    pub offset: Option<usize>,
    /// OpenAI only: itself and the alternatives, by text.
    pub top: BTreeMap<String, f32>,
}

/// See the head of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// Why it ends, in the door's words.
    pub finish: String,
    /// OpenAI only: what stopped it.
    pub stop_reason: Value,
    /// All tokens.
    pub tokens: Vec<Token>,
    /// Number of the prompt's tokens.
    pub prompt_tokens: usize,
    /// The prompt's tokens: ids, where the door tells them.
    pub prompt: Option<Vec<u32>>,
    /// Their log-probabilities from the second on, if asked for.
    pub prompt_logprobs: Option<Vec<f32>>,
    /// Of the prompt's tokens, how many were in the prefix cache; OpenAI only.
    pub cached_tokens: Option<usize>,
    /// The visible text of every event, if there were events.
    pub pieces: Option<Vec<String>>,
}

impl Answer {
    /// Token ids.
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    /// The same answer as from a door of the same family that does not stream and tells nothing of the prompt, by a
    /// cluster that has not been asked before.
    #[must_use]
    pub fn plain(mut self) -> Self {
        (self.prompt, self.prompt_logprobs, self.pieces) = (None, None, None);
        self.cached_tokens = None;
        self
    }
}

/// Sends a request and reads its answer.
///
/// # Errors
/// The status is not 200, or the answer contradicts itself; the error holds the answer.
pub async fn ask(client: &Client, url: &str, query: &Query, door: Door) -> Result<Answer> {
    ensure!(
        query.belongs_to(door),
        "{door:?} does not have every field of {query:?}"
    );
    let body = query.body(door);
    let response = client.post(format!("{url}{}", door.path())).json(&body).send().await?;
    let status = response.status();
    if status != 200 {
        anyhow::bail!("{door:?} answers {body} with {status}: {}", response.text().await?);
    }
    let (raw, read) = if door.is_stream() {
        let events = events(response).await?;
        let read = if door.is_tgi() {
            tgi_stream(&events, query)
        } else {
            openai_stream(&events, query)
        };
        (events.join("\n"), read)
    } else {
        let text = response.text().await?;
        let read = if door.is_tgi() {
            tgi_whole(&text, query)
        } else {
            openai_whole(&text, query)
        };
        (text, read)
    };
    read.with_context(|| format!("{door:?} answers {body} with {raw}"))
}

fn tgi_token(token: &TgiToken) -> Result<Token> {
    let logprob = token
        .logprob
        .as_ref()
        .context("a token without a log-probability")?
        .value()?;
    Ok(Token {
        id: token.id,
        text: token.text.clone(),
        logprob,
        special: Some(token.special),
        offset: None,
        top: BTreeMap::new(),
    })
}

/// The visible text of each token; together they must be `text`.
fn visible_pieces(tokens: &[Token], text: &str) -> Result<Vec<String>> {
    let visible = |token: &Token| {
        if token.special == Some(true) {
            String::new()
        } else {
            token.text.clone()
        }
    };
    let mut pieces: Vec<String> = tokens.iter().map(visible).collect();
    // A character that is torn at the very end is told in front of the name of a special token that ends the answer.
    if let Some(last) = tokens.last()
        && last.special == Some(true)
        && last.text.starts_with(char::REPLACEMENT_CHARACTER)
        && let Some(piece) = pieces.last_mut()
    {
        piece.push(char::REPLACEMENT_CHARACTER);
    }
    ensure!(pieces.concat() == text, "the tokens' texts make {:?}", pieces.concat());
    Ok(pieces)
}

fn tgi_whole(text: &str, query: &Query) -> Result<Answer> {
    let TgiWhole {
        details,
        generated_text,
    } = serde_json::from_str(text)?;
    ensure!(
        details.generated_tokens == details.tokens.len(),
        "generated_tokens is not the number of tokens"
    );
    ensure!(
        details.prompt_tokens == details.input_length,
        "prompt_tokens is not input_length"
    );
    ensure!(details.seed == query.draw.seed, "seed {}", details.seed);
    let tokens = details.tokens.iter().map(tgi_token).collect::<Result<Vec<_>>>()?;
    visible_pieces(&tokens, &generated_text)?;
    let (mut prompt, mut prompt_logprobs) = (None, None);
    if query.prompt_logprobs {
        let prefill = &details.prefill;
        ensure!(
            prefill.len() == details.prompt_tokens,
            "{} entries in prefill",
            prefill.len()
        );
        ensure!(
            prefill[0].logprob.is_none(),
            "the first token of a prompt has a log-probability"
        );
        let rest = prefill[1..].iter().map(tgi_token).collect::<Result<Vec<_>>>()?;
        prompt = Some(prefill.iter().map(|token| token.id).collect());
        prompt_logprobs = Some(rest.iter().map(|token| token.logprob).collect());
    } else {
        ensure!(details.prefill.is_empty(), "prefill was not asked for");
    }
    Ok(Answer {
        text: generated_text,
        finish: details.finish_reason,
        stop_reason: Value::Null,
        tokens,
        prompt_tokens: details.prompt_tokens,
        prompt,
        prompt_logprobs,
        cached_tokens: None,
        pieces: None,
    })
}

fn tgi_stream(events: &[String], query: &Query) -> Result<Answer> {
    let events: Vec<TgiEvent> = events
        .iter()
        .map(|event| serde_json::from_str(event))
        .collect::<Result<_, _>>()?;
    let (last, before) = events.split_last().context("no event")?;
    ensure!(
        before.iter().all(|e| e.generated_text.is_none() && e.details.is_none()),
        "an end before the end"
    );
    let details = last.details.as_ref().context("the last event has no details")?;
    let text = last
        .generated_text
        .clone()
        .context("the last event has no generated_text")?;
    ensure!(
        details.generated_tokens == events.len(),
        "generated_tokens is not the number of events"
    );
    ensure!(
        details.prompt_tokens == details.input_length,
        "prompt_tokens is not input_length"
    );
    ensure!(details.seed == query.draw.seed, "seed {}", details.seed);
    let tokens = events
        .iter()
        .map(|event| tgi_token(&event.token))
        .collect::<Result<Vec<_>>>()?;
    let pieces = visible_pieces(&tokens, &text)?;
    Ok(Answer {
        text,
        finish: details.finish_reason.clone(),
        stop_reason: Value::Null,
        tokens,
        prompt_tokens: details.prompt_tokens,
        prompt: None,
        prompt_logprobs: None,
        cached_tokens: None,
        pieces: Some(pieces),
    })
}

fn openai_tokens(ids: &[u32], logprobs: &Logprobs) -> Result<Vec<Token>> {
    let lengths = [
        logprobs.tokens.len(),
        logprobs.token_logprobs.len(),
        logprobs.top_logprobs.len(),
        logprobs.text_offset.len(),
    ];
    ensure!(
        lengths.iter().all(|length| *length == ids.len()),
        "{} tokens, logprobs of {lengths:?}",
        ids.len()
    );
    let entry = |i: usize| -> Result<Token> {
        let top = logprobs.top_logprobs[i]
            .iter()
            .map(|(text, p)| Ok((text.clone(), p.value()?)));
        Ok(Token {
            id: ids[i],
            text: logprobs.tokens[i].clone(),
            logprob: logprobs.token_logprobs[i].value()?,
            special: None,
            offset: Some(logprobs.text_offset[i]),
            top: top.collect::<Result<_>>()?,
        })
    };
    (0..ids.len()).map(entry).collect()
}

fn check_usage(usage: &Usage, prompt: &[u32], tokens: usize) -> Result<()> {
    ensure!(
        usage.completion_tokens == tokens,
        "completion_tokens is {}, tokens {tokens}",
        usage.completion_tokens
    );
    ensure!(
        usage.prompt_tokens == prompt.len(),
        "prompt_tokens is {}",
        usage.prompt_tokens
    );
    ensure!(
        usage.total_tokens == prompt.len() + tokens,
        "total_tokens is {}",
        usage.total_tokens
    );
    ensure!(
        usage.prompt_tokens_details.cached_tokens < prompt.len(),
        "the last token of a prompt is computed: {usage:?}"
    );
    ensure!(
        usage.batch_size.len() == tokens && usage.queue_wait_time.len() == tokens,
        "one entry for every step"
    );
    ensure!(
        usage.batch_size.iter().all(|size| *size > 0),
        "a step without sequences"
    );
    Ok(())
}

fn check_head(head: &Completion, query: &Query) -> Result<()> {
    ensure!(
        head.object == "text_completion" && head.model == query.model() && !head.id.is_empty(),
        "head {head:?}"
    );
    ensure!(
        head.choices.len() == 1 && head.choices[0].index == 0,
        "one choice was asked for"
    );
    Ok(())
}

fn openai_whole(text: &str, query: &Query) -> Result<Answer> {
    let completion: Completion = serde_json::from_str(text)?;
    check_head(&completion, query)?;
    let choice = &completion.choices[0];
    let ids = choice.token_ids.as_ref().context("no token_ids")?;
    let prompt = choice.prompt_token_ids.clone().context("no prompt_token_ids")?;
    let usage = completion.usage.as_ref().context("no usage")?;
    check_usage(usage, &prompt, ids.len())?;
    Ok(Answer {
        text: choice.text.clone(),
        finish: choice.finish_reason.clone().context("no finish_reason")?,
        stop_reason: choice.stop_reason.clone(),
        tokens: openai_tokens(ids, choice.logprobs.as_ref().context("no logprobs")?)?,
        prompt_tokens: prompt.len(),
        prompt: Some(prompt),
        prompt_logprobs: None,
        cached_tokens: Some(usage.prompt_tokens_details.cached_tokens),
        pieces: None,
    })
}

fn openai_stream(events: &[String], query: &Query) -> Result<Answer> {
    let (done, events) = events.split_last().context("no event")?;
    ensure!(done == "[DONE]", "the last event is {done}");
    let chunks: Vec<Completion> = events
        .iter()
        .map(|event| serde_json::from_str(event))
        .collect::<Result<_, _>>()?;
    let (last, before) = chunks.split_last().context("no chunk")?;
    chunks.iter().try_for_each(|chunk| check_head(chunk, query))?;
    ensure!(
        chunks.iter().all(|c| c.id == last.id && c.created == last.created),
        "the head changes in the stream"
    );
    let unfinished = |c: &Completion| c.choices[0].finish_reason.is_none() && c.choices[0].stop_reason.is_null();
    ensure!(
        before.iter().all(|c| unfinished(c) && c.usage.is_none()),
        "an end before the end"
    );
    let choices: Vec<&Choice> = chunks.iter().map(|chunk| &chunk.choices[0]).collect();
    let prompt = choices[0]
        .prompt_token_ids
        .clone()
        .context("no prompt_token_ids in the first chunk")?;
    ensure!(
        choices[1..].iter().all(|c| c.prompt_token_ids.is_none()),
        "prompt_token_ids again"
    );
    let mut tokens = Vec::new();
    for choice in &choices {
        let ids = choice.token_ids.as_ref().context("a chunk without token_ids")?;
        ensure!(ids.len() == 1, "a chunk with {} tokens", ids.len());
        tokens.extend(openai_tokens(
            ids,
            choice.logprobs.as_ref().context("a chunk without logprobs")?,
        )?);
    }
    let usage = last.usage.as_ref().context("no usage in the last chunk")?;
    check_usage(usage, &prompt, chunks.len())?;
    let end = &last.choices[0];
    let pieces: Vec<String> = choices.iter().map(|choice| choice.text.clone()).collect();
    let mut offset = 0;
    for (token, piece) in tokens.iter().zip(&pieces) {
        ensure!(token.offset == Some(offset), "{token:?} is at {offset}");
        offset += piece.chars().count();
    }
    Ok(Answer {
        text: pieces.concat(),
        finish: end
            .finish_reason
            .clone()
            .context("no finish_reason in the last chunk")?,
        stop_reason: end.stop_reason.clone(),
        tokens,
        prompt_tokens: prompt.len(),
        prompt: Some(prompt),
        prompt_logprobs: None,
        cached_tokens: Some(usage.prompt_tokens_details.cached_tokens),
        pieces: Some(pieces),
    })
}
