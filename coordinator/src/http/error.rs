//! What a client is told when its request cannot be answered: one error type, two body shapes, one mapping from the
//! core's failures.

use actix_web::HttpResponse;
use actix_web::http::StatusCode;
use actix_web::http::header::{ALLOW, RETRY_AFTER};
use serde::Serialize;

use super::json::fields::FieldError;
use super::json::scan::SyntaxError;
use crate::core::types::{ServeError, ServeErrorKind};
use crate::metrics::Failure;

/// Which body shape a path speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    /// `/`, `/generate`, `/info`, ...: `error` and `error_type`, in the words of TGI 0.9.4.
    Tgi,
    /// `/v1/*` and the tokenizer's paths: an `error` object.
    OpenAi,
}

impl Family {
    /// The family of a path, known or not.
    pub fn of_path(path: &str) -> Self {
        let tokens = ["/tokenize", "/detokenize", "/tokenizer_info"].contains(&path);
        if tokens || path == "/v1" || path.starts_with("/v1/") {
            Self::OpenAi
        } else {
            Self::Tgi
        }
    }
}

/// Kinds of errors, by whose fault they are and what the client can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// The body is not JSON, or a field has a wrong type, range or combination.
    Invalid,
    /// The request asks for a model that is not served here.
    UnknownModel,
    /// There is nothing under this path.
    UnknownPath,
    /// The path exists, for the given other methods.
    WrongMethod {
        /// Value of the `Allow` header.
        allow: &'static str,
    },
    /// The body is too large.
    TooLarge,
    /// The body is declared as something else than JSON.
    WrongMediaType,
    /// The client sends its body too slowly.
    SlowBody,
    /// No valid API key.
    Unauthorised,
    /// No room: again after some seconds.
    Overloaded {
        /// Seconds, at least 1.
        retry_after_s: u32,
    },
    /// No node, or the coordinator stops.
    Unavailable,
    /// The health check says no.
    Unhealthy,
    /// The cluster failed while it worked on the request.
    Generation,
    /// The answer stopped without an end.
    Incomplete,
}

/// An error on its way to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// What kind.
    pub kind: ErrorKind,
    /// One sentence; holds nothing but what this client sent.
    pub message: String,
    /// The field at fault.
    pub param: Option<String>,
}

#[derive(Serialize)]
struct TgiBody<'a> {
    error: &'a str,
    error_type: &'a str,
}

#[derive(Serialize)]
struct OpenAiBody<'a> {
    error: OpenAiError<'a>,
}

#[derive(Serialize)]
struct OpenAiError<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: u16,
}

impl ApiError {
    /// An error of `kind` that no single field is to blame for.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            param: None,
        }
    }

    /// A field asks for something that is not built yet. Never ignored: the answer would not be what was asked for.
    pub fn not_supported_yet(field: impl Into<String>) -> Self {
        let field = field.into();
        Self {
            kind: ErrorKind::Invalid,
            message: format!("not supported yet: {field}"),
            param: Some(field),
        }
    }

    /// Status of the answer.
    pub fn status(&self, family: Family) -> StatusCode {
        match (self.kind, family) {
            (ErrorKind::Invalid, Family::Tgi) => StatusCode::UNPROCESSABLE_ENTITY,
            (ErrorKind::Invalid, Family::OpenAi) => StatusCode::BAD_REQUEST,
            (ErrorKind::UnknownModel | ErrorKind::UnknownPath, _) => StatusCode::NOT_FOUND,
            (ErrorKind::WrongMethod { .. }, _) => StatusCode::METHOD_NOT_ALLOWED,
            (ErrorKind::TooLarge, _) => StatusCode::PAYLOAD_TOO_LARGE,
            (ErrorKind::WrongMediaType, _) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            (ErrorKind::SlowBody, _) => StatusCode::REQUEST_TIMEOUT,
            (ErrorKind::Unauthorised, _) => StatusCode::UNAUTHORIZED,
            (ErrorKind::Overloaded { .. }, _) => StatusCode::TOO_MANY_REQUESTS,
            (ErrorKind::Unavailable | ErrorKind::Unhealthy, _) => StatusCode::SERVICE_UNAVAILABLE,
            (ErrorKind::Generation, Family::Tgi) => StatusCode::FAILED_DEPENDENCY,
            (ErrorKind::Generation, Family::OpenAi) | (ErrorKind::Incomplete, _) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The word for the kind, as the family's clients know it.
    pub fn word(&self, family: Family) -> &'static str {
        match family {
            Family::Tgi => self.failure().as_str(),
            Family::OpenAi => match self.kind {
                ErrorKind::Overloaded { .. } => "rate_limit_exceeded",
                ErrorKind::Unavailable | ErrorKind::Unhealthy => "ServiceUnavailableError",
                ErrorKind::Generation | ErrorKind::Incomplete => "InternalServerError",
                ErrorKind::UnknownModel | ErrorKind::UnknownPath => "NotFoundError",
                ErrorKind::Unauthorised => "AuthenticationError",
                ErrorKind::Invalid
                | ErrorKind::WrongMethod { .. }
                | ErrorKind::TooLarge
                | ErrorKind::WrongMediaType
                | ErrorKind::SlowBody => "BadRequestError",
            },
        }
    }

    /// The JSON body. Has no line breaks, so it is also the payload of an error event.
    pub fn json(&self, family: Family) -> String {
        let kind = self.word(family);
        let body = match family {
            Family::Tgi => {
                let message = match self.kind {
                    ErrorKind::Invalid => format!("Input validation error: {}", self.message),
                    ErrorKind::Generation => format!("Request failed during generation: {}", self.message),
                    ErrorKind::Incomplete => format!("Incomplete generation: {}", self.message),
                    ErrorKind::Overloaded { .. } => format!("Model is overloaded: {}", self.message),
                    ErrorKind::UnknownModel
                    | ErrorKind::UnknownPath
                    | ErrorKind::WrongMethod { .. }
                    | ErrorKind::TooLarge
                    | ErrorKind::WrongMediaType
                    | ErrorKind::SlowBody
                    | ErrorKind::Unauthorised
                    | ErrorKind::Unavailable
                    | ErrorKind::Unhealthy => self.message.clone(),
                };
                serde_json::to_string(&TgiBody {
                    error: &message,
                    error_type: kind,
                })
            }
            Family::OpenAi => serde_json::to_string(&OpenAiBody {
                error: OpenAiError {
                    message: &self.message,
                    kind,
                    param: self.param.as_deref(),
                    code: self.status(family).as_u16(),
                },
            }),
        };
        // Strings and numbers always serialise; an empty object keeps the promise of JSON if they ever do not.
        body.unwrap_or_else(|_| "{}".to_owned())
    }

    /// The whole response; it carries the error itself for the middleware. A missing key is told in OpenAI's shape on every
    /// path.
    pub fn respond(&self, family: Family) -> HttpResponse {
        let family = if self.kind == ErrorKind::Unauthorised {
            Family::OpenAi
        } else {
            family
        };
        let mut response = HttpResponse::build(self.status(family));
        match self.kind {
            ErrorKind::Overloaded { retry_after_s } => {
                response.insert_header((RETRY_AFTER, retry_after_s.max(1)));
            }
            ErrorKind::WrongMethod { allow } => {
                response.insert_header((ALLOW, allow));
            }
            ErrorKind::Unavailable => {
                response.insert_header((RETRY_AFTER, 1));
            }
            ErrorKind::Unauthorised => {
                response.insert_header(("www-authenticate", "Bearer"));
            }
            // The rest of the body is not waited for.
            ErrorKind::TooLarge | ErrorKind::SlowBody => {
                response.force_close();
            }
            ErrorKind::Invalid
            | ErrorKind::UnknownModel
            | ErrorKind::UnknownPath
            | ErrorKind::WrongMediaType
            | ErrorKind::Unhealthy
            | ErrorKind::Generation
            | ErrorKind::Incomplete => {}
        }
        response.extensions_mut().insert(self.clone());
        response.content_type("application/json").body(self.json(family))
    }

    /// The kind, as metrics have it.
    pub fn failure(&self) -> Failure {
        match self.kind {
            ErrorKind::Overloaded { .. } => Failure::Overloaded,
            ErrorKind::Unavailable => Failure::Unavailable,
            ErrorKind::Unhealthy => Failure::Unhealthy,
            ErrorKind::Generation => Failure::Generation,
            ErrorKind::Incomplete => Failure::Incomplete,
            ErrorKind::Invalid
            | ErrorKind::UnknownModel
            | ErrorKind::UnknownPath
            | ErrorKind::WrongMethod { .. }
            | ErrorKind::TooLarge
            | ErrorKind::WrongMediaType
            | ErrorKind::SlowBody
            | ErrorKind::Unauthorised => Failure::Validation,
        }
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        Self {
            kind: ErrorKind::Invalid,
            message: error.to_string(),
            param: Some(error.field),
        }
    }
}

impl From<SyntaxError> for ApiError {
    fn from(error: SyntaxError) -> Self {
        Self::new(ErrorKind::Invalid, error.to_string())
    }
}

impl From<ServeError> for ApiError {
    fn from(error: ServeError) -> Self {
        let kind = match error.kind {
            ServeErrorKind::Overloaded { retry_after_s } => ErrorKind::Overloaded { retry_after_s },
            ServeErrorKind::Unavailable => ErrorKind::Unavailable,
            ServeErrorKind::TooLong => ErrorKind::Invalid,
            ServeErrorKind::Timeout
            | ServeErrorKind::NodeLost
            | ServeErrorKind::TransferFailed
            | ServeErrorKind::Cancelled
            | ServeErrorKind::Internal => ErrorKind::Generation,
        };
        Self::new(kind, error.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_the_family_shape_and_stay_on_one_line() {
        let error = ApiError {
            kind: ErrorKind::Invalid,
            message: "`top_k` is\n\"x\"".to_owned(),
            param: Some("top_k".to_owned()),
        };
        assert_eq!(
            error.json(Family::Tgi),
            r#"{"error":"Input validation error: `top_k` is\n\"x\"","error_type":"validation"}"#
        );
        assert_eq!(
            error.json(Family::OpenAi),
            r#"{"error":{"message":"`top_k` is\n\"x\"","type":"BadRequestError","param":"top_k","code":400}}"#
        );
    }

    #[test]
    fn failures_of_the_cluster_have_the_documented_statuses() {
        let cases = [
            (
                ServeErrorKind::Overloaded { retry_after_s: 3 },
                429,
                "overloaded",
                429,
                "rate_limit_exceeded",
            ),
            (
                ServeErrorKind::Unavailable,
                503,
                "unavailable",
                503,
                "ServiceUnavailableError",
            ),
            (ServeErrorKind::TooLong, 422, "validation", 400, "BadRequestError"),
            (ServeErrorKind::Timeout, 424, "generation", 500, "InternalServerError"),
            (ServeErrorKind::NodeLost, 424, "generation", 500, "InternalServerError"),
            (
                ServeErrorKind::TransferFailed,
                424,
                "generation",
                500,
                "InternalServerError",
            ),
            (ServeErrorKind::Cancelled, 424, "generation", 500, "InternalServerError"),
            (ServeErrorKind::Internal, 424, "generation", 500, "InternalServerError"),
        ];
        for (kind, tgi, tgi_word, openai, openai_word) in cases {
            let error = ApiError::from(ServeError::new(kind, "x"));
            assert_eq!(
                (error.status(Family::Tgi).as_u16(), error.word(Family::Tgi)),
                (tgi, tgi_word)
            );
            assert_eq!(
                (error.status(Family::OpenAi).as_u16(), error.word(Family::OpenAi)),
                (openai, openai_word)
            );
        }
    }

    #[test]
    fn the_path_decides_the_family() {
        assert_eq!(Family::of_path("/v1/nothing"), Family::OpenAi);
        assert_eq!(Family::of_path("/v1"), Family::OpenAi);
        assert_eq!(Family::of_path("/detokenize"), Family::OpenAi);
        assert_eq!(Family::of_path("/v10"), Family::Tgi);
        assert_eq!(Family::of_path("/"), Family::Tgi);
    }
}
