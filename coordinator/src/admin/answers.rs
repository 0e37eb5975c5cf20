//! What the admin plane answers.

use std::fmt;

use actix_web::http::StatusCode;
use actix_web::{HttpResponse, ResponseError};
use serde::Serialize;
use serde_json::json;

use crate::core::block_audit::AuditError;
use crate::core::cluster::OrderError;
use crate::core::types::NodeStatus;

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
    max_seq_len: u32,
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
            max_seq_len: status.max_seq_len,
        }
    }
}
