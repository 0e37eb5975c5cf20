//! Kills, freezes, cuts, losses and delays in a cluster with two of everything; the long form is the example `upheaval`.

use std::time::Duration;

use anyhow::Result;
use integration_tests::upheaval::{Plan, Upheaval};

const SHORT: Plan = Plan {
    kills: 1,
    coordinator_kills: 1,
    freezes: 1,
    frozen: Duration::from_millis(2_500),
    cuts: 1,
    bad_weather: Duration::from_secs(4),
    streams: 48,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_happens_answers_are_exact_or_errors_are_documented() -> Result<()> {
    Upheaval::begin(&SHORT, 71).await?.run(&SHORT).await
}
