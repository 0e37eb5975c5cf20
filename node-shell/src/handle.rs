//! What the async world holds of the engine: a handle for new work, and owners that give back on drop.

use std::sync::Arc;
use std::time::Instant;

use engine::engine::{AddError, Engine};
use engine::owners::{JobName, Ownership};
use engine::plan::{BlockId, SequenceId};
use engine::reservation::{CommitError, Reservation, ReserveError};
use engine::sequence::SequenceSpec;
use protocol::control::{JobError, JobErrorKind, StepTimeModel, WorkDone};
use protocol::moved::HaveBlocks;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot, watch};

use crate::cache_feed::{CacheFeed, CacheReader};
use crate::engine_thread::{Command, EngineInbox, Return, SequenceEvent, StepTap, Work};
use crate::queue::Refused;

/// Handle to the engine thread; cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    /// Whose work it is that enters by this handle.
    job: Option<Arc<JobName>>,
    inbox: EngineInbox,
    load: watch::Receiver<EngineLoad>,
    cache: Arc<CacheFeed>,
}

/// State of the engine after its last step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineLoad {
    /// Steps since start.
    pub steps: u64,
    /// Blocks nobody uses.
    pub free_blocks: u32,
    /// Blocks kept only as prefix cache.
    pub cached_blocks: u32,
    /// Blocks owned by sequences and reservations.
    pub owned_blocks: u32,
    /// Sequences in the running batch.
    pub running: u32,
    /// Sequences that wait.
    pub waiting: u32,
    /// Those of them that had started and have lost their blocks to others.
    pub preempted: u32,
    /// Since when the one that is first in line has waited.
    pub waiting_since: Option<Instant>,
    /// Reservations that are not committed.
    pub reservations: u32,
    /// A step is being computed.
    pub pending: bool,
    /// Rows that the sequences lack before each has its next token.
    pub queued_tokens: u64,
    /// What steps take.
    pub step_times: StepTimeModel,
    /// What the engine has done; the bytes of handoffs are not its business.
    pub done: WorkDone,
}

impl EngineLoad {
    /// The state of `engine`. `pending`: a step has been planned and not applied. `waiting_since`: since when the first in
    /// line has waited.
    pub(crate) fn new(engine: &Engine, pending: bool, waiting_since: Option<Instant>) -> Self {
        let stats = engine.stats();
        Self {
            steps: stats.steps,
            free_blocks: narrow(stats.free_blocks),
            cached_blocks: narrow(stats.cached_blocks),
            owned_blocks: narrow(stats.owned_blocks),
            running: narrow(stats.running),
            waiting: narrow(stats.waiting),
            preempted: narrow(stats.preempted),
            waiting_since,
            reservations: narrow(stats.reservations),
            pending,
            queued_tokens: stats.queued_rows,
            step_times: engine.step_times(),
            done: stats.done(),
        }
    }
}

/// Counts of this crate are bounded by the number of blocks, which has 32 bits.
pub(crate) fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Why the engine did not take work.
#[derive(Debug, Error)]
pub enum SubmitError {
    /// Too many commands wait for the next step.
    #[error("the engine's command queue is full")]
    QueueFull,
    /// The engine thread has ended.
    #[error("the engine has stopped")]
    Stopped,
    /// Not enough blocks now.
    #[error("{needed} KV blocks needed, {free} free")]
    NoBlocks {
        /// Blocks the work needs.
        needed: u32,
        /// Blocks that are free.
        free: u32,
    },
    /// The work contradicts the engine's limits.
    #[error("{0}")]
    Invalid(String),
    /// Too many sequences.
    #[error("{0}")]
    Full(String),
}

impl SubmitError {
    /// The error as a job's end.
    pub fn into_job_error(self) -> JobError {
        let kind = match &self {
            Self::QueueFull | Self::NoBlocks { .. } | Self::Full(_) => JobErrorKind::Overloaded,
            Self::Stopped => JobErrorKind::Draining,
            Self::Invalid(_) => JobErrorKind::Invalid,
        };
        JobError {
            kind,
            message: self.to_string(),
        }
    }
}

impl From<Refused> for SubmitError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Full => Self::QueueFull,
            Refused::Closed => Self::Stopped,
        }
    }
}

impl From<AddError> for SubmitError {
    fn from(error: AddError) -> Self {
        match &error {
            AddError::Spec(_) | AddError::Beam(_) | AddError::PromptLogprobs => Self::Invalid(error.to_string()),
            AddError::Full { .. } => Self::Full(error.to_string()),
        }
    }
}

impl From<ReserveError> for SubmitError {
    fn from(error: ReserveError) -> Self {
        match error {
            ReserveError::NoBlocks { needed, free, .. } => Self::NoBlocks {
                needed: narrow(needed),
                free: narrow(free),
            },
            ReserveError::NoSlots { .. } => Self::Full(error.to_string()),
            ReserveError::Empty | ReserveError::TooLong { .. } | ReserveError::Choices { .. } => {
                Self::Invalid(error.to_string())
            }
        }
    }
}

impl From<CommitError> for SubmitError {
    fn from(error: CommitError) -> Self {
        Self::Invalid(error.to_string())
    }
}

impl EngineHandle {
    pub(crate) fn new(inbox: EngineInbox, load: watch::Receiver<EngineLoad>, cache: Arc<CacheFeed>) -> Self {
        Self {
            job: None,
            inbox,
            load,
            cache,
        }
    }

    /// A handle for the work of a job: audits name whatever enters by it.
    pub fn for_job(&self, job: &Arc<JobName>) -> Self {
        Self {
            job: Some(Arc::clone(job)),
            ..self.clone()
        }
    }

    /// Whose the blocks are, between two steps.
    pub async fn ownership(&self) -> Result<Ownership, SubmitError> {
        let (reply, answer) = oneshot::channel();
        self.inbox.push(Command::Owners { reply })?;
        answer.await.map_err(|_| SubmitError::Stopped)
    }

    /// Tells what the prefix cache holds, from the beginning.
    pub(crate) fn read_cache(&self) -> CacheReader {
        CacheReader::new(Arc::clone(&self.cache))
    }

    /// State after the last step.
    pub fn load(&self) -> EngineLoad {
        *self.load.borrow()
    }

    /// Follows the state.
    pub fn watch_load(&self) -> watch::Receiver<EngineLoad> {
        self.load.clone()
    }

    async fn enter(&self, work: Work) -> Result<SequenceGroup, SubmitError> {
        let (reply, answer) = oneshot::channel();
        self.inbox.push(Command::Enter {
            work: Box::new(work),
            job: self.job.clone(),
            reply,
        })?;
        answer.await.map_err(|_| SubmitError::Stopped)?
    }

    /// Adds a sequence whose KV is computed here. `tap` follows its layers.
    pub async fn add(&self, spec: SequenceSpec, tap: Option<Box<dyn StepTap>>) -> Result<SequenceStream, SubmitError> {
        Ok(SequenceStream(self.enter(Work::One(spec, tap)).await?))
    }

    /// Adds sequences whose KV is computed here, that of their common beginning once.
    pub async fn add_choices(&self, specs: Vec<SequenceSpec>) -> Result<SequenceGroup, SubmitError> {
        self.enter(Work::Choices(specs)).await
    }

    /// Adds a beam search over the continuations of a prompt that is computed here.
    pub async fn add_beams(&self, spec: SequenceSpec, width: usize) -> Result<SequenceStream, SubmitError> {
        Ok(SequenceStream(self.enter(Work::Beams(spec, width)).await?))
    }

    /// Reserves blocks for a prompt, all of them now; those that the prefix cache has are among them
    /// ([`ReservedBlocks::have_blocks`]). `choices` sequences will share them, and each may add up to `growth` tokens
    /// afterwards.
    pub async fn reserve(
        &self,
        prompt: AwaitedPrompt,
        growth: usize,
        choices: usize,
    ) -> Result<ReservedBlocks, SubmitError> {
        let (reply, answer) = oneshot::channel();
        self.inbox.push(Command::Reserve {
            prompt,
            growth,
            choices,
            job: self.job.clone(),
            reply,
        })?;
        answer.await.map_err(|_| SubmitError::Stopped)?
    }

    /// Turns a reservation whose blocks hold the KV of the first `num_computed` tokens of `spec` into a running sequence.
    pub async fn commit(
        &self,
        reserved: ReservedBlocks,
        spec: SequenceSpec,
        num_computed: usize,
    ) -> Result<SequenceStream, SubmitError> {
        let one = self.commit_choices(reserved, vec![spec], num_computed).await?;
        Ok(SequenceStream(one))
    }

    /// As [`Self::commit`], for several sequences that share the blocks.
    pub async fn commit_choices(
        &self,
        reserved: ReservedBlocks,
        specs: Vec<SequenceSpec>,
        num_computed: usize,
    ) -> Result<SequenceGroup, SubmitError> {
        self.enter(Work::Commit(reserved, specs, num_computed)).await
    }

    /// As [`Self::commit`], for a beam search of that width over the continuations of `spec`.
    pub async fn commit_beams(
        &self,
        reserved: ReservedBlocks,
        spec: SequenceSpec,
        num_computed: usize,
        width: usize,
    ) -> Result<SequenceStream, SubmitError> {
        let work = Work::CommitBeams(reserved, spec, num_computed, width);
        Ok(SequenceStream(self.enter(work).await?))
    }

    /// Ends the engine thread once it has taken what is queued. Running sequences end without a further event.
    pub fn close(&self) {
        self.inbox.close();
    }
}

/// The events of a sequence, or of a beam search. Dropping it cancels the sequence, whatever its state, and frees its blocks,
/// held ones too.
pub struct SequenceStream(SequenceGroup);

impl SequenceStream {
    /// The next event; `None` once the engine has ended. Cancel-safe.
    pub async fn next(&mut self) -> Option<SequenceEvent> {
        self.0.next().await.map(|(_, event)| event)
    }
}

/// The events of sequences that belong together, each with the index of its sequence. Dropping it cancels all of them.
pub struct SequenceGroup {
    ids: Vec<SequenceId>,
    events: mpsc::Receiver<(usize, SequenceEvent)>,
    inbox: EngineInbox,
}

impl SequenceGroup {
    pub(crate) fn new(
        ids: Vec<SequenceId>,
        events: mpsc::Receiver<(usize, SequenceEvent)>,
        inbox: EngineInbox,
    ) -> Self {
        Self { ids, events, inbox }
    }

    /// How many sequences there are.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The next event; `None` once the engine has ended. Cancel-safe.
    pub async fn next(&mut self) -> Option<(usize, SequenceEvent)> {
        self.events.recv().await
    }

    /// Appends the events that are there, at least one, to `events`: those of one step come together. Nothing is appended
    /// once the engine has ended. Cancel-safe.
    pub async fn next_all(&mut self, events: &mut Vec<(usize, SequenceEvent)>) {
        let most = self.ids.len().max(1);
        self.events.recv_many(events, most).await;
    }

    /// Cancels the sequence of that index. Events of it that are on their way still come.
    pub fn cancel(&self, index: usize) {
        if let Some(id) = self.ids.get(index) {
            self.inbox.give_back(Return::Sequence(*id));
        }
    }
}

impl Drop for SequenceGroup {
    fn drop(&mut self) {
        for id in &self.ids {
            self.inbox.give_back(Return::Sequence(*id));
        }
    }
}

/// A prompt whose KV is to come from elsewhere; see [`engine::reservation::Awaited`].
#[derive(Clone, Debug)]
pub struct AwaitedPrompt {
    /// The prompt.
    pub token_ids: Vec<u32>,
    /// What the KV depends on beside the tokens.
    pub cache_key: u64,
    /// How many of the tokens will have been computed when the reservation is committed.
    pub num_computed: usize,
}

/// Reserved blocks. Dropping it releases them.
pub struct ReservedBlocks {
    reservation: Option<Reservation>,
    inbox: EngineInbox,
}

impl ReservedBlocks {
    pub(crate) fn new(reservation: Reservation, inbox: EngineInbox) -> Self {
        Self {
            reservation: Some(reservation),
            inbox,
        }
    }

    /// The blocks, in the order of the block table.
    pub fn blocks(&self) -> &[BlockId] {
        self.reservation.as_ref().map_or(&[], Reservation::blocks)
    }

    /// The blocks that have to be filled, in the order of the numbers that they have in a handoff.
    pub fn blocks_to_fill(&self) -> Vec<BlockId> {
        self.reservation
            .as_ref()
            .map_or(Vec::new(), Reservation::blocks_to_fill)
    }

    /// How many of the first blocks need not come. Others may have them too: they must not be written.
    pub fn have_blocks(&self) -> HaveBlocks {
        self.reservation
            .as_ref()
            .map_or(HaveBlocks::NONE, Reservation::have_blocks)
    }

    pub(crate) fn take(mut self) -> Option<Reservation> {
        self.reservation.take()
    }
}

impl Drop for ReservedBlocks {
    fn drop(&mut self) {
        if let Some(reservation) = self.reservation.take() {
            self.inbox.give_back(Return::Reservation(reservation));
        }
    }
}
