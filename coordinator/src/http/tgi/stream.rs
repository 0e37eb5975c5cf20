//! `/generate_stream`: one event for every token; the last one carries the whole text. No `[DONE]`: the clients of these
//! paths read every event as JSON.

use super::answer::{StreamDetails, StreamEvent, Token, finish_reason};
use crate::core::types::Completion;
use crate::http::answer::PromptPart;
use crate::http::error::{ApiError, ErrorKind, Family};
use crate::http::shown::Shown;
use crate::http::sse::{Dialect, EventBuffer};

/// A stream's words so far.
pub struct TgiStream {
    /// The prompt if it is to be returned, and the text shown so far.
    text: String,
    details: bool,
    seed: u64,
    prompt_tokens: usize,
}

impl TgiStream {
    /// `prefix`: what stands before the generated text in the last event. `details`: they are asked for.
    pub fn new(prefix: String, details: bool, seed: u64, prompt_tokens: usize) -> Self {
        Self {
            text: prefix,
            details,
            seed,
            prompt_tokens,
        }
    }

    fn event(&mut self, shown: &Shown, completion: Option<&Completion>, events: &mut EventBuffer) {
        self.text.push_str(&shown.text);
        let token = Token::generated(shown);
        let details = completion.filter(|_| self.details).map(|completion| StreamDetails {
            finish_reason: finish_reason(completion),
            generated_tokens: completion.generated_tokens,
            seed: self.seed,
            prompt_tokens: self.prompt_tokens,
            input_length: self.prompt_tokens,
        });
        let generated_text = completion.map(|_| self.text.as_str());
        if let Err(error) = events.json(&StreamEvent {
            token: &token,
            generated_text,
            details,
        }) {
            self.failed(&error, events);
        }
    }
}

impl Dialect for TgiStream {
    fn prompt(&mut self, _number: usize, _prompt: &PromptPart, _events: &mut EventBuffer) {}

    fn tokens(&mut self, _index: usize, shown: Vec<Shown>, events: &mut EventBuffer) {
        for shown in &shown {
            self.event(shown, None, events);
        }
    }

    fn end(&mut self, _index: usize, rest: Vec<Shown>, _tail: &str, completion: &Completion, events: &mut EventBuffer) {
        let Some((last, before)) = rest.split_last() else {
            // A token that ends the answer is never shown before the end is known.
            let error = ApiError::new(ErrorKind::Incomplete, "the last token was sent before its time");
            return self.failed(&error, events);
        };
        for shown in before {
            self.event(shown, None, events);
        }
        self.event(last, Some(completion), events);
    }

    fn done(&mut self, _events: &mut EventBuffer) {}

    /// Whatever the cause, what failed is a generation that had begun. The clients of these paths read the word, and make
    /// of one that needs a status of its own (503, say) an error they know nothing about.
    fn failed(&mut self, error: &ApiError, events: &mut EventBuffer) {
        let mut error = error.clone();
        if error.kind != ErrorKind::Incomplete {
            error.kind = ErrorKind::Generation;
        }
        events.text(&error.json(Family::Tgi));
    }
}
