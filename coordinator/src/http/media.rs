//! Items of a prompt that name a medium. Models that read text only refuse them, and say what else is wrong with what is
//! named: its text is judged, nothing is opened, resolved or connected to.

use super::error::{ApiError, ErrorKind};
use super::json::fields::{FieldError, Fields, quoted};
use super::json::raw::{Kind, Raw};
use crate::media::fetch::FetchError;
use crate::media::policy::{MediaKind, Policy};

const EXPECTED: &str = "a URL, a path or base64 in a string, or an object with one as `url`";

/// What a client is told of a medium that cannot be had. `field`: where it is named.
pub fn failure(field: impl Into<String>, error: &FetchError) -> ApiError {
    match error {
        FetchError::Spool(error) => ApiError::new(ErrorKind::Unavailable, error.to_string()),
        FetchError::Refused(_)
        | FetchError::Unreachable(_)
        | FetchError::Answer
        | FetchError::Status(_)
        | FetchError::Redirects
        | FetchError::Slow => FieldError::rule(field, format!("names a medium that cannot be used: {error}")).into(),
    }
}

/// The error of an item of type `word`, if that is a kind of media. `fields` must know the
/// members `image_url`, `video_url` and `audio_url`.
pub fn refusal(policy: &Policy, fields: &Fields<'_>, word: &str) -> Option<FieldError> {
    let kind = MediaKind::of_item(word)?;
    let Some(raw) = fields.get(word) else {
        return Some(fields.missing(word, EXPECTED));
    };
    let reference = match raw.kind() {
        Kind::String => raw.string(),
        Kind::Object => raw
            .members()
            .find_map(|(name, value)| (name == "url").then_some(value))
            .and_then(Raw::string),
        Kind::Null | Kind::Bool | Kind::Number | Kind::List => None,
    };
    let Some(reference) = reference else {
        return Some(FieldError::wrong(fields.path(word), raw, EXPECTED));
    };
    let text_only = format!("is {}, but must be \"text\": this model reads text only", quoted(word));
    let problem = match policy.check(kind, &reference) {
        Ok(_) => text_only,
        Err(refusal) => format!("{text_only}; no model would be given this one: {refusal}"),
    };
    Some(FieldError::rule(fields.path("type"), problem))
}
