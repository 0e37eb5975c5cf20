//! A node on which job after job fails gets none for a while, then one to see whether it serves again.
//!
//! ```text
//! Closed --(failures in a row)--> Open --(time is over)--> half open: one job
//!    ^                              ^                          |      |
//!    '------------------------------|------- it succeeds ------'      |
//!                                   '------- it fails: twice as long -'
//! ```
//!
//! A node that says that it is busy has not failed. Jobs that run on a node whose breaker opens go on. Where no other node of
//! its role can be asked, a node is tried again after the shortest time, however often it has failed: a longer one would spare
//! nobody anything, and requests would wait for a node that has recovered. A node that connects anew has not failed.

use std::time::{Duration, Instant};

use super::LegId;

/// When a breaker opens, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct BreakerLimits {
    /// Failed jobs in a row.
    pub failures: u32,
    /// How long it is open at first; twice as long after each job that fails again, up to 32 times as long, while another
    /// node of its role can be asked.
    pub open: Duration,
}

/// How often the time doubles at most.
const MOST_DOUBLINGS: u32 = 5;

/// Of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Breaker {
    /// Jobs go there; the last so many failed.
    Closed {
        /// Failures in a row.
        failures: u32,
    },
    /// No job goes there until then, and only one afterwards.
    Open {
        /// When the last one failed there.
        since: Instant,
        /// When the next one may go there.
        until: Instant,
        /// How many have failed there since it opened.
        again: u32,
    },
    /// One job is there.
    HalfOpen {
        /// Which.
        leg: LegId,
        /// When the last one failed there.
        since: Instant,
        /// Since when one might go there.
        until: Instant,
        /// How many have failed there since it opened.
        again: u32,
    },
}

impl Default for Breaker {
    fn default() -> Self {
        Self::Closed { failures: 0 }
    }
}

impl Breaker {
    /// True if a job may go there.
    pub(super) fn admits(&self, now: Instant) -> bool {
        match self {
            Self::Closed { .. } => true,
            Self::Open { until, .. } => *until <= now,
            Self::HalfOpen { .. } => false,
        }
    }

    /// True if a job may go there where no other node can be asked.
    pub(super) fn admits_alone(&self, now: Instant, limits: &BreakerLimits) -> bool {
        match self {
            Self::Closed { .. } => true,
            Self::Open { since, .. } => *since + limits.open <= now,
            Self::HalfOpen { .. } => false,
        }
    }

    /// A job goes there: [`Breaker::admits`] or [`Breaker::admits_alone`] has been asked.
    pub(super) fn booked(&mut self, leg: LegId) {
        if let Self::Open { since, until, again } = *self {
            *self = Self::HalfOpen {
                leg,
                since,
                until,
                again,
            };
        }
    }

    /// A job there has failed. True if that has opened it.
    pub(super) fn failed(&mut self, now: Instant, leg: LegId, limits: &BreakerLimits) -> bool {
        match *self {
            Self::Closed { failures } if failures + 1 < limits.failures => {
                *self = Self::Closed { failures: failures + 1 };
                false
            }
            Self::Closed { .. } => {
                *self = Self::Open {
                    since: now,
                    until: now + limits.open,
                    again: 0,
                };
                true
            }
            Self::HalfOpen { leg: probe, again, .. } if probe == leg => {
                let again = (again + 1).min(MOST_DOUBLINGS);
                *self = Self::Open {
                    since: now,
                    until: now + limits.open.saturating_mul(1 << again),
                    again,
                };
                true
            }
            // Jobs from before it opened.
            Self::Open { .. } | Self::HalfOpen { .. } => false,
        }
    }

    /// A job there does what it should.
    pub(super) fn succeeded(&mut self, leg: LegId) {
        match *self {
            Self::Closed { .. } => *self = Self::default(),
            Self::HalfOpen { leg: probe, .. } if probe == leg => *self = Self::default(),
            Self::Open { .. } | Self::HalfOpen { .. } => {}
        }
    }

    /// A job there is over; if nothing has been learned from it, another one may go there.
    pub(super) fn ended(&mut self, leg: LegId) {
        if let Self::HalfOpen {
            leg: probe,
            since,
            until,
            again,
        } = *self
            && probe == leg
        {
            *self = Self::Open { since, until, again };
        }
    }

    /// When a job may go there that may not now, perhaps only if no other node can be asked.
    pub(super) fn opens_up(&self, now: Instant, limits: &BreakerLimits) -> Option<Instant> {
        match self {
            Self::Open { since, until, .. } => [*since + limits.open, *until].into_iter().find(|at| *at > now),
            Self::Closed { .. } | Self::HalfOpen { .. } => None,
        }
    }

    /// Its state's word in the node's status and in metrics.
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::Closed { .. } => "closed",
            Self::Open { .. } => "open",
            Self::HalfOpen { .. } => "half_open",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::origin::origin;

    const LIMITS: BreakerLimits = BreakerLimits {
        failures: 3,
        open: Duration::from_secs(1),
    };

    #[test]
    fn failures_in_a_row_open_it_and_a_success_between_them_does_not() {
        let (mut breaker, now) = (Breaker::default(), origin());
        for _ in 0..5 {
            assert!(!breaker.failed(now, LegId(1), &LIMITS));
            assert!(!breaker.failed(now, LegId(2), &LIMITS));
            breaker.succeeded(LegId(3));
        }
        assert!(breaker.admits(now));
        for leg in 0..3 {
            assert_eq!(breaker.failed(now, LegId(leg), &LIMITS), leg == 2);
        }
        assert_eq!((breaker.admits(now), breaker.as_str()), (false, "open"));
        assert_eq!(breaker.opens_up(now, &LIMITS), Some(now + LIMITS.open));
    }

    #[test]
    fn one_job_is_tried_and_each_failure_doubles_the_time_up_to_a_bound() {
        let (mut breaker, mut now) = (Breaker::default(), origin());
        let opened: Vec<bool> = (0..3).map(|leg| breaker.failed(now, LegId(leg), &LIMITS)).collect();
        assert_eq!(opened, [false, false, true]);
        for (round, seconds) in [1, 2, 4, 8, 16, 32, 32].into_iter().enumerate() {
            assert!(!breaker.admits(now + Duration::from_secs(seconds) - Duration::from_millis(1)));
            now += Duration::from_secs(seconds);
            assert!(breaker.admits(now));
            let probe = LegId(10 + round as u64);
            breaker.booked(probe);
            assert_eq!((breaker.admits(now), breaker.as_str()), (false, "half_open"));
            // What older jobs do there makes no difference.
            breaker.succeeded(LegId(0));
            breaker.ended(LegId(0));
            assert!(!breaker.failed(now, LegId(0), &LIMITS) && !breaker.admits(now));
            assert!(breaker.failed(now, probe, &LIMITS));
            // Without another node the first second is all.
            let (soon, at) = (now + Duration::from_millis(999), now + LIMITS.open);
            assert!(!breaker.admits_alone(soon, &LIMITS) && breaker.admits_alone(at, &LIMITS));
            assert_eq!(breaker.opens_up(soon, &LIMITS), Some(at));
            assert!(breaker.opens_up(at, &LIMITS).is_some_and(|again| again > at));
        }
        now += Duration::from_secs(32);
        breaker.booked(LegId(50));
        breaker.ended(LegId(50));
        assert!(
            breaker.admits(now),
            "its client left: nothing is known, another one may try"
        );
        breaker.booked(LegId(51));
        breaker.succeeded(LegId(51));
        assert_eq!(breaker, Breaker::default());
    }
}
