//! The decode jobs of a node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::sequence::{OnFinish, SequenceSpec};
use kv_transfer::receiver::Receiver;
use node_shell::grammars;
use node_shell::handle::{AwaitedPrompt, ReservedBlocks};
use node_shell::job::{JobGone, JobStream, check_tokens};
use node_shell::job_trace::{COMPUTE, GENERATION};
use node_shell::process::{JobAdapter, MovedBytes, NodeContext, NodeRole};
use protocol::control::{ChoiceStart, DecodeJob, Job, JobErrorKind, JobEvent, KvSource};
use protocol::ids::Ticket;
use protocol::moved::HaveBlocks;
use protocol::sampling::StopRules;
use protocol::transfer::PushCommit;
use runtime::measure::Measure;
use runtime::quic::Link;
use tokio::time::timeout_at;
use tracing::field::display;

use crate::answers::{Choices, answer_beams, answer_prompt, generate, refuse};
use crate::reservations::{Admission, Pending, Reservations};

/// What a decode node holds.
pub struct DecodeRole {
    context: NodeContext,
    reservations: Arc<Reservations>,
    receiver: Receiver,
}

/// How a wait for the commit ended.
enum Handoff {
    Committed(Box<PushCommit>),
    Failed(JobErrorKind, String),
}

impl DecodeRole {
    /// The role over a node's engine and pool. Never fails; the signature is the one that every role has.
    pub fn new(context: NodeContext) -> Result<Self, String> {
        let reservations = Reservations::new(context.layout, context.fingerprint);
        let table = Arc::<Reservations>::clone(&reservations);
        let receiver = Receiver::new(table, context.fingerprint, context.layout, &context.config.transfer);
        Ok(Self {
            context,
            reservations,
            receiver,
        })
    }

    async fn decode(&self, job: DecodeJob, stream: JobStream) -> Result<(), JobGone> {
        let adapter = match self.check(&job) {
            Ok(adapter) => adapter,
            Err(problem) => return stream.fail(JobErrorKind::Invalid, problem).await,
        };
        if let Err(error) = grammars::prepare(self.context.grammars.as_ref(), &job.sampling).await {
            return stream.end(&JobEvent::Failed(error)).await;
        }
        match job.source {
            KvSource::Compute => self.compute(job, adapter, stream).await,
            KvSource::Handoff => self.take_over(job, adapter, stream).await,
        }
    }

    /// Computes everything here.
    async fn compute(&self, job: DecodeJob, adapter: JobAdapter, mut stream: JobStream) -> Result<(), JobGone> {
        stream.trace().enter(COMPUTE);
        let engine = self.context.engine.for_job(stream.name());
        let prompt = || SequenceSpec {
            prompt_logprobs: job.prompt_logprobs,
            ..spec(&job, adapter, 0, job.token_ids.clone())
        };
        if let Some(width) = job.beam_width {
            return match engine.add_beams(prompt(), width as usize).await {
                Ok(search) => answer_beams(search, stream).await,
                Err(error) => refuse(error, stream).await,
            };
        }
        if job.choices.is_empty() {
            let alone = SequenceSpec {
                first_only: Some(0),
                stop: StopRules {
                    // A job that draws no token may say that none is wanted.
                    max_tokens: job.stop.max_tokens.max(1),
                    ..job.stop.clone()
                },
                ..prompt()
            };
            return match engine.add(alone, None).await {
                Ok(sequence) => answer_prompt(sequence, stream).await,
                Err(error) => refuse(error, stream).await,
            };
        }
        let mut specs: Vec<SequenceSpec> = Vec::with_capacity(job.choices.len());
        for start in &job.choices {
            let token_ids = [job.token_ids.as_slice(), &start.generated].concat();
            specs.push(SequenceSpec {
                // All choices have the same prompt: the first one tells of it.
                prompt_logprobs: job.prompt_logprobs.filter(|_| specs.is_empty()),
                ..spec(&job, adapter, start.choice, token_ids)
            });
        }
        match engine.add_choices(specs).await {
            Ok(sequences) => {
                let numbers = job.choices.iter().map(|start| start.choice).collect();
                let choices = if has_prompt_alone(&job) {
                    Choices::with_prompt(numbers, sequences)
                } else {
                    Choices::new(numbers, sequences)
                };
                generate(choices, stream).await
            }
            Err(error) => refuse(error, stream).await,
        }
    }

    /// An error unless the job can be carried out; else the adapter it wants.
    fn check(&self, job: &DecodeJob) -> Result<JobAdapter, String> {
        if job.token_ids.is_empty() {
            return Err("token_ids is empty; a prompt has at least one token".to_owned());
        }
        match job.beam_width {
            Some(0) => return Err("beam_width is 0; at least one hypothesis is searched".to_owned()),
            Some(width) if !job.choices.is_empty() => {
                return Err(format!(
                    "beam_width = {width} and choices has {} elements; a beam search has none",
                    job.choices.len()
                ));
            }
            None if job.choices.is_empty() && job.source == KvSource::Handoff => {
                return Err(NO_CHOICE.to_owned());
            }
            Some(_) | None => check_tokens(&job.token_ids, self.context.vocab_size, self.context.max_seq_len)?,
        }
        if job.prompt_logprobs.is_some() && !(job.source == KvSource::Compute && has_prompt_alone(job)) {
            return Err(PROMPT_TOLD.to_owned());
        }
        for (index, start) in job.choices.iter().enumerate() {
            self.check_choice(job, index, start)?;
        }
        if job.source == KvSource::Handoff && job.beam_width.is_none() && job.stop.max_tokens < 2 {
            return Err(format!(
                "stop.max_tokens = {}: a handoff leaves at least one token to generate",
                job.stop.max_tokens
            ));
        }
        self.context.adapter(job.adapter.as_deref())
    }

    fn check_choice(&self, job: &DecodeJob, index: usize, start: &ChoiceStart) -> Result<(), String> {
        let token_ids = [job.token_ids.as_slice(), start.generated.as_slice()].concat();
        check_tokens(&token_ids, self.context.vocab_size, self.context.max_seq_len)?;
        if job.choices[..index].iter().any(|other| other.choice == start.choice) {
            return Err(format!("choices: choice {} is named twice", start.choice));
        }
        let seeds = job.sampling.choice_seeds.len();
        if seeds > 0 && start.choice as usize >= seeds {
            return Err(format!(
                "sampling.choice_seeds has {seeds} elements: none for choice {}",
                start.choice
            ));
        }
        if job.source == KvSource::Handoff && !start.generated.is_empty() {
            return Err(format!(
                "choices: choice {} has {} generated tokens; with a handoff the first comes with the commit",
                start.choice,
                start.generated.len()
            ));
        }
        Ok(())
    }

    async fn take_over(&self, job: DecodeJob, adapter: JobAdapter, mut stream: JobStream) -> Result<(), JobGone> {
        stream.trace().enter("reservation");
        let deadline = self.context.clock.now() + Duration::from_millis(job.handoff_deadline_ms);
        let growth = job.stop.max_tokens as usize;
        let choices = job.beam_width.map_or(job.choices.len(), |width| width as usize);
        let prompt = AwaitedPrompt {
            token_ids: job.token_ids.clone(),
            cache_key: adapter.cache_key,
            num_computed: computed_tokens(&job),
        };
        let engine = self.context.engine.for_job(stream.name());
        let reserved = match engine.reserve(prompt, growth, choices).await {
            Ok(reserved) => reserved,
            Err(error) => return refuse(error, stream).await,
        };
        let (mut pending, have_blocks) = match self.admit(&job, &reserved, deadline) {
            Ok(admitted) => admitted,
            Err(problem) => return stream.fail(JobErrorKind::Internal, problem).await,
        };
        stream
            .send(&JobEvent::Granted {
                ticket: pending.ticket(),
                have_blocks,
            })
            .await?;
        stream.trace().note(
            "baton.cached_blocks",
            u64::from(self.context.layout.groups.first_number(have_blocks)),
        );
        stream.trace().enter("wait_for_kv");
        let handoff = tokio::select! {
            gone = stream.cancelled() => return Err(gone),
            waited = timeout_at(deadline.into(), pending.committed()) => match waited {
                Ok(Some(commit)) => Handoff::Committed(Box::new(commit)),
                Ok(None) => Handoff::Failed(JobErrorKind::TransferFailed, "the handoff was given up".to_owned()),
                Err(_) => Handoff::Failed(
                    JobErrorKind::DeadlineExceeded,
                    format!("no commit within handoff_deadline_ms = {}", job.handoff_deadline_ms),
                ),
            },
        };
        // The door is shut before the blocks change hands.
        drop(pending);
        let commit = match handoff {
            Handoff::Committed(commit) => commit,
            Handoff::Failed(kind, problem) => {
                drop(reserved);
                return stream.fail(kind, problem).await;
            }
        };
        self.run((job, adapter), *commit, reserved, stream).await
    }

    fn admit(
        &self,
        job: &DecodeJob,
        reserved: &ReservedBlocks,
        deadline: Instant,
    ) -> Result<(Pending, HaveBlocks), String> {
        let have_blocks = reserved.have_blocks();
        let writer = self
            .context
            .pool
            .writer(reserved.blocks_to_fill())
            .map_err(|error| error.to_string())?;
        let ticket = Ticket(getrandom::u64().map_err(|error| format!("no random ticket: {error}"))?);
        let num_tokens = u32::try_from(job.token_ids.len()).map_err(|_| "token_ids is too long".to_owned())?;
        let admission = Admission {
            ticket,
            request: job.request,
            epoch: job.epoch,
            num_tokens,
            have_blocks,
            deadline,
        };
        let pending = self.reservations.admit(admission, writer);
        let pending = pending.ok_or_else(|| {
            format!("ticket {ticket} is taken, or have_blocks = {have_blocks} is wrong for {num_tokens} tokens")
        })?;
        Ok((pending, have_blocks))
    }

    async fn run(
        &self,
        (job, adapter): (DecodeJob, JobAdapter),
        commit: PushCommit,
        reserved: ReservedBlocks,
        mut stream: JobStream,
    ) -> Result<(), JobGone> {
        if commit.first_tokens.len() != job.choices.len() {
            let problem = format!(
                "first_tokens has {} elements for {} choices",
                commit.first_tokens.len(),
                job.choices.len()
            );
            return stream.fail(JobErrorKind::Invalid, problem).await;
        }
        let vocab_size = self.context.vocab_size;
        if let Some(first) = commit.first_tokens.iter().find(|first| **first >= vocab_size) {
            let problem = format!("first_tokens has {first}, which is not below the vocabulary size {vocab_size}");
            return stream.fail(JobErrorKind::Invalid, problem).await;
        }
        let engine = self.context.engine.for_job(stream.name());
        if let Some(width) = job.beam_width {
            let search = spec(&job, adapter, 0, job.token_ids.clone());
            let committed = engine.commit_beams(reserved, search, computed_tokens(&job), width as usize);
            return match committed.await {
                Ok(search) => {
                    stream.trace().enter(GENERATION);
                    stream.send(&JobEvent::Committed).await?;
                    answer_beams(search, stream).await
                }
                Err(error) => refuse(error, stream).await,
            };
        }
        let (choices, specs): (Vec<u32>, Vec<SequenceSpec>) = self.started(&job, adapter, &commit).unzip();
        if specs.is_empty() {
            drop(reserved);
            stream.send(&JobEvent::Committed).await?;
            return stream.end(&JobEvent::Finished).await;
        }
        match engine.commit_choices(reserved, specs, computed_tokens(&job)).await {
            Ok(sequences) => {
                stream.trace().enter(GENERATION);
                stream.send(&JobEvent::Committed).await?;
                generate(Choices::new(choices, sequences), stream).await
            }
            Err(error) => refuse(error, stream).await,
        }
    }

    /// The choices that their first tokens do not end.
    fn started(
        &self,
        job: &DecodeJob,
        adapter: JobAdapter,
        commit: &PushCommit,
    ) -> impl Iterator<Item = (u32, SequenceSpec)> {
        let room = job.token_ids.len() + 1 < self.context.max_seq_len;
        let firsts = job.choices.iter().zip(&commit.first_tokens);
        let living = firsts.filter(move |(_, first)| room && job.stop.finish(**first, 1).is_none());
        living.map(move |(start, first)| {
            let token_ids = [job.token_ids.as_slice(), &[*first]].concat();
            (start.choice, spec(job, adapter, start.choice, token_ids))
        })
    }
}

impl NodeRole for DecodeRole {
    async fn handle(&self, job: Job, stream: JobStream) -> Result<(), JobGone> {
        match job {
            Job::Decode(job) => {
                // The coordinator ends the job at its own deadline; this one holds if it cannot.
                let deadline = self.context.clock.now() + Duration::from_millis(job.deadline_ms.min(LONGEST_JOB_MS));
                let (request, epoch, context) = (job.request, job.epoch, job.context.clone());
                let worked = timeout_at(deadline.into(), self.decode(job, stream)).await;
                worked.unwrap_or_else(|_| {
                    let (client_request_id, trace_id) = (context.client_id.as_deref(), context.trace_id().map(display));
                    tracing::warn!(%request, client_request_id, trace_id, epoch = epoch.0,
                        "a job's time is over: its stream is reset");
                    Ok(())
                })
            }
            Job::Prefill(_) => {
                stream
                    .fail(JobErrorKind::Invalid, "a prefill job was sent to a decode node")
                    .await
            }
        }
    }

    async fn serve_kv(&self, link: Link) {
        self.receiver.serve(link).await;
    }

    fn measures() -> Vec<Measure> {
        kv_transfer::stats::RECEIVING.to_vec()
    }

    fn moved(&self) -> MovedBytes {
        MovedBytes {
            sent_bytes: 0,
            received_bytes: self.receiver.received_bytes(),
        }
    }
}

/// Longest time that a job may take, in milliseconds: a year, so that no sum of times overflows.
const LONGEST_JOB_MS: u64 = 365 * 24 * 3_600_000;
const PROMPT_TOLD: &str =
    "prompt_logprobs is set: only a node that computes the prompt tells of it, before any choice has tokens";
const NO_CHOICE: &str = "choices is empty: a handoff leads to nothing";

/// Whether all there is is the prompt: whoever computes it draws the first tokens.
fn has_prompt_alone(job: &DecodeJob) -> bool {
    job.choices.iter().all(|start| start.generated.is_empty())
}

/// Tokens of the prompt that are computed when its KV has come. A beam search computes the last one again: the candidates
/// of the first position come from it.
fn computed_tokens(job: &DecodeJob) -> usize {
    job.token_ids.len() - usize::from(job.beam_width.is_some())
}

fn spec(job: &DecodeJob, adapter: JobAdapter, choice: u32, token_ids: Vec<u32>) -> SequenceSpec {
    SequenceSpec {
        token_ids,
        prompt_len: job.token_ids.len(),
        sampling: Arc::new(job.sampling.of_choice(choice)),
        stop: job.stop.clone(),
        prompt_logprobs: None,
        on_finish: OnFinish::Release,
        first_only: None,
        adapter: adapter.number,
        cache_key: adapter.cache_key,
    }
}
