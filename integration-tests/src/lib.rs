//! Real processes, real clients, and the rules of the repository. Nobody depends on this crate.
//!
//! * [`cluster`]: a coordinator and its nodes as processes on loopback, with certificates of their own.
//! * [`files`]: where binaries and models are.
//! * [`client`]: requests and server-sent events.

pub mod client;
pub mod cluster;
pub mod files;
