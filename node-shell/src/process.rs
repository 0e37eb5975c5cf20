//! A node process from its configuration to its clean end.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use config::{Config, ConfigError, NodeRoleConfig};
use discovery::{DiscoveryError, SystemResolver};
use engine::engine::Engine;
use engine::limits::{EngineLimits, LimitsError};
use engine::runner::Runner;
use grammar::Grammars;
use model::ModelMemory;
use model::kv_pool::KvPool;
use protocol::PROTOCOL_VERSION;
use protocol::control::{Hello, Job};
use protocol::ids::{NodeId, Role};
use protocol::kv::{Fingerprint, KvLayout, ModelIdentity};
use runtime::clock::Clock;
use runtime::identity::{Identity, IdentityError};
use runtime::measure::Measure;
use runtime::quic::{Link, LinkError, QuicEndpoint};
use runtime::renewal;
use runtime::shutdown::Shutdown;
use runtime::telemetry::TelemetryError;
use thiserror::Error;
use tokio::sync::{Semaphore, watch};
use tokio_util::task::TaskTracker;

use crate::duty::Duties;
use crate::engine_thread::{self, EngineThread};
use crate::handle::EngineHandle;
use crate::job::{JobGone, JobStream};
use crate::loading::Progress;
use crate::membership::Member;
use crate::memory;
use crate::stats;

/// What makes a node a prefill or a decode node.
pub trait NodeRole: Send + Sync + 'static {
    /// Carries a job out. An error means that the job's stream is gone.
    fn handle(&self, job: Job, stream: JobStream) -> impl Future<Output = Result<(), JobGone>> + Send;

    /// Serves a KV link that another node opened, until it closes.
    fn serve_kv(&self, link: Link) -> impl Future<Output = ()> + Send;

    /// What it measures, beside what every node does.
    fn measures() -> Vec<Measure>;

    /// How much KV it has moved so far.
    fn moved(&self) -> MovedBytes;
}

/// KV payload that a role has moved since the process started, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedBytes {
    /// Sent, repeats included.
    pub sent_bytes: u64,
    /// Written into blocks.
    pub received_bytes: u64,
}

/// Why a node cannot start or had to stop.
#[derive(Debug, Error)]
pub enum NodeError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No identity.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// No endpoint.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// Coordinators cannot be looked for.
    #[error(transparent)]
    Discovery(#[from] DiscoveryError),
    /// The model is on a hub, and did not come from there.
    #[error("model.path: {0}")]
    Hub(#[from] model_hub::HubError),
    /// No model.
    #[error(transparent)]
    Model(#[from] model::LoadError),
    /// The limits contradict each other.
    #[error("the engine's limits do not fit the model: {0}")]
    Limits(#[from] LimitsError),
    /// No metrics port, or no log.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// The certificate is for another role or name.
    #[error("the certificate {path} is for {found}; this process is {expected}")]
    WrongCertificate {
        /// `cluster.cert_path`.
        path: String,
        /// Role and name in the certificate.
        found: String,
        /// Role and name that the process has.
        expected: String,
    },
    /// The settings do not fit the role.
    #[error("{0}")]
    Role(String),
    /// The system refused something.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system says.
        source: std::io::Error,
    },
    /// The engine thread ended by itself.
    #[error("the engine thread has ended unexpectedly")]
    EngineDied,
}

impl NodeError {
    fn system(what: &'static str, source: std::io::Error) -> Self {
        Self::System { what, source }
    }
}

/// A loaded model, ready to be run: the real one, or a stand-in of tests.
pub struct NodeModel {
    /// Computes steps.
    pub runner: Box<dyn Runner>,
    /// The KV blocks that `runner` works on.
    pub pool: Arc<KvPool>,
    /// What it computes.
    pub identity: ModelIdentity,
    /// Longest sequence of the model, in tokens.
    pub max_position_embeddings: usize,
    /// What it keeps in memory.
    pub memory: ModelMemory,
    /// Compiles grammars for the runner; `None` if it serves no sequences with grammars.
    pub grammars: Option<Grammars>,
}

/// What a role builds itself from.
#[derive(Clone)]
pub struct NodeContext {
    /// The whole configuration.
    pub config: Config,
    /// The process's clock.
    pub clock: Clock,
    /// The process's end.
    pub shutdown: Shutdown,
    /// The KV blocks.
    pub pool: Arc<KvPool>,
    /// The engine.
    pub engine: EngineHandle,
    /// The UDP port.
    pub endpoint: Arc<QuicEndpoint>,
    /// Model and layout.
    pub fingerprint: Fingerprint,
    /// Shape of the cache.
    pub layout: KvLayout,
    /// What the model computes, and which adapters it has.
    pub model: ModelIdentity,
    /// Size of the vocabulary: token ids are below it.
    pub vocab_size: u32,
    /// Longest sequence the node holds, in tokens.
    pub max_seq_len: usize,
    /// See [`NodeModel::grammars`].
    pub grammars: Option<Grammars>,
}

/// What a job's adapter is to the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobAdapter {
    /// Its number; `None`: the model as it is.
    pub number: Option<u32>,
    /// What the KV depends on beside the tokens.
    pub cache_key: u64,
}

impl NodeContext {
    /// The adapter of this name.
    ///
    /// # Errors
    /// If the model has none of this name; the message lists those it has.
    pub fn adapter(&self, name: Option<&str>) -> Result<JobAdapter, String> {
        let Some(name) = name else {
            return Ok(JobAdapter::default());
        };
        let Some((number, adapter)) = self.model.adapter(name) else {
            let known: Vec<&str> = self
                .model
                .adapters
                .iter()
                .map(|adapter| adapter.name.as_str())
                .collect();
            return Err(format!(
                "adapter {name:?} is not one of this node's adapters: {known:?}"
            ));
        };
        Ok(JobAdapter {
            number: u32::try_from(number).ok(),
            cache_key: adapter.hash,
        })
    }
}

/// Loads the configured model.
pub fn load_model(config: &Config) -> Result<NodeModel, NodeError> {
    let mut progress = Progress::new();
    let show = &mut |now| progress.show(now);
    let loaded = model::load_watched(&config.model, &config.engine, config.limits.max_seq_len, show)?;
    progress.end();
    Ok(NodeModel {
        runner: Box::new(loaded.runner),
        pool: loaded.pool,
        identity: loaded.identity,
        max_position_embeddings: loaded.max_position_embeddings as usize,
        memory: loaded.memory,
        grammars: Some(loaded.grammars),
    })
}

/// A node that serves.
pub struct Node<R> {
    member: Arc<Member<R>>,
    endpoint: Arc<QuicEndpoint>,
    engine: EngineHandle,
    thread: EngineThread,
    shutdown: Shutdown,
    drain_timeout: Duration,
}

impl<R: NodeRole> Node<R> {
    /// Opens the UDP port, starts the engine, and begins to dial the coordinators. Must run on a tokio runtime.
    pub async fn start(
        config: Config,
        role: Role,
        model: NodeModel,
        shutdown: Shutdown,
        build: impl FnOnce(NodeContext) -> Result<R, String>,
    ) -> Result<Self, NodeError> {
        let identity = Arc::new(Identity::load(&config.cluster)?);
        let node = own_name(&config, role, &identity)?;
        let validity = identity.validity();
        let endpoint =
            Arc::new(QuicEndpoint::bind(identity, &config.node.listen, &config.cluster, &config.transfer).await?);
        renewal::watch(&endpoint, &config.cluster, validity);
        let ipv4 = endpoint.local_addr()?.is_ipv4();
        let found = discovery::find(&config.discovery, &config.node.coordinators, ipv4, SystemResolver)?;
        let mut limits = engine_limits(&config, &model.pool, config.limits.max_seq_len);
        limits.max_seq_len = longest_sequence(&limits, model.max_position_embeddings);
        let max_seq_len = limits.max_seq_len;
        let layout = *model.pool.layout();
        let (engine, thread) = start_engine(&config, limits, model.runner)?;
        let hello = Hello {
            protocol_version: PROTOCOL_VERSION,
            node,
            boot: boot_number(Clock),
            role,
            address: advertised(&config, &endpoint)?,
            model: model.identity.clone(),
            layout,
            total_blocks: u32::try_from(model.pool.total_blocks()).unwrap_or(u32::MAX),
            max_num_seqs: u32::try_from(config.engine.max_num_seqs).unwrap_or(u32::MAX),
            max_seq_len: u32::try_from(max_seq_len).unwrap_or(u32::MAX),
        };
        memory::watch(model.memory, Arc::clone(&model.pool), shutdown.clone());
        let context = NodeContext {
            clock: Clock,
            shutdown: shutdown.clone(),
            pool: model.pool,
            engine: engine.clone(),
            endpoint: Arc::clone(&endpoint),
            fingerprint: Fingerprint::new(&model.identity, &layout),
            layout,
            vocab_size: model.identity.vocab_size,
            model: model.identity,
            max_seq_len,
            grammars: model.grammars,
            config: config.clone(),
        };
        stats::watch(engine.clone(), shutdown.clone());
        let member = Arc::new(Member {
            endpoint: Arc::clone(&endpoint),
            hello,
            engine: engine.clone(),
            role: Arc::new(build(context).map_err(NodeError::Role)?),
            jobs: TaskTracker::new(),
            list: Arc::default(),
            slots: Arc::new(Semaphore::new(config.node.max_jobs)),
            shutdown: shutdown.clone(),
            duties: Arc::new(Duties::new(first_duty(&config, role), role)),
            welcome_timeout: Duration::from_millis(config.cluster.connect_timeout_ms),
            settings: config.node.clone(),
            sessions: AtomicU64::new(0),
            linked: watch::Sender::default(),
        });
        tokio::spawn(accept_kv(Arc::clone(&endpoint), Arc::clone(&member.role)));
        tokio::spawn(Arc::clone(&member).follow(found));
        Ok(Self {
            member,
            endpoint,
            engine,
            thread,
            shutdown,
            drain_timeout: Duration::from_millis(config.node.drain_timeout_ms),
        })
    }

    /// What the node says about itself.
    pub fn hello(&self) -> &Hello {
        &self.member.hello
    }

    /// The engine's state.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// Serves until a shutdown is requested, then finishes what runs within `node.drain_timeout_ms`.
    pub async fn run(mut self) -> Result<(), NodeError> {
        tokio::select! {
            () = self.shutdown.wait() => {}
            () = self.thread.ended() => return Err(NodeError::EngineDied),
        }
        let jobs = self.member.jobs.len();
        tracing::info!(jobs, "draining");
        self.member.jobs.close();
        tokio::select! {
            () = self.member.jobs.wait() => {}
            () = self.shutdown.wait_forced() => {}
            () = self.thread.ended() => return Err(NodeError::EngineDied),
            () = tokio::time::sleep(self.drain_timeout) => {
                tracing::warn!(jobs = self.member.jobs.len(), "drain timeout: the jobs that still run are given up");
            }
        }
        self.endpoint.close("the node stops").await;
        self.engine.close();
        let joined = tokio::task::spawn_blocking(move || self.thread.join()).await;
        if joined.is_ok_and(|clean| clean) {
            Ok(())
        } else {
            Err(NodeError::EngineDied)
        }
    }
}

fn start_engine(
    config: &Config,
    limits: EngineLimits,
    runner: Box<dyn Runner>,
) -> Result<(EngineHandle, EngineThread), NodeError> {
    let core = config::cores(&config.engine.cores).and_then(|cores| cores.first().copied());
    let queue = 2 * config.node.max_jobs + 16;
    engine_thread::start(Engine::new(limits)?, runner, Clock, queue, core)
        .map_err(|source| NodeError::system("cannot start the engine thread", source))
}

/// What a node whose program can serve `able` serves at first.
fn first_duty(config: &Config, able: Role) -> Role {
    match (able, config.node.role) {
        (Role::Both, NodeRoleConfig::Prefill) => Role::Prefill,
        (Role::Both, NodeRoleConfig::Decode) => Role::Decode,
        (Role::Both, NodeRoleConfig::Both) | (Role::Prefill | Role::Decode | Role::Coordinator, _) => able,
    }
}

async fn accept_kv<R: NodeRole>(endpoint: Arc<QuicEndpoint>, role: Arc<R>) {
    while let Some(link) = endpoint.accept().await {
        let role = Arc::clone(&role);
        tokio::spawn(async move { role.serve_kv(link).await });
    }
}

/// Longest sequence, in tokens. The last token of a sequence is never computed, so it needs no position of its own: a
/// prompt may fill all positions of the model. It does need a place in the pool's reckoning.
fn longest_sequence(limits: &EngineLimits, positions: usize) -> usize {
    let one_more = EngineLimits {
        max_seq_len: positions + 1,
        ..*limits
    };
    let fits = one_more.longest_blocks() <= limits.total_blocks;
    limits.max_seq_len.min(positions + usize::from(fits))
}

fn engine_limits(config: &Config, pool: &KvPool, max_seq_len: usize) -> EngineLimits {
    EngineLimits {
        total_blocks: pool.total_blocks(),
        block_tokens: config.engine.kv_block_tokens,
        max_num_seqs: config.engine.max_num_seqs,
        max_batch_tokens: config.engine.max_batch_tokens,
        prefill_chunk_tokens: config.engine.prefill_chunk_tokens,
        mixed_prefill_tokens: config.engine.mixed_prefill_tokens,
        mixed_prefill_time: Duration::from_millis(config.engine.mixed_prefill_ms),
        max_seq_len,
        prefix_cache: config.engine.prefix_cache,
        groups: pool.layout().groups,
    }
}

fn own_name(config: &Config, role: Role, identity: &Identity) -> Result<NodeId, NodeError> {
    let found = identity.peer();
    let named = config.node.id.is_empty() || config.node.id == found.node.0;
    if found.role.may_act_as(role) && named {
        return Ok(found.node.clone());
    }
    let name = if config.node.id.is_empty() {
        "(any name)"
    } else {
        &config.node.id
    };
    Err(NodeError::WrongCertificate {
        path: config.cluster.cert_path.clone(),
        found: found.to_string(),
        expected: format!("{role} {name}"),
    })
}

fn advertised(config: &Config, endpoint: &QuicEndpoint) -> Result<String, NodeError> {
    if config.node.advertise.is_empty() {
        Ok(endpoint.local_addr()?.to_string())
    } else {
        Ok(config.node.advertise.clone())
    }
}

/// Tells one life of a node from the next: wall-clock nanoseconds never repeat in practice, and need no randomness.
fn boot_number(clock: Clock) -> u64 {
    let since = clock
        .wall_time()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use protocol::window::Groups;

    use super::*;

    fn limits(max_seq_len: usize, total_blocks: usize, window: Option<u32>) -> EngineLimits {
        EngineLimits {
            total_blocks,
            block_tokens: 16,
            max_num_seqs: 4,
            max_batch_tokens: 64,
            prefill_chunk_tokens: 32,
            mixed_prefill_tokens: 32,
            mixed_prefill_time: Duration::ZERO,
            max_seq_len,
            prefix_cache: true,
            groups: Groups::of_window(window),
        }
    }

    #[test]
    fn the_last_token_needs_no_position() {
        let longest = |configured, blocks| longest_sequence(&limits(configured, blocks, None), 512);
        assert_eq!(longest(8_192, 2_048), 513);
        assert_eq!(longest(512, 2_048), 512);
        assert_eq!(longest(100, 2_048), 100);
        assert_eq!(longest(8_192, 32), 512, "it needs a place in the pool");
    }

    #[test]
    fn a_window_needs_no_more_for_longer_sequences() {
        assert_eq!(longest_sequence(&limits(8_192, 8, Some(64)), 512), 513);
    }
}
