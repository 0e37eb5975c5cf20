//! Real processes, real clients, and the rules of the repository. Nobody depends on this crate.
//!
//! * [`cpu_time`]: CPU time of threads, processes and the machine.
//! * [`cluster`]: a coordinator and its nodes as processes on loopback, with certificates of their own.
//! * [`files`]: where binaries and models are.
//! * [`changed`]: copies of the tiny checkpoint that differ in one thing.
//! * [`peft`]: adapters for the tiny checkpoint.
//! * [`client`]: requests and server-sent events.
//! * [`wire`]: a client that sends whatever bytes a test wants.
//! * [`ports`]: ports for servers that will be started in a moment.
//! * [`etcd`]: a real etcd server.
//! * [`hub`]: a stand-in for a hub of models.
//! * [`python`]: scripts with the clients that others have written.
//! * [`scene`]: a pair of nodes that is watched while a test mistreats it.
//! * [`ask`], [`load`]: requests whose answers are known, sent while something happens to the cluster.
//! * [`trial`]: a cluster under trial.
//! * [`vitals`]: what a cluster says about its own state.
//! * [`storm`]: clients that go away.
//! * [`stranger`]: those who try to get in without the right to, and their noise.
//! * [`random`]: seeded random numbers.
//! * [`exact`]: answers and what they must be, to the bit.

pub mod ask;
pub mod changed;
pub mod client;
pub mod cluster;
pub mod collector;
pub mod cpu_time;
pub mod etcd;
pub mod exact;
pub mod files;
#[path = "../../model-hub/tests/standin/mod.rs"]
pub mod hub;
pub mod load;
pub mod measures;
pub mod peft;
pub mod ports;
pub mod process;
pub mod prometheus;
pub mod python;
pub mod random;
pub mod relay;
pub mod scene;
pub mod storm;
pub mod stranger;
pub mod trial;
pub mod upheaval;
pub mod vitals;
pub mod wire;
