//! Strangers and misfits, with real processes: who has no right to be in the cluster, or does not fit into it, is turned
//! away with a reason, and nobody else notices.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use integration_tests::ask::{Ask, MODEL_NAME};
use integration_tests::cluster::{Cluster, ClusterSpec, run};
use integration_tests::files::{binary, default_model, tiny_model};
use integration_tests::load::Known;
use integration_tests::random::Random;
use integration_tests::stranger::{Stranger, noise};
use integration_tests::vitals::{Vitals, idle_within};
use reqwest::Client;
use runtime::clock::Clock;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

const CONTROL: &[u8] = b"baton-ctl/1";
const KV: &[u8] = b"baton-kv/1";
/// What must come, comes within this time.
const SOON: Duration = Duration::from_secs(10);

fn spec() -> ClusterSpec {
    ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"))
}

async fn learn(cluster: &Cluster, seed: u64) -> Result<(Client, Arc<Known>)> {
    let client = Client::new();
    let asks = Ask::mixed(&mut Random::new(seed), 8, 60, (1, 60));
    let known = Known::learn(&client, &cluster.url(), asks).await?;
    Ok((client, Arc::new(known)))
}

async fn pause(millis: u64) {
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

/// The UDP address in a node's log.
fn address(cluster: &mut Cluster, node: &str) -> Result<SocketAddr> {
    let log = cluster.process(node)?.log();
    let (_, rest) = log
        .split_once("address=")
        .with_context(|| format!("no address in {log}"))?;
    Ok(rest.split_whitespace().next().unwrap_or_default().parse()?)
}

/// Waits until a process has logged a line with all of `words`; the line.
async fn logged(cluster: &mut Cluster, name: &str, words: &[&str]) -> Result<String> {
    let deadline = Clock.now() + SOON;
    loop {
        let log = cluster.process(name)?.log();
        if let Some(line) = log.lines().find(|line| words.iter().all(|word| line.contains(word))) {
            return Ok(line.to_owned());
        }
        ensure!(Clock.now() < deadline, "{name} has not logged {words:?}:\n{log}");
        pause(20).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_turned_away() -> Result<()> {
    // A third certificate, for one who has the right to be a decode node and nothing else.
    let mut cluster = Cluster::without_nodes(ClusterSpec { decode: 2, ..spec() })?;
    cluster.start_coordinator()?;
    cluster.start_node("prefill", 0)?;
    cluster.start_node("decode", 0)?;
    cluster.ready().await?;
    let (client, known) = learn(&cluster, 1).await?;
    let own = cluster.dir().join("certs");
    let other = cluster.dir().join("other");
    let program = binary("coordinator")?;
    let folder = other.to_str().context("UTF-8")?;
    run(&program, &["certs", "init", "--dir", folder])?;
    run(
        &program,
        &[
            "certs",
            "issue",
            "--dir",
            folder,
            "--role",
            "prefill",
            "--node",
            "prefill-0",
        ],
    )?;
    let control: SocketAddr = format!("127.0.0.1:{}", cluster.control_port()).parse()?;
    let (decode, prefill) = (address(&mut cluster, "decode-0")?, address(&mut cluster, "prefill-0")?);

    let nobody = Stranger {
        ca: own.join("ca.pem"),
        shows: None,
    };
    let foreigner = Stranger::showing(&own, &other, "prefill-0");
    let member = |name| Stranger::showing(&own, &own, name);
    let cases = [
        (
            nobody.clone(),
            control,
            CONTROL,
            "expected a certificate: every process",
        ),
        (nobody.clone(), decode, KV, "expected a certificate: every process"),
        (
            foreigner.clone(),
            control,
            CONTROL,
            "expected a certificate of this cluster's CA",
        ),
        (foreigner, decode, KV, "expected a certificate of this cluster's CA"),
        (
            member("coordinator"),
            control,
            CONTROL,
            "expected prefill or decode on baton-ctl/1, found coordinator",
        ),
        (
            member("decode-1"),
            decode,
            KV,
            "expected prefill on baton-kv/1, found decode decode-1",
        ),
        (
            member("coordinator"),
            decode,
            KV,
            "expected prefill on baton-kv/1, found coordinator",
        ),
        // Planes that a process does not offer.
        (
            member("prefill-0"),
            control,
            KV,
            "expected a plane that this process offers",
        ),
        (
            member("prefill-0"),
            decode,
            CONTROL,
            "expected a plane that this process offers",
        ),
        (
            member("prefill-0"),
            decode,
            b"h3",
            "expected a plane that this process offers",
        ),
        (member("decode-1"), prefill, KV, ""),
    ];
    for (stranger, address, alpn, expected) in cases {
        let reason = stranger.knock(address, alpn).await?;
        println!("{:?} on {}: {reason}", stranger.shows, String::from_utf8_lossy(alpn));
        ensure!(
            reason.to_lowercase().contains(&expected.to_lowercase()),
            "{reason:?}, expected {expected:?}"
        );
    }
    for name in ["coordinator", "decode-0"] {
        logged(&mut cluster, name, &["stranger turned away"]).await?;
        logged(&mut cluster, name, &["peer turned away", "expected prefill"]).await?;
    }
    for index in 0..known.all.len() {
        known.check(&client, &cluster.url(), index).await?;
    }
    assert_eq!(Vitals::of(&cluster).await?.nodes.len(), 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_another_cluster_does_not_get_in() -> Result<()> {
    let mut cluster = Cluster::start(spec()).await?;
    let (client, known) = learn(&cluster, 2).await?;
    let other = cluster.dir().join("other");
    let folder = other.to_str().context("UTF-8")?;
    let program = binary("coordinator")?;
    run(&program, &["certs", "init", "--dir", folder])?;
    run(
        &program,
        &[
            "certs", "issue", "--dir", folder, "--role", "decode", "--node", "decode-7",
        ],
    )?;
    let settings = [
        format!("cluster.ca_cert_path={folder}/ca.pem"),
        format!("cluster.cert_path={folder}/decode-7.pem"),
        format!("cluster.key_path={folder}/decode-7.key"),
    ];
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    cluster.start_process("decode-7", "decode-node", &settings)?;
    let line = logged(
        &mut cluster,
        "decode-7",
        &["no coordinator", "expected a certificate of this cluster's CA"],
    )
    .await?;
    println!("{line}");
    for index in 0..known.all.len() {
        known.check(&client, &cluster.url(), index).await?;
    }
    assert_eq!(Vitals::of(&cluster).await?.nodes.len(), 2);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn noise_on_the_udp_ports_disturbs_nobody() -> Result<()> {
    let mut cluster = Cluster::start(spec()).await?;
    let (client, known) = learn(&cluster, 3).await?;
    let control: SocketAddr = format!("127.0.0.1:{}", cluster.control_port()).parse()?;
    let ports = [
        control,
        address(&mut cluster, "prefill-0")?,
        address(&mut cluster, "decode-0")?,
    ];
    let load = known.load(&client, &cluster.url(), 8);
    let mut noisy = JoinSet::new();
    for (seed, port) in ports.into_iter().enumerate() {
        noisy.spawn_blocking(move || noise(port, 10_000, seed as u64));
    }
    while let Some(sent) = noisy.join_next().await {
        let sent = sent??;
        ensure!(sent > 9_000, "only {sent} datagrams were sent");
    }
    pause(500).await;
    let tally = load.stop().await?;
    println!("noise: {tally}");
    tally.all_exact()?;
    idle_within(&cluster, 2, Duration::from_secs(2)).await?;
    assert_eq!(Vitals::of(&cluster).await?.nodes.len(), 2);
    Ok(())
}

/// Opens a connection, says something slowly, and waits until the server has had enough. How long that took.
async fn dawdle(port: u16, start: &'static [u8], rest: u8) -> Result<Duration> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
    let opened = Clock.now();
    stream.write_all(start).await?;
    let (mut answers, mut says) = stream.into_split();
    let ended = tokio::time::timeout(SOON, async {
        let mut buffer = [0; 1024];
        loop {
            tokio::select! {
                read = answers.read(&mut buffer) => match read {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                },
                () = pause(100), if !start.is_empty() => if says.write_all(&[rest]).await.is_err() {
                    return;
                },
            }
        }
    });
    ended.await.context("a connection that dawdles is still open")?;
    Ok(Clock.now() - opened)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_open_connections_and_slow_clients_hold_up_nobody() -> Result<()> {
    let cluster = Cluster::start(spec().set("coordinator.request_head_timeout_ms=2000")).await?;
    let (client, known) = learn(&cluster, 4).await?;
    let undisturbed = {
        let load = known.load(&client, &cluster.url(), 2);
        pause(500).await;
        load.stop().await?
    };
    let body: &[u8] =
        b"POST /generate HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n{";
    let mut dawdlers = JoinSet::new();
    for _ in 0..200 {
        dawdlers.spawn(dawdle(cluster.http_port(), b"", 0));
    }
    for _ in 0..50 {
        dawdlers.spawn(dawdle(
            cluster.http_port(),
            b"POST /generate HTTP/1.1\r\nx-slow: ",
            b'a',
        ));
        dawdlers.spawn(dawdle(cluster.http_port(), body, b' '));
    }
    let load = known.load(&client, &cluster.url(), 2);
    let mut slowest = Duration::ZERO;
    while let Some(took) = dawdlers.join_next().await {
        slowest = slowest.max(took??);
    }
    let tally = load.stop().await?;
    println!("alone {undisturbed}\nbeside 300 slow clients {tally}; the last of them was ended after {slowest:?}");
    tally.all_exact()?;
    ensure!(tally.exact() > 20, "others were held up: {tally}");
    Ok(())
}

/// A copy of the tiny model, changed.
fn changed_model(change: impl FnOnce(&Path) -> Result<()>) -> Result<TempDir> {
    let copy = TempDir::new()?;
    for entry in std::fs::read_dir(tiny_model())? {
        let entry = entry?;
        std::fs::copy(entry.path(), copy.path().join(entry.file_name()))?;
    }
    change(copy.path())?;
    Ok(copy)
}

fn edit(dir: &Path, file: &str, change: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
    let path = dir.join(file);
    let mut bytes = std::fs::read(&path)?;
    change(&mut bytes);
    Ok(std::fs::write(path, bytes)?)
}

fn replace(dir: &Path, file: &str, old: &str, new: &str) -> Result<()> {
    let path = dir.join(file);
    let text = std::fs::read_to_string(&path)?;
    ensure!(text.contains(old), "no {old} in {file}");
    Ok(std::fs::write(path, text.replace(old, new))?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_does_not_fit_is_told_what_differs() -> Result<()> {
    let mut cluster = Cluster::without_nodes(ClusterSpec { decode: 6, ..spec() })?;
    cluster.start_coordinator()?;
    cluster.start_node("prefill", 0)?;
    cluster.start_node("decode", 0)?;
    cluster.ready().await?;
    let (client, known) = learn(&cluster, 5).await?;
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
        println!("{setting}: {line}");
        ensure!(line.contains("has ") && line.contains("node has "), "{line}");
    }
    for index in 0..known.all.len() {
        known.check(&client, &cluster.url(), index).await?;
    }
    assert_eq!(Vitals::of(&cluster).await?.nodes.len(), 2);
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
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(pause(5)));
    };
    let mut text = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().context("standard error")?, &mut text)?;
    ensure!(status.code() == Some(1), "{program} ended with {status}: {text}");
    let is_log = |line: &&str| ["INFO", "WARN"].iter().any(|level| line.contains(level));
    let lines: Vec<&str> = text.lines().filter(|line| !is_log(line)).collect();
    ensure!(lines.len() == 1, "{program} says {lines:#?}");
    Ok(lines[0].to_owned())
}

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
        (vec![model(cut_weights.path())], vec!["model.safetensors"]),
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
    println!("{line}");
    ensure!(line.starts_with(&format!("{program}: ")), "{line}");
    ensure!(
        words.iter().all(|word| line.contains(word)),
        "{line}\nlacks one of {words:?}"
    );
    Ok(())
}
