//! The long form of the test `upheaval`: every node and coordinator killed 20 times, every node frozen for 5 s and cut off;
//! losses and delays; 200 streams.
//!
//! `cargo build --release --workspace --bins --example upheaval && target/release/examples/upheaval [KILLS] [SEED]`

use std::time::Duration;

use anyhow::{Context, Result};
use integration_tests::upheaval::{Plan, Upheaval};

#[tokio::main]
async fn main() -> Result<()> {
    let number = |nth, default: u64| {
        let given = std::env::args().nth(nth);
        given.map_or(Ok(default), |word| {
            word.parse().with_context(|| format!("{word} is no number"))
        })
    };
    let plan = Plan {
        kills: number(1, 20)? as usize,
        coordinator_kills: number(1, 20)? as usize,
        freezes: 1,
        frozen: Duration::from_secs(5),
        cuts: 2,
        bad_weather: Duration::from_secs(20),
        streams: 200,
    };
    Upheaval::begin(&plan, number(2, 1)?).await?.run(&plan).await
}
