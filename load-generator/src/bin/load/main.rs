//! `load`: sends load to a server and says what its clients see (scripts/bench load builds and runs it).

mod args;
mod choices;
mod commands;
mod own_cost;

use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = args::Cli::read(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let done = runtime
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(commands::execute(cli)));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without the backtrace: what went wrong is the server's or the caller's.
            eprintln!("load: {error:#}");
            ExitCode::FAILURE
        }
    }
}
