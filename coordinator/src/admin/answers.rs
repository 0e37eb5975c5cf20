//! What the admin plane answers.

use std::fmt;
use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::{HttpResponse, ResponseError};
use serde::Serialize;
use serde_json::json;

use crate::core::block_audit::AuditError;
use crate::core::cluster::OrderError;
use crate::core::types::{NodeStatus, PoolStatus, Rates};

/// Why a request was not carried out.
#[derive(Debug, PartialEq, Eq)]
pub enum Problem {
    /// The token is missing or wrong.
    Unauthorised,
    /// Nothing of this name is there.
    NotFound(String),
    /// The request is wrong.
    Invalid(String),
    /// It cannot be done as things are.
    Conflict(String),
    /// The coordinator or the node does not answer.
    Unavailable(String),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unauthorised => f.write_str("the admin token is needed: Authorization: Bearer TOKEN"),
            Self::NotFound(what) | Self::Invalid(what) | Self::Conflict(what) | Self::Unavailable(what) => {
                f.write_str(what)
            }
        }
    }
}

impl ResponseError for Problem {
    fn status_code(&self) -> StatusCode {
        match self {
            Self::Unauthorised => StatusCode::UNAUTHORIZED,
            Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::Conflict(_) => StatusCode::CONFLICT,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn error_response(&self) -> HttpResponse {
        HttpResponse::build(self.status_code()).json(json!({ "error": self.to_string() }))
    }
}

impl From<OrderError> for Problem {
    fn from(error: OrderError) -> Self {
        let message = error.to_string();
        match error {
            OrderError::UnknownNode { .. } => Self::NotFound(message),
            OrderError::RoleNotAllowed { .. } | OrderError::NotARole { .. } => Self::Conflict(message),
            OrderError::Deaf { .. } => Self::Unavailable(message),
        }
    }
}

impl From<AuditError> for Problem {
    fn from(error: AuditError) -> Self {
        match error {
            AuditError::TooMany => Self::Unavailable(error.to_string()),
        }
    }
}

/// A node as the admin plane shows it.
#[derive(Debug, Serialize)]
pub struct NodeAnswer<'a> {
    node: &'a str,
    role: &'static str,
    draining: bool,
    stalled: bool,
    breaker: &'static str,
    total_blocks: u32,
    free_blocks: u32,
    cached_blocks: u32,
    booked_blocks: u32,
    jobs: u32,
    running: u32,
    waiting: u32,
    preempted: u32,
    oldest_wait_ms: u64,
    queued_tokens: u64,
    owned_blocks: u32,
    reservations: u32,
    max_seq_len: u32,
    steps: u64,
    preemptions: u64,
    preempted_rows: u64,
    sent_bytes: u64,
    received_bytes: u64,
    #[serde(flatten)]
    rates: Rates,
}

impl<'a> From<&'a NodeStatus> for NodeAnswer<'a> {
    fn from(status: &'a NodeStatus) -> Self {
        Self {
            node: &status.node,
            role: status.role.as_str(),
            draining: status.draining,
            stalled: status.stalled,
            breaker: status.breaker,
            total_blocks: status.total_blocks,
            free_blocks: status.free_blocks,
            cached_blocks: status.cached_blocks,
            booked_blocks: status.booked_blocks,
            jobs: status.jobs,
            running: status.running,
            waiting: status.waiting,
            preempted: status.preempted,
            oldest_wait_ms: millis(status.oldest_wait),
            queued_tokens: status.queued_tokens,
            owned_blocks: status.owned_blocks,
            reservations: status.reservations,
            max_seq_len: status.max_seq_len,
            steps: status.steps,
            preemptions: status.done.preemptions,
            preempted_rows: status.done.preempted_rows,
            sent_bytes: status.done.sent_bytes,
            received_bytes: status.done.received_bytes,
            rates: status.rates,
        }
    }
}

/// The nodes of one role, as the admin plane shows them.
#[derive(Debug, Serialize)]
pub struct PoolAnswer {
    role: &'static str,
    nodes: u32,
    total_blocks: u64,
    free_blocks: u64,
    cached_blocks: u64,
    owned_blocks: u64,
    booked_blocks: u64,
    jobs: u64,
    running: u64,
    waiting: u64,
    preempted: u64,
    queued_tokens: u64,
    oldest_wait_ms: u64,
    #[serde(flatten)]
    rates: Rates,
}

impl From<&PoolStatus> for PoolAnswer {
    fn from(status: &PoolStatus) -> Self {
        Self {
            role: status.role.as_str(),
            nodes: status.nodes,
            total_blocks: status.total_blocks,
            free_blocks: status.free_blocks,
            cached_blocks: status.cached_blocks,
            owned_blocks: status.owned_blocks,
            booked_blocks: status.booked_blocks,
            jobs: status.jobs,
            running: status.running,
            waiting: status.waiting,
            preempted: status.preempted,
            queued_tokens: status.queued_tokens,
            oldest_wait_ms: millis(status.oldest_wait),
            rates: status.rates,
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
