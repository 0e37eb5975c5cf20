//! Calls that the model is made to write: `tool_choice` "required" or a named function. The answer is held to a JSON
//! schema: the arguments of the named function, or a list of calls, each of one of the functions.

use super::format::Call;
use super::{Function, ToolChoice, Tools};
use crate::http::json::fields::FieldError;
use crate::http::json::raw::{Kind, Raw};
use crate::http::json::scan;
use crate::http::json::tree::Tree;

/// Where schemas keep what they refer to.
const SHELVES: [&str; 2] = ["$defs", "definitions"];

/// The schema of an answer that calls; `None` if it need not.
///
/// # Errors
/// Two functions mean different things by one name in their definitions.
pub fn schema(tools: &Tools) -> Result<Option<String>, FieldError> {
    let schema = match &tools.choice {
        ToolChoice::None | ToolChoice::Auto => return Ok(None),
        ToolChoice::Named(name) => tools
            .functions
            .iter()
            .find(|function| function.name == *name)
            .map_or_else(any_object, parameters),
        ToolChoice::Required => any_of(&tools.functions)?,
    };
    // Strings, finite numbers and maps with text keys always serialise.
    Ok(serde_json::to_string(&schema).ok())
}

fn any_object() -> Tree {
    Tree::Object(vec![("type".to_owned(), Tree::from("object"))])
}

/// The schema of a function's arguments; an empty one allows more than an object, which arguments are.
fn parameters(function: &Function) -> Tree {
    match &function.parameters {
        Some(Tree::Object(members)) if members.iter().any(|(name, _)| name == "type") => Tree::Object(members.clone()),
        Some(Tree::Object(members)) => {
            let mut typed = vec![("type".to_owned(), Tree::from("object"))];
            typed.extend(members.iter().cloned());
            Tree::Object(typed)
        }
        _ => any_object(),
    }
}

/// A list of at least one call. References inside of the arguments' schemas begin at the root, so that what they refer to
/// is moved there.
fn any_of(functions: &[Function]) -> Result<Tree, FieldError> {
    let mut shelves: [Vec<(String, Tree)>; 2] = [Vec::new(), Vec::new()];
    let mut calls = Vec::new();
    for function in functions {
        let Tree::Object(members) = parameters(function) else {
            continue;
        };
        let mut own = Vec::new();
        for (name, value) in members {
            match SHELVES.iter().position(|shelf| *shelf == name) {
                Some(shelf) => put(&mut shelves[shelf], value)?,
                None => own.push((name, value)),
            }
        }
        let name = object([("const", Tree::from(function.name.as_str()))]);
        let properties = object([("name", name), ("arguments", Tree::Object(own))]);
        calls.push(object([
            ("type", Tree::from("object")),
            ("properties", properties),
            (
                "required",
                Tree::List(vec![Tree::from("name"), Tree::from("arguments")]),
            ),
            ("additionalProperties", Tree::Bool(false)),
        ]));
    }
    let mut all = vec![
        ("type".to_owned(), Tree::from("array")),
        ("minItems".to_owned(), Tree::Number(1.into())),
        ("items".to_owned(), object([("anyOf", Tree::List(calls))])),
    ];
    for (shelf, things) in SHELVES.iter().zip(shelves) {
        if !things.is_empty() {
            all.push(((*shelf).to_owned(), Tree::Object(things)));
        }
    }
    Ok(Tree::Object(all))
}

fn object<const N: usize>(members: [(&str, Tree); N]) -> Tree {
    Tree::Object(
        members
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect(),
    )
}

fn put(shelf: &mut Vec<(String, Tree)>, things: Tree) -> Result<(), FieldError> {
    let Tree::Object(things) = things else {
        return Ok(());
    };
    for (name, thing) in things {
        match shelf.iter().find(|(known, _)| *known == name) {
            Some((_, known)) if *known == thing => {}
            Some(_) => {
                let problem = format!(
                    "define {} in two ways, but must mean the same by one name where a call is required",
                    crate::http::json::fields::quoted(&name)
                );
                return Err(FieldError::rule("tools", problem));
            }
            None => shelf.push((name, thing)),
        }
    }
    Ok(())
}

/// The calls in an answer that was made to call; `None` if it was cut off before its end.
pub fn calls(choice: &ToolChoice, text: &str) -> Option<Vec<Call>> {
    let raw = scan::check(text.trim().as_bytes()).ok()?;
    match choice {
        ToolChoice::Named(name) => Some(vec![Call {
            name: name.clone(),
            arguments: raw.text().to_owned(),
        }]),
        ToolChoice::Required => raw.elements().map(call).collect(),
        ToolChoice::None | ToolChoice::Auto => None,
    }
}

fn call(raw: Raw<'_>) -> Option<Call> {
    let member = |wanted: &str| {
        raw.members()
            .find_map(|(name, value)| (name == wanted).then_some(value))
    };
    let arguments = member("arguments").filter(|raw| raw.kind() == Kind::Object)?;
    Some(Call {
        name: member("name")?.string()?.into_owned(),
        arguments: arguments.text().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::json::scan::check;

    fn tools(choice: ToolChoice, parameters: &[(&str, &str)]) -> Tools {
        let function = |(name, schema): &(&str, &str)| Function {
            name: (*name).to_owned(),
            parameters: (!schema.is_empty())
                .then(|| Tree::of(check(schema.as_bytes()).expect("valid")).expect("finite")),
        };
        Tools {
            list: Tree::Null,
            functions: parameters.iter().map(function).collect(),
            choice,
        }
    }

    #[test]
    fn a_named_function_gets_its_own_schema() {
        let named = |schema: &str| schema_of(&tools(ToolChoice::Named("f".to_owned()), &[("g", "{}"), ("f", schema)]));
        assert_eq!(named(""), r#"{"type":"object"}"#);
        assert_eq!(named(r#"{"properties":{}}"#), r#"{"type":"object","properties":{}}"#);
        let own = r##"{"type":"object","properties":{"a":{"$ref":"#/$defs/x"}},"$defs":{"x":{"type":"null"}}}"##;
        assert_eq!(named(own), own);
    }

    fn schema_of(tools: &Tools) -> String {
        schema(tools).expect("no contradiction").expect("a schema")
    }

    #[test]
    fn required_calls_are_a_list_and_share_their_definitions() {
        let shelf = r#""$defs":{"x":{"type":"null"}}"#;
        let with = format!("{{\"type\":\"object\",{shelf}}}");
        let found = schema_of(&tools(ToolChoice::Required, &[("f", &with), ("g", &with)]));
        let call = |name: &str| {
            format!(
                r#"{{"type":"object","properties":{{"name":{{"const":"{name}"}},"arguments":{{"type":"object"}}}},"required":["name","arguments"],"additionalProperties":false}}"#
            )
        };
        let expected = format!(
            r#"{{"type":"array","minItems":1,"items":{{"anyOf":[{},{}]}},{shelf}}}"#,
            call("f"),
            call("g")
        );
        assert_eq!(found, expected);
        let other = r#"{"$defs":{"x":{"type":"string"}}}"#;
        let error = schema(&tools(ToolChoice::Required, &[("f", &with), ("g", other)])).expect_err("two meanings");
        assert_eq!(error.field, "tools");
        assert_eq!(schema(&tools(ToolChoice::Auto, &[("f", "")])), Ok(None));
    }

    #[test]
    fn calls_are_read_back_whole_or_not_at_all() {
        let call = |name: &str, arguments: &str| Call {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
        };
        let named = ToolChoice::Named("f".to_owned());
        assert_eq!(calls(&named, " {\"a\": 1}"), Some(vec![call("f", "{\"a\": 1}")]));
        assert_eq!(calls(&named, "{\"a\": "), None);
        let list = r#"[{"name":"f","arguments":{"a":1}}, {"name":"g","arguments":{}}]"#;
        assert_eq!(
            calls(&ToolChoice::Required, list),
            Some(vec![call("f", "{\"a\":1}"), call("g", "{}")])
        );
        assert_eq!(calls(&ToolChoice::Required, &list[..30]), None);
    }
}
