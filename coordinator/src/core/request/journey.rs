//! Where a request was served, as it goes along.

use std::sync::Arc;
use std::time::Instant;

use super::{Cause, Effect, Request};
use crate::core::journey::{Attempt, Incident, Served};
use crate::core::ledger::Ledger;
use crate::core::phases::Stretch;
use crate::core::types::ClientEvent;

/// Attempts that are remembered, the last ones.
const MAX_TOLD_ATTEMPTS: usize = 32;

impl Request {
    /// It has been placed.
    pub fn placed(&mut self, prefill: Option<Arc<str>>, decode: Option<Arc<str>>) {
        // Where nodes are full it may be sent to one after the other for as long as it lives.
        if self.served.attempts.len() >= MAX_TOLD_ATTEMPTS {
            self.served.attempts.remove(0);
        }
        self.served.attempts.push(Attempt {
            number: self.epoch.0,
            prefill,
            decode,
        });
    }

    /// Where it was served so far.
    pub fn served(&self) -> &Served {
        &self.served
    }

    /// Why each choice has ended, of those that have.
    pub fn finishes(&self) -> Vec<&'static str> {
        self.ledgers.iter().filter_map(Ledger::finish).collect()
    }

    /// What is to be told of a request that is over, beside its record: where it was served, and its phases.
    pub fn into_journey(mut self) -> (Served, Vec<Stretch>) {
        (self.served, self.phases.stretches())
    }

    /// An attempt has come to nothing.
    pub(super) fn note_incident(&mut self, at: Instant, what: &'static str, cause: &Cause) {
        if self.request.about.context.trace.is_some() {
            let cause = cause.to_string();
            self.served.incidents.push(Incident { at, what, cause });
        }
    }

    /// Whoever traces the request is told where it was served, before its end.
    pub(super) fn tell_served(&self, out: &mut Vec<Effect>) {
        if self.request.about.context.trace.is_some() {
            out.push(Effect::Emit(ClientEvent::Served(Box::new(self.served.clone()))));
        }
    }
}
