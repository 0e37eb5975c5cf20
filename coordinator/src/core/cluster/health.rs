//! Nodes that do not get on, and nodes whose jobs fail.

use std::time::{Duration, Instant};

use protocol::control::{JobErrorKind, JobEvent};

use super::{Action, Cluster, reset};
use crate::core::nodes::{Leg, LegId};
use crate::core::request::Cause;

/// A job that ends so shortly before its request's own time is over has not failed.
const NEARLY_OVER: Duration = Duration::from_secs(1);

impl Cluster {
    /// What runs on a node that has stalled is lost.
    pub(super) fn look(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for link in self.nodes.look(now) {
            for (leg, _) in self.nodes.legs_on(link) {
                // An earlier leg of the list may have ended this one.
                let Some(of) = self.nodes.end(leg) else { continue };
                reset(leg, &of, actions);
                self.change_from(now, of.request, Some(link), actions, |request, ctx| {
                    request.attempt_failed(now, leg, Cause::Stalled, ctx)
                });
            }
        }
    }

    /// What an event says about its node. The leg is not over yet.
    pub(super) fn judge(&mut self, now: Instant, leg: LegId, of: &Leg, event: &JobEvent) {
        match event {
            JobEvent::Computed(_)
            | JobEvent::HandedOff(_)
            | JobEvent::Committed
            | JobEvent::Token { .. }
            | JobEvent::Beams(_)
            | JobEvent::Finished => self.nodes.succeeded(leg),
            JobEvent::Failed(error) => match error.kind {
                JobErrorKind::TransferFailed | JobErrorKind::Internal => self.nodes.failed(leg),
                JobErrorKind::DeadlineExceeded => {
                    let expires = self.requests.get(&of.request).map(|entry| entry.request.expires());
                    if expires.is_some_and(|expires| now + NEARLY_OVER < expires) {
                        self.nodes.failed(leg);
                    }
                }
                JobErrorKind::Overloaded | JobErrorKind::Draining | JobErrorKind::Invalid => {}
            },
            JobEvent::Granted { .. } | JobEvent::Busy { .. } => {}
        }
    }
}
