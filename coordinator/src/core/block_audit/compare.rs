//! What a node says it has, held against what is booked there.

use std::collections::{BTreeMap, BTreeSet};

use protocol::blocks::{BlockAudit, BlockOwner, JobKey};

/// The coordinator's jobs on a node that have been sent, and the blocks booked for each.
pub type Booked = BTreeMap<JobKey, u32>;

/// Where the two do not agree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Jobs of this coordinator that the node has and that nobody here knows.
    pub orphans: BTreeSet<JobKey>,
    /// Jobs that are booked here and that the node does not know.
    pub missing: BTreeSet<JobKey>,
}

impl Findings {
    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.orphans.is_empty() && self.missing.is_empty()
    }

    /// Those that `other` has too, and those that it has not.
    pub fn split(&self, other: &Self) -> (Self, Self) {
        let split = |of: &BTreeSet<JobKey>, other: &BTreeSet<JobKey>| of.iter().partition(|key| other.contains(key));
        let (orphans, no_orphans) = split(&self.orphans, &other.orphans);
        let (missing, not_missing) = split(&self.missing, &other.missing);
        (
            Self { orphans, missing },
            Self {
                orphans: no_orphans,
                missing: not_missing,
            },
        )
    }
}

/// The job of an owner, if it is one of the coordinator that asked.
pub(super) fn own_job(owner: &BlockOwner) -> Option<JobKey> {
    owner.job.filter(|_| owner.elsewhere.is_none())
}

/// Compares an answer with what was booked when the question left, and when the answer came. Jobs may begin and end in
/// between: only what contradicts both is found. What an answer does not list is not missed.
pub fn compare(answer: &BlockAudit, then: &Booked, now: &Booked) -> Findings {
    let there: BTreeSet<JobKey> = answer.owners.iter().filter_map(own_job).collect();
    let known = |key: &JobKey| then.contains_key(key) || now.contains_key(key);
    let stayed = |key: &&JobKey| now.contains_key(*key);
    let absent = |key: &&JobKey| answer.further_owners == 0 && !there.contains(*key);
    Findings {
        missing: then.keys().filter(stayed).filter(absent).copied().collect(),
        orphans: there.into_iter().filter(|key| !known(key)).collect(),
    }
}
