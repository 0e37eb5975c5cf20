//! What is shown of requests to whoever asks.

use std::sync::Arc;
use std::time::Instant;

use protocol::ids::RequestId;

use super::{Action, Cluster, Entry};
use crate::core::decisions::Decision;
use crate::core::journey::Ended;
use crate::core::recent::RequestRecord;
use crate::core::types::ServeError;

/// By which name somebody asks for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The one that the coordinator gave it, or else a client's that looks like it.
    Id(RequestId, String),
    /// The client's own.
    Client(String),
}

/// What is known of a request, and why each of its attempts went where it went.
#[derive(Clone, Debug, Default)]
pub struct Explained {
    /// The request.
    pub record: Option<RequestRecord>,
    /// Its decisions, by attempt.
    pub decisions: Vec<Decision>,
    /// Further requests of the same client's name, the newest first.
    pub others: Vec<RequestId>,
}

impl Cluster {
    /// Lets a request go that is over, and tells of it.
    pub(super) fn ended(&mut self, now: Instant, id: RequestId, failed: Option<ServeError>, actions: &mut Vec<Action>) {
        let Some(Entry { request, .. }) = self.requests.remove(&id) else {
            return;
        };
        let outcome = failed.as_ref().map_or("done", |error| error.kind.as_str());
        let record = RequestRecord::new(now, &request, outcome);
        self.recent.push(now, id, record.clone());
        let context = Arc::clone(&request.request.about.context);
        let (served, stretches) = request.into_journey();
        actions.push(Action::Ended(Box::new(Ended {
            id,
            context,
            record,
            error: failed.map(|error| error.message),
            served,
            stretches,
        })));
    }

    /// What is kept of the decisions about a request, by attempt.
    pub fn decisions(&self, now: Instant, request: RequestId) -> Vec<Decision> {
        self.decisions.of(now, request)
    }

    /// A request that is running, or one of those that ended last.
    pub fn request(&self, now: Instant, id: RequestId) -> Option<RequestRecord> {
        let entry = self.requests.get(&id);
        entry
            .map(|entry| RequestRecord {
                request: id.to_string(),
                ..RequestRecord::new(now, &entry.request, entry.request.state().as_str())
            })
            .or_else(|| self.recent.find(now, id))
    }

    /// The requests that a client has given this name, the newest first: those that run and those that ended last.
    pub fn called(&self, client_id: &str) -> Vec<RequestId> {
        let of_name = |entry: &&Entry| entry.request.request.about.context.client_id.as_deref() == Some(client_id);
        let running = self.requests.values().filter(of_name);
        let mut running: Vec<_> = running.map(|entry| (entry.number, entry.request.request.id)).collect();
        running.sort_unstable_by(|one, other| other.cmp(one));
        let running = running.into_iter().map(|(_, id)| id);
        running.chain(self.recent.called(client_id)).collect()
    }

    /// What became of a request, and why it went where it went; of several with a client's name, of the newest.
    pub fn explain(&self, now: Instant, asked: Asked) -> Explained {
        let of = |id| (self.request(now, id), self.decisions(now, id));
        let name = match asked {
            Asked::Id(id, name) => {
                let (record, decisions) = of(id);
                if record.is_some() || !decisions.is_empty() {
                    return Explained {
                        record,
                        decisions,
                        others: Vec::new(),
                    };
                }
                name
            }
            Asked::Client(name) => name,
        };
        let mut called = self.called(&name).into_iter();
        let Some(newest) = called.next() else {
            return Explained::default();
        };
        let (record, decisions) = of(newest);
        Explained {
            record,
            decisions,
            others: called.collect(),
        }
    }

    /// At most `most` requests that run, the oldest first, and at most `most` that have ended, the last one first.
    pub fn recent_requests(&self, now: Instant, most: usize) -> (Vec<RequestRecord>, Vec<RequestRecord>) {
        let mut running: Vec<_> = self.requests.iter().map(|(id, entry)| (entry.number, *id)).collect();
        running.sort_unstable();
        running.truncate(most);
        let shown = running.into_iter().filter_map(|(_, id)| self.request(now, id));
        (shown.collect(), self.recent.last(now, most))
    }
}
