//! Why attempts fail, and what clients are told of it.

use protocol::control::{JobError, JobErrorKind};

use crate::core::types::ServeErrorKind;
use crate::core::words;

/// Why an attempt came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The link to the node is gone.
    NodeLost,
    /// The node does not get on with its work.
    Stalled,
    /// An operator wants the node empty.
    Moved,
    /// The job's stream ended without a last event.
    StreamLost(String),
    /// The node reported a failure.
    Failed(JobError),
    /// The deadline of the named state passed.
    Deadline(&'static str),
    /// The node said something that makes no sense.
    Nonsense(String),
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NodeLost => f.write_str("node lost"),
            Self::Stalled => f.write_str("node stalled"),
            Self::Moved => f.write_str("node is to be emptied"),
            Self::StreamLost(how) => write!(f, "job stream lost: {how}"),
            Self::Failed(error) => write!(f, "job failed ({:?}): {}", error.kind, error.message),
            Self::Deadline(state) => write!(f, "deadline passed while {state}"),
            Self::Nonsense(what) => write!(f, "protocol violation: {what}"),
        }
    }
}

impl Cause {
    words! {
        NodeLost => "node_lost",
        Stalled => "stalled",
        Moved => "moved",
        StreamLost => "stream_lost",
        Failed => "job_failed",
        Deadline => "deadline",
        Nonsense => "protocol",
    }

    /// The error for the client when there is no further attempt.
    pub(super) fn to_client(&self) -> (ServeErrorKind, &'static str) {
        match self {
            Self::NodeLost | Self::Stalled | Self::StreamLost(_) => (
                ServeErrorKind::NodeLost,
                "the nodes that served the request were lost, one after the other",
            ),
            // A move of this kind is not counted, so it is never the last one.
            Self::Moved => (
                ServeErrorKind::Unavailable,
                "the node that served the request was emptied",
            ),
            Self::Deadline(_) => (
                ServeErrorKind::Timeout,
                "the nodes that served the request did not answer in time",
            ),
            Self::Nonsense(_) => (ServeErrorKind::Internal, "a node broke the protocol"),
            Self::Failed(error) => match error.kind {
                JobErrorKind::TransferFailed => (
                    ServeErrorKind::TransferFailed,
                    "the KV cache could not be handed over to a decode node",
                ),
                JobErrorKind::DeadlineExceeded => (
                    ServeErrorKind::Timeout,
                    "the nodes that served the request did not finish in time",
                ),
                JobErrorKind::Draining => (ServeErrorKind::NodeLost, "the nodes that served the request stopped"),
                JobErrorKind::Overloaded | JobErrorKind::Invalid | JobErrorKind::Internal => {
                    (ServeErrorKind::Internal, "a node failed to serve the request")
                }
            },
        }
    }

    /// True if the node of the leg is to blame, and that has not been said yet: what it reports itself is judged as it comes.
    pub(super) fn blames_the_node(&self) -> bool {
        match self {
            Self::StreamLost(_) | Self::Deadline(_) | Self::Nonsense(_) => true,
            Self::NodeLost | Self::Stalled | Self::Moved | Self::Failed(_) => false,
        }
    }
}
