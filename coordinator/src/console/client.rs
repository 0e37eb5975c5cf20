//! Asks the admin plane.

use std::time::Duration;

use config::{AdminTarget, OperatorArgs};
use reqwest::{Client, Method, StatusCode, Url};
use serde_json::Value;

use super::Trouble;

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Longest wait for an answer: an audit takes two seconds, and several may be under way.
const ANSWER: Duration = Duration::from_secs(30);
/// Longest answer that is read, in bytes.
const MOST_ANSWER: usize = 64 << 20;

/// What was answered.
pub(super) struct Answer {
    /// As it was sent.
    pub(super) text: String,
    /// As it is understood.
    pub(super) value: Value,
}

/// A client of one admin plane.
pub(super) struct Admin {
    http: Client,
    target: AdminTarget,
}

impl Admin {
    /// Connects nowhere yet.
    ///
    /// # Errors
    /// It is not known where the admin plane is, or what its token is.
    pub(super) fn new(arguments: &OperatorArgs) -> Result<Self, Trouble> {
        let target = arguments.target().map_err(|error| Trouble::Usage(error.to_string()))?;
        let http = Client::builder()
            // Only the arguments say where the token goes.
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT)
            .timeout(ANSWER)
            .build()
            .map_err(|error| Trouble::Wrong(format!("no HTTP client: {error}")))?;
        Ok(Self { http, target })
    }

    /// `GET` of a path, given in parts that need no escapes.
    ///
    /// # Errors
    /// There is no answer, or it is not 200.
    pub(super) async fn get(&self, path: &[&str]) -> Result<Answer, Trouble> {
        self.ask(Method::GET, path, String::new()).await
    }

    /// `POST` of a JSON text, which may be empty.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(super) async fn post(&self, path: &[&str], body: String) -> Result<Answer, Trouble> {
        self.ask(Method::POST, path, body).await
    }

    async fn ask(&self, method: Method, path: &[&str], body: String) -> Result<Answer, Trouble> {
        let base = &self.target.url;
        let mut url = Url::parse(base).map_err(|error| Trouble::Usage(format!("{base} is no address: {error}")))?;
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.clear().extend(path);
        }
        let request = self
            .http
            .request(method, url)
            .bearer_auth(self.target.token.expose())
            .body(body);
        let mut response = request.send().await.map_err(|error| self.silent(&error))?;
        let status = response.status();
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.silent(&error))? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() > MOST_ANSWER {
                return Err(Trouble::Wrong(format!("{base} answers more than {MOST_ANSWER} bytes")));
            }
        }
        let text = String::from_utf8(bytes).map_err(|_| self.strange(status))?;
        let value: Value = serde_json::from_str(&text).map_err(|_| self.strange(status))?;
        if status.is_success() {
            return Ok(Answer { text, value });
        }
        let said = value["error"].as_str().ok_or_else(|| self.strange(status))?;
        Err(match status {
            StatusCode::UNAUTHORIZED => Trouble::Wrong(format!("{base} does not take this token")),
            StatusCode::NOT_FOUND => Trouble::Missing(said.to_owned()),
            _ => Trouble::Wrong(said.to_owned()),
        })
    }

    fn silent(&self, error: &reqwest::Error) -> Trouble {
        let base = &self.target.url;
        let why = if error.is_timeout() {
            "it does not answer in time".to_owned()
        } else {
            // The innermost cause is the system's word: refused, unreachable, no such host.
            let mut cause: &dyn std::error::Error = error;
            while let Some(inner) = cause.source() {
                cause = inner;
            }
            cause.to_string()
        };
        Trouble::Silent(format!("no answer from the admin plane at {base}: {why}"))
    }

    fn strange(&self, status: StatusCode) -> Trouble {
        let base = &self.target.url;
        Trouble::Wrong(format!(
            "what answers at {base} is no admin plane: {status} and no JSON that it would send"
        ))
    }
}
