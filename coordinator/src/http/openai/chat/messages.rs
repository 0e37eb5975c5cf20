//! `messages`: what a client writes becomes what a chat template reads.
//!
//! A template gets each message as an object with `role`, `content` (always one string) and, where they were given,
//! `name`, `reasoning_content`, `tool_call_id` and `tool_calls`, whose arguments are objects and not JSON in a string,
//! because that is what templates were written for.

use crate::http::json::fields::{FieldError, Fields, quoted};
use crate::http::json::raw::{Kind, Raw};
use crate::http::json::scan;
use crate::http::json::tree::Tree;
use crate::http::media;
use crate::media::policy::Policy;

/// Who may have said a message.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
const ROLE: &str = "one of \"system\", \"developer\", \"user\", \"assistant\", \"tool\"";
const CONTENT: &str = "a string, or a non-empty list of {\"type\": \"text\", \"text\": ...}";
const MESSAGES: &str = "a non-empty list of objects with `role` and `content`";
const CALLS: &str =
    "a list of {\"id\": ..., \"type\": \"function\", \"function\": {\"name\": ..., \"arguments\": ...}}";

const FIELDS: &[&str] = &[
    "content",
    "name",
    "reasoning_content",
    "role",
    "tool_call_id",
    "tool_calls",
];

const PART_FIELDS: &[&str] = &["audio_url", "image_url", "text", "type", "video_url"];

/// Puts the place of an object in front of the field that is wrong in it.
pub fn within(place: String) -> impl Fn(FieldError) -> FieldError {
    move |error| FieldError::rule(format!("{place}.{}", error.field), error.problem)
}

/// A copy of a value that is handed on.
///
/// # Errors
/// It has a number that is too large.
pub fn copied(field: impl Into<String>, raw: Raw<'_>) -> Result<Tree, FieldError> {
    Tree::of(raw).map_err(|number| {
        FieldError::rule(
            field,
            format!("contains {number}, but must be numbers a double can hold"),
        )
    })
}

/// What has to be known to read messages.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    /// Most characters of all contents together.
    pub max_chars: usize,
    /// The template tells the role `developer` from `system`; where it does not, a developer's message is a system message.
    pub knows_developer: bool,
    /// Which media a message may name.
    pub media: &'a Policy,
}

/// Reads `messages`.
///
/// # Errors
/// What is wrong, with its place.
pub fn read(fields: &Fields<'_>, reader: Reader<'_>) -> Result<Vec<Tree>, FieldError> {
    let max_chars = reader.max_chars;
    let list = fields
        .list("messages", MESSAGES)?
        .ok_or_else(|| fields.missing("messages", MESSAGES))?;
    let mut messages = Vec::new();
    let mut chars = 0;
    for (index, raw) in list.elements().enumerate() {
        let place = format!("messages[{index}]");
        if raw.kind() != Kind::Object {
            return Err(FieldError::wrong(place, raw, "an object with `role` and `content`"));
        }
        let (message, length) = message(raw, reader).map_err(within(place))?;
        messages.push(message);
        chars += length;
        if chars > max_chars {
            let problem = format!("have more than {max_chars} characters, but must have at most {max_chars}");
            return Err(FieldError::rule("messages", problem));
        }
    }
    if messages.is_empty() {
        return Err(FieldError::wrong("messages", list, MESSAGES));
    }
    Ok(messages)
}

/// One message, and the characters of its text.
fn message(raw: Raw<'_>, reader: Reader<'_>) -> Result<(Tree, usize), FieldError> {
    let fields = Fields::of_object(raw, "", FIELDS)?;
    let role = fields
        .string("role", ROLE)?
        .ok_or_else(|| fields.missing("role", ROLE))?;
    if !ROLES.contains(&role.as_ref()) {
        let problem = format!("is {}, but must be {ROLE}", quoted(&role));
        return Err(FieldError::rule("role", problem));
    }
    let calls = match tool_calls(&fields)? {
        Some(_) if role != "assistant" => {
            let problem = format!("is given, but must be absent in a message of role {}", quoted(&role));
            return Err(FieldError::rule("tool_calls", problem));
        }
        calls => calls,
    };
    let content = match fields.get("content") {
        Some(raw) => content(raw, reader.media)?,
        // What an assistant did may be calls alone.
        None if calls.is_some() => String::new(),
        None => return Err(fields.missing("content", CONTENT)),
    };
    let role = if role == "developer" && !reader.knows_developer {
        "system"
    } else {
        &role
    };
    let mut chars = content.chars().count();
    let mut message = vec![
        ("role".to_owned(), Tree::from(role)),
        ("content".to_owned(), Tree::from(content)),
    ];
    for name in ["name", "reasoning_content", "tool_call_id"] {
        if let Some(text) = fields.string(name, "a string")? {
            chars += text.chars().count();
            message.push((name.to_owned(), Tree::from(text.as_ref())));
        }
    }
    if let Some(calls) = calls {
        message.push(("tool_calls".to_owned(), calls));
    }
    Ok((Tree::Object(message), chars))
}

/// The text of a message: a string, or the texts of its parts one after the other.
fn content(raw: Raw<'_>, media: &Policy) -> Result<String, FieldError> {
    match raw.kind() {
        Kind::String => Ok(raw.string().unwrap_or_default().into_owned()),
        Kind::List if raw.elements().next().is_some() => {
            let mut text = String::new();
            for (index, raw) in raw.elements().enumerate() {
                text.push_str(&part(&format!("content[{index}]"), raw, media)?);
            }
            Ok(text)
        }
        Kind::Null | Kind::Bool | Kind::Number | Kind::List | Kind::Object => {
            Err(FieldError::wrong("content", raw, CONTENT))
        }
    }
}

/// The text of a part. One that names a medium is refused without touching what it names.
fn part<'a>(place: &str, raw: Raw<'a>, policy: &Policy) -> Result<std::borrow::Cow<'a, str>, FieldError> {
    let expected = "an object with \"type\": \"text\" and a string \"text\"";
    if raw.kind() != Kind::Object {
        return Err(FieldError::wrong(place, raw, expected));
    }
    let at = within(place.to_owned());
    let fields = Fields::of_object(raw, "", PART_FIELDS).map_err(&at)?;
    let kind = fields.string("type", "\"text\"").map_err(&at)?;
    match kind.as_deref() {
        Some("text") => {}
        Some(kind) => {
            let unknown = || FieldError::rule("type", format!("is {}, but must be \"text\"", quoted(kind)));
            return Err(at(media::refusal(policy, &fields, kind).unwrap_or_else(unknown)));
        }
        None => return Err(at(fields.missing("type", "\"text\""))),
    }
    let text = fields.string("text", "a string").map_err(&at)?;
    text.ok_or_else(|| at(fields.missing("text", "a string")))
}

/// Calls that an assistant made earlier; an empty list is none.
fn tool_calls(fields: &Fields<'_>) -> Result<Option<Tree>, FieldError> {
    let Some(list) = fields.list("tool_calls", CALLS)? else {
        return Ok(None);
    };
    let mut calls = Vec::new();
    for (index, raw) in list.elements().enumerate() {
        let place = format!("tool_calls[{index}]");
        if raw.kind() != Kind::Object {
            return Err(FieldError::wrong(place, raw, CALLS));
        }
        calls.push(tool_call(raw).map_err(within(place))?);
    }
    Ok((!calls.is_empty()).then_some(Tree::List(calls)))
}

fn tool_call(raw: Raw<'_>) -> Result<Tree, FieldError> {
    let fields = Fields::of_object(raw, "", &["function", "id", "type"])?;
    let mut call = Vec::new();
    if let Some(id) = fields.string("id", "a string")? {
        call.push(("id".to_owned(), Tree::from(id.as_ref())));
    }
    let kind = fields.string("type", "\"function\"")?;
    if let Some(kind) = kind.filter(|kind| kind != "function") {
        let problem = format!("is {}, but must be \"function\"", quoted(&kind));
        return Err(FieldError::rule("type", problem));
    }
    call.push(("type".to_owned(), Tree::from("function")));
    let expected = "an object with `name` and `arguments`";
    let function = fields
        .object("function", "function.", &["arguments", "name"])?
        .ok_or_else(|| fields.missing("function", expected))?;
    let name = function
        .string("name", "the function's name")?
        .ok_or_else(|| function.missing("name", "the function's name"))?;
    let arguments = function
        .get("arguments")
        .map_or(Ok(Tree::Object(Vec::new())), arguments)?;
    let function = vec![
        ("name".to_owned(), Tree::from(name.as_ref())),
        ("arguments".to_owned(), arguments),
    ];
    call.push(("function".to_owned(), Tree::Object(function)));
    Ok(Tree::Object(call))
}

/// The arguments of a call: an object, as JSON in a string or as it is. A string that is not JSON stays a string: a model
/// may have written it, and the client only repeats it.
fn arguments(raw: Raw<'_>) -> Result<Tree, FieldError> {
    const NAME: &str = "function.arguments";
    match raw.kind() {
        Kind::Object => copied(NAME, raw),
        Kind::String => {
            let text = raw.string().unwrap_or_default();
            let text = if text.trim().is_empty() { "{}".into() } else { text };
            match scan::check(text.as_bytes()) {
                Ok(inner) if inner.kind() == Kind::Object => copied(NAME, inner),
                _ => Ok(Tree::from(text.as_ref())),
            }
        }
        Kind::Null | Kind::Bool | Kind::Number | Kind::List => {
            Err(FieldError::wrong(NAME, raw, "a string that holds a JSON object"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::json::scan::check;

    fn read_text(messages: &str) -> Result<String, String> {
        let body = format!("{{\"messages\":{messages}}}");
        let fields = Fields::of_object(check(body.as_bytes()).expect("valid"), "", &["messages"]).expect("no repeats");
        let reader = Reader {
            max_chars: 20,
            knows_developer: false,
            media: &Policy::new(&config::MediaConfig::default()),
        };
        read(&fields, reader)
            .map(|messages| serde_json::to_string(&messages).expect("JSON"))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn parts_are_put_together_and_developers_are_heard() {
        let messages = r#"[{"content":"a","role":"developer"},
            {"role":"user","name":"u","content":[{"type":"text","text":"b"},{"text":" c","type":"text"}],"x":1}]"#;
        let expected = r#"[{"role":"system","content":"a"},{"role":"user","content":"b c","name":"u"}]"#;
        assert_eq!(read_text(messages).as_deref(), Ok(expected));
    }

    #[test]
    fn calls_get_their_arguments_as_objects() {
        let messages = r#"[{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function",
            "function":{"name":"f","arguments":"{\"z\": 1, \"a\": 2}"}},{"function":{"name":"g","arguments":"{x"}}]},
            {"role":"tool","tool_call_id":"c","content":"5"}]"#;
        let expected = concat!(
            r#"[{"role":"assistant","content":"","tool_calls":[{"id":"c","type":"function","function":"#,
            r#"{"name":"f","arguments":{"z":1,"a":2}}},{"type":"function","function":{"name":"g","arguments":"{x"}}]},"#,
            r#"{"role":"tool","content":"5","tool_call_id":"c"}]"#
        );
        assert_eq!(read_text(messages).as_deref(), Ok(expected));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let cases = [
            ("null", "`messages` is missing"),
            ("[]", "`messages` is an empty list"),
            ("\"a\"", "`messages` is \"a\""),
            ("[1]", "`messages[0]` is 1"),
            ("[{}]", "`messages[0].role` is missing"),
            (r#"[{"role":"bot","content":""}]"#, "`messages[0].role` is \"bot\""),
            (r#"[{"role":1,"content":""}]"#, "`messages[0].role` is 1"),
            (r#"[{"role":"user"}]"#, "`messages[0].content` is missing"),
            (
                r#"[{"role":"user","content":null}]"#,
                "`messages[0].content` is missing",
            ),
            (
                r#"[{"role":"assistant","tool_calls":[]}]"#,
                "`messages[0].content` is missing",
            ),
            (r#"[{"role":"user","content":5}]"#, "`messages[0].content` is 5"),
            (
                r#"[{"role":"user","content":[]}]"#,
                "`messages[0].content` is an empty list",
            ),
            (
                r#"[{"role":"user","content":["a"]}]"#,
                "`messages[0].content[0]` is \"a\"",
            ),
            (
                r#"[{"role":"user","content":[{"type":"text"}]}]"#,
                "`messages[0].content[0].text` is missing",
            ),
            (
                r#"[{"role":"user","content":[{"text":"a"}]}]"#,
                "`messages[0].content[0].type` is missing",
            ),
            (
                r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x/"}}]}]"#,
                "`messages[0].content[0].type` is \"image_url\", but must be \"text\"",
            ),
            (
                r#"[{"role":"user","content":"a","tool_calls":[{"function":{"name":"f"}}]}]"#,
                "`messages[0].tool_calls` is given",
            ),
            (
                r#"[{"role":"assistant","tool_calls":[{}]}]"#,
                "`messages[0].tool_calls[0].function` is missing",
            ),
            (
                r#"[{"role":"assistant","tool_calls":[{"function":{}}]}]"#,
                "`messages[0].tool_calls[0].function.name` is missing",
            ),
            (
                r#"[{"role":"user","content":"a"},{"role":"user","content":"aaaaaaaaaaaaaaaaaaaa"}]"#,
                "`messages` have more than 20 characters",
            ),
        ];
        for (messages, start) in cases {
            let message = read_text(messages).expect_err(messages);
            assert!(message.starts_with(start), "{messages}: {message}");
        }
    }
}
