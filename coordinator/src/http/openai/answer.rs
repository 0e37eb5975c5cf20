//! The JSON of completions: whole answers, chunks, usage.

use protocol::control::StepTiming;
use serde::Serialize;
use utoipa::ToSchema;

use super::logprobs::Logprobs;
use crate::core::types::{Completion, Finish};

/// What every answer to a request begins with.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Head {
    /// Name of the request, the same in all chunks.
    pub id: String,
    /// `text_completion`.
    pub object: &'static str,
    /// Seconds since 1970-01-01 UTC.
    pub created: u64,
    /// The model's name, as the client wrote it.
    pub model: String,
}

/// A whole answer, or one chunk of a stream.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reply<'a> {
    /// Id, time, model.
    #[serde(flatten)]
    pub head: &'a Head,
    /// One choice; none in a chunk that carries usage only.
    pub choices: Vec<Choice>,
    /// Counts.
    #[serde(skip_serializing_if = "UsageField::is_absent")]
    pub usage: UsageField,
}

/// One answer to the prompt.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Choice {
    /// 0: there is one choice.
    pub index: u32,
    /// Text, or the part of it that this chunk adds.
    pub text: String,
    /// Null unless asked for.
    pub logprobs: Option<Logprobs>,
    /// `length` or `stop`; null while the choice goes on.
    pub finish_reason: Option<&'static str>,
    /// Stop string or stop token that ended the choice.
    pub stop_reason: Option<StopReason>,
    /// Ids of the tokens of `text`, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Ids of the prompt's tokens, if asked for; in a stream in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// What ended a choice, beside the length and the model's own end token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum StopReason {
    /// A stop string.
    Text(String),
    /// A stop token.
    Token(u32),
}

impl StopReason {
    /// What `completion` names.
    pub fn of(completion: &Completion) -> Option<Self> {
        match &completion.finish {
            Finish::Length | Finish::Eos => None,
            Finish::StopToken(token) => Some(Self::Token(*token)),
            Finish::StopString(text) => Some(Self::Text(text.clone())),
        }
    }
}

/// Why a choice ended, in OpenAI's words. A stop on the last permitted token is a stop.
pub fn finish_reason(completion: &Completion) -> &'static str {
    match completion.finish {
        Finish::Length => "length",
        Finish::Eos | Finish::StopToken(_) | Finish::StopString(_) => "stop",
    }
}

/// Whether a reply has `usage`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum UsageField {
    /// No such key.
    #[serde(skip)]
    Absent,
    /// Null.
    Null,
    /// Counts.
    Counts(Usage),
}

impl UsageField {
    /// True if there is no such key.
    pub fn is_absent(&self) -> bool {
        *self == Self::Absent
    }
}

/// Counts and timings of a request.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// About them.
    pub prompt_tokens_details: PromptTokensDetails,
    /// Tokens of the answer, sampled on all nodes.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    /// Sequences in the step of each token; entry 0 is the prefill's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub batch_size: Vec<u32>,
    /// Microseconds that each token waited for its step.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub queue_wait_time: Vec<u64>,
}

/// Part of [`Usage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptTokensDetails {
    /// Prompt tokens taken from the prefix cache.
    pub cached_tokens: u32,
}

/// Counts while an answer goes on.
#[derive(Clone, Debug)]
pub struct Counter {
    prompt_tokens: usize,
    cached_tokens: u32,
    steps: Vec<StepTiming>,
    timings: bool,
}

impl Counter {
    /// No token yet.
    pub fn new(prompt_tokens: usize, cached_tokens: u32) -> Self {
        Self {
            prompt_tokens,
            cached_tokens,
            steps: Vec::new(),
            timings: true,
        }
    }

    /// `timings`: whether the totals tell about every step.
    pub fn with_timings(mut self, timings: bool) -> Self {
        self.timings = timings;
        self
    }

    /// One more token.
    pub fn add(&mut self, step: StepTiming) {
        self.steps.push(step);
    }

    /// The counts, without the timings of every step: those of a choice that goes on.
    pub fn running(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            prompt_tokens_details: PromptTokensDetails {
                cached_tokens: self.cached_tokens,
            },
            completion_tokens: self.steps.len(),
            total_tokens: self.prompt_tokens + self.steps.len(),
            batch_size: Vec::new(),
            queue_wait_time: Vec::new(),
        }
    }

    /// Everything.
    pub fn total(&self) -> Usage {
        if !self.timings {
            return self.running();
        }
        Usage {
            batch_size: self.steps.iter().map(|step| step.batch_size).collect(),
            queue_wait_time: self.steps.iter().map(|step| step.queue_us).collect(),
            ..self.running()
        }
    }
}
