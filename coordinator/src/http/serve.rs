//! From a checked request to the events of its answer: token limits, submission, the wait for the first token.

use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use protocol::ids::RequestId;
use protocol::sampling::{PromptLogprob, SamplingParams, StopRules};

use super::backend::Events;
use super::error::{ApiError, ErrorKind};
use super::shown::{Attribution, Shown};
use super::state::HttpState;
use crate::core::types::{ClientEvent, Completion, OutputToken, ServeRequest};
use crate::metrics::RequestTimer;

/// Seeds above this are close to the maximum.
const HIGH_SEED: u64 = u64::MAX - 1_000;

/// A request whose fields are checked and whose prompt is tokenised and truncated.
pub struct Draft {
    /// The request's name.
    pub id: RequestId,
    /// Name of the field that holds the prompt, for messages.
    pub prompt_field: &'static str,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Size of the body.
    pub body_bytes: usize,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Most tokens the client wants.
    pub max_tokens: Option<u32>,
    /// Strings that end the answer.
    pub stop_strings: Vec<String>,
    /// Tokens that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// Do not end at the model's end tokens.
    pub ignore_eos: bool,
    /// Keep what ended the answer in its text.
    pub include_stop_str: bool,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: bool,
    /// Report the log-probabilities of the prompt.
    pub prompt_logprobs: Option<u8>,
}

/// An answer that has begun: the cluster took the request, and its first token is there.
pub struct Answer {
    /// The prompt, as it was sent to the nodes.
    pub prompt: Arc<[u32]>,
    /// Prompt tokens that came from a prefix cache.
    pub cached_tokens: u32,
    /// Log-probabilities of the prompt tokens from the second on, if asked for.
    pub prompt_logprobs: Option<Vec<PromptLogprob>>,
    /// The request's clock.
    pub timer: RequestTimer,
    attribution: Attribution,
    stop: StopRules,
    /// The stop strings, if a matched one stays in the text.
    kept_stops: Vec<String>,
    /// The text released so far, if `kept_stops` are looked for.
    text: String,
    first: Option<OutputToken>,
    events: Events,
}

/// What happens next in an answer.
#[derive(Debug)]
pub enum Step {
    /// Tokens that can be shown; may be none yet.
    Tokens(Vec<Shown>),
    /// The last tokens and the end.
    End {
        /// Tokens that were not shown before; the last token of the answer is among them.
        rest: Vec<Shown>,
        /// Visible text that belongs to no token; empty in any real answer.
        tail: String,
        /// How the answer ended.
        completion: Completion,
    },
    /// There is no more of the answer.
    Failed(ApiError),
}

impl HttpState {
    /// Checks the prompt's length, hands the request to the cluster and waits for its first token. Until then every
    /// failure still has a status of its own.
    ///
    /// # Errors
    /// A prompt that is too long, a refusal, or a failure before the first token; the timer has been told.
    pub async fn begin(&self, draft: Draft, mut timer: RequestTimer) -> Result<Answer, ApiError> {
        if draft.sampling.seed > HIGH_SEED {
            self.warn_of_high_seed(draft.sampling.seed);
        }
        let request = self
            .request(draft)
            .inspect_err(|error| timer.failed(error.metric_label()))?;
        timer.submitted(request.token_ids.len(), request.stop.max_tokens);
        let mut answer = Answer::new(&request, timer);
        match self.submit(request, &mut answer).await {
            Ok(()) => Ok(answer),
            Err(error) => {
                answer.timer.failed(error.metric_label());
                Err(error)
            }
        }
    }

    async fn submit(&self, request: ServeRequest, answer: &mut Answer) -> Result<(), ApiError> {
        answer.events = self.backend.submit(request).await?;
        answer.timer.admitted(answer.prompt.len());
        answer.wait_for_first_token().await
    }

    fn request(&self, draft: Draft) -> Result<ServeRequest, ApiError> {
        let (tokens, most) = (draft.tokens.len(), self.lengths.input);
        if tokens == 0 || tokens > most {
            let field = draft.prompt_field;
            let message = format!("`{field}` has {tokens} tokens, but must have 1 to {most} tokens");
            return Err(ApiError {
                kind: ErrorKind::Invalid,
                message,
                param: Some(field.to_owned()),
            });
        }
        let stop = StopRules {
            max_tokens: self.lengths.output(tokens, draft.max_tokens),
            eos_token_ids: self.model.text.eos_token_ids.clone(),
            ignore_eos: draft.ignore_eos,
            stop_token_ids: draft.stop_token_ids,
        };
        Ok(ServeRequest {
            id: draft.id,
            token_ids: draft.tokens.into(),
            body_bytes: draft.body_bytes,
            sampling: draft.sampling,
            stop,
            stop_strings: draft.stop_strings,
            include_stop_str: draft.include_stop_str,
            skip_special_tokens: draft.skip_special_tokens,
            prompt_logprobs: draft.prompt_logprobs,
        })
    }
}

impl Answer {
    fn new(request: &ServeRequest, timer: RequestTimer) -> Self {
        let matches_stops = !request.stop_strings.is_empty();
        Self {
            prompt: Arc::clone(&request.token_ids),
            cached_tokens: 0,
            prompt_logprobs: None,
            timer,
            attribution: Attribution::new(matches_stops, request.skip_special_tokens),
            stop: request.stop.clone(),
            kept_stops: if request.include_stop_str {
                request.stop_strings.clone()
            } else {
                Vec::new()
            },
            text: String::new(),
            first: None,
            events: Box::pin(stream::empty()),
        }
    }

    async fn wait_for_first_token(&mut self) -> Result<(), ApiError> {
        loop {
            match self.events.next().await {
                Some(ClientEvent::Prefill {
                    cached_tokens,
                    prompt_logprobs,
                    queue_us,
                }) => {
                    self.cached_tokens = cached_tokens;
                    self.prompt_logprobs = prompt_logprobs;
                    self.timer.prefilled(Duration::from_micros(queue_us));
                }
                Some(ClientEvent::Token(token)) => {
                    self.first = Some(token);
                    return Ok(());
                }
                Some(ClientEvent::Failed(error)) => return Err(error.into()),
                Some(ClientEvent::Done(_)) | None => return Err(incomplete()),
            }
        }
    }

    /// The next step. After `End` or `Failed` there is none.
    pub async fn step(&mut self) -> Step {
        if let Some(first) = self.first.take() {
            return self.token(first);
        }
        match self.events.next().await {
            Some(ClientEvent::Token(token)) => self.token(token),
            Some(ClientEvent::Done(completion)) => {
                let attribution = std::mem::replace(&mut self.attribution, Attribution::new(false, false));
                let (rest, tail) = attribution.finish(&completion);
                Step::End { rest, tail, completion }
            }
            Some(ClientEvent::Failed(error)) => Step::Failed(error.into()),
            // The prefill is told before the first token, and that one is taken already.
            Some(ClientEvent::Prefill { .. }) | None => Step::Failed(incomplete()),
        }
    }

    fn token(&mut self, token: OutputToken) -> Step {
        self.timer.token();
        let last = self.is_last(&token);
        Step::Tokens(self.attribution.push(token, last))
    }

    /// True if the answer ends with this token, so that its event is also the last one. A token that completes a stop
    /// string is recognised by its missing text, or by its text where the stop string is kept.
    fn is_last(&mut self, token: &OutputToken) -> bool {
        if self
            .stop
            .finish(token.sampled.token, token.sampled.position + 1)
            .is_some()
        {
            return true;
        }
        if self.kept_stops.is_empty() {
            return false;
        }
        self.text.push_str(&token.visible);
        self.kept_stops.iter().any(|stop| self.text.ends_with(stop.as_str()))
    }
}

fn incomplete() -> ApiError {
    ApiError::new(ErrorKind::Incomplete, "the answer stopped without an end")
}
