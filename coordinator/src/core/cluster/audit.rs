//! What must hold between any two facts; for tests and simulations.

use std::collections::{BTreeSet, HashSet};

use protocol::ids::RequestId;

use super::Cluster;
use crate::core::request::State;

impl Cluster {
    /// Compares books, queues and timers with the requests. For tests and simulations: no server calls it.
    ///
    /// # Panics
    /// If they do not agree.
    pub fn assert_consistent(&self) {
        let mut held = BTreeSet::new();
        let (mut queued, mut bytes) = (BTreeSet::new(), 0);
        let mut stranded = BTreeSet::new();
        let mut timers = BTreeSet::new();
        for (id, entry) in &self.requests {
            let place = (entry.number, *id);
            match entry.request.state() {
                State::Queued => {
                    queued.insert(*id);
                    bytes += entry.request.request.charge();
                }
                State::Stranded => {
                    stranded.insert(place);
                }
                State::Finished => panic!("{id} is over and still here"),
                State::Reserving { .. }
                | State::Prefilling { .. }
                | State::Transferring { .. }
                | State::Resuming { .. }
                | State::Local { .. }
                | State::Decoding { .. } => {}
            }
            assert_eq!(entry.timer, entry.request.deadline(), "timer of {id}");
            timers.insert((entry.timer, *id));
            held.extend(entry.request.state().held_legs().map(|leg| (leg, *id)));
        }
        assert_eq!(self.queue.ids(), queued, "the queue is what is in state Queued");
        let of = |ids: &mut dyn Iterator<Item = &RequestId>| -> usize {
            ids.map(|id| self.requests[id].call).collect::<HashSet<_>>().len()
        };
        assert_eq!(
            (self.admission.queued(), self.admission.queued_bytes()),
            (of(&mut queued.iter()), bytes)
        );
        assert_eq!(self.admission.open(), of(&mut self.requests.keys()));
        assert_eq!(
            self.stranded, stranded,
            "what waits for a decode node is what is in state Stranded"
        );
        assert_eq!(self.timers, timers, "one timer for each request");
        for (leg, request) in self.nodes.assert_consistent() {
            assert!(
                held.contains(&(leg, request)),
                "{leg:?} is booked and {request} does not hold it"
            );
        }
    }
}
