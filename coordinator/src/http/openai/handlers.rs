//! `POST /v1/completions`.

use actix_web::http::StatusCode;
use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse};

use super::answer::{Choice, Counter, Head, Reply, StopReason, UsageField, finish_reason};
use super::logprobs::{Logprobs, LogprobsWriter};
use super::prompt::Prompt;
use super::request::{CompletionRequest, Rules, StreamUsage, parse};
use super::stream::CompletionStream;
use crate::http::error::{ApiError, ErrorKind, Family};
use crate::http::serve::{Answer, Draft, Step};
use crate::http::state::HttpState;
use crate::metrics::RequestTimer;

/// `POST /v1/completions`.
pub async fn completions(request: HttpRequest, payload: Payload, state: Data<HttpState>) -> HttpResponse {
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
    logprobs: Option<LogprobsWriter>,
    token_ids: bool,
}

async fn check(request: &HttpRequest, payload: Payload, state: &HttpState) -> Result<Checked, ApiError> {
    let body = state.read_body(request, payload).await?;
    let rules = Rules::new(state, state.draw_seed()?);
    let parsed = state.check_body(&body, move |bytes| parse(bytes, &rules)).await?;
    let CompletionRequest {
        model,
        prompt,
        logprobs,
        stream,
        return_token_ids,
        ..
    } = parsed;
    if !state.serves(&model) {
        return Err(unknown_model(&model));
    }
    let tokens = match prompt {
        Prompt::Text(text) => state.encode("prompt", text.into()).await?,
        Prompt::Tokens(tokens) => tokens,
    };
    let shared = parsed.shared;
    let id = state.id_of(request)?;
    let head = Head {
        id: format!("endpoint_common_{id}"),
        object: "text_completion",
        created: state.clock.unix_seconds(),
        model,
    };
    let draft = Draft {
        id,
        prompt_field: "prompt",
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
    let logprobs = logprobs.map(|count| LogprobsWriter::new(state.prompts.tokenizer().clone(), count));
    Ok(Checked {
        draft,
        head,
        stream,
        logprobs,
        token_ids: return_token_ids,
    })
}

/// The error of a model that is not served here.
pub fn unknown_model(name: &str) -> ApiError {
    let name = crate::http::json::fields::quoted(name);
    ApiError {
        kind: ErrorKind::UnknownModel,
        message: format!("the model {name} does not exist here; GET /v1/models lists what does"),
        param: Some("model".to_owned()),
    }
}

async fn answer(checked: Checked, timer: RequestTimer, state: &HttpState) -> Result<HttpResponse, ApiError> {
    let Checked {
        draft,
        head,
        stream,
        logprobs,
        token_ids,
    } = checked;
    let answer = state.begin(draft, timer).await?;
    let counter = Counter::new(answer.prompt.len(), answer.cached_tokens).with_timings(state.front.usage_timings);
    let prompt_token_ids = token_ids.then(|| answer.prompt.to_vec());
    match stream {
        Some(usage) => {
            let words = CompletionStream {
                head,
                usage,
                counter,
                logprobs,
                token_ids,
                prompt_token_ids,
            };
            let response = HttpResponse::build(StatusCode::OK);
            Ok(crate::http::sse::respond(response, answer, words, state.silence()))
        }
        None => {
            let (mut choice, usage) = collect(answer, counter, logprobs).await?;
            choice.prompt_token_ids = prompt_token_ids;
            if !token_ids {
                choice.token_ids = None;
            }
            let reply = Reply {
                head: &head,
                choices: vec![choice],
                usage,
            };
            Ok(HttpResponse::Ok().json(reply))
        }
    }
}

/// Waits for the whole answer. Dropping the future cancels the request.
async fn collect(
    mut answer: Answer,
    mut counter: Counter,
    mut writer: Option<LogprobsWriter>,
) -> Result<(Choice, UsageField), ApiError> {
    let mut text = String::new();
    let mut logprobs = Logprobs::default();
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
            text.push_str(&shown.text);
            ids.push(shown.token.sampled.token);
            counter.add(shown.token.step);
            if let Some(writer) = &mut writer {
                writer.add(shown, &mut logprobs);
            }
        }
        if let Some((tail, completion)) = end {
            text.push_str(&tail);
            answer.timer.succeeded();
            let choice = Choice {
                index: 0,
                text,
                logprobs: writer.map(|_| logprobs),
                finish_reason: Some(finish_reason(&completion)),
                stop_reason: StopReason::of(&completion),
                token_ids: Some(ids),
                prompt_token_ids: None,
            };
            return Ok((choice, UsageField::Counts(counter.total())));
        }
    }
}
