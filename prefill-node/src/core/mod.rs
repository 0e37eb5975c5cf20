//! Decisions of a prefill node: pure.

#![deny(clippy::wildcard_enum_match_arm)]

pub mod push_schedule;
