//! Measures Baton on this machine (scripts/bench builds and runs it).
#![allow(clippy::print_stdout, reason = "a measuring program prints its figures")]

mod engine;
mod machine;
mod report;
mod roofline;
mod unit;
mod yardstick;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Measures Baton on this machine.
#[derive(Parser)]
#[command(name = "scripts/bench")]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Prefill and decode speed of the engine, beside what the machine can do.
    Engine(engine::Args),
}

fn main() -> Result<()> {
    match Args::parse().what {
        What::Engine(args) => engine::run(&args),
    }
}
