//! What the async world holds of the engine: a handle for new work, and owners that give back on drop.

use engine::engine::{AddError, Engine};
use engine::plan::{BlockId, SequenceId};
use engine::reservation::{CommitError, Reservation, ReserveError};
use engine::sequence::SequenceSpec;
use protocol::control::{JobError, JobErrorKind};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot, watch};

use crate::engine_thread::{Command, EngineInbox, Return, SequenceEvent, StepTap};
use crate::queue::Refused;

/// Handle to the engine thread; cheap to clone.
#[derive(Clone)]
pub struct EngineHandle {
    inbox: EngineInbox,
    load: watch::Receiver<EngineLoad>,
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
    /// Reservations that are not committed.
    pub reservations: u32,
}

impl EngineLoad {
    pub(crate) fn new(engine: &Engine) -> Self {
        let stats = engine.stats();
        Self {
            steps: stats.steps,
            free_blocks: narrow(stats.free_blocks),
            cached_blocks: narrow(stats.cached_blocks),
            owned_blocks: narrow(stats.owned_blocks),
            running: narrow(stats.running),
            waiting: narrow(stats.waiting),
            reservations: narrow(stats.reservations),
        }
    }
}

/// Counts of this crate are bounded by the number of blocks, which has 32 bits.
fn narrow(count: usize) -> u32 {
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
            AddError::Spec(_) => Self::Invalid(error.to_string()),
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
            ReserveError::Empty | ReserveError::TooLong { .. } => Self::Invalid(error.to_string()),
        }
    }
}

impl From<CommitError> for SubmitError {
    fn from(error: CommitError) -> Self {
        Self::Invalid(error.to_string())
    }
}

impl EngineHandle {
    pub(crate) fn new(inbox: EngineInbox, load: watch::Receiver<EngineLoad>) -> Self {
        Self { inbox, load }
    }

    /// State after the last step.
    pub fn load(&self) -> EngineLoad {
        *self.load.borrow()
    }

    /// Follows the state.
    pub fn watch_load(&self) -> watch::Receiver<EngineLoad> {
        self.load.clone()
    }

    /// Adds a sequence whose KV is computed here. `tap` follows its layers.
    pub async fn add(&self, spec: SequenceSpec, tap: Option<Box<dyn StepTap>>) -> Result<SequenceStream, SubmitError> {
        let (reply, answer) = oneshot::channel();
        self.inbox.push(Command::Add {
            spec: Box::new(spec),
            tap,
            reply,
        })?;
        answer.await.map_err(|_| SubmitError::Stopped)?
    }

    /// Reserves blocks for `tokens` tokens, all of them now. The sequence may add up to `growth` tokens afterwards.
    pub async fn reserve(&self, tokens: usize, growth: usize) -> Result<ReservedBlocks, SubmitError> {
        let (reply, answer) = oneshot::channel();
        self.inbox.push(Command::Reserve { tokens, growth, reply })?;
        answer.await.map_err(|_| SubmitError::Stopped)?
    }

    /// Turns a reservation whose blocks hold the KV of the first `num_computed` tokens of `spec` into a running sequence.
    pub async fn commit(
        &self,
        reserved: ReservedBlocks,
        spec: SequenceSpec,
        num_computed: usize,
    ) -> Result<SequenceStream, SubmitError> {
        let (reply, answer) = oneshot::channel();
        self.inbox.push(Command::Commit {
            reserved,
            spec: Box::new(spec),
            num_computed,
            reply,
        })?;
        answer.await.map_err(|_| SubmitError::Stopped)?
    }

    /// Ends the engine thread once it has taken what is queued. Running sequences end without a further event.
    pub fn close(&self) {
        self.inbox.close();
    }
}

/// A sequence's events. Dropping it cancels the sequence, whatever its state, and frees its blocks, held ones too.
pub struct SequenceStream {
    id: SequenceId,
    events: mpsc::Receiver<SequenceEvent>,
    inbox: EngineInbox,
}

impl SequenceStream {
    pub(crate) fn new(id: SequenceId, events: mpsc::Receiver<SequenceEvent>, inbox: EngineInbox) -> Self {
        Self { id, events, inbox }
    }

    /// The next event; `None` once the engine has ended.
    pub async fn next(&mut self) -> Option<SequenceEvent> {
        self.events.recv().await
    }
}

impl Drop for SequenceStream {
    fn drop(&mut self) {
        self.inbox.give_back(Return::Sequence(self.id));
    }
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
