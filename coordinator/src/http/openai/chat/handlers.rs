//! `POST /v1/chat/completions`.

use std::sync::Arc;

use actix_web::http::StatusCode;
use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse};

use super::answer::{ChatChoice, ChatReply, Message};
use super::logprobs::{ChatLogprobs, ChatLogprobsWriter};
use super::request::parse;
use super::stream::ChatStream;
use super::voice::Voice;
use crate::http::error::{ApiError, Family};
use crate::http::openai::answer::{Counter, Head, StopReason, UsageField};
use crate::http::openai::handlers::unknown_model;
use crate::http::openai::request::{Rules, StreamUsage};
use crate::http::serve::{Answer, Draft, Step};
use crate::http::state::HttpState;
use crate::metrics::RequestTimer;

/// `POST /v1/chat/completions`.
pub async fn chat_completions(request: HttpRequest, payload: Payload, state: Data<HttpState>) -> HttpResponse {
    let mut timer = state.metrics.arrived();
    let checked = match check(&request, payload, &state).await {
        Ok(checked) => checked,
        Err(error) => {
            timer.failed(error.metric_label());
            return error.respond(Family::OpenAi);
        }
    };
    match answer(checked, timer, &state).await {
        Ok(response) => response,
        Err(error) => error.respond(Family::OpenAi),
    }
}

/// A checked request and what its answer needs of it.
struct Checked {
    draft: Draft,
    head: Head,
    stream: Option<StreamUsage>,
    logprobs: Option<ChatLogprobsWriter>,
    token_ids: bool,
    voice: Voice,
}

async fn check(request: &HttpRequest, payload: Payload, state: &HttpState) -> Result<Checked, ApiError> {
    let body = state.read_body(request, payload).await?;
    let rules = Rules::new(state, state.draw_seed()?);
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
    let tokens = state.encode_chat(parsed.conversation, body.bytes.len()).await?;
    let shared = parsed.shared;
    let draft = Draft {
        id,
        prompt_field: "messages",
        tokens,
        body_bytes: body.bytes.len(),
        sampling: shared.sampling,
        max_tokens: parsed.max_tokens,
        stop_strings: shared.stop,
        stop_token_ids: shared.stop_token_ids,
        ignore_eos: shared.ignore_eos,
        include_stop_str: shared.include_stop_str,
        skip_special_tokens: shared.skip_special_tokens,
        prompt_logprobs: None,
    };
    let voice = Voice::new(&id.to_string(), parsed.tools.as_ref(), facts.format);
    let writer = |count| ChatLogprobsWriter::new(state.prompts.tokenizer().clone(), count);
    Ok(Checked {
        draft,
        head,
        stream: parsed.stream,
        logprobs: parsed.logprobs.map(writer),
        token_ids: parsed.return_token_ids,
        voice,
    })
}

async fn answer(checked: Checked, timer: RequestTimer, state: &HttpState) -> Result<HttpResponse, ApiError> {
    let Checked {
        draft,
        head,
        stream,
        logprobs,
        token_ids,
        voice,
    } = checked;
    let answer = state.begin(draft, timer).await?;
    let counter = Counter::new(answer.prompt.len(), answer.cached_tokens).with_timings(state.front.usage_timings);
    let prompt_token_ids = token_ids.then(|| answer.prompt.to_vec());
    if let Some(usage) = stream {
        let words = ChatStream {
            head,
            usage,
            counter,
            logprobs,
            token_ids,
            prompt_token_ids,
            begun: false,
            voice,
        };
        let response = HttpResponse::build(StatusCode::OK);
        return Ok(crate::http::sse::respond(response, answer, words, state.silence()));
    }
    let (choice, usage) = collect(answer, counter, voice, logprobs.as_ref(), token_ids).await?;
    Ok(HttpResponse::Ok().json(ChatReply {
        head: &head,
        choices: vec![choice],
        usage,
        prompt_token_ids,
    }))
}

/// Waits for the whole answer. Dropping the future cancels the request.
async fn collect(
    mut answer: Answer,
    mut counter: Counter,
    mut voice: Voice,
    writer: Option<&ChatLogprobsWriter>,
    token_ids: bool,
) -> Result<(ChatChoice, UsageField), ApiError> {
    let mut message = Message::default();
    let mut content = Vec::new();
    let mut ids = Vec::new();
    loop {
        let (shown, end) = match answer.step().await {
            Step::Tokens(shown) => (shown, None),
            Step::End { rest, tail, completion } => (rest, Some((tail, completion))),
            Step::Failed(error) => {
                answer.timer.failed(error.metric_label());
                return Err(error);
            }
        };
        for shown in &shown {
            voice.say(shown, &mut message);
            ids.push(shown.token.sampled.token);
            counter.add(shown.token.step);
            content.extend(writer.map(|writer| writer.entry(shown)));
        }
        if let Some((tail, completion)) = end {
            voice.end(&tail, &mut message);
            answer.timer.succeeded();
            let choice = ChatChoice {
                index: 0,
                message: message.whole(),
                logprobs: writer.map(|_| ChatLogprobs { content }),
                finish_reason: voice.finish_reason(&completion),
                stop_reason: StopReason::of(&completion),
                token_ids: token_ids.then_some(ids),
            };
            return Ok((choice, UsageField::Counts(counter.total())));
        }
    }
}
