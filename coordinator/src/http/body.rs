//! Request bodies: declared as JSON, within the size limit, sent fast enough, and few enough at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap};
use actix_web::web::{Bytes, BytesMut, Payload};
use futures_util::StreamExt;
use runtime::clock::Clock;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::error::{ApiError, ErrorKind};

/// A body must arrive at least this fast, after the time that is granted to begin: 16 KiB/s.
const MIN_BYTES_PER_SECOND: u64 = 16_384;
/// Unit in which memory is booked.
const BOOKED_BYTES: usize = 1_024;

/// Reads bodies; bounds the memory that all bodies together take.
pub struct BodyReader {
    max_bytes: usize,
    /// Time to begin, and for every pause that the minimum rate has not earned.
    grace: Duration,
    memory: Arc<Semaphore>,
    clock: Clock,
}

/// A whole body. Its memory is booked until it is dropped.
pub struct Body {
    /// The bytes.
    pub bytes: Bytes,
    _booked: Option<OwnedSemaphorePermit>,
}

impl BodyReader {
    /// `max_bytes`: longest body. `all_bytes`: all bodies being read or parsed together, at least one of the longest.
    pub fn new(max_bytes: usize, all_bytes: usize, grace: Duration, clock: Clock) -> Self {
        let units = all_bytes
            .max(max_bytes)
            .div_ceil(BOOKED_BYTES)
            .min(Semaphore::MAX_PERMITS);
        Self {
            max_bytes,
            grace,
            memory: Arc::new(Semaphore::new(units)),
            clock,
        }
    }

    /// Reads a body whose request has `headers`.
    ///
    /// # Errors
    /// A declared type that is not JSON, too many bytes, too slow a client, or no memory left.
    pub async fn read(&self, headers: &HeaderMap, mut payload: Payload) -> Result<Body, ApiError> {
        check_media_type(headers)?;
        let declared = headers
            .get(CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|length| length > self.max_bytes as u64) {
            return Err(self.too_large());
        }
        let started = self.clock.now();
        let mut bytes = BytesMut::new();
        let mut booked = None;
        loop {
            let wait = self.patience(started, bytes.len());
            let chunk = match timeout(wait, payload.next()).await {
                Err(_) => return Err(ApiError::new(ErrorKind::SlowBody, "the body does not arrive in time")),
                Ok(None) => {
                    return Ok(Body {
                        bytes: bytes.freeze(),
                        _booked: booked,
                    });
                }
                Ok(Some(Err(_))) => {
                    return Err(ApiError::new(
                        ErrorKind::Invalid,
                        "the body ends before its announced end",
                    ));
                }
                Ok(Some(Ok(chunk))) => chunk,
            };
            let length = bytes.len() + chunk.len();
            if length > self.max_bytes {
                return Err(self.too_large());
            }
            self.book(&mut booked, length)?;
            bytes.extend_from_slice(&chunk);
        }
    }

    /// How long to wait for the next chunk.
    fn patience(&self, started: Instant, received: usize) -> Duration {
        let earned = Duration::from_millis(received as u64 * 1_000 / MIN_BYTES_PER_SECOND);
        (self.grace + earned).saturating_sub(self.clock.now() - started)
    }

    fn book(&self, booked: &mut Option<OwnedSemaphorePermit>, length: usize) -> Result<(), ApiError> {
        let units = length.div_ceil(BOOKED_BYTES);
        let have = booked.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        if units <= have {
            return Ok(());
        }
        let missing = u32::try_from(units - have).unwrap_or(u32::MAX);
        let more = Arc::clone(&self.memory).try_acquire_many_owned(missing).map_err(|_| {
            ApiError::new(
                ErrorKind::Overloaded { retry_after_s: 1 },
                "too many request bodies are being read",
            )
        })?;
        match booked {
            Some(booked) => booked.merge(more),
            None => *booked = Some(more),
        }
        Ok(())
    }

    fn too_large(&self) -> ApiError {
        ApiError::new(
            ErrorKind::TooLarge,
            format!("the body must have at most {} bytes", self.max_bytes),
        )
    }
}

fn check_media_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let refuse = |what: &str| Err(ApiError::new(ErrorKind::WrongMediaType, what.to_owned()));
    if let Some(value) = headers.get(CONTENT_TYPE) {
        let essence = value
            .to_str()
            .unwrap_or("?")
            .split(';')
            .next()
            .unwrap_or_default()
            .trim();
        if !essence.is_empty() && !essence.eq_ignore_ascii_case("application/json") {
            return refuse("the content type must be application/json, or not be given");
        }
    }
    if let Some(value) = headers.get(CONTENT_ENCODING)
        && !value.as_bytes().eq_ignore_ascii_case(b"identity")
    {
        return refuse("the body must not be compressed: no content encoding but identity is read");
    }
    Ok(())
}
