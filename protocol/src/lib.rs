//! Words on the wire: ids, sampling parameters, control messages, KV layout and frames, and the one codec. Pure.
//!
//! Only what crosses a process boundary lives here. Nothing in this crate reads a clock, a file or a socket.
//!
//! * [`ids`]: names of requests, nodes, reservations and their generations.
//! * [`sampling`]: how tokens are drawn and when a sequence ends; what a sampled token looks like.
//! * [`context`]: by which names a job goes in logs and traces.
//! * [`control`]: the control plane (`baton-ctl/1`): membership, load reports, jobs and their events.
//! * [`blocks`]: whose the KV blocks of a node are: the answer to an audit.
//! * [`kv`]: the KV layout both ends of a handoff agree on, and the model identity.
//! * [`prefix`]: the names of a prompt's blocks, by which nodes and coordinators know cached prefixes.
//! * [`transfer`]: the KV plane (`baton-kv/1`): open, frame, commit and their answers.
//! * [`moved`]: which blocks of a prompt a handoff moves, and their numbers.
//! * [`window`]: which blocks of a sequence are kept where layers see a limited number of positions.
//! * [`codec`]: length-prefixed, versioned, bounded encoding of every message above.

pub mod blocks;
pub mod codec;
pub mod context;
pub mod control;
pub mod ids;
pub mod kv;
pub mod moved;
pub mod prefix;
pub mod sampling;
pub mod transfer;
pub mod window;

/// Version of every message in this crate. Peers with another version are refused at `Hello`.
pub const PROTOCOL_VERSION: u16 = 8;
/// ALPN of the control plane.
pub const ALPN_CONTROL: &[u8] = b"baton-ctl/1";
/// ALPN of the KV plane.
pub const ALPN_KV: &[u8] = b"baton-kv/1";
