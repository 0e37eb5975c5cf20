//! The control plane: membership, load reports, jobs and their events.
//!
//! A node dials the coordinator and opens one bidirectional stream, the *membership stream*: `Hello` up, `Welcome` or
//! `Refused` down, then load reports up (and orders and questions down). For every job the coordinator opens one bidirectional stream to the node: one
//! [`Job`] down (and later perhaps [`JobUpdate`]s), [`JobEvent`]s up. A reset of that stream, by either side, ends the job: it is the cancel.

use bincode::{Decode, Encode};

use crate::blocks::{BlockAudit, JobKey, JobKind};
use crate::context::RequestContext;
use crate::ids::{Epoch, NodeId, RequestId, Role, Ticket};
use crate::kv::{KvLayout, ModelIdentity};
use crate::moved::HaveBlocks;
use crate::sampling::{PromptLogprob, SampledToken, SamplingParams, StopRules};

/// What a node says on the membership stream.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum NodeMessage {
    /// First message.
    Hello(Hello),
    /// Periodic report, and at once after each change of the drain state.
    Load(LoadReport),
    /// What the node's prefix cache holds now, as a change of what it said before.
    Cache(CacheChange),
    /// The answer to [`CoordinatorMessage::ReportBlocks`].
    Blocks(BlockAudit),
}

/// What the coordinator answers on the membership stream.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum CoordinatorMessage {
    /// The node may serve.
    Welcome,
    /// The node may not serve; the reason names what differs. The coordinator closes the connection.
    Refused {
        /// Why, in one line.
        reason: String,
    },
    /// An operator wants the node to take no new jobs, and to finish those that run; or to take jobs again. It shows in the
    /// node's reports.
    Drain {
        /// No new jobs.
        on: bool,
    },
    /// An operator wants the node to serve this from now on. Jobs that run are finished. It shows in the node's reports; a
    /// node whose certificate does not allow it goes on as it is.
    SetRole {
        /// What.
        role: Role,
    },
    /// The node is to say whose its blocks are, as soon as the step that is being computed is over. A node that is asked more
    /// often than it can answer leaves questions unanswered.
    ReportBlocks {
        /// Comes back with the answer.
        number: u64,
    },
}

/// A node introduces itself.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Hello {
    /// [`crate::PROTOCOL_VERSION`] of the node.
    pub protocol_version: u16,
    /// The node's configured name; equals the name in its certificate.
    pub node: NodeId,
    /// Number drawn at process start, larger at every later start: tells a restart from a reconnect, and which of two
    /// processes of one name is the newer.
    pub boot: u64,
    /// What the node does; equals the role in its certificate.
    pub role: Role,
    /// `host:port` under which other nodes reach its KV plane.
    pub address: String,
    /// The model it serves.
    pub model: ModelIdentity,
    /// Layout of its KV cache.
    pub layout: KvLayout,
    /// Blocks of its KV pool.
    pub total_blocks: u32,
    /// Most sequences it runs in one step.
    pub max_num_seqs: u32,
    /// Longest sequence it can hold, in tokens (prompt and output).
    pub max_seq_len: u32,
}

/// Most names in a [`CacheChange`], added and removed ones together.
pub const MAX_CACHE_NAMES: usize = 4_096;

/// Which blocks entered and left a node's prefix cache. After each `Hello` the first one has `reset`, and those after it
/// continue it until all that the cache holds has been said; then come changes. In order, none is lost: a node that cannot
/// tell every change begins again with `reset`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct CacheChange {
    /// Number of this change on its stream, from 1.
    pub sequence: u64,
    /// Everything said before is void: the cache was empty before `added`.
    pub reset: bool,
    /// Names ([`crate::prefix::block_hashes`]) of blocks that are cached now. Never one that `removed` has too.
    pub added: Vec<u64>,
    /// Names of blocks that are cached no more.
    pub removed: Vec<u64>,
}

/// What the steps of a node take, as it has learned from its own: a step takes `base_us`, and for each row what its kind
/// costs and what each token that it looks back on costs. All 0 until a step was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct StepTimeModel {
    /// Microseconds of any step.
    pub base_us: u64,
    /// Nanoseconds for each row of a prompt.
    pub row_ns: u64,
    /// Nanoseconds for each token that a row of a prompt looks back on, itself included.
    pub row_key_ns: u64,
    /// Nanoseconds for each sequence that generates: it has a single row in the step.
    pub single_ns: u64,
    /// Nanoseconds for each token that such a row looks back on, itself included.
    pub single_key_ns: u64,
}

/// What a node has done since its process started. Each number only ever grows; whoever wants a rate takes the difference of
/// two reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct WorkDone {
    /// Microseconds that its steps took.
    pub step_us: u64,
    /// Sequences that its steps advanced, summed over the steps.
    pub batched_sequences: u64,
    /// Rows (tokens of prompts, and generated ones that were looked at to draw the next) that it computed.
    pub rows: u64,
    /// Tokens that it sampled.
    pub sampled_tokens: u64,
    /// Sequences that lost their blocks to others.
    pub preemptions: u64,
    /// Rows that were computed for nothing, since their sequences lost the blocks.
    pub preempted_rows: u64,
    /// Tokens for which its prefix cache was asked.
    pub cache_queried_tokens: u64,
    /// Tokens of these whose KV was there.
    pub cache_hit_tokens: u64,
    /// Cached blocks that were forgotten because others needed the room.
    pub cache_evictions: u64,
    /// KV payload bytes sent to other nodes, repeats included.
    pub sent_bytes: u64,
    /// KV payload bytes from other nodes that were written into blocks.
    pub received_bytes: u64,
}

/// State of a node after a step. Reports are cumulative: a lost one costs nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct LoadReport {
    /// Number of this report, from 1.
    pub sequence: u64,
    /// Engine steps since start.
    pub steps: u64,
    /// Blocks nobody uses.
    pub free_blocks: u32,
    /// Blocks kept only as prefix cache.
    pub cached_blocks: u32,
    /// Blocks owned by sequences, reservations and handoffs. `free + cached + owned = total`.
    pub owned_blocks: u32,
    /// Sequences in the running batch.
    pub running: u32,
    /// Sequences waiting in the engine.
    pub waiting: u32,
    /// Those of them that had started and have lost their blocks to others.
    pub preempted: u32,
    /// How long the one that is first in line has waited, in milliseconds; 0 if none waits.
    pub oldest_wait_ms: u64,
    /// Open reservations that have not been committed.
    pub reservations: u32,
    /// The node takes no new jobs; it finishes those that run.
    pub draining: bool,
    /// What the node does now.
    pub role: Role,
    /// A step was being computed. A node whose reports say so again and again with the same `steps` does not advance.
    pub pending: bool,
    /// Rows that its sequences lack before each has its next token; a common beginning of several choices counts once.
    pub queued_tokens: u64,
    /// What its steps take.
    pub step_times: StepTimeModel,
    /// What it has done so far.
    pub done: WorkDone,
}

/// First message of a job stream.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum Job {
    /// For prefill nodes.
    Prefill(PrefillJob),
    /// For decode nodes.
    Decode(DecodeJob),
}

impl Job {
    /// Which job it is.
    pub fn key(&self) -> JobKey {
        match self {
            Self::Prefill(job) => JobKey {
                request: job.request,
                epoch: job.epoch,
                kind: JobKind::Prefill,
            },
            Self::Decode(job) => JobKey {
                request: job.request,
                epoch: job.epoch,
                kind: JobKind::Decode,
            },
        }
    }

    /// By which names the request goes in logs and traces.
    pub fn context(&self) -> &RequestContext {
        match self {
            Self::Prefill(job) => &job.context,
            Self::Decode(job) => &job.context,
        }
    }
}

/// Compute a prompt and the first token of each choice; push the KV to a decode node, once for all choices.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct PrefillJob {
    /// The request.
    pub request: RequestId,
    /// For logs and traces.
    pub context: RequestContext,
    /// Attempt.
    pub epoch: Epoch,
    /// The prompt.
    pub token_ids: Vec<u32>,
    /// Name of the adapter that the model is served with; `None`: the model as it is.
    pub adapter: Option<String>,
    /// How the first tokens are drawn. `sampling.choice` is the first choice's; the others follow it. If there are
    /// `sampling.choice_seeds`, each of them has one.
    pub sampling: SamplingParams,
    /// How many choices draw a first token. 0: the prompt is all that is computed here (beam search draws its tokens on
    /// the decode node; a request for the prompt's log-probabilities alone draws none).
    pub choices: u32,
    /// When a choice ends; if the first tokens end all of them, nothing is committed to the decode node.
    pub stop: StopRules,
    /// Report the log-probability of every prompt token with the first tokens, and that many of the most probable
    /// alternatives at each.
    pub prompt_logprobs: Option<u8>,
    /// Where the KV goes; `None` if one token is all that is wanted.
    pub handoff: Option<HandoffTarget>,
    /// Milliseconds that the job may take, from arrival on the node to the acknowledged commit.
    pub deadline_ms: u64,
}

/// The reservation a prefill node pushes to.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct HandoffTarget {
    /// The decode node.
    pub node: NodeId,
    /// `host:port` of its KV plane.
    pub address: String,
    /// The reservation.
    pub ticket: Ticket,
    /// Leading blocks that are not sent: the decode node holds them already, or they lie before a window.
    pub have_blocks: HaveBlocks,
}

/// Run the generation loops of the choices of one prompt. They share the prompt's blocks.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct DecodeJob {
    /// The request.
    pub request: RequestId,
    /// For logs and traces.
    pub context: RequestContext,
    /// Attempt.
    pub epoch: Epoch,
    /// The prompt.
    pub token_ids: Vec<u32>,
    /// Name of the adapter that the model is served with; `None`: the model as it is.
    pub adapter: Option<String>,
    /// The choices that have not ended, by their numbers; at least one, unless the prompt's log-probabilities are all that
    /// is wanted ([`KvSource::Compute`] and `prompt_logprobs`). With [`KvSource::Handoff`] none of them has tokens yet: the
    /// first ones come with the commit. With [`KvSource::Compute`] and no tokens at all the node does what a prefill node
    /// does too: it answers [`JobEvent::Computed`] first, and then tokens from position 1 on.
    pub choices: Vec<ChoiceStart>,
    /// Beam search of this width instead: `choices` is empty, and the answer is [`JobEvent::Beams`], with
    /// [`KvSource::Compute`] after a [`JobEvent::Computed`] without tokens. After a handoff the prompt's last position is
    /// computed here again, so no first token comes with the commit.
    pub beam_width: Option<u32>,
    /// How tokens are drawn; `sampling.choice` is replaced by each choice's number. If there are `sampling.choice_seeds`,
    /// each of the choices has one.
    pub sampling: SamplingParams,
    /// When a choice ends.
    pub stop: StopRules,
    /// Where the KV of the prompt comes from.
    pub source: KvSource,
    /// As in [`PrefillJob`]; only where the prompt is computed here and no choice has tokens.
    pub prompt_logprobs: Option<u8>,
    /// Milliseconds from arrival until the commit must have happened ([`KvSource::Handoff`]).
    pub handoff_deadline_ms: u64,
    /// Milliseconds that the whole job may take, from arrival on the node to its last token.
    pub deadline_ms: u64,
}

/// A choice, and how far it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct ChoiceStart {
    /// Its number within the request.
    pub choice: u32,
    /// Tokens generated so far, wherever they were sampled.
    pub generated: Vec<u32>,
}

/// Where a decode job's KV comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum KvSource {
    /// Reserve blocks and wait for a prefill node to push and commit.
    Handoff,
    /// Compute it here, in chunks, with the same scheduler.
    Compute,
}

/// What the coordinator may say on a job stream behind the job, at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum JobUpdate {
    /// Decode: a choice, one of several, has ended for a reason that token ids do not show (a stop string). The node
    /// generates no more of it and lets go of its blocks; the other choices go on. For a choice that has ended already, or
    /// that is not the job's, it says nothing.
    EndChoice {
        /// Which.
        choice: u32,
    },
}

/// What a node says on a job stream.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum JobEvent {
    /// Decode: blocks are reserved under `ticket`.
    Granted {
        /// Name of the reservation.
        ticket: Ticket,
        /// Leading blocks of the prompt that need not be sent.
        have_blocks: HaveBlocks,
    },
    /// Decode: there are not enough blocks now; the job is over. Another node, or later, may do.
    Busy {
        /// Blocks the job needs.
        needed_blocks: u32,
        /// Blocks that are free.
        free_blocks: u32,
    },
    /// The prompt is computed; the first token of each choice. From a prefill node, or from a decode node that computes the
    /// prompt too.
    Computed(PromptComputed),
    /// Prefill: the decode node acknowledged the commit; the job is over.
    HandedOff(HandoffStats),
    /// Decode: all KV has arrived and the choices have joined the engine.
    Committed,
    /// Decode: one more token of a choice.
    Token {
        /// The choice.
        choice: u32,
        /// The token.
        token: SampledToken,
        /// Its step.
        step: StepTiming,
    },
    /// Decode: beam search is over, and so is the job: the hypotheses, best first.
    Beams(Vec<Beam>),
    /// Every choice has ended by the stop rules; the job is over. On a prefill node this follows first tokens that end all
    /// choices.
    Finished,
    /// The job failed and is over.
    Failed(JobError),
}

/// The first tokens, and what else the answer needs from whoever computed the prompt.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct PromptComputed {
    /// One token for each choice, in the order of the choices; their position is 0.
    pub tokens: Vec<SampledToken>,
    /// The step that led to them.
    pub step: StepTiming,
    /// Prompt tokens taken from the prefix cache.
    pub cached_tokens: u32,
    /// Log-probability of each prompt token from the second on, if asked for: `prompt length - 1` entries.
    pub prompt_logprobs: Option<Vec<PromptLogprob>>,
}

/// One hypothesis of a beam search. Its last token is the one that ended it: an end or stop token, or the last one that
/// `stop.max_tokens` allows.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Beam {
    /// Its tokens by position, and the step of each.
    pub tokens: Vec<(SampledToken, StepTiming)>,
    /// Sum of the tokens' log-probabilities divided by their number, in nats: what hypotheses are ranked by.
    pub score: f32,
}

/// Timing of the step that produced a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct StepTiming {
    /// Sequences in the step's batch.
    pub batch_size: u32,
    /// Microseconds the sequence waited on this node before the step began (for the first step on a node: since arrival).
    pub queue_us: u64,
    /// Microseconds of computing that led to the token (for a prefill: all its chunks).
    pub compute_us: u64,
}

/// What a handoff cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct HandoffStats {
    /// KV payload bytes sent, repeats included.
    pub bytes: u64,
    /// Frames sent, repeats included.
    pub frames: u32,
    /// Frames that had to be sent again.
    pub resent: u32,
    /// Microseconds from the end of the last prefill step to the acknowledged commit.
    pub exposed_us: u64,
}

/// Why a job failed.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct JobError {
    /// What kind of failure.
    pub kind: JobErrorKind,
    /// One line for humans; holds no text of any request.
    pub message: String,
}

/// Kinds of job failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum JobErrorKind {
    /// The node has no room now.
    Overloaded,
    /// The node drains or stops.
    Draining,
    /// The job contradicts the node's limits or role; it will fail everywhere.
    Invalid,
    /// The KV did not reach the decode node.
    TransferFailed,
    /// A deadline passed.
    DeadlineExceeded,
    /// A fault inside the node.
    Internal,
}

impl JobErrorKind {
    /// True if the same job may succeed elsewhere or later.
    pub fn is_retryable(self) -> bool {
        match self {
            Self::Overloaded | Self::Draining | Self::TransferFailed | Self::DeadlineExceeded | Self::Internal => true,
            Self::Invalid => false,
        }
    }
}
