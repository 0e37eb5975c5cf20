//! Strangers, with real processes: who has no right to be in the cluster is turned away with a reason, whoever makes noise
//! or dawdles is ended, and nobody else notices.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use integration_tests::ask::{Ask, MODEL_NAME};
use integration_tests::cluster::{Cluster, ClusterSpec, run};
use integration_tests::files::{binary, tiny_model};
use integration_tests::load::Known;
use integration_tests::random::Random;
use integration_tests::stranger::{Stranger, noise};
use integration_tests::vitals::{Vitals, idle_within, logged};
use reqwest::Client;
use runtime::clock::Clock;
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

#[allow(clippy::too_many_lines, reason = "one list of cases against one cluster")]
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
            "expected prefill or decode or both on baton-ctl/1, found coordinator",
        ),
        (
            member("decode-1"),
            decode,
            KV,
            "expected prefill or both on baton-kv/1, found decode decode-1",
        ),
        (
            member("coordinator"),
            decode,
            KV,
            "expected prefill or both on baton-kv/1, found coordinator",
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
        eprintln!("{:?} on {}: {reason}", stranger.shows, String::from_utf8_lossy(alpn));
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
    eprintln!("{line}");
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
    eprintln!("noise: {tally}");
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
    eprintln!("alone {undisturbed}\nbeside 300 slow clients {tally}; the last of them was ended after {slowest:?}");
    tally.all_exact()?;
    ensure!(tally.exact() > 20, "others were held up: {tally}");
    Ok(())
}
