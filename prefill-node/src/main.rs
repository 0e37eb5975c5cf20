//! The prefill node's process.

use std::process::ExitCode;

use clap::Parser;
use config::ConfigArgs;
use prefill_node::role::PrefillRole;
use protocol::ids::Role;

/// Baton prefill node: computes prompts and first tokens, and ships the KV cache.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    config: ConfigArgs,
}

fn main() -> ExitCode {
    let args = Args::parse();
    node_shell::cli::main(&args.config, Role::Prefill, PrefillRole::new)
}
