//! Where templates see Python behind Jinja: how values print, and what tests and filters of jinja2 say of them.

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, escape_formatter};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Gives an environment Python's ways, where the engine has its own.
pub(crate) fn install(environment: &mut Environment<'static>) {
    environment.set_formatter(format);
    environment.set_unknown_method_callback(method);
    environment.add_filter("string", string);
    environment.add_filter("trim", trim);
    environment.add_filter("upper", |value: &Value| string(value).to_uppercase());
    environment.add_filter("lower", |value: &Value| string(value).to_lowercase());
    environment.add_filter("e", escape);
    environment.add_filter("escape", escape);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
}

/// Python's methods of strings, lists and maps.
fn method(state: &State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    match (name, value.as_str(), arguments) {
        ("title", Some(text), []) => Ok(Value::from(title(text))),
        _ => unknown_method_callback(state, value, name, arguments),
    }
}

/// Python's `str.title`: a letter after anything but a letter begins a word.
fn title(text: &str) -> String {
    let mut within = false;
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        if within {
            out.extend(character.to_lowercase());
        } else {
            out.extend(character.to_uppercase());
        }
        within = character.is_alphabetic();
    }
    out
}

/// `{{ value }}`: lists and maps print as Python prints them.
fn format(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    if is_container(value) {
        out.write_str(&repr(value))
            .map_err(|_| Error::new(ErrorKind::WriteFailure, "cannot print a value"))
    } else {
        escape_formatter(out, state, value)
    }
}

/// The filter `string`: Python's `str`.
fn string(value: &Value) -> String {
    if is_container(value) {
        repr(value)
    } else {
        value.to_string()
    }
}

/// The filter `trim`, with the characters to take away, or white space.
fn trim(value: &Value, characters: Option<String>) -> String {
    let text = string(value);
    let trimmed = match characters {
        None => text.trim(),
        Some(characters) => text.trim_matches(|character| characters.contains(character)),
    };
    trimmed.to_owned()
}

/// The filter `escape`, as MarkupSafe escapes. (It does so always; what is not asked to be escaped is not.)
fn escape(value: &Value) -> String {
    let text = string(value);
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    out
}

/// `none` is not iterable in Python; an undefined value is.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Strings and maps are sequences to jinja2: they have a length and items.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

fn is_container(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map)
}

/// Python's `repr` of what JSON can hold.
fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(&mut out, value);
    out
}

fn write_repr(out: &mut String, value: &Value) {
    let items = |value: &Value| value.try_iter().into_iter().flatten().collect::<Vec<Value>>();
    match value.kind() {
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            out.push('[');
            for (index, item) in items(value).iter().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                write_repr(out, item);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in items(value).iter().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                write_repr(out, key);
                out.push_str(": ");
                write_repr(out, &value.get_item(key).unwrap_or_default());
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

/// A string in the quotes that need fewer escapes, the single ones first.
fn write_string(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            ' ' => out.push(' '),
            same if same == quote => out.extend(['\\', quote]),
            hidden if hidden.is_control() || hidden.is_whitespace() => out.push_str(&numbered(hidden)),
            shown => out.push(shown),
        }
    }
    out.push(quote);
}

/// A character as its number: `\x1b`, `\u2028`.
fn numbered(character: char) -> String {
    match u32::from(character) {
        number @ ..=0xff => format!("\\x{number:02x}"),
        number @ ..=0xffff => format!("\\u{number:04x}"),
        number => format!("\\U{number:08x}"),
    }
}
