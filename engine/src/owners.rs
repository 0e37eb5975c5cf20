//! Whose the blocks are, for an audit from outside: what the engine knows, with the names that its shell gives to owners,
//! becomes the answer to a coordinator.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use protocol::blocks::{
    BlockAudit, BlockOwner, JobKey, MAX_BLOCK_OWNERS, MAX_BLOCK_PROBLEMS, MAX_PROBLEM_BYTES, OwnerKind,
};
use protocol::ids::NodeId;

use crate::plan::SequenceId;
use crate::reservation::ReservationId;
use crate::stats::EngineStats;

/// Somebody of an engine who has blocks, or waits for some.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Owner {
    /// A sequence that has not ended, or the beam search of that id, whose members are told one by one.
    Sequence(SequenceId),
    /// A sequence that has ended, whose blocks are held.
    Held(SequenceId),
    /// A reservation that somebody has.
    Reservation(ReservationId),
    /// A reservation that nobody has any more, and that was not given back.
    Dropped(ReservationId),
    /// Sequences that ended while the step in flight was computed.
    Step,
}

impl Owner {
    /// What it is to others.
    pub fn kind(self) -> OwnerKind {
        match self {
            Self::Sequence(_) => OwnerKind::Sequence,
            Self::Held(_) => OwnerKind::Held,
            Self::Reservation(_) => OwnerKind::Reservation,
            Self::Dropped(_) => OwnerKind::Dropped,
            Self::Step => OwnerKind::Step,
        }
    }
}

/// A job of a node, and the coordinator that sent it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct JobName {
    /// The job.
    pub key: JobKey,
    /// Whose it is.
    pub coordinator: NodeId,
}

/// What the shell knows of an owner.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Origin {
    /// Since when the owner is there.
    pub since: Option<Instant>,
    /// The job it belongs to.
    pub job: Option<Arc<JobName>>,
}

/// Owners of one origin and kind, taken together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Holding {
    /// Where they come from.
    pub origin: Origin,
    /// What they are.
    pub kind: OwnerKind,
    /// How many there are.
    pub parts: u32,
    /// Blocks that are named by one of them.
    pub blocks: u32,
    /// Of these: those that nobody before them in [`Ownership::holdings`] names.
    pub counted: u32,
}

/// All blocks of an engine by owner.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ownership {
    /// The pool's own books.
    pub stats: EngineStats,
    /// The owners: the oldest first, before them those of which that is not known.
    pub holdings: Vec<Holding>,
    /// Blocks that are in use by the books, and that nobody names.
    pub unowned: u32,
    /// Blocks that somebody names, and that are not in use by the books.
    pub unbooked: u32,
    /// What [`crate::engine::Engine::check_invariants`] finds.
    pub problems: Vec<String>,
}

impl Ownership {
    /// The answer to question `number` of the coordinator `asker`. `jobs` are all jobs of the node: those of which the engine
    /// has nothing are told too.
    pub fn answer(
        self,
        number: u64,
        now: Instant,
        asker: &NodeId,
        jobs: impl IntoIterator<Item = Origin>,
    ) -> BlockAudit {
        let known: BTreeSet<Arc<JobName>> = self
            .holdings
            .iter()
            .filter_map(|holding| holding.origin.job.clone())
            .collect();
        let mut jobs: Vec<Origin> = jobs.into_iter().collect();
        jobs.retain(|job| job.job.as_ref().is_none_or(|name| !known.contains(name)));
        jobs.sort();
        let without_blocks = jobs.into_iter().map(|origin| Holding {
            origin,
            kind: OwnerKind::Job,
            parts: 1,
            blocks: 0,
            counted: 0,
        });
        let all: Vec<Holding> = self.holdings.into_iter().chain(without_blocks).collect();
        let (listed, further) = all.split_at(all.len().min(MAX_BLOCK_OWNERS));
        let problems = self.problems.into_iter().take(MAX_BLOCK_PROBLEMS).map(shortened);
        BlockAudit {
            number,
            total_blocks: narrow(self.stats.total_blocks),
            free_blocks: narrow(self.stats.free_blocks),
            cached_blocks: narrow(self.stats.cached_blocks),
            owned_blocks: narrow(self.stats.owned_blocks),
            unowned_blocks: self.unowned,
            unbooked_blocks: self.unbooked,
            owners: listed.iter().map(|holding| told(holding, now, asker)).collect(),
            further_owners: narrow(further.len()),
            further_blocks: further.iter().map(|holding| holding.counted).sum(),
            problems: problems.collect(),
        }
    }
}

fn told(holding: &Holding, now: Instant, asker: &NodeId) -> BlockOwner {
    let job = holding.origin.job.as_deref();
    let age = holding.origin.since.map(|since| now.saturating_duration_since(since));
    BlockOwner {
        job: job.map(|job| job.key),
        elsewhere: job.map(|job| &job.coordinator).filter(|of| *of != asker).cloned(),
        kind: holding.kind,
        parts: holding.parts,
        blocks: holding.blocks,
        counted_blocks: holding.counted,
        age_ms: age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
    }
}

fn shortened(mut problem: String) -> String {
    let mut end = problem.len().min(MAX_PROBLEM_BYTES);
    while !problem.is_char_boundary(end) {
        end -= 1;
    }
    problem.truncate(end);
    problem
}

/// Counts of an engine are bounded by those of its blocks and sequences, which have 32 bits.
pub(crate) fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
