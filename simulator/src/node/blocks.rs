//! Whose a node's blocks are, as `node_shell` tells it: the engine between two steps, and the jobs beside it.

use std::sync::Arc;
use std::time::Instant;

use coordinator::core::nodes::LegId;
use engine::owners::{JobName, Origin, Owner};
use protocol::blocks::{JobKey, JobKind};
use protocol::ids::NodeId;

use super::{Node, Out, Work};

/// The one coordinator.
const COORDINATOR: &str = "coordinator";

impl Work {
    fn key(&self) -> JobKey {
        let (request, epoch, kind) = match self {
            Self::Prefill(work) => (work.job.request, work.job.epoch, JobKind::Prefill),
            Self::Decode(work) => (work.job.request, work.job.epoch, JobKind::Decode),
        };
        JobKey { request, epoch, kind }
    }
}

impl Node {
    /// Where whatever a job has comes from.
    pub(super) fn origin(&self, now: Instant, leg: LegId) -> Origin {
        let name = self.jobs.get(&leg).map(|work| JobName {
            key: work.key(),
            coordinator: NodeId(COORDINATOR.to_owned()),
        });
        Origin {
            since: name.as_ref().map(|_| now),
            job: name.map(Arc::new),
        }
    }

    /// The engine answers a question of the coordinator.
    pub(super) fn tell_owners(&mut self, now: Instant, number: u64) {
        let ownership = self.engine.ownership(|owner| match owner {
            Owner::Sequence(id) | Owner::Held(id) => {
                let leg = self.owners.get(&id).map(|(leg, _)| *leg);
                leg.map(|leg| self.origin(now, leg)).unwrap_or_default()
            }
            Owner::Reservation(id) | Owner::Dropped(id) => self.reserved.get(&id).cloned().unwrap_or_default(),
            Owner::Step => Origin::default(),
        });
        let jobs: Vec<Origin> = self.jobs.keys().map(|leg| self.origin(now, *leg)).collect();
        let answer = ownership.answer(number, now, &NodeId(COORDINATOR.to_owned()), jobs);
        self.out.push(Out::Blocks(Box::new(answer)));
    }
}
