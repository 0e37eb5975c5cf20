//! One request: sent, read piece by piece, timed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use runtime::clock::Clock;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use crate::core::dialect::{Answer, Form, Said, refusal};
use crate::core::record::{Failure, Outcome, Record};
use crate::core::sse::{Item, Parser};
use crate::core::timing::{self, Phase};

/// Longest answer that is not streamed.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// A connection that was idle for longer is not used again: many servers close theirs after five seconds, and a request that
/// meets the close would count as a failure of the server.
const IDLE: Duration = Duration::from_secs(3);
/// Longest wait for a connection.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// Where requests go, and with what.
#[derive(Clone, Debug)]
pub struct Target {
    /// `http://host:port`, perhaps with a path before the dialect's own.
    pub url: String,
    /// Sent as `Authorization: Bearer`.
    pub api_key: Option<String>,
    /// Further headers.
    pub headers: Vec<(String, String)>,
    /// PEM file of authorities to trust instead of the system's.
    pub ca_cert: Option<std::path::PathBuf>,
    /// Longest time of a request, from when it was meant to be sent.
    pub timeout: Duration,
}

/// Something about the target that cannot be.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// No address.
    #[error("--url {url:?}: {why}; it must be like http://127.0.0.1:8080")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// No header.
    #[error("--header {0:?}: it must be NAME:VALUE, of characters that a header may have")]
    Header(String),
    /// No authorities.
    #[error("--ca-cert {path}: {why}; it must be a PEM file with certificates")]
    CaCert {
        /// The file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// The system has none, and https needs some.
    #[error("--url {0}: the system has no certificates of authorities; name some with --ca-cert")]
    NoAuthorities(String),
    /// TLS does not take the settings.
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
}

/// A request that is ready.
#[derive(Clone, Debug)]
pub struct Shot {
    /// Its number in the run.
    pub index: u64,
    /// When it is meant to be sent.
    pub intended: Instant,
    /// Its body.
    pub body: Bytes,
    /// Tokens that its prompt is to have.
    pub asked_input: Option<u32>,
    /// Tokens that are asked for.
    pub asked_output: u32,
}

/// Sends requests of one form to one target. Connections are kept and used again; clones share them.
#[derive(Clone)]
pub struct Client {
    http: legacy::Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    base: String,
    headers: HeaderMap,
    timeout: Duration,
}

impl Client {
    /// Checks the target's address, headers and authorities; connects nowhere yet.
    pub fn new(target: &Target) -> Result<Self, TargetError> {
        let base = base(&target.url)?;
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = &target.api_key {
            let value = HeaderValue::try_from(format!("Bearer {key}"));
            headers.insert(
                AUTHORIZATION,
                value.map_err(|_| TargetError::Header("Authorization".to_owned()))?,
            );
        }
        for (name, value) in &target.headers {
            let wrong = || TargetError::Header(format!("{name}:{value}"));
            let name = HeaderName::try_from(name.as_str()).map_err(|_| wrong())?;
            headers.insert(name, HeaderValue::try_from(value.as_str()).map_err(|_| wrong())?);
        }
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        // A request goes out as it is written.
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_WITHIN));
        let https = HttpsConnectorBuilder::new()
            .with_tls_config(tls(target)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let http = legacy::Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE)
            .pool_timer(hyper_util::rt::TokioTimer::new())
            .build(https);
        Ok(Self {
            http,
            base,
            headers,
            timeout: target.timeout,
        })
    }

    /// Asks something beside the load: status and body. `body` none is a GET.
    pub async fn call(&self, path: &str, body: Option<Vec<u8>>) -> Result<(StatusCode, Bytes), String> {
        let method = if body.is_some() { Method::POST } else { Method::GET };
        let exchange = async {
            let answer = self.send(method, path, Bytes::from(body.unwrap_or_default())).await?;
            let status = answer.status();
            Ok((status, whole(answer).await?))
        };
        tokio::time::timeout(self.timeout, exchange)
            .await
            .unwrap_or_else(|_| Err(format!("no answer within {} s", self.timeout.as_secs_f64())))
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, String> {
        let uri = Uri::try_from(format!("{}{path}", self.base)).map_err(|error| error.to_string())?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        *request.headers_mut() = self.headers.clone();
        self.http.request(request).await.map_err(|error| causes(&error))
    }

    /// Sends a request and reads its answer to the end, or until its time is over. `on_text` hears of each event with text.
    /// `start` is the start of the run.
    pub async fn ask(&self, form: &Form, shot: Shot, start: Instant, on_text: impl FnMut(Instant)) -> Record {
        let sent = Clock.now();
        let mut asking = Asking {
            form,
            intended: shot.intended,
            answer: Answer::default(),
            first: None,
            last: None,
            gaps_us: Vec::new(),
            phases: Vec::new(),
            on_text,
        };
        let limit = tokio::time::Instant::from_std(shot.intended + self.timeout);
        let ended = tokio::time::timeout_at(limit, self.exchange(&mut asking, shot.body)).await;
        let outcome = match ended {
            Ok(Ok(())) => Outcome::Done,
            Ok(Err((failure, words))) => Outcome::Failed(failure, words),
            Err(_) => Outcome::Failed(
                Failure::Timeout,
                format!("no end within {} s", self.timeout.as_secs_f64()),
            ),
        };
        let since = |at: Instant| at.saturating_duration_since(shot.intended).as_secs_f64();
        Record {
            index: shot.index,
            intended_s: shot.intended.saturating_duration_since(start).as_secs_f64(),
            late_s: since(sent),
            asked_input: shot.asked_input,
            asked_output: shot.asked_output,
            outcome,
            prompt_tokens: asking.answer.prompt_tokens,
            cached_tokens: asking.answer.cached_tokens,
            output_tokens: asking.answer.output_tokens.unwrap_or(asking.answer.text_events),
            // An answer may have no text at all: then its end is what a client sees first.
            ttft_s: form
                .streamed
                .then(|| asking.first.map_or_else(|| since(Clock.now()), since)),
            e2e_s: since(Clock.now()),
            gaps_us: asking.gaps_us,
            phases: asking.phases,
        }
    }

    async fn exchange<F: FnMut(Instant)>(
        &self,
        asking: &mut Asking<'_, F>,
        body: Bytes,
    ) -> Result<(), (Failure, String)> {
        let path = asking.form.dialect.path();
        let answer = self.send(Method::POST, path, body).await;
        let answer = answer.map_err(|why| (Failure::Connection, why))?;
        if answer.status() != StatusCode::OK {
            let status = answer.status().as_u16();
            let words = whole(answer).await.map_or_else(|why| why, |body| refusal(&body));
            return Err((Failure::Status(status), words));
        }
        if let Some(said) = answer.headers().get("server-timing") {
            asking.phases = timing::parse(&String::from_utf8_lossy(said.as_bytes()));
        }
        if asking.form.streamed {
            asking.read_events(answer.into_body()).await
        } else {
            let body = whole(answer).await.map_err(|why| (Failure::CutOff, why))?;
            let said = asking.form.dialect.whole(&body, &mut asking.answer);
            judged(said)
        }
    }
}

/// The part of an address that all paths follow.
fn base(url: &str) -> Result<String, TargetError> {
    let wrong = |why: &str| TargetError::Url {
        url: url.to_owned(),
        why: why.to_owned(),
    };
    let parsed: Uri = url
        .parse()
        .map_err(|error: hyper::http::uri::InvalidUri| wrong(&error.to_string()))?;
    match parsed.scheme_str() {
        Some("http" | "https") => {}
        Some(_) => return Err(wrong("only http and https are spoken here")),
        None => return Err(wrong("no http:// or https://")),
    }
    if parsed.host().is_none_or(str::is_empty) {
        return Err(wrong("no host"));
    }
    if parsed.query().is_some() {
        return Err(wrong("a query has no place in it"));
    }
    Ok(url.trim_end_matches('/').to_owned())
}

fn tls(target: &Target) -> Result<rustls::ClientConfig, TargetError> {
    let mut roots = rustls::RootCertStore::empty();
    if let Some(path) = &target.ca_cert {
        let wrong = |why: String| TargetError::CaCert {
            path: path.display().to_string(),
            why,
        };
        let certificates = CertificateDer::pem_file_iter(path).map_err(|error| wrong(error.to_string()))?;
        for certificate in certificates {
            let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
            roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(wrong("no certificate in it".to_owned()));
        }
    } else if target.url.starts_with("https:") {
        // Some of a system's certificates may be broken; the others count.
        let (_added, _ignored) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(TargetError::NoAuthorities(target.url.clone()));
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth())
}

async fn whole(answer: Response<Incoming>) -> Result<Bytes, String> {
    let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
    body.map(http_body_util::Collected::to_bytes)
        .map_err(|error| causes(&*error))
}

/// An error with what caused it: the outer words of HTTP errors say little.
fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}

fn judged(said: Said) -> Result<(), (Failure, String)> {
    match said {
        Said::Text | Said::Nothing => Ok(()),
        Said::Error(words) => Err((Failure::ErrorEvent, words)),
        Said::Malformed(why) => Err((Failure::Malformed, why)),
    }
}

/// A request whose answer is being read.
struct Asking<'a, F> {
    form: &'a Form,
    intended: Instant,
    answer: Answer,
    first: Option<Instant>,
    last: Option<Instant>,
    gaps_us: Vec<u32>,
    phases: Vec<Phase>,
    on_text: F,
}

impl<F: FnMut(Instant)> Asking<'_, F> {
    async fn read_events(&mut self, mut body: Incoming) -> Result<(), (Failure, String)> {
        let mut parser = Parser::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| (Failure::CutOff, causes(&error)))?;
            let Some(piece) = frame.data_ref() else { continue };
            // All that comes in one piece has come now.
            let now = Clock.now();
            let mut problem = None;
            let parsed = parser.push(piece, |item| {
                let (name, data) = match item {
                    Item::Event { name, data } if problem.is_none() => (name, data),
                    Item::Event { .. } => return,
                    Item::Comment(comment) => {
                        self.phases = timing::of_comment(comment).unwrap_or_else(|| std::mem::take(&mut self.phases));
                        return;
                    }
                };
                match self.form.dialect.event(name, data, &mut self.answer) {
                    Said::Text => {
                        if let Some(last) = self.last.replace(now) {
                            let gap = now.saturating_duration_since(last).as_micros();
                            self.gaps_us.push(u32::try_from(gap).unwrap_or(u32::MAX));
                        }
                        self.first.get_or_insert(now);
                        (self.on_text)(now);
                    }
                    Said::Nothing => {}
                    other => problem = Some(other),
                }
            });
            parsed.map_err(|error| (Failure::Malformed, error.to_string()))?;
            if let Some(said) = problem {
                return judged(said);
            }
        }
        if self.answer.ended && parser.is_at_rest() {
            return Ok(());
        }
        let seconds = Clock.now().saturating_duration_since(self.intended).as_secs_f64();
        let events = self.answer.text_events;
        Err((
            Failure::CutOff,
            format!("the stream ended without its last event, after {events} events with text and {seconds:.3} s"),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Target {
        Target {
            url: url.to_owned(),
            api_key: None,
            headers: Vec::new(),
            ca_cert: None,
            timeout: Duration::from_secs(1),
        }
    }

    fn refused(target: &Target) -> String {
        Client::new(target)
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    }

    #[test]
    fn targets_that_cannot_be_are_refused_by_name() {
        for url in ["", "localhost:80", "ftp://x", "http://", "http://x?y=1", "http://a b"] {
            let error = refused(&target(url));
            assert!(
                error.contains("--url") && error.contains("http://127.0.0.1:8080"),
                "{url}: {error}"
            );
        }
        let mut with_header = target("http://x");
        with_header.headers = vec![("a b".to_owned(), "c".to_owned())];
        assert!(refused(&with_header).contains("--header \"a b:c\""));
        let mut with_file = target("https://x");
        with_file.ca_cert = Some("/nowhere.pem".into());
        assert!(refused(&with_file).contains("--ca-cert /nowhere.pem"));
    }

    #[test]
    fn a_path_of_the_address_stays_in_front() {
        assert_eq!(base("http://x:1/prefix/").expect("valid"), "http://x:1/prefix");
    }
}
