//! What does not fit, with real processes: nodes that differ from the cluster are refused with a message that says what
//! differs, and processes that cannot start say why in one line.

use std::net::{TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use integration_tests::ask::{Ask, MODEL_NAME};
use integration_tests::changed::{changed_model, edit, replace};
use integration_tests::cluster::{Cluster, ClusterSpec};
use integration_tests::files::{binary, default_model, tiny_model};
use integration_tests::load::Known;
use integration_tests::random::Random;
use integration_tests::vitals::{Vitals, logged};
use reqwest::Client;
use runtime::clock::Clock;
use tempfile::TempDir;

/// A process that cannot start ends within this time.
const SOON: Duration = Duration::from_secs(10);

fn spec() -> ClusterSpec {
    ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_does_not_fit_is_told_what_differs() -> Result<()> {
    let mut cluster = Cluster::without_nodes(ClusterSpec { decode: 6, ..spec() })?;
    cluster.start_coordinator()?;
    cluster.start_node("prefill", 0)?;
    cluster.start_node("decode", 0)?;
    cluster.ready().await?;
    let client = Client::new();
    let asks = Ask::mixed(&mut Random::new(5), 8, 60, (1, 60));
    let known = Known::learn(&client, &cluster.url(), asks).await?;
    // The last weight of the file, by its lowest mantissa bits.
    let other_weight = changed_model(|dir| {
        edit(dir, "model.safetensors", |bytes| {
            let last = bytes.len() - 3;
            bytes[last] ^= 1;
        })
    })?;
    let other_words = changed_model(|dir| replace(dir, "tokenizer.json", "</s>", "<end>"))?;
    let path = |dir: &TempDir| format!("model.path={}", dir.path().display());
    let misfits = [
        (path(&other_weight), "weights"),
        (path(&other_words), "tokenizer"),
        ("engine.kv_block_tokens=32".to_owned(), "block"),
        ("model.kv_dtype=f32".to_owned(), "f32"),
        ("model.compute=float32".to_owned(), "float32"),
    ];
    for (i, (setting, _)) in misfits.iter().enumerate() {
        cluster.start_process(&format!("decode-{}", i + 1), "decode-node", &[setting])?;
    }
    for (i, (setting, word)) in misfits.iter().enumerate() {
        let line = logged(&mut cluster, &format!("decode-{}", i + 1), &["refuses this node", word]).await?;
        eprintln!("{setting}: {line}");
        ensure!(line.contains("has ") && line.contains("node has "), "{line}");
    }
    for index in 0..known.all.len() {
        known.check(&client, &cluster.url(), index).await?;
    }
    assert_eq!(Vitals::of(&cluster).await?.nodes.len(), 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_processes_of_one_name_the_newer_one_serves() -> Result<()> {
    let mut cluster = Cluster::start(spec()).await?;
    let client = Client::new();
    let asks = Ask::mixed(&mut Random::new(6), 8, 60, (1, 60));
    let known = Known::learn(&client, &cluster.url(), asks).await?;
    let certs = cluster.dir().join("certs");
    let name = [
        "node.id=decode-0".to_owned(),
        format!("cluster.cert_path={}", certs.join("decode-0.pem").display()),
        format!("cluster.key_path={}", certs.join("decode-0.key").display()),
    ];
    let name: Vec<&str> = name.iter().map(String::as_str).collect();
    cluster.start_process("twin", "decode-node", &name)?;
    let line = logged(
        &mut cluster,
        "decode-0",
        &["refuses this node", "started later", "must be unique"],
    )
    .await?;
    eprintln!("{line}");
    for index in 0..known.all.len() {
        known.check(&client, &cluster.url(), index).await?;
    }
    let joined = |log: String| log.lines().filter(|line| line.contains("joined")).count();
    assert_eq!(joined(cluster.process("decode-0")?.log()), 1, "the older one came back");
    assert_eq!(
        joined(cluster.process("twin")?.log()),
        1,
        "the newer one was driven out"
    );
    cluster.kill("twin")?;
    for index in 0..known.all.len() {
        known.check(&client, &cluster.url(), index).await?;
    }
    Ok(())
}

/// Runs a process that must not start; its one line.
fn refusal(program: &str, arguments: &[String]) -> Result<String> {
    let mut child = Command::new(binary(program)?)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let deadline = Clock.now() + SOON;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Clock.now() >= deadline {
            child.kill()?;
            child.wait()?;
            bail!("{program} {arguments:?} has started");
        }
        tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(tokio::time::sleep(Duration::from_millis(5)))
        });
    };
    let mut text = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().context("standard error")?, &mut text)?;
    ensure!(status.code() == Some(1), "{program} ended with {status}: {text}");
    let is_log = |line: &&str| ["INFO", "WARN"].iter().any(|level| line.contains(level));
    let lines: Vec<&str> = text.lines().filter(|line| !is_log(line)).collect();
    ensure!(lines.len() == 1, "{program} says {lines:#?}");
    Ok(lines[0].to_owned())
}

#[allow(clippy::too_many_lines, reason = "one list of cases against one cluster")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_start_says_why_in_one_line() -> Result<()> {
    let cluster = Cluster::without_nodes(ClusterSpec { decode: 2, ..spec() })?;
    let dir = cluster.dir().to_path_buf();
    let file = |name: &str, bytes: &[u8]| -> Result<PathBuf> {
        let path = dir.join(name);
        std::fs::write(&path, bytes)?;
        Ok(path)
    };
    let whole = std::fs::read(default_model()?)?;
    let cut_tensors = file("cut.gguf", &whole[..whole.len() / 2])?;
    let cut_header = file("header.gguf", &whole[..1000])?;
    let no_gguf = file("noise.gguf", b"this is not a model, whatever its name says")?;
    let bad_config = file("bad.toml", b"[node\nid = 3\n")?;
    let cut_weights = changed_model(|dir| edit(dir, "model.safetensors", |bytes| bytes.truncate(bytes.len() - 100)))?;
    let unknown = changed_model(|dir| replace(dir, "config.json", "LlamaForCausalLM", "OracleForCausalLM"))?;
    let (udp, tcp) = (UdpSocket::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?);
    let (udp, tcp) = (udp.local_addr().map(|a| (udp, a))?, tcp.local_addr().map(|a| (tcp, a))?);
    let certs = dir.join("certs");
    let model = |path: &Path| format!("model.path={}", path.display());
    let cert = |name: &str| {
        [
            format!("cluster.cert_path={}", certs.join(format!("{name}.pem")).display()),
            format!("cluster.key_path={}", certs.join(format!("{name}.key")).display()),
        ]
    };
    let nodes: Vec<(Vec<String>, Vec<&str>)> = vec![
        (vec![model(&cut_tensors)], vec!["cut.gguf", "tensor"]),
        (vec![model(&cut_header)], vec!["header.gguf"]),
        (vec![model(&no_gguf)], vec!["noise.gguf", "GGUF"]),
        (
            vec![model(cut_weights.path())],
            vec!["model.safetensors", "cut or damaged"],
        ),
        (vec![model(unknown.path())], vec!["OracleForCausalLM", "supported are"]),
        (
            vec![model(Path::new("/nowhere/model.gguf"))],
            vec!["/nowhere/model.gguf"],
        ),
        (vec!["model.path=".to_owned()], vec!["model.path"]),
        (
            vec![format!("node.listen={}", udp.1)],
            vec!["cannot listen on UDP", "in use"],
        ),
        (
            vec![format!("node.metrics_listen={}", tcp.1)],
            vec!["cannot listen for metrics", "in use"],
        ),
        (
            vec!["cluster.cert_path=/nowhere/a.pem".to_owned()],
            vec!["/nowhere/a.pem", "No such file"],
        ),
        (
            ["ca_cert_path", "cert_path", "key_path"]
                .map(|field| format!("cluster.{field}="))
                .into(),
            vec!["cluster.ca_cert_path is empty"],
        ),
        (
            vec![format!("cluster.key_path={}", certs.join("decode-1.key").display())],
            vec!["certificate and key"],
        ),
        (cert("prefill-0").into(), vec!["prefill prefill-0", "decode decode-0"]),
        (cert("decode-1").into(), vec!["decode decode-1", "decode decode-0"]),
        (
            vec!["engine.kv_blok_tokens=3".to_owned()],
            vec!["kv_blok_tokens", "kv_block_tokens"],
        ),
        (vec!["engine.threads=many".to_owned()], vec!["engine.threads", "many"]),
    ];
    for (settings, words) in nodes {
        let mut arguments = cluster.arguments("decode-0");
        arguments.extend(
            settings
                .iter()
                .flat_map(|setting| ["--set".to_owned(), setting.clone()]),
        );
        says("decode-node", &arguments, &words)?;
    }
    let mut arguments = cluster.arguments("decode-0");
    arguments.extend(["--config".to_owned(), bad_config.display().to_string()]);
    says("decode-node", &arguments, &["bad.toml:1", "TOML"])?;
    let unreadable = ["--config".to_owned(), "/nowhere/baton.toml".to_owned()];
    for program in ["decode-node", "prefill-node", "coordinator"] {
        says(program, &unreadable, &["/nowhere/baton.toml"])?;
    }
    let coordinators: Vec<(Vec<String>, Vec<&str>)> = vec![
        (
            vec![format!("coordinator.http_port={}", tcp.1.port())],
            vec!["HTTP", "in use"],
        ),
        (
            vec![format!("coordinator.listen={}", udp.1)],
            vec!["coordinator.listen", "in use"],
        ),
        (cert("decode-0").into(), vec!["decode decode-0", "coordinator"]),
        (vec![model(&no_gguf)], vec!["noise.gguf", "GGUF"]),
    ];
    for (settings, words) in coordinators {
        let mut arguments = cluster.arguments("coordinator");
        arguments.extend(
            settings
                .iter()
                .flat_map(|setting| ["--set".to_owned(), setting.clone()]),
        );
        says("coordinator", &arguments, &words)?;
    }
    Ok(())
}

fn says(program: &str, arguments: &[String], words: &[&str]) -> Result<()> {
    let line = refusal(program, arguments)?;
    eprintln!("{line}");
    ensure!(line.starts_with(&format!("{program}: ")), "{line}");
    ensure!(
        words.iter().all(|word| line.contains(word)),
        "{line}\nlacks one of {words:?}"
    );
    Ok(())
}
