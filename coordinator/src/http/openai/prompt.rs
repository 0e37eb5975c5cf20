//! The `prompt` of a completion: text or token ids, one or several.

use crate::http::error::ApiError;
use crate::http::json::fields::{FieldError, Fields, wrong_element};
use crate::http::json::raw::{Kind, Raw};

/// What is right for `prompt`.
const PROMPT: &str =
    "a non-empty string, a list of such strings, a non-empty list of token ids, or a list of such lists";

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
    /// Most prompts of a request.
    pub prompts: usize,
    /// Most characters of a text.
    pub chars: usize,
    /// Most token ids.
    pub tokens: usize,
    /// Token ids are below this.
    pub vocab_size: usize,
}

/// Reads the field: at least one prompt. One that is wrong makes the whole list wrong.
///
/// # Errors
/// What is wrong with it.
pub fn read(fields: &Fields<'_>, limits: PromptLimits) -> Result<Vec<Prompt>, ApiError> {
    let raw = fields.get("prompt").ok_or_else(|| fields.missing("prompt", PROMPT))?;
    match raw.kind() {
        Kind::String => Ok(vec![text("prompt", raw, limits)?]),
        Kind::List => list(raw, limits),
        Kind::Null | Kind::Bool | Kind::Number | Kind::Object => Err(FieldError::wrong("prompt", raw, PROMPT).into()),
    }
}

fn list(raw: Raw<'_>, limits: PromptLimits) -> Result<Vec<Prompt>, ApiError> {
    let Some(first) = raw.elements().next() else {
        return Err(FieldError::wrong("prompt", raw, PROMPT).into());
    };
    let read: fn(&str, Raw<'_>, PromptLimits) -> Result<Prompt, FieldError> = match first.kind() {
        Kind::Number => return Ok(vec![tokens("prompt", raw, limits)?]),
        Kind::String => text,
        Kind::List => tokens,
        Kind::Null | Kind::Bool | Kind::Object => return Err(wrong_element("prompt", 0, first, PROMPT).into()),
    };
    let mut prompts = Vec::new();
    for (index, element) in raw.elements().enumerate() {
        if index == limits.prompts {
            let problem = format!("has more than {} prompts, but must have 1 to {}", index, limits.prompts);
            return Err(FieldError::rule("prompt", problem).into());
        }
        if element.kind() != first.kind() {
            return Err(wrong_element("prompt", index, element, PROMPT).into());
        }
        prompts.push(read(&format!("prompt[{index}]"), element, limits)?);
    }
    Ok(prompts)
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
    if tokens.is_empty() {
        return Err(FieldError::wrong(field, raw, "a non-empty list of token ids"));
    }
    Ok(Prompt::Tokens(tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::json::scan::check;

    fn read_all(prompt: &str) -> Result<Vec<Prompt>, String> {
        let body = format!("{{\"prompt\":{prompt}}}");
        let raw = check(body.as_bytes()).expect("valid");
        let fields = Fields::of_object(raw, "", &["prompt"]).expect("no repeats");
        read(
            &fields,
            PromptLimits {
                prompts: 3,
                chars: 5,
                tokens: 3,
                vocab_size: 10,
            },
        )
        .map_err(|error| error.message)
    }

    fn read_one(prompt: &str) -> Result<Prompt, String> {
        let mut all = read_all(prompt)?;
        assert_eq!(all.len(), 1, "{prompt}");
        all.pop().ok_or_else(String::new)
    }

    #[test]
    fn takes_several_of_one_kind() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(
            read_all("[\"a\",\"b\",\"a\"]"),
            Ok(vec![text("a"), text("b"), text("a")])
        );
        assert_eq!(
            read_all("[[1],[2,3]]"),
            Ok(vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])])
        );
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
            ("[[1],[]]", "`prompt[1]` is an empty list"),
            ("[\"a\",\"b\",\"c\",\"d\"]", "`prompt` has more than 3 prompts"),
        ];
        for (prompt, start) in cases {
            let message = read_all(prompt).expect_err(prompt);
            assert!(message.starts_with(start), "{prompt}: {message}");
        }
    }
}
