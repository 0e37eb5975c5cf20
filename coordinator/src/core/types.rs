//! What the HTTP layer hands to the core, and what it gets back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::context::RequestContext;
use protocol::control::{StepTiming, WorkDone};
use protocol::ids::RequestId;
use protocol::sampling::{PromptLogprob, SampledToken, SamplingParams, StopRules};
use serde::Serialize;
use thiserror::Error;

use super::journey::Served;
use super::phases::PhaseTimes;
use super::queue::Tenant;
use super::words;

/// One prompt of a client's call with all its choices, checked and tokenised: it can be served as it stands.
#[derive(Clone, Debug)]
pub struct ServeRequest {
    /// Name of the request; 128 random bits, never used twice.
    pub id: RequestId,
    /// Where it comes from; nothing is decided by it.
    pub about: About,
    /// Whose it is.
    pub tenant: Tenant,
    /// It has to be answered within this time.
    pub timeout: Duration,
    /// The prompt, after truncation; not empty.
    pub token_ids: Arc<[u32]>,
    /// Name of the adapter that the model is served with; `None`: the model as it is.
    pub adapter: Option<String>,
    /// Bytes of the client's body; 0 for the further requests of a call.
    pub body_bytes: usize,
    /// How many answers are drawn; with a beam search the best so many are kept. 0: none, only the prompt is computed.
    pub choices: u32,
    /// Beam search of this width, which is the number of choices.
    pub beam_width: Option<u32>,
    /// How tokens are drawn. `choice` is the first choice's number; the others follow it.
    pub sampling: SamplingParams,
    /// When a choice ends; `max_tokens` is clamped to every limit already, the one extra decode token included.
    pub stop: StopRules,
    /// Strings that end the generated text, in the client's order; none of them is empty.
    pub stop_strings: Arc<[String]>,
    /// Keep the stop string, or the terminating token's text, in the visible text.
    pub include_stop_str: bool,
    /// Leave special tokens out of the visible text.
    pub skip_special_tokens: bool,
    /// Report the log-probability of every prompt token, and that many of the most probable alternatives at each.
    pub prompt_logprobs: Option<u8>,
}

/// Where a request comes from: for logs, traces and records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    /// Its other names; the requests of a call share them.
    pub context: Arc<RequestContext>,
    /// When the call arrived; `None`: when it was submitted.
    pub arrived: Option<Instant>,
}

/// What happens to a request, in the order in which it happens: at most one `Prefill`; then, for each choice, tokens by
/// position and one `Ended`; then exactly one `Done` or `Failed`, which is the last event.
#[derive(Clone, Debug, PartialEq)]
pub enum ClientEvent {
    /// The prompt has been computed; the first token follows at once.
    Prefill {
        /// Prompt tokens taken from a prefix cache.
        cached_tokens: u32,
        /// Log-probability of each prompt token from the second on, if asked for.
        prompt_logprobs: Option<Vec<PromptLogprob>>,
        /// Microseconds from submission until the prefill job was sent: the wait in the coordinator's queue and for the
        /// reservation.
        queue_us: u64,
    },
    /// One more token of a choice.
    Token {
        /// Which choice, from 0.
        choice: u32,
        /// The token.
        token: OutputToken,
    },
    /// A choice has ended by its own rules.
    Ended {
        /// Which choice, from 0.
        choice: u32,
        /// How.
        completion: Completion,
    },
    /// Where it was served, told just before the end if it is traced.
    Served(Box<Served>),
    /// Every choice has ended.
    Done {
        /// When the request came.
        submitted: Instant,
        /// Where the time since then went.
        phases: PhaseTimes,
    },
    /// The request has ended without an answer, or with a part of one.
    Failed(ServeError),
}

/// One accepted token.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputToken {
    /// The token as it was sampled.
    pub sampled: SampledToken,
    /// What the token adds to the text, special tokens shown literally; "" while a character is incomplete.
    pub text: String,
    /// Visible text that this token releases: without skipped special tokens, without what may still become a stop
    /// string; may be "".
    pub visible: String,
    /// The token is a special one.
    pub special: bool,
    /// Timing of its step.
    pub step: StepTiming,
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Why the text ends where it does.
    pub finish: Finish,
    /// Tokens sampled on all nodes: equals the number of the choice's `Token` events.
    pub generated_tokens: u32,
    /// Visible text that was held back and is now known not to be part of a stop string.
    pub tail: String,
    /// The last token was the last permitted one, whatever `finish` says.
    pub limit_reached: bool,
}

/// Why the text ends where it does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The token limit.
    Length,
    /// An end-of-sequence token.
    Eos,
    /// The given token of `StopRules::stop_token_ids`.
    StopToken(u32),
    /// The given string of `ServeRequest::stop_strings`.
    StopString(String),
}

impl Finish {
    /// OpenAI's word for it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Eos | Self::StopToken(_) | Self::StopString(_) => "stop",
        }
    }
}

/// Why a request could not be answered.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{message}")]
pub struct ServeError {
    /// What kind of failure.
    pub kind: ServeErrorKind,
    /// One line for the client; holds no text of any request, no path and no address.
    pub message: String,
}

/// Kinds of failures, by what the client can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ServeErrorKind {
    /// The cluster has no room: try again after the given time.
    Overloaded {
        /// Seconds, at least 1.
        retry_after_s: u32,
    },
    /// No node of a needed role is there, or the coordinator stops.
    Unavailable,
    /// A deadline of one of the request's states passed.
    Timeout,
    /// Nodes died under the request more often than it may be moved.
    NodeLost,
    /// The KV cache could not be handed over, and the request could not be moved.
    TransferFailed,
    /// No connected node can hold a sequence as long as this one.
    TooLong,
    /// The client went away, or stopped reading.
    Cancelled,
    /// A fault inside the cluster.
    Internal,
}

/// About what the automaton of the stop strings takes for each of their bytes.
const STOP_STATE_BYTES: usize = 24;
/// About what the ledger of a choice beside the first takes.
const CHOICE_BYTES: usize = 512;

impl ServeRequest {
    /// Bytes it is charged for while it waits. The requests of a call share body and stop strings: the first, which has the
    /// body, is charged for both.
    pub fn charge(&self) -> usize {
        let stops: usize = match self.body_bytes {
            0 => 0,
            _ => self.stop_strings.iter().map(String::len).sum(),
        };
        let further_choices = (self.choices as usize).saturating_sub(1);
        self.body_bytes
            + self.token_ids.len() * size_of::<u32>()
            + stops * STOP_STATE_BYTES
            + further_choices * CHOICE_BYTES
    }

    /// Tokens that nodes may compute for it, prompt and all answers.
    pub fn size(&self) -> u64 {
        let generated = u64::from(self.stop.max_tokens) * u64::from(self.choices);
        (self.token_ids.len() as u64).saturating_add(generated)
    }

    /// True if a decode node is needed: for more than the first tokens, and for beam search, which draws all of its tokens
    /// there.
    pub fn needs_decode(&self) -> bool {
        self.beam_width.is_some() || (self.choices > 0 && self.stop.max_tokens > 1)
    }
}

impl ClientEvent {
    /// True if nothing follows.
    pub fn is_last(&self) -> bool {
        match self {
            Self::Done { .. } | Self::Failed(_) => true,
            Self::Prefill { .. } | Self::Token { .. } | Self::Ended { .. } | Self::Served(_) => false,
        }
    }
}

impl ServeErrorKind {
    words! {
        Overloaded => "overloaded",
        Unavailable => "unavailable",
        Timeout => "timeout",
        NodeLost => "node_lost",
        TransferFailed => "transfer_failed",
        TooLong => "too_long",
        Cancelled => "cancelled",
        Internal => "internal",
    }
}

impl ServeError {
    /// An error of `kind`.
    pub fn new(kind: ServeErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
        }
    }
}

/// What the cluster looks like: a snapshot for health checks, `/info` and metrics.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterStatus {
    /// All connected nodes, by role and name.
    pub nodes: Vec<NodeStatus>,
    /// For each role that nodes have, what they do together.
    pub pools: Vec<PoolStatus>,
    /// What nodes have done while this coordinator watched.
    pub watched: Watched,
    /// Requests in the coordinator's queue.
    pub queued: usize,
    /// Bytes those requests are charged for.
    pub queued_bytes: usize,
    /// Requests that nodes work on.
    pub running: usize,
    /// The coordinator stops: it takes no new requests.
    pub draining: bool,
    /// Decode nodes may compute prompts themselves.
    pub local_prefill: bool,
}

impl ClusterStatus {
    /// True if a request sent now would be worked on: a prefill and a decode node are there and take jobs, or a decode
    /// node that may do it alone.
    pub fn is_ready(&self) -> bool {
        use protocol::ids::Role;
        let serves = |role: Role| {
            self.nodes
                .iter()
                .any(|node| node.role.may_act_as(role) && !node.draining && !node.stalled)
        };
        !self.draining && serves(Role::Decode) && (self.local_prefill || serves(Role::Prefill))
    }
}

/// What nodes have done while this coordinator watched them, those that have gone included: only ever grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watched {
    /// Engine steps of nodes that compute prompts only.
    pub prefill_steps: u64,
    /// Engine steps of nodes that generate.
    pub decode_steps: u64,
    /// Sequences that lost their blocks to others, on nodes that generate.
    pub decode_preemptions: u64,
}

/// The connected nodes of one role.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolStatus {
    /// Which: nodes that serve both roles have a pool of their own.
    pub role: protocol::ids::Role,
    /// How many nodes.
    pub nodes: u32,
    /// Blocks of their KV pools.
    pub total_blocks: u64,
    /// Blocks nobody uses.
    pub free_blocks: u64,
    /// Blocks kept only as prefix cache.
    pub cached_blocks: u64,
    /// Blocks owned by sequences, reservations and handoffs.
    pub owned_blocks: u64,
    /// Blocks the coordinator has booked for its jobs.
    pub booked_blocks: u64,
    /// The coordinator's jobs.
    pub jobs: u64,
    /// Sequences in the running batches.
    pub running: u64,
    /// Sequences waiting in the engines.
    pub waiting: u64,
    /// Those of them that had started and have lost their blocks to others.
    pub preempted: u64,
    /// Rows that the sequences lack before each has its next token.
    pub queued_tokens: u64,
    /// The longest of the nodes' oldest waits.
    pub oldest_wait: Duration,
    /// How fast the nodes have worked lately, together; step time and batch size are those of a mean step.
    pub rates: Rates,
}

/// How fast a node, or a pool, has worked over the last seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// Engine steps a second.
    pub steps_per_second: f64,
    /// Mean time of a step, in seconds; 0 if there was none.
    pub step_seconds: f64,
    /// Mean number of sequences in a step; 0 if there was none.
    pub batch_size: f64,
    /// Tokens computed a second: of prompts, and one for each token that was generated.
    pub computed_tokens_per_second: f64,
    /// Tokens sampled a second.
    pub tokens_per_second: f64,
    /// KV payload bytes sent to other nodes a second.
    pub sent_bytes_per_second: f64,
    /// KV payload bytes from other nodes a second.
    pub received_bytes_per_second: f64,
    /// Preemptions a second.
    pub preemptions_per_second: f64,
    /// Tokens found in the prefix cache, of those it was asked for, since the nodes started; `None` if it was never asked.
    pub cache_hit_rate: Option<f64>,
}

/// One connected node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeStatus {
    /// Its name.
    pub node: String,
    /// Its role.
    pub role: protocol::ids::Role,
    /// It takes no new jobs.
    pub draining: bool,
    /// It has work and does not get on, or says nothing any more: it gets no new jobs.
    pub stalled: bool,
    /// `closed`; `open` if job after job failed there and none is sent for a while; `half_open` while one is tried.
    pub breaker: &'static str,
    /// Blocks of its KV pool.
    pub total_blocks: u32,
    /// Blocks nobody uses, by its last report.
    pub free_blocks: u32,
    /// Blocks kept only as prefix cache, by its last report: they can be given away.
    pub cached_blocks: u32,
    /// Blocks the coordinator has booked for its jobs.
    pub booked_blocks: u32,
    /// The coordinator's jobs on it.
    pub jobs: u32,
    /// Sequences in its running batch, by its last report.
    pub running: u32,
    /// Sequences waiting in its engine, by its last report.
    pub waiting: u32,
    /// Those of them that had started and have lost their blocks to others.
    pub preempted: u32,
    /// How long the first in line had waited when it reported last.
    pub oldest_wait: Duration,
    /// Rows that its sequences lack before each has its next token, by its last report.
    pub queued_tokens: u64,
    /// Blocks owned by sequences, reservations and handoffs, by its last report.
    pub owned_blocks: u32,
    /// Reservations that are not committed, by its last report.
    pub reservations: u32,
    /// Steps since its process started.
    pub steps: u64,
    /// What it has done since its process started, by its last report.
    pub done: WorkDone,
    /// How fast it has worked lately.
    pub rates: Rates,
    /// Longest sequence it can hold, in tokens.
    pub max_seq_len: u32,
    /// Size of its KV pool, in tokens.
    pub pool_tokens: u64,
    /// Hash of the weights it serves.
    pub weights_hash: u128,
}
