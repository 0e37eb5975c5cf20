//! The cluster in one thread on a virtual clock: production cores, a fake model over real KV bytes, seeded faults.
//!
//! Life of a seed:
//! 1. [`scenario`] draws how large everything is and what goes wrong; [`workload`] what clients ask, and by a [`mod@reference`]
//!    run of a single engine what they must get.
//! 2. [`world`] lets it happen: the coordinator's core decides, [`node`]s run engines and hand KV over, the [`network`]
//!    delays, loses and breaks. Books are audited whenever something has happened.
//! 3. [`check`] compares every answer with the reference, bit for bit, and looks for what is left over.
//!
//! The same seed gives the same history, event by event ([`trace`]): a failure replays.
//!
//! What is production and what is not: coordinator, engine, push schedule, send and receive sessions are the production
//! cores. Their shells (tasks, threads, sockets, HTTP) are replaced by [`node`] and [`world`], which follow them.

pub mod check;
pub mod model;
pub mod network;
pub mod node;
pub mod random;
pub mod reference;
pub mod scenario;
pub mod text;
pub mod trace;
pub mod workload;
pub mod world;

use scenario::{Scenario, Size};
use world::{Tally, World};

/// What came of a seed.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// How often what happened.
    pub tally: Tally,
    /// Equal for equal histories.
    pub hash: u64,
}

/// Runs one seed. An error, or a panic of a core, says what is wrong. With `aloud` every event is printed.
pub fn run(seed: u64, size: Size, aloud: bool) -> anyhow::Result<Outcome> {
    run_scenario(seed, Scenario::of_seed(seed, size), aloud)
}

/// Late frames after aborts, with everything that may be wrong about frames: whether they change a byte that is not theirs,
/// or another request's answer.
pub fn run_late_frames(seed: u64, aloud: bool) -> anyhow::Result<Outcome> {
    run_scenario(seed, Scenario::late_frames(seed), aloud)
}

/// As [`run`], with a scenario of one's own.
pub fn run_scenario(seed: u64, scenario: Scenario, aloud: bool) -> anyhow::Result<Outcome> {
    let mut world = World::new(seed, scenario, aloud)?;
    world.run()?;
    world.check()?;
    Ok(Outcome {
        tally: world.tally,
        hash: world.hash(),
    })
}
