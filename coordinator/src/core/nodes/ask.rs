//! What operators' orders need to know about nodes.

use std::time::Instant;

use protocol::ids::{RequestId, Role};

use super::{LegId, LinkId, Nodes};

impl Nodes {
    /// The role in the certificate of the node at the other end of a link.
    pub fn certified(&self, link: LinkId) -> Option<Role> {
        self.nodes.get(&link).map(|node| node.certified)
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
