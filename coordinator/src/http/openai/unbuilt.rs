//! Fields of a completion that are part of the API and do not work yet. They are checked like every other field, accepted
//! where they change nothing, and refused otherwise: an answer that ignores what was asked for is worse than none.

use crate::http::error::ApiError;
use crate::http::json::fields::{FieldError, Fields};

/// Refuses what is not built of the fields that completions and chat share.
///
/// # Errors
/// A wrong value, or one that asks for what does not work yet.
pub fn refuse_shared(fields: &Fields<'_>) -> Result<(), ApiError> {
    fields.object("logit_bias", "", &[])?;
    if fields
        .get("logit_bias")
        .is_some_and(|bias| bias.members().next().is_some())
    {
        return Err(ApiError::not_supported_yet("logit_bias"));
    }
    if fields.int("min_tokens", 0, i64::from(i32::MAX))?.unwrap_or(0) > 0 {
        return Err(ApiError::not_supported_yet("min_tokens"));
    }
    for (name, expected) in [
        ("bad_words", "a list of strings"),
        ("allowed_token_ids", "a list of token ids"),
    ] {
        if fields
            .list(name, expected)?
            .is_some_and(|list| list.elements().next().is_some())
        {
            return Err(ApiError::not_supported_yet(name));
        }
    }
    response_format(fields)?;
    for name in [
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "truncate_prompt_tokens",
    ] {
        if fields.get(name).is_some() {
            return Err(ApiError::not_supported_yet(name));
        }
    }
    Ok(())
}

fn response_format(fields: &Fields<'_>) -> Result<(), ApiError> {
    let Some(format) = fields.object("response_format", "response_format.", &["type"])? else {
        return Ok(());
    };
    let expected = "\"text\"";
    let Some(kind) = format.get("type") else {
        return Err(format.missing("type", expected).into());
    };
    match kind.string().as_deref() {
        Some("text") => Ok(()),
        Some("json_object" | "json_schema" | "regex" | "choice" | "grammar") => {
            Err(ApiError::not_supported_yet("response_format"))
        }
        Some(_) | None => Err(FieldError::wrong("response_format.type", kind, expected).into()),
    }
}
