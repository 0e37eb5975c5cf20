//! Why a grammar cannot be used.

use thiserror::Error;

/// Longest message, in characters: a compiler's words may quote a whole grammar.
const MAX_MESSAGE: usize = 300;

/// Why a grammar cannot be used, or cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum GrammarError {
    /// The model has no end token, so a constrained output could never end.
    #[error("the model has no end-of-sequence token, so a constrained output could not end")]
    NoEndToken,
    /// The tokenizer cannot be read.
    #[error("the vocabulary cannot be read: {0}")]
    Vocabulary(String),
    /// The grammar is not one, asks for what is not known here, or goes beyond the bounds.
    #[error("{0}")]
    Invalid(String),
    /// The tokens so far do not fit the grammar.
    #[error("token {token} at position {position} of the output does not fit the grammar")]
    Misfit {
        /// The token.
        token: u32,
        /// 0-based index in the output.
        position: usize,
    },
    /// The work for one token goes beyond the bounds.
    #[error("the grammar is too complex: {0}")]
    TooComplex(String),
}

/// The first part of a compiler's message, on one line.
pub(crate) fn brief(message: &str) -> String {
    let end = message.find("\n<").unwrap_or(message.len());
    let words = message[..end].split_whitespace().collect::<Vec<_>>().join(" ");
    match words.char_indices().nth(MAX_MESSAGE) {
        Some((at, _)) => format!("{}...", &words[..at]),
        None => words,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_short_and_on_one_line() {
        assert_eq!(brief("a\n  b\n<non-verbose/>"), "a b");
        assert_eq!(brief(&"é".repeat(400)).chars().count(), MAX_MESSAGE + 3);
    }
}
