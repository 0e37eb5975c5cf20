//! What operators tell nodes through the coordinator.

use std::time::Instant;

use protocol::control::CoordinatorMessage;
use protocol::ids::{NodeId, Role};
use thiserror::Error;

use super::{Action, Cluster};
use crate::core::nodes::LinkId;

/// What a node is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Take nothing new.
    Drain {
        /// Its generating requests go on elsewhere at once, if there is another decode node; otherwise they end here.
        move_running: bool,
    },
    /// Take jobs again.
    Undrain,
    /// Serve this from now on.
    SetRole(Role),
}

/// Why a node was not told.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum OrderError {
    /// No such node is connected.
    #[error("no node named {node:?} is connected")]
    UnknownNode {
        /// The name.
        node: String,
    },
    /// The node's certificate does not allow it.
    #[error("the certificate of {node} is for the role {allowed}; it may not serve as {wanted}")]
    RoleNotAllowed {
        /// The node.
        node: String,
        /// The role in its certificate.
        allowed: Role,
        /// The role it was to have.
        wanted: Role,
    },
    /// That is not a role of a node.
    #[error("{wanted} is not a role of a node")]
    NotARole {
        /// The role.
        wanted: Role,
    },
    /// The node does not take messages.
    #[error("{node} does not take orders now; try again")]
    Deaf {
        /// The node.
        node: String,
    },
}

impl Cluster {
    /// Carries an order out, as far as that is the coordinator's part; the message is for the node.
    ///
    /// # Errors
    /// No such node, or a role that its certificate does not allow.
    pub fn order(
        &mut self,
        now: Instant,
        node: &str,
        order: Order,
        actions: &mut Vec<Action>,
    ) -> Result<(), OrderError> {
        let link = self.nodes.link_of(&NodeId(node.to_owned()));
        let link = link.ok_or_else(|| OrderError::UnknownNode { node: node.to_owned() })?;
        let message = match order {
            Order::Drain { .. } => CoordinatorMessage::Drain { on: true },
            Order::Undrain => CoordinatorMessage::Drain { on: false },
            Order::SetRole(role) => {
                self.check_role(node, link, role)?;
                CoordinatorMessage::SetRole { role }
            }
        };
        actions.push(Action::Tell { link, message });
        if let Order::Drain { move_running } = order {
            // Its own word comes with its next report; until then nothing new is sent.
            self.nodes.draining(link);
            if move_running {
                self.move_away(now, link, actions);
            }
        }
        self.place(now, actions);
        Ok(())
    }

    fn check_role(&self, node: &str, link: LinkId, wanted: Role) -> Result<(), OrderError> {
        if wanted == Role::Coordinator {
            return Err(OrderError::NotARole { wanted });
        }
        match self.nodes.certified(link) {
            Some(allowed) if !allowed.may_act_as(wanted) => Err(OrderError::RoleNotAllowed {
                node: node.to_owned(),
                allowed,
                wanted,
            }),
            _ => Ok(()),
        }
    }

    /// Moves what generates on a node to another one, if there is another one.
    fn move_away(&mut self, now: Instant, link: LinkId, actions: &mut Vec<Action>) {
        if !self.nodes.has_another_decode(link) {
            return;
        }
        for (leg, request) in self.nodes.legs_on(link) {
            self.change(now, request, Some(leg), actions, |request, ctx| {
                request.move_on(now, leg, ctx)
            });
        }
    }
}
