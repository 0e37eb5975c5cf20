//! When what has failed is tried again.

use std::time::Duration;

use crate::error::HubError;

/// First wait.
const FIRST: Duration = Duration::from_millis(500);
/// Longest wait, if the server asks for none.
const LONGEST: Duration = Duration::from_secs(30);
/// Longest wait that a server may ask for.
const LONGEST_ASKED: Duration = Duration::from_secs(300);

/// What became of a try.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// It may go better next time.
    Again {
        /// What went wrong.
        why: String,
        /// How long the server asks to wait.
        after: Option<Duration>,
    },
    /// It will not.
    Final(HubError),
}

impl Trouble {
    pub(crate) fn again(why: impl Into<String>) -> Self {
        Self::Again {
            why: why.into(),
            after: None,
        }
    }
}

impl From<HubError> for Trouble {
    fn from(error: HubError) -> Self {
        Self::Final(error)
    }
}

/// Counts the failures of one thing.
#[derive(Debug)]
pub(crate) struct Tries {
    what: String,
    most: u32,
    failed: u32,
}

impl Tries {
    pub(crate) fn new(what: impl Into<String>, most: u32) -> Self {
        Self {
            what: what.into(),
            most,
            failed: 0,
        }
    }

    /// It got further: what failed before is forgotten.
    pub(crate) fn progressed(&mut self) {
        self.failed = 0;
    }

    /// How long to wait before the next try.
    ///
    /// # Errors
    /// There is none: it is useless, there were enough, or the server asks for more patience than there is.
    pub(crate) fn failed(&mut self, trouble: Trouble) -> Result<Duration, HubError> {
        let (why, after) = match trouble {
            Trouble::Final(error) => return Err(error),
            Trouble::Again { why, after } => (why, after),
        };
        self.failed += 1;
        if self.failed >= self.most || after.is_some_and(|after| after > LONGEST_ASKED) {
            return Err(HubError::GaveUp {
                what: self.what.clone(),
                tries: self.failed,
                last: why,
            });
        }
        let wait = after.unwrap_or_else(|| backoff(self.failed, std::process::id()));
        tracing::warn!(what = self.what, why, wait_ms = wait.as_millis() as u64, "trying again");
        Ok(wait)
    }
}

/// Twice as long each time, and up to a quarter longer in one process than in another.
fn backoff(failed: u32, process: u32) -> Duration {
    let plain = FIRST.saturating_mul(1 << failed.saturating_sub(1).min(16)).min(LONGEST);
    plain + plain / 4 * (process.wrapping_mul(2_654_435_761) >> 24) / 256
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_and_are_bounded() {
        let plain: Vec<u128> = (1..9).map(|n| backoff(n, 0).as_millis()).collect();
        assert_eq!(plain, [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]);
        for process in [1, 7, 4_000_000_000] {
            let wait = backoff(40, process);
            assert!(wait >= LONGEST && wait < LONGEST + LONGEST / 4, "{wait:?}");
        }
    }

    #[test]
    fn the_last_failure_is_told_and_progress_counts_anew() {
        let mut tries = Tries::new("x", 2);
        tries.failed(Trouble::again("a")).unwrap();
        tries.progressed();
        tries.failed(Trouble::again("b")).unwrap();
        let error = tries.failed(Trouble::again("c")).unwrap_err().to_string();
        assert_eq!(error, "x: c (failed tries in a row: 2)");
        let patient = |seconds| Trouble::Again {
            why: "busy".to_owned(),
            after: Some(Duration::from_secs(seconds)),
        };
        assert_eq!(Tries::new("x", 2).failed(patient(7)).unwrap(), Duration::from_secs(7));
        assert!(Tries::new("x", 2).failed(patient(301)).is_err());
    }
}
