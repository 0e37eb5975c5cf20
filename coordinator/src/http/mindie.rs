//! `coordinator.strict_mindie`: what MindIE's server answers in its prefill/decode mode. It refuses what the mode cannot do
//! there, ignores two parameters, leaves parts of the details null, and words its errors in its own way.

use actix_web::body::BoxBody;
use actix_web::dev::ServiceResponse;
use actix_web::http::StatusCode;
use serde_json::json;

use super::error::{ApiError, ErrorKind};
use super::json::fields::{FieldError, Fields};
use super::json::raw::{Kind, Raw};

const NOT_HERE: &str = "must be absent: it cannot be used together with PD disaggregation";

/// Refuses parameters of `/generate` and its relatives.
///
/// # Errors
/// The first of them that asks for something.
pub fn refuse_generate(parameters: &Fields<'_>) -> Result<(), FieldError> {
    let asks = |name: &str, raw: Raw<'_>| match raw.kind() {
        Kind::List => raw.elements().next().is_some(),
        _ => name != "adapter_id" || raw.text() != "\"None\"",
    };
    refuse(parameters, &["adapter_id", "stop", "stop_sequences"], asks)
}

/// Refuses fields of completions and chats. A field that the body does not know is not looked at.
///
/// # Errors
/// The first of them that asks for something.
pub fn refuse_openai(fields: &Fields<'_>, names: &[&str]) -> Result<(), FieldError> {
    refuse(fields, names, |name, raw| match name {
        "n" | "best_of" => raw.text() != "1",
        "top_logprobs" => raw.text() != "0",
        _ => raw.text() != "false",
    })
}

fn refuse(fields: &Fields<'_>, names: &[&str], asks: impl Fn(&str, Raw<'_>) -> bool) -> Result<(), FieldError> {
    let asked = names
        .iter()
        .find_map(|name| fields.get(name).filter(|raw| asks(name, *raw)).map(|raw| (*name, raw)));
    match asked {
        Some((name, raw)) => Err(FieldError::rule(
            fields.path(name),
            format!("is {}, but {NOT_HERE}", raw.shown()),
        )),
        None => Ok(()),
    }
}

/// Words an error as MindIE does.
pub fn restate(answer: ServiceResponse<BoxBody>) -> ServiceResponse<BoxBody> {
    let error = answer.response().extensions().get::<ApiError>().cloned();
    let Some(error) = error else {
        return answer;
    };
    let (status, word) = words(error.kind, answer.status());
    let body = json!({ "error": error.message, "error_type": word }).to_string();
    answer.map_body(|head, _| {
        head.status = status;
        BoxBody::new(body)
    })
}

fn words(kind: ErrorKind, status: StatusCode) -> (StatusCode, &'static str) {
    let validation = "Input Validation Error";
    let generation = "Generation Error";
    match kind {
        ErrorKind::Invalid | ErrorKind::UnknownModel => (StatusCode::UNPROCESSABLE_ENTITY, validation),
        ErrorKind::UnknownPath
        | ErrorKind::WrongMethod { .. }
        | ErrorKind::TooLarge
        | ErrorKind::WrongMediaType
        | ErrorKind::SlowBody
        | ErrorKind::Unauthorised => (status, validation),
        // What cannot be put into the queue.
        ErrorKind::Overloaded { .. } => (StatusCode::FAILED_DEPENDENCY, generation),
        ErrorKind::Unavailable | ErrorKind::Unhealthy => (StatusCode::SERVICE_UNAVAILABLE, generation),
        ErrorKind::Generation | ErrorKind::Incomplete => (StatusCode::INTERNAL_SERVER_ERROR, generation),
    }
}
