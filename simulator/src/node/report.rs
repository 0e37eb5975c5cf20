//! What a node says of itself: who it is, how much it has to do, what it has cached.

use std::collections::BTreeSet;

use engine::event::CacheEvent;
use protocol::PROTOCOL_VERSION;
use protocol::control::{CacheChange, Hello, LoadReport};
use protocol::ids::NodeId;

use super::Node;
use crate::model::{identity, layout};

/// A report is sent at least every so many looks.
const QUIET_LOOKS: u32 = 10;

impl Node {
    /// How it introduces itself.
    pub fn hello(&self) -> Hello {
        let limits = self.engine.limits();
        Hello {
            protocol_version: PROTOCOL_VERSION,
            node: NodeId(self.name.clone()),
            boot: self.boot,
            role: self.role,
            address: self.name.clone(),
            model: identity(),
            layout: layout(limits.groups),
            total_blocks: limits.total_blocks as u32,
            max_num_seqs: limits.max_num_seqs as u32,
            max_seq_len: limits.max_seq_len as u32,
        }
    }

    /// It joins a coordinator anew: everything is reported again.
    pub fn joined(&mut self) {
        (self.reports, self.reported, self.quiet) = (0, None, 0);
        self.cache_changes = 0;
        self.said.clear();
    }

    /// The report that is due, if its load has changed or nothing was said for long.
    pub fn report(&mut self) -> Option<LoadReport> {
        let stats = self.engine.stats();
        let report = LoadReport {
            sequence: 0,
            steps: stats.steps,
            free_blocks: stats.free_blocks as u32,
            cached_blocks: stats.cached_blocks as u32,
            owned_blocks: stats.owned_blocks as u32,
            running: stats.running as u32,
            waiting: stats.waiting as u32,
            preempted: stats.preempted as u32,
            oldest_wait_ms: 0,
            reservations: stats.reservations as u32,
            draining: self.is_draining(),
            role: self.role,
            pending: self.stepping.is_some(),
            queued_tokens: stats.queued_rows,
            step_times: self.engine.step_times(),
            done: stats.done(),
        };
        self.quiet += 1;
        if self.reported == Some(report) && self.quiet < QUIET_LOOKS {
            return None;
        }
        self.quiet = 0;
        self.reported = Some(report);
        self.reports += 1;
        Some(LoadReport {
            sequence: self.reports,
            ..report
        })
    }

    /// What has changed in its prefix cache, if something has.
    pub fn cache_change(&mut self) -> Option<CacheChange> {
        let mut events = Vec::new();
        if self.engine.take_cache_changes(&mut events) {
            for event in events {
                match event {
                    CacheEvent::Added(name) => self.cached.extend([name]),
                    CacheEvent::Removed(name) => self.cached.retain(|known| *known != name),
                }
            }
        } else {
            self.cached = self.engine.cached_names().collect();
        }
        let now = self.cached.clone();
        if now != self.engine.cached_names().collect::<BTreeSet<u64>>() {
            self.problem = Some("the changes of the prefix cache are not what is cached".to_owned());
        }
        let first = self.cache_changes == 0;
        let added: Vec<u64> = now.difference(&self.said).copied().collect();
        let removed: Vec<u64> = self.said.difference(&now).copied().collect();
        if added.is_empty() && removed.is_empty() && !first {
            return None;
        }
        self.cache_changes += 1;
        self.said = now;
        Some(CacheChange {
            sequence: self.cache_changes,
            reset: first,
            added,
            removed,
        })
    }
}
