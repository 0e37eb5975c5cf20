//! What the text of an answer must be: `response_format`, `structured_outputs`, and the older `guided_*` fields.

use protocol::sampling::Grammar;
use serde_json::{Value, json};

use crate::http::error::ApiError;
use crate::http::json::fields::{FieldError, Fields, wrong_element};
use crate::http::json::raw::{Kind, Raw};

/// Names of the fields.
pub const NAMES: &[&str] = &[
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "response_format",
    "structured_outputs",
];

const FORMATS: &str = "\"text\", \"json_object\", \"json_schema\" or \"regex\"";
const SCHEMA: &str = "a JSON schema";
const CHOICES: &str = "a list of non-empty strings, at least one";
/// Any JSON object.
const ANY_OBJECT: &str = r#"{"type":"object"}"#;

/// A constraint, and the field that asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constraint {
    /// The field, for messages.
    pub field: String,
    /// What the text must be.
    pub grammar: Grammar,
}

/// Reads the fields. Whether a grammar can be used is for its compiler to say.
///
/// # Errors
/// A wrong value, more than one constraint, or one that is longer than `max_bytes`.
pub fn read(fields: &Fields<'_>, max_bytes: usize) -> Result<Option<Constraint>, ApiError> {
    let found = [response_format(fields)?, structured_outputs(fields)?, guided(fields)?];
    let mut constraints = found.into_iter().flatten();
    let Some(first) = constraints.next() else {
        return Ok(None);
    };
    if let Some(second) = constraints.next() {
        let problem = format!(
            "must be absent where `{}` is given: an answer has one format",
            first.field
        );
        return Err(FieldError::rule(second.field, problem).into());
    }
    let bytes = first.grammar.len();
    if bytes > max_bytes {
        let problem = format!("has {bytes} bytes, but must have at most {max_bytes}");
        return Err(FieldError::rule(first.field, problem).into());
    }
    Ok(Some(first))
}

fn constraint(field: impl Into<String>, grammar: Grammar) -> Constraint {
    Constraint {
        field: field.into(),
        grammar,
    }
}

fn response_format(fields: &Fields<'_>) -> Result<Option<Constraint>, FieldError> {
    let known: &[&str] = &["json_schema", "schema", "type", "value"];
    let Some(format) = fields.object("response_format", "response_format.", known)? else {
        return Ok(None);
    };
    let Some(kind) = format.get("type") else {
        return Err(format.missing("type", FORMATS));
    };
    let found = match kind.string().as_deref() {
        Some("text") => return Ok(None),
        // Without a schema (llama.cpp's and TGI's servers take one here) it is any object.
        Some("json_object" | "json") => {
            let name = if format.get("schema").is_some() {
                "schema"
            } else {
                "value"
            };
            match format.get(name) {
                Some(schema) => constraint(format.path(name), json_schema(format.path(name), schema, None)?),
                None => constraint(
                    fields.path("response_format"),
                    Grammar::JsonSchema(ANY_OBJECT.to_owned()),
                ),
            }
        }
        Some("json_schema") => {
            let path = "response_format.json_schema.";
            let Some(wrapper) = format.object("json_schema", path, &["schema"])? else {
                return Err(format.missing("json_schema", "an object with `schema`"));
            };
            let Some(schema) = wrapper.get("schema") else {
                return Err(wrapper.missing("schema", SCHEMA));
            };
            let field = wrapper.path("schema");
            constraint(field.clone(), json_schema(field, schema, None)?)
        }
        Some("regex") => {
            let Some(pattern) = format.string("value", "a regular expression")? else {
                return Err(format.missing("value", "a regular expression"));
            };
            constraint(format.path("value"), regex(format.path("value"), &pattern)?)
        }
        Some(_) | None => return Err(FieldError::wrong(format.path("type"), kind, FORMATS)),
    };
    Ok(Some(found))
}

fn structured_outputs(fields: &Fields<'_>) -> Result<Option<Constraint>, FieldError> {
    let known: &[&str] = &[
        "choice",
        "disable_additional_properties",
        "disable_any_whitespace",
        "grammar",
        "json",
        "json_object",
        "regex",
        "structural_tag",
        "whitespace_pattern",
    ];
    let Some(outputs) = fields.object("structured_outputs", "structured_outputs.", known)? else {
        return Ok(None);
    };
    for name in ["structural_tag", "disable_additional_properties"] {
        if outputs.get(name).is_some_and(|value| value.text() != "false") {
            let problem = "is not known here: it must be absent";
            return Err(FieldError::rule(outputs.path(name), problem));
        }
    }
    let white_space = match outputs.string("whitespace_pattern", "a regular expression")? {
        Some(pattern) => Some(json!({ "whitespace_pattern": pattern })),
        None if outputs.bool("disable_any_whitespace")?.unwrap_or(false) => {
            Some(json!({ "whitespace_flexible": false }))
        }
        None => None,
    };
    let object = outputs.bool("json_object")?.unwrap_or(false);
    let found = named(&outputs, ["json", "regex", "choice", "grammar"], white_space.clone())?;
    match (found, object) {
        (Some(found), true) => Err(FieldError::rule(
            outputs.path("json_object"),
            format!(
                "must be absent where `{}` is given: an answer has one format",
                found.field
            ),
        )),
        (None, true) => {
            let schema = with_white_space(ANY_OBJECT, white_space);
            Ok(Some(constraint(
                outputs.path("json_object"),
                Grammar::JsonSchema(schema),
            )))
        }
        (Some(found), false) => Ok(Some(found)),
        (None, false) => {
            let problem = "names no format, but must have one of json, json_object, regex, choice, grammar";
            Err(FieldError::rule(fields.path("structured_outputs"), problem))
        }
    }
}

fn guided(fields: &Fields<'_>) -> Result<Option<Constraint>, FieldError> {
    named(
        fields,
        ["guided_json", "guided_regex", "guided_choice", "guided_grammar"],
        None,
    )
}

/// The one of four fields that is given: a schema, a regular expression, choices, a grammar.
fn named(
    fields: &Fields<'_>,
    [json, pattern, choice, grammar]: [&'static str; 4],
    white_space: Option<Value>,
) -> Result<Option<Constraint>, FieldError> {
    let mut found = Vec::new();
    if let Some(schema) = fields.get(json) {
        found.push(constraint(
            fields.path(json),
            json_schema(fields.path(json), schema, white_space)?,
        ));
    }
    if let Some(text) = fields.string(pattern, "a regular expression")? {
        found.push(constraint(fields.path(pattern), regex(fields.path(pattern), &text)?));
    }
    if let Some(list) = fields.list(choice, CHOICES)? {
        found.push(constraint(fields.path(choice), choices(&fields.path(choice), list)?));
    }
    if let Some(text) = fields.string(grammar, "a grammar in Lark's or GBNF notation")? {
        found.push(constraint(fields.path(grammar), Grammar::Lark(text.into_owned())));
    }
    let mut found = found.into_iter();
    let first = found.next();
    match (&first, found.next()) {
        (Some(first), Some(second)) => {
            let problem = format!(
                "must be absent where `{}` is given: an answer has one format",
                first.field
            );
            Err(FieldError::rule(second.field, problem))
        }
        _ => Ok(first),
    }
}

/// A schema as it is, or as a string that holds it.
fn json_schema(field: String, schema: Raw<'_>, white_space: Option<Value>) -> Result<Grammar, FieldError> {
    let text = match schema.kind() {
        Kind::Object | Kind::Bool => schema.text().to_owned(),
        Kind::String => schema.string().unwrap_or_default().into_owned(),
        Kind::Null | Kind::Number | Kind::List => return Err(FieldError::wrong(field, schema, SCHEMA)),
    };
    Ok(Grammar::JsonSchema(with_white_space(&text, white_space)))
}

/// Puts the options for white space where the compiler looks for them. What is no object is for the compiler to refuse.
fn with_white_space(schema: &str, white_space: Option<Value>) -> String {
    let Some(options) = white_space else {
        return schema.to_owned();
    };
    match serde_json::from_str(schema) {
        Ok(Value::Object(mut object)) => {
            object.insert("x-guidance".to_owned(), options);
            Value::Object(object).to_string()
        }
        Ok(Value::Bool(true)) => json!({ "x-guidance": options }).to_string(),
        _ => schema.to_owned(),
    }
}

fn regex(field: String, pattern: &str) -> Result<Grammar, FieldError> {
    if pattern.is_empty() {
        return Err(FieldError::rule(
            field,
            "is \"\", but must be a regular expression that matches some text",
        ));
    }
    Ok(Grammar::Regex(pattern.to_owned()))
}

fn choices(field: &str, list: Raw<'_>) -> Result<Grammar, FieldError> {
    let mut choices = Vec::new();
    for (index, element) in list.elements().enumerate() {
        match element.string() {
            Some(choice) if !choice.is_empty() => choices.push(choice.into_owned()),
            _ => return Err(wrong_element(field, index, element, "a non-empty string")),
        }
    }
    if choices.is_empty() {
        return Err(FieldError::wrong(field, list, CHOICES));
    }
    Ok(Grammar::Choice(choices))
}
