//! Names of requests, nodes, reservations and their generations.

use std::fmt;

use bincode::{Decode, Encode};

/// One client request, unique in the cluster: 128 random bits drawn by the coordinator.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
pub struct RequestId(pub u128);

/// A node's configured name, unique in the cluster.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Encode, Decode)]
pub struct NodeId(pub String);

/// Generation of a request's placement: +1 on every attempt, so that late frames of an older attempt are recognised.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Encode, Decode)]
pub struct Epoch(pub u32);

/// Name of a reservation on a decode node: 64 random bits, never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
pub struct Ticket(pub u64);

/// What a node does in the cluster.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Encode, Decode)]
pub enum Role {
    /// The front door.
    Coordinator,
    /// Computes prompts and first tokens.
    #[default]
    Prefill,
    /// Runs the generation loop.
    Decode,
    /// Prefill and decode alike.
    Both,
}

impl Role {
    /// The role's word in certificates, configuration and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }

    /// Whether a process with a certificate of this role may act in `role`.
    pub fn may_act_as(self, role: Self) -> bool {
        self == role || (self == Self::Both && role != Self::Coordinator)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestId({self})")
    }
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({self})")
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
