//! An operator asks again and again whose the nodes' blocks are (`coordinator::core::block_audit`). At no time may an answer
//! show what contradicts the coordinator's books.

use std::time::Duration;

use coordinator::core::block_audit::AuditReport;

use super::{Event, World};

/// Longest time between two audits, in microseconds.
const INTERVAL_US: u64 = 700_000;

impl World {
    /// The operator asks.
    pub(super) fn audit_blocks(&mut self) {
        self.note(13, 0, format_args!("operator: whose are the blocks?"));
        let mut actions = Vec::new();
        // Enough may run already, if nodes do not answer.
        if self.front.cluster.audit_blocks(self.now, &mut actions).is_ok() {
            self.tally.audits += 1;
        }
        self.settle(actions);
        let pause = Duration::from_micros(INTERVAL_US / 2) + self.random.micros(0..INTERVAL_US / 2);
        self.after(pause, Event::Audit);
    }

    /// The operator is answered.
    pub(super) fn audited(&mut self, report: AuditReport) {
        let silent = report.nodes.iter().filter(|node| !node.answered).count();
        self.tally.audits_silent += silent as u64;
        if let Some(node) = report.nodes.iter().find(|node| node.answered && !node.agrees) {
            self.front.problem = Some(format!("an audit does not agree: {node:?}"));
        }
        self.front.last_audit = Some(report);
    }
}
