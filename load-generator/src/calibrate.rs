//! How many tokens words are for a server: by its tokenizer where it has one to ask, else by the usage of first requests.

use runtime::clock::Clock;
use serde_json::{Value, json};

use crate::client::{Client, Shot};
use crate::core::dialect::Form;
use crate::core::prompts::{CANDIDATES, Lexicon, MIN_TOKENS_PER_WORD};
use crate::core::record::Outcome;

/// With at least so many words of one token each, prompts are made of them alone and have exactly the tokens they should.
const ENOUGH_WORDS: usize = 24;
/// Words of the prompts that are sent to see what the server counts.
const PROBES: [usize; 2] = [32, 96];
/// Words of the text that tells the mean length of a word.
const SAMPLE: usize = 400;

/// What is known of a server's tokens.
#[derive(Debug)]
pub struct Calibration {
    /// Words and their tokens.
    pub lexicon: Lexicon,
    /// How that is known.
    pub how: How,
}

/// How the number of tokens of a prompt is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Every word is one token, by the server's tokenizer.
    Exact,
    /// By the server's tokenizer, on average.
    Tokenizer,
    /// By the usage of requests, on average.
    Usage,
    /// Not at all: a word is taken for a token.
    Unknown,
}

impl How {
    /// For people.
    pub fn words(self) -> &'static str {
        match self {
            Self::Exact => "exact: every word is one token, by the server's tokenizer",
            Self::Tokenizer => "on average, by the server's tokenizer",
            Self::Usage => "on average, by the usage that the server counts",
            Self::Unknown => "unknown: the server counts no prompt tokens; a word is taken for a token",
        }
    }
}

/// Why a server cannot be measured at all.
#[derive(Debug, thiserror::Error)]
#[error("{dialect} at {url} does not work: {why}")]
pub struct NoAnswer {
    /// The dialect that was spoken.
    pub dialect: &'static str,
    /// Where.
    pub url: String,
    /// What came instead of an answer.
    pub why: String,
}

/// Asks the server. Errors if it does not answer a first request of the form that is to be measured.
pub async fn calibrate(client: &Client, form: &Form, url: &str) -> Result<Calibration, NoAnswer> {
    let failed = |why| NoAnswer {
        dialect: form.dialect.name(),
        url: url.to_owned(),
        why,
    };
    let (lexicon, known) = match by_tokenizer(client, form).await {
        Some((lexicon, how)) => (lexicon, Some(how)),
        None => (Lexicon::unknown(), None),
    };
    let mut counts = Vec::new();
    for (number, words) in (0_u64..).zip(PROBES) {
        counts.push(
            probe(client, form, &lexicon.text(number, words))
                .await
                .map_err(failed)?,
        );
    }
    let &[Some(few), Some(many)] = counts.as_slice() else {
        let how = known.unwrap_or(How::Unknown);
        return Ok(Calibration { lexicon, how });
    };
    let [few_words, many_words] = PROBES.map(|words| words as f64);
    let (few, many) = (f64::from(few), f64::from(many));
    let slope = match known {
        Some(_) => lexicon.tokens_per_word(),
        None => (many - few) / (many_words - few_words),
    };
    if slope < MIN_TOKENS_PER_WORD {
        // Numbers that do not grow with the prompt count something else.
        let how = How::Unknown;
        return Ok(Calibration { lexicon, how });
    }
    // What a prompt has beside its words: a first token, a chat template.
    let overhead = ((few - slope * few_words) + (many - slope * many_words)) / 2.0;
    Ok(Calibration {
        lexicon: lexicon.counted(slope, overhead.round()),
        how: known.unwrap_or(How::Usage),
    })
}

/// Sends a prompt for one token; the tokens that the server counts in it.
async fn probe(client: &Client, form: &Form, prompt: &str) -> Result<Option<u32>, String> {
    let now = Clock.now();
    let shot = Shot {
        index: 0,
        intended: now,
        body: form.body(prompt, 1).into(),
        asked_input: None,
        asked_output: 1,
    };
    let record = client.ask(form, shot, now, |_| {}).await;
    match record.outcome {
        Outcome::Done => Ok(record.prompt_tokens),
        Outcome::Failed(failure, words) => Err(format!("{failure}: {words}")),
        Outcome::Aborted => Err("interrupted".to_owned()),
    }
}

async fn by_tokenizer(client: &Client, form: &Form) -> Option<(Lexicon, How)> {
    let candidates: Vec<&str> = CANDIDATES.split_whitespace().collect();
    // One question tells whether there is a tokenizer at all.
    count(client, form, &candidates.join(" ")).await?;
    let mut words = Vec::new();
    for word in &candidates {
        // At the start of a text and after a space it may be other tokens.
        if count(client, form, &[*word; 4].join(" ")).await? == 4 {
            words.push((*word).to_owned());
        }
    }
    if words.len() >= ENOUGH_WORDS {
        let lexicon = Lexicon::new(words, 1.0, 0.0).ok()?;
        if count(client, form, &lexicon.text(0, SAMPLE)).await? as usize == SAMPLE {
            return Some((lexicon, How::Exact));
        }
    }
    let lexicon = Lexicon::unknown();
    let tokens = count(client, form, &lexicon.text(0, SAMPLE)).await?;
    let per_word = f64::from(tokens) / SAMPLE as f64;
    Some((lexicon.counted(per_word, 0.0), How::Tokenizer))
}

/// Tokens of a text without special ones, by `/tokenize`: the question in the words of vLLM, llama.cpp and TGI at once, as each
/// ignores those of the others. None if there is no such path or it answers something else.
async fn count(client: &Client, form: &Form, text: &str) -> Option<u32> {
    let mut question = json!({
        "prompt": text, "content": text, "inputs": text,
        "add_special_tokens": false, "add_special": false,
    });
    if form.dialect.is_openai() {
        question["model"] = Value::from(form.model.as_str());
    }
    let (status, body) = client
        .call("/tokenize", Some(question.to_string().into_bytes()))
        .await
        .ok()?;
    if status != 200 {
        return None;
    }
    let answer: Value = serde_json::from_slice(&body).ok()?;
    let length = |list: &Value| list.as_array().map(|list| list.len() as u64);
    let count = answer["count"]
        .as_u64()
        .or_else(|| length(&answer["tokens"]))
        .or_else(|| length(&answer));
    count.and_then(|count| u32::try_from(count).ok())
}

/// The first model that the server lists.
pub async fn first_model(client: &Client) -> Result<String, String> {
    let (status, body) = client.call("/v1/models", None).await?;
    if status != 200 {
        return Err(format!("status {status}"));
    }
    let answer: Value = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
    answer["data"][0]["id"]
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| "it lists no model".to_owned())
}
