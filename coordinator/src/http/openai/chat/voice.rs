//! What an answer says: text, and calls of functions.

use super::answer::{Message, ToolCall};
use super::tools::format::{Call, Format, Parser, Piece};
use super::tools::{ToolChoice, Tools, forced};
use crate::core::types::Completion;
use crate::http::openai::answer::finish_reason;
use crate::http::shown::Shown;

/// Where calls are looked for.
#[derive(Clone, Debug)]
enum Ear {
    /// Nowhere.
    Deaf,
    /// In the model's own words.
    Free(Parser),
    /// The whole answer is one or more, whose text so far is this.
    Forced(ToolChoice, String),
}

/// The voice of one choice.
#[derive(Clone, Debug)]
pub struct Voice {
    /// Name of the choice, unique among all requests: what the names of its calls begin with.
    id: String,
    /// Calls so far.
    calls: usize,
    ear: Ear,
}

impl Voice {
    /// `id`: the choice's name. `tools`: what the model may call. `format`: how its calls look.
    pub fn new(id: &str, tools: Option<&Tools>, format: Option<Format>) -> Self {
        let ear = match tools {
            None => Ear::Deaf,
            Some(tools) => match (&tools.choice, format) {
                (ToolChoice::Required | ToolChoice::Named(_), _) => Ear::Forced(tools.choice.clone(), String::new()),
                (ToolChoice::Auto, Some(format)) => {
                    let names = tools.functions.iter().map(|function| function.name.clone());
                    Ear::Free(Parser::new(format, names.collect()))
                }
                (ToolChoice::Auto, None) | (ToolChoice::None, _) => Ear::Deaf,
            },
        };
        Self {
            id: id.to_owned(),
            calls: 0,
            ear,
        }
    }

    /// Adds what a token says to `message`.
    pub fn say(&mut self, shown: &Shown, message: &mut Message) {
        match &mut self.ear {
            Ear::Deaf => message.add_text(&shown.text),
            Ear::Free(parser) => {
                let pieces = parser.push(shown);
                self.add(pieces, message);
            }
            Ear::Forced(_, text) => text.push_str(&shown.text),
        }
    }

    /// Adds what was held back, and `tail`, which belongs to no token.
    pub fn end(&mut self, tail: &str, message: &mut Message) {
        let pieces = match &mut self.ear {
            Ear::Deaf => Vec::new(),
            Ear::Free(parser) => parser.finish(),
            Ear::Forced(choice, text) => match forced::calls(choice, text) {
                Some(calls) => calls.into_iter().map(Piece::Call).collect(),
                // Cut off: what there is of it is text.
                None => vec![Piece::Text(std::mem::take(text))],
            },
        };
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

    /// Why the answer ended, in OpenAI's words: calls that are whole are what it ended for, unless the function was named.
    pub fn finish_reason(&self, completion: &Completion) -> &'static str {
        let named = matches!(self.ear, Ear::Forced(ToolChoice::Named(_), _));
        match finish_reason(completion) {
            "stop" if self.calls > 0 && !named => "tool_calls",
            reason => reason,
        }
    }
}
