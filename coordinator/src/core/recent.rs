//! The requests that ended last, and how: what a page of the coordinator shows, and where "why was it slow" begins.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use protocol::ids::RequestId;
use serde::Serialize;

use super::phases::PhaseTimes;
use super::request::Request;

/// A request, as it is shown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestRecord {
    /// Its name in logs and headers.
    pub request: String,
    /// The client's own name for it: its header `X-Request-Id`.
    pub client_request_id: Option<String>,
    /// Name of its trace, if it is traced.
    pub trace_id: Option<String>,
    /// `done`, or the kind of error, or for one that is not over its state.
    pub outcome: &'static str,
    /// How long ago that was, in milliseconds; 0 if it is not over.
    pub age_ms: u64,
    /// Attempts: 1 if nothing failed, 0 if it was never sent to a node.
    pub attempts: u32,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Tokens of its answer, all choices together.
    pub generated_tokens: usize,
    /// Why its choices ended, of those that have: `stop` or `length`.
    pub finish_reasons: Vec<&'static str>,
    /// The nodes that it was sent to.
    pub nodes: Vec<Arc<str>>,
    /// Where its time went, from submission.
    pub phases: PhaseTimes,
}

impl RequestRecord {
    /// Of a request that has come so far, or to that end.
    pub fn new(now: Instant, request: &Request, outcome: &'static str) -> Self {
        let context = &request.request.about.context;
        Self {
            request: String::new(),
            client_request_id: context.client_id.clone(),
            trace_id: context.trace_id().map(|id| id.to_string()),
            finish_reasons: request.finishes(),
            nodes: request.served().nodes(),
            outcome,
            age_ms: 0,
            attempts: request.attempt(),
            prompt_tokens: request.request.token_ids.len(),
            generated_tokens: request.generated_tokens(),
            phases: request.phases(now),
        }
    }
}

#[derive(Debug)]
struct Ended {
    request: RequestId,
    at: Instant,
    /// `request` and `age_ms` are filled in when somebody asks.
    record: RequestRecord,
}

/// See the head of the file.
#[derive(Debug)]
pub struct Recent {
    most: usize,
    ended: VecDeque<Ended>,
}

impl Recent {
    /// Keeps the last `most`; 0: none.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            ended: VecDeque::new(),
        }
    }

    /// A request has ended.
    pub fn push(&mut self, now: Instant, request: RequestId, record: RequestRecord) {
        if self.most == 0 {
            return;
        }
        if self.ended.len() >= self.most {
            self.ended.pop_front();
        }
        self.ended.push_back(Ended {
            request,
            at: now,
            record,
        });
    }

    /// At most `most` of those that have ended, the last one first.
    pub fn last(&self, now: Instant, most: usize) -> Vec<RequestRecord> {
        self.ended
            .iter()
            .rev()
            .take(most)
            .map(|ended| ended.told(now))
            .collect()
    }

    /// One of them.
    pub fn find(&self, now: Instant, request: RequestId) -> Option<RequestRecord> {
        let found = self.ended.iter().rev().find(|ended| ended.request == request);
        found.map(|ended| ended.told(now))
    }
}

impl Recent {
    /// The requests that have ended and had this name of a client's, the last one first.
    pub fn called(&self, client_id: &str) -> Vec<RequestId> {
        let of_name = |ended: &&Ended| ended.record.client_request_id.as_deref() == Some(client_id);
        let found = self.ended.iter().rev().filter(of_name);
        found.map(|ended| ended.request).collect()
    }
}

impl Ended {
    fn told(&self, now: Instant) -> RequestRecord {
        RequestRecord {
            request: self.request.to_string(),
            age_ms: now.saturating_duration_since(self.at).as_millis() as u64,
            ..self.record.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::core::fixtures;
    use crate::origin::origin;

    fn record(prompt_tokens: usize) -> RequestRecord {
        RequestRecord {
            client_request_id: Some(format!("client-{prompt_tokens}")),
            prompt_tokens,
            ..fixtures::record()
        }
    }

    #[test]
    fn the_last_requests_are_kept_the_newest_first() {
        let (mut recent, now) = (Recent::new(2), origin());
        for number in 1..=3 {
            recent.push(
                now + Duration::from_secs(number),
                RequestId(number.into()),
                record(number as usize),
            );
        }
        let later = now + Duration::from_secs(5);
        let shown = recent.last(later, 10);
        let told: Vec<(usize, u64)> = shown.iter().map(|r| (r.prompt_tokens, r.age_ms)).collect();
        assert_eq!(told, [(3, 2_000), (2, 3_000)]);
        assert_eq!(recent.last(later, 1).len(), 1);
        assert_eq!(recent.find(later, RequestId(1)), None, "it is gone");
        let found = recent.find(later, RequestId(2)).expect("kept");
        assert_eq!(found.request, "00000000000000000000000000000002");
        assert_eq!(recent.called("client-3"), [RequestId(3)]);
        assert!(recent.called("client-1").is_empty(), "it is gone");
        let mut none = Recent::new(0);
        none.push(now, RequestId(1), record(1));
        assert!(none.last(later, 10).is_empty());
    }
}
