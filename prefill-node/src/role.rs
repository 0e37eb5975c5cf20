//! The prefill jobs of a node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::sequence::{OnFinish, SequenceSpec};
use kv_transfer::core::Extent;
use kv_transfer::error::TransferError;
use kv_transfer::pusher::{Push, Pusher};
use node_shell::engine_thread::{ComputedEvent, SequenceEvent, StepTap, TokenEvent};
use node_shell::grammars;
use node_shell::handle::SequenceStream;
use node_shell::job::{JobGone, JobStream, check_tokens};
use node_shell::job_trace::COMPUTE;
use node_shell::process::{JobAdapter, MovedBytes, NodeContext, NodeRole};
use protocol::control::{
    HandoffStats, HandoffTarget, Job, JobError, JobErrorKind, JobEvent, PrefillJob, PromptComputed,
};
use protocol::moved::HaveBlocks;
use protocol::sampling::StopRules;
use protocol::transfer::PushOpen;
use runtime::measure::Measure;
use runtime::quic::Link;
use tokio::time::timeout_at;

use crate::core::push_schedule::PushSchedule;
use crate::tap::Backlog;

/// What a prefill node holds.
pub struct PrefillRole {
    context: NodeContext,
    pusher: Pusher,
}

/// A push under way, with what the compute thread could not hand over yet.
struct Handoff {
    push: Push,
    backlog: Backlog,
}

/// What came of a prompt.
struct Computed {
    event: PromptComputed,
    /// Steps that the prompt took.
    steps: u32,
    /// The first tokens end all choices; there is at least one.
    all_ended: bool,
}

impl From<TokenEvent> for Computed {
    fn from(first: TokenEvent) -> Self {
        let steps = first.steps;
        let all_ended = first.finish.is_some() && first.others.iter().all(|(_, finish)| finish.is_some());
        let others = first.others.into_iter().map(|(token, _)| token);
        Self {
            event: PromptComputed {
                tokens: std::iter::once(first.token).chain(others).collect(),
                step: first.timing,
                cached_tokens: first.cached_tokens,
                prompt_logprobs: first.prompt_logprobs,
            },
            steps,
            all_ended,
        }
    }
}

impl From<ComputedEvent> for Computed {
    fn from(computed: ComputedEvent) -> Self {
        Self {
            event: PromptComputed {
                tokens: Vec::new(),
                step: computed.timing,
                cached_tokens: computed.cached_tokens,
                prompt_logprobs: computed.prompt_logprobs,
            },
            steps: computed.steps,
            all_ended: false,
        }
    }
}

/// Why a job ends without its normal last event.
enum Stop {
    Gone(JobGone),
    Failed(JobError),
}

impl From<JobGone> for Stop {
    fn from(gone: JobGone) -> Self {
        Self::Gone(gone)
    }
}

impl From<TransferError> for Stop {
    fn from(error: TransferError) -> Self {
        Self::failed(JobErrorKind::TransferFailed, error.to_string())
    }
}

impl Stop {
    fn failed(kind: JobErrorKind, message: impl Into<String>) -> Self {
        Self::Failed(JobError {
            kind,
            message: message.into(),
        })
    }
}

impl PrefillRole {
    /// The role over a node's engine, pool and UDP port. Errors if the transfer settings do not fit the KV layout.
    pub fn new(context: NodeContext) -> Result<Self, String> {
        let (engine, transfer) = (&context.config.engine, &context.config.transfer);
        // The push schedule hands over at most one piece that is not full yet, and one layer of a chunk.
        let chunk = engine.prefill_chunk_tokens.min(engine.max_batch_tokens);
        let blocks = chunk.div_ceil(context.layout.block_tokens as usize) + 1;
        let largest = transfer.frame_bytes + blocks * context.layout.layer_block_bytes();
        if largest > transfer.staging_bytes {
            return Err(format!(
                "transfer.staging_bytes = {} is less than {largest}, the largest piece of KV that \
                 engine.prefill_chunk_tokens = {} and transfer.frame_bytes = {} lead to",
                transfer.staging_bytes, engine.prefill_chunk_tokens, transfer.frame_bytes
            ));
        }
        let pusher = Pusher::new(Arc::clone(&context.endpoint), context.layout, &context.config.transfer)
            .map_err(|error| error.to_string())?;
        Ok(Self { context, pusher })
    }

    async fn prefill(&self, job: PrefillJob, mut stream: JobStream) -> Result<(), JobGone> {
        let deadline = self.context.clock.now() + Duration::from_millis(job.deadline_ms);
        let late = || {
            let message = format!("not finished within deadline_ms = {}", job.deadline_ms);
            Stop::failed(JobErrorKind::DeadlineExceeded, message)
        };
        let worked = timeout_at(deadline.into(), self.work(&job, deadline, &mut stream)).await;
        match worked.unwrap_or_else(|_| Err(late())) {
            Ok(last) => stream.end(&last).await,
            Err(Stop::Failed(error)) => stream.end(&JobEvent::Failed(error)).await,
            Err(Stop::Gone(gone)) => Err(gone),
        }
    }

    /// Carries the job out; returns its last event.
    async fn work(&self, job: &PrefillJob, deadline: Instant, stream: &mut JobStream) -> Result<JobEvent, Stop> {
        stream.trace().enter(COMPUTE);
        let adapter = self
            .check(job)
            .map_err(|problem| Stop::failed(JobErrorKind::Invalid, problem))?;
        grammars::prepare(self.context.grammars.as_ref(), &job.sampling)
            .await
            .map_err(Stop::Failed)?;
        let mut handoff = match &job.handoff {
            Some(target) => Some(self.open(job, target, deadline)?),
            None => None,
        };
        let tap = handoff.as_ref().map(|handoff| self.tap(handoff));
        let engine = self.context.engine.for_job(stream.name());
        let mut sequence = engine
            .add(spec(job, adapter), tap)
            .await
            .map_err(|error| Stop::Failed(error.into_job_error()))?;
        let computed = self.computed(&mut sequence, handoff.as_mut(), stream).await?;
        note_computed(stream, job, &computed);
        let tokens = computed.event.tokens.iter().map(|token| token.token).collect();
        stream.send(&JobEvent::Computed(computed.event)).await?;
        match (computed.all_ended, handoff) {
            (true, _) => Ok(JobEvent::Finished),
            (false, Some(handoff)) => self.hand_over(job, handoff, tokens, stream).await,
            (false, None) if job.choices == 0 => Ok(JobEvent::Finished),
            (false, None) => Err(Stop::failed(JobErrorKind::Invalid, NO_TARGET)),
        }
        // `sequence` is dropped here: its blocks, held until now, are free.
    }

    /// An error unless the job can be carried out; else the adapter it wants.
    fn check(&self, job: &PrefillJob) -> Result<JobAdapter, String> {
        check_tokens(&job.token_ids, self.context.vocab_size, self.context.max_seq_len)?;
        if job.choices > MAX_CHOICES {
            return Err(format!(
                "choices = {}: at most {MAX_CHOICES} first tokens are drawn",
                job.choices
            ));
        }
        let (seeds, last) = (
            job.sampling.choice_seeds.len(),
            job.sampling.choice as usize + job.choices as usize,
        );
        if seeds > 0 && seeds < last {
            return Err(format!(
                "sampling.choice_seeds has {seeds} elements: none for choice {}",
                last - 1
            ));
        }
        let adapter = self.context.adapter(job.adapter.as_deref())?;
        if job.choices == 0 {
            return Ok(adapter);
        }
        match (job.stop.max_tokens, &job.handoff) {
            (0, _) => Err("stop.max_tokens = 0: at least one token is generated".to_owned()),
            (1, _) | (_, Some(_)) => Ok(adapter),
            (_, None) => Err(NO_TARGET.to_owned()),
        }
    }

    fn open(&self, job: &PrefillJob, target: &HandoffTarget, deadline: Instant) -> Result<Handoff, Stop> {
        let open = PushOpen {
            request: job.request,
            ticket: target.ticket,
            epoch: job.epoch,
            fingerprint: self.context.fingerprint,
        };
        let layout = &self.context.layout;
        let schedule = self.schedule(job, target.have_blocks).ok_or_else(|| {
            let blocks = layout.blocks_for(job.token_ids.len());
            let problem = format!("handoff.have_blocks = {}, the prompt has {blocks}", target.have_blocks);
            Stop::failed(JobErrorKind::Invalid, problem)
        })?;
        let moved = schedule.moved();
        // Earlier blocks than the first token's row sees may be gone by the end of the prompt.
        let last = job.token_ids.len().saturating_sub(1);
        for (group, kept) in layout.kept().groups().enumerate() {
            let first = kept.first_block(last);
            if (moved.places(group).start as usize) < first {
                let problem = format!(
                    "handoff.have_blocks = {}: the blocks before block {first} lie outside of the model's window, and are not sent",
                    target.have_blocks
                );
                return Err(Stop::failed(JobErrorKind::Invalid, problem));
            }
        }
        let extent = Extent::of(layout, &moved);
        let push = self.pusher.open(target, open, extent, deadline)?;
        Ok(Handoff {
            push,
            backlog: Backlog::new(schedule),
        })
    }

    /// `None` if the receiver says that it has more blocks than the prompt.
    fn schedule(&self, job: &PrefillJob, have: HaveBlocks) -> Option<PushSchedule> {
        // `check` has bounded the length by the vocabulary of positions, which has 32 bits.
        let tokens = u32::try_from(job.token_ids.len()).unwrap_or(u32::MAX);
        PushSchedule::new(
            self.context.layout,
            tokens,
            have,
            self.context.config.transfer.frame_bytes,
        )
    }

    fn tap(&self, handoff: &Handoff) -> Box<dyn StepTap> {
        let (pool, push) = (Arc::clone(&self.context.pool), handoff.push.staging());
        Box::new(handoff.backlog.tap(pool, push))
    }

    /// Waits for the first tokens, a failure of the push, or the coordinator's cancel. Sends meanwhile what is in the pool
    /// already.
    async fn computed(
        &self,
        sequence: &mut SequenceStream,
        handoff: Option<&mut Handoff>,
        stream: &mut JobStream,
    ) -> Result<Computed, Stop> {
        let pushed = async {
            let Some(Handoff { push, backlog }) = handoff else {
                return std::future::pending().await;
            };
            let handle = push.staging();
            tokio::select! {
                error = push.failed() => Stop::from(error),
                problem = backlog.send_early(&self.context.pool, &handle) => Stop::Failed(blame(push, problem).await),
            }
        };
        tokio::select! {
            gone = stream.cancelled() => Err(gone.into()),
            event = sequence.next() => match event {
                Some(SequenceEvent::Token(token)) => Ok(token.into()),
                Some(SequenceEvent::Computed(computed)) => Ok(computed.into()),
                Some(SequenceEvent::Failed(problem)) => Err(Stop::failed(JobErrorKind::Internal, problem)),
                Some(SequenceEvent::Beams(_)) => {
                    Err(Stop::failed(JobErrorKind::Internal, "a prompt has led to the end of a beam search"))
                }
                None => Err(Stop::failed(JobErrorKind::Draining, "the engine has stopped")),
            },
            stop = pushed => Err(stop),
        }
    }

    async fn hand_over(
        &self,
        job: &PrefillJob,
        handoff: Handoff,
        first_tokens: Vec<u32>,
        stream: &mut JobStream,
    ) -> Result<JobEvent, Stop> {
        let num_tokens = u32::try_from(job.token_ids.len()).unwrap_or(u32::MAX);
        stream.trace().enter("push");
        let Handoff { mut push, backlog } = handoff;
        let finish = async {
            if let Err(problem) = backlog.flush(&self.context.pool, &push.staging()).await {
                return Err(Stop::Failed(blame(&mut push, problem).await));
            }
            Ok(push.commit(num_tokens, first_tokens).await?)
        };
        tokio::select! {
            gone = stream.cancelled() => Err(gone.into()),
            committed = finish => {
                let stats: HandoffStats = committed?.into();
                let trace = stream.trace();
                trace.note("baton.kv_bytes", stats.bytes);
                trace.note("baton.frames", u64::from(stats.frames));
                trace.note("baton.frames_resent", u64::from(stats.resent));
                Ok(JobEvent::HandedOff(stats))
            }
        }
    }
}

/// Most first tokens that a job draws: what a prompt's last step may cost the others beside it.
const MAX_CHOICES: u32 = 1024;

const NO_TARGET: &str = "handoff is missing: stop.max_tokens allows more tokens than the first";

impl NodeRole for PrefillRole {
    async fn handle(&self, job: Job, stream: JobStream) -> Result<(), JobGone> {
        match job {
            Job::Prefill(job) => self.prefill(job, stream).await,
            Job::Decode(_) => {
                stream
                    .fail(JobErrorKind::Invalid, "a decode job was sent to a prefill node")
                    .await
            }
        }
    }

    async fn serve_kv(&self, link: Link) {
        // The endpoint offers no KV plane to others in this role.
        tracing::warn!(peer = %link.peer, "a prefill node takes no KV in");
    }

    fn measures() -> Vec<Measure> {
        kv_transfer::stats::SENDING.to_vec()
    }

    fn moved(&self) -> MovedBytes {
        MovedBytes {
            sent_bytes: self.pusher.sent_bytes(),
            received_bytes: 0,
        }
    }
}

/// What is known of a prompt that has just been computed.
fn note_computed(stream: &mut JobStream, job: &PrefillJob, computed: &Computed) {
    let (step, trace) = (computed.event.step, stream.trace());
    trace.computed(step, computed.steps);
    trace.note("baton.prompt_tokens", job.token_ids.len() as u64);
    trace.note("baton.cached_tokens", u64::from(computed.event.cached_tokens));
}

fn spec(job: &PrefillJob, adapter: JobAdapter) -> SequenceSpec {
    SequenceSpec {
        token_ids: job.token_ids.clone(),
        prompt_len: job.token_ids.len(),
        sampling: Arc::new(job.sampling.clone()),
        stop: StopRules {
            // A job that draws no token may say that none is wanted.
            max_tokens: job.stop.max_tokens.max(1),
            ..job.stop.clone()
        },
        prompt_logprobs: job.prompt_logprobs,
        on_finish: if job.handoff.is_some() {
            OnFinish::Hold
        } else {
            OnFinish::Release
        },
        first_only: Some(job.choices),
        adapter: adapter.number,
        cache_key: adapter.cache_key,
    }
}

/// Why KV could not be handed over. If the push has failed its own reason says more.
async fn blame(push: &mut Push, problem: String) -> JobError {
    let reason = tokio::time::timeout(Duration::from_millis(10), push.failed()).await;
    JobError {
        kind: JobErrorKind::TransferFailed,
        message: reason.map_or(problem, |error| error.to_string()),
    }
}
