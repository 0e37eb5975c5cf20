//! Requests of all endpoints and kinds, and what may come back: an answer, a documented error, or something that may not.

use anyhow::{Context, Result, bail, ensure};
use reqwest::Client;
use serde_json::{Value, json};

use crate::client::{events, json_events};
use crate::random::Random;

/// `model.model_name` of the clusters that are asked.
pub const MODEL_NAME: &str = "tiny";

/// Which door a request takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// `POST /generate`.
    Generate,
    /// `POST /generate_stream`.
    GenerateStream,
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/completions` with `stream`.
    CompletionsStream,
}

impl Door {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self::Generate,
        Self::GenerateStream,
        Self::Completions,
        Self::CompletionsStream,
    ];
    /// Those that stream.
    pub const STREAMS: [Self; 2] = [Self::GenerateStream, Self::CompletionsStream];

    /// The path.
    pub fn path(self) -> &'static str {
        match self {
            Self::Generate => "/generate",
            Self::GenerateStream => "/generate_stream",
            Self::Completions | Self::CompletionsStream => "/v1/completions",
        }
    }

    /// True for the doors of TGI; the others are OpenAI's.
    pub fn is_tgi(self) -> bool {
        matches!(self, Self::Generate | Self::GenerateStream)
    }

    /// True if it answers with events.
    pub fn is_stream(self) -> bool {
        matches!(self, Self::GenerateStream | Self::CompletionsStream)
    }
}

/// A request.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Where it goes.
    pub door: Door,
    /// What it says.
    pub body: Value,
}

/// A whole answer, in the words that all doors share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// The text.
    pub text: String,
    /// Why it ends there.
    pub finish: String,
    /// Token ids.
    pub ids: Vec<u64>,
    /// The further choices, in their order.
    pub others: Vec<Self>,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A whole answer.
    Whole(Reply),
    /// An error with a status that the API documents, and its word.
    Refused {
        /// The status.
        status: u16,
        /// The word for the kind of error.
        word: String,
        /// What it says.
        message: String,
        /// `Retry-After`, in seconds.
        retry_after: Option<u64>,
    },
    /// A stream that ended with an error event.
    Failed {
        /// The word for the kind of error.
        word: String,
        /// What it says.
        message: String,
        /// What had come before.
        text: String,
        /// The ids of what had come before.
        ids: Vec<u64>,
    },
    /// The connection failed before or while the answer came.
    Unreachable(String),
    /// Something that no documentation allows.
    Undocumented(String),
}

/// Statuses and words that may be the answer to a request that is right in itself.
const DOCUMENTED: [(u16, &str); 6] = [
    (424, "generation"),
    (429, "overloaded"),
    (503, "unavailable"),
    (429, "rate_limit_exceeded"),
    (500, "InternalServerError"),
    (503, "ServiceUnavailableError"),
];

const WORDS: [&str; 16] = [
    "the", "baton", "is", "handed", "over", "and", "never", "dropped", "while", "runners", "change", "places", "on",
    "a", "long", "track",
];

impl Ask {
    /// A request through `door` for at most `tokens` tokens after a prompt of `words` words. Every other one is sampled,
    /// with a seed of its own.
    pub fn new(random: &mut Random, door: Door, words: u64, tokens: u64) -> Self {
        let prompt: Vec<&str> = (0..words.max(1)).map(|_| *random.pick(&WORDS)).collect();
        let prompt = prompt.join(" ");
        let seed = (random.below(2) == 1).then(|| random.between(1, 1 << 30));
        let body = match door {
            Door::Generate | Door::GenerateStream => {
                let mut parameters = json!({ "max_new_tokens": tokens, "details": true });
                if let Some(seed) = seed {
                    parameters["do_sample"] = json!(true);
                    parameters["seed"] = json!(seed);
                    parameters["temperature"] = json!(0.8);
                }
                json!({ "inputs": prompt, "parameters": parameters })
            }
            Door::Completions | Door::CompletionsStream => {
                let mut body = json!({
                    "model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": true,
                    "return_token_ids": true, "stream": door.is_stream(),
                });
                if let Some(seed) = seed {
                    body["temperature"] = json!(0.8);
                    body["seed"] = json!(seed);
                }
                body
            }
        };
        Self { door, body }
    }

    /// A request of OpenAI's for two sampled choices with a seed, and stop strings that some of the answers meet.
    pub fn demanding(random: &mut Random, words: u64, tokens: u64) -> Self {
        let door = *random.pick(&[Door::Completions, Door::CompletionsStream]);
        let mut ask = Self::new(random, door, words, tokens);
        ask.body["temperature"] = json!(0.9);
        ask.body["seed"] = json!(random.between(1, 1 << 30));
        ask.body["n"] = json!(2);
        // Two letters, as the tiny model's text is: now and then one comes up.
        let letters = b"abcdefghijklmnopqrstuvwxyz";
        let mut pair = || {
            [*random.pick(letters), *random.pick(letters)]
                .map(char::from)
                .iter()
                .collect::<String>()
        };
        ask.body["stop"] = json!([pair(), pair(), pair(), pair()]);
        ask
    }

    /// Requests through all doors with prompts of up to `words` words and answers of `tokens.0` to `tokens.1` tokens.
    pub fn mixed(random: &mut Random, count: usize, words: u64, tokens: (u64, u64)) -> Vec<Self> {
        let doors = Door::ALL.iter().cycle().take(count);
        doors
            .map(|door| {
                let (words, tokens) = (random.between(1, words), random.between(tokens.0, tokens.1));
                Self::new(random, *door, words, tokens)
            })
            .collect()
    }

    /// Sends the request and reads the answer to its end.
    pub async fn send(&self, client: &Client, url: &str) -> Outcome {
        let sent = client
            .post(format!("{url}{}", self.door.path()))
            .json(&self.body)
            .send()
            .await;
        let answer = match sent {
            Ok(answer) => answer,
            Err(error) => return Outcome::Unreachable(format!("{error:?}")),
        };
        let status = answer.status().as_u16();
        let retry_after = answer
            .headers()
            .get("retry-after")
            .and_then(|v| v.to_str().ok()?.parse().ok());
        if status == 200 && self.door.is_stream() {
            return match events(answer).await {
                Ok(events) => self.read_events(&events).unwrap_or_else(undocumented),
                Err(error) => Outcome::Unreachable(format!("{error:#}")),
            };
        }
        let text = match answer.text().await {
            Ok(text) => text,
            Err(error) => return Outcome::Unreachable(format!("{error:?}")),
        };
        let read = match status {
            200 => self.read_whole(&text),
            _ => refused(status, retry_after, &text),
        };
        read.unwrap_or_else(undocumented)
    }

    fn read_whole(&self, text: &str) -> Result<Outcome> {
        let body: Value = serde_json::from_str(text).with_context(|| format!("200, not JSON: {text}"))?;
        let (text, finish, ids, count) = match self.door {
            Door::Generate | Door::GenerateStream => {
                let details = &body["details"];
                let ids = details["tokens"].as_array().context("no details.tokens")?;
                let ids = ids.iter().map(|token| &token["id"]).cloned().collect::<Vec<Value>>();
                (
                    &body["generated_text"],
                    &details["finish_reason"],
                    ids,
                    &details["generated_tokens"],
                )
            }
            Door::Completions | Door::CompletionsStream => {
                let choices = body["choices"].as_array().context("no choices")?;
                let replies: Result<Vec<Reply>> = choices.iter().map(read_choice).collect();
                let replies = replies?;
                let counted: usize = replies.iter().map(|reply| reply.ids.len()).sum();
                let count = &body["usage"]["completion_tokens"];
                ensure!(*count == json!(counted), "{count} tokens counted, {counted} there");
                return Ok(Outcome::Whole(together(replies)?));
            }
        };
        let ids = numbers(&ids)?;
        ensure!(
            count.as_u64() == Some(ids.len() as u64),
            "{count} tokens counted, {} there",
            ids.len()
        );
        Ok(Outcome::Whole(Reply {
            text: string(text)?,
            finish: string(finish)?,
            ids,
            others: Vec::new(),
        }))
    }

    fn read_events(&self, events: &[String]) -> Result<Outcome> {
        match self.door {
            Door::Generate | Door::GenerateStream => read_tokens(&json_events(events)?),
            Door::Completions | Door::CompletionsStream => read_chunks(events),
        }
    }
}

fn undocumented(error: anyhow::Error) -> Outcome {
    Outcome::Undocumented(format!("{error:#}"))
}

fn string(value: &Value) -> Result<String> {
    Ok(value
        .as_str()
        .with_context(|| format!("{value} is no string"))?
        .to_owned())
}

fn numbers(values: &[Value]) -> Result<Vec<u64>> {
    values
        .iter()
        .map(|value| value.as_u64().with_context(|| format!("{value} is no token id")))
        .collect()
}

/// The word of an error body or event of either family.
fn word(body: &Value) -> Result<String> {
    let word = if body["error"].is_object() {
        &body["error"]["type"]
    } else {
        &body["error_type"]
    };
    word.as_str()
        .map(ToOwned::to_owned)
        .with_context(|| format!("not an error of either family: {body}"))
}

/// What an error body or event of either family says.
fn message(body: &Value) -> String {
    let text = if body["error"].is_object() {
        &body["error"]["message"]
    } else {
        &body["error"]
    };
    text.as_str().unwrap_or_default().to_owned()
}

fn refused(status: u16, retry_after: Option<u64>, text: &str) -> Result<Outcome> {
    let body: Value = serde_json::from_str(text).with_context(|| format!("{status}, not JSON: {text}"))?;
    let word = word(&body)?;
    ensure!(DOCUMENTED.contains(&(status, word.as_str())), "status {status}: {body}");
    ensure!(
        status != 429 || retry_after.is_some_and(|s| s >= 1),
        "429 with Retry-After {retry_after:?}"
    );
    Ok(Outcome::Refused {
        status,
        message: message(&body),
        word,
        retry_after,
    })
}

fn failed(event: &Value, last: bool, text: String, ids: Vec<u64>) -> Result<Outcome> {
    ensure!(last, "something follows an error event: {event}");
    let word = word(event)?;
    ensure!(
        DOCUMENTED.iter().any(|(_, known)| *known == word),
        "error event: {event}"
    );
    Ok(Outcome::Failed {
        message: message(event),
        word,
        text,
        ids,
    })
}

fn read_tokens(events: &[Value]) -> Result<Outcome> {
    let (mut ids, mut text) = (Vec::new(), String::new());
    for (i, event) in events.iter().enumerate() {
        let last = i + 1 == events.len();
        if event.get("error").is_some() {
            return failed(event, last, text, ids);
        }
        ids.push(
            event["token"]["id"]
                .as_u64()
                .with_context(|| format!("no token in {event}"))?,
        );
        if event["token"]["special"] == json!(false) {
            text.push_str(&string(&event["token"]["text"])?);
        }
        let Some(whole) = event["generated_text"].as_str() else {
            continue;
        };
        ensure!(last, "events follow the last one");
        let details = &event["details"];
        ensure!(
            details["generated_tokens"] == json!(ids.len()),
            "{} events, {details}",
            ids.len()
        );
        // What is left of an incomplete character belongs to the last token, which may be a special one.
        ensure!(whole.starts_with(&text), "the events say {text:?}, the end {whole:?}");
        return Ok(Outcome::Whole(Reply {
            text: whole.to_owned(),
            finish: string(&details["finish_reason"])?,
            ids,
            others: Vec::new(),
        }));
    }
    bail!("a stream of {} events without an end", events.len())
}

/// A choice of a whole completion.
fn read_choice(choice: &Value) -> Result<Reply> {
    Ok(Reply {
        text: string(&choice["text"])?,
        finish: string(&choice["finish_reason"])?,
        ids: numbers(choice["token_ids"].as_array().context("no token_ids")?)?,
        others: Vec::new(),
    })
}

/// The first of several choices, with the others.
fn together(mut replies: Vec<Reply>) -> Result<Reply> {
    ensure!(!replies.is_empty(), "no choices");
    let others = replies.split_off(1);
    Ok(Reply {
        others,
        ..replies.remove(0)
    })
}

fn read_chunks(events: &[String]) -> Result<Outcome> {
    let mut replies: Vec<Reply> = Vec::new();
    for (i, event) in events.iter().enumerate() {
        let last = i + 1 == events.len();
        if event == "[DONE]" {
            ensure!(last, "events follow [DONE]");
            ensure!(
                replies.iter().all(|reply| !reply.finish.is_empty()),
                "[DONE] without a finish reason"
            );
            return Ok(Outcome::Whole(together(replies)?));
        }
        let chunk: Value = serde_json::from_str(event).with_context(|| format!("not JSON: {event}"))?;
        if chunk.get("error").is_some() {
            let first = replies.into_iter().next();
            let (text, ids) = first.map(|reply| (reply.text, reply.ids)).unwrap_or_default();
            return failed(&chunk, last || events[i + 1..] == ["[DONE]"], text, ids);
        }
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().context("no index")? as usize;
        ensure!(index < 16, "choice {index}");
        while replies.len() <= index {
            replies.push(Reply::default());
        }
        let reply = &mut replies[index];
        ensure!(reply.finish.is_empty(), "choice {index} goes on after its end");
        reply.text.push_str(&string(&choice["text"])?);
        if let Some(more) = choice["token_ids"].as_array() {
            reply.ids.extend(numbers(more)?);
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            reason.clone_into(&mut reply.finish);
        }
    }
    bail!("a stream of {} chunks without [DONE]", events.len())
}
