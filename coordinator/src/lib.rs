//! The front door of a Baton cluster: HTTP, text, admission, routing, the life of every request, the ledger.

pub mod core;
pub mod handle;
pub mod http;
pub mod metrics;
pub mod text;
