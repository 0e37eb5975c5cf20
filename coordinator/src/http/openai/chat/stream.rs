//! `/v1/chat/completions` as a stream: a chunk with the role, chunks with text, one with the finish reason and nothing
//! else, then `[DONE]`.

use super::answer::{ChatReply, ChunkChoice, Delta, Message, ROLE};
use super::logprobs::{ChatLogprobs, ChatLogprobsWriter};
use super::voice::Voice;
use crate::core::types::Completion;
use crate::http::error::{ApiError, Family};
use crate::http::openai::answer::{Counter, Head, StopReason, UsageField};
use crate::http::openai::request::StreamUsage;
use crate::http::shown::Shown;
use crate::http::sse::{Dialect, EventBuffer};

/// A stream's words so far.
pub struct ChatStream {
    /// Id, time, model.
    pub head: Head,
    /// Which chunks carry usage.
    pub usage: StreamUsage,
    /// Counts so far.
    pub counter: Counter,
    /// If log-probabilities are asked for.
    pub logprobs: Option<ChatLogprobsWriter>,
    /// If token ids are asked for.
    pub token_ids: bool,
    /// The prompt's ids, for the first chunk.
    pub prompt_token_ids: Option<Vec<u32>>,
    /// The role has been told.
    pub begun: bool,
    /// What of the tokens is text, and what is a call.
    pub voice: Voice,
}

impl ChatStream {
    /// The chunk that says who speaks, before everything else.
    fn begin(&mut self, events: &mut EventBuffer) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        let delta = Delta {
            role: Some(ROLE),
            content: Some(String::new()),
            ..Delta::default()
        };
        self.chunk(delta, None, None, events);
    }

    fn token(&mut self, shown: &Shown, events: &mut EventBuffer) {
        self.begin(events);
        self.counter.add(shown.token.step);
        let mut said = Message::default();
        self.voice.say(shown, &mut said);
        // A token without text of its own has nothing to say, unless it was asked for.
        if !said.is_silent() || self.logprobs.is_some() || self.token_ids {
            self.chunk(said.into(), Some(shown), None, events);
        }
    }

    fn chunk(
        &mut self,
        delta: Delta,
        shown: Option<&Shown>,
        completion: Option<&Completion>,
        events: &mut EventBuffer,
    ) {
        let logprobs = self.logprobs.as_ref().zip(shown).map(|(writer, shown)| ChatLogprobs {
            content: vec![writer.entry(shown)],
        });
        let choice = ChunkChoice {
            index: 0,
            delta,
            logprobs,
            finish_reason: completion.map(|completion| self.voice.finish_reason(completion)),
            stop_reason: completion.and_then(StopReason::of),
            token_ids: self
                .token_ids
                .then(|| shown.map(|shown| shown.token.sampled.token).into_iter().collect()),
        };
        let usage = match self.usage {
            // Nothing was said about it, and that means none here.
            StreamUsage::LastChunk => UsageField::Absent,
            StreamUsage::Never | StreamUsage::ExtraChunk => UsageField::Null,
            StreamUsage::EveryChunk => UsageField::Counts(self.counter.running()),
        };
        self.send(vec![choice], usage, events);
    }

    fn send(&mut self, choices: Vec<ChunkChoice>, usage: UsageField, events: &mut EventBuffer) {
        let reply = ChatReply {
            head: &self.head,
            choices,
            usage,
            prompt_token_ids: self.prompt_token_ids.take(),
        };
        if let Err(error) = events.json(&reply) {
            events.text(&error.json(Family::OpenAi));
        }
    }
}

impl Dialect for ChatStream {
    fn tokens(&mut self, shown: Vec<Shown>, events: &mut EventBuffer) {
        for shown in &shown {
            self.token(shown, events);
        }
    }

    fn end(&mut self, rest: Vec<Shown>, tail: &str, completion: &Completion, events: &mut EventBuffer) {
        for shown in &rest {
            self.token(shown, events);
        }
        self.begin(events);
        let mut said = Message::default();
        self.voice.end(tail, &mut said);
        if !said.is_silent() {
            self.chunk(said.into(), None, None, events);
        }
        self.chunk(Delta::default(), None, Some(completion), events);
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
