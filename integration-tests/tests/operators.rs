//! The commands of operators (`coordinator status`, `nodes`, `drain`, `undrain`, `role`, `audit`, `explain`) against a real
//! cluster: what they print, and with which status they end.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use integration_tests::cluster::{ADMIN_TOKEN, Cluster, ClusterSpec};
use integration_tests::files::binary;
use integration_tests::trial::{begin_with, spec};
use reqwest::Client;
use serde_json::{Value, json};

/// What has to fit into a terminal.
const WIDTH: usize = 100;

/// A command of this cluster's operators.
fn command(cluster: &Cluster, words: &[&str]) -> Result<Command> {
    let mut command = bare(words)?;
    command
        .args(["--admin", &cluster.admin_url()])
        .env("BATON_ADMIN_TOKEN", ADMIN_TOKEN);
    Ok(command)
}

/// The same, knowing nothing.
fn bare(words: &[&str]) -> Result<Command> {
    let mut command = Command::new(binary("coordinator")?);
    command
        .args(words)
        .env_remove("BATON_ADMIN_URL")
        .env_remove("BATON_ADMIN_TOKEN")
        .stdin(Stdio::null());
    Ok(command)
}

/// What a command ended with, and what it printed.
fn outcome(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// Carries a command out that must end well and say nothing else; what it printed.
fn told(cluster: &Cluster, words: &[&str]) -> Result<String> {
    let (code, out, err) = outcome(&command(cluster, words)?.output()?);
    ensure!(code == Some(0), "{words:?}: {code:?}\n{out}\n{err}");
    Ok(out)
}

fn fits(text: &str) -> Result<()> {
    let wide = text.lines().find(|line| line.chars().count() > WIDTH);
    ensure!(wide.is_none(), "{wide:?} in\n{text}");
    Ok(())
}

/// A command that must end with `code`, saying `says`.
fn refused(mut command: Command, code: i32, says: &str) -> Result<()> {
    let (got, out, err) = outcome(&command.output()?);
    ensure!(
        got == Some(code) && err.contains(says),
        "{command:?}: {got:?}\n{out}\n{err}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_see_the_cluster_and_what_became_of_a_request() -> Result<()> {
    let (cluster, client, known) = begin_with(spec(1, 1), 61, 40, (4, 20)).await?;
    known.burst(&client, &cluster.url(), 8).await?.all_exact()?;
    let status = told(&cluster, &["status"])?;
    fits(&status)?;
    for part in [
        "ready",
        "first token",
        "between tokens",
        "prefill-0",
        "decode-0",
        "serving",
        "KV BLOCKS",
    ] {
        ensure!(status.contains(part), "{part} in\n{status}");
    }
    let json: Value = serde_json::from_str(&told(&cluster, &["status", "--json"])?)?;
    ensure!(
        json["nodes"].as_array().map(Vec::len) == Some(2) && json["ready"] == true,
        "{json}"
    );
    let nodes = told(&cluster, &["nodes"])?;
    ensure!(nodes.lines().count() == 3, "{nodes}");
    let sent = told(&cluster, &["nodes", "--json"])?;
    let (_, asked) = cluster.admin(0, "GET", "/nodes", "").await?;
    ensure!(serde_json::from_str::<Value>(&sent)? == asked, "{sent} is not {asked}");

    let (_, recent) = cluster.admin(0, "GET", "/debug/requests?most=1", "").await?;
    let id = recent["ended"][0]["request"].as_str().context("nothing has ended")?;
    let why = told(&cluster, &["explain", id])?;
    fits(&why)?;
    for part in [
        id,
        "done, 1 attempt",
        "prefill-0 computes the prompt and hands over to decode-0",
        ">  prefill-0 + decode-0",
    ] {
        ensure!(why.contains(part), "{part} in\n{why}");
    }
    let json: Value = serde_json::from_str(&told(&cluster, &["explain", id, "--json"])?)?;
    ensure!(json["request"]["request"] == id, "{json}");
    let audit = told(&cluster, &["audit"])?;
    fits(&audit)?;
    ensure!(audit.starts_with("the books agree"), "{audit}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orders_are_given_and_waited_for() -> Result<()> {
    let spec = ClusterSpec { both: 1, ..spec(1, 1) };
    let cluster = Cluster::start(spec).await?;
    let body = json!({"inputs": "a long answer", "parameters": {"max_new_tokens": 250, "ignore_eos": true}});
    let url = format!("{}/generate", cluster.url());
    let answers = (0..6)
        .map(|_| tokio::spawn(Client::new().post(&url).json(&body).send()))
        .collect::<Vec<_>>();
    let drained = told(&cluster, &["drain", "decode-0", "--move", "--wait"])?;
    ensure!(drained == "decode-0 is empty\n", "{drained}");
    for answer in answers {
        let answer = answer.await??;
        ensure!(answer.status() == 200, "{}", answer.text().await?);
    }
    let state = |nodes: &str, node: &str| nodes.lines().find(|line| line.starts_with(node)).map(str::to_owned);
    let line = state(&told(&cluster, &["nodes"])?, "decode-0").context("no decode-0")?;
    ensure!(line.contains("draining"), "{line}");
    let back = told(&cluster, &["undrain", "decode-0"])?;
    ensure!(back == "decode-0 takes jobs again\n", "{back}");
    let role = told(&cluster, &["role", "both-0", "prefill", "--wait"])?;
    ensure!(role == "both-0 serves prefill\n", "{role}");
    let json: Value = serde_json::from_str(&told(&cluster, &["drain", "both-0", "--json"])?)?;
    ensure!(json["draining"] == true && json["node"] == "both-0", "{json}");
    refused(command(&cluster, &["role", "prefill-0", "decode"])?, 1, "certificate")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_is_said_and_ends_with_1_or_2() -> Result<()> {
    let mut cluster = Cluster::start(spec(1, 1)).await?;
    let of = |words: &[&str]| command(&cluster, words);
    refused(of(&["drain", "nobody"])?, 1, "no node named \"nobody\" is connected")?;
    refused(
        of(&["explain", "0123456789abcdef0123456789abcdef"])?,
        1,
        "nothing is kept",
    )?;
    refused(of(&["role", "decode-0", "boss"])?, 2, "prefill, decode or both")?;
    refused(of(&["drain"])?, 2, "NODE")?;
    refused(of(&["status", "--watch", "0"])?, 2, "0.1 to 86400")?;
    refused(of(&["drain", "decode-0", "--timeout", "3"])?, 2, "--wait")?;
    refused(bare(&["status"])?, 2, "--admin")?;
    refused(
        bare(&["status", "--admin", &cluster.admin_url()])?,
        2,
        "BATON_ADMIN_TOKEN",
    )?;
    let mut wrong = bare(&["nodes", "--admin", &cluster.admin_url()])?;
    wrong.env("BATON_ADMIN_TOKEN", "not-the-token-0123456789");
    refused(wrong, 1, "does not take this token")?;
    refused(
        bare(&["nodes", "--admin", "https://x:1", "--token", "t"])?,
        2,
        "http://HOST:PORT",
    )?;
    let mut public = bare(&["nodes", "--admin", &cluster.url()])?;
    public.env("BATON_ADMIN_TOKEN", ADMIN_TOKEN);
    refused(public, 1, "there is nothing under the path")?;

    // Everything from the coordinator's own file.
    let file = cluster.dir().join("baton.toml");
    let listen = cluster.admin_url().replace("http://", "");
    std::fs::write(
        &file,
        format!("[admin]\nlisten = \"{listen}\"\ntokens = [\"{ADMIN_TOKEN}\"]\n"),
    )?;
    let path = file.to_str().context("not UTF-8")?.to_owned();
    let (code, out, err) = outcome(&bare(&["nodes", "--config", &path])?.output()?);
    ensure!(code == Some(0) && out.contains("decode-0"), "{code:?} {out} {err}");

    // A node that does not answer an audit.
    cluster.process("prefill-0")?.signal(libc::SIGSTOP);
    let (code, out, err) = outcome(&command(&cluster, &["audit"])?.output()?);
    cluster.process("prefill-0")?.signal(libc::SIGCONT);
    ensure!(
        code == Some(1) && out.contains("prefill-0: it") && err.is_empty(),
        "{code:?} {out} {err}"
    );

    let mut again = command(&cluster, &["status"])?;
    cluster.kill("coordinator")?;
    refused(command(&cluster, &["status"])?, 1, "no answer from the admin plane")?;
    let (code, ..) = outcome(&again.output()?);
    ensure!(code == Some(1));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_watched_comes_block_by_block_and_a_reader_may_leave() -> Result<()> {
    let cluster = Cluster::start(spec(1, 1)).await?;
    let mut watch = command(&cluster, &["nodes", "--watch", "0.1"])?;
    let mut child = watch.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("piped")?).lines();
    let mut blocks = 0;
    while blocks < 3 {
        let line = lines.next().context("it ended")??;
        ensure!(!line.contains('\x1b'), "{line:?}");
        blocks += usize::from(line.starts_with("NODE"));
    }
    drop(lines);
    let output = child.wait_with_output()?;
    ensure!(
        output.status.code() == Some(0) && output.stderr.is_empty(),
        "{output:?}"
    );
    let mut json = command(&cluster, &["status", "--json", "--watch"])?;
    let mut child = json.stdout(Stdio::piped()).spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("piped")?).read_line(&mut line)?;
    let value: Value = serde_json::from_str(&line)?;
    ensure!(value["nodes"].is_array(), "{line}");
    // Nobody reads on: it ends by itself.
    ensure!(child.wait()?.code() == Some(0));
    Ok(())
}
