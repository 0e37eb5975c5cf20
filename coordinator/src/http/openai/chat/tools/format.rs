//! Calls in a model's own words. Models are taught to write calls in a few forms; which one, their chat template shows.
//!
//! What looks like a call and cannot be read is text: nothing that the model said is lost.

use std::borrow::Cow;

use serde::Serialize;
use utoipa::ToSchema;

use crate::http::json::raw::{Kind, Raw};
use crate::http::json::scan;
use crate::http::shown::Shown;

const HERMES_OPEN: &str = "<tool_call>";
const HERMES_CLOSE: &str = "</tool_call>";
const MISTRAL_OPEN: &str = "[TOOL_CALLS]";
const MISTRAL_ARGUMENTS: &str = "[ARGS]";
const LLAMA_OPEN: &str = "<|python_tag|>";

/// How calls look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times: Hermes, Qwen and others, and
    /// models whose template knows no tools.
    Hermes,
    /// `[TOOL_CALLS]` and a list of `{"name": ..., "arguments": {...}}`, or `[TOOL_CALLS]name{...}`: Mistral.
    Mistral,
    /// The whole answer is `{"name": ..., "parameters": {...}}`, possibly after `<|python_tag|>`: Llama 3.
    Llama,
}

impl Format {
    /// The form that a template asks for; `None` if it asks for one that is not known here.
    pub fn of_template(source: &str) -> Option<Self> {
        if !source.contains("tools") {
            return Some(Self::Hermes);
        }
        if source.contains(MISTRAL_OPEN) {
            Some(Self::Mistral)
        } else if source.contains("<function=") {
            // Arguments as XML: Qwen3-Coder and its kin.
            None
        } else if source.contains(HERMES_OPEN) {
            Some(Self::Hermes)
        } else if source.contains("\"parameters\": ") && source.contains("\"name\": ") {
            Some(Self::Llama)
        } else {
            None
        }
    }

    fn opening(self) -> &'static str {
        match self {
            Self::Hermes => HERMES_OPEN,
            Self::Mistral => MISTRAL_OPEN,
            Self::Llama => LLAMA_OPEN,
        }
    }

    /// What may be a special token.
    fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[HERMES_OPEN, HERMES_CLOSE],
            Self::Mistral => &[MISTRAL_OPEN, MISTRAL_ARGUMENTS],
            Self::Llama => &[LLAMA_OPEN],
        }
    }
}

/// A call of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct Call {
    /// Name of the function.
    pub name: String,
    /// Its arguments: JSON, as the model wrote it.
    pub arguments: String,
}

/// What a model said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text for the client.
    Text(String),
    /// A call.
    Call(Call),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Nothing but white space yet.
    Start,
    /// In text.
    Text,
    /// In what may be a call.
    Call,
}

/// Finds the calls in an answer, token by token. Text is passed on as soon as it cannot be the beginning of a call.
#[derive(Clone, Debug)]
pub struct Parser {
    format: Format,
    /// Names of the functions.
    known: Vec<String>,
    place: Place,
    /// What is not passed on yet: in a call all of it, its opening left out.
    held: String,
    /// In a call: the white space before it.
    gap: String,
    /// There was a call.
    called: bool,
}

impl Parser {
    /// `known`: the names of the functions.
    pub fn new(format: Format, known: Vec<String>) -> Self {
        Self {
            format,
            known,
            place: Place::Start,
            held: String::new(),
            gap: String::new(),
            called: false,
        }
    }

    /// Takes the next token.
    pub fn push(&mut self, shown: &Shown) -> Vec<Piece> {
        // Markers may be special tokens, which are no part of the visible text.
        let literal = shown.token.text.as_str();
        let hidden = shown.token.special && shown.text.is_empty() && self.format.markers().contains(&literal);
        self.take(if hidden { literal } else { &shown.text })
    }

    /// Takes more text.
    fn take(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        while self.advance(&mut pieces) {}
        pieces
    }

    /// Does one step; true if there may be another.
    fn advance(&mut self, pieces: &mut Vec<Piece>) -> bool {
        match self.place {
            Place::Call => self.close(pieces),
            Place::Start | Place::Text => {
                let opening = self.format.opening();
                if self.place == Place::Start && self.format == Format::Llama && self.held.trim_start().starts_with('{')
                {
                    self.place = Place::Call;
                    return true;
                }
                if let Some(at) = self.held.find(opening) {
                    let before = self.held[..at].trim_end().len();
                    let text = self.held[..before].to_owned();
                    pieces.extend((!text.is_empty()).then_some(Piece::Text(text)));
                    self.gap = self.held[before..at].to_owned();
                    self.held.drain(..at + opening.len());
                    self.place = Place::Call;
                    return true;
                }
                let free = self.held.len() - held_back(&self.held, opening);
                if free > 0 {
                    let text: String = self.held.drain(..free).collect();
                    pieces.push(Piece::Text(text));
                    self.place = Place::Text;
                }
                false
            }
        }
    }

    /// In a call: ends it if its end is there.
    fn close(&mut self, pieces: &mut Vec<Piece>) -> bool {
        if self.format != Format::Hermes {
            return false;
        }
        let Some(at) = self.held.find(HERMES_CLOSE) else {
            return false;
        };
        let inside: String = self.held.drain(..at).collect();
        self.held.drain(..HERMES_CLOSE.len());
        self.place = Place::Text;
        pieces.push(match object(&inside) {
            Some(call) => {
                self.called = true;
                Piece::Call(call)
            }
            None => Piece::Text(format!("{}{HERMES_OPEN}{inside}{HERMES_CLOSE}", self.gap)),
        });
        true
    }

    /// The answer has ended.
    pub fn finish(&mut self) -> Vec<Piece> {
        let held = std::mem::take(&mut self.held);
        if self.place != Place::Call {
            // White space around calls is no text.
            let silent = held.is_empty() || (self.called && held.trim().is_empty());
            return Vec::from_iter((!silent).then_some(Piece::Text(held)));
        }
        let calls = match self.format {
            Format::Hermes => object(&held).map(|call| vec![call]),
            Format::Mistral => mistral(&held),
            Format::Llama => llama(&held).filter(|calls| calls.iter().all(|call| self.known.contains(&call.name))),
        };
        match calls {
            Some(calls) => calls.into_iter().map(Piece::Call).collect(),
            None if self.format == Format::Llama => vec![Piece::Text(held)],
            None => vec![Piece::Text(format!("{}{}{held}", self.gap, self.format.opening()))],
        }
    }
}

/// Bytes at the end of `text` that may be the beginning of `opening`, and the white space before it.
fn held_back(text: &str, opening: &str) -> usize {
    let begins = (1..opening.len())
        .rev()
        .find(|&length| text.ends_with(&opening[..length]));
    let rest = &text[..text.len() - begins.unwrap_or(0)];
    text.len() - rest.trim_end().len()
}

/// `{"name": ..., "arguments": {...}}`, and nothing else.
fn object(text: &str) -> Option<Call> {
    call(scan::check(text.trim().as_bytes()).ok()?)
}

fn call(raw: Raw<'_>) -> Option<Call> {
    let member = |wanted: &str| {
        raw.members()
            .find_map(|(name, value)| (name == wanted).then_some(value))
    };
    let name = member("name")?.string()?.into_owned();
    let arguments = member("arguments").or_else(|| member("parameters"));
    Some(Call {
        name,
        arguments: arguments.map_or_else(|| "{}".to_owned(), |raw| written(raw).into_owned()),
    })
}

/// Arguments as JSON; some models write JSON in a string.
fn written(raw: Raw<'_>) -> Cow<'_, str> {
    match raw.kind() {
        Kind::String => raw.string().unwrap_or_default(),
        Kind::Null => Cow::Borrowed("{}"),
        Kind::Bool | Kind::Number | Kind::List | Kind::Object => Cow::Borrowed(raw.text()),
    }
}

/// A list of calls, or names each followed by its arguments.
fn mistral(text: &str) -> Option<Vec<Call>> {
    let text = text.trim();
    if text.starts_with('[') {
        let list = scan::check(text.as_bytes()).ok()?;
        return list
            .elements()
            .map(call)
            .collect::<Option<Vec<_>>>()
            .filter(|calls| !calls.is_empty());
    }
    let mut calls = Vec::new();
    for part in text.split(MISTRAL_OPEN) {
        let at = part.find('{')?;
        let name = part[..at].trim().trim_end_matches(MISTRAL_ARGUMENTS).trim();
        let arguments = part[at..].trim();
        scan::check(arguments.as_bytes()).ok()?;
        if name.is_empty() {
            return None;
        }
        calls.push(Call {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
        });
    }
    Some(calls)
}

/// Calls with semicolons between them.
fn llama(text: &str) -> Option<Vec<Call>> {
    let mut calls = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        // A call ends at the first bracket that makes it whole.
        let end = rest
            .match_indices('}')
            .map(|(at, _)| at + 1)
            .find(|&end| scan::check(&rest.as_bytes()[..end]).is_ok())?;
        calls.push(object(&rest[..end])?);
        rest = rest[end..].trim_start_matches([';', ' ', '\n', '\t', '\r']);
    }
    (!calls.is_empty()).then_some(calls)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes out of `text`, given in pieces of `size` bytes (it is ASCII); neighbouring texts are joined.
    fn pieces(format: Format, text: &str, size: usize) -> Vec<Piece> {
        let mut parser = Parser::new(format, vec!["f".to_owned(), "g".to_owned()]);
        let mut all: Vec<Piece> = Vec::new();
        let chunks = text
            .as_bytes()
            .chunks(size)
            .map(|chunk| String::from_utf8_lossy(chunk).into_owned());
        let mut found: Vec<Piece> = chunks.flat_map(|chunk| parser.take(&chunk)).collect();
        found.extend(parser.finish());
        for piece in found {
            match (all.last_mut(), piece) {
                (Some(Piece::Text(text)), Piece::Text(more)) => text.push_str(&more),
                (_, piece) => all.push(piece),
            }
        }
        all
    }

    fn call(name: &str, arguments: &str) -> Piece {
        Piece::Call(Call {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
        })
    }

    fn text(text: &str) -> Piece {
        Piece::Text(text.to_owned())
    }

    fn check(format: Format, input: &str, expected: &[Piece]) {
        for size in 1..=input.len() {
            assert_eq!(pieces(format, input, size), expected, "{input} in pieces of {size}");
        }
    }

    #[test]
    fn hermes() {
        let format = Format::Hermes;
        check(format, "just < text <tool", &[text("just < text <tool")]);
        check(
            format,
            "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}\n</tool_call>\n\
             <tool_call>{\"name\":\"g\"}</tool_call>\n",
            &[text("Let me see."), call("f", "{\"a\": [1, \"}\"]}"), call("g", "{}")],
        );
        check(
            format,
            "<tool_call>nonsense</tool_call>!",
            &[text("<tool_call>nonsense</tool_call>!")],
        );
        check(
            format,
            "<tool_call>{\"name\":\"f\",\"arguments\":\"{}\"}",
            &[call("f", "{}")],
        );
        check(format, "a <tool_call>{\"name\":", &[text("a <tool_call>{\"name\":")]);
    }

    #[test]
    fn mistral_writes_lists_and_names() {
        let format = Format::Mistral;
        check(
            format,
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", \"arguments\": {}}]",
            &[call("f", "{\"a\": 1}"), call("g", "{}")],
        );
        check(
            format,
            "[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g{}",
            &[call("f", "{\"a\": 1}"), call("g", "{}")],
        );
        check(format, "[TOOL_CALLS]what", &[text("[TOOL_CALLS]what")]);
        check(format, "[TOOL] [1]", &[text("[TOOL] [1]")]);
    }

    #[test]
    fn llama_calls_with_its_whole_answer() {
        let format = Format::Llama;
        check(
            format,
            "{\"name\": \"f\", \"parameters\": {\"a\": {}}}",
            &[call("f", "{\"a\": {}}")],
        );
        check(
            format,
            "{\"name\": \"f\"}; {\"name\": \"g\", \"parameters\": {}}",
            &[call("f", "{}"), call("g", "{}")],
        );
        check(
            format,
            "{\"name\": \"nobody\", \"parameters\": {}}",
            &[text("{\"name\": \"nobody\", \"parameters\": {}}")],
        );
        check(format, "{\"a\": 1}", &[text("{\"a\": 1}")]);
        check(format, "Say {\"name\": \"f\"}", &[text("Say {\"name\": \"f\"}")]);
    }

    #[test]
    fn templates_show_their_form() {
        for (source, format) in [
            ("{{ messages }}", Some(Format::Hermes)),
            ("{% if tools %}<tool_call>{% endif %}", Some(Format::Hermes)),
            ("{% if tools %}[TOOL_CALLS]{% endif %}", Some(Format::Mistral)),
            ("{% if tools %}<tool_call><function=f>{% endif %}", None),
            (
                "{% if tools %}{\"name\": f, \"parameters\": p}{% endif %}",
                Some(Format::Llama),
            ),
            ("{% if tools %}<|tool|>{% endif %}", None),
        ] {
            assert_eq!(Format::of_template(source), format, "{source}");
        }
    }
}
