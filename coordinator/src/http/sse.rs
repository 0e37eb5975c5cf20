//! Server-sent events: an answer as a stream. The first token is there before the first byte is sent, so that every error
//! before it has a status; every error after it is an event, and then the stream ends.

use std::convert::Infallible;
use std::time::Duration;

use actix_web::http::header::CACHE_CONTROL;
use actix_web::web::Bytes;
use actix_web::{HttpResponse, HttpResponseBuilder};
use futures_util::stream;
use serde::Serialize;
use tokio::time::timeout;

use super::answer::{Answer, PromptPart, Step};
use super::error::{ApiError, ErrorKind};
use super::shown::Shown;
use crate::core::types::Completion;

/// Sent while there is nothing to say, so that proxies keep the connection.
const KEEP_ALIVE: &[u8] = b":\n\n";

/// How an endpoint family words its events. `index`: see [`Step`].
pub trait Dialect: 'static {
    /// A prompt, by its number, has been computed; comes before the tokens of its choices.
    fn prompt(&mut self, number: usize, prompt: &PromptPart, events: &mut EventBuffer);
    /// Tokens of a choice that can be shown.
    fn tokens(&mut self, index: usize, shown: Vec<Shown>, events: &mut EventBuffer);
    /// The last tokens of a choice and its end. `tail`: visible text that belongs to none of them.
    fn end(&mut self, index: usize, rest: Vec<Shown>, tail: &str, completion: &Completion, events: &mut EventBuffer);
    /// Every choice has ended.
    fn done(&mut self, events: &mut EventBuffer);
    /// The answer has failed.
    fn failed(&mut self, error: &ApiError, events: &mut EventBuffer);
}

/// Events on their way out.
#[derive(Debug, Default)]
pub struct EventBuffer(Vec<u8>);

impl EventBuffer {
    /// Adds an event with `payload` as its JSON.
    ///
    /// # Errors
    /// The payload cannot be serialised; nothing has been added.
    pub fn json(&mut self, payload: &impl Serialize) -> Result<(), ApiError> {
        let json = serde_json::to_string(payload)
            .map_err(|_| ApiError::new(ErrorKind::Generation, "an event has no JSON form"))?;
        self.text(&json);
        Ok(())
    }

    /// Adds a line without line breaks that clients do not take for an event.
    pub fn comment(&mut self, line: &str) {
        self.0.extend_from_slice(b": ");
        self.0.extend_from_slice(line.as_bytes());
        self.0.extend_from_slice(b"\n\n");
    }

    /// Adds an event with `payload`, which has no line breaks.
    pub fn text(&mut self, payload: &str) {
        self.0.extend_from_slice(b"data: ");
        self.0.extend_from_slice(payload.as_bytes());
        self.0.extend_from_slice(b"\n\n");
    }
}

/// Sends `answer` as a stream. `response` has the status and further headers.
pub fn respond(
    mut response: HttpResponseBuilder,
    answer: Answer,
    dialect: impl Dialect,
    silence: Duration,
) -> HttpResponse {
    let state = Sending {
        answer,
        dialect,
        silence,
        ended: false,
    };
    let body = stream::unfold(state, |mut state| async move {
        let chunk = state.next().await?;
        Some((Ok::<_, Infallible>(chunk), state))
    });
    head(&mut response).streaming(body)
}

/// A stream whose events are all there.
pub fn at_once(events: EventBuffer) -> HttpResponse {
    head(&mut HttpResponse::Ok()).body(events.0)
}

fn head(response: &mut HttpResponseBuilder) -> &mut HttpResponseBuilder {
    response
        .content_type("text/event-stream")
        .insert_header((CACHE_CONTROL, "no-cache"))
        .insert_header(("x-accel-buffering", "no"))
}

/// A stream that is being sent. Dropping it cancels the request.
struct Sending<D> {
    answer: Answer,
    dialect: D,
    silence: Duration,
    ended: bool,
}

impl<D: Dialect> Sending<D> {
    /// The next bytes; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        let mut events = EventBuffer::default();
        while !self.ended && events.0.is_empty() {
            match timeout(self.silence, self.answer.step()).await {
                Err(_) => return Some(Bytes::from_static(KEEP_ALIVE)),
                Ok(Step::Prompt { prompt }) => {
                    let part = &self.answer.prompts[prompt];
                    self.dialect.prompt(prompt, part, &mut events);
                }
                Ok(Step::Tokens { index, shown }) => self.dialect.tokens(index, shown, &mut events),
                Ok(Step::End {
                    index,
                    rest,
                    tail,
                    completion,
                }) => {
                    self.dialect.end(index, rest, &tail, &completion, &mut events);
                    // The end of the answer goes out with its last token.
                    if self.answer.is_over() {
                        self.finish(&mut events);
                    }
                }
                Ok(Step::Done) => self.finish(&mut events),
                Ok(Step::Failed(error)) => {
                    self.ended = true;
                    self.answer.timer.failed(error.failure(), &error.message);
                    self.dialect.failed(&error, &mut events);
                }
            }
        }
        (!events.0.is_empty()).then(|| Bytes::from(events.0))
    }

    fn finish(&mut self, events: &mut EventBuffer) {
        self.ended = true;
        if let Some(timing) = self.answer.timer.server_timing() {
            events.comment(&format!("server-timing: {timing}"));
        }
        self.dialect.done(events);
        self.answer.timer.succeeded();
    }
}
