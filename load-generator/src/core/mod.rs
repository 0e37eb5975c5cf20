//! What decides and computes: pure, with time, files and randomness as arguments.

pub mod arrivals;
pub mod compare;
pub mod dialect;
pub mod gaps;
pub mod prompts;
pub mod record;
pub mod sse;
pub mod summary;
pub mod sweep;
pub mod timing;
pub mod trace;

/// A value that cannot be used: what it is for, what it is, and what would be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {value}; it must be {right}")]
pub struct Invalid {
    what: String,
    value: String,
    right: String,
}

impl Invalid {
    /// `what` is `value`; it must be `right`.
    pub fn new(what: impl Into<String>, value: impl ToString, right: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            value: value.to_string(),
            right: right.into(),
        }
    }
}
