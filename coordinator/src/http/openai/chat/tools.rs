//! `tools` and `tool_choice`: the functions that the model may call, and whether it must.

use crate::http::error::ApiError;
use crate::http::json::fields::{FieldError, Fields, quoted};
use crate::http::json::raw::{Kind, Raw};
use crate::http::json::tree::Tree;

use super::messages::{copied, within};

/// Most tools of a request.
const MAX_TOOLS: usize = 128;
/// Longest name of a function, in characters.
const MAX_NAME: usize = 64;
const NAME: &str = "1 to 64 letters, digits or any of _ - .";
const TOOLS: &str = "a list of {\"type\": \"function\", \"function\": {\"name\": ..., \"parameters\": ...}}";
const CHOICE: &str = "\"none\", \"auto\", \"required\", or {\"type\": \"function\", \"function\": {\"name\": ...}} with the name of a tool";

/// Whether the model calls a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// It does not.
    None,
    /// As it likes.
    Auto,
    /// It calls at least one of them.
    Required,
    /// It calls the one of this name.
    Named(String),
}

/// The functions of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Tools {
    /// As the client wrote them, for the template.
    pub list: Tree,
    /// Each function's name and the schema of its arguments, if it has one.
    pub functions: Vec<(String, Option<Tree>)>,
    /// Whether one is called.
    pub choice: ToolChoice,
}

impl Tools {
    /// True if the model is told of the tools.
    pub fn are_shown(&self) -> bool {
        self.choice != ToolChoice::None
    }
}

/// Reads `tools` and `tool_choice`. An empty list is none.
///
/// # Errors
/// What is wrong, or a choice that is not supported.
pub fn read(fields: &Fields<'_>) -> Result<Option<Tools>, ApiError> {
    for (old, new) in [("functions", "tools"), ("function_call", "tool_choice")] {
        if let Some(raw) = fields.get(old).filter(|raw| raw.text() != "\"none\"") {
            let problem = format!(
                "is {}, but must be absent: it has been replaced by `{new}`",
                raw.shown()
            );
            return Err(FieldError::rule(old, problem).into());
        }
    }
    fields.bool("parallel_tool_calls")?;
    let Some(list) = fields
        .list("tools", TOOLS)?
        .filter(|list| list.elements().next().is_some())
    else {
        without_tools(fields)?;
        return Ok(None);
    };
    let mut functions: Vec<(String, Option<Tree>)> = Vec::new();
    for (index, raw) in list.elements().enumerate() {
        let place = format!("tools[{index}]");
        if index == MAX_TOOLS {
            let problem = format!("has more than {MAX_TOOLS} tools, but must have at most {MAX_TOOLS}");
            return Err(FieldError::rule("tools", problem).into());
        }
        if raw.kind() != Kind::Object {
            return Err(FieldError::wrong(place, raw, "an object of type \"function\"").into());
        }
        let function = function(raw).map_err(within(place.clone()))?;
        if functions.iter().any(|(known, _)| *known == function.0) {
            let problem = format!("is {}, but must be different from every other", quoted(&function.0));
            return Err(FieldError::rule(format!("{place}.function.name"), problem).into());
        }
        functions.push(function);
    }
    let choice = choice(fields, &functions)?;
    if choice != ToolChoice::None {
        return Err(ApiError::not_supported_yet("tool_choice"));
    }
    Ok(Some(Tools {
        list: copied("tools", list)?,
        functions,
        choice,
    }))
}

/// `tool_choice` of a request without tools: nothing can be called.
fn without_tools(fields: &Fields<'_>) -> Result<(), FieldError> {
    match fields.get("tool_choice") {
        Some(raw) if !matches!(raw.text(), "\"none\"" | "\"auto\"") => {
            let problem = format!(
                "is {}, but must be \"none\" or absent where no `tools` are given",
                raw.shown()
            );
            Err(FieldError::rule("tool_choice", problem))
        }
        Some(_) | None => Ok(()),
    }
}

fn function(raw: Raw<'_>) -> Result<(String, Option<Tree>), FieldError> {
    let fields = Fields::of_object(raw, "", &["function", "type"])?;
    let kind = fields
        .string("type", "\"function\"")?
        .ok_or_else(|| fields.missing("type", "\"function\""))?;
    if kind != "function" {
        let problem = format!("is {}, but must be \"function\"", quoted(&kind));
        return Err(FieldError::rule("type", problem));
    }
    let known: &[&str] = &["description", "name", "parameters", "strict"];
    let function = fields
        .object("function", "function.", known)?
        .ok_or_else(|| fields.missing("function", "an object with a `name`"))?;
    let name = function
        .string("name", NAME)?
        .ok_or_else(|| function.missing("name", NAME))?;
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(legal) {
        let problem = format!("is {}, but must be {NAME}", quoted(&name));
        return Err(FieldError::rule("function.name", problem));
    }
    function.string("description", "a string")?;
    function.bool("strict")?;
    function.object("parameters", "", &[])?;
    let parameters = function
        .get("parameters")
        .map(|raw| copied("function.parameters", raw))
        .transpose()?;
    Ok((name.into_owned(), parameters))
}

fn choice(fields: &Fields<'_>, functions: &[(String, Option<Tree>)]) -> Result<ToolChoice, FieldError> {
    let Some(raw) = fields.get("tool_choice") else {
        return Ok(ToolChoice::Auto);
    };
    match raw.text() {
        "\"none\"" => return Ok(ToolChoice::None),
        "\"auto\"" => return Ok(ToolChoice::Auto),
        "\"required\"" => return Ok(ToolChoice::Required),
        _ => {}
    }
    let wrong = || FieldError::wrong("tool_choice", raw, CHOICE);
    if raw.kind() != Kind::Object {
        return Err(wrong());
    }
    let named = Fields::of_object(raw, "tool_choice.", &["function", "type"])?;
    if named.string("type", "\"function\"")?.as_deref() != Some("function") {
        return Err(named.missing("type", "\"function\""));
    }
    let function = named
        .object("function", "tool_choice.function.", &["name"])?
        .ok_or_else(wrong)?;
    let name = function
        .string("name", "the name of a tool")?
        .ok_or_else(|| function.missing("name", "the name of a tool"))?;
    if !functions.iter().any(|(known, _)| *known == name) {
        let problem = format!("is {}, but must be the name of one of the `tools`", quoted(&name));
        return Err(FieldError::rule("tool_choice.function.name", problem));
    }
    Ok(ToolChoice::Named(name.into_owned()))
}
