//! What operators' orders and questions need to know about nodes.

use std::time::Instant;

use protocol::control::Hello;
use protocol::ids::{RequestId, Role};

use super::{Leg, LegId, LinkId, Nodes};

impl Nodes {
    /// The role in the certificate of the node at the other end of a link.
    pub fn certified(&self, link: LinkId) -> Option<Role> {
        self.nodes.get(&link).map(|node| node.certified)
    }

    /// All connected nodes: their links, how they introduced themselves, and what they do now.
    pub fn members(&self) -> impl Iterator<Item = (LinkId, &Hello, Role)> {
        self.nodes.iter().map(|(link, node)| (*link, &node.hello, node.role))
    }

    /// The legs on a node, and whose they are.
    pub fn legs_on(&self, link: LinkId) -> Vec<(LegId, RequestId)> {
        let legs = self.nodes.get(&link).into_iter().flat_map(|node| &node.legs);
        legs.filter_map(|leg| Some((*leg, self.legs.get(leg)?.request)))
            .collect()
    }

    /// True if a node of `role` takes jobs, though perhaps not now.
    pub fn is_serving(&self, now: Instant, role: Role) -> bool {
        self.nodes.values().any(self.fit(now, role))
    }

    /// True if another decode node than that of `link` takes jobs.
    pub fn has_another_decode(&self, link: LinkId) -> bool {
        let others = self.nodes.iter().filter(|(of, _)| **of != link);
        others
            .into_iter()
            .any(|(_, node)| node.serves(Role::Decode) && !node.draining && !node.health.is_stalled())
    }
}

impl Leg {
    /// Blocks that are booked for it.
    pub fn booked_blocks(&self) -> u32 {
        self.blocks
    }
}
