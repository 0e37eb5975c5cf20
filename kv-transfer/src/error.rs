//! Why a handoff failed, seen from the prefill node.

use runtime::framing::FramingError;
use runtime::quic::{LinkError, code};
use thiserror::Error;

use crate::core::SendError;

/// Why a handoff failed. Whatever it is, the receiver has not taken the sequence over, except after
/// [`NoAnswer`](Self::NoAnswer) and [`Lost`](Self::Lost), where it may have.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum TransferError {
    /// Settings or arguments that do not fit each other.
    #[error("{field} = {value} does not fit: {rule}")]
    Setting {
        /// Which.
        field: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        rule: String,
    },
    /// No link to the decode node.
    #[error("{reason}")]
    Link {
        /// Why.
        reason: String,
    },
    /// The decode node refused: unknown ticket, other fingerprint, damaged beyond repair.
    #[error("refused by the decode node: {reason}")]
    Refused {
        /// What it says.
        reason: String,
    },
    /// The decode node took the reservation back.
    #[error("the decode node revoked the reservation")]
    Revoked,
    /// The decode node gave the stream up without a word.
    #[error("the decode node reset the stream (code {code})")]
    Reset {
        /// Code of the reset.
        code: u64,
    },
    /// The connection is gone.
    #[error("connection to the decode node lost: {reason}")]
    Lost {
        /// Why.
        reason: String,
    },
    /// The job's deadline passed.
    #[error("not handed off by the job's deadline: {unconfirmed} frames unconfirmed")]
    Deadline {
        /// Frames sent or waiting whose arrival was not confirmed.
        unconfirmed: usize,
    },
    /// No answer to the commit, or no grant for it.
    #[error("no answer of the decode node within {after_ms} ms of the commit")]
    NoAnswer {
        /// Deadline, in milliseconds.
        after_ms: u64,
    },
    /// What was pushed does not make a handoff.
    #[error(transparent)]
    Session(#[from] SendError),
    /// The decode node broke the protocol.
    #[error("decode node broke the protocol: {reason}")]
    Protocol {
        /// How.
        reason: String,
    },
    /// This side cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl From<LinkError> for TransferError {
    fn from(error: LinkError) -> Self {
        Self::Link {
            reason: error.to_string(),
        }
    }
}

impl From<FramingError> for TransferError {
    fn from(error: FramingError) -> Self {
        match error {
            FramingError::Reset { code } if code == code::REVOKED.into_inner() => Self::Revoked,
            FramingError::Reset { code } => Self::Reset { code },
            FramingError::Connection { reason, .. } => Self::Lost { reason },
            FramingError::Codec(_) | FramingError::Truncated { .. } => Self::Protocol {
                reason: error.to_string(),
            },
            FramingError::Closed => Self::Cancelled,
        }
    }
}
