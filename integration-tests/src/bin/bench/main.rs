//! Measures Baton on this machine (scripts/bench builds and runs it).
#![allow(clippy::print_stdout, reason = "a measuring program prints its figures")]

mod adapters;
mod coordinator;
mod engine;
mod first_token;
mod gaps;
mod interfere;
mod machine;
mod memory;
mod mixed;
mod overload;
mod pin;
mod ratio;
mod report;
mod roofline;
mod steps;
mod stops;
mod structured;
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
    /// What the coordinator costs by itself: requests a second, CPU, latency, memory.
    Coordinator(coordinator::Args),
    /// What prompts do to running decodes: on nodes of their own, and on one node for both.
    Interfere(interfere::Args),
    /// How far the time to first token that the server tells is from the one that clients see.
    FirstToken(first_token::Args),
    /// What requests that wait cost those that are served.
    Overload(overload::Args),
    /// Splits of the same cores into prefill and decode nodes, under the same load; another server beside them.
    Ratio(ratio::Args),
    /// Resident memory of a prefill and a decode node, as started and with the KV pool used.
    Memory(memory::Args),
    /// What stop strings cost while tokens are generated.
    Stops(stops::Args),
    /// What a JSON schema costs per token.
    Structured(structured::Args),
    /// What adapters cost a step, used and unused.
    Adapters(adapters::Args),
}

fn main() -> Result<()> {
    match Args::parse().what {
        What::Engine(args) => engine::run(&args),
        What::Coordinator(args) => coordinator::run(&args),
        What::Interfere(args) => interfere::run(&args),
        What::FirstToken(args) => first_token::run(&args),
        What::Overload(args) => overload::run(&args),
        What::Ratio(args) => ratio::run(&args),
        What::Memory(args) => memory::run(&args),
        What::Stops(args) => stops::run(&args),
        What::Structured(args) => structured::run(&args),
        What::Adapters(args) => adapters::run(&args),
    }
}
