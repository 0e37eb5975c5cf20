//! Looking after nodes: who gets on, and whose jobs fail.

use std::time::{Duration, Instant};

use protocol::ids::Role;

use super::breaker::BreakerLimits;
use super::{LegId, LinkId, Node, Nodes};

/// When nodes get no work.
#[derive(Clone, Copy, Debug)]
pub struct HealthLimits {
    /// With work and without a step, or silent, for so long: stalled.
    pub stall: Duration,
    /// Failed jobs.
    pub breaker: BreakerLimits,
}

impl Nodes {
    /// Looks at the clock: nodes that are found to be stalled now, and were not before.
    pub fn look(&mut self, now: Instant) -> Vec<LinkId> {
        let time = self.time.look(now);
        let stall = self.health.stall;
        let nodes = self.nodes.iter_mut();
        nodes
            .filter_map(|(link, node)| node.health.check(time, stall).then_some(*link))
            .collect()
    }

    /// When [`Nodes::look`] is due. Only nodes with jobs are watched by the clock.
    pub fn next_look(&self) -> Option<Instant> {
        let watched = |node: &Node| !node.legs.is_empty() && !node.health.is_stalled();
        self.nodes
            .values()
            .any(watched)
            .then(|| self.time.next_look())
            .flatten()
    }

    /// The job of a leg has failed, and its node is to blame.
    pub fn failed(&mut self, leg: LegId) {
        let (Some(now), Some(of)) = (self.time.looked(), self.legs.get(&leg)) else {
            return;
        };
        if let Some(node) = self.nodes.get_mut(&of.link) {
            node.breaker.failed(now, leg, &self.health.breaker);
        }
    }

    /// The job of a leg does what it should.
    pub fn succeeded(&mut self, leg: LegId) {
        let Some(of) = self.legs.get(&leg) else { return };
        if let Some(node) = self.nodes.get_mut(&of.link) {
            node.breaker.succeeded(leg);
        }
    }
}

impl Nodes {
    /// Which nodes of `role` may get a job, as far as their own state goes. Where no node may, those are tried that have
    /// failed often.
    pub(super) fn fit(&self, now: Instant, role: Role) -> impl Fn(&Node) -> bool {
        let limits = self.health.breaker;
        let of_role = |node: &&Node| node.serves(role);
        let some = self.nodes.values().filter(of_role).any(|node| node.is_fit(now));
        move |node| {
            node.serves(role)
                && if some {
                    node.is_fit(now)
                } else {
                    node.is_fit_alone(now, &limits)
                }
        }
    }
}

impl Node {
    /// True if it may get a job, as far as its own state goes.
    fn is_fit(&self, now: Instant) -> bool {
        !self.draining && !self.health.is_stalled() && self.breaker.admits(now)
    }

    /// The same where no other node of its role may get one.
    fn is_fit_alone(&self, now: Instant, limits: &BreakerLimits) -> bool {
        !self.draining && !self.health.is_stalled() && self.breaker.admits_alone(now, limits)
    }
}
