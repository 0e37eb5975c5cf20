//! A registration that lives as long as its lease: what it needs next. Times are since some start.
//!
//! ```text
//! Absent --granted--> Leased --put--> Registered --(a third of the lease has gone)--> keep alive --renewed--> Registered
//!    ^                                                     |
//!    '---- the lease is gone: told so, or nobody answered until it must have ended
//! ```

use std::time::Duration;

/// Shortest wait after a failure.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// A lease is renewed when this part of it has gone.
const RENEW_AFTER: u32 = 3;

/// A wait that grows with every failure in a row, up to a bound.
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Backoff {
    /// Starts short and doubles up to `longest`.
    pub fn new(longest: Duration) -> Self {
        Self {
            next: FIRST_WAIT.min(longest),
            longest,
        }
    }

    /// How long to wait after one more failure.
    pub fn failed(&mut self) -> Duration {
        let wait = self.next;
        self.next = (self.next * 2).min(self.longest);
        wait
    }

    /// It worked: the next failure waits shortly again.
    pub fn worked(&mut self) {
        self.next = FIRST_WAIT.min(self.longest);
    }
}

/// What a registration needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A lease.
    Grant,
    /// Its key, under this lease.
    Put(i64),
    /// This lease kept alive.
    KeepAlive(i64),
    /// Nothing until then.
    Wait(Duration),
}

#[derive(Debug)]
enum State {
    Absent,
    Leased {
        lease: i64,
        until: Duration,
    },
    Registered {
        lease: i64,
        renew: Duration,
        until: Duration,
    },
}

/// The state of a registration.
#[derive(Debug)]
pub struct LeaseKeeper {
    state: State,
    backoff: Backoff,
    /// Not before this, after a failure.
    pause: Option<Duration>,
}

impl LeaseKeeper {
    /// Not registered yet. `longest_wait` bounds the pause after failures.
    pub fn new(longest_wait: Duration) -> Self {
        Self {
            state: State::Absent,
            backoff: Backoff::new(longest_wait),
            pause: None,
        }
    }

    /// What it needs now.
    pub fn need(&mut self, now: Duration) -> Need {
        if let State::Leased { until, .. } | State::Registered { until, .. } = self.state
            && now >= until
        {
            self.state = State::Absent;
        }
        if let Some(pause) = self.pause.filter(|pause| now < *pause) {
            return Need::Wait(pause);
        }
        match self.state {
            State::Absent => Need::Grant,
            State::Leased { lease, .. } => Need::Put(lease),
            State::Registered { lease, renew, .. } if now >= renew => Need::KeepAlive(lease),
            State::Registered { renew, .. } => Need::Wait(renew),
        }
    }

    /// A lease of length `ttl`, asked for at `asked`, has been granted.
    pub fn granted(&mut self, lease: i64, ttl: Duration, asked: Duration) {
        self.well();
        self.state = State::Leased {
            lease,
            until: asked + ttl,
        };
    }

    /// The key is there; `ttl` as granted, `now` when.
    pub fn registered(&mut self, ttl: Duration, now: Duration) {
        self.well();
        if let State::Leased { lease, until } = self.state {
            let renew = now + ttl / RENEW_AFTER;
            self.state = State::Registered { lease, renew, until };
        }
    }

    /// The lease lives another `ttl`, as asked for at `asked`; a `ttl` of zero: it is gone.
    pub fn renewed(&mut self, ttl: Duration, asked: Duration) {
        self.well();
        if ttl.is_zero() {
            self.state = State::Absent;
        } else if let State::Registered { lease, .. } = self.state {
            self.state = State::Registered {
                lease,
                renew: asked + ttl / RENEW_AFTER,
                until: asked + ttl,
            };
        }
    }

    /// The lease is gone, as etcd says.
    pub fn gone(&mut self) {
        self.state = State::Absent;
    }

    /// Nobody answered, or what was answered helps nothing; tried again later.
    pub fn failed(&mut self, now: Duration) {
        self.pause = Some(now + self.backoff.failed());
    }

    /// The lease, while there is one.
    pub fn lease(&self) -> Option<i64> {
        match self.state {
            State::Absent => None,
            State::Leased { lease, .. } | State::Registered { lease, .. } => Some(lease),
        }
    }

    /// Whether the key is there, as far as is known.
    pub fn is_registered(&self) -> bool {
        matches!(self.state, State::Registered { .. })
    }

    fn well(&mut self) {
        self.backoff.worked();
        self.pause = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(9);

    fn registered(at: Duration) -> LeaseKeeper {
        let mut keeper = LeaseKeeper::new(Duration::from_secs(2));
        assert_eq!(keeper.need(at), Need::Grant);
        keeper.granted(7, TTL, at);
        assert_eq!(keeper.need(at), Need::Put(7));
        keeper.registered(TTL, at);
        keeper
    }

    #[test]
    fn a_lease_is_renewed_after_a_third_of_it() {
        let t = Duration::from_secs(100);
        let mut keeper = registered(t);
        assert!(keeper.is_registered());
        assert_eq!(keeper.need(t), Need::Wait(t + TTL / 3));
        assert_eq!(keeper.need(t + TTL / 3), Need::KeepAlive(7));
        keeper.renewed(TTL, t + TTL / 3);
        assert_eq!(keeper.need(t + TTL / 3), Need::Wait(t + TTL / 3 * 2));
        assert_eq!(keeper.lease(), Some(7));
    }

    #[test]
    fn a_lost_lease_is_replaced_and_its_key_put_again() {
        let t = Duration::from_secs(100);
        let mut keeper = registered(t);
        keeper.renewed(Duration::ZERO, t + TTL / 3);
        assert!(!keeper.is_registered());
        assert_eq!(keeper.need(t + TTL / 3), Need::Grant);
        keeper.granted(8, TTL, t + TTL / 3);
        assert_eq!(keeper.need(t + TTL / 3), Need::Put(8));
        keeper.gone();
        assert_eq!(keeper.need(t + TTL / 3), Need::Grant);
    }

    #[test]
    fn while_nobody_answers_it_waits_longer_and_longer_and_gives_the_lease_up_when_it_must_have_ended() {
        let t = Duration::from_secs(100);
        let mut keeper = registered(t);
        let mut now = t + TTL / 3;
        let (mut asked, mut waits) = (0, Vec::new());
        while now < t + TTL {
            match keeper.need(now) {
                Need::KeepAlive(7) => {
                    asked += 1;
                    keeper.failed(now);
                }
                Need::Wait(until) => {
                    waits.push(until - now);
                    now = until;
                }
                other => panic!("{other:?} at {:?}", now - t),
            }
        }
        assert_eq!(waits[..5], [200, 400, 800, 1_600, 2_000].map(Duration::from_millis));
        assert!(asked >= 5);
        assert_eq!(keeper.need(now), Need::Grant, "etcd has forgotten it by now");
        keeper.granted(9, TTL, now);
        keeper.registered(TTL, now);
        keeper.failed(now + TTL / 3);
        assert_eq!(
            keeper.need(now + TTL / 3),
            Need::Wait(now + TTL / 3 + Duration::from_millis(200)),
            "the waits are short again"
        );
    }
}
