//! `/v1/completions` as a stream: one chunk for every token, each of one choice; the last one of a choice has its finish
//! reason. At the end `[DONE]`.

use super::answer::{Choice, Counter, Head, Reply, StopReason, UsageField, finish_reason};
use super::echo::Echo;
use super::logprobs::{Logprobs, LogprobsWriter};
use super::request::StreamUsage;
use crate::core::types::Completion;
use crate::http::answer::PromptPart;
use crate::http::error::{ApiError, Family};
use crate::http::shown::Shown;
use crate::http::sse::{Dialect, EventBuffer};

/// What a stream is to say.
pub struct StreamWords {
    /// Id, time, model.
    pub head: Head,
    /// Which chunks carry usage.
    pub usage: StreamUsage,
    /// Choices of each prompt.
    pub per_prompt: usize,
    /// The texts of the prompts, if they are asked for.
    pub echoes: Option<Vec<Echo>>,
    /// The prompts are all that is wanted.
    pub prompt_only: bool,
    /// If log-probabilities are asked for.
    pub logprobs: Option<LogprobsWriter>,
    /// If token ids are asked for.
    pub token_ids: bool,
    /// The usage tells about every step.
    pub timings: bool,
}

/// A stream's words so far.
pub struct CompletionStream {
    words: StreamWords,
    counter: Counter,
    prompts: Vec<PromptState>,
    /// By index.
    choices: Vec<ChoiceState>,
    /// Choices that have not ended.
    open: usize,
}

/// What the chunks of a prompt's choices need of it.
#[derive(Clone, Default)]
struct PromptState {
    tokens: usize,
    cached: u32,
    /// Put in front of the first chunk of each choice.
    text: String,
    logprobs: Logprobs,
    token_ids: Option<Vec<u32>>,
}

#[derive(Clone, Default)]
struct ChoiceState {
    begun: bool,
    /// Characters of the text so far.
    offset: usize,
}

impl CompletionStream {
    /// Nothing has been said yet; there are `prompts` prompts.
    pub fn new(words: StreamWords, prompts: usize) -> Self {
        let choices = prompts * words.per_prompt;
        Self {
            counter: Counter::new(choices, words.timings),
            prompts: vec![PromptState::default(); prompts],
            choices: vec![ChoiceState::default(); choices],
            open: choices,
            words,
        }
    }

    /// A chunk with one token, or with what is left of the text.
    fn chunk(
        &mut self,
        index: usize,
        shown: Option<&Shown>,
        tail: &str,
        end: Option<(&'static str, Option<StopReason>)>,
        events: &mut EventBuffer,
    ) {
        let number = index / self.words.per_prompt.max(1);
        let (Some(prompt), Some(state)) = (self.prompts.get(number), self.choices.get_mut(index)) else {
            return;
        };
        let first = !std::mem::replace(&mut state.begun, true);
        let (mut text, mut logprobs) = if first {
            state.offset = prompt.text.chars().count();
            (prompt.text.clone(), prompt.logprobs.clone())
        } else {
            (String::new(), Logprobs::default())
        };
        if let Some(shown) = shown {
            text.push_str(&shown.text);
            self.counter.add(index, shown.token.step);
            if let Some(writer) = &self.words.logprobs {
                writer.add(shown, &mut state.offset, &mut logprobs);
            }
        }
        text.push_str(tail);
        let ids = || shown.map(|shown| shown.token.sampled.token).into_iter().collect();
        let (finish_reason, stop_reason) = end.unzip();
        self.open -= usize::from(finish_reason.is_some());
        let choice = Choice {
            index,
            text,
            logprobs: self.words.logprobs.is_some().then_some(logprobs),
            finish_reason,
            stop_reason: stop_reason.flatten(),
            token_ids: self.words.token_ids.then(ids),
            prompt_token_ids: prompt.token_ids.clone().filter(|_| first),
            prompt_logprobs: None,
        };
        let usage = match self.words.usage {
            StreamUsage::LastChunk if self.open == 0 => UsageField::Counts(self.counter.total()),
            StreamUsage::LastChunk => UsageField::Absent,
            StreamUsage::Never | StreamUsage::ExtraChunk => UsageField::Null,
            StreamUsage::EveryChunk => UsageField::Counts(self.counter.running(index, prompt.tokens, prompt.cached)),
        };
        self.send(vec![choice], usage, events);
    }

    fn send(&self, choices: Vec<Choice>, usage: UsageField, events: &mut EventBuffer) {
        let reply = Reply {
            head: &self.words.head,
            choices,
            usage,
        };
        if let Err(error) = events.json(&reply) {
            events.text(&error.json(Family::OpenAi));
        }
    }
}

impl Dialect for CompletionStream {
    fn prompt(&mut self, number: usize, prompt: &PromptPart, events: &mut EventBuffer) {
        self.counter.add_prompt(prompt.tokens.len(), prompt.cached_tokens);
        let Some(state) = self.prompts.get_mut(number) else {
            return;
        };
        state.tokens = prompt.tokens.len();
        state.cached = prompt.cached_tokens;
        state.token_ids = self.words.token_ids.then(|| prompt.tokens.to_vec());
        if let Some(echo) = self.words.echoes.as_ref().and_then(|all| all.get(number)) {
            state.text = echo.text().to_owned();
            let writer = self.words.logprobs.as_ref();
            echo.add_logprobs(prompt, writer, &mut 0, &mut state.logprobs);
        }
        if self.words.prompt_only {
            let first = number * self.words.per_prompt;
            for index in first..first + self.words.per_prompt {
                self.chunk(index, None, "", Some(("length", None)), events);
            }
        }
    }

    fn tokens(&mut self, index: usize, shown: Vec<Shown>, events: &mut EventBuffer) {
        for shown in &shown {
            self.chunk(index, Some(shown), "", None, events);
        }
    }

    fn end(&mut self, index: usize, rest: Vec<Shown>, tail: &str, completion: &Completion, events: &mut EventBuffer) {
        let end = Some((finish_reason(completion), StopReason::of(completion)));
        match rest.split_last() {
            Some((last, before)) => {
                for shown in before {
                    self.chunk(index, Some(shown), "", None, events);
                }
                self.chunk(index, Some(last), tail, end, events);
            }
            None => self.chunk(index, None, tail, end, events),
        }
    }

    fn done(&mut self, events: &mut EventBuffer) {
        if matches!(self.words.usage, StreamUsage::ExtraChunk | StreamUsage::EveryChunk) {
            self.send(Vec::new(), UsageField::Counts(self.counter.total()), events);
        }
        events.text("[DONE]");
    }

    fn failed(&mut self, error: &ApiError, events: &mut EventBuffer) {
        events.text(&error.json(Family::OpenAi));
        events.text("[DONE]");
    }
}
