//! The same nodes asked without a coordinator: what any coordinator has to wait for.
//!
//! A request is a reservation at the decode node and, once that is granted, a prefill job, over the same links and with the
//! same messages. What is left of an answer's time is what the coordinator adds: HTTP, text, decisions, its own tasks.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use config::{ClusterConfig, TransferConfig};
use model_files::TextModel;
use protocol::codec::MAX_CONTROL_BYTES;
use protocol::context::RequestContext;
use protocol::control::{
    ChoiceStart, CoordinatorMessage, DecodeJob, HandoffTarget, Job, JobEvent, KvSource, NodeMessage, PrefillJob,
};
use protocol::ids::{Epoch, NodeId, RequestId, Role, Ticket};
use protocol::moved::HaveBlocks;
use protocol::sampling::{SamplingParams, StopRules};
use runtime::clock::Clock;
use runtime::framing::{MessageReader, MessageWriter};
use runtime::identity::Identity;
use runtime::quic::{Link, QuicEndpoint};
use tokio::task::JoinHandle;

use super::nodes::FakeNode;

/// A job's time on a node; nothing takes that long.
const DEADLINE_MS: u64 = 10_000;

/// A prefill and a decode node, and the links they dialled.
pub(super) struct Direct {
    prefill: Node,
    decode: Node,
    /// Live as long as this.
    _held: (QuicEndpoint, Vec<JoinHandle<()>>),
}

struct Node {
    link: Link,
    _membership: (MessageReader, MessageWriter),
}

impl Direct {
    /// Nodes that have been welcomed. `certs`: the folder with the certificates of `coordinator`, `prefill-0` and `decode-0`.
    pub(super) async fn start(certs: &Path, text: &TextModel) -> Result<Self> {
        let cluster = ClusterConfig {
            ca_cert_path: certs.join("ca.pem").display().to_string(),
            cert_path: certs.join("coordinator.pem").display().to_string(),
            key_path: certs.join("coordinator.key").display().to_string(),
            ..ClusterConfig::default()
        };
        let identity = Arc::new(Identity::load(&cluster)?);
        let endpoint = QuicEndpoint::bind(identity, "127.0.0.1:0", &cluster, &TransferConfig::default()).await?;
        let address = endpoint.local_addr()?.to_string();
        let mut tasks = Vec::new();
        let mut welcomed = Vec::new();
        for (role, name) in [(Role::Prefill, "prefill-0"), (Role::Decode, "decode-0")] {
            let node = FakeNode {
                role,
                name,
                certs,
                coordinator: &address,
                text,
                full: false,
            };
            let (task, node) = tokio::join!(node.start(), welcome(&endpoint));
            tasks.push(task?);
            welcomed.push(node?);
        }
        let decode = welcomed.pop().context("a decode node")?;
        Ok(Self {
            prefill: welcomed.pop().context("a prefill node")?,
            decode,
            _held: (endpoint, tasks),
        })
    }

    /// One request with that prompt for so many tokens; how long it took.
    pub(super) async fn ask(&self, prompt: &[u32], tokens: u32) -> Result<Duration> {
        let stop = StopRules::length(tokens);
        let from = Clock.now();
        let decode = DecodeJob {
            request: RequestId(1),
            context: RequestContext::default(),
            epoch: Epoch(1),
            token_ids: prompt.to_vec(),
            adapter: None,
            choices: vec![ChoiceStart::default()],
            beam_width: None,
            sampling: SamplingParams::greedy(),
            stop: stop.clone(),
            source: KvSource::Handoff,
            prompt_logprobs: None,
            handoff_deadline_ms: DEADLINE_MS,
            deadline_ms: DEADLINE_MS,
        };
        let (mut generated, _decode_side) = self.decode.begin(&Job::Decode(decode)).await?;
        let granted = generated.next().await?.context("no grant")?;
        ensure!(
            matches!(granted, JobEvent::Granted { .. }),
            "{granted:?} instead of a grant"
        );
        let prefill = PrefillJob {
            request: RequestId(1),
            context: RequestContext::default(),
            epoch: Epoch(1),
            token_ids: prompt.to_vec(),
            adapter: None,
            sampling: SamplingParams::greedy(),
            choices: 1,
            stop,
            prompt_logprobs: None,
            handoff: Some(HandoffTarget {
                node: NodeId("decode-0".to_owned()),
                address: "127.0.0.1:9".to_owned(),
                ticket: Ticket(1),
                have_blocks: HaveBlocks::NONE,
            }),
            deadline_ms: DEADLINE_MS,
        };
        let (mut computed, _prefill_side) = self.prefill.begin(&Job::Prefill(prefill)).await?;
        let first: JobEvent = computed.next().await?.context("no first token")?;
        ensure!(
            matches!(first, JobEvent::Computed(_)),
            "{first:?} instead of a first token"
        );
        loop {
            match generated.next().await?.context("no end")? {
                JobEvent::Finished => return Ok(from.elapsed()),
                JobEvent::Committed | JobEvent::Token { .. } => {}
                other => bail!("{other:?} instead of a token"),
            }
        }
    }
}

impl Node {
    async fn begin(&self, job: &Job) -> Result<(MessageReader, MessageWriter)> {
        let (send, recv) = self.link.connection.open_bi().await?;
        let mut writer = MessageWriter::new(send, MAX_CONTROL_BYTES);
        writer.write(job).await?;
        Ok((MessageReader::new(recv, MAX_CONTROL_BYTES), writer))
    }
}

async fn welcome(endpoint: &QuicEndpoint) -> Result<Node> {
    let link = endpoint.accept().await.context("the endpoint is closed")?;
    let (send, recv) = link.connection.accept_bi().await?;
    let mut reader = MessageReader::new(recv, MAX_CONTROL_BYTES);
    let mut writer = MessageWriter::new(send, MAX_CONTROL_BYTES);
    let hello = reader.next().await?.context("no hello")?;
    ensure!(matches!(hello, NodeMessage::Hello(_)), "{hello:?} instead of a hello");
    writer.write(&CoordinatorMessage::Welcome).await?;
    Ok(Node {
        link,
        _membership: (reader, writer),
    })
}
