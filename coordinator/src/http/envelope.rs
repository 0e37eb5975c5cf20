//! What happens to every request and answer, whatever the path: request ids, CORS, API keys, the connection's watch.

use std::rc::Rc;
use std::sync::Arc;

use actix_web::body::{BodySize, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::error::ErrorRequestTimeout;
use actix_web::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, HeaderName, HeaderValue,
};
use actix_web::http::{ConnectionType, Method, StatusCode, Version};
use actix_web::middleware::Next;
use actix_web::{Error, HttpMessage, HttpResponse, web};
use protocol::ids::RequestId;

use super::connection::{Connection, WatchedBody};
use super::error::{ApiError, ErrorKind, Family};
use super::keys;
use super::mindie;
use super::state::HttpState;
use super::trace::{CallSpan, ClientId};
use crate::core::queue::Tenant;

/// Header that carries a request's id, both ways.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest id that is taken over from a client, in bytes.
const MAX_REQUEST_ID: usize = 256;
/// Paths that need no key: probes and scrapers have none.
const OPEN_PATHS: [&str; 3] = ["/health", "/ping", "/metrics"];

/// The middleware.
///
/// # Errors
/// The connection has been given up; every other failure below it is an answer.
pub async fn envelope(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<WatchedBody>, Error> {
    let connection = request.request().conn_data::<Rc<Connection>>().cloned();
    if let Some(connection) = &connection {
        connection.working();
    }
    let knows_chunks = request.version() >= Version::HTTP_11;
    let (id, client) = name(&request);
    let own = request.extensions().get::<RequestId>().copied();
    tracing::debug!(
        request = own.map(display),
        client_request_id = client.as_deref(),
        method = %request.method(),
        path = request.path(),
        "request"
    );
    let strict = request
        .app_data::<web::Data<HttpState>>()
        .is_some_and(|state| state.front.strict_mindie);
    let early = if request.method() == Method::OPTIONS {
        Some(preflight())
    } else {
        refusal(&request)
    };
    let answer = match early {
        Some(response) => request.into_response(response),
        None => unless_given_up(connection.as_deref(), next.call(request))
            .await?
            .map_into_boxed_body(),
    };
    let answer = if strict { mindie::restate(answer) } else { answer };
    let mut answer = answer.map_body(|_, body| WatchedBody::new(body, connection));
    if !knows_chunks && answer.response().body().size() == BodySize::Stream {
        // The end of the connection is the end of the body.
        let head = answer.response_mut().head_mut();
        head.no_chunking(true);
        head.set_connection_type(ConnectionType::Close);
    }
    if let Some(span) = answer.request().extensions().get::<CallSpan>() {
        span.answered(answer.status());
    }
    let headers = answer.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&id) {
        headers.insert(REQUEST_ID, id);
    }
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
    Ok(answer)
}

/// Waits for an answer as long as there is somebody to send it to.
async fn unless_given_up<T>(
    connection: Option<&Connection>,
    answer: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let Some(connection) = connection else {
        return answer.await;
    };
    tokio::select! {
        answer = answer => answer,
        () = connection.given_up() => Err(ErrorRequestTimeout("the connection is given up")),
    }
}

/// Names the request, by the [`RequestId`] that the nodes know it by too; and by the client's word, if it is one that a header
/// and a log can carry. The first of the two returned is what the answer says: the client's word, if there is one.
fn name(request: &ServiceRequest) -> (String, Option<Arc<str>>) {
    let drawn = request
        .app_data::<web::Data<HttpState>>()
        .and_then(|state| state.draw_id().ok());
    if let Some(id) = drawn {
        request.extensions_mut().insert::<RequestId>(id);
    }
    let given = request.headers().get(&REQUEST_ID).and_then(|value| value.to_str().ok());
    let usable = given.filter(|id| !id.is_empty() && id.len() <= MAX_REQUEST_ID);
    let client: Option<Arc<str>> = usable.map(Arc::from);
    if let Some(id) = &client {
        request.extensions_mut().insert(ClientId(Arc::clone(id)));
    }
    let told = usable.map_or_else(|| drawn.map(|id| id.to_string()).unwrap_or_default(), str::to_owned);
    (told, client)
}

fn preflight() -> HttpResponse {
    HttpResponse::build(StatusCode::NO_CONTENT)
        .insert_header((ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, OPTIONS"))
        .insert_header((
            ACCESS_CONTROL_ALLOW_HEADERS,
            "content-type, authorization, x-request-id, x-baton-timeout-ms, x-baton-phases, idempotency-key, \
             traceparent, tracestate",
        ))
        .insert_header((ACCESS_CONTROL_MAX_AGE, 86_400))
        .finish()
}

/// The answer to a request that lacks a key it needs.
fn refusal(request: &ServiceRequest) -> Option<HttpResponse> {
    let state = request.app_data::<web::Data<HttpState>>()?;
    let known = &state.front.api_keys;
    let path = request.path();
    let probe = path == "/" && request.method() == Method::GET;
    if known.is_empty() || probe || OPEN_PATHS.contains(&path) {
        return None;
    }
    let given = keys::bearer(request.headers());
    if let Some(number) = given.and_then(|given| keys::find(known, given)) {
        request.extensions_mut().insert::<Tenant>(Tenant(number));
        return None;
    }
    let error = ApiError::new(
        ErrorKind::Unauthorised,
        "a valid API key is needed: Authorization: Bearer KEY",
    );
    Some(error.respond(Family::of_path(path)))
}
