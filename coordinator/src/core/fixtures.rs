//! Requests and a text in which every token is a byte: for the tests of the core.

use std::sync::Arc;
use std::time::Duration;

use protocol::PROTOCOL_VERSION;
use protocol::control::Hello;
use protocol::ids::{NodeId, RequestId, Role};
use protocol::kv::{KvDtype, KvLayout, ModelIdentity};
use protocol::sampling::{SampledToken, SamplingParams, StopRules};
use protocol::window::Groups;

use super::admission::AdmissionLimits;
use super::cluster::ClusterSettings;
use super::ledger::{Detokenizer, TextDecoder};
use super::nodes::{BreakerLimits, HealthLimits, LinkId, Nodes, PrefillCredit, StepLimits, TextIdentity};
use super::phases::PhaseTimes;
use super::queue::Tenant;
use super::recent::RequestRecord;
use super::request::RequestLimits;
use super::routing::{LocalPrefill, Policy};
use super::types::{About, NodeStatus, ServeRequest};

/// Tokens of a block of [`hello`]'s layout.
pub(crate) const BLOCK_TOKENS: u32 = 4;

/// Ends a sequence; special, and hidden text `</s>`.
pub(crate) const EOS: u32 = 256;
/// A special token with the text `<s>`.
pub(crate) const SPECIAL: u32 = 257;

/// Tokens 0..=255 are bytes.
pub(crate) struct ByteText;

struct ByteDecoder {
    skip_special: bool,
    pending: Vec<u8>,
}

impl Detokenizer for ByteText {
    fn decoder(&self, skip_special: bool) -> Box<dyn TextDecoder> {
        Box::new(ByteDecoder {
            skip_special,
            pending: Vec::new(),
        })
    }

    fn is_special(&self, token: u32) -> bool {
        token >= EOS
    }
}

impl TextDecoder for ByteDecoder {
    fn push(&mut self, token: u32) -> String {
        let Ok(byte) = u8::try_from(token) else {
            if self.skip_special {
                return String::new();
            }
            return self.finish() + if token == EOS { "</s>" } else { "<s>" };
        };
        self.pending.push(byte);
        match std::str::from_utf8(&self.pending) {
            Ok(text) => {
                let text = text.to_owned();
                self.pending.clear();
                text
            }
            Err(error) if error.error_len().is_none() => String::new(),
            Err(_) => self.finish(),
        }
    }

    fn finish(&mut self) -> String {
        let bytes = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// A request of `prompt` tokens for at most `max_tokens`.
pub(crate) fn request(id: u128, prompt: usize, max_tokens: u32) -> ServeRequest {
    ServeRequest {
        about: About::default(),
        id: RequestId(id),
        tenant: Tenant::default(),
        timeout: Duration::from_secs(3_600),
        token_ids: (0..prompt as u32).map(|i| i % 256).collect::<Arc<[u32]>>(),
        adapter: None,
        body_bytes: prompt,
        choices: 1,
        beam_width: None,
        sampling: SamplingParams::greedy(),
        stop: StopRules {
            max_tokens,
            eos_token_ids: vec![EOS],
            ignore_eos: false,
            stop_token_ids: Vec::new(),
        },
        stop_strings: [].into(),
        include_stop_str: false,
        skip_special_tokens: true,
        prompt_logprobs: None,
    }
}

/// A sampled token.
pub(crate) fn sampled(position: u32, token: u32) -> SampledToken {
    SampledToken {
        position,
        token,
        logprob: -0.5,
        raw_logprob: -0.25,
        top_logprobs: Vec::new(),
    }
}

/// Settings whose deadlines all differ.
pub(crate) fn settings() -> ClusterSettings {
    ClusterSettings {
        request: RequestLimits {
            queue_timeout: Duration::from_secs(60),
            reserve_timeout: Duration::from_secs(5),
            prefill_timeout: Duration::from_secs(120),
            handoff_timeout: Duration::from_secs(30),
            inter_token_timeout: Duration::from_secs(20),
            max_restarts: 2,
            max_migrations: 2,
        },
        admission: AdmissionLimits {
            max_concurrent_requests: 64,
            max_queued_requests: 32,
            max_queued_bytes: 1 << 20,
        },
        text: TextIdentity {
            tokenizer_hash: 7,
            vocab_size: 258,
            adapters: Vec::new(),
        },
        prefill_credit: PrefillCredit {
            window_tokens: 64,
            sharing_jobs: 2,
        },
        // Nodes of tests report when they are told to.
        health: HealthLimits {
            stall: Duration::from_secs(1_000_000),
            breaker: BreakerLimits {
                failures: 1_000,
                open: Duration::from_secs(1),
            },
        },
        decision_records: 16,
        local_prefill: LocalPrefill::Never,
        policy: Policy::PrefixAffinity,
        steps: StepLimits {
            chunk_tokens: 32,
            mixed_tokens: 16,
            mixed_us: 25_000,
        },
    }
}

/// A node with `total_blocks` blocks of [`BLOCK_TOKENS`] tokens.
pub(crate) fn hello(role: Role, node: &str, boot: u64, total_blocks: u32) -> Hello {
    Hello {
        protocol_version: PROTOCOL_VERSION,
        node: NodeId(node.to_owned()),
        boot,
        role,
        address: format!("{node}.test:1"),
        model: ModelIdentity {
            architecture: "llama".to_owned(),
            vocab_size: 258,
            tokenizer_hash: 7,
            weights_hash: 9,
            numerics: "float32/portable".to_owned(),
            adapters: Vec::new(),
        },
        layout: KvLayout {
            num_layers: 2,
            num_kv_heads: 1,
            head_dim: 4,
            block_tokens: BLOCK_TOKENS,
            dtype: KvDtype::F32,
            latent: false,
            groups: Groups::ONE,
        },
        total_blocks,
        max_num_seqs: 16,
        max_seq_len: 4096,
    }
}

/// A connected node that has done nothing.
pub(crate) fn node_status(node: &str, role: Role) -> NodeStatus {
    let settings = settings();
    let mut nodes = Nodes::new(settings.text, settings.prefill_credit, settings.steps, settings.health);
    nodes.join(LinkId(0), role, hello(role, node, 0, 8));
    nodes.status().remove(0)
}

/// What is kept of a request of which nothing matters.
pub(crate) fn record() -> RequestRecord {
    RequestRecord {
        request: String::new(),
        client_request_id: None,
        trace_id: None,
        outcome: "done",
        age_ms: 0,
        attempts: 1,
        prompt_tokens: 1,
        generated_tokens: 1,
        finish_reasons: Vec::new(),
        nodes: Vec::new(),
        phases: PhaseTimes::default(),
    }
}
