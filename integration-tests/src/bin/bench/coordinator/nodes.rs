//! Nodes that compute nothing: they answer every job at once, or keep it waiting, over real QUIC.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use config::{ClusterConfig, TransferConfig};
use model_files::TextModel;
use protocol::PROTOCOL_VERSION;
use protocol::codec::MAX_CONTROL_BYTES;
use protocol::control::{
    CoordinatorMessage, DecodeJob, HandoffStats, Hello, Job, JobEvent, LoadReport, NodeMessage, PromptComputed,
    StepTiming,
};
use protocol::ids::{NodeId, Role, Ticket};
use protocol::kv::{KvDtype, KvLayout, ModelIdentity};
use protocol::moved::HaveBlocks;
use protocol::sampling::SampledToken;
use protocol::window::Groups;
use runtime::framing::{MessageReader, MessageWriter};
use runtime::identity::Identity;
use runtime::quic::{Alpn, Expect, QuicEndpoint};
use tokio::task::JoinHandle;

/// Blocks that a node says it has: enough for whatever is asked.
const BLOCKS: u32 = 4_000_000;
const BLOCK_TOKENS: u32 = 16;
/// The token that every node samples.
const TOKEN: u32 = 300;

/// Who a node is.
pub(super) struct FakeNode<'a> {
    pub(super) role: Role,
    pub(super) name: &'a str,
    /// Folder with the cluster's certificates.
    pub(super) certs: &'a Path,
    /// The coordinator's control plane.
    pub(super) coordinator: &'a str,
    /// Agrees with the coordinator's.
    pub(super) text: &'a TextModel,
    /// It reports no free blocks: everything waits.
    pub(super) full: bool,
}

impl FakeNode<'_> {
    fn hello(&self) -> Hello {
        Hello {
            protocol_version: PROTOCOL_VERSION,
            node: NodeId(self.name.to_owned()),
            boot: 1,
            role: self.role,
            address: "127.0.0.1:9".to_owned(),
            model: ModelIdentity {
                architecture: "llama".to_owned(),
                vocab_size: u32::try_from(self.text.vocab_size).unwrap_or(u32::MAX),
                tokenizer_hash: self.text.tokenizer_hash,
                weights_hash: 1,
                numerics: "none".to_owned(),
                adapters: Vec::new(),
            },
            layout: KvLayout {
                num_layers: 1,
                num_kv_heads: 1,
                head_dim: 16,
                block_tokens: BLOCK_TOKENS,
                dtype: KvDtype::F16,
                latent: false,
                groups: Groups::ONE,
            },
            total_blocks: BLOCKS,
            max_num_seqs: 100_000,
            max_seq_len: 1_000_000,
        }
    }

    /// Joins; the task serves until the link ends.
    pub(super) async fn start(&self) -> Result<JoinHandle<()>> {
        let file = |ending: &str| self.certs.join(format!("{}.{ending}", self.name)).display().to_string();
        let cluster = ClusterConfig {
            ca_cert_path: self.certs.join("ca.pem").display().to_string(),
            cert_path: file("pem"),
            key_path: file("key"),
            ..ClusterConfig::default()
        };
        let identity = Arc::new(Identity::load(&cluster)?);
        let endpoint = QuicEndpoint::bind(identity, "127.0.0.1:0", &cluster, &TransferConfig::default()).await?;
        let expect = Expect {
            role: Role::Coordinator,
            node: None,
        };
        let link = endpoint.connect(self.coordinator, Alpn::Control, expect).await?;
        let (send, recv) = link.connection.open_bi().await?;
        let mut writer = MessageWriter::new(send, MAX_CONTROL_BYTES);
        let mut reader = MessageReader::new(recv, MAX_CONTROL_BYTES);
        writer.write(&NodeMessage::Hello(self.hello())).await?;
        match reader.next().await?.context("no answer to the hello")? {
            CoordinatorMessage::Welcome => {}
            other => bail!("not welcome: {other:?}"),
        }
        let report = LoadReport {
            sequence: 1,
            free_blocks: if self.full { 0 } else { BLOCKS },
            owned_blocks: if self.full { BLOCKS } else { 0 },
            role: self.role,
            ..LoadReport::default()
        };
        writer.write(&NodeMessage::Load(report)).await?;
        Ok(tokio::spawn(async move {
            // These live as long as the node.
            let _membership = (endpoint, writer, reader);
            while let Ok((send, recv)) = link.connection.accept_bi().await {
                tokio::spawn(async move {
                    // A coordinator that is gone needs no answer.
                    let _answered = answer(send, recv).await;
                });
            }
        }))
    }
}

async fn answer(send: quinn::SendStream, recv: quinn::RecvStream) -> Result<()> {
    let mut events = MessageWriter::new(send, MAX_CONTROL_BYTES);
    let mut jobs = MessageReader::new(recv, MAX_CONTROL_BYTES);
    match jobs.next().await?.context("no job")? {
        Job::Prefill(job) => {
            ensure!(job.choices == 1, "one choice each");
            let computed = PromptComputed {
                tokens: vec![sampled(0)],
                step: StepTiming::default(),
                cached_tokens: 0,
                prompt_logprobs: None,
            };
            events.write(&JobEvent::Computed(computed)).await?;
            if job.stop.max_tokens == 1 {
                events.write(&JobEvent::Finished).await?;
            } else {
                events.write(&JobEvent::HandedOff(HandoffStats::default())).await?;
            }
        }
        Job::Decode(job) => generate(&job, &mut events).await?,
    }
    events.finish()?;
    Ok(())
}

/// All at once: what comes before the first token waits for it in the coordinator.
async fn generate(job: &DecodeJob, events: &mut MessageWriter) -> Result<()> {
    let granted = JobEvent::Granted {
        ticket: Ticket(1),
        have_blocks: HaveBlocks::NONE,
    };
    events.write(&granted).await?;
    events.write(&JobEvent::Committed).await?;
    for position in 1..job.stop.max_tokens {
        let token = JobEvent::Token {
            choice: 0,
            token: sampled(position),
            step: StepTiming::default(),
        };
        events.write(&token).await?;
    }
    events.write(&JobEvent::Finished).await?;
    Ok(())
}

fn sampled(position: u32) -> SampledToken {
    SampledToken {
        position,
        token: TOKEN,
        logprob: -0.5,
        raw_logprob: -0.5,
        top_logprobs: Vec::new(),
    }
}
