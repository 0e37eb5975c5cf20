//! The JSON of completions: whole answers, chunks, usage.

use protocol::control::StepTiming;
use serde::Serialize;
use utoipa::ToSchema;

use super::logprobs::{Logprobs, PromptLogprobs, RankedToken};
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
    /// All choices; in a chunk one, or none if it carries usage only.
    pub choices: Vec<Choice>,
    /// Counts.
    #[serde(skip_serializing_if = "UsageField::is_absent")]
    pub usage: UsageField,
}

/// One answer to the prompt.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct Choice {
    /// Number of the prompt times choices of a prompt plus number of the choice.
    pub index: usize,
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
    /// Ids of the prompt's tokens, if asked for; in a stream in the choice's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Log-probabilities of the prompt's tokens, if asked for: nothing for the first, then by token id.
    #[schema(value_type = Option<Vec<Option<BTreeMap<String, RankedToken>>>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
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
#[derive(Clone, Debug, Default)]
pub struct Counter {
    prompt_tokens: usize,
    cached_tokens: u32,
    /// Steps of the tokens of each choice.
    steps: Vec<Vec<StepTiming>>,
    completion_tokens: usize,
    /// The totals tell about every step.
    timings: bool,
}

impl Counter {
    /// No prompt and no token yet; `choices` choices. `timings`: whether the totals tell about every step.
    pub fn new(choices: usize, timings: bool) -> Self {
        Self {
            steps: vec![Vec::new(); choices],
            timings,
            ..Self::default()
        }
    }

    /// One more prompt.
    pub fn add_prompt(&mut self, tokens: usize, cached: u32) {
        self.prompt_tokens += tokens;
        self.cached_tokens += cached;
    }

    /// One more token of a choice.
    pub fn add(&mut self, choice: usize, step: StepTiming) {
        if let Some(steps) = self.steps.get_mut(choice) {
            steps.push(step);
            self.completion_tokens += 1;
        }
    }

    /// The counts of one choice, whose prompt has `prompt_tokens` tokens, without the timings of every step.
    pub fn running(&self, choice: usize, prompt_tokens: usize, cached_tokens: u32) -> Usage {
        let completion_tokens = self.steps.get(choice).map_or(0, Vec::len);
        Usage::counts(prompt_tokens, cached_tokens, completion_tokens)
    }

    /// Everything. The timings are those of the longest choice.
    pub fn total(&self) -> Usage {
        let longest = self.steps.iter().rev().max_by_key(|steps| steps.len());
        let longest = longest.filter(|_| self.timings);
        let steps = longest.map(Vec::as_slice).unwrap_or_default();
        Usage {
            batch_size: steps.iter().map(|step| step.batch_size).collect(),
            queue_wait_time: steps.iter().map(|step| step.queue_us).collect(),
            ..Usage::counts(self.prompt_tokens, self.cached_tokens, self.completion_tokens)
        }
    }
}

impl Usage {
    fn counts(prompt_tokens: usize, cached_tokens: u32, completion_tokens: usize) -> Self {
        Self {
            prompt_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            batch_size: Vec::new(),
            queue_wait_time: Vec::new(),
        }
    }
}
