//! A coordinator without HTTP on a real port, and nodes that do by hand what a test wants: real QUIC, real certificates,
//! no weights.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "every test file includes it and uses a part of it"
)]

use std::sync::Arc;
use std::time::Duration;

use config::{ClusterConfig, Config, TransferConfig};
use coordinator::control;
use coordinator::core::ledger::{Detokenizer, TextDecoder};
use coordinator::core::nodes::TextIdentity;
use coordinator::core::queue::Tenant;
use coordinator::core::types::{About, ClientEvent, ClusterStatus, Completion, ServeRequest};
use coordinator::driver::{Driver, DriverSettings, settings};
use coordinator::handle::{CoordinatorHandle, RequestStream};
use protocol::PROTOCOL_VERSION;
use protocol::codec::MAX_CONTROL_BYTES;
use protocol::control::{
    CoordinatorMessage, DecodeJob, Hello, Job, JobEvent, JobUpdate, LoadReport, NodeMessage, PrefillJob,
    PromptComputed, StepTiming,
};
use protocol::ids::{NodeId, RequestId, Role, Ticket};
use protocol::kv::{KvDtype, KvLayout, ModelIdentity};
use protocol::moved::HaveBlocks;
use protocol::sampling::{SampledToken, SamplingParams, StopRules};
use protocol::window::Groups;
use runtime::authority::CertificateAuthority;
use runtime::clock::Clock;
use runtime::framing::{FramingError, MessageReader, MessageWriter};
use runtime::identity::Identity;
use runtime::quic::{Alpn, Expect, Link, QuicEndpoint};
use runtime::shutdown::Shutdown;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Longest wait for anything in a test.
pub const SOON: Duration = Duration::from_secs(10);
const TOKENIZER_HASH: u64 = 7;
const VOCAB_SIZE: u32 = 256;

/// Every token is an ASCII character.
struct CharText;
struct CharDecoder;

impl Detokenizer for CharText {
    fn decoder(&self, _skip_special: bool) -> Box<dyn TextDecoder> {
        Box::new(CharDecoder)
    }

    fn is_special(&self, _token: u32) -> bool {
        false
    }
}

impl TextDecoder for CharDecoder {
    fn push(&mut self, token: u32) -> String {
        char::from_u32(token).map(String::from).unwrap_or_default()
    }

    fn finish(&mut self) -> String {
        String::new()
    }
}

/// A running coordinator; its tasks end with the test's runtime.
pub struct Coordinator {
    pub handle: CoordinatorHandle,
    pub shutdown: Shutdown,
    pub driver: JoinHandle<()>,
    pub address: String,
    authority: CertificateAuthority,
    endpoint: Arc<QuicEndpoint>,
}

impl Coordinator {
    pub async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    /// `change`: what the test wants to be different from a configuration with short timeouts.
    pub async fn start_with(change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::default();
        config.cluster.connect_timeout_ms = 1_000;
        config.coordinator.inter_token_timeout_ms = 5_000;
        // Tests are about hand-overs, and their nodes are idle.
        config.coordinator.local_prefill = config::LocalPrefillConfig::Never;
        change(&mut config);
        let authority = CertificateAuthority::generate().expect("an authority");
        let own = authority
            .issue(Role::Coordinator, &NodeId("c0".to_owned()))
            .expect("a certificate");
        let identity = Arc::new(own.identity().expect("an identity"));
        let endpoint = QuicEndpoint::bind(identity, "127.0.0.1:0", &config.cluster, &config.transfer).await;
        let endpoint = Arc::new(endpoint.expect("a port"));
        let shutdown = Shutdown::new();
        let millis = Duration::from_millis;
        let driver_settings = DriverSettings {
            log_requests: config::LogRequests::Debug,
            stream_buffer_tokens: config.coordinator.stream_buffer_tokens,
            client_stall_timeout: millis(config.coordinator.client_stall_timeout_ms),
            drain_timeout: millis(config.coordinator.drain_timeout_ms),
        };
        let text = TextIdentity {
            tokenizer_hash: TOKENIZER_HASH,
            vocab_size: VOCAB_SIZE,
            adapters: Vec::new(),
        };
        let core = settings::cluster(&config, text);
        let (driver, handle, to_driver) =
            Driver::new(core, driver_settings, Arc::new(CharText), Clock, shutdown.clone());
        let hello_timeout = millis(config.cluster.connect_timeout_ms);
        tokio::spawn(control::serve(
            Arc::clone(&endpoint),
            to_driver,
            hello_timeout,
            CancellationToken::new(),
        ));
        let address = endpoint.local_addr().expect("bound").to_string();
        let driver = tokio::spawn(driver.run());
        Self {
            handle,
            shutdown,
            driver,
            address,
            authority,
            endpoint,
        }
    }

    /// With p0 and d0.
    pub async fn with_nodes() -> (Self, Node, Node) {
        let coordinator = Self::start().await;
        let prefill = coordinator.join(Role::Prefill, "p0").await;
        let decode = coordinator.join(Role::Decode, "d0").await;
        (coordinator, prefill, decode)
    }

    /// A node with a certificate of this cluster, connected and silent.
    pub async fn dial(&self, role: Role, name: &str) -> (QuicEndpoint, Link) {
        let issued = self.authority.issue(role, &NodeId(name.to_owned()));
        let identity = issued.expect("a certificate").identity().expect("an identity");
        dial(identity, &self.address).await
    }

    /// A node that has been welcomed, or why it was not.
    pub async fn try_join(&self, hello: Hello) -> Result<Node, String> {
        let (endpoint, link) = self.dial(hello.role, &hello.node.0).await;
        introduce(endpoint, link, hello).await
    }

    pub async fn join(&self, role: Role, name: &str) -> Node {
        let node = self.try_join(hello(role, name, 1)).await.expect("welcome");
        self.until(|status| status.nodes.iter().any(|n| n.node == name)).await;
        node
    }

    /// Why a node is refused.
    pub async fn refuses(&self, hello: Hello) -> String {
        self.try_join(hello).await.err().expect("refused")
    }

    pub async fn submit(&self, request: ServeRequest) -> RequestStream {
        timeout(SOON, self.handle.submit(vec![request]))
            .await
            .expect("an answer")
            .expect("admitted")
            .pop()
            .expect("one stream for one request")
    }

    /// Waits until the published status is as wanted.
    pub async fn until(&self, wanted: impl Fn(&ClusterStatus) -> bool) {
        let wait = async {
            while !wanted(&self.handle.status()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(SOON, wait)
            .await
            .unwrap_or_else(|_| panic!("still {:?}", self.handle.status()));
    }
}

/// A link to the coordinator at `address`.
pub async fn dial(identity: Identity, address: &str) -> (QuicEndpoint, Link) {
    let (cluster, transfer) = (ClusterConfig::default(), TransferConfig::default());
    let endpoint = QuicEndpoint::bind(Arc::new(identity), "127.0.0.1:0", &cluster, &transfer).await;
    let endpoint = endpoint.expect("a port");
    let expect = Expect {
        role: Role::Coordinator,
        node: None,
    };
    let link = endpoint.connect(address, Alpn::Control, expect).await.expect("a link");
    (endpoint, link)
}

/// Says hello over a link; the node if it is welcomed, or why it is not.
pub async fn introduce(endpoint: QuicEndpoint, link: Link, hello: Hello) -> Result<Node, String> {
    let (send, recv) = link.connection.open_bi().await.expect("a stream");
    let mut membership = MessageWriter::new(send, MAX_CONTROL_BYTES);
    let mut answers = MessageReader::new(recv, MAX_CONTROL_BYTES);
    membership.write(&NodeMessage::Hello(hello)).await.expect("sent");
    match timeout(SOON, answers.next())
        .await
        .expect("an answer")
        .expect("a message")
    {
        Some(CoordinatorMessage::Welcome) => Ok(Node {
            endpoint,
            link,
            membership,
            answers,
        }),
        Some(CoordinatorMessage::Refused { reason }) => Err(reason),
        Some(order) => panic!("{order:?} before the welcome"),
        None => Err("closed".to_owned()),
    }
}

/// A node that has been welcomed. It does nothing by itself.
pub struct Node {
    pub endpoint: QuicEndpoint,
    pub link: Link,
    membership: MessageWriter,
    answers: MessageReader,
}

impl Node {
    /// The next job.
    pub async fn job(&self) -> (Job, JobSide) {
        let (send, recv) = timeout(SOON, self.link.connection.accept_bi())
            .await
            .expect("a job in time")
            .expect("a stream");
        let mut jobs = MessageReader::new(recv, MAX_CONTROL_BYTES);
        let job = timeout(SOON, jobs.next())
            .await
            .expect("in time")
            .expect("a message")
            .expect("a job");
        (
            job,
            JobSide {
                events: MessageWriter::new(send, MAX_CONTROL_BYTES),
                jobs,
            },
        )
    }

    /// The next job, which is a prefill.
    pub async fn prefill(&self) -> (PrefillJob, JobSide) {
        match self.job().await {
            (Job::Prefill(job), side) => (job, side),
            (other, _) => panic!("{other:?}"),
        }
    }

    /// The next job, which is a decode.
    pub async fn decode(&self) -> (DecodeJob, JobSide) {
        match self.job().await {
            (Job::Decode(job), side) => (job, side),
            (other, _) => panic!("{other:?}"),
        }
    }

    /// What the coordinator tells it next.
    pub async fn order(&mut self) -> CoordinatorMessage {
        timeout(SOON, self.answers.next())
            .await
            .expect("in time")
            .expect("a message")
            .expect("an open stream")
    }

    pub async fn report(&mut self, report: LoadReport) {
        self.say(&NodeMessage::Load(report)).await;
    }

    /// Says something on the membership stream.
    pub async fn say(&mut self, message: &NodeMessage) {
        self.membership.write(message).await.expect("sent");
    }

    /// Why the coordinator closed the link.
    pub async fn closed(&self) -> String {
        let error = timeout(SOON, self.link.connection.closed()).await.expect("closed");
        runtime::quic::describe(&error)
    }
}

/// A node's side of a job stream.
pub struct JobSide {
    pub events: MessageWriter,
    pub jobs: MessageReader,
}

impl JobSide {
    pub async fn say(&mut self, event: JobEvent) {
        timeout(SOON, self.events.write(&event))
            .await
            .expect("in time")
            .expect("the coordinator listens");
    }

    pub async fn grant(&mut self) {
        self.say(JobEvent::Granted {
            ticket: Ticket(5),
            have_blocks: HaveBlocks::NONE,
        })
        .await;
    }

    pub async fn first_token(&mut self, token: char) {
        self.first_tokens(&[token]).await;
    }

    /// One for each choice.
    pub async fn first_tokens(&mut self, tokens: &[char]) {
        let first = PromptComputed {
            tokens: tokens.iter().map(|token| sampled(0, *token)).collect(),
            step: StepTiming::default(),
            cached_tokens: 0,
            prompt_logprobs: None,
        };
        self.say(JobEvent::Computed(first)).await;
    }

    pub async fn token(&mut self, position: u32, token: char) {
        self.say(JobEvent::Token {
            choice: 0,
            token: sampled(position, token),
            step: StepTiming::default(),
        })
        .await;
    }

    /// What the coordinator says behind the job.
    pub async fn update(&mut self) -> JobUpdate {
        timeout(SOON, self.jobs.next())
            .await
            .expect("in time")
            .expect("a message")
            .expect("an open stream")
    }

    /// Waits for the cancel: both directions of the stream are reset.
    pub async fn cancelled(mut self) {
        let stopped = timeout(SOON, self.events.stopped()).await.expect("a cancel in time");
        assert!(matches!(stopped, Err(FramingError::Reset { code: 1 })), "{stopped:?}");
        let reset = timeout(SOON, self.jobs.next::<Job>()).await.expect("a reset in time");
        assert!(matches!(reset, Err(FramingError::Reset { code: 1 })), "{reset:?}");
    }
}

pub fn hello(role: Role, node: &str, boot: u64) -> Hello {
    Hello {
        protocol_version: PROTOCOL_VERSION,
        node: NodeId(node.to_owned()),
        boot,
        role,
        address: "127.0.0.1:9".to_owned(),
        model: ModelIdentity {
            architecture: "llama".to_owned(),
            vocab_size: VOCAB_SIZE,
            tokenizer_hash: TOKENIZER_HASH,
            weights_hash: 9,
            numerics: "float32/portable".to_owned(),
            adapters: Vec::new(),
        },
        layout: KvLayout {
            num_layers: 1,
            num_kv_heads: 1,
            head_dim: 2,
            block_tokens: 4,
            dtype: KvDtype::F32,
            latent: false,
            groups: Groups::ONE,
        },
        total_blocks: 100,
        max_num_seqs: 16,
        max_seq_len: 300,
    }
}

pub fn sampled(position: u32, token: char) -> SampledToken {
    SampledToken {
        position,
        token: token as u32,
        logprob: 0.0,
        raw_logprob: 0.0,
        top_logprobs: Vec::new(),
    }
}

pub fn request(id: u128, max_tokens: u32) -> ServeRequest {
    ServeRequest {
        about: About::default(),
        id: RequestId(id),
        tenant: Tenant::default(),
        timeout: Duration::from_secs(3_600),
        token_ids: vec![1, 2, 3].into(),
        adapter: None,
        body_bytes: 30,
        choices: 1,
        beam_width: None,
        sampling: SamplingParams::greedy(),
        stop: StopRules {
            max_tokens,
            eos_token_ids: Vec::new(),
            ignore_eos: false,
            stop_token_ids: Vec::new(),
        },
        stop_strings: [].into(),
        include_stop_str: false,
        skip_special_tokens: true,
        prompt_logprobs: None,
    }
}

/// The rest of a request of one choice: its visible text, how it ended, and its last event.
pub async fn finish(stream: &mut RequestStream) -> (String, Option<Completion>, ClientEvent) {
    let (mut text, mut end) = (String::new(), None);
    loop {
        match timeout(SOON, stream.next())
            .await
            .expect("an event in time")
            .expect("an end before the end")
        {
            ClientEvent::Token { token, .. } => text.push_str(&token.visible),
            ClientEvent::Ended { completion, .. } => end = Some(completion),
            ClientEvent::Prefill { .. } | ClientEvent::Served(_) => {}
            last @ (ClientEvent::Done { .. } | ClientEvent::Failed(_)) => return (text, end, last),
        }
    }
}

/// Waits for `count` token events.
pub async fn tokens(stream: &mut RequestStream, count: usize) {
    let mut seen = 0;
    while seen < count {
        let event = timeout(SOON, stream.next()).await.expect("an event in time");
        seen += usize::from(matches!(event, Some(ClientEvent::Token { .. })));
    }
}
