//! `tojson` as chat templates know it: the output of Python's `json.dumps`, not the HTML-safe one of template engines.

use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::{Formatter, PrettyFormatter};

/// One line, with a space after every comma and colon.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Most spaces a level may be indented by.
const MAX_INDENT: usize = 16;

/// The filter: `value | tojson`, `tojson(indent=4)`, `tojson(ensure_ascii=true)`. Other arguments are errors.
pub(crate) fn tojson(value: &Value, indent: Option<usize>, arguments: Kwargs) -> Result<Value, Error> {
    let named: Option<usize> = arguments.get("indent")?;
    let ensure_ascii = arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    arguments.assert_all_used()?;
    let failed = |error: serde_json::Error| {
        Error::new(ErrorKind::InvalidOperation, "tojson cannot write this value").with_source(error)
    };
    let mut out = Vec::new();
    match indent.or(named) {
        None => value
            .serialize(&mut Serializer::with_formatter(&mut out, PythonFormatter))
            .map_err(failed)?,
        Some(width) if width <= MAX_INDENT => {
            let indentation = b" ".repeat(width);
            let formatter = PrettyFormatter::with_indent(&indentation);
            value
                .serialize(&mut Serializer::with_formatter(&mut out, formatter))
                .map_err(failed)?;
        }
        Some(width) => {
            let what = format!("tojson: indent is {width}; at most {MAX_INDENT} would be right");
            return Err(Error::new(ErrorKind::InvalidOperation, what));
        }
    }
    let text = String::from_utf8(out).expect("serde_json writes UTF-8");
    Ok(Value::from(if ensure_ascii { escape_non_ascii(&text) } else { text }))
}

/// `\u00e9` for é; two of them for characters beyond 16 bits. Outside strings JSON has only ASCII.
fn escape_non_ascii(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_ascii() {
            out.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    out
}
