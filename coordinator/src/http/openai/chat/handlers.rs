//! `POST /v1/chat/completions`.

use std::sync::Arc;

use actix_web::http::StatusCode;
use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse};

use super::answer::{ChatChoice, ChatReply, Message};
use super::logprobs::{ChatLogprobs, ChatLogprobsWriter};
use super::request::parse;
use super::stream::{ChatStream, ChoiceWords, PromptWords};
use super::voice::Voice;
use crate::http::answer::{Answer, Collected};
use crate::http::error::ApiError;
use crate::http::openai::answer::{Counter, Head, StopReason, UsageField};
use crate::http::openai::choices::Choices;
use crate::http::openai::handlers::{handle, unknown_model};
use crate::http::openai::request::{Rules, StreamUsage};
use crate::http::serve::Draft;
use crate::http::state::HttpState;
use crate::http::written::until_written;
use crate::metrics::RequestTimer;

/// `POST /v1/chat/completions`.
pub async fn chat_completions(request: HttpRequest, payload: Payload, state: Data<HttpState>) -> HttpResponse {
    let checked = check(&request, payload, &state);
    handle(&request, &state, checked, async |checked, timer| {
        answer(checked, timer, &state).await
    })
    .await
}

/// A checked request and what its answer needs of it.
struct Checked {
    draft: Draft,
    choices: Choices,
    head: Head,
    stream: Option<StreamUsage>,
    logprobs: Option<ChatLogprobsWriter>,
    token_ids: bool,
    /// One for each choice that is drawn.
    voices: Vec<Voice>,
}

async fn check(request: &HttpRequest, payload: Payload, state: &HttpState) -> Result<Checked, ApiError> {
    let body = state.read_body(request, payload).await?;
    let caller = state.caller(request, &body)?;
    let rules = Rules::new(state, state.seed(&caller, 0)?);
    let (facts, media) = (state.template_facts(), Arc::clone(&state.media));
    let parsed = state
        .check_body(&body, move |bytes| parse(bytes, &rules, facts, &media))
        .await?;
    if !state.serves(&parsed.model) {
        return Err(unknown_model(&parsed.model));
    }
    let id = state.id_of(request)?;
    let head = Head {
        id: format!("chatcmpl-{id}"),
        object: if parsed.stream.is_some() {
            "chat.completion.chunk"
        } else {
            "chat.completion"
        },
        created: state.clock.unix_seconds(),
        model: parsed.model,
    };
    let shared = parsed.shared.complete(state).await?;
    let mut tokens = state.encode_chat(parsed.conversation, body.bytes.len()).await?;
    shared.truncate(&mut tokens);
    let draft = Draft {
        id,
        caller,
        prompt_field: "messages",
        tokens: tokens.into(),
        adapter: state.model.adapter(&head.model),
        body_bytes: body.bytes.len(),
        choices: parsed.choices.drawn,
        beam: parsed.choices.beam,
        sampling: shared.sampling,
        max_tokens: parsed.max_tokens,
        stop_strings: shared.stop.into(),
        stop_token_ids: shared.stop_token_ids,
        ignore_eos: shared.ignore_eos,
        include_stop_str: shared.include_stop_str,
        skip_special_tokens: shared.skip_special_tokens,
        prompt_logprobs: None,
    };
    let voice = |choice: u32| {
        let name = if choice == 0 {
            id.to_string()
        } else {
            format!("{id}_{choice}")
        };
        Voice::new(&name, parsed.tools.as_ref(), facts.format)
    };
    let voices = (0..parsed.choices.drawn).map(voice).collect();
    let writer = |count| ChatLogprobsWriter::new(state.prompts.tokenizer().clone(), count);
    Ok(Checked {
        draft,
        choices: parsed.choices,
        head,
        stream: parsed.stream,
        logprobs: parsed.logprobs.map(writer),
        token_ids: parsed.return_token_ids,
        voices,
    })
}

async fn answer(checked: Checked, timer: RequestTimer, state: &HttpState) -> Result<HttpResponse, ApiError> {
    let answer = state.begin(vec![checked.draft], timer).await?;
    let Some(usage) = checked.stream else {
        let words = WholeWords {
            choices: checked.choices,
            voices: checked.voices,
            logprobs: checked.logprobs,
            token_ids: checked.token_ids,
            timings: state.front.usage_timings,
        };
        return words.collect(answer, &checked.head).await;
    };
    let words = ChatStream {
        head: checked.head,
        usage,
        counter: Counter::new(checked.voices.len(), state.front.usage_timings),
        logprobs: checked.logprobs,
        token_ids: checked.token_ids,
        prompt: PromptWords::default(),
        choices: checked.voices.into_iter().map(ChoiceWords::new).collect(),
    };
    let response = HttpResponse::build(StatusCode::OK);
    Ok(crate::http::sse::respond(response, answer, words, state.silence()))
}

/// What a whole answer is to say.
struct WholeWords {
    choices: Choices,
    voices: Vec<Voice>,
    logprobs: Option<ChatLogprobsWriter>,
    token_ids: bool,
    timings: bool,
}

impl WholeWords {
    /// Waits for the whole answer. Dropping the future cancels the request.
    async fn collect(self, mut answer: Answer, head: &Head) -> Result<HttpResponse, ApiError> {
        let mut drawn = answer.collect().await?;
        self.choices.arrange(&mut drawn);
        let mut counter = Counter::new(drawn.len(), self.timings);
        for prompt in &answer.prompts {
            counter.add_prompt(prompt.tokens.len(), prompt.cached_tokens);
        }
        for (index, choice) in drawn.iter().enumerate() {
            choice
                .shown
                .iter()
                .for_each(|shown| counter.add(index, shown.token.step));
        }
        let voices = self.voices.iter().cloned();
        let choices = drawn.into_iter().zip(voices).enumerate();
        let choices = choices.map(|(index, (choice, voice))| self.choice(index, choice, voice));
        let prompt = answer.prompts.first().filter(|_| self.token_ids);
        let reply = ChatReply {
            head,
            choices: choices.collect(),
            usage: UsageField::Counts(counter.total()),
            prompt_token_ids: prompt.map(|prompt| prompt.tokens.to_vec()),
        };
        answer.timer.succeeded();
        let response = HttpResponse::Ok().json(reply);
        Ok(until_written(response, answer.into_timer()))
    }

    fn choice(&self, index: usize, choice: Collected, mut voice: Voice) -> ChatChoice {
        let mut message = Message::default();
        for shown in &choice.shown {
            voice.say(shown, &mut message);
        }
        voice.end(&choice.tail, &mut message);
        let content = |writer: &ChatLogprobsWriter| ChatLogprobs {
            content: choice.shown.iter().map(|shown| writer.entry(shown)).collect(),
        };
        let ids = || choice.shown.iter().map(|shown| shown.token.sampled.token).collect();
        ChatChoice {
            index,
            message: message.whole(),
            logprobs: self.logprobs.as_ref().map(content),
            finish_reason: voice.finish_reason(&choice.completion),
            stop_reason: StopReason::of(&choice.completion),
            token_ids: self.token_ids.then(ids),
        }
    }
}
