//! The span of a call, and the names that it goes by.
//!
//! Life of a span:
//! 1. The call arrives on a path that generates: its `traceparent`, or chance, decides whether it is traced.
//! 2. What comes to be known of it is noted here: by the call's clock ([`crate::metrics::RequestTimer`]), and by the envelope,
//!    which knows the status of the answer.
//! 3. Whoever lets go of it last has it exported: the answer is out then, and the request forgotten.
//!
//! The phases are children of it. The driver exports them, but for the last one, which only this layer sees: the time until
//! the connection had all of the answer.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use actix_web::http::StatusCode;
use actix_web::http::header::HeaderMap;
use actix_web::{HttpMessage, HttpRequest};
use protocol::context::RequestContext;
use protocol::ids::RequestId;
use runtime::traces::{Array, Begun, KeyValue, Span, SpanEvent, StringValue, Value, tracer};

use crate::core::journey::{Incident, Served};
use crate::core::phases::Phase;

/// Attributes of a call at most, but for rare ones.
const ATTRIBUTES: usize = 16;

/// The client's own name for its request, if it is usable.
#[derive(Clone, Debug)]
pub struct ClientId(pub Arc<str>);

/// The call's span; clones are the same one.
#[derive(Clone)]
pub struct CallSpan(Arc<Inner>);

struct Inner {
    begun: Begun,
    arrived: Instant,
    method: String,
    path: String,
    /// The pattern that the path fits.
    route: Option<String>,
    client_id: Option<String>,
    told: Mutex<Told>,
}

/// What came to be known of a call.
#[derive(Clone, Default)]
struct Told {
    status: Option<StatusCode>,
    /// When it was over; `None` while it is not.
    ended: Option<Instant>,
    /// When the cluster was done with it.
    written_from: Option<Instant>,
    first_token: Option<Instant>,
    model: Arc<str>,
    requests: Vec<RequestId>,
    choices: usize,
    max_tokens: u32,
    prompt_tokens: usize,
    generated_tokens: u32,
    finish_reasons: Vec<&'static str>,
    served: Vec<Served>,
    /// Kind and message.
    error: Option<(&'static str, String)>,
}

/// What a call asks for.
pub struct Asked {
    /// The model, as it is served.
    pub model: Arc<str>,
    /// Its requests, one for each prompt.
    pub requests: Vec<RequestId>,
    /// Choices of each.
    pub choices: usize,
    /// Most tokens of a choice.
    pub max_tokens: u32,
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
}

impl CallSpan {
    /// Of a call that has just arrived; `None` if it is not traced.
    pub fn begin(request: &HttpRequest, arrived: Instant) -> Option<Self> {
        let tracer = tracer()?;
        let headers = request.headers();
        let state = joined(headers, "tracestate");
        let begun = tracer.begin(only(headers, "traceparent"), state.as_deref())?;
        let span = Self(Arc::new(Inner {
            begun,
            arrived,
            method: request.method().to_string(),
            path: request.path().to_owned(),
            route: request.match_pattern(),
            client_id: client_id(request),
            told: Mutex::default(),
        }));
        request.extensions_mut().insert(span.clone());
        Some(span)
    }

    /// By which names its requests go.
    pub fn context(&self) -> RequestContext {
        RequestContext {
            client_id: self.0.client_id.clone(),
            trace: Some(self.0.begun.context.clone()),
        }
    }

    /// It is valid, and goes to the cluster.
    pub fn asked(&self, asked: Asked) {
        let mut told = self.told();
        told.model = asked.model;
        told.requests = asked.requests;
        told.choices = asked.choices;
        told.max_tokens = asked.max_tokens;
        told.prompt_tokens = asked.prompt_tokens;
    }

    /// Its first token is there.
    pub fn first_token(&self, now: Instant) {
        self.told().first_token = Some(now);
    }

    /// A choice has ended.
    pub fn choice_ended(&self, finish: &'static str) {
        self.told().finish_reasons.push(finish);
    }

    /// Where one of its requests was served.
    pub fn served(&self, served: Served) {
        self.told().served.push(served);
    }

    /// The status of its answer.
    pub fn answered(&self, status: StatusCode) {
        self.told().status = Some(status);
    }

    /// It is not answered, or not in full.
    pub fn failed(&self, kind: &'static str, message: &str) {
        self.told().error = Some((kind, message.to_owned()));
    }

    /// It is over. `written_from`: when the cluster was done with it, if it was; the rest of the time was the client's.
    pub fn ended(&self, now: Instant, written_from: Option<Instant>, generated_tokens: u32) {
        let mut told = self.told();
        told.ended = Some(now);
        told.written_from = written_from;
        told.generated_tokens = generated_tokens;
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        lock(&self.0.told)
    }
}

fn lock(told: &Mutex<Told>) -> MutexGuard<'_, Told> {
    // Every change is a plain assignment: a panic leaves no half of it.
    told.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Inner {
    fn drop(&mut self) {
        let told = std::mem::take(&mut *lock(&self.told));
        let Some(ended) = told.ended else { return };
        let Some(tracer) = tracer() else { return };
        let head = Head {
            begun: self.begun.clone(),
            arrived: self.arrived,
            ended,
            method: std::mem::take(&mut self.method),
            path: std::mem::take(&mut self.path),
            route: self.route.take(),
            client_id: self.client_id.take(),
        };
        let spans = 1 + usize::from(told.written_from.is_some());
        tracer.report(spans, move |spans| make(head, told, spans));
    }
}

/// What was known of a call when it came, and when it was over.
struct Head {
    begun: Begun,
    arrived: Instant,
    ended: Instant,
    method: String,
    path: String,
    route: Option<String>,
    client_id: Option<String>,
}

fn make(head: Head, told: Told, spans: &mut Vec<Span>) {
    if let Some(from) = told.written_from {
        let name = Phase::ClientWrite.as_str();
        spans.push(Span::child(&head.begun.context, name, from, head.ended));
    }
    let route = head.route.as_deref().unwrap_or(&head.path);
    let name = format!("{} {route}", head.method);
    let mut span = Span::of_call(head.begun.clone(), name, head.arrived, head.ended);
    span.attributes = Vec::with_capacity(ATTRIBUTES);
    http_attributes(&head, &told, &mut span.attributes);
    generation_attributes(&told, &mut span.attributes);
    baton_attributes(&head, &told, &mut span.attributes);
    let first = told.first_token.map(|at| SpanEvent {
        name: "first_token",
        at,
        attributes: Vec::new(),
    });
    let incidents = told.served.iter().flat_map(|served| &served.incidents).map(event);
    span.events = first.into_iter().chain(incidents).collect();
    span.events.sort_by_key(|event| event.at);
    if let Some((kind, message)) = told.error {
        span.attributes.push(KeyValue::new("error.type", kind));
        // What is wrong with a request, or a client that leaves, is no failure of the server, as OpenTelemetry has it.
        let is_clients = |status: StatusCode| status.is_client_error() && status != StatusCode::FAILED_DEPENDENCY;
        let refused = kind == "cancelled" || told.status.is_some_and(is_clients);
        span.error = (!refused).then(|| message.into());
    }
    spans.push(span);
}

fn event(incident: &Incident) -> SpanEvent {
    SpanEvent {
        name: incident.what,
        at: incident.at,
        attributes: vec![KeyValue::new("baton.cause", incident.cause.clone())],
    }
}

fn http_attributes(head: &Head, told: &Told, attributes: &mut Vec<KeyValue>) {
    attributes.extend([
        KeyValue::new("http.request.method", head.method.clone()),
        KeyValue::new("url.path", head.path.clone()),
    ]);
    if let Some(route) = &head.route {
        attributes.push(KeyValue::new("http.route", route.clone()));
    }
    if let Some(status) = told.status {
        attributes.push(KeyValue::new("http.response.status_code", i64::from(status.as_u16())));
    }
}

/// In OpenTelemetry's words for generative AI.
fn generation_attributes(told: &Told, attributes: &mut Vec<KeyValue>) {
    if told.requests.is_empty() {
        return;
    }
    let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    attributes.extend([
        KeyValue::new("gen_ai.provider.name", "baton"),
        KeyValue::new("gen_ai.request.model", Arc::clone(&told.model)),
        KeyValue::new("gen_ai.response.model", Arc::clone(&told.model)),
        KeyValue::new("gen_ai.request.choice.count", number(told.choices)),
        KeyValue::new("gen_ai.request.max_tokens", i64::from(told.max_tokens)),
        KeyValue::new("gen_ai.usage.input_tokens", number(told.prompt_tokens)),
        KeyValue::new("gen_ai.usage.output_tokens", i64::from(told.generated_tokens)),
        KeyValue::new(
            "gen_ai.response.finish_reasons",
            texts(told.finish_reasons.iter().copied()),
        ),
    ]);
}

fn baton_attributes(head: &Head, told: &Told, attributes: &mut Vec<KeyValue>) {
    if let Some(first) = told.requests.first() {
        attributes.push(KeyValue::new("baton.request_id", first.to_string()));
    }
    if told.requests.len() > 1 {
        let all = told.requests.iter().map(ToString::to_string);
        attributes.push(KeyValue::new("baton.request_ids", texts(all)));
    }
    if let Some(id) = &head.client_id {
        attributes.push(KeyValue::new("baton.client_request_id", id.clone()));
    }
    if !told.served.is_empty() {
        let last = |served: &Served| served.attempts.last().map_or(0, |attempt| attempt.number);
        let attempts = told.served.iter().map(last).max().unwrap_or_default();
        let mut nodes: Vec<Arc<str>> = told.served.iter().flat_map(Served::nodes).collect();
        nodes.sort_unstable();
        nodes.dedup();
        attributes.push(KeyValue::new("baton.attempt", i64::from(attempts)));
        attributes.push(KeyValue::new(
            "baton.nodes",
            texts(nodes.iter().map(ToString::to_string)),
        ));
    }
}

fn texts<T: Into<StringValue>>(all: impl Iterator<Item = T>) -> Value {
    Value::Array(Array::String(all.map(Into::into).collect()))
}

/// The client's own name for a request.
pub fn client_id(request: &HttpRequest) -> Option<String> {
    let extensions = request.extensions();
    extensions.get::<ClientId>().map(|id| id.0.to_string())
}

/// The value of a header that may be there once.
fn only<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let mut values = headers.get_all(name);
    let value = values.next()?;
    values.next().is_none().then(|| value.to_str().ok()).flatten()
}

/// The values of a header that may be there several times: one list.
fn joined(headers: &HeaderMap, name: &str) -> Option<String> {
    let values: Option<Vec<&str>> = headers.get_all(name).map(|value| value.to_str().ok()).collect();
    values
        .filter(|values| !values.is_empty())
        .map(|values| values.join(","))
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::{HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn a_header_that_is_there_twice_is_one_list_or_none() {
        let mut headers = HeaderMap::new();
        for (name, value) in [("traceparent", "a"), ("tracestate", "x=1"), ("tracestate", "y=2")] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        assert_eq!(only(&headers, "traceparent"), Some("a"));
        assert_eq!(joined(&headers, "tracestate").as_deref(), Some("x=1,y=2"));
        headers.append(HeaderName::from_static("traceparent"), HeaderValue::from_static("b"));
        assert_eq!(only(&headers, "traceparent"), None);
        assert_eq!(joined(&headers, "nothing"), None);
    }
}
