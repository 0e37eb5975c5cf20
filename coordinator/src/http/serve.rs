//! From a checked call to the cluster: token limits, submission, the wait for the first token. What comes back is an
//! [`Answer`].

use std::collections::BTreeSet;
use std::sync::Arc;

use protocol::ids::RequestId;
use protocol::sampling::{SamplingParams, StopRules};

use super::answer::Answer;
use super::backend::Events;
use super::caller::Caller;
use super::error::{ApiError, ErrorKind};
use super::idempotency::Attached;
use super::state::HttpState;
use crate::core::types::{About, ServeRequest};
use crate::metrics::RequestTimer;

/// Seeds above this are close to the maximum.
const HIGH_SEED: u64 = u64::MAX - 1_000;

/// One prompt of a call whose fields are checked; the prompt is tokenised and truncated.
#[derive(Clone)]
pub struct Draft {
    /// The request's name.
    pub id: RequestId,
    /// Who calls.
    pub caller: Caller,
    /// Name of the field that holds the prompt, for messages.
    pub prompt_field: &'static str,
    /// The prompt.
    pub tokens: Arc<[u32]>,
    /// Name of the adapter that the model is served with.
    pub adapter: Option<String>,
    /// Size of the body; 0 for the further prompts of a call.
    pub body_bytes: usize,
    /// How many answers are drawn; 0: the prompt is all that is wanted.
    pub choices: u32,
    /// They are found by a beam search of that width.
    pub beam: bool,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Most tokens the client wants.
    pub max_tokens: Option<u32>,
    /// Strings that end the answer.
    pub stop_strings: Arc<[String]>,
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

impl HttpState {
    /// Checks the prompts' lengths, hands the call to the cluster, as a whole, and waits for its first token. Until then
    /// every failure still has a status of its own.
    ///
    /// # Errors
    /// A prompt that is too long, a refusal, or a failure before the first token; the timer has been told.
    pub async fn begin(&self, drafts: Vec<Draft>, mut timer: RequestTimer) -> Result<Answer, ApiError> {
        if let Some(draft) = drafts.iter().find(|draft| draft.sampling.seed > HIGH_SEED) {
            self.warn_of_high_seed(draft.sampling.seed);
        }
        let caller = drafts.first().map(|draft| draft.caller.clone());
        timer.tell_phases(caller.as_ref().is_some_and(|caller| caller.phases));
        let about = timer.about();
        let request = |draft| self.request(draft, about.clone());
        let requests: Result<Vec<_>, _> = drafts.into_iter().map(request).collect();
        let requests = requests.inspect_err(|error| timer.failed(error.failure(), &error.message))?;
        timer.submitted(&requests);
        let mut answer = Answer::new(&requests, timer);
        match self.submit(caller, requests, &mut answer).await {
            Ok(()) => Ok(answer),
            Err(error) => {
                answer.timer.failed(error.failure(), &error.message);
                Err(error)
            }
        }
    }

    async fn submit(
        &self,
        caller: Option<Caller>,
        requests: Vec<ServeRequest>,
        answer: &mut Answer,
    ) -> Result<(), ApiError> {
        let prompt_tokens = requests.iter().map(|request| request.token_ids.len()).sum();
        answer.listen_to(self.events_of(caller, requests).await?);
        answer.timer.admitted(prompt_tokens);
        answer.wait_for_first_token().await
    }

    /// What the cluster says to the call: one that it has taken before says the same again.
    async fn events_of(&self, caller: Option<Caller>, requests: Vec<ServeRequest>) -> Result<Vec<Events>, ApiError> {
        let named = caller.and_then(|caller| Some((caller.tenant, caller.key?)));
        let Some((tenant, key)) = named else {
            return Ok(self.backend.submit(requests).await?);
        };
        match self.calls.attach(tenant, &key, requests.len())? {
            Attached::Known(events) => Ok(events),
            Attached::New(recorder) => match self.backend.submit(requests).await {
                Ok(events) => Ok(recorder.record(events)),
                Err(error) => {
                    recorder.refuse(&error);
                    Err(error.into())
                }
            },
        }
    }

    fn request(&self, mut draft: Draft, about: About) -> Result<ServeRequest, ApiError> {
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
        if draft.sampling.min_tokens > 0 {
            let ends = stop.eos_token_ids.iter().chain(&stop.stop_token_ids).copied();
            let ends: BTreeSet<u32> = ends.collect();
            draft.sampling.end_token_ids = ends.into_iter().collect();
        }
        Ok(ServeRequest {
            about,
            id: draft.id,
            tenant: draft.caller.tenant,
            timeout: draft.caller.timeout,
            token_ids: draft.tokens,
            adapter: draft.adapter,
            body_bytes: draft.body_bytes,
            choices: draft.choices,
            beam_width: draft.beam.then_some(draft.choices),
            sampling: draft.sampling,
            stop,
            stop_strings: draft.stop_strings,
            include_stop_str: draft.include_stop_str,
            skip_special_tokens: draft.skip_special_tokens,
            prompt_logprobs: draft.prompt_logprobs,
        })
    }
}
