//! Which node gets a job. One file per policy; a policy looks and never books: that is its caller's business.

pub mod least_loaded;

use super::nodes::LinkId;

/// A node that has room for the job at hand, as a policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The node's link.
    pub link: LinkId,
    /// An earlier attempt of the same request failed there.
    pub avoided: bool,
    /// Work ahead of the job, in thousandths of what the node takes at once.
    pub load: u64,
    /// Blocks that would be left.
    pub blocks_left: u64,
}
