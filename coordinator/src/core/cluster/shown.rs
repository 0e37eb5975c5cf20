//! What is shown of requests to whoever asks.

use std::time::Instant;

use protocol::ids::RequestId;

use super::Cluster;
use crate::core::decisions::Decision;
use crate::core::recent::RequestRecord;

impl Cluster {
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

    /// At most `most` requests that run, the oldest first, and at most `most` that have ended, the last one first.
    pub fn recent_requests(&self, now: Instant, most: usize) -> (Vec<RequestRecord>, Vec<RequestRecord>) {
        let mut running: Vec<_> = self.requests.iter().map(|(id, entry)| (entry.number, *id)).collect();
        running.sort_unstable();
        running.truncate(most);
        let shown = running.into_iter().filter_map(|(_, id)| self.request(now, id));
        (shown.collect(), self.recent.last(now, most))
    }
}
