//! `/v1/chat/completions` as a stream: for each choice a chunk with the role, chunks with text, one with the finish reason
//! and nothing else; at the end `[DONE]`.

use super::answer::{ChatReply, ChunkChoice, Delta, Message, ROLE};
use super::logprobs::{ChatLogprobs, ChatLogprobsWriter};
use super::voice::Voice;
use crate::core::types::Completion;
use crate::http::answer::PromptPart;
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
    /// What is told about the prompt.
    pub prompt: PromptWords,
    /// What of the tokens of each choice is text, and what is a call.
    pub choices: Vec<ChoiceWords>,
}

/// What is told about the prompt.
#[derive(Default)]
pub struct PromptWords {
    tokens: usize,
    cached: u32,
    /// For the first chunk.
    ids: Option<Vec<u32>>,
}

/// A choice's words so far.
pub struct ChoiceWords {
    /// The role has been told.
    begun: bool,
    voice: Voice,
}

impl ChoiceWords {
    /// A choice that has said nothing yet.
    pub fn new(voice: Voice) -> Self {
        Self { begun: false, voice }
    }
}

impl ChatStream {
    /// The chunk that says who speaks, before everything else of a choice.
    fn begin(&mut self, index: usize, events: &mut EventBuffer) {
        if std::mem::replace(&mut self.choices[index].begun, true) {
            return;
        }
        let delta = Delta {
            role: Some(ROLE),
            content: Some(String::new()),
            ..Delta::default()
        };
        self.chunk(index, delta, None, None, events);
    }

    fn token(&mut self, index: usize, shown: &Shown, events: &mut EventBuffer) {
        self.begin(index, events);
        self.counter.add(index, shown.token.step);
        let mut said = Message::default();
        self.choices[index].voice.say(shown, &mut said);
        // A token without text of its own has nothing to say, unless it was asked for.
        if !said.is_silent() || self.logprobs.is_some() || self.token_ids {
            self.chunk(index, said.into(), Some(shown), None, events);
        }
    }

    fn chunk(
        &mut self,
        index: usize,
        delta: Delta,
        shown: Option<&Shown>,
        completion: Option<&Completion>,
        events: &mut EventBuffer,
    ) {
        let logprobs = self.logprobs.as_ref().zip(shown).map(|(writer, shown)| ChatLogprobs {
            content: vec![writer.entry(shown)],
        });
        let voice = &self.choices[index].voice;
        let choice = ChunkChoice {
            index,
            delta,
            logprobs,
            finish_reason: completion.map(|completion| voice.finish_reason(completion)),
            stop_reason: completion.and_then(StopReason::of),
            token_ids: self
                .token_ids
                .then(|| shown.map(|shown| shown.token.sampled.token).into_iter().collect()),
        };
        let running = || self.counter.running(index, self.prompt.tokens, self.prompt.cached);
        let usage = match self.usage {
            // Nothing was said about it, and that means none here.
            StreamUsage::LastChunk => UsageField::Absent,
            StreamUsage::Never | StreamUsage::ExtraChunk => UsageField::Null,
            StreamUsage::EveryChunk => UsageField::Counts(running()),
        };
        self.send(vec![choice], usage, events);
    }

    fn send(&mut self, choices: Vec<ChunkChoice>, usage: UsageField, events: &mut EventBuffer) {
        let reply = ChatReply {
            head: &self.head,
            choices,
            usage,
            prompt_token_ids: self.prompt.ids.take(),
        };
        if let Err(error) = events.json(&reply) {
            events.text(&error.json(Family::OpenAi));
        }
    }
}

impl Dialect for ChatStream {
    fn prompt(&mut self, _number: usize, prompt: &PromptPart, _events: &mut EventBuffer) {
        self.counter.add_prompt(prompt.tokens.len(), prompt.cached_tokens);
        self.prompt = PromptWords {
            tokens: prompt.tokens.len(),
            cached: prompt.cached_tokens,
            ids: self.token_ids.then(|| prompt.tokens.to_vec()),
        };
    }

    fn tokens(&mut self, index: usize, shown: Vec<Shown>, events: &mut EventBuffer) {
        for shown in &shown {
            self.token(index, shown, events);
        }
    }

    fn end(&mut self, index: usize, rest: Vec<Shown>, tail: &str, completion: &Completion, events: &mut EventBuffer) {
        for shown in &rest {
            self.token(index, shown, events);
        }
        self.begin(index, events);
        let mut said = Message::default();
        self.choices[index].voice.end(tail, &mut said);
        if !said.is_silent() {
            self.chunk(index, said.into(), None, None, events);
        }
        self.chunk(index, Delta::default(), None, Some(completion), events);
    }

    fn done(&mut self, events: &mut EventBuffer) {
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
