//! Sequences, scheduler, block manager and prefix cache: everything that decides what a step computes. Pure: the whole
//! crate is a core (no threads, no clock, no I/O).

pub mod plan;
pub mod runner;
