//! The `prompt` of a completion: text or token ids.

use crate::http::error::{ApiError, ErrorKind};
use crate::http::json::fields::{FieldError, Fields, wrong_element};
use crate::http::json::raw::{Kind, Raw};

/// What is right for `prompt`.
const PROMPT: &str = "a non-empty string, a list with one such string, or a non-empty list of token ids";

/// A checked prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// To be tokenised.
    Text(String),
    /// Used as it is: nothing is put in front.
    Tokens(Vec<u32>),
}

/// Bounds of a prompt.
#[derive(Clone, Copy, Debug)]
pub struct PromptLimits {
    /// Most characters of a text.
    pub chars: usize,
    /// Most token ids.
    pub tokens: usize,
    /// Token ids are below this.
    pub vocab_size: usize,
}

/// Reads the field.
///
/// # Errors
/// What is wrong with it.
pub fn read(fields: &Fields<'_>, limits: PromptLimits) -> Result<Prompt, ApiError> {
    let raw = fields.get("prompt").ok_or_else(|| fields.missing("prompt", PROMPT))?;
    match raw.kind() {
        Kind::String => Ok(text("prompt", raw, limits)?),
        Kind::List => list(raw, limits),
        Kind::Null | Kind::Bool | Kind::Number | Kind::Object => Err(FieldError::wrong("prompt", raw, PROMPT).into()),
    }
}

fn list(raw: Raw<'_>, limits: PromptLimits) -> Result<Prompt, ApiError> {
    let Some(first) = raw.elements().next() else {
        return Err(FieldError::wrong("prompt", raw, PROMPT).into());
    };
    match first.kind() {
        Kind::Number => Ok(tokens("prompt", raw, limits)?),
        Kind::String | Kind::List => {
            // One wrong element makes the whole list wrong, also where only one of its prompts is served yet.
            let mut prompts = 0_usize;
            for (index, element) in raw.elements().enumerate() {
                prompts = index + 1;
                if element.kind() != first.kind() {
                    return Err(wrong_element("prompt", index, element, PROMPT).into());
                }
                let empty = match element.kind() {
                    Kind::List => element.elements().next().is_none(),
                    _ => element.text() == "\"\"",
                };
                if empty {
                    return Err(wrong_element("prompt", index, element, "a non-empty prompt").into());
                }
            }
            if prompts > 1 {
                return Err(ApiError {
                    kind: ErrorKind::Invalid,
                    message: format!("not supported yet: `prompt` with {prompts} prompts; send one prompt a request"),
                    param: Some("prompt".to_owned()),
                });
            }
            match first.kind() {
                Kind::String => Ok(text("prompt[0]", first, limits)?),
                _ => Ok(tokens("prompt[0]", first, limits)?),
            }
        }
        Kind::Null | Kind::Bool | Kind::Object => Err(wrong_element("prompt", 0, first, PROMPT).into()),
    }
}

fn text(field: &str, raw: Raw<'_>, limits: PromptLimits) -> Result<Prompt, FieldError> {
    let text = raw.string().unwrap_or_default();
    let chars = text.chars().count();
    if chars == 0 {
        return Err(FieldError::wrong(field, raw, PROMPT));
    }
    if chars > limits.chars {
        let problem = format!("has {chars} characters, but must have at most {}", limits.chars);
        return Err(FieldError::rule(field, problem));
    }
    Ok(Prompt::Text(text.into_owned()))
}

fn tokens(field: &str, raw: Raw<'_>, limits: PromptLimits) -> Result<Prompt, FieldError> {
    let mut tokens = Vec::new();
    for (index, element) in raw.elements().enumerate() {
        let id = if element.kind() == Kind::Number {
            element.text().parse::<u32>().ok()
        } else {
            None
        };
        let Some(id) = id.filter(|id| (*id as usize) < limits.vocab_size) else {
            let expected = format!("a token id from 0 to {}", limits.vocab_size.saturating_sub(1));
            return Err(wrong_element(field, index, element, &expected));
        };
        if tokens.len() == limits.tokens {
            let problem = format!(
                "has more than {} tokens, but must have 1 to {}",
                limits.tokens, limits.tokens
            );
            return Err(FieldError::rule(field, problem));
        }
        tokens.push(id);
    }
    Ok(Prompt::Tokens(tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::json::scan::check;

    fn read_one(prompt: &str) -> Result<Prompt, String> {
        let body = format!("{{\"prompt\":{prompt}}}");
        let raw = check(body.as_bytes()).expect("valid");
        let fields = Fields::of_object(raw, "", &["prompt"]).expect("no repeats");
        read(
            &fields,
            PromptLimits {
                chars: 5,
                tokens: 3,
                vocab_size: 10,
            },
        )
        .map_err(|error| error.message)
    }

    #[test]
    fn takes_text_and_token_ids_alone_or_in_a_list_of_one() {
        assert_eq!(read_one("\"abc\""), Ok(Prompt::Text("abc".to_owned())));
        assert_eq!(read_one("[\"abc\"]"), Ok(Prompt::Text("abc".to_owned())));
        assert_eq!(read_one("[0,9,0]"), Ok(Prompt::Tokens(vec![0, 9, 0])));
        assert_eq!(read_one("[[1]]"), Ok(Prompt::Tokens(vec![1])));
        assert_eq!(read_one("\"\\u0000\""), Ok(Prompt::Text("\0".to_owned())));
    }

    #[test]
    fn refuses_the_rest_and_names_it() {
        let cases = [
            ("null", "`prompt` is missing"),
            ("\"\"", "`prompt` is \"\""),
            ("1", "`prompt` is 1"),
            ("true", "`prompt` is true"),
            ("{}", "`prompt` is an object"),
            ("[]", "`prompt` is an empty list"),
            ("[\"\"]", "`prompt[0]` is \"\""),
            ("[[]]", "`prompt[0]` is an empty list"),
            ("[null]", "`prompt[0]` is null"),
            ("[\"a\",\"\"]", "`prompt[1]` is \"\""),
            ("[\"a\",1]", "`prompt[1]` is 1"),
            ("[1,\"a\"]", "`prompt[1]` is \"a\""),
            ("[[1],2]", "`prompt[1]` is 2"),
            ("[-1]", "`prompt[0]` is -1, but must be a token id from 0 to 9"),
            ("[10]", "`prompt[0]` is 10"),
            ("[1.0]", "`prompt[0]` is 1.0"),
            ("[[-1]]", "`prompt[0][0]` is -1"),
            ("[99999999999999999999]", "`prompt[0]` is 99999999999999999999"),
            ("[1,2,3,4]", "`prompt` has more than 3 tokens"),
            ("\"abcdef\"", "`prompt` has 6 characters, but must have at most 5"),
            ("[\"a\",\"b\"]", "not supported yet: `prompt` with 2 prompts"),
            ("[[1],[2]]", "not supported yet: `prompt` with 2 prompts"),
        ];
        for (prompt, start) in cases {
            let message = read_one(prompt).expect_err(prompt);
            assert!(message.starts_with(start), "{prompt}: {message}");
        }
    }
}
