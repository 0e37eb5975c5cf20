//! What an answer says: text, and calls of functions.

use super::answer::{Message, ToolCall};
use super::tools::Tools;
use super::tools::format::{Call, Format, Parser, Piece};
use crate::core::types::Completion;
use crate::http::openai::answer::finish_reason;
use crate::http::shown::Shown;

/// The voice of one choice.
#[derive(Clone, Debug)]
pub struct Voice {
    /// Name of the choice, unique among all requests: what the names of its calls begin with.
    id: String,
    /// Calls so far.
    calls: usize,
    /// Where calls are looked for.
    parser: Option<Parser>,
}

impl Voice {
    /// `id`: the choice's name. `tools`: what the model may call. `format`: how its calls look.
    pub fn new(id: &str, tools: Option<&Tools>, format: Option<Format>) -> Self {
        let parser = tools.zip(format).map(|(tools, format)| {
            let names = tools.functions.iter().map(|function| function.name.clone());
            Parser::new(format, names.collect())
        });
        Self {
            id: id.to_owned(),
            calls: 0,
            parser,
        }
    }

    /// Adds what a token says to `message`.
    pub fn say(&mut self, shown: &Shown, message: &mut Message) {
        match &mut self.parser {
            None => message.add_text(&shown.text),
            Some(parser) => {
                let pieces = parser.push(shown);
                self.add(pieces, message);
            }
        }
    }

    /// Adds what was held back, and `tail`, which belongs to no token.
    pub fn end(&mut self, tail: &str, message: &mut Message) {
        let pieces = self.parser.as_mut().map(Parser::finish).unwrap_or_default();
        self.add(pieces, message);
        if !tail.is_empty() {
            message.add_text(tail);
        }
    }

    fn add(&mut self, pieces: Vec<Piece>, message: &mut Message) {
        for piece in pieces {
            match piece {
                Piece::Text(text) => message.add_text(&text),
                Piece::Call(call) => {
                    let call = self.named(call);
                    message.tool_calls.push(call);
                }
            }
        }
    }

    fn named(&mut self, function: Call) -> ToolCall {
        let index = self.calls;
        self.calls += 1;
        ToolCall {
            index,
            id: format!("call_{}_{index}", self.id),
            kind: "function",
            function,
        }
    }

    /// Why the answer ended, in OpenAI's words: calls that are whole are what it ended for.
    pub fn finish_reason(&self, completion: &Completion) -> &'static str {
        match finish_reason(completion) {
            "stop" if self.calls > 0 => "tool_calls",
            reason => reason,
        }
    }
}
