//! Who calls, and how long the answer may take: what a request's headers say about how it is to be served.

use std::time::Duration;

use actix_web::http::header::{HeaderMap, HeaderName};
use config::LimitsConfig;

use super::error::{ApiError, ErrorKind};
use crate::core::queue::Tenant;

/// Header with the longest time that an answer may take, in milliseconds.
pub const TIMEOUT: HeaderName = HeaderName::from_static("x-baton-timeout-ms");

/// See the head of the file.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// Whose key the request has.
    pub tenant: Tenant,
    /// From arrival to the last token.
    pub timeout: Duration,
}

impl Caller {
    /// Reads the headers of a request with the key of `tenant`.
    ///
    /// # Errors
    /// A time that is no number, or not within the limit; the message names the header.
    pub fn new(tenant: Tenant, headers: &HeaderMap, limits: &LimitsConfig) -> Result<Self, ApiError> {
        let most = limits.request_timeout_ms;
        let timeout_ms = match headers.get(&TIMEOUT) {
            None => most,
            Some(value) => {
                let given = String::from_utf8_lossy(value.as_bytes());
                let wanted = given.trim().parse::<u64>().ok().filter(|ms| (1..=most).contains(ms));
                wanted.ok_or_else(|| invalid(&given, most))?
            }
        };
        Ok(Self {
            tenant,
            timeout: Duration::from_millis(timeout_ms),
        })
    }
}

fn invalid(given: &str, most: u64) -> ApiError {
    let shown: String = given.chars().take(32).collect();
    ApiError {
        kind: ErrorKind::Invalid,
        message: format!("the header `{TIMEOUT}` is \"{shown}\", but must be a whole number from 1 to {most}"),
        param: Some(TIMEOUT.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::HeaderValue;

    use super::*;

    fn caller(value: Option<&str>) -> Result<u128, String> {
        let mut headers = HeaderMap::new();
        if let Some(value) = value {
            headers.insert(TIMEOUT, HeaderValue::from_str(value).expect("visible"));
        }
        let limits = LimitsConfig {
            request_timeout_ms: 5_000,
            ..LimitsConfig::default()
        };
        let caller = Caller::new(Tenant(3), &headers, &limits);
        caller
            .map(|caller| caller.timeout.as_millis())
            .map_err(|error| error.message)
    }

    #[test]
    fn the_clients_time_is_taken_within_the_limit() {
        assert_eq!(caller(None), Ok(5_000));
        assert_eq!(caller(Some("250")), Ok(250));
        assert_eq!(caller(Some(" 5000 ")), Ok(5_000));
        for wrong in ["0", "5001", "-1", "1.5", "soon", ""] {
            let message = caller(Some(wrong)).expect_err(wrong);
            assert!(
                message.contains("x-baton-timeout-ms") && message.contains("from 1 to 5000"),
                "{message}"
            );
        }
    }
}
