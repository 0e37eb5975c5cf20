//! The front door's HTTP side: parse once, subscribe, answer.
//!
//! Life of a request:
//! 1. [`envelope`]: request id, CORS, API key; the connection's watch is told that a request is here.
//! 2. [`body`]: media type, size, speed, memory of all bodies together.
//! 3. [`tgi::request`], [`openai::request`]: the body's syntax and every field, once, into a typed request.
//! 4. `text`: tokenised once; `truncate`.
//! 5. [`serve`]: token limits ([`lengths`]), submission through [`backend`], the wait for the first token. Every error up
//!    to here has a status of its own.
//! 6. [`answer`], [`shown`]: the choices of all prompts, merged; which text belongs to which token.
//! 7. [`tgi::answer`], [`openai::answer`]: one JSON answer; or [`sse`]: an event for every token.
//! 8. The client leaves: actix drops the handler or the body ([`connection`] where it would not notice), that drops the
//!    events, and that cancels the request on every node.

pub mod answer;
pub mod backend;
pub mod body;
pub mod caller;
pub mod connection;
mod constraints;
pub mod dashboard;
pub mod docs;
pub mod envelope;
pub mod error;
pub mod idempotency;
pub mod json;
pub mod keys;
pub mod lengths;
pub mod media;
pub mod mindie;
pub mod openai;
pub mod routes;
pub mod sampling;
pub mod serve;
pub mod server;
pub mod shown;
pub mod sse;
pub mod state;
pub mod tgi;
pub mod tls;
pub mod tokens;
pub mod trace;
pub mod written;
