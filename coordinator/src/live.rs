//! The last minutes of the coordinator, for pages and tools of operators: counted by the HTTP layer with an addition each, and
//! sampled at a steady pace into [`crate::core::series`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use runtime::clock::Clock;
use tokio::time::{MissedTickBehavior, interval};

use crate::core::series::latency::{BUCKETS, Counts, bucket};
use crate::core::series::{Series, Shape, Totals};
use crate::core::types::ClusterStatus;
use crate::handle::CoordinatorHandle;

/// Time between two samples.
pub const STEP: Duration = Duration::from_secs(2);
/// A quarter of an hour of points, and quantiles and rates of a minute.
const SHAPE: Shape = Shape {
    points: 450,
    window: 30,
};

/// Numbers of times, by bucket.
struct Times(Vec<AtomicU64>);

impl Times {
    fn new() -> Self {
        Self((0..BUCKETS).map(|_| AtomicU64::new(0)).collect())
    }

    fn add(&self, time: Duration) {
        if let Some(count) = self.0.get(bucket(time)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn counts(&self) -> Counts {
        Counts::of(self.0.iter().map(|count| count.load(Ordering::Relaxed)))
    }
}

/// See the head of the file.
pub struct Live {
    clock: Clock,
    started: Instant,
    /// Tells this run of the process from others.
    boot: String,
    ttft: Times,
    itl: Times,
    answered: AtomicU64,
    failed: AtomicU64,
    prompt_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    series: Mutex<Series>,
}

impl Live {
    /// Begins now.
    pub fn new(clock: Clock) -> Self {
        let started = clock.now();
        Self {
            clock,
            started,
            boot: format!("{}-{}", clock.unix_seconds(), std::process::id()),
            ttft: Times::new(),
            itl: Times::new(),
            answered: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            generated_tokens: AtomicU64::new(0),
            series: Mutex::new(Series::new(started, SHAPE)),
        }
    }

    /// When it began.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// A name that no other run of the process has.
    pub fn boot(&self) -> &str {
        &self.boot
    }

    /// Now.
    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    /// The points.
    pub fn series(&self) -> MutexGuard<'_, Series> {
        // Whoever panicked while it was locked left points that are whole: a point is put in as the last step.
        self.series.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a sample.
    pub fn sample(&self, status: &ClusterStatus) {
        let of = |total: &AtomicU64| total.load(Ordering::Relaxed);
        let totals = Totals {
            answered: of(&self.answered),
            failed: of(&self.failed),
            prompt_tokens: of(&self.prompt_tokens),
            generated_tokens: of(&self.generated_tokens),
            ttft: self.ttft.counts(),
            itl: self.itl.counts(),
        };
        self.series().push(self.now(), totals, status);
    }

    pub(crate) fn admitted(&self, prompt_tokens: u64) {
        self.prompt_tokens.fetch_add(prompt_tokens, Ordering::Relaxed);
    }

    pub(crate) fn first_token(&self, time: Duration) {
        self.ttft.add(time);
    }

    pub(crate) fn gap(&self, time: Duration) {
        self.itl.add(time);
    }

    pub(crate) fn token(&self) {
        self.generated_tokens.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn answered(&self) {
        self.answered.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }
}

/// Takes samples for as long as the process runs.
pub async fn keep_sampling(live: Arc<Live>, handle: CoordinatorHandle) {
    let mut ticks = interval(STEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        live.sample(&handle.status());
    }
}
