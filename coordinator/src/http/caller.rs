//! Who calls, how long the answer may take, and whether the call is one that was sent before: what a request's headers say
//! about how it is to be served.

use std::sync::Arc;
use std::time::Duration;

use actix_web::http::header::{HeaderMap, HeaderName};
use config::LimitsConfig;
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128};

use super::error::{ApiError, ErrorKind};
use crate::core::queue::Tenant;

/// Header with the longest time that an answer may take, in milliseconds.
pub const TIMEOUT: HeaderName = HeaderName::from_static("x-baton-timeout-ms");

/// Header that asks where the time of the answer went.
pub const PHASES: HeaderName = HeaderName::from_static("x-baton-phases");

/// Header that names a call, so that it can be sent again.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Longest name of a call, in bytes.
const MAX_KEY: usize = 255;

/// Name of a call.
#[derive(Clone, Debug)]
pub struct IdempotencyKey {
    /// The client's word.
    pub name: Arc<str>,
    /// Hash of path and body.
    pub fingerprint: u128,
}

/// See the head of the file.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Whose key the request has.
    pub tenant: Tenant,
    /// From arrival to the last token.
    pub timeout: Duration,
    /// The answer is to say where its time went.
    pub phases: bool,
    /// The call's name, if it has one.
    pub key: Option<IdempotencyKey>,
}

impl Caller {
    /// Reads the headers of a request with the API key of `tenant`.
    ///
    /// # Errors
    /// A time that is no number or not within the limit, or a name that is empty, too long or not text; the message names
    /// the header.
    pub fn new(
        tenant: Tenant,
        headers: &HeaderMap,
        (path, body): (&str, &[u8]),
        limits: &LimitsConfig,
    ) -> Result<Self, ApiError> {
        let most = limits.request_timeout_ms;
        let timeout_ms = match headers.get(&TIMEOUT) {
            None => most,
            Some(value) => {
                let given = String::from_utf8_lossy(value.as_bytes());
                let wanted = given.trim().parse::<u64>().ok().filter(|ms| (1..=most).contains(ms));
                wanted.ok_or_else(|| invalid(&TIMEOUT, &given, &format!("a whole number from 1 to {most}")))?
            }
        };
        let phases = match headers.get(&PHASES).map(|value| value.as_bytes()) {
            None | Some(b"0" | b"false") => false,
            Some(b"1" | b"true") => true,
            Some(other) => {
                let given = String::from_utf8_lossy(other);
                return Err(invalid(&PHASES, &given, "1, true, 0 or false"));
            }
        };
        let key = match headers.get(&IDEMPOTENCY_KEY) {
            None => None,
            Some(value) => {
                let given = String::from_utf8_lossy(value.as_bytes());
                let usable = value
                    .to_str()
                    .is_ok_and(|name| (1..=MAX_KEY).contains(&name.trim().len()));
                if !usable {
                    let right = format!("1 to {MAX_KEY} visible ASCII characters");
                    return Err(invalid(&IDEMPOTENCY_KEY, &given, &right));
                }
                Some(IdempotencyKey {
                    name: given.trim().into(),
                    fingerprint: xxh3_128(path.as_bytes()) ^ xxh3_128(body).rotate_left(1),
                })
            }
        };
        Ok(Self {
            key,
            phases,
            tenant,
            timeout: Duration::from_millis(timeout_ms),
        })
    }
}

impl Caller {
    /// Seed number `index` of a call that brings none, if it follows from the call's name: the same wherever and whenever
    /// the call is served. Never 0.
    pub fn named_seed(&self, index: u64) -> Option<u64> {
        let key = self.key.as_ref()?;
        Some(xxh3_64_with_seed(key.name.as_bytes(), index).max(1))
    }
}

fn invalid(header: &HeaderName, given: &str, right: &str) -> ApiError {
    let shown: String = given.chars().take(32).collect();
    ApiError {
        kind: ErrorKind::Invalid,
        message: format!("the header `{header}` is \"{shown}\", but must be {right}"),
        param: Some(header.to_string()),
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
        let caller = Caller::new(Tenant(3), &headers, ("/generate", b"{}"), &limits);
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

    fn named(name: &str, body: &str) -> Result<Caller, String> {
        let mut headers = HeaderMap::new();
        headers.insert(
            IDEMPOTENCY_KEY,
            HeaderValue::from_bytes(name.as_bytes()).expect("a header"),
        );
        let about = ("/generate", body.as_bytes());
        Caller::new(Tenant(0), &headers, about, &LimitsConfig::default()).map_err(|error| error.message)
    }

    #[test]
    fn phases_are_told_to_those_who_ask() {
        let asked = |value: Option<&str>| {
            let mut headers = HeaderMap::new();
            if let Some(value) = value {
                headers.insert(PHASES, HeaderValue::from_str(value).expect("visible"));
            }
            let about = ("/generate", b"{}".as_slice());
            let caller = Caller::new(Tenant(0), &headers, about, &LimitsConfig::default());
            caller.map(|caller| caller.phases).map_err(|error| error.message)
        };
        assert_eq!(asked(None), Ok(false));
        for (value, wanted) in [("1", true), ("true", true), ("0", false), ("false", false)] {
            assert_eq!(asked(Some(value)), Ok(wanted));
        }
        let message = asked(Some("yes")).expect_err("no such value");
        assert!(
            message.contains("x-baton-phases") && message.contains("yes"),
            "{message}"
        );
    }

    #[test]
    fn a_name_gives_seeds_and_stands_for_a_body() {
        let (first, again) = (named("a-1", "{}").expect("a name"), named("a-1", "{}").expect("a name"));
        assert_eq!(first.named_seed(0), again.named_seed(0));
        assert_ne!(first.named_seed(0), first.named_seed(1));
        assert_ne!(first.named_seed(0), named("a-2", "{}").expect("a name").named_seed(0));
        let fingerprint = |caller: Caller| caller.key.expect("named").fingerprint;
        let other = fingerprint(named("a-1", "{ }").expect("a name"));
        assert_eq!(fingerprint(first), fingerprint(again));
        assert_ne!(fingerprint(named("a-1", "{}").expect("a name")), other);
        for wrong in ["", " ", &"x".repeat(256), "\u{e9}"] {
            let message = named(wrong, "{}").expect_err(wrong);
            assert!(message.contains("idempotency-key"), "{message}");
        }
    }
}
