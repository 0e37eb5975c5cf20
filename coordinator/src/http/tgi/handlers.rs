//! The generating paths of TGI.

use std::sync::Arc;

use actix_web::http::StatusCode;
use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse, HttpResponseBuilder};
use protocol::sampling::PromptLogprob;

use super::answer::{Details, Generated, Token, finish_reason, only_ids};
use super::request::{GenerateRequest, Rules, parse, refuse_prompt_details_in_stream};
use super::stream::TgiStream;
use crate::core::types::Completion;
use crate::http::error::{ApiError, Family};
use crate::http::serve::{Answer, Draft, Step};
use crate::http::state::HttpState;
use crate::metrics::{Durations, RequestTimer};

/// What a path makes of a body.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// One object.
    Whole,
    /// An event stream.
    Stream,
    /// A list with one object, or an event stream if the body says so.
    ListOrStream,
}

/// `POST /generate`.
pub async fn generate(request: HttpRequest, payload: Payload, state: Data<HttpState>) -> HttpResponse {
    handle(&request, payload, &state, Shape::Whole).await
}

/// `POST /generate_stream`.
pub async fn generate_stream(request: HttpRequest, payload: Payload, state: Data<HttpState>) -> HttpResponse {
    handle(&request, payload, &state, Shape::Stream).await
}

/// `POST /` and `POST /invocations`.
pub async fn root(request: HttpRequest, payload: Payload, state: Data<HttpState>) -> HttpResponse {
    handle(&request, payload, &state, Shape::ListOrStream).await
}

async fn handle(request: &HttpRequest, payload: Payload, state: &HttpState, shape: Shape) -> HttpResponse {
    let mut timer = state.metrics.arrived();
    let checked = match check(request, payload, state, shape).await {
        Ok(checked) => checked,
        Err(error) => {
            timer.failed(error.metric_label());
            return error.respond(Family::Tgi);
        }
    };
    match answer(checked, timer, state).await {
        Ok(response) => response,
        Err(error) => error.respond(Family::Tgi),
    }
}

/// A checked request and what its answer needs of it.
struct Checked {
    draft: Draft,
    /// What stands before the generated text.
    prefix: String,
    input_chars: usize,
    details: bool,
    prompt_details: bool,
    stream: bool,
    list: bool,
}

async fn check(request: &HttpRequest, payload: Payload, state: &HttpState, shape: Shape) -> Result<Checked, ApiError> {
    let body = state.read_body(request, payload).await?;
    let rules = Rules::new(state, state.draw_seed()?);
    let media = Arc::clone(&state.media);
    let parsed = state
        .check_body(&body, move |bytes| parse(bytes, &rules, &media))
        .await?;
    let stream = match shape {
        Shape::Whole => false,
        Shape::Stream => true,
        Shape::ListOrStream => parsed.stream,
    };
    if stream {
        refuse_prompt_details_in_stream(&parsed)?;
    }
    let GenerateRequest {
        inputs,
        details,
        prompt_details,
        return_full_text,
        truncate,
        ..
    } = parsed;
    let inputs: Arc<str> = inputs.into();
    let mut tokens = state.encode("inputs", Arc::clone(&inputs)).await?;
    if let Some(keep) = truncate {
        tokens.drain(..tokens.len().saturating_sub(keep));
    }
    let draft = Draft {
        id: state.id_of(request)?,
        prompt_field: "inputs",
        tokens,
        body_bytes: body.bytes.len(),
        sampling: parsed.sampling,
        max_tokens: Some(parsed.max_new_tokens),
        stop_strings: parsed.stop,
        stop_token_ids: Vec::new(),
        ignore_eos: false,
        include_stop_str: false,
        skip_special_tokens: true,
        prompt_logprobs: prompt_details.then_some(0),
    };
    let input_chars = inputs.chars().count();
    let prefix = if return_full_text {
        inputs.to_string()
    } else {
        String::new()
    };
    let list = shape == Shape::ListOrStream;
    Ok(Checked {
        draft,
        prefix,
        input_chars,
        details,
        prompt_details,
        stream,
        list,
    })
}

async fn answer(checked: Checked, timer: RequestTimer, state: &HttpState) -> Result<HttpResponse, ApiError> {
    let seed = checked.draft.sampling.seed;
    let answer = state.begin(checked.draft, timer).await?;
    let mut response = HttpResponse::build(StatusCode::OK);
    response.insert_header(("x-compute-type", "cpu"));
    response.insert_header(("x-compute-characters", checked.input_chars.to_string()));
    if checked.stream {
        let words = TgiStream::new(checked.prefix, checked.details, seed, answer.prompt.len());
        return Ok(crate::http::sse::respond(response, answer, words, state.silence()));
    }
    let whole = collect(answer, checked.prefix).await?;
    time_headers(&mut response, whole.durations);
    let details = checked.details.then(|| Details {
        finish_reason: finish_reason(&whole.completion),
        generated_tokens: whole.completion.generated_tokens,
        prompt_tokens: whole.prompt.len(),
        input_length: whole.prompt.len(),
        seed,
        prefill: if checked.prompt_details {
            Token::of_prompt(&whole.prompt, &whole.prompt_logprobs, state.prompts.tokenizer())
        } else {
            Vec::new()
        },
        tokens: whole.tokens,
    });
    let details = details.map(|mut details| {
        if state.front.strict_mindie {
            only_ids(&mut details.prefill);
            only_ids(&mut details.tokens);
        }
        details
    });
    let generated = Generated {
        details,
        generated_text: whole.text,
    };
    Ok(if checked.list {
        response.json([generated])
    } else {
        response.json(generated)
    })
}

/// A complete answer.
struct Whole {
    text: String,
    tokens: Vec<Token>,
    completion: Completion,
    prompt: Arc<[u32]>,
    prompt_logprobs: Vec<PromptLogprob>,
    durations: Durations,
}

/// Waits for the whole answer. Dropping the future cancels the request.
async fn collect(mut answer: Answer, prefix: String) -> Result<Whole, ApiError> {
    let mut text = prefix;
    let mut tokens = Vec::new();
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
            tokens.push(Token::generated(shown));
        }
        if let Some((tail, completion)) = end {
            text.push_str(&tail);
            let durations = answer.timer.succeeded();
            let prompt_logprobs = answer.prompt_logprobs.take().unwrap_or_default();
            return Ok(Whole {
                text,
                tokens,
                completion,
                prompt: answer.prompt,
                prompt_logprobs,
                durations,
            });
        }
    }
}

/// TGI's timing headers, in whole milliseconds.
fn time_headers(response: &mut HttpResponseBuilder, durations: Durations) {
    let headers = [
        ("x-compute-time", durations.total),
        ("x-total-time", durations.total),
        ("x-validation-time", durations.validation),
        ("x-queue-time", durations.queue),
        ("x-inference-time", durations.inference),
        ("x-time-per-token", durations.per_token),
    ];
    for (name, duration) in headers {
        response.insert_header((name, duration.as_millis().to_string()));
    }
}
