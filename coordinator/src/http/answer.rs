//! An answer on its way: the choices of all prompts of a call, merged in the order in which their tokens come.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, SelectAll, Stream, StreamExt};
use protocol::sampling::{PromptLogprob, StopRules};

use super::backend::Events;
use super::error::{ApiError, ErrorKind};
use super::shown::{Attribution, Shown};
use crate::core::types::{ClientEvent, Completion, OutputToken, ServeRequest};
use crate::metrics::RequestTimer;

/// An answer that has begun: the cluster took the call, and its first token is there.
pub struct Answer {
    /// The prompts, in the client's order.
    pub prompts: Vec<PromptPart>,
    /// The call's clock.
    pub timer: RequestTimer,
    /// By index: prompt after prompt, choice after choice.
    choices: Vec<ChoicePart>,
    /// Choices of each prompt.
    per_prompt: usize,
    matches_stops: bool,
    skip_special: bool,
    /// The stop strings, if a matched one stays in the text.
    kept_stops: Arc<[String]>,
    /// Tokens before which no stop string ends a choice.
    min_tokens: u32,
    /// Tell log-probabilities of what tokens are drawn from, not the model's.
    processed_logprobs: bool,
    /// Steps that have been taken and not told.
    ahead: VecDeque<Step>,
    /// Choices that have not ended.
    open: usize,
    /// Requests that have not ended.
    running: usize,
    events: Merged,
}

/// A prompt, and what its prefill said.
pub struct PromptPart {
    /// The prompt, as it was sent to the nodes.
    pub tokens: Arc<[u32]>,
    /// Prompt tokens that came from a prefix cache.
    pub cached_tokens: u32,
    /// Log-probabilities of the prompt tokens from the second on, if asked for.
    pub logprobs: Option<Vec<PromptLogprob>>,
    /// When its choices end.
    stop: StopRules,
}

struct ChoicePart {
    attribution: Attribution,
    /// The text released so far, if `kept_stops` are looked for.
    text: String,
}

/// The events of the requests, each with its request's number.
enum Merged {
    One(Events),
    Many(SelectAll<NumberedEvents>),
}

type NumberedEvents = std::pin::Pin<Box<dyn Stream<Item = (usize, ClientEvent)> + Send>>;

impl Merged {
    async fn next(&mut self) -> Option<(usize, ClientEvent)> {
        match self {
            Self::One(events) => events.next().await.map(|event| (0, event)),
            Self::Many(events) => events.next().await,
        }
    }
}

/// What happens next in an answer. `index` is prompt number times choices of a prompt plus choice number.
#[derive(Debug)]
pub enum Step {
    /// A prompt has been computed; [`Answer::prompts`] says more. Comes before the tokens of its choices.
    Prompt {
        /// Which, from 0.
        prompt: usize,
    },
    /// Tokens that can be shown; may be none yet.
    Tokens {
        /// Whose.
        index: usize,
        /// The tokens.
        shown: Vec<Shown>,
    },
    /// The last tokens of a choice, and its end.
    End {
        /// Whose.
        index: usize,
        /// Tokens that were not shown before; the last token of the choice is among them.
        rest: Vec<Shown>,
        /// Visible text that belongs to no token; empty in any real answer.
        tail: String,
        /// How the choice ended.
        completion: Completion,
    },
    /// Every choice has ended: this was all.
    Done,
    /// There is no more of the answer.
    Failed(ApiError),
}

/// A whole choice.
#[derive(Clone, Debug)]
pub struct Collected {
    /// Its tokens with their parts of the text.
    pub shown: Vec<Shown>,
    /// Visible text behind them that belongs to none of them.
    pub tail: String,
    /// How it ended.
    pub completion: Completion,
}

impl Collected {
    /// The visible text.
    pub fn text(&self) -> String {
        let mut text: String = self.shown.iter().map(|shown| shown.text.as_str()).collect();
        text.push_str(&self.tail);
        text
    }
}

impl Answer {
    /// The answer to `requests`, which have everything in common but their prompts, and with those the longest answer.
    pub(super) fn new(requests: &[ServeRequest], timer: RequestTimer) -> Self {
        let part = |request: &ServeRequest| PromptPart {
            tokens: Arc::clone(&request.token_ids),
            cached_tokens: 0,
            logprobs: None,
            stop: request.stop.clone(),
        };
        let prompts: Vec<PromptPart> = requests.iter().map(part).collect();
        let first = requests.first();
        let per_prompt = first.map_or(0, |request| request.choices as usize);
        Self {
            choices: Vec::new(),
            per_prompt,
            matches_stops: first.is_some_and(|request| !request.stop_strings.is_empty()),
            skip_special: first.is_none_or(|request| request.skip_special_tokens),
            kept_stops: first
                .filter(|request| request.include_stop_str)
                .map_or_else(|| Arc::from([]), |request| Arc::clone(&request.stop_strings)),
            min_tokens: first.map_or(0, |request| request.sampling.min_tokens),
            processed_logprobs: first.is_some_and(|request| request.sampling.processed_logprobs),
            ahead: VecDeque::new(),
            open: 0,
            running: prompts.len(),
            events: Merged::One(Box::pin(stream::empty())),
            prompts,
            timer,
        }
    }

    /// The call's clock, once the answer has been read.
    pub fn into_timer(self) -> RequestTimer {
        self.timer
    }

    /// Choices of each prompt.
    pub fn per_prompt(&self) -> usize {
        self.per_prompt
    }

    /// True once nothing follows but [`Step::Done`].
    pub fn is_over(&self) -> bool {
        self.running == 0 && self.ahead.is_empty()
    }

    /// The cluster has taken the call: these are the events of its requests. Only now memory is spent on every choice.
    pub(super) fn listen_to(&mut self, mut events: Vec<Events>) {
        let choice = |_| ChoicePart {
            attribution: Attribution::new(self.matches_stops, self.skip_special),
            text: String::new(),
        };
        self.open = self.per_prompt * self.prompts.len();
        self.choices = (0..self.open).map(choice).collect();
        self.timer.expect_choices(self.open);
        self.events = match (events.len(), events.pop()) {
            (1, Some(events)) => Merged::One(events),
            (_, last) => {
                let numbered = |(number, events): (usize, Events)| {
                    Box::pin(events.map(move |event| (number, event))) as NumberedEvents
                };
                let all = events.into_iter().chain(last).enumerate().map(numbered);
                Merged::Many(stream::select_all(all))
            }
        };
    }

    /// Waits until there is something of the answer.
    pub(super) async fn wait_for_first_token(&mut self) -> Result<(), ApiError> {
        loop {
            match self.advance().await {
                Step::Failed(error) => return Err(error),
                step @ Step::Prompt { .. } => self.ahead.push_back(step),
                step @ (Step::Tokens { .. } | Step::End { .. } | Step::Done) => {
                    self.ahead.push_back(step);
                    return Ok(());
                }
            }
        }
    }

    /// The next step. After `Done` or `Failed` there is none.
    pub async fn step(&mut self) -> Step {
        match self.ahead.pop_front() {
            Some(step) => step,
            None => self.advance().await,
        }
    }

    /// Waits for the whole answer: all choices, by index. Dropping the future cancels the call. The timer has been told of
    /// a failure, not of success.
    ///
    /// # Errors
    /// A part of the answer is missing.
    pub async fn collect(&mut self) -> Result<Vec<Collected>, ApiError> {
        let mut shown: Vec<Vec<Shown>> = self.choices.iter().map(|_| Vec::new()).collect();
        let mut ends: Vec<Option<(String, Completion)>> = self.choices.iter().map(|_| None).collect();
        loop {
            match self.step().await {
                Step::Prompt { .. } => {}
                Step::Tokens { index, shown: more } => shown[index].extend(more),
                Step::End {
                    index,
                    rest,
                    tail,
                    completion,
                } => {
                    shown[index].extend(rest);
                    ends[index] = Some((tail, completion));
                }
                Step::Done => break,
                Step::Failed(error) => {
                    self.timer.failed(error.failure(), &error.message);
                    return Err(error);
                }
            }
        }
        let all = shown.into_iter().zip(ends).map(|(shown, end)| {
            let (tail, completion) = end.ok_or_else(incomplete)?;
            Ok(Collected {
                shown,
                tail,
                completion,
            })
        });
        all.collect()
    }

    async fn advance(&mut self) -> Step {
        loop {
            if self.running == 0 {
                return Step::Done;
            }
            let Some((request, event)) = self.events.next().await else {
                return Step::Failed(incomplete());
            };
            match event {
                ClientEvent::Prefill {
                    cached_tokens,
                    prompt_logprobs,
                    queue_us,
                } => return self.prefilled(request, cached_tokens, prompt_logprobs, queue_us),
                ClientEvent::Token { choice, token } => return self.token(request, choice, token),
                ClientEvent::Ended { choice, completion } => return self.ended(request, choice, completion).await,
                ClientEvent::Served(served) => self.timer.served(*served),
                ClientEvent::Done { submitted, phases } => {
                    self.timer.finished(submitted, phases);
                    self.running -= 1;
                }
                ClientEvent::Failed(error) => return Step::Failed(error.into()),
            }
        }
    }

    fn prefilled(
        &mut self,
        prompt: usize,
        cached_tokens: u32,
        logprobs: Option<Vec<PromptLogprob>>,
        queue_us: u64,
    ) -> Step {
        let Some(part) = self.prompts.get_mut(prompt) else {
            return Step::Failed(incomplete());
        };
        part.cached_tokens = cached_tokens;
        part.logprobs = logprobs;
        self.timer.prefilled(Duration::from_micros(queue_us));
        Step::Prompt { prompt }
    }

    /// The index of a choice.
    fn index(&self, request: usize, choice: u32) -> Option<usize> {
        let (choice, index) = (choice as usize, request * self.per_prompt + choice as usize);
        (choice < self.per_prompt && index < self.choices.len()).then_some(index)
    }

    fn token(&mut self, request: usize, choice: u32, mut token: OutputToken) -> Step {
        // Which of the two is told is decided here, once for all that write answers.
        let sampled = &mut token.sampled;
        if self.processed_logprobs {
            sampled.raw_logprob = sampled.logprob;
        } else {
            sampled.logprob = sampled.raw_logprob;
        }
        let Some(index) = self.index(request, choice) else {
            return Step::Failed(incomplete());
        };
        self.timer.token(index);
        let last = self.is_last(request, index, &token);
        let shown = self.choices[index].attribution.push(token, last);
        Step::Tokens { index, shown }
    }

    async fn ended(&mut self, request: usize, choice: u32, completion: Completion) -> Step {
        let Some(index) = self.index(request, choice) else {
            return Step::Failed(incomplete());
        };
        self.timer.choice_ended(&completion);
        let fresh = Attribution::new(false, self.skip_special);
        let attribution = std::mem::replace(&mut self.choices[index].attribution, fresh);
        let (rest, tail) = attribution.finish(&completion);
        self.open = self.open.saturating_sub(1);
        // The ends of the requests come with those of their last choices. Taken here, the end of the answer is known with
        // its last token.
        while self.open == 0 && self.running > 0 {
            match self.events.next().await {
                Some((_, ClientEvent::Served(served))) => self.timer.served(*served),
                Some((_, ClientEvent::Done { submitted, phases })) => {
                    self.timer.finished(submitted, phases);
                    self.running -= 1;
                }
                Some((_, ClientEvent::Failed(error))) => return Step::Failed(error.into()),
                Some(_) => {}
                None => return Step::Failed(incomplete()),
            }
        }
        Step::End {
            index,
            rest,
            tail,
            completion,
        }
    }

    /// True if the choice ends with this token, so that its event is also the last one. A token that completes a stop
    /// string is recognised by its missing text, or by its text where the stop string is kept.
    fn is_last(&mut self, request: usize, index: usize, token: &OutputToken) -> bool {
        let rules = &self.prompts[request].stop;
        if rules.finish(token.sampled.token, token.sampled.position + 1).is_some() {
            return true;
        }
        if self.kept_stops.is_empty() {
            return false;
        }
        let text = &mut self.choices[index].text;
        text.push_str(&token.visible);
        token.sampled.position >= self.min_tokens && self.kept_stops.iter().any(|stop| text.ends_with(stop.as_str()))
    }
}

fn incomplete() -> ApiError {
    ApiError::new(ErrorKind::Incomplete, "the answer stopped without an end")
}
