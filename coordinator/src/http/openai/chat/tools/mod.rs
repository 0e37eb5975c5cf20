//! `tools` and `tool_choice`: the functions that the model may call, and whether it must.
//!
//! * [`mod@format`]: how a model's calls look, by what its template says, and the parser that finds them in its words.
//! * [`forced`]: calls that the model is made to write, by a JSON schema.
//! * [`generic`]: what a model is told whose template knows no tools.

pub mod forced;
pub mod format;
pub mod generic;

use super::messages::{copied, within};
use crate::http::error::ApiError;
use crate::http::json::fields::{FieldError, Fields, quoted};
use crate::http::json::raw::{Kind, Raw};
use crate::http::json::tree::Tree;

use format::Format;

/// Most tools of a request.
const MAX_TOOLS: usize = 128;
/// Longest name of a function, in characters.
const MAX_NAME: usize = 64;
const NAME: &str = "1 to 64 letters, digits or any of _ - .";
const TOOLS: &str = "a list of {\"type\": \"function\", \"function\": {\"name\": ..., \"parameters\": ...}}";
const CHOICE: &str = "\"none\", \"auto\", \"required\", or {\"type\": \"function\", \"function\": {\"name\": ...}} with the name of a tool";

/// Names of the body's fields that [`read`] reads.
pub const FIELDS: [&str; 5] = [
    "function_call",
    "functions",
    "parallel_tool_calls",
    "tool_choice",
    "tools",
];

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

/// A function that can be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Its name, unique in the request.
    pub name: String,
    /// The JSON schema of its arguments, if it has one.
    pub parameters: Option<Tree>,
}

/// The functions of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Tools {
    /// As the client wrote them, for the template.
    pub list: Tree,
    /// The same, one by one.
    pub functions: Vec<Function>,
    /// Whether one is called.
    pub choice: ToolChoice,
}

/// Reads `tools` and `tool_choice`. `format`: how the model's calls look, if that is known.
///
/// # Errors
/// What is wrong, or a choice that is not supported.
pub fn read(fields: &Fields<'_>, format: Option<Format>) -> Result<Option<Tools>, ApiError> {
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
    let Some((list, functions)) = listed(fields)? else {
        without_tools(fields)?;
        return Ok(None);
    };
    let choice = choice(fields, &functions)?;
    match choice {
        ToolChoice::Auto if format.is_none() => {
            let problem = "is \"auto\", but must be \"none\", \"required\" or a named function for this model: the calls \
                that its chat template asks for are of a form that is not known here";
            return Err(FieldError::rule("tool_choice", problem).into());
        }
        ToolChoice::Auto | ToolChoice::None | ToolChoice::Required | ToolChoice::Named(_) => {}
    }
    Ok(Some(Tools {
        list,
        functions,
        choice,
    }))
}

/// Reads `tools`: as they are, and one by one. An empty list is none.
///
/// # Errors
/// What is wrong.
pub fn listed(fields: &Fields<'_>) -> Result<Option<(Tree, Vec<Function>)>, FieldError> {
    let Some(list) = fields
        .list("tools", TOOLS)?
        .filter(|list| list.elements().next().is_some())
    else {
        return Ok(None);
    };
    let mut functions: Vec<Function> = Vec::new();
    for (index, raw) in list.elements().enumerate() {
        let place = format!("tools[{index}]");
        if index == MAX_TOOLS {
            let problem = format!("has more than {MAX_TOOLS} tools, but must have at most {MAX_TOOLS}");
            return Err(FieldError::rule("tools", problem));
        }
        if raw.kind() != Kind::Object {
            return Err(FieldError::wrong(place, raw, "an object of type \"function\""));
        }
        let function = function(raw).map_err(within(place.clone()))?;
        if functions.iter().any(|known| known.name == function.name) {
            let problem = format!("is {}, but must be different from every other", quoted(&function.name));
            return Err(FieldError::rule(format!("{place}.function.name"), problem));
        }
        functions.push(function);
    }
    Ok(Some((copied("tools", list)?, functions)))
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

fn function(raw: Raw<'_>) -> Result<Function, FieldError> {
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
    Ok(Function {
        name: name.into_owned(),
        parameters,
    })
}

fn choice(fields: &Fields<'_>, functions: &[Function]) -> Result<ToolChoice, FieldError> {
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
        return Err(wrong());
    }
    let function = named
        .object("function", "tool_choice.function.", &["name"])?
        .ok_or_else(wrong)?;
    let name = function
        .string("name", "the name of a tool")?
        .ok_or_else(|| function.missing("name", "the name of a tool"))?;
    if !functions.iter().any(|known| known.name == name) {
        let problem = format!("is {}, but must be the name of one of the `tools`", quoted(&name));
        return Err(FieldError::rule("tool_choice.function.name", problem));
    }
    Ok(ToolChoice::Named(name.into_owned()))
}
