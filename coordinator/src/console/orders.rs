//! `coordinator drain`, `undrain` and `role`: orders, and waiting until they are carried out.

use std::time::Duration;

use runtime::clock::Clock;
use serde_json::{Value, json};

use super::client::{Admin, Answer};
use super::format::{count, name, plain};
use super::screen::{Screen, note};
use super::{DrainArgs, NodeArgs, RoleArgs, Trouble, WaitArgs};

/// How often a node is looked at while it is waited for.
const LOOK: Duration = Duration::from_millis(250);

/// `coordinator drain`.
pub(super) async fn drain(args: &DrainArgs, screen: &mut Screen) -> Result<(), Trouble> {
    let admin = Admin::new(&args.node.operator)?;
    let path = ["nodes", &args.node.name, "drain"];
    let answer = admin.post(&path, json!({ "move": args.moving }).to_string()).await?;
    if !args.wait.wait {
        let node = name(&answer.value["node"]);
        return report(
            &args.node,
            screen,
            &answer,
            &format!("{node} gets nothing new; {}", load(&answer.value)),
        );
    }
    let idle = |node: &Value| {
        // Handoffs of other coordinators are in none of the first three.
        let busy = ["jobs", "running", "waiting", "reservations", "owned_blocks"]
            .into_iter()
            .any(|what| count(&node[what]) > 0);
        node["draining"] == true && !busy
    };
    match until(&admin, &args.node.name, &args.wait, idle).await? {
        Some(answer) => report(
            &args.node,
            screen,
            &answer,
            &format!("{} is empty", name(&answer.value["node"])),
        ),
        // A drained node may end: that is what it is drained for.
        None if args.node.json => Ok(()),
        None => screen.write(&format!("{} has left\n", plain(&args.node.name, 64))),
    }
}

/// `coordinator undrain`.
pub(super) async fn undrain(args: &NodeArgs, screen: &mut Screen) -> Result<(), Trouble> {
    let admin = Admin::new(&args.operator)?;
    let answer = admin.post(&["nodes", &args.name, "undrain"], String::new()).await?;
    report(
        args,
        screen,
        &answer,
        &format!("{} takes jobs again", name(&answer.value["node"])),
    )
}

/// `coordinator role`.
pub(super) async fn role(args: &RoleArgs, screen: &mut Screen) -> Result<(), Trouble> {
    let admin = Admin::new(&args.node.operator)?;
    let wanted = args.role.as_str();
    let path = ["nodes", &args.node.name, "role"];
    let mut answer = admin.post(&path, json!({ "role": wanted }).to_string()).await?;
    let mut said = format!("{} is told to serve {wanted}", name(&answer.value["node"]));
    if args.wait.wait {
        let there = until(&admin, &args.node.name, &args.wait, |node| node["role"] == wanted).await?;
        answer = there.ok_or_else(|| Trouble::Wrong(format!("{} has left", args.node.name)))?;
        said = format!("{} serves {wanted}", name(&answer.value["node"]));
    }
    report(&args.node, screen, &answer, &said)
}

fn report(args: &NodeArgs, screen: &mut Screen, answer: &Answer, said: &str) -> Result<(), Trouble> {
    if args.json {
        screen.write(&format!("{}\n", answer.text))
    } else {
        screen.write(&format!("{said}\n"))
    }
}

/// What a node has to do.
fn load(node: &Value) -> String {
    let of = |what: &str| count(&node[what]);
    format!(
        "{} jobs, {} running, {} waiting, {} blocks",
        of("jobs"),
        of("running"),
        of("waiting"),
        of("owned_blocks")
    )
}

/// Waits until a node is as it is wanted: as it is then; `None` if it has left.
async fn until(
    admin: &Admin,
    node: &str,
    args: &WaitArgs,
    wanted: impl Fn(&Value) -> bool,
) -> Result<Option<Answer>, Trouble> {
    let deadline = Clock.now() + args.timeout;
    let mut told = String::new();
    loop {
        let load = match admin.get(&["nodes", node]).await {
            Ok(answer) if wanted(&answer.value) => return Ok(Some(answer)),
            Ok(answer) => load(&answer.value),
            Err(Trouble::Missing(_)) => return Ok(None),
            Err(other) => return Err(other),
        };
        if Clock.now() >= deadline {
            let seconds = args.timeout.as_secs_f64();
            return Err(Trouble::Wrong(format!(
                "{node} is not there yet after {seconds} s: {load}"
            )));
        }
        if load != told {
            note(&format!("{}: {load}", plain(node, 64)));
            told = load;
        }
        tokio::time::sleep(LOOK).await;
    }
}
