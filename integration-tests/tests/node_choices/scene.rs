//! A prefill and a decode node in this process, and the coordinator's side of their links.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use config::{ClusterConfig, Config, EngineConfig, LimitsConfig, NodeConfig, TransferConfig};
use decode_node::role::DecodeRole;
use model::ModelMemory;
use model::fake::{FakeConfig, FakeModel};
use node_shell::handle::EngineHandle;
use node_shell::process::{Node, NodeContext, NodeModel, NodeRole};
use prefill_node::role::PrefillRole;
use protocol::codec::MAX_CONTROL_BYTES;
use protocol::control::{
    CoordinatorMessage, DecodeJob, HandoffStats, HandoffTarget, Job, JobErrorKind, JobEvent, KvSource, NodeMessage,
    PrefillJob, PromptComputed,
};
use protocol::ids::{NodeId, Role};
use protocol::kv::{KvDtype, KvLayout};
use protocol::sampling::SampledToken;
use protocol::window::Groups;
use runtime::authority::CertificateAuthority;
use runtime::framing::{MessageReader, MessageWriter};
use runtime::identity::Identity;
use runtime::quic::{Link, QuicEndpoint};
use runtime::shutdown::Shutdown;
use tempfile::TempDir;
use tokio::time::timeout;

/// Far longer than anything here takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const LAYOUT: KvLayout = KvLayout {
    num_layers: 3,
    num_kv_heads: 2,
    head_dim: 4,
    block_tokens: 16,
    dtype: KvDtype::F16,
    latent: false,
    groups: Groups::ONE,
};
const BLOCKS: usize = 256;

/// A prefill and a decode node, and the coordinator's end of their links.
pub(crate) struct Scene {
    pub(crate) prefill: Link,
    pub(crate) decode: Link,
    decode_address: String,
    engines: [EngineHandle; 2],
    /// What the prefill node says it caches, and the decode node.
    pub(crate) caches: [Names; 2],
    shutdown: Shutdown,
    _coordinator: QuicEndpoint,
    _certificates: TempDir,
}

fn certificates(dir: &Path, authority: &CertificateAuthority, role: Role, name: &str) -> Result<ClusterConfig> {
    let paths = authority.issue_to(dir, role, &NodeId(name.to_owned()))?;
    let text = |path: &Path| path.to_str().map(str::to_owned).context("a path that is not UTF-8");
    Ok(ClusterConfig {
        ca_cert_path: text(&dir.join("ca.pem"))?,
        cert_path: text(&paths.cert)?,
        key_path: text(&paths.key)?,
        ..ClusterConfig::default()
    })
}

/// Names of blocks, as a node tells them.
pub(crate) type Names = Arc<Mutex<HashSet<u64>>>;

/// Hears a node out.
async fn listen(mut reader: MessageReader, names: Names) {
    while let Ok(Some(message)) = reader.next().await {
        if let NodeMessage::Cache(change) = message {
            let mut names = names.lock().unwrap_or_else(PoisonError::into_inner);
            if change.reset {
                names.clear();
            }
            names.extend(change.added);
            names.retain(|name| !change.removed.contains(name));
        }
    }
}

/// Starts a node and takes it in.
async fn node<R: NodeRole>(
    coordinator: &QuicEndpoint,
    cluster: ClusterConfig,
    role: Role,
    (shutdown, prefix_cache): (&Shutdown, bool),
    build: fn(NodeContext) -> Result<R, String>,
) -> Result<(Link, String, EngineHandle, Names)> {
    let defaults = Config::default();
    let config = Config {
        cluster,
        node: NodeConfig {
            listen: "127.0.0.1:0".to_owned(),
            coordinators: vec![coordinator.local_addr()?.to_string()],
            ..defaults.node
        },
        engine: EngineConfig {
            kv_block_tokens: LAYOUT.block_tokens as usize,
            max_num_seqs: 16,
            prefill_chunk_tokens: 64,
            prefix_cache,
            ..defaults.engine
        },
        limits: LimitsConfig {
            max_seq_len: 512,
            ..defaults.limits
        },
        ..defaults
    };
    let fake = FakeModel::new(&FakeConfig {
        layout: LAYOUT,
        total_blocks: BLOCKS,
        vocab_size: 300,
        max_position_embeddings: 600,
        seed: 3,
    })?;
    let model = NodeModel {
        grammars: None,
        runner: Box::new(fake.runner),
        pool: fake.pool,
        identity: fake.identity,
        max_position_embeddings: 600,
        memory: ModelMemory::default(),
    };
    let node = Node::start(config, role, model, shutdown.clone(), build).await?;
    let (address, engine) = (node.hello().address.clone(), node.engine().clone());
    tokio::spawn(node.run());
    let link = timeout(PATIENCE, coordinator.accept()).await?.context("a link")?;
    let (send, recv) = timeout(PATIENCE, link.connection.accept_bi()).await??;
    let mut writer = MessageWriter::new(send, MAX_CONTROL_BYTES);
    let mut reader = MessageReader::new(recv, MAX_CONTROL_BYTES);
    ensure!(
        matches!(reader.next().await?, Some(NodeMessage::Hello(_))),
        "a node says Hello first"
    );
    writer.write(&CoordinatorMessage::Welcome).await?;
    let names = Names::default();
    let heard = Arc::clone(&names);
    tokio::spawn(async move {
        let _stays_open = writer;
        listen(reader, heard).await;
    });
    Ok((link, address, engine, names))
}

impl Scene {
    pub(crate) async fn open() -> Result<Self> {
        Self::with_cache(true).await
    }

    /// With or without prefix caches.
    pub(crate) async fn with_cache(prefix_cache: bool) -> Result<Self> {
        let dir = TempDir::new()?;
        let authority = CertificateAuthority::create(dir.path())?;
        let own = certificates(dir.path(), &authority, Role::Coordinator, "c0")?;
        let identity = Arc::new(Identity::load(&own)?);
        let coordinator = QuicEndpoint::bind(identity, "127.0.0.1:0", &own, &TransferConfig::default()).await?;
        let shutdown = Shutdown::new();
        let papers = certificates(dir.path(), &authority, Role::Prefill, "p0")?;
        let manner = (&shutdown, prefix_cache);
        let (prefill, _, first, here) = node(&coordinator, papers, Role::Prefill, manner, PrefillRole::new).await?;
        let papers = certificates(dir.path(), &authority, Role::Decode, "d0")?;
        let (decode, decode_address, second, there) =
            node(&coordinator, papers, Role::Decode, manner, DecodeRole::new).await?;
        Ok(Self {
            prefill,
            decode,
            decode_address,
            engines: [first, second],
            caches: [here, there],
            shutdown,
            _coordinator: coordinator,
            _certificates: dir,
        })
    }

    /// Every block has come back.
    pub(crate) async fn close(self) -> Result<()> {
        for engine in &self.engines {
            let mut load = engine.watch_load();
            let idle = load
                .wait_for(|load| (load.owned_blocks, load.running, load.waiting, load.reservations) == (0, 0, 0, 0));
            timeout(PATIENCE, idle).await.context("a node keeps blocks")??;
        }
        self.shutdown.request();
        Ok(())
    }

    /// Prefill and decode of one prompt, with one handoff in between.
    pub(crate) async fn hand_over(
        &self,
        prefill: PrefillJob,
        decode: DecodeJob,
    ) -> Result<(PromptComputed, HandoffStats, Stream)> {
        let (_, computed, stats, decoding) = self.push(prefill, decode).await?;
        Ok((computed, stats, decoding))
    }

    /// As [`Self::hand_over`]; first of all how many blocks the decode node had.
    pub(crate) async fn push(
        &self,
        prefill: PrefillJob,
        decode: DecodeJob,
    ) -> Result<(u32, PromptComputed, HandoffStats, Stream)> {
        let mut decoding = Stream::open(&self.decode, Job::Decode(decode)).await?;
        let JobEvent::Granted { ticket, have_blocks } = decoding.next().await? else {
            bail!("not granted");
        };
        let handoff = HandoffTarget {
            node: NodeId("d0".to_owned()),
            address: self.decode_address.clone(),
            ticket,
            have_blocks,
        };
        let job = PrefillJob {
            handoff: Some(handoff),
            ..prefill
        };
        let mut prefilling = Stream::open(&self.prefill, Job::Prefill(job)).await?;
        let JobEvent::Computed(computed) = prefilling.next().await? else {
            bail!("not computed");
        };
        let JobEvent::HandedOff(stats) = prefilling.next().await? else {
            bail!("not handed over");
        };
        ensure!(decoding.next().await? == JobEvent::Committed, "not committed");
        Ok((have_blocks.full, computed, stats, decoding))
    }

    /// The tokens of choices that are computed on the decode node alone.
    pub(crate) async fn computed_there(&self, job: DecodeJob) -> Result<BTreeMap<u32, Vec<SampledToken>>> {
        let job = DecodeJob {
            source: KvSource::Compute,
            ..job
        };
        let numbers: Vec<u32> = job.choices.iter().map(|start| start.choice).collect();
        let started = job.choices.iter().any(|start| !start.generated.is_empty());
        let mut stream = Stream::open(&self.decode, Job::Decode(job)).await?;
        if started {
            return stream.tokens().await;
        }
        let firsts = stream.computed().await?.tokens;
        let mut all: BTreeMap<u32, Vec<SampledToken>> =
            numbers.into_iter().zip(firsts.into_iter().map(|t| vec![t])).collect();
        for (choice, tokens) in stream.tokens().await? {
            all.entry(choice).or_default().extend(tokens);
        }
        Ok(all)
    }
}

/// The coordinator's side of a job.
pub(crate) struct Stream {
    pub(crate) writer: MessageWriter,
    reader: MessageReader,
}

impl Stream {
    pub(crate) async fn open(link: &Link, job: Job) -> Result<Self> {
        let (send, recv) = link.connection.open_bi().await?;
        let mut writer = MessageWriter::new(send, MAX_CONTROL_BYTES);
        writer.write(&job).await?;
        let reader = MessageReader::new(recv, MAX_CONTROL_BYTES);
        Ok(Self { writer, reader })
    }

    pub(crate) async fn next(&mut self) -> Result<JobEvent> {
        let event = timeout(PATIENCE, self.reader.next()).await.context("no event")??;
        event.context("the stream ended before its job")
    }

    /// What is told of the prompt, which comes first.
    pub(crate) async fn computed(&mut self) -> Result<PromptComputed> {
        match self.next().await? {
            JobEvent::Computed(computed) => Ok(computed),
            other => bail!("{other:?}"),
        }
    }

    /// The tokens of each choice, up to the end of all.
    pub(crate) async fn tokens(&mut self) -> Result<BTreeMap<u32, Vec<SampledToken>>> {
        let mut tokens: BTreeMap<u32, Vec<SampledToken>> = BTreeMap::new();
        loop {
            match self.next().await? {
                JobEvent::Token { choice, token, .. } => tokens.entry(choice).or_default().push(token),
                JobEvent::Finished => return Ok(tokens),
                other => bail!("{other:?}"),
            }
        }
    }

    pub(crate) async fn failed(&mut self) -> Result<String> {
        match self.next().await? {
            JobEvent::Failed(error) if error.kind == JobErrorKind::Invalid => Ok(error.message),
            other => bail!("{other:?}"),
        }
    }
}
