//! Everything the coordinator decides. Pure: facts in, actions out; time is an argument.
#![deny(clippy::wildcard_enum_match_arm)]

pub mod types;
