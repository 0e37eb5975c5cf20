//! `coordinator status`, `nodes`, `drain`, `undrain`, `role`, `audit` and `explain`: the admin plane at a terminal.
//!
//! They end with 0 if all is as it was asked for; with 1 if it is not: nobody answers, there is no such node, an audit finds
//! something; and with 2 if the command line is wrong. `--json` prints what the admin plane sends, as it is.

mod audit;
mod client;
mod explain;
pub mod format;
mod orders;
mod screen;
mod status;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use config::OperatorArgs;
use protocol::ids::Role;

use self::client::Admin;
use self::screen::Screen;

/// What operators ask for.
#[derive(Clone, Debug, Subcommand)]
pub enum ConsoleCommand {
    /// The cluster at a glance: nodes, KV use, queues, latencies and rates of the last minute.
    Status(WatchArgs),
    /// The connected nodes.
    Nodes(WatchArgs),
    /// Give a node nothing new; what runs there is finished.
    Drain(DrainArgs),
    /// Let a drained node take jobs again.
    Undrain(NodeArgs),
    /// Change what a node serves: prefill, decode or both.
    Role(RoleArgs),
    /// Hold every KV block of every node against what is booked; ends with 1 if something is wrong.
    Audit(AuditArgs),
    /// What became of a request, where its time went, and why it went where it went.
    Explain(ExplainArgs),
}

/// Arguments of what can be watched.
#[derive(Args, Clone, Debug)]
pub struct WatchArgs {
    #[command(flatten)]
    operator: OperatorArgs,
    /// Print what the admin plane sends, as it is.
    #[arg(long)]
    json: bool,
    /// Again and again, every SECONDS (2): in place in a terminal, block by block elsewhere.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = interval)]
    watch: Option<Duration>,
}

/// Arguments of `drain`.
#[derive(Args, Clone, Debug)]
pub struct DrainArgs {
    #[command(flatten)]
    node: NodeArgs,
    /// Move what generates there to other nodes at once, instead of letting it finish.
    #[arg(long = "move")]
    moving: bool,
    #[command(flatten)]
    wait: WaitArgs,
}

/// Arguments of `role`.
#[derive(Args, Clone, Debug)]
pub struct RoleArgs {
    #[command(flatten)]
    node: NodeArgs,
    /// What it is to serve: prefill, decode or both.
    #[arg(value_name = "ROLE", value_parser = role)]
    role: Role,
    #[command(flatten)]
    wait: WaitArgs,
}

/// Which node.
#[derive(Args, Clone, Debug)]
pub struct NodeArgs {
    /// Name of the node.
    #[arg(value_name = "NODE")]
    name: String,
    #[command(flatten)]
    operator: OperatorArgs,
    /// Print what the admin plane sends, as it is.
    #[arg(long)]
    json: bool,
}

/// Whether to wait.
#[derive(Args, Clone, Debug)]
pub struct WaitArgs {
    /// Wait until it is so.
    #[arg(long)]
    wait: bool,
    /// Longest wait; afterwards it is an error.
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = interval, requires = "wait")]
    timeout: Duration,
}

/// Arguments of `audit`.
#[derive(Args, Clone, Debug)]
pub struct AuditArgs {
    #[command(flatten)]
    operator: OperatorArgs,
    /// Print what the admin plane sends, as it is.
    #[arg(long)]
    json: bool,
}

/// Arguments of `explain`.
#[derive(Args, Clone, Debug)]
pub struct ExplainArgs {
    /// The request's id: `x-request-id` of its answer.
    #[arg(value_name = "REQUEST")]
    request: String,
    #[command(flatten)]
    operator: OperatorArgs,
    /// Print what the admin plane sends, as it is.
    #[arg(long)]
    json: bool,
}

/// Why a command does not end with 0.
#[derive(Debug)]
pub enum Trouble {
    /// The command line is wrong.
    Usage(String),
    /// Nobody answers.
    Silent(String),
    /// There is no such thing.
    Missing(String),
    /// Something else is not as it should be.
    Wrong(String),
    /// All has been said already.
    Told,
    /// Nobody reads what is written: no trouble at all.
    Unread,
}

/// Carries a command out; how the process ends.
pub fn run(command: ConsoleCommand) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = match runtime {
        Ok(runtime) => runtime.block_on(carry_out(command)),
        Err(error) => Err(Trouble::Wrong(format!("cannot start the async runtime: {error}"))),
    };
    match done {
        Ok(()) | Err(Trouble::Unread) => ExitCode::SUCCESS,
        Err(Trouble::Told) => ExitCode::from(1),
        Err(Trouble::Usage(what)) => {
            screen::complain(&what);
            ExitCode::from(2)
        }
        Err(Trouble::Silent(what) | Trouble::Missing(what) | Trouble::Wrong(what)) => {
            screen::complain(&what);
            ExitCode::from(1)
        }
    }
}

async fn carry_out(command: ConsoleCommand) -> Result<(), Trouble> {
    let mut screen = Screen::new();
    match command {
        ConsoleCommand::Status(args) => watched(&args, &mut screen, "status", status::text).await,
        ConsoleCommand::Nodes(args) => watched(&args, &mut screen, "nodes", status::nodes).await,
        ConsoleCommand::Drain(args) => orders::drain(&args, &mut screen).await,
        ConsoleCommand::Undrain(args) => orders::undrain(&args, &mut screen).await,
        ConsoleCommand::Role(args) => orders::role(&args, &mut screen).await,
        ConsoleCommand::Audit(args) => {
            let answer = Admin::new(&args.operator)?.get(&["debug", "blocks"]).await?;
            // Whoever stops reading early still gets the verdict.
            match screen.show(&answer, args.json, audit::text) {
                Ok(()) | Err(Trouble::Unread) => audit::verdict(&answer.value),
                Err(other) => Err(other),
            }
        }
        ConsoleCommand::Explain(args) => {
            let path = ["debug", "decisions", &args.request];
            let answer = Admin::new(&args.operator)?.get(&path).await?;
            screen.show(&answer, args.json, explain::text)
        }
    }
}

/// Shows an answer once, or again and again: then it goes on when nobody answers for a while.
async fn watched(
    args: &WatchArgs,
    screen: &mut Screen,
    path: &str,
    text: fn(&serde_json::Value) -> String,
) -> Result<(), Trouble> {
    let admin = Admin::new(&args.operator)?;
    let Some(pause) = args.watch else {
        return screen.show(&admin.get(&[path]).await?, args.json, text);
    };
    loop {
        match admin.get(&[path]).await {
            Ok(answer) => screen.show_again(&answer, args.json, text)?,
            Err(Trouble::Silent(what)) => screen::complain(&format!("{what}; trying again")),
            Err(other) => return Err(other),
        }
        tokio::time::sleep(pause).await;
    }
}

/// Seconds: from a tenth to a day.
fn interval(text: &str) -> Result<Duration, String> {
    let seconds: Option<f64> = text.parse().ok().filter(|seconds| (0.1..=86_400.0).contains(seconds));
    let seconds = seconds.ok_or_else(|| "must be a number of seconds from 0.1 to 86400".to_owned())?;
    Ok(Duration::from_secs_f64(seconds))
}

fn role(word: &str) -> Result<Role, String> {
    let known = [Role::Prefill, Role::Decode, Role::Both];
    let found = known.into_iter().find(|role| role.as_str() == word);
    found.ok_or_else(|| "must be prefill, decode or both".to_owned())
}
