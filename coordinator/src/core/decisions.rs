//! Why requests went where they went: the last decisions, with everything that was looked at.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use protocol::ids::RequestId;
use serde::Serialize;

use super::routing::Options;

/// What was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// A prefill node computes the prompt, and a decode node takes the KV over.
    Handoff,
    /// A prefill node computes the prompt, and that is all.
    PromptOnly,
    /// A decode node computes the prompt itself.
    Local,
    /// A request that lost its decode node goes on at another one.
    Resume,
}

/// One decision about one attempt of a request. Times are microseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decision {
    /// The request, as it is named in logs.
    pub request: String,
    /// Number of the attempt, from 1.
    pub attempt: u32,
    /// How long ago it was decided, in milliseconds.
    pub age_ms: u64,
    /// The policy.
    pub policy: &'static str,
    /// Whether decode nodes may compute prompts: `coordinator.local_prefill`.
    pub local_prefill: &'static str,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// What was decided.
    pub way: Way,
    /// The prefill node that was chosen.
    pub prefill: Option<Arc<str>>,
    /// The decode node that was chosen.
    pub decode: Option<Arc<str>>,
    /// Predicted cost of the cheapest pair of two nodes; none if there was no pair, or none was wanted.
    pub remote_us: Option<u64>,
    /// Predicted cost on the cheapest decode node that could compute the prompt itself now; none if there was none. With
    /// `auto` the cheaper of the two ways is taken, but the other one than last time only if it is a tenth cheaper.
    pub local_us: Option<u64>,
    /// Every node that was considered, and its costs.
    pub candidates: Options,
}

/// A decision as it is kept.
#[derive(Clone, Debug)]
pub struct Record {
    /// Whose.
    pub request: RequestId,
    /// When.
    pub at: Instant,
    /// Everything else; `request` and `age_ms` are filled in when somebody asks.
    pub decision: Decision,
}

/// The last decisions.
#[derive(Debug)]
pub struct Decisions {
    most: usize,
    records: VecDeque<Record>,
}

impl Decisions {
    /// Keeps the last `most`; 0: none.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            records: VecDeque::new(),
        }
    }

    /// Keeps a decision, in place of the oldest if there are too many.
    pub fn push(&mut self, record: Record) {
        if self.most == 0 {
            return;
        }
        if self.records.len() >= self.most {
            self.records.pop_front();
        }
        self.records.push_back(record);
    }

    /// What is kept about a request, by attempt.
    pub fn of(&self, now: Instant, request: RequestId) -> Vec<Decision> {
        let of_it = self.records.iter().filter(|record| record.request == request);
        let told = |record: &Record| Decision {
            request: record.request.to_string(),
            age_ms: now.saturating_duration_since(record.at).as_millis() as u64,
            ..record.decision.clone()
        };
        of_it.map(told).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::origin::origin;

    fn record(request: u128, attempt: u32, at: Instant) -> Record {
        Record {
            request: RequestId(request),
            at,
            decision: Decision {
                request: String::new(),
                attempt,
                age_ms: 0,
                policy: "round_robin",
                local_prefill: "auto",
                prompt_tokens: 5,
                way: Way::Handoff,
                prefill: Some("p0".into()),
                decode: None,
                remote_us: Some(7),
                local_us: None,
                candidates: Options::default(),
            },
        }
    }

    #[test]
    fn the_last_decisions_are_kept_and_found_by_request() {
        let (mut decisions, now) = (Decisions::new(3), origin());
        for (request, attempt) in [(1, 1), (2, 1), (1, 2), (3, 1)] {
            decisions.push(record(request, attempt, now));
        }
        let found = decisions.of(now + Duration::from_millis(1_500), RequestId(1));
        assert_eq!(found.len(), 1, "the first one of four is gone");
        assert_eq!((found[0].attempt, found[0].age_ms), (2, 1_500));
        let json = serde_json::to_value(&found[0]).expect("plain data");
        assert_eq!((&json["way"], &json["prefill"]), (&"handoff".into(), &"p0".into()));
        assert_eq!(json["request"], "00000000000000000000000000000001");
        assert!(decisions.of(now, RequestId(9)).is_empty());
        let mut none = Decisions::new(0);
        none.push(record(1, 1, now));
        assert!(none.of(now, RequestId(1)).is_empty());
    }
}
