//! A whole answer on its way out: its request's clock runs until the connection has taken all of it.

use std::pin::Pin;
use std::task::{Context, Poll};

use actix_web::HttpResponse;
use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::web::Bytes;

use crate::metrics::RequestTimer;

/// Where the time went, if the client asked for it.
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// `response`, whose sending `timer` follows.
pub fn until_written(mut response: HttpResponse, timer: RequestTimer) -> HttpResponse {
    if let Some(timing) = timer.server_timing()
        && let Ok(value) = HeaderValue::from_str(&timing)
    {
        response.headers_mut().insert(SERVER_TIMING, value);
    }
    response.map_body(|_, body| BoxBody::new(Timed { body, _timer: timer }))
}

/// A body that holds a clock: it is dropped once the connection has taken all of it.
struct Timed {
    body: BoxBody,
    _timer: RequestTimer,
}

impl MessageBody for Timed {
    type Error = <BoxBody as MessageBody>::Error;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Self::Error>>> {
        Pin::new(&mut self.body).poll_next(cx)
    }
}
