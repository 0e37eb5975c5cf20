//! The decode jobs of a node.

use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::sequence::{OnFinish, SequenceSpec};
use kv_transfer::receiver::Receiver;
use node_shell::engine_thread::SequenceEvent;
use node_shell::handle::{ReservedBlocks, SequenceStream, SubmitError};
use node_shell::job::{JobGone, JobStream, check_tokens};
use node_shell::process::{NodeContext, NodeRole};
use protocol::control::{DecodeJob, Job, JobErrorKind, JobEvent, KvSource};
use protocol::ids::Ticket;
use protocol::sampling::SamplingParams;
use protocol::transfer::PushCommit;
use runtime::quic::Link;
use tokio::time::timeout_at;

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
        if let Err(problem) = self.check(&job) {
            return stream.fail(JobErrorKind::Invalid, problem).await;
        }
        match job.source {
            KvSource::Compute => {
                let (choice, generated) = match job.choices.first() {
                    Some(start) => (start.choice, start.generated.as_slice()),
                    None => return stream.fail(JobErrorKind::Invalid, NO_CHOICE).await,
                };
                let token_ids = [job.token_ids.as_slice(), generated].concat();
                match self.context.engine.add(spec(&job, choice, token_ids), None).await {
                    Ok(sequence) => generate(choice, sequence, stream).await,
                    Err(error) => refuse(error, stream).await,
                }
            }
            KvSource::Handoff => self.take_over(job, stream).await,
        }
    }

    fn check(&self, job: &DecodeJob) -> Result<(), String> {
        if job.token_ids.is_empty() {
            return Err("token_ids is empty; a prompt has at least one token".to_owned());
        }
        if let Some(width) = job.beam_width {
            return Err(format!("beam_width = {width}: this node searches no beams"));
        }
        let [start] = job.choices.as_slice() else {
            return Err(format!(
                "choices has {} elements: this node runs one",
                job.choices.len()
            ));
        };
        let token_ids = [job.token_ids.as_slice(), start.generated.as_slice()].concat();
        check_tokens(&token_ids, self.context.vocab_size, self.context.max_seq_len)?;
        if job.source == KvSource::Handoff && !start.generated.is_empty() {
            return Err(format!(
                "choices: choice {} has {} generated tokens; with a handoff the first comes with the commit",
                start.choice,
                start.generated.len()
            ));
        }
        if job.source == KvSource::Handoff && job.stop.max_tokens < 2 {
            return Err(format!(
                "stop.max_tokens = {}: a handoff leaves at least one token to generate",
                job.stop.max_tokens
            ));
        }
        Ok(())
    }

    async fn take_over(&self, job: DecodeJob, mut stream: JobStream) -> Result<(), JobGone> {
        let deadline = self.context.clock.now() + Duration::from_millis(job.handoff_deadline_ms);
        let growth = job.stop.max_tokens as usize;
        let reserved = match self.context.engine.reserve(job.token_ids.len(), growth).await {
            Ok(reserved) => reserved,
            Err(error) => return refuse(error, stream).await,
        };
        let mut pending = match self.admit(&job, &reserved, deadline) {
            Ok(admitted) => admitted,
            Err(problem) => return stream.fail(JobErrorKind::Internal, problem).await,
        };
        stream
            .send(&JobEvent::Granted {
                ticket: pending.ticket(),
                have_blocks: 0,
            })
            .await?;
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
        self.run(job, *commit, reserved, stream).await
    }

    fn admit(&self, job: &DecodeJob, reserved: &ReservedBlocks, deadline: Instant) -> Result<Pending, String> {
        let writer = self
            .context
            .pool
            .writer(reserved.blocks().to_vec())
            .map_err(|error| error.to_string())?;
        let ticket = Ticket(getrandom::u64().map_err(|error| format!("no random ticket: {error}"))?);
        let num_tokens = u32::try_from(job.token_ids.len()).map_err(|_| "token_ids is too long".to_owned())?;
        let admission = Admission {
            ticket,
            request: job.request,
            epoch: job.epoch,
            num_tokens,
            deadline,
        };
        self.reservations
            .admit(admission, writer)
            .ok_or_else(|| format!("ticket {ticket} is taken"))
    }

    async fn run(
        &self,
        job: DecodeJob,
        commit: PushCommit,
        reserved: ReservedBlocks,
        mut stream: JobStream,
    ) -> Result<(), JobGone> {
        let (Some(start), &[first]) = (job.choices.first(), commit.first_tokens.as_slice()) else {
            let problem = format!(
                "first_tokens has {} elements, not one for each choice",
                commit.first_tokens.len()
            );
            return stream.fail(JobErrorKind::Invalid, problem).await;
        };
        let choice = start.choice;
        if first >= self.context.vocab_size {
            let problem = format!(
                "first_token = {first} is not below the vocabulary size {}",
                self.context.vocab_size
            );
            return stream.fail(JobErrorKind::Invalid, problem).await;
        }
        let prompt_len = job.token_ids.len();
        let mut token_ids = job.token_ids.clone();
        token_ids.push(first);
        match self
            .context
            .engine
            .commit(reserved, spec(&job, choice, token_ids), prompt_len)
            .await
        {
            Ok(sequence) => {
                stream.send(&JobEvent::Committed).await?;
                generate(choice, sequence, stream).await
            }
            Err(error) => refuse(error, stream).await,
        }
    }
}

impl NodeRole for DecodeRole {
    async fn handle(&self, job: Job, stream: JobStream) -> Result<(), JobGone> {
        match job {
            Job::Decode(job) => self.decode(job, stream).await,
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
}

const NO_CHOICE: &str = "choices is empty: there is nothing to generate";

fn spec(job: &DecodeJob, choice: u32, token_ids: Vec<u32>) -> SequenceSpec {
    let sampling = SamplingParams {
        choice,
        ..job.sampling.clone()
    };
    SequenceSpec {
        token_ids,
        prompt_len: job.token_ids.len(),
        sampling: Arc::new(sampling),
        stop: job.stop.clone(),
        prompt_logprobs: false,
        on_finish: OnFinish::Release,
        first_only: false,
        cache_key: 0,
    }
}

/// Sends token after token until the sequence ends or the coordinator has had enough.
async fn generate(choice: u32, mut sequence: SequenceStream, mut stream: JobStream) -> Result<(), JobGone> {
    loop {
        let event = tokio::select! {
            gone = stream.cancelled() => return Err(gone),
            event = sequence.next() => event,
        };
        match event {
            Some(SequenceEvent::Token(token)) => {
                stream
                    .send(&JobEvent::Token {
                        choice,
                        token: token.token,
                        step: token.timing,
                    })
                    .await?;
                if token.finish.is_some() {
                    return stream.end(&JobEvent::Finished).await;
                }
            }
            Some(SequenceEvent::Failed(problem)) => return stream.fail(JobErrorKind::Internal, problem).await,
            None => return stream.fail(JobErrorKind::Draining, "the engine has stopped").await,
        }
    }
}

async fn refuse(error: SubmitError, stream: JobStream) -> Result<(), JobGone> {
    match error {
        SubmitError::NoBlocks { needed, free } => {
            stream
                .end(&JobEvent::Busy {
                    needed_blocks: needed,
                    free_blocks: free,
                })
                .await
        }
        other => {
            let error = other.into_job_error();
            stream.end(&JobEvent::Failed(error)).await
        }
    }
}
