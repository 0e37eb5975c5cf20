//! Images, videos and audio that a prompt names: what may be fetched or opened, and how it is done without being led to
//! places that are nobody's business.
//!
//! * [`policy`]: judges a reference by its text alone: scheme, host, path, size. Nothing is opened or resolved.
//! * [`address`]: which addresses belong to the public internet, however they are written.
//! * [`fetch`]: gets what the policy lets through: resolved once, connected to the address that was judged, redirects
//!   judged again, bounded in bytes and time.
//! * [`spool`]: where it is downloaded to, and the room that must be left there.
//! * [`local`]: opens files below one folder, links resolved.
//! * [`allowance`]: how many and how large the media of one request may be together.
//!
//! Models that read text only refuse media; they use [`policy`] to say what else is wrong with a reference.

pub mod address;
pub mod allowance;
pub mod fetch;
pub mod local;
pub mod policy;
pub mod spool;
mod url;

/// A medium that is at hand: a plain file, to be read from its start.
#[derive(Debug)]
pub struct Medium {
    /// The file.
    pub file: std::fs::File,
    /// Its length.
    pub bytes: u64,
}
