//! `main` of the fixed-role binaries.

use std::process::ExitCode;

use config::{Config, ConfigArgs};
use model_hub::Need;
use protocol::ids::Role;
use runtime::shutdown::Shutdown;
use runtime::telemetry;
use runtime::traces::{self, Service};

use crate::process::{Node, NodeContext, NodeError, NodeRole, load_model};
use crate::stats;

/// Runs a node of `role` to its end. Errors are one line on standard error and exit code 1.
pub fn main<R: NodeRole>(
    args: &ConfigArgs,
    role: Role,
    build: impl FnOnce(NodeContext) -> Result<R, String>,
) -> ExitCode {
    match start(args, role, build) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(role, &error);
            ExitCode::FAILURE
        }
    }
}

#[allow(
    clippy::print_stderr,
    reason = "the log may not be set up yet, and this line is for whoever started the process"
)]
fn report(role: Role, error: &NodeError) {
    eprintln!("{role}-node: {error}");
}

fn start<R: NodeRole>(
    args: &ConfigArgs,
    role: Role,
    build: impl FnOnce(NodeContext) -> Result<R, String>,
) -> Result<(), NodeError> {
    let config = config::load(args)?;
    if let Some(answer) = args.answer(&config)? {
        print(&answer);
        return Ok(());
    }
    telemetry::init_logging(&config.telemetry)?;
    // The compute thread needs the cores; two workers keep the network going.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|source| NodeError::System {
            what: "cannot start the async runtime",
            source,
        })?;
    runtime.block_on(serve(config, role, build))
}

#[allow(
    clippy::print_stdout,
    reason = "--print-config and --check answer on standard output"
)]
fn print(answer: &str) {
    print!("{answer}");
}

async fn serve<R: NodeRole>(
    mut config: Config,
    role: Role,
    build: impl FnOnce(NodeContext) -> Result<R, String>,
) -> Result<(), NodeError> {
    let shutdown = Shutdown::on_signals().map_err(|source| NodeError::System {
        what: "cannot install signal handlers",
        source,
    })?;
    // Without a reader there is no registry either: samples that nobody collects would pile up.
    if !config.node.metrics_listen.is_empty() {
        let metrics = telemetry::install_metrics(&config.telemetry, &stats::measures::<R>())?;
        telemetry::serve_metrics(&config.node.metrics_listen, metrics, shutdown.clone()).await?;
    }
    // Nobody hears of the node before it has its model.
    tokio::select! {
        here = model_hub::localise(&mut config.model, Need::Whole) => here?,
        () = shutdown.wait() => return Ok(()),
    }
    let model = load_model(&config)?;
    let telemetry = config.telemetry.clone();
    let node = Node::start(config, role, model, shutdown, build).await?;
    let hello = node.hello();
    tracing::info!(node = %hello.node, role = %role, address = %hello.address, layout = %hello.layout,
        blocks = hello.total_blocks, numerics = %hello.model.numerics, "ready");
    let service = Service {
        role: role.as_str(),
        instance: hello.node.to_string(),
    };
    let exported = traces::install(&telemetry, &service)?;
    let ended = node.run().await;
    if let Some(exported) = exported {
        exported.close().await;
    }
    ended
}
