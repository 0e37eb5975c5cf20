//! What a job's sequences say, as the coordinator is told.
//!
//! Where the prompt was computed here as well, the first tokens are told as a prefill node tells them: all at once, with
//! what the answer needs from the prompt. Choices that are further by then wait until that has been said.

use node_shell::engine_thread::{ComputedEvent, SequenceEvent, TokenEvent};
use node_shell::handle::{SequenceGroup, SequenceStream, SubmitError};
use node_shell::job::{JobGone, JobStream};
use node_shell::job_trace::GENERATION;
use protocol::control::{JobErrorKind, JobEvent, JobUpdate, PromptComputed};
use protocol::sampling::SampledToken;

/// The choices of a job that run.
pub(crate) struct Choices {
    sequences: SequenceGroup,
    /// Their numbers, by the index of the sequence; `None` once one has ended.
    numbers: Vec<Option<u32>>,
    /// `Some` as long as the prompt is not told.
    prompt: Option<Prompt>,
}

/// What is known of a prompt that is computed here.
#[derive(Default)]
struct Prompt {
    /// The first token of each choice, by the index of its sequence.
    tokens: Vec<Option<SampledToken>>,
    /// What the first choice said, without its token.
    computed: Option<PromptComputed>,
    /// Words that come after it.
    later: Vec<JobEvent>,
}

impl Prompt {
    /// A first token. Once all are there, what is to be told.
    fn take(&mut self, index: usize, token: TokenEvent) {
        if let Some(place) = self.tokens.get_mut(index) {
            *place = Some(token.token);
        }
        if index == 0 {
            self.computed = Some(PromptComputed {
                tokens: Vec::new(),
                step: token.timing,
                cached_tokens: token.cached_tokens,
                prompt_logprobs: token.prompt_logprobs,
            });
        }
    }

    /// Everything there is to tell, if it is complete.
    fn told(&mut self) -> Option<Vec<JobEvent>> {
        if self.tokens.iter().any(Option::is_none) {
            return None;
        }
        let tokens = std::mem::take(&mut self.tokens).into_iter().flatten().collect();
        let computed = self.computed.take()?;
        let mut words = vec![JobEvent::Computed(PromptComputed { tokens, ..computed })];
        words.append(&mut self.later);
        Some(words)
    }
}

impl Choices {
    /// Whose prompt others have computed, or told of.
    pub(crate) fn new(numbers: Vec<u32>, sequences: SequenceGroup) -> Self {
        Self {
            sequences,
            numbers: numbers.into_iter().map(Some).collect(),
            prompt: None,
        }
    }

    /// Whose prompt is computed here.
    pub(crate) fn with_prompt(numbers: Vec<u32>, sequences: SequenceGroup) -> Self {
        let prompt = Prompt {
            tokens: vec![None; numbers.len()],
            ..Prompt::default()
        };
        Self {
            prompt: Some(prompt),
            ..Self::new(numbers, sequences)
        }
    }

    fn all_ended(&self) -> bool {
        self.numbers.iter().all(Option::is_none)
    }

    /// The coordinator wants no more of a choice. One that has ended, or that is not the job's, is nothing.
    fn end(&mut self, choice: u32) {
        if let Some(index) = self.numbers.iter().position(|number| *number == Some(choice)) {
            self.numbers[index] = None;
            self.sequences.cancel(index);
        }
    }

    /// Adds to `words` what an event of a sequence means to the coordinator; nothing, if the choice has ended before.
    fn tell(&mut self, index: usize, event: SequenceEvent, words: &mut Vec<JobEvent>) -> Result<(), String> {
        let Some(choice) = self.numbers.get(index).copied().flatten() else {
            return Ok(());
        };
        match event {
            SequenceEvent::Token(token) => {
                if token.finish.is_some() {
                    self.numbers[index] = None;
                }
                self.tell_token(index, choice, token, words);
                Ok(())
            }
            SequenceEvent::Failed(problem) => Err(problem),
            other => Err(format!("choice {choice} has an event that no choice has: {other:?}")),
        }
    }

    fn tell_token(&mut self, index: usize, choice: u32, token: TokenEvent, words: &mut Vec<JobEvent>) {
        let Some(prompt) = &mut self.prompt else {
            return words.push(word(choice, token));
        };
        if token.token.position > 0 {
            return prompt.later.push(word(choice, token));
        }
        prompt.take(index, token);
        if let Some(told) = prompt.told() {
            words.extend(told);
            self.prompt = None;
        }
    }
}

fn word(choice: u32, token: TokenEvent) -> JobEvent {
    JobEvent::Token {
        choice,
        token: token.token,
        step: token.timing,
    }
}

/// The coordinator's next word. As long as it knows no token there is nothing it could say but that the job is over.
async fn hear(stream: &mut JobStream, knows_tokens: bool) -> Result<JobUpdate, JobGone> {
    if knows_tokens {
        stream.update().await
    } else {
        Err(stream.cancelled().await)
    }
}

/// Sends token after token until every choice has ended or the coordinator has had enough.
pub(crate) async fn generate(mut choices: Choices, mut stream: JobStream) -> Result<(), JobGone> {
    let (mut events, mut words) = (Vec::new(), Vec::new());
    while !choices.all_ended() {
        let knows_tokens = choices.prompt.is_none();
        tokio::select! {
            update = hear(&mut stream, knows_tokens) => {
                let JobUpdate::EndChoice { choice } = update?;
                choices.end(choice);
                continue;
            }
            () = choices.sequences.next_all(&mut events) => {}
        }
        if events.is_empty() {
            return stream.fail(JobErrorKind::Draining, "the engine has stopped").await;
        }
        for (index, event) in events.drain(..) {
            if let SequenceEvent::Token(token) = &event {
                stream.trace().token(index, token.timing, token.steps);
            }
            if let Err(problem) = choices.tell(index, event, &mut words) {
                return stream.fail(JobErrorKind::Internal, problem).await;
            }
        }
        stream.send_all(&words).await?;
        words.clear();
    }
    stream.end(&JobEvent::Finished).await
}

/// Waits for the answer of a beam search; tells of its prompt before, if that is computed here.
pub(crate) async fn answer_beams(mut search: SequenceStream, mut stream: JobStream) -> Result<(), JobGone> {
    loop {
        let event = tokio::select! {
            gone = stream.cancelled() => return Err(gone),
            event = search.next() => event,
        };
        match event {
            Some(SequenceEvent::Computed(computed)) => {
                stream.trace().computed(computed.timing, computed.steps);
                stream.trace().enter(GENERATION);
                stream.send(&prompt_alone(computed)).await?;
            }
            Some(SequenceEvent::Beams(beams)) => return stream.end(&JobEvent::Beams(beams)).await,
            other => return fail(other, stream).await,
        }
    }
}

/// Waits for a prompt that is computed for what the model says of it.
pub(crate) async fn answer_prompt(mut sequence: SequenceStream, mut stream: JobStream) -> Result<(), JobGone> {
    let event = tokio::select! {
        gone = stream.cancelled() => return Err(gone),
        event = sequence.next() => event,
    };
    match event {
        Some(SequenceEvent::Computed(computed)) => {
            stream.trace().computed(computed.timing, computed.steps);
            stream.send(&prompt_alone(computed)).await?;
            stream.end(&JobEvent::Finished).await
        }
        other => fail(other, stream).await,
    }
}

fn prompt_alone(computed: ComputedEvent) -> JobEvent {
    JobEvent::Computed(PromptComputed {
        tokens: Vec::new(),
        step: computed.timing,
        cached_tokens: computed.cached_tokens,
        prompt_logprobs: computed.prompt_logprobs,
    })
}

/// Ends a job whose sequence says nothing that can be told.
async fn fail(event: Option<SequenceEvent>, stream: JobStream) -> Result<(), JobGone> {
    match event {
        Some(SequenceEvent::Failed(problem)) => stream.fail(JobErrorKind::Internal, problem).await,
        Some(other) => {
            let problem = format!("a sequence has an event that it cannot have: {other:?}");
            stream.fail(JobErrorKind::Internal, problem).await
        }
        None => stream.fail(JobErrorKind::Draining, "the engine has stopped").await,
    }
}

/// The engine did not take the work.
pub(crate) async fn refuse(error: SubmitError, stream: JobStream) -> Result<(), JobGone> {
    match error {
        SubmitError::NoBlocks { needed, free } => {
            stream
                .end(&JobEvent::Busy {
                    needed_blocks: needed,
                    free_blocks: free,
                })
                .await
        }
        other => {
            let error = other.into_job_error();
            stream.end(&JobEvent::Failed(error)).await
        }
    }
}
