//! A client of etcd's JSON interface (`/v3/...`, etcd 3.4 and newer): leases, keys, watches, nothing else.
//!
//! Every call has a deadline, goes to one endpoint, and to the next one at the next call if it failed. Keys, values and
//! numbers travel as the interface wants them: bytes in base64, 64-bit numbers as strings.

mod tls;
mod watch;
mod words;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use config::DiscoveryConfig;
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use thiserror::Error;

pub use watch::{Change, Watch};
use words::{Authenticated, Granted, KeptAlive, RangeAnswer, Refusal, encode, end_of_prefix, number};

/// Most bytes of an answer that are read.
const MAX_ANSWER: usize = 1 << 20;
/// Most bytes of a refusal that are read.
const MAX_REFUSAL: usize = 4_096;

/// Why etcd does not help.
#[derive(Debug, Error)]
pub enum EtcdError {
    /// A file of the settings cannot be used.
    #[error("discovery.{field} = {path:?}: {reason}")]
    Setting {
        /// The field.
        field: &'static str,
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// The HTTP client cannot be made.
    #[error("no HTTP client for etcd: {0}")]
    Client(String),
    /// Nobody answered, or not in time.
    #[error("etcd {endpoint}: {reason}")]
    Unreachable {
        /// Which.
        endpoint: String,
        /// What happened.
        reason: String,
    },
    /// etcd refused.
    #[error("etcd {endpoint} refused {what} with {status}: {message}")]
    Refused {
        /// Which.
        endpoint: String,
        /// What was asked.
        what: &'static str,
        /// HTTP status.
        status: u16,
        /// etcd's words.
        message: String,
    },
    /// What came is no answer of etcd.
    #[error("etcd {endpoint} answered {what} with something else: {reason}")]
    Answer {
        /// Which.
        endpoint: String,
        /// What was asked.
        what: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

/// The keys below a prefix at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// etcd's revision at that moment.
    pub revision: i64,
    /// Key to value; those that are no UTF-8 are left out.
    pub values: BTreeMap<String, String>,
}

/// A lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Its number.
    pub id: i64,
    /// How long it lives, in seconds; 0: it does not.
    pub ttl: u64,
}

struct User {
    name: String,
    password: String,
    token: Mutex<Option<String>>,
}

/// An etcd cluster.
pub struct Etcd {
    http: Client,
    endpoints: Vec<String>,
    /// The endpoint that is asked next.
    current: AtomicUsize,
    timeout: Duration,
    user: Option<User>,
}

impl Etcd {
    /// A client by the settings; connects nowhere yet.
    ///
    /// # Errors
    /// A file that the settings name cannot be used.
    pub fn new(config: &DiscoveryConfig) -> Result<Self, EtcdError> {
        let timeout = Duration::from_millis(config.etcd_timeout_ms);
        let http = Client::builder()
            .use_preconfigured_tls(tls::client(config)?)
            // Only the configuration says where connections go.
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(timeout)
            .build()
            .map_err(|error| EtcdError::Client(told(&error)))?;
        let user = if config.etcd_user.is_empty() {
            None
        } else {
            Some(User {
                name: config.etcd_user.clone(),
                password: password(&config.etcd_password_path)?,
                token: Mutex::new(None),
            })
        };
        Ok(Self {
            http,
            endpoints: config.etcd_endpoints.clone(),
            current: AtomicUsize::new(0),
            timeout,
            user,
        })
    }

    /// Asks for a lease of `ttl` whole seconds.
    pub async fn grant(&self, ttl: u64) -> Result<Lease, EtcdError> {
        let granted: Granted = self.call("lease/grant", &json!({ "TTL": ttl })).await?;
        Ok(Lease {
            id: number(&granted.id),
            ttl: u64::try_from(number(&granted.ttl)).unwrap_or(0),
        })
    }

    /// Keeps a lease alive; the answer's `ttl` is 0 if it is gone.
    pub async fn keep_alive(&self, lease: i64) -> Result<Lease, EtcdError> {
        let body = json!({ "ID": lease.to_string() });
        let kept: KeptAlive = self.call("lease/keepalive", &body).await?;
        Ok(Lease {
            id: lease,
            ttl: u64::try_from(number(&kept.result.ttl)).unwrap_or(0),
        })
    }

    /// Ends a lease, and with it the keys under it.
    pub async fn revoke(&self, lease: i64) -> Result<(), EtcdError> {
        let body = json!({ "ID": lease.to_string() });
        self.call::<serde_json::Value>("lease/revoke", &body).await.map(drop)
    }

    /// Writes a key under a lease.
    pub async fn put(&self, key: &str, value: &str, lease: i64) -> Result<(), EtcdError> {
        let body = json!({ "key": encode(key), "value": encode(value), "lease": lease.to_string() });
        self.call::<serde_json::Value>("kv/put", &body).await.map(drop)
    }

    /// All keys that begin with `prefix`.
    pub async fn list(&self, prefix: &str) -> Result<Listing, EtcdError> {
        let body = json!({ "key": encode(prefix), "range_end": end_of_prefix(prefix) });
        let answer: RangeAnswer = self.call("kv/range", &body).await?;
        Ok(Listing {
            revision: number(&answer.header.revision),
            values: answer.kvs.iter().filter_map(words::KeyValue::texts).collect(),
        })
    }

    /// Watches the keys that begin with `prefix`, from revision `from` on. Returns once etcd has begun.
    pub async fn watch(&self, prefix: &str, from: i64) -> Result<Watch, EtcdError> {
        let body = json!({ "create_request": {
            "key": encode(prefix), "range_end": end_of_prefix(prefix), "start_revision": from.to_string(),
        }});
        let (endpoint, response) = self.ask("watch", &body).await?;
        Ok(Watch::new(response, endpoint, self.timeout))
    }

    /// Sends a request and reads its answer, within the deadline for each.
    async fn call<T: DeserializeOwned>(&self, what: &'static str, body: &serde_json::Value) -> Result<T, EtcdError> {
        let (endpoint, response) = self.ask(what, body).await?;
        let read = tokio::time::timeout(self.timeout, limited(response, MAX_ANSWER)).await;
        let bytes = match read {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(reason)) => return Err(self.unreachable(endpoint, reason)),
            Err(_) => return Err(self.unreachable(endpoint, "no whole answer in time".to_owned())),
        };
        serde_json::from_slice(&bytes).map_err(|error| EtcdError::Answer {
            endpoint,
            what,
            reason: error.to_string(),
        })
    }

    /// Sends a request; a token that is not accepted any more is replaced once.
    async fn ask(&self, what: &'static str, body: &serde_json::Value) -> Result<(String, Response), EtcdError> {
        let fresh = self.token(false).await?;
        match self.send(what, body, fresh.as_deref()).await {
            Err(EtcdError::Refused { status, message, .. }) if self.user.is_some() && stale(status, &message) => {
                let token = self.token(true).await?;
                self.send(what, body, token.as_deref()).await
            }
            other => other,
        }
    }

    async fn send(
        &self,
        what: &'static str,
        body: &impl Serialize,
        token: Option<&str>,
    ) -> Result<(String, Response), EtcdError> {
        let endpoint = self.endpoints[self.current.load(Ordering::Relaxed) % self.endpoints.len()].clone();
        let request = self.http.post(format!("{endpoint}/v3/{what}")).json(body);
        let request = match token {
            Some(token) => request.header("authorization", token),
            None => request,
        };
        let response = self.deliver(&endpoint, request).await?;
        let status = response.status();
        if status == StatusCode::OK {
            return Ok((endpoint, response));
        }
        let read = tokio::time::timeout(self.timeout, limited(response, MAX_REFUSAL)).await;
        let bytes = read.ok().and_then(Result::ok).unwrap_or_default();
        // A member without a leader refuses too: the next call asks another one.
        self.next_endpoint();
        Err(EtcdError::Refused {
            endpoint,
            what,
            status: status.as_u16(),
            message: Refusal::message(&bytes),
        })
    }

    async fn deliver(&self, endpoint: &str, request: RequestBuilder) -> Result<Response, EtcdError> {
        match tokio::time::timeout(self.timeout, request.send()).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(self.unreachable(endpoint.to_owned(), told(&error))),
            Err(_) => Err(self.unreachable(endpoint.to_owned(), "no answer in time".to_owned())),
        }
    }

    fn unreachable(&self, endpoint: String, reason: String) -> EtcdError {
        self.next_endpoint();
        EtcdError::Unreachable { endpoint, reason }
    }

    fn next_endpoint(&self) {
        self.current.fetch_add(1, Ordering::Relaxed);
    }

    /// The token of the configured user, if there is one.
    async fn token(&self, anew: bool) -> Result<Option<String>, EtcdError> {
        let Some(user) = &self.user else { return Ok(None) };
        let known = user.token.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if known.is_some() && !anew {
            return Ok(known);
        }
        let body = json!({ "name": user.name, "password": user.password });
        let (endpoint, response) = self.send("auth/authenticate", &body, None).await?;
        let read = tokio::time::timeout(self.timeout, limited(response, MAX_ANSWER)).await;
        let bytes = read.ok().and_then(Result::ok).unwrap_or_default();
        let answer: Authenticated = serde_json::from_slice(&bytes).map_err(|error| EtcdError::Answer {
            endpoint,
            what: "auth/authenticate",
            reason: error.to_string(),
        })?;
        *user.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer.token.clone());
        Ok(Some(answer.token))
    }
}

/// Whether a refusal means that the token has to be replaced.
fn stale(status: u16, message: &str) -> bool {
    status == StatusCode::UNAUTHORIZED.as_u16() || message.contains("invalid auth token")
}

fn password(path: &str) -> Result<String, EtcdError> {
    let text = std::fs::read_to_string(path).map_err(|error| EtcdError::Setting {
        field: "etcd_password_path",
        path: path.to_owned(),
        reason: error.to_string(),
    })?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// Reads a body of at most `most` bytes.
async fn limited(mut response: Response, most: usize) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| told(&error))? {
        if bytes.len() + chunk.len() > most {
            return Err(format!("an answer of more than {most} bytes"));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// An error and what caused it: the client's own words leave the cause out.
fn told(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
