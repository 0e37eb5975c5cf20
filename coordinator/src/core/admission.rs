//! Who may wait: the queue is bounded in calls and in bytes, the whole in calls.
//!
//! A call is what a client sent at once: one request, or one for each of its prompts. It is admitted as a whole or not at
//! all, and counts once, however many requests it has.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::types::{ServeError, ServeErrorKind};

/// Bounds of admission.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionLimits {
    /// Calls in the queue and on nodes.
    pub max_concurrent_requests: usize,
    /// Calls in the queue.
    pub max_queued_requests: usize,
    /// Bytes the queued requests are charged for.
    pub max_queued_bytes: usize,
}

/// Name of an admitted call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CallId(u64);

/// The requests of a call.
#[derive(Clone, Copy, Debug)]
struct Call {
    open: usize,
    queued: usize,
}

/// Longest `Retry-After`.
const MAX_RETRY_AFTER_S: u32 = 60;
/// Weight of the newest gap between two ends in the average.
const NEWEST_WEIGHT: f64 = 0.125;

/// Counts what is open and what waits, and how fast requests end.
#[derive(Debug)]
pub struct Admission {
    limits: AdmissionLimits,
    calls: HashMap<CallId, Call>,
    next_call: u64,
    /// Calls with a request in the queue.
    queued: usize,
    queued_bytes: usize,
    last_end: Option<Instant>,
    mean_gap: Duration,
}

impl Admission {
    /// Nothing is open yet.
    pub fn new(limits: AdmissionLimits) -> Self {
        Self {
            limits,
            calls: HashMap::new(),
            next_call: 0,
            queued: 0,
            queued_bytes: 0,
            last_end: None,
            mean_gap: Duration::ZERO,
        }
    }

    /// Takes a call of `requests` requests, charged with `bytes` together, into the queue, or says when to try again.
    pub fn admit(&mut self, requests: usize, bytes: usize) -> Result<CallId, ServeError> {
        let limits = &self.limits;
        let full = if self.calls.len() >= limits.max_concurrent_requests {
            Some(format!("{} requests are being served", self.calls.len()))
        } else if self.queued >= limits.max_queued_requests {
            Some(format!("{} requests are waiting", self.queued))
        } else if self.queued_bytes.saturating_add(bytes) > limits.max_queued_bytes {
            Some(format!("requests of {} bytes are waiting", self.queued_bytes))
        } else {
            None
        };
        if let Some(what) = full {
            let kind = ServeErrorKind::Overloaded {
                retry_after_s: self.retry_after_s(),
            };
            return Err(ServeError::new(kind, format!("the server is full: {what}")));
        }
        let id = CallId(self.next_call);
        self.next_call += 1;
        self.calls.insert(
            id,
            Call {
                open: requests,
                queued: requests,
            },
        );
        self.queued += 1;
        self.queued_bytes += bytes;
        Ok(id)
    }

    /// Refuses a call that will have to wait for longer than `patience`, if requests go on ending as they did lately and
    /// `ahead` of them come before it: better told now than after the wait, and before anything was computed.
    pub fn forecast(&self, ahead: usize, patience: Duration) -> Result<(), ServeError> {
        let wait = self.mean_gap.as_secs_f64() * ahead as f64;
        if self.last_end.is_none() || wait <= patience.as_secs_f64() {
            return Ok(());
        }
        let beyond = wait - patience.as_secs_f64();
        let retry_after_s = (beyond.ceil() as u32).clamp(1, MAX_RETRY_AFTER_S);
        let message = format!(
            "the server is full: a wait of {wait:.1} s is expected, and the request allows {:.1} s",
            patience.as_secs_f64()
        );
        Err(ServeError::new(ServeErrorKind::Overloaded { retry_after_s }, message))
    }

    /// A request of a call is back in the queue: it was admitted, so it may.
    pub fn enqueue(&mut self, call: CallId, bytes: usize) {
        self.queued_bytes += bytes;
        if let Some(call) = self.calls.get_mut(&call) {
            self.queued += usize::from(call.queued == 0);
            call.queued += 1;
        }
    }

    /// A request of a call has left the queue.
    pub fn dequeue(&mut self, call: CallId, bytes: usize) {
        self.queued_bytes -= bytes;
        if let Some(call) = self.calls.get_mut(&call) {
            call.queued -= 1;
            self.queued -= usize::from(call.queued == 0);
        }
    }

    /// A request of a call has ended; it is not in the queue any more.
    pub fn end(&mut self, now: Instant, id: CallId) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        call.open -= 1;
        if call.open > 0 {
            return;
        }
        self.calls.remove(&id);
        if self.queued == 0 {
            // Ends come as requests do: they say nothing about how many the cluster could do.
            self.last_end = None;
            return;
        }
        if let Some(last) = self.last_end.replace(now) {
            let gap = now.saturating_duration_since(last).as_secs_f64();
            let mean = self.mean_gap.as_secs_f64();
            self.mean_gap = Duration::from_secs_f64(mean + NEWEST_WEIGHT * (gap - mean));
        }
    }

    /// Seconds after which the queue will be empty if requests go on ending as they did lately; between 1 and 60.
    pub fn retry_after_s(&self) -> u32 {
        let forecast = self.mean_gap.as_secs_f64() * (self.queued as f64 + 1.0);
        (forecast.ceil() as u32).clamp(1, MAX_RETRY_AFTER_S)
    }

    /// Calls with a request in the queue.
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Bytes the requests in the queue are charged for.
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Calls that have not ended.
    pub fn open(&self) -> usize {
        self.calls.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::origin::origin;

    const LIMITS: AdmissionLimits = AdmissionLimits {
        max_concurrent_requests: 3,
        max_queued_requests: 2,
        max_queued_bytes: 100,
    };

    fn refusal(admission: &mut Admission, bytes: usize) -> String {
        let error = admission.admit(1, bytes).expect_err("full");
        assert!(matches!(error.kind, ServeErrorKind::Overloaded { retry_after_s: 1.. }));
        error.message
    }

    #[test]
    fn each_bound_refuses_and_names_itself() {
        let mut admission = Admission::new(LIMITS);
        assert_eq!(
            refusal(&mut admission, 101),
            "the server is full: requests of 0 bytes are waiting"
        );
        let first = admission.admit(1, 60).expect("room");
        assert_eq!(
            refusal(&mut admission, 41),
            "the server is full: requests of 60 bytes are waiting"
        );
        let second = admission.admit(1, 40).expect("room");
        assert_eq!(refusal(&mut admission, 0), "the server is full: 2 requests are waiting");
        admission.dequeue(first, 60);
        admission.admit(1, 0).expect("room");
        admission.dequeue(second, 40);
        assert_eq!(
            refusal(&mut admission, 0),
            "the server is full: 3 requests are being served"
        );
    }

    #[test]
    fn a_wait_that_is_longer_than_allowed_is_refused_before_it() {
        let start = origin();
        let mut admission = Admission::new(AdmissionLimits {
            max_concurrent_requests: 100,
            ..LIMITS
        });
        assert_eq!(admission.forecast(1_000, Duration::ZERO), Ok(()), "nothing is known");
        admission.admit(1, 0).expect("room");
        for second in 0..60 {
            let call = admission.admit(1, 0).expect("room");
            admission.dequeue(call, 0);
            admission.end(start + Duration::from_secs(2 * second), call);
        }
        assert_eq!(admission.forecast(10, Duration::from_secs(21)), Ok(()));
        let refused = admission.forecast(10, Duration::from_secs(15)).expect_err("20 s");
        let kind = ServeErrorKind::Overloaded { retry_after_s: 5 };
        assert_eq!(refused.kind, kind, "{refused}");
        assert_eq!(admission.forecast(0, Duration::ZERO), Ok(()), "nobody waits");
    }

    #[test]
    fn a_call_counts_once_however_many_requests_it_has() {
        let (mut admission, now) = (Admission::new(LIMITS), origin());
        let call = admission.admit(50, 60).expect("room");
        assert_eq!((admission.queued(), admission.open()), (1, 1));
        (0..50).for_each(|_| admission.dequeue(call, 1));
        assert_eq!((admission.queued(), admission.queued_bytes()), (0, 10));
        admission.enqueue(call, 1);
        admission.enqueue(call, 1);
        assert_eq!((admission.queued(), admission.queued_bytes()), (1, 12));
        (0..2).for_each(|_| admission.dequeue(call, 1));
        (0..49).for_each(|_| admission.end(now, call));
        assert_eq!(admission.open(), 1);
        admission.end(now, call);
        assert_eq!(admission.open(), 0);
    }

    #[test]
    fn retry_after_follows_the_rate_of_ends() {
        let start = origin();
        let mut admission = Admission::new(AdmissionLimits {
            max_concurrent_requests: 100,
            ..LIMITS
        });
        assert_eq!(admission.retry_after_s(), 1);
        admission.admit(1, 0).expect("room");
        for second in 0..40 {
            let call = admission.admit(1, 0).expect("room");
            admission.dequeue(call, 0);
            admission.end(start + Duration::from_secs(4 * second), call);
        }
        // One waits, one more would: two ends, four seconds apart (the average is still approaching 4).
        assert_eq!(admission.retry_after_s(), 8);
    }
}
