//! What an audit tells operators.

use std::collections::{BTreeMap, BTreeSet};

use protocol::blocks::{BlockAudit, BlockOwner, JobKey, OwnerKind};
use serde::Serialize;

use super::compare::own_job;
use super::{Answered, Booked, Findings, Member, Outcome};

/// Ages at which owners are told apart, in milliseconds.
const AGES_MS: [u64; 5] = [0, 1_000, 10_000, 60_000, 600_000];

/// All blocks of all connected nodes, by owner and age.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AuditReport {
    /// Every connected node has answered.
    pub complete: bool,
    /// Nothing is wrong with any node that has.
    pub agrees: bool,
    /// Sums over the nodes that have answered.
    pub blocks: Sums,
    /// The owned blocks by the age of their owners.
    pub by_age: Vec<AgeSum>,
    /// The owned blocks by request, the oldest first.
    pub by_request: Vec<RequestSum>,
    /// Node by node.
    pub nodes: Vec<NodeReport>,
}

/// Numbers of blocks. `free + cached + owned = total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sums {
    /// Of the pool.
    pub total: u64,
    /// Nobody uses them.
    pub free: u64,
    /// Kept only as prefix cache.
    pub cached: u64,
    /// In use.
    pub owned: u64,
    /// In use, and nobody's: should be 0.
    pub unowned: u64,
    /// Somebody's, and not in use: should be 0.
    pub unbooked: u64,
    /// Of owners that are not listed.
    pub further: u64,
    /// What the coordinator has booked for its jobs: an estimate that counts shared blocks several times.
    pub booked: u64,
}

/// Blocks whose owners are of some age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AgeSum {
    /// At least so old, in milliseconds; null: the age is not known.
    pub from_ms: Option<u64>,
    /// Younger than this; null: there is no bound.
    pub below_ms: Option<u64>,
    /// How many owners there are.
    pub owners: u64,
    /// Their blocks, each counted once.
    pub blocks: u64,
}

/// The blocks of a request on all nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RequestSum {
    /// Its id.
    pub request: String,
    /// The coordinator whose it is; null: this one.
    pub coordinator: Option<String>,
    /// Its blocks, each counted once.
    pub blocks: u64,
    /// Age of its oldest owner, in milliseconds.
    pub age_ms: Option<u64>,
    /// Where.
    pub nodes: Vec<String>,
}

/// A node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NodeReport {
    /// Its name.
    pub node: String,
    /// What it does.
    pub role: &'static str,
    /// It has answered.
    pub answered: bool,
    /// Why it has not.
    pub silent: Option<&'static str>,
    /// How long after the beginning of the audit its answer came, in milliseconds.
    pub after_ms: Option<u64>,
    /// Nothing is wrong. A node that has not answered does not agree.
    pub agrees: bool,
    /// Its blocks; all 0 but `booked` if it has not answered.
    pub blocks: Sums,
    /// Its owners, the oldest first.
    pub owners: Vec<OwnerReport>,
    /// How many more there are.
    pub further_owners: u32,
    /// Jobs of this coordinator that the node has and that the coordinator does not know.
    pub orphans: Vec<JobReport>,
    /// Jobs that are booked here and that the node does not know.
    pub missing: Vec<JobReport>,
    /// Orphans and missing ones that were seen once, and that there was no time to ask for again.
    pub unconfirmed: Vec<JobReport>,
    /// What is wrong with the node's own books.
    pub problems: Vec<String>,
}

/// An owner of blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OwnerReport {
    /// The job; null: none is known.
    #[serde(flatten)]
    pub job: JobReport,
    /// The coordinator whose job it is; null: this one.
    pub coordinator: Option<String>,
    /// `sequence`, `held`, `reservation`, `dropped`, `step` or `job`.
    pub kind: &'static str,
    /// Sequences, or reservations, that are taken together here.
    pub parts: u32,
    /// Blocks that they name.
    pub blocks: u32,
    /// Of these: those that nobody who is listed before has.
    pub counted_blocks: u32,
    /// Its age in milliseconds.
    pub age_ms: Option<u64>,
}

/// A job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct JobReport {
    /// The request's id.
    pub request: Option<String>,
    /// Attempt.
    pub attempt: Option<u32>,
    /// `prefill` or `decode`.
    pub job: Option<&'static str>,
    /// Blocks that are booked for it; null: none are.
    pub booked_blocks: Option<u32>,
}

impl JobReport {
    fn new(key: &JobKey, booked: &Booked) -> Self {
        Self {
            request: Some(key.request.to_string()),
            attempt: Some(key.epoch.0),
            job: Some(key.kind.as_str()),
            booked_blocks: booked.get(key).copied(),
        }
    }

    fn all(keys: &BTreeSet<JobKey>, booked: &Booked) -> Vec<Self> {
        keys.iter().map(|key| Self::new(key, booked)).collect()
    }
}

impl OwnerReport {
    fn new(owner: &BlockOwner, booked: &Booked) -> Self {
        let job = match (owner.job, own_job(owner)) {
            (_, Some(own)) => JobReport::new(&own, booked),
            (Some(others), None) => JobReport::new(&others, &Booked::new()),
            (None, None) => JobReport::default(),
        };
        Self {
            job,
            coordinator: owner.elsewhere.as_ref().map(|name| name.0.clone()),
            kind: owner.kind.as_str(),
            parts: owner.parts,
            blocks: owner.blocks,
            counted_blocks: owner.counted_blocks,
            age_ms: owner.age_ms,
        }
    }
}

impl NodeReport {
    pub(super) fn new(member: Member, outcome: Outcome) -> Self {
        match outcome {
            Outcome::Silent(why) => Self::of_silent(member, why),
            Outcome::Answered {
                last,
                confirmed,
                unconfirmed,
            } => Self::of_answer(member, *last, &confirmed, &unconfirmed),
        }
    }

    fn of_silent(member: Member, why: &'static str) -> Self {
        Self {
            node: member.node,
            role: member.role.as_str(),
            answered: false,
            silent: Some(why),
            after_ms: None,
            agrees: false,
            blocks: Sums {
                booked: sum(&member.booked),
                ..Sums::default()
            },
            owners: Vec::new(),
            further_owners: 0,
            orphans: Vec::new(),
            missing: Vec::new(),
            unconfirmed: Vec::new(),
            problems: Vec::new(),
        }
    }

    fn of_answer(member: Member, last: Answered, confirmed: &Findings, unconfirmed: &Findings) -> Self {
        let Answered {
            answer, booked, after, ..
        } = last;
        let doubts = unconfirmed.orphans.union(&unconfirmed.missing).copied().collect();
        let problems = problems(&answer);
        Self {
            node: member.node,
            role: member.role.as_str(),
            answered: true,
            silent: None,
            after_ms: Some(u64::try_from(after.as_millis()).unwrap_or(u64::MAX)),
            agrees: confirmed.is_empty() && problems.is_empty(),
            blocks: Sums::new(&answer, &booked),
            owners: answer
                .owners
                .iter()
                .map(|owner| OwnerReport::new(owner, &booked))
                .collect(),
            further_owners: answer.further_owners,
            orphans: JobReport::all(&confirmed.orphans, &booked),
            missing: JobReport::all(&confirmed.missing, &booked),
            unconfirmed: JobReport::all(&doubts, &booked),
            problems,
        }
    }
}

/// What is wrong with a node's books, whatever is booked here.
fn problems(answer: &BlockAudit) -> Vec<String> {
    let mut found = answer.problems.clone();
    let (total, owned) = (u64::from(answer.total_blocks), u64::from(answer.owned_blocks));
    let sum = u64::from(answer.free_blocks) + u64::from(answer.cached_blocks) + owned;
    if sum != total {
        found.push(format!("free + cached + owned is {sum}, the pool has {total} blocks"));
    }
    let (unowned, unbooked) = (u64::from(answer.unowned_blocks), u64::from(answer.unbooked_blocks));
    if unowned > 0 {
        found.push(format!("{unowned} blocks are in use and nobody's"));
    }
    if unbooked > 0 {
        found.push(format!(
            "{unbooked} blocks have an owner and are not in use by the pool's books"
        ));
    }
    let counted: u64 = answer.owners.iter().map(|owner| u64::from(owner.counted_blocks)).sum();
    let counted = counted + u64::from(answer.further_blocks);
    if counted + unowned != owned + unbooked {
        found.push(format!(
            "the owners have {counted} blocks, {owned} are in use, of which {unowned} are nobody's"
        ));
    }
    let nobodys = |owner: &&BlockOwner| owner.job.is_none() && owner.kind != OwnerKind::Step;
    let nameless: Vec<&BlockOwner> = answer.owners.iter().filter(nobodys).collect();
    if !nameless.is_empty() {
        let blocks: u64 = nameless.iter().map(|owner| u64::from(owner.blocks)).sum();
        found.push(format!("{} owners of {blocks} blocks belong to no job", nameless.len()));
    }
    found
}

fn sum(booked: &Booked) -> u64 {
    booked.values().map(|blocks| u64::from(*blocks)).sum()
}

impl Sums {
    fn new(answer: &BlockAudit, booked: &Booked) -> Self {
        Self {
            total: answer.total_blocks.into(),
            free: answer.free_blocks.into(),
            cached: answer.cached_blocks.into(),
            owned: answer.owned_blocks.into(),
            unowned: answer.unowned_blocks.into(),
            unbooked: answer.unbooked_blocks.into(),
            further: answer.further_blocks.into(),
            booked: sum(booked),
        }
    }

    fn add(&mut self, more: &Self) {
        self.total += more.total;
        self.free += more.free;
        self.cached += more.cached;
        self.owned += more.owned;
        self.unowned += more.unowned;
        self.unbooked += more.unbooked;
        self.further += more.further;
        self.booked += more.booked;
    }
}

impl AuditReport {
    /// What the nodes' parts come to, in the order of their roles and names.
    pub(super) fn new(mut nodes: Vec<NodeReport>) -> Self {
        nodes.sort_by(|a, b| (a.role, &a.node).cmp(&(b.role, &b.node)));
        let mut blocks = Sums::default();
        nodes.iter().for_each(|node| blocks.add(&node.blocks));
        Self {
            complete: nodes.iter().all(|node| node.answered),
            agrees: nodes.iter().all(|node| node.agrees || !node.answered),
            blocks,
            by_age: by_age(&nodes),
            by_request: by_request(&nodes),
            nodes,
        }
    }
}

fn by_age(nodes: &[NodeReport]) -> Vec<AgeSum> {
    let below = AGES_MS.iter().skip(1).map(|age| Some(*age)).chain([None]);
    let mut sums: Vec<AgeSum> = AGES_MS
        .iter()
        .zip(below)
        .map(|(from, below_ms)| AgeSum {
            from_ms: Some(*from),
            below_ms,
            owners: 0,
            blocks: 0,
        })
        .collect();
    sums.push(AgeSum {
        from_ms: None,
        below_ms: None,
        owners: 0,
        blocks: 0,
    });
    for owner in nodes.iter().flat_map(|node| &node.owners) {
        let at = match owner.age_ms {
            // The first bound is 0.
            Some(age) => AGES_MS.partition_point(|from| *from <= age) - 1,
            None => AGES_MS.len(),
        };
        sums[at].owners += 1;
        sums[at].blocks += u64::from(owner.counted_blocks);
    }
    sums
}

fn by_request(nodes: &[NodeReport]) -> Vec<RequestSum> {
    let mut sums: BTreeMap<(&str, Option<&str>), RequestSum> = BTreeMap::new();
    for node in nodes {
        for owner in &node.owners {
            let Some(request) = &owner.job.request else { continue };
            let entry = sums
                .entry((request, owner.coordinator.as_deref()))
                .or_insert_with(|| RequestSum {
                    request: request.clone(),
                    coordinator: owner.coordinator.clone(),
                    blocks: 0,
                    age_ms: None,
                    nodes: Vec::new(),
                });
            entry.blocks += u64::from(owner.counted_blocks);
            entry.age_ms = entry.age_ms.max(owner.age_ms);
            if entry.nodes.last() != Some(&node.node) {
                entry.nodes.push(node.node.clone());
            }
        }
    }
    let mut all: Vec<RequestSum> = sums.into_values().collect();
    all.sort_by(|a, b| (b.age_ms, &a.request).cmp(&(a.age_ms, &b.request)));
    all
}
