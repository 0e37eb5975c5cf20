//! Structured output: which tokens an output may go on with, so that its text fits a grammar.
//!
//! The coordinator checks with it that a client's grammar can be used at all; nodes ask it for the tokens that may be drawn
//! next. Both build the same from the same tokenizer. What may follow is a function of the grammar and the tokens so far
//! alone, so nothing of it ever moves between nodes: whoever goes on with a sequence feeds it the tokens that are there.
//!
//! * [`Grammars`]: compiles grammars and keeps those that were used last.
//! * [`GrammarState`]: one output's place in its grammar.
//!
//! The work is done by the `llguidance` crate (an Earley parser over a lexer of derivatives, and a trie of the
//! vocabulary), within fixed bounds on the size of a grammar and on the work for one token.

mod compile;
mod error;
mod gbnf;
mod state;
mod vocabulary;

pub use compile::{Grammars, Vocabulary};
pub use error::GrammarError;
pub use state::{GrammarState, TokenMask};
