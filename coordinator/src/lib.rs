//! The front door of a Baton cluster: HTTP, text, admission, routing, the life of every request, the ledger.

pub mod admin;
pub mod certs;
pub mod console;
pub mod control;
pub mod core;
pub mod driver;
pub mod handle;
pub mod http;
pub mod live;
pub mod media;
pub mod metrics;
pub mod text;

#[cfg(test)]
mod origin;
