//! The generating paths of TGI.

use std::sync::Arc;

use actix_web::http::StatusCode;
use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse, HttpResponseBuilder};
use protocol::sampling::SamplingParams;

use super::answer::{BestOfSequence, Generated, Token, finish_reason, only_ids};
use super::request::{GenerateRequest, Rules, parse, refuse_in_stream, refuse_unknown_adapter};
use super::stream::TgiStream;
use crate::http::answer::{Answer, Collected};
use crate::http::caller::Caller;
use crate::http::error::{ApiError, Family};
use crate::http::serve::Draft;
use crate::http::state::HttpState;
use crate::http::written::until_written;
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
    let mut timer = state.metrics.arrived(request);
    let checked = match check(request, payload, state, shape).await {
        Ok(checked) => checked,
        Err(error) => {
            timer.failed(error.failure(), &error.message);
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
    /// Of each sequence to choose from: it is what a request with that seed gets.
    seeds: Vec<u64>,
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
    let caller = state.caller(request, &body)?;
    let rules = Rules::new(state, state.seed(&caller, 0)?);
    let media = Arc::clone(&state.media);
    let parsed = state
        .check_body(&body, move |bytes| parse(bytes, &rules, &media))
        .await?;
    let stream = match shape {
        Shape::Whole => false,
        Shape::Stream => true,
        Shape::ListOrStream => parsed.stream,
    };
    refuse_unknown_adapter(&parsed, &state.model.adapters)?;
    if stream {
        refuse_in_stream(&parsed)?;
    }
    let GenerateRequest {
        inputs,
        details,
        prompt_details,
        return_full_text,
        truncate,
        best_of,
        ..
    } = parsed;
    if let Some(grammar) = &parsed.sampling.grammar {
        state.check_grammar("parameters.grammar", grammar).await?;
    }
    let inputs: Arc<str> = inputs.into();
    let mut tokens = state.encode("inputs", Arc::clone(&inputs)).await?;
    if let Some(keep) = truncate {
        tokens.drain(..tokens.len().saturating_sub(keep));
    }
    let mut sampling = parsed.sampling;
    let seeds = give_seeds(&mut sampling, best_of, &caller, state)?;
    let draft = Draft {
        id: state.id_of(request)?,
        caller,
        prompt_field: "inputs",
        tokens: tokens.into(),
        adapter: parsed.adapter,
        body_bytes: body.bytes.len(),
        choices: best_of,
        beam: false,
        sampling,
        max_tokens: Some(parsed.max_new_tokens),
        stop_strings: parsed.stop.into(),
        stop_token_ids: Vec::new(),
        ignore_eos: false,
        include_stop_str: false,
        skip_special_tokens: true,
        prompt_logprobs: prompt_details.then_some(0),
    };
    Ok(Checked {
        draft,
        seeds,
        prefix: if return_full_text {
            inputs.to_string()
        } else {
            String::new()
        },
        input_chars: inputs.chars().count(),
        details,
        prompt_details,
        stream,
        list: shape == Shape::ListOrStream,
    })
}

/// Gives each of several sequences a seed of its own, the first the request's. Returns them all.
fn give_seeds(
    sampling: &mut SamplingParams,
    best_of: u32,
    caller: &Caller,
    state: &HttpState,
) -> Result<Vec<u64>, ApiError> {
    let further = (1..u64::from(best_of)).map(|index| state.seed(caller, index));
    let seeds: Vec<u64> = std::iter::once(Ok(sampling.seed))
        .chain(further)
        .collect::<Result<_, _>>()?;
    if best_of > 1 {
        sampling.choice_seeds.clone_from(&seeds);
    }
    Ok(seeds)
}

async fn answer(checked: Checked, timer: RequestTimer, state: &HttpState) -> Result<HttpResponse, ApiError> {
    let seed = checked.draft.sampling.seed;
    let mut answer = state.begin(vec![checked.draft], timer).await?;
    let mut response = HttpResponse::build(StatusCode::OK);
    response.insert_header(("x-compute-type", "cpu"));
    response.insert_header(("x-compute-characters", checked.input_chars.to_string()));
    let prompt_tokens = answer.prompts.first().map_or(0, |prompt| prompt.tokens.len());
    if checked.stream {
        let words = TgiStream::new(checked.prefix, checked.details, seed, prompt_tokens);
        return Ok(crate::http::sse::respond(response, answer, words, state.silence()));
    }
    let collected = answer.collect().await?;
    time_headers(&mut response, answer.timer.succeeded());
    let prefill = if checked.prompt_details {
        prompt_tokens_of(&answer, state)
    } else {
        Vec::new()
    };
    let mut sequences: Vec<BestOfSequence> = collected
        .iter()
        .zip(&checked.seeds)
        .map(|(collected, &seed)| BestOfSequence {
            generated_text: format!("{}{}", checked.prefix, collected.text()),
            finish_reason: finish_reason(&collected.completion),
            generated_tokens: collected.completion.generated_tokens,
            seed,
            prefill: prefill.clone(),
            tokens: collected.shown.iter().map(Token::generated).collect(),
        })
        .collect();
    if state.front.strict_mindie {
        for sequence in &mut sequences {
            only_ids(&mut sequence.prefill);
            only_ids(&mut sequence.tokens);
        }
    }
    let winner = sequences.remove(best(&collected));
    let generated = Generated::new(winner, sequences, checked.details, prompt_tokens);
    let response = if checked.list {
        response.json([generated])
    } else {
        response.json(generated)
    };
    Ok(until_written(response, answer.into_timer()))
}

fn prompt_tokens_of(answer: &Answer, state: &HttpState) -> Vec<Token> {
    let Some(prompt) = answer.prompts.first() else {
        return Vec::new();
    };
    let logprobs = prompt.logprobs.as_deref().unwrap_or_default();
    Token::of_prompt(&prompt.tokens, logprobs, state.prompts.tokenizer())
}

/// The sequence with the highest mean log-probability of its tokens; among equals the first.
fn best(collected: &[Collected]) -> usize {
    let mean = |collected: &Collected| {
        let all = collected.shown.iter();
        let sum: f64 = all.map(|shown| f64::from(shown.token.sampled.logprob)).sum();
        sum / collected.shown.len().max(1) as f64
    };
    let mut best = 0;
    for (index, candidate) in collected.iter().enumerate() {
        if mean(candidate) > mean(&collected[best]) {
            best = index;
        }
    }
    best
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
