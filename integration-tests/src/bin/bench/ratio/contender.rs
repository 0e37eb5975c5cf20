//! What is put under load: a cluster of ours, or another server on the same cores.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use integration_tests::cluster::{Cluster, ClusterSpec};
use integration_tests::ports;
use runtime::clock::Clock;
use tempfile::TempDir;

use super::split::{Place, Split};
use crate::pin;

/// How long a server may take until it answers.
const READY_WITHIN: Duration = Duration::from_secs(120);

/// One of those that are compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    /// A coordinator, and nodes in a split.
    Baton(Split),
    /// The program `llama-server`, with a thread on each core.
    LlamaServer(PathBuf),
}

impl Contender {
    /// Its name in tables.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Baton(split) => split.to_string(),
            Self::LlamaServer(_) => "llama-server".to_owned(),
        }
    }
}

/// What every contender is started with.
pub(super) struct Ground {
    /// GGUF file or model directory.
    pub(super) model: PathBuf,
    /// The cores that are shared out.
    pub(super) cores: Vec<usize>,
    /// Settings of all processes of a cluster.
    pub(super) settings: Vec<String>,
    /// Further arguments of the other server.
    pub(super) peer_args: Vec<String>,
}

/// A node that can be watched.
pub(super) struct Watched {
    pub(super) role: &'static str,
    /// Its page of metrics.
    pub(super) metrics: String,
}

/// A contender that runs, until it is dropped.
pub(super) struct Running {
    pub(super) url: String,
    /// The nodes of a cluster of ours; none of another server.
    pub(super) nodes: Vec<Watched>,
    processes: Processes,
}

/// Ended when they are dropped.
enum Processes {
    Cluster(Box<Cluster>),
    Peer(Peer),
}

/// Characters of a log that are shown where something has failed.
const LAST_WORDS: usize = 2_000;

impl Running {
    /// The end of what its processes have logged.
    pub(super) fn last_words(&self) -> String {
        let log = match &self.processes {
            Processes::Cluster(cluster) => cluster.logs(),
            Processes::Peer(peer) => peer.log(),
        };
        let skipped = log.chars().count().saturating_sub(LAST_WORDS);
        log.chars().skip(skipped).collect()
    }

    /// Starts a contender, puts its processes on their cores and waits until it serves.
    pub(super) async fn start(contender: &Contender, ground: &Ground) -> Result<Self> {
        match contender {
            Contender::Baton(split) => start_cluster(*split, ground).await,
            Contender::LlamaServer(program) => start_peer(program, ground).await,
        }
    }
}

async fn start_cluster(split: Split, ground: &Ground) -> Result<Running> {
    let mut spec = ClusterSpec::pair(ground.model.clone())
        // As it is by default, and not as tests have it.
        .set("coordinator.local_prefill=auto");
    [spec.prefill, spec.decode, spec.both] = split.counts().map(|(_, count)| count);
    spec.ready_within = READY_WITHIN;
    spec.settings.extend(ground.settings.iter().cloned());
    let mut cluster = Cluster::without_nodes(spec)?;
    cluster.start_coordinator()?;
    let mut nodes = Vec::new();
    for place in split.places(&ground.cores) {
        nodes.push(start_node(&mut cluster, &place)?);
    }
    cluster.ready().await?;
    wait_for_all(&cluster, nodes.len()).await?;
    // The threads that exist by now, and with them those that they start later.
    for place in split.places(&ground.cores) {
        let pid = cluster.process(&name_of(&place))?.pid();
        pin::to_cores(pid, &place.cores)?;
    }
    Ok(Running {
        url: cluster.url(),
        nodes,
        processes: Processes::Cluster(Box::new(cluster)),
    })
}

fn name_of(place: &Place) -> String {
    format!("{}-{}", place.role, place.index)
}

fn start_node(cluster: &mut Cluster, place: &Place) -> Result<Watched> {
    let program = match place.role {
        "both" => "node".to_owned(),
        fixed => format!("{fixed}-node"),
    };
    let port = ports::free_tcp()?;
    let threads = format!("engine.threads={}", place.cores.len());
    let listen = format!("node.metrics_listen=127.0.0.1:{port}");
    cluster.start_process(&name_of(place), &program, &[&threads, &listen])?;
    Ok(Watched {
        role: place.role,
        metrics: format!("http://127.0.0.1:{port}/metrics"),
    })
}

/// `/health` is content with one node of each role; a split has more.
async fn wait_for_all(cluster: &Cluster, nodes: usize) -> Result<()> {
    let deadline = Clock.now() + READY_WITHIN;
    loop {
        let (status, answer) = cluster.admin(0, "GET", "/nodes", "").await?;
        ensure!(status == 200, "the admin plane answers {status}: {answer}");
        if answer["nodes"].as_array().is_some_and(|all| all.len() == nodes) {
            return Ok(());
        }
        ensure!(
            Clock.now() < deadline,
            "not all nodes are there after {READY_WITHIN:?}: {answer}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A process that is ended when this is dropped.
struct Peer {
    child: Child,
    /// With its log.
    folder: TempDir,
}

impl Peer {
    fn log(&self) -> String {
        let bytes = std::fs::read(log_in(&self.folder)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn log_in(folder: &TempDir) -> PathBuf {
    folder.path().join("log")
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Fails only if it has ended, which is what is wanted.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

async fn start_peer(program: &Path, ground: &Ground) -> Result<Running> {
    let port = ports::free_tcp()?;
    let threads = ground.cores.len().to_string();
    let folder = TempDir::new()?;
    let log = File::create(log_in(&folder))?;
    let child = Command::new(program)
        .arg("-m")
        .arg(&ground.model)
        .args([
            "-t",
            &threads,
            "-tb",
            &threads,
            "--host",
            "127.0.0.1",
            "--port",
            &port.to_string(),
        ])
        .args(&ground.peer_args)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let mut peer = Peer { child, folder };
    let url = format!("http://127.0.0.1:{port}");
    let deadline = Clock.now() + READY_WITHIN;
    while !is_healthy(&url).await {
        if let Some(status) = peer.child.try_wait()? {
            bail!("{} has ended with {status}:\n{}", program.display(), peer.log());
        }
        ensure!(
            Clock.now() < deadline,
            "{} does not serve after {READY_WITHIN:?}",
            program.display()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    pin::to_cores(peer.child.id(), &ground.cores)?;
    Ok(Running {
        url,
        nodes: Vec::new(),
        processes: Processes::Peer(peer),
    })
}

async fn is_healthy(url: &str) -> bool {
    reqwest::get(format!("{url}/health"))
        .await
        .is_ok_and(|answer| answer.status() == 200)
}
