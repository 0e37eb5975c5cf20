//! The answer to an audit: whose the KV blocks of a node are.

use bincode::{Decode, Encode};

use crate::ids::{Epoch, NodeId, RequestId};

/// Most owners that a [`BlockAudit`] lists; what the others have is summed up.
pub const MAX_BLOCK_OWNERS: usize = 2_048;
/// Most problems that a [`BlockAudit`] tells.
pub const MAX_BLOCK_PROBLEMS: usize = 16;
/// Longest problem, in bytes.
pub const MAX_PROBLEM_BYTES: usize = 512;

/// What a node's jobs are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub enum JobKind {
    /// `control::Job::Prefill`.
    Prefill,
    /// `control::Job::Decode`.
    Decode,
}

impl JobKind {
    /// The kind's word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Which job of whose. No coordinator sends two jobs of one name to one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub struct JobKey {
    /// The request.
    pub request: RequestId,
    /// Attempt.
    pub epoch: Epoch,
    /// Its side.
    pub kind: JobKind,
}

/// What an owner is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
pub enum OwnerKind {
    /// Sequences that have not ended: they run, or wait for blocks.
    Sequence,
    /// A prompt that is computed and whose KV is being handed over.
    Held,
    /// Blocks that wait for KV from elsewhere.
    Reservation,
    /// A reservation that was neither committed nor released, and that nobody has any more: a defect.
    Dropped,
    /// Sequences that have ended; a step that is being computed still reads or writes their blocks.
    Step,
    /// A job of which the engine has nothing (yet, or any more); it owns no block.
    Job,
}

impl OwnerKind {
    /// The kind's word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sequence => "sequence",
            Self::Held => "held",
            Self::Reservation => "reservation",
            Self::Dropped => "dropped",
            Self::Step => "step",
            Self::Job => "job",
        }
    }
}

/// Somebody who has blocks, or waits for some.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct BlockOwner {
    /// The job; `None`: no job is known to which it belongs.
    pub job: Option<JobKey>,
    /// The coordinator whose job it is; `None`: the one that asks.
    pub elsewhere: Option<NodeId>,
    /// What it is.
    pub kind: OwnerKind,
    /// Sequences, or reservations, that are taken together here.
    pub parts: u32,
    /// Blocks that are named by one of them.
    pub blocks: u32,
    /// Of these: those that nobody who is listed before has. Their sum over all owners counts each block once.
    pub counted_blocks: u32,
    /// Milliseconds since it entered the engine, or since the job came; `None`: not known.
    pub age_ms: Option<u64>,
}

/// All blocks of a node by owner, between two steps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct BlockAudit {
    /// Number of the question.
    pub number: u64,
    /// Blocks of the pool.
    pub total_blocks: u32,
    /// Blocks nobody uses.
    pub free_blocks: u32,
    /// Blocks kept only as prefix cache.
    pub cached_blocks: u32,
    /// Blocks that are in use by the pool's books. `free + cached + owned = total`.
    pub owned_blocks: u32,
    /// Of these: those that no owner has. 0, or something leaks.
    pub unowned_blocks: u32,
    /// Blocks that owners have and that are not in use by the pool's books. 0, or something is given away twice.
    pub unbooked_blocks: u32,
    /// The owners, the oldest first; at most [`MAX_BLOCK_OWNERS`].
    pub owners: Vec<BlockOwner>,
    /// Owners that are not listed.
    pub further_owners: u32,
    /// What they would count, listed behind the others.
    pub further_blocks: u32,
    /// What else is wrong with the books, a line each; at most [`MAX_BLOCK_PROBLEMS`].
    pub problems: Vec<String>,
}

impl BlockAudit {
    /// What of it is larger than an answer may be.
    pub fn excess(&self) -> Option<&'static str> {
        if self.owners.len() > MAX_BLOCK_OWNERS {
            return Some("an audit of too many owners");
        }
        let long = |problem: &String| problem.len() > MAX_PROBLEM_BYTES;
        if self.problems.len() > MAX_BLOCK_PROBLEMS || self.problems.iter().any(long) {
            return Some("an audit of too many problems, or of too long ones");
        }
        None
    }
}
