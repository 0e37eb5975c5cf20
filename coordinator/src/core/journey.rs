//! Where a request was served, and what went wrong meanwhile: for records, logs and traces.

use std::sync::Arc;
use std::time::Instant;

use protocol::context::RequestContext;
use protocol::ids::RequestId;

use super::phases::{Phase, Stretch};
use super::recent::RequestRecord;

/// One attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Its number, from 1.
    pub number: u32,
    /// The prefill node, if there was one.
    pub prefill: Option<Arc<str>>,
    /// The decode node, if there was one.
    pub decode: Option<Arc<str>>,
}

impl Attempt {
    /// The node that a phase of the attempt was spent on, or waited for: of two the one whose turn it was.
    pub fn node_of(&self, phase: Phase) -> Option<&Arc<str>> {
        match phase {
            Phase::Queue | Phase::ClientWrite => None,
            Phase::PrefillQueue | Phase::Prefill => self.prefill.as_ref().or(self.decode.as_ref()),
            Phase::Transfer | Phase::DecodeQueue | Phase::Decode => self.decode.as_ref(),
        }
    }
}

/// An attempt that came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incident {
    /// When that was seen.
    pub at: Instant,
    /// What came of it: `restart` before the first token, `migration` behind it.
    pub what: &'static str,
    /// Why, in one line without any text of the request.
    pub cause: String,
}

/// Where a request was served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Its attempts, in their order.
    pub attempts: Vec<Attempt>,
    /// What went wrong, in its order; only of a request that is traced.
    pub incidents: Vec<Incident>,
}

impl Served {
    /// Names of all nodes, each once, in the order in which they were chosen.
    pub fn nodes(&self) -> Vec<Arc<str>> {
        let mut nodes: Vec<Arc<str>> = Vec::new();
        let all = self
            .attempts
            .iter()
            .flat_map(|attempt| [&attempt.prefill, &attempt.decode]);
        for node in all.flatten() {
            if !nodes.contains(node) {
                nodes.push(Arc::clone(node));
            }
        }
        nodes
    }
}

/// A request that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// Which.
    pub id: RequestId,
    /// Its other names.
    pub context: Arc<RequestContext>,
    /// What is kept of it.
    pub record: RequestRecord,
    /// What its client was told, if it was not answered.
    pub error: Option<String>,
    /// Where it was served.
    pub served: Served,
    /// Its phases, if it is traced.
    pub stretches: Vec<Stretch>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_named_once_and_by_whose_turn_it_is() {
        let attempt = |number, prefill: Option<&str>, decode: Option<&str>| Attempt {
            number,
            prefill: prefill.map(Arc::from),
            decode: decode.map(Arc::from),
        };
        let served = Served {
            attempts: vec![
                attempt(1, Some("p0"), Some("d0")),
                attempt(2, None, Some("d1")),
                attempt(3, None, Some("d0")),
            ],
            incidents: Vec::new(),
        };
        let names: Vec<String> = served.nodes().iter().map(ToString::to_string).collect();
        assert_eq!(names, ["p0", "d0", "d1"]);
        let node = |attempt: usize, phase| served.attempts[attempt].node_of(phase).map(|node| node.to_string());
        assert_eq!(node(0, Phase::Prefill).as_deref(), Some("p0"));
        assert_eq!(
            node(1, Phase::Prefill).as_deref(),
            Some("d1"),
            "it computes the prompt itself"
        );
        assert_eq!(node(0, Phase::Decode).as_deref(), Some("d0"));
        assert_eq!(node(0, Phase::Queue), None);
    }
}
