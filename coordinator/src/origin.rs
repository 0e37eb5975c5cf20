//! A point in time to count from, for the tests of the core: the core itself reads no clock.

use std::time::Instant;

use runtime::clock::Clock;

/// Any instant serves.
pub(crate) fn origin() -> Instant {
    Clock.now()
}
