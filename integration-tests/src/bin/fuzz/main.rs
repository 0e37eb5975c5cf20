//! Fuzzers of everything that strangers, clients and files say: HTTP bodies, control messages, KV frames, GGUF files,
//! model directories, configuration.
//!
//! ```text
//! fuzz TARGET [--seconds N] [--seed N] [--keep]     fuzz; exit 1 if something was found
//! fuzz TARGET --input FILE                          one input, as it was found
//! ```
//!
//! Inputs are mutated from a corpus (`integration-tests/fuzz-corpus/TARGET`, and seeds that the target makes), in the process
//! that is tested. What an input leads to (an error's words, the shape of a result, numbers left out) is its *outcome*; an
//! input with a new outcome joins the corpus of the run. A panic, a broken promise of the target, too much memory, or no end
//! within a bound is a finding: its input is written to a file. A supervisor watches the worker, so that an input that kills
//! or hangs the process is found too.

mod corpus;
mod mutate;
mod supervisor;
mod targets;
mod worker;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Parser;

/// What the command line says.
#[derive(Clone, Debug, Parser)]
struct Args {
    /// What is fuzzed: http, control, kv, gguf, safetensors or config; planted: errors planted to test the fuzzer.
    target: String,
    /// How long, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Seed of the random numbers; by default one that is new.
    #[arg(long)]
    seed: Option<u64>,
    /// Write short inputs with new outcomes into the repository's corpus.
    #[arg(long)]
    keep: bool,
    /// Run this input only.
    #[arg(long)]
    input: Option<PathBuf>,
    /// The folder of inputs to begin with; by default the repository's.
    #[arg(long)]
    corpus: Option<PathBuf>,
    /// Where findings are written.
    #[arg(long, default_value = "fuzz-findings")]
    findings: PathBuf,
    /// No progress for so many seconds is a hang.
    #[arg(long, default_value_t = 20)]
    hang_seconds: u64,
    /// Set by the supervisor: where the worker leaves the input it is at.
    #[arg(long, hide = true)]
    current: Option<PathBuf>,
}

impl Args {
    fn time(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

fn start(args: &Args) -> Result<bool> {
    let Some(target) = targets::find(&args.target) else {
        bail!(
            "no target {:?}: the targets are {}",
            args.target,
            targets::NAMES.join(", ")
        );
    };
    if let Some(path) = &args.input {
        return worker::single(&*target, &std::fs::read(path)?);
    }
    match &args.current {
        Some(current) => worker::run(&*target, args, current),
        None => supervisor::run(args),
    }
}

#[allow(clippy::print_stderr, reason = "what went wrong is for whoever started the program")]
fn main() -> ExitCode {
    match start(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("fuzz: {error:#}");
            ExitCode::from(2)
        }
    }
}
