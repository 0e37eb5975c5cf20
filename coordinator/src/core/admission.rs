//! Who may wait: the queue is bounded in requests and in bytes, the whole in requests.

use std::time::{Duration, Instant};

use super::types::{ServeError, ServeErrorKind};

/// Bounds of admission.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionLimits {
    /// Requests in the queue and on nodes.
    pub max_concurrent_requests: usize,
    /// Requests in the queue.
    pub max_queued_requests: usize,
    /// Bytes the queued requests are charged for.
    pub max_queued_bytes: usize,
}

/// Longest `Retry-After`.
const MAX_RETRY_AFTER_S: u32 = 60;
/// Weight of the newest gap between two ends in the average.
const NEWEST_WEIGHT: f64 = 0.125;

/// Counts what is open and what waits, and how fast requests end.
#[derive(Debug)]
pub struct Admission {
    limits: AdmissionLimits,
    open: usize,
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
            open: 0,
            queued: 0,
            queued_bytes: 0,
            last_end: None,
            mean_gap: Duration::ZERO,
        }
    }

    /// Takes a request of `bytes` into the queue, or says when to try again.
    pub fn admit(&mut self, bytes: usize) -> Result<(), ServeError> {
        let limits = &self.limits;
        let full = if self.open >= limits.max_concurrent_requests {
            Some(format!("{} requests are being served", self.open))
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
        self.open += 1;
        self.enqueue(bytes);
        Ok(())
    }

    /// A request (back) in the queue. One that was admitted may always come back.
    pub fn enqueue(&mut self, bytes: usize) {
        self.queued += 1;
        self.queued_bytes += bytes;
    }

    /// A request has left the queue.
    pub fn dequeue(&mut self, bytes: usize) {
        self.queued -= 1;
        self.queued_bytes -= bytes;
    }

    /// A request has ended; it is not in the queue any more.
    pub fn end(&mut self, now: Instant) {
        self.open -= 1;
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

    /// Requests in the queue.
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Bytes they are charged for.
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Requests in the queue and on nodes.
    pub fn open(&self) -> usize {
        self.open
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
        let error = admission.admit(bytes).expect_err("full");
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
        admission.admit(60).expect("room");
        assert_eq!(
            refusal(&mut admission, 41),
            "the server is full: requests of 60 bytes are waiting"
        );
        admission.admit(40).expect("room");
        assert_eq!(refusal(&mut admission, 0), "the server is full: 2 requests are waiting");
        admission.dequeue(60);
        admission.admit(0).expect("room");
        admission.dequeue(40);
        assert_eq!(
            refusal(&mut admission, 0),
            "the server is full: 3 requests are being served"
        );
    }

    #[test]
    fn retry_after_follows_the_rate_of_ends() {
        let start = origin();
        let mut admission = Admission::new(AdmissionLimits {
            max_concurrent_requests: 100,
            ..LIMITS
        });
        assert_eq!(admission.retry_after_s(), 1);
        admission.admit(0).expect("room");
        for second in 0..40 {
            admission.admit(0).expect("room");
            admission.dequeue(0);
            admission.end(start + Duration::from_secs(4 * second));
        }
        // One waits, one more would: two ends, four seconds apart (the average is still approaching 4).
        assert_eq!(admission.retry_after_s(), 8);
    }
}
