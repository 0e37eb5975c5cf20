//! The process of a node whose role can be switched.

use std::process::ExitCode;

use clap::Parser;
use config::ConfigArgs;
use node::BothRoles;
use protocol::ids::Role;

/// Baton node: prefill, decode or both, as `node.role` says at the start and as operators say later.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    config: ConfigArgs,
}

fn main() -> ExitCode {
    let args = Args::parse();
    node_shell::cli::main(&args.config, Role::Both, BothRoles::new)
}
