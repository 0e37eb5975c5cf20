//! `/v1/completions` as a stream: one chunk for every token, the last one with the finish reason, then `[DONE]`.

use super::answer::{Choice, Counter, Head, Reply, StopReason, UsageField, finish_reason};
use super::logprobs::{Logprobs, LogprobsWriter};
use super::request::StreamUsage;
use crate::core::types::Completion;
use crate::http::error::{ApiError, Family};
use crate::http::shown::Shown;
use crate::http::sse::{Dialect, EventBuffer};

/// A stream's words so far.
pub struct CompletionStream {
    /// Id, time, model.
    pub head: Head,
    /// Which chunks carry usage.
    pub usage: StreamUsage,
    /// Counts so far.
    pub counter: Counter,
    /// If log-probabilities are asked for.
    pub logprobs: Option<LogprobsWriter>,
    /// If token ids are asked for.
    pub token_ids: bool,
    /// The prompt's ids, for the first chunk.
    pub prompt_token_ids: Option<Vec<u32>>,
}

impl CompletionStream {
    /// A chunk with one token, or with what is left of the text.
    fn chunk(&mut self, shown: Option<&Shown>, tail: &str, completion: Option<&Completion>, events: &mut EventBuffer) {
        let mut text = shown.map(|shown| shown.text.clone()).unwrap_or_default();
        text.push_str(tail);
        if let Some(shown) = shown {
            self.counter.add(shown.token.step);
        }
        let logprobs = self.logprobs.as_mut().map(|writer| {
            let mut logprobs = Logprobs::default();
            if let Some(shown) = shown {
                writer.add(shown, &mut logprobs);
            }
            logprobs
        });
        let choice = Choice {
            index: 0,
            text,
            logprobs,
            finish_reason: completion.map(finish_reason),
            stop_reason: completion.and_then(StopReason::of),
            token_ids: self
                .token_ids
                .then(|| shown.map(|shown| shown.token.sampled.token).into_iter().collect()),
            prompt_token_ids: self.prompt_token_ids.take(),
        };
        let usage = match self.usage {
            StreamUsage::LastChunk if completion.is_some() => UsageField::Counts(self.counter.total()),
            StreamUsage::LastChunk => UsageField::Absent,
            StreamUsage::Never | StreamUsage::ExtraChunk => UsageField::Null,
            StreamUsage::EveryChunk => UsageField::Counts(self.counter.running()),
        };
        self.send(vec![choice], usage, events);
    }

    fn send(&self, choices: Vec<Choice>, usage: UsageField, events: &mut EventBuffer) {
        let reply = Reply {
            head: &self.head,
            choices,
            usage,
        };
        if let Err(error) = events.json(&reply) {
            events.text(&error.json(Family::OpenAi));
        }
    }
}

impl Dialect for CompletionStream {
    fn tokens(&mut self, shown: Vec<Shown>, events: &mut EventBuffer) {
        for shown in &shown {
            self.chunk(Some(shown), "", None, events);
        }
    }

    fn end(&mut self, rest: Vec<Shown>, tail: &str, completion: &Completion, events: &mut EventBuffer) {
        match rest.split_last() {
            Some((last, before)) => {
                for shown in before {
                    self.chunk(Some(shown), "", None, events);
                }
                self.chunk(Some(last), tail, Some(completion), events);
            }
            None => self.chunk(None, tail, Some(completion), events),
        }
        if matches!(self.usage, StreamUsage::ExtraChunk | StreamUsage::EveryChunk) {
            self.send(Vec::new(), UsageField::Counts(self.counter.total()), events);
        }
        events.text("[DONE]");
    }

    fn failed(&mut self, error: &ApiError, events: &mut EventBuffer) {
        events.text(&error.json(Family::OpenAi));
        events.text("[DONE]");
    }
}
