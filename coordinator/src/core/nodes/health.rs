//! Whether a node gets on with its work.
//!
//! A node is *stalled* when it has work and its engine has taken no step for a while, or when it has reported nothing for
//! as long although its link lives. A report says how many steps were taken, not when, so reports that are late, lost or
//! repeated change nothing but the moment at which a stall is noticed.
//!
//! Only time in which this process ran counts: after a pause of its own (a stopped or starved process) reports that wait
//! for it are read before anybody is suspected.

use std::time::{Duration, Instant};

/// The time that counts for stalls.
#[derive(Debug)]
pub(super) struct RunningTime {
    passed: Duration,
    looked: Option<Instant>,
    /// Longest time between two looks that counts.
    longest: Duration,
}

/// Looks within the time after which a node is stalled.
const LOOKS: u32 = 8;

impl RunningTime {
    pub(super) fn new(stall_after: Duration) -> Self {
        Self {
            passed: Duration::ZERO,
            looked: None,
            longest: (stall_after / LOOKS).max(Duration::from_millis(1)),
        }
    }

    /// Looks at the clock; the time that has passed in which this process ran.
    pub(super) fn look(&mut self, now: Instant) -> Duration {
        let since = self
            .looked
            .map_or(Duration::ZERO, |looked| now.saturating_duration_since(looked));
        self.looked = Some(now);
        self.passed += since.min(self.longest);
        self.passed
    }

    /// When it was last looked at.
    pub(super) fn looked(&self) -> Option<Instant> {
        self.looked
    }

    /// The time at the last look.
    pub(super) fn now(&self) -> Duration {
        self.passed
    }

    /// When it has to be looked at again, if somebody is watched.
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.looked.map(|looked| looked + self.longest)
    }
}

/// Of one node. Times are [`RunningTime`]'s.
#[derive(Clone, Copy, Debug)]
pub(super) struct Health {
    stalled: bool,
    steps: u64,
    /// It has work, by its last report.
    pending: bool,
    /// When it last took a step, or had no work.
    advanced: Duration,
    /// When it last reported.
    heard: Duration,
}

impl Health {
    /// A node that has just joined.
    pub(super) fn new(time: Duration) -> Self {
        Self {
            stalled: false,
            steps: 0,
            pending: false,
            advanced: time,
            heard: time,
        }
    }

    /// It has reported. True if it has recovered from a stall.
    pub(super) fn report(&mut self, time: Duration, steps: u64, pending: bool) -> bool {
        let advances = steps > self.steps || !pending;
        self.heard = time;
        self.pending = pending;
        self.steps = steps;
        if advances {
            self.advanced = time;
        }
        let recovers = self.stalled && advances;
        self.stalled &= !advances;
        recovers
    }

    /// True if it is found to be stalled now and was not before.
    pub(super) fn check(&mut self, time: Duration, stall_after: Duration) -> bool {
        let for_long = |since: Duration| time.saturating_sub(since) >= stall_after;
        let stalled = (self.pending && for_long(self.advanced)) || for_long(self.heard);
        let news = stalled && !self.stalled;
        self.stalled |= stalled;
        news
    }

    pub(super) fn is_stalled(&self) -> bool {
        self.stalled
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::origin::origin;

    const STALL: Duration = Duration::from_secs(10);

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_node_with_work_and_without_steps_is_stalled_and_recovers_with_the_next_step() {
        let mut health = Health::new(Duration::ZERO);
        for second in 1..20 {
            health.report(seconds(second), 0, false);
            assert!(!health.check(seconds(second), STALL), "it has no work");
        }
        for second in 20..29 {
            health.report(seconds(second), 5, true);
            assert!(!health.check(seconds(second), STALL));
        }
        health.report(seconds(30), 5, true);
        assert!(health.check(seconds(30), STALL), "ten seconds after the last step");
        assert!(!health.check(seconds(31), STALL), "that is known already");
        assert!(!health.report(seconds(32), 5, true) && health.is_stalled());
        assert!(health.report(seconds(33), 6, true) && !health.is_stalled());
        assert!(!health.check(seconds(42), STALL));
    }

    #[test]
    fn a_node_that_says_nothing_is_stalled_and_recovers_when_it_speaks() {
        let mut health = Health::new(Duration::ZERO);
        assert!(!health.check(seconds(9), STALL) && health.check(seconds(10), STALL));
        assert!(health.report(seconds(11), 0, false));
        assert!(!health.check(seconds(12), STALL));
    }

    #[test]
    fn time_in_which_this_process_slept_does_not_count() {
        let (mut time, start) = (RunningTime::new(STALL), origin());
        assert_eq!(time.look(start), Duration::ZERO);
        assert_eq!(time.look(start + seconds(1)), seconds(1));
        assert_eq!(time.next_look(), Some(start + seconds(1) + STALL / 8));
        assert_eq!(time.look(start + seconds(3600)), seconds(1) + STALL / 8);
        assert_eq!(time.now(), seconds(1) + STALL / 8);
    }
}
