//! Everything the coordinator decides. Pure: facts in, actions out; time is an argument.
#![deny(clippy::wildcard_enum_match_arm)]

pub mod admission;
pub mod block_audit;
pub mod cluster;
pub mod decisions;
pub mod journey;
pub mod ledger;
pub mod nodes;
pub mod phases;
pub mod prefix_index;
pub mod queue;
pub mod rates;
pub mod recent;
pub mod request;
pub mod routing;
pub mod series;
pub mod stop;
pub mod types;
mod words;

pub(crate) use words::words;

#[cfg(test)]
pub(crate) mod fixtures;
