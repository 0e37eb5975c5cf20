//! `POST /v1/completions`.

use std::sync::Arc;

use actix_web::http::StatusCode;
use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse};
use protocol::ids::RequestId;

use super::answer::{Head, Reply, UsageField};
use super::choices::Choices;
use super::echo::Echo;
use super::logprobs::LogprobsWriter;
use super::prompt::Prompt;
use super::request::{CompletionRequest, Rules, StreamUsage, parse};
use super::stream::{CompletionStream, StreamWords};
use super::whole::WholeWords;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, ErrorKind, Family};
use crate::http::serve::Draft;
use crate::http::sse::EventBuffer;
use crate::http::state::HttpState;
use crate::http::written::until_written;
use crate::metrics::RequestTimer;

/// `POST /v1/completions`.
pub async fn completions(request: HttpRequest, payload: Payload, state: Data<HttpState>) -> HttpResponse {
    let checked = check(&request, payload, &state);
    handle(&request, &state, checked, async |checked, timer| {
        answer(checked, timer, &state).await
    })
    .await
}

/// Checks a request, then answers it; what goes wrong is told in OpenAI's form.
pub async fn handle<T>(
    request: &HttpRequest,
    state: &HttpState,
    checked: impl Future<Output = Result<T, ApiError>>,
    answer: impl AsyncFnOnce(T, RequestTimer) -> Result<HttpResponse, ApiError>,
) -> HttpResponse {
    let mut timer = state.metrics.arrived(request);
    let answered = match checked.await {
        Ok(checked) => answer(checked, timer).await,
        Err(error) => {
            timer.failed(error.failure(), &error.message);
            Err(error)
        }
    };
    answered.unwrap_or_else(|error| error.respond(Family::OpenAi))
}

/// A checked request and what its answer needs of it.
struct Checked {
    drafts: Vec<Draft>,
    head: Head,
    choices: Choices,
    stream: Option<StreamUsage>,
    echoes: Option<Vec<Echo>>,
    prompt_only: bool,
    logprobs: Option<u8>,
    prompt_logprobs: Option<u8>,
    token_ids: bool,
}

async fn check(request: &HttpRequest, payload: Payload, state: &HttpState) -> Result<Checked, ApiError> {
    let body = state.read_body(request, payload).await?;
    let caller = state.caller(request, &body)?;
    let rules = Rules::new(state, state.seed(&caller, 0)?);
    let mut parsed = state.check_body(&body, move |bytes| parse(bytes, &rules)).await?;
    if !state.serves(&parsed.model) {
        return Err(unknown_model(&parsed.model));
    }
    parsed.shared = parsed.shared.complete(state).await?;
    let id = state.id_of(request)?;
    let head = Head {
        id: format!("endpoint_common_{id}"),
        object: "text_completion",
        created: state.clock.unix_seconds(),
        model: std::mem::take(&mut parsed.model),
    };
    let adapter = state.model.adapter(&head.model);
    let stops = std::mem::take(&mut parsed.shared.stop).into();
    let (mut drafts, mut echoes) = (Vec::new(), Vec::new());
    for prompt in std::mem::take(&mut parsed.prompts) {
        let (tokens, echo) = tokens_of(prompt, &parsed, state).await?;
        echoes.extend(echo);
        let first = drafts.is_empty();
        let id = if first { id } else { state.draw_id()? };
        let body_bytes = if first { body.bytes.len() } else { 0 };
        drafts.push(Draft {
            adapter: adapter.clone(),
            ..draft(&parsed, &stops, (caller.clone(), id), tokens, body_bytes)
        });
    }
    Ok(Checked {
        drafts,
        head,
        choices: parsed.choices,
        stream: parsed.stream,
        echoes: parsed.echo.then_some(echoes),
        prompt_only: parsed.max_tokens == Some(0),
        logprobs: parsed.logprobs,
        prompt_logprobs: parsed.prompt_logprobs,
        token_ids: parsed.return_token_ids,
    })
}

/// The tokens of a prompt, and its text if that is to be given back.
async fn tokens_of(
    prompt: Prompt,
    request: &CompletionRequest,
    state: &HttpState,
) -> Result<(Vec<u32>, Option<Echo>), ApiError> {
    let skip_special = request.shared.skip_special_tokens;
    let decoded = |tokens: &[u32]| Echo::of_tokens(tokens, skip_special, state.prompts.tokenizer());
    match prompt {
        Prompt::Text(text) => {
            let whole = request.echo.then(|| Echo::of_text(text.clone()));
            let mut tokens = state.encode("prompt", text.into()).await?;
            let cut = request.shared.truncate(&mut tokens);
            let echo = whole.map(|whole| if cut { decoded(&tokens) } else { whole });
            Ok((tokens, echo))
        }
        Prompt::Tokens(mut tokens) => {
            request.shared.truncate(&mut tokens);
            let echo = request.echo.then(|| decoded(&tokens));
            Ok((tokens, echo))
        }
    }
}

fn draft(
    request: &CompletionRequest,
    stops: &Arc<[String]>,
    (caller, id): (Caller, RequestId),
    tokens: Vec<u32>,
    body_bytes: usize,
) -> Draft {
    let shared = &request.shared;
    let prompt_only = request.max_tokens == Some(0);
    let of_echo = request.logprobs.filter(|_| request.echo);
    Draft {
        id,
        caller,
        prompt_field: "prompt",
        tokens: tokens.into(),
        adapter: None,
        body_bytes,
        choices: if prompt_only { 0 } else { request.choices.drawn },
        beam: request.choices.beam && !prompt_only,
        sampling: shared.sampling.clone(),
        max_tokens: request.max_tokens.filter(|_| !prompt_only),
        stop_strings: Arc::clone(stops),
        stop_token_ids: shared.stop_token_ids.clone(),
        ignore_eos: shared.ignore_eos,
        include_stop_str: shared.include_stop_str,
        skip_special_tokens: shared.skip_special_tokens,
        prompt_logprobs: of_echo.max(request.prompt_logprobs),
    }
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
    let answer = state.begin(checked.drafts, timer).await?;
    let tokenizer = state.prompts.tokenizer();
    let logprobs = checked
        .logprobs
        .map(|count| LogprobsWriter::new(tokenizer.clone(), count));
    // A beam search has nothing to stream: its answer is one event.
    if let Some(usage) = checked.stream.filter(|_| !checked.choices.beam) {
        let words = StreamWords {
            head: checked.head,
            usage,
            per_prompt: checked.choices.returned as usize,
            echoes: checked.echoes,
            prompt_only: checked.prompt_only,
            logprobs,
            token_ids: checked.token_ids,
            timings: state.front.usage_timings,
        };
        let words = CompletionStream::new(words, answer.prompts.len());
        let response = HttpResponse::build(StatusCode::OK);
        return Ok(crate::http::sse::respond(response, answer, words, state.silence()));
    }
    let words = WholeWords {
        tokenizer,
        choices: checked.choices,
        echoes: checked.echoes,
        logprobs,
        prompt_logprobs: checked.prompt_logprobs,
        token_ids: checked.token_ids,
        timings: state.front.usage_timings,
    };
    let (choices, usage, timer) = words.collect(answer).await?;
    let usage = match checked.stream {
        Some(StreamUsage::Never) => UsageField::Null,
        _ => UsageField::Counts(usage),
    };
    let reply = Reply {
        head: &checked.head,
        choices,
        usage,
    };
    if checked.stream.is_none() {
        return Ok(until_written(HttpResponse::Ok().json(reply), timer));
    }
    let mut events = EventBuffer::default();
    events.json(&reply)?;
    events.text("[DONE]");
    Ok(until_written(crate::http::sse::at_once(events), timer))
}
