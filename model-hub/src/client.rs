//! Requests to a hub, and what its answers mean.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use config::{HubReference, ModelConfig};
use reqwest::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_LENGTH, ETAG, HeaderMap, HeaderValue, LOCATION, RANGE, RETRY_AFTER,
};
use reqwest::{Method, Response, StatusCode, Url};
use tokio::time::timeout;

use crate::digest::Checksum;
use crate::error::HubError;
use crate::listing::Listing;
use crate::retry::{Tries, Trouble};

/// Most redirects of a request.
const MAX_REDIRECTS: usize = 8;
/// Largest list of files, in bytes.
const MAX_LISTING: usize = 64 << 20;
/// Largest file with a token, in bytes.
const MAX_TOKEN: u64 = 4_096;
/// Longest part of a server's message that is repeated, in characters.
const MAX_MESSAGE: usize = 200;

/// A hub.
pub(crate) struct Client {
    http: reqwest::Client,
    /// Without a slash at its end.
    endpoint: String,
    origin: url_origin::Origin,
    token: Option<HeaderValue>,
    patience: Duration,
    tries: u32,
}

/// Scheme, host and port: who gets the token.
mod url_origin {
    /// `None` for URLs without a host.
    pub(super) type Origin = Option<(String, String, Option<u16>)>;

    pub(super) fn of(url: &reqwest::Url) -> Origin {
        let host = url.host_str()?.to_owned();
        Some((url.scheme().to_owned(), host, url.port_or_known_default()))
    }
}

impl Client {
    /// By the settings; connects nowhere yet.
    pub(crate) fn new(model: &ModelConfig) -> Result<Self, HubError> {
        let endpoint = model.hub_endpoint.trim_end_matches('/').to_owned();
        let wrong = |reason: String| HubError::Setting {
            field: "hub_endpoint",
            reason,
        };
        let url = Url::parse(&endpoint).map_err(|error| wrong(error.to_string()))?;
        let patience = Duration::from_millis(model.hub_timeout_ms);
        let token = token(model)?;
        if token.is_some() && url.scheme() == "http" && !is_loopback(&url) {
            tracing::warn!(
                endpoint,
                "the token is sent in clear text: model.hub_endpoint is not https"
            );
        }
        let http = reqwest::Client::builder()
            .use_preconfigured_tls(tls(url.scheme() == "https").map_err(wrong)?)
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(patience)
            .user_agent(concat!("baton/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| wrong(told(error)))?;
        Ok(Self {
            http,
            origin: url_origin::of(&url),
            endpoint,
            token,
            patience,
            tries: model.hub_tries,
        })
    }

    /// Longest wait for the next bytes.
    pub(crate) fn patience(&self) -> Duration {
        self.patience
    }

    /// Most tries without progress.
    pub(crate) fn tries(&self) -> u32 {
        self.tries
    }

    /// How the hub is called in messages.
    pub(crate) fn name(&self) -> &str {
        &self.endpoint
    }

    /// What a revision consists of.
    pub(crate) async fn listing(&self, reference: &HubReference) -> Result<Listing, HubError> {
        let HubReference {
            repository, revision, ..
        } = reference;
        let what = format!("{repository}@{revision} on {}", self.endpoint);
        let mut tries = Tries::new(what, self.tries);
        let path = format!(
            "/api/models/{repository}/revision/{}?blobs=true",
            escape(revision, false)
        );
        loop {
            match self.try_listing(&path, reference).await {
                Ok(listing) => return Ok(listing),
                Err(trouble) => tokio::time::sleep(tries.failed(trouble)?).await,
            }
        }
    }

    async fn try_listing(&self, path: &str, reference: &HubReference) -> Result<Listing, Trouble> {
        let mut response = self.get(Method::GET, path, None, reference, None).await?;
        let mut body = Vec::new();
        while let Some(bytes) = self.more(&mut response).await? {
            if body.len() + bytes.len() > MAX_LISTING {
                return Err(self.senseless("the list of files", "too much").into());
            }
            body.extend_from_slice(&bytes);
        }
        Ok(Listing::read(&body).map_err(|reason| self.senseless("the list of files", &reason))?)
    }

    /// Size and checksum of a file of a commit, where the list does not tell them.
    pub(crate) async fn describe(
        &self,
        reference: &HubReference,
        commit: &str,
        file: &str,
    ) -> Result<(u64, Checksum), HubError> {
        let mut tries = Tries::new(format!("{file} on {}", self.endpoint), self.tries);
        let path = file_path(reference, commit, file);
        let response = loop {
            match self.get(Method::HEAD, &path, None, reference, Some(file)).await {
                Ok(response) => break response,
                Err(trouble) => tokio::time::sleep(tries.failed(trouble)?).await,
            }
        };
        let headers = response.headers();
        let text = |name: &str| headers.get(name)?.to_str().ok();
        let checksum = text("x-linked-etag")
            .or_else(|| text(ETAG.as_str()))
            .and_then(Checksum::parse);
        let size = text("x-linked-size").or_else(|| text(CONTENT_LENGTH.as_str()));
        let size = size.and_then(|digits| digits.parse().ok());
        size.zip(checksum)
            .ok_or_else(|| self.senseless(file, "no size and checksum, without which nothing is fetched"))
    }

    /// The bytes of a file from `start` on, or from 0 on if the server wants it so.
    pub(crate) async fn open(
        &self,
        reference: &HubReference,
        commit: &str,
        file: &str,
        start: u64,
    ) -> Result<Response, Trouble> {
        let path = file_path(reference, commit, file);
        let response = self.get(Method::GET, &path, Some(start), reference, Some(file)).await?;
        let other = response
            .headers()
            .get("x-repo-commit")
            .and_then(|value| value.to_str().ok());
        match other {
            Some(other) if other != commit => Err(self
                .senseless(file, &format!("a file of commit {}", shorten(other)))
                .into()),
            _ => Ok(response),
        }
    }

    /// More of an answer; `None` at its end.
    pub(crate) async fn more(&self, response: &mut Response) -> Result<Option<Bytes>, Trouble> {
        match timeout(self.patience, response.chunk()).await {
            Err(_) => Err(Trouble::again(format!("nothing came for {:?}", self.patience))),
            Ok(Err(error)) => Err(Trouble::again(told(error))),
            Ok(Ok(bytes)) => Ok(bytes),
        }
    }

    /// One request, redirects followed. A `HEAD` ends where the hub tells a file's checksum.
    async fn get(
        &self,
        method: Method,
        path: &str,
        start: Option<u64>,
        reference: &HubReference,
        file: Option<&str>,
    ) -> Result<Response, Trouble> {
        let what = file.unwrap_or("the list of files");
        let parse = |url: &str| Url::parse(url).map_err(|error| self.senseless(what, &error.to_string()));
        let mut url = parse(&format!("{}{path}", self.endpoint))?;
        for _ in 0..=MAX_REDIRECTS {
            let ours = url_origin::of(&url) == self.origin;
            let mut request = self.http.request(method.clone(), url.clone());
            request = request.header(ACCEPT_ENCODING, "identity");
            if let Some(token) = self.token.as_ref().filter(|_| ours) {
                request = request.header(AUTHORIZATION, token.clone());
            }
            if let Some(start) = start.filter(|start| *start > 0) {
                request = request.header(RANGE, format!("bytes={start}-"));
            }
            let sent = timeout(self.patience, request.send()).await;
            let response = match sent {
                Err(_) => return Err(Trouble::again(format!("no answer within {:?}", self.patience))),
                Ok(Err(error)) => return Err(Trouble::again(told(error))),
                Ok(Ok(response)) => response,
            };
            let status = response.status();
            let described = method == Method::HEAD && response.headers().contains_key("x-linked-etag");
            if status.is_success()
                || status == StatusCode::RANGE_NOT_SATISFIABLE
                || (described && status.is_redirection())
            {
                return Ok(response);
            }
            if !status.is_redirection() {
                return Err(self.refusal(&response, ours, reference, file));
            }
            let location = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
            let next = location.and_then(|location| url.join(location).ok());
            let next = next.ok_or_else(|| self.senseless(what, "a redirect to nowhere"))?;
            if !matches!(
                (url.scheme(), next.scheme()),
                ("http", "http" | "https") | ("https", "https")
            ) {
                return Err(self.senseless(what, "a redirect to where nothing is encrypted").into());
            }
            url = next;
        }
        Err(self.senseless(what, "too many redirects").into())
    }

    /// What an answer without content means.
    fn refusal(&self, response: &Response, ours: bool, reference: &HubReference, file: Option<&str>) -> Trouble {
        let (status, headers) = (response.status(), response.headers());
        let code = headers
            .get("x-error-code")
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default();
        let words = message(headers);
        let passing = matches!(status.as_u16(), 408 | 425 | 429 | 500..=599);
        // Where the hub leads, a link may have expired; the hub makes a new one.
        if passing || !ours {
            let host = if ours {
                "the hub"
            } else {
                "the host that the hub leads to"
            };
            let why = format!("{host} answers with status {}{words}", status.as_u16());
            return Trouble::Again {
                why,
                after: retry_after(headers),
            };
        }
        let (hub, repository, token) = (
            self.endpoint.clone(),
            reference.repository.clone(),
            self.token.is_some(),
        );
        Trouble::Final(match (status.as_u16(), code) {
            (_, "RevisionNotFound") => HubError::NoRevision {
                repository,
                revision: reference.revision.clone(),
            },
            (_, "GatedRepo") | (403, _) => HubError::Gated { hub, repository, token },
            (_, "RepoNotFound") => HubError::NoRepository { hub, repository, token },
            (401, _) => HubError::Unauthorized { hub, repository, token },
            (404, _) => match file {
                Some(file) => HubError::NoFile {
                    repository,
                    file: file.to_owned(),
                    revision: reference.revision.clone(),
                    there: Vec::new(),
                },
                None => HubError::NoRepository { hub, repository, token },
            },
            (status, _) => self.senseless(file.unwrap_or("the list of files"), &format!("status {status}{words}")),
        })
    }

    /// An answer that makes no sense.
    pub(crate) fn senseless(&self, what: &str, reason: &str) -> HubError {
        HubError::Answer {
            hub: self.endpoint.clone(),
            what: what.to_owned(),
            reason: reason.to_owned(),
        }
    }
}

fn file_path(reference: &HubReference, commit: &str, file: &str) -> String {
    format!("/{}/resolve/{commit}/{}", reference.repository, escape(file, true))
}

/// The token that the settings give, as a header that is never printed.
fn token(model: &ModelConfig) -> Result<Option<HeaderValue>, HubError> {
    let path = &model.hub_token_file;
    let (field, text) = if !model.hub_token.is_empty() {
        ("hub_token", model.hub_token.expose().to_owned())
    } else if path.is_empty() {
        return Ok(None);
    } else {
        let wrong = |reason: String| HubError::Setting {
            field: "hub_token_file",
            reason,
        };
        let size = std::fs::metadata(path)
            .map_err(|error| wrong(format!("{path}: {error}")))?
            .len();
        if size > MAX_TOKEN {
            return Err(wrong(format!("{path} has {size} bytes; no token is that long")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| wrong(format!("{path}: {error}")))?;
        ("hub_token_file", text.trim().to_owned())
    };
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
    let value = plain
        .then(|| HeaderValue::from_str(&format!("Bearer {text}")).ok())
        .flatten();
    let mut value = value.ok_or_else(|| HubError::Setting {
        field,
        reason: "holds no token: one word of visible ASCII characters would be right".to_owned(),
    })?;
    value.set_sensitive(true);
    Ok(Some(value))
}

/// Trusts whom the system trusts.
fn tls(needed: bool) -> Result<rustls::ClientConfig, String> {
    let mut roots = rustls::RootCertStore::empty();
    if needed {
        // Some of a system's certificates may be broken; the others count.
        let (_added, _ignored) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err("this machine has no certificate authorities (on Debian: package ca-certificates)".to_owned());
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| error.to_string())?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// The error and its causes without the URL: the one that a hub leads to lets whoever has it read the file.
fn told(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// What the hub says in words, as the end of a sentence.
fn message(headers: &HeaderMap) -> String {
    let words = headers.get("x-error-message").and_then(|value| value.to_str().ok());
    words.map_or_else(String::new, |words| format!(": {}", shorten(words)))
}

fn shorten(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_MESSAGE).collect()
}

/// As a part of a URL's path; slashes stay if they separate parts.
fn escape(text: &str, slashes: bool) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' => escaped.push(char::from(byte)),
            b'/' if slashes => escaped.push('/'),
            other => escaped.push_str(&format!("%{other:02X}")),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_urls_are_escaped() {
        assert_eq!(escape("refs/pr/2", false), "refs%2Fpr%2F2");
        assert_eq!(escape("a b/c+d?.json", true), "a%20b/c%2Bd%3F.json");
    }

    #[test]
    fn tokens_are_one_word_and_never_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let of = |text: &str| {
            std::fs::write(&path, text).unwrap();
            token(&ModelConfig {
                hub_token_file: path.to_str().unwrap().to_owned(),
                ..ModelConfig::default()
            })
        };
        let value = of("hf_word\n").unwrap().unwrap();
        assert_eq!(value.to_str().unwrap(), "Bearer hf_word");
        assert!(!format!("{value:?}").contains("hf_word"));
        for wrong in ["", "\n", "two words", "a\nb", &"x".repeat(5_000)] {
            let error = of(wrong).unwrap_err().to_string();
            assert!(
                error.starts_with("model.hub_token_file: ") && !error.contains("two"),
                "{error}"
            );
        }
        assert!(token(&ModelConfig::default()).unwrap().is_none());
        let missing = ModelConfig {
            hub_token_file: "/nowhere/token".to_owned(),
            ..ModelConfig::default()
        };
        assert!(token(&missing).unwrap_err().to_string().contains("/nowhere/token"));
    }
}
