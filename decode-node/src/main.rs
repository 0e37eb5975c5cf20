//! The decode node's process.

use std::process::ExitCode;

use clap::Parser;
use config::ConfigArgs;
use decode_node::role::DecodeRole;
use protocol::ids::Role;

/// Baton decode node: takes KV caches over and runs the generation loop.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    config: ConfigArgs,
}

fn main() -> ExitCode {
    let args = Args::parse();
    node_shell::cli::main(&args.config, Role::Decode, DecodeRole::new)
}
