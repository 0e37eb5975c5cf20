//! The one place that reads clocks. Everything else gets `Instant` values as arguments.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Reads the machine's clocks. A value, so that a function's signature says that it looks at the time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock;

impl Clock {
    /// Monotonic time, for durations and deadlines.
    #[allow(clippy::disallowed_methods, reason = "this is the one reader of the monotonic clock")]
    pub fn now(self) -> Instant {
        Instant::now()
    }

    /// Wall-clock time, for what people read: `created` fields, certificates.
    #[allow(clippy::disallowed_methods, reason = "this is the one reader of the wall clock")]
    pub fn wall_time(self) -> SystemTime {
        SystemTime::now()
    }

    /// Wall-clock time in whole seconds since 1970-01-01 UTC; 0 if the clock stands before that.
    pub fn unix_seconds(self) -> u64 {
        self.wall_time()
            .duration_since(UNIX_EPOCH)
            .unwrap_or(Duration::ZERO)
            .as_secs()
    }
}
