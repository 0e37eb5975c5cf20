//! From the engine into the push: finished layers are copied on the compute thread, which never blocks; whatever is
//! complete (cached blocks, and what there was no room for) by the job, meanwhile.
//!
//! Room in the staging budget is taken first, then bytes are copied: a network that is behind costs no copies.
//!
//! The job copies blocks that the sequence owns and no step writes. They stop being its own when it is preempted, fails or
//! is cancelled, or when the engine exchanges equal blocks. All of that happens on the engine's thread, which tells the tap
//! before the next step writes anything; the tap then waits for the copy that may be under way ([`Shared::reading`]).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::plan::{BlockId, GroupBlocks};
use kv_transfer::core::Part;
use kv_transfer::pusher::{PushError, PushHandle, Room};
use model::kv_pool::KvPool;
use node_shell::engine_thread::StepTap;
use protocol::kv::KvPlace;
use protocol::moved::Moved;
use tokio::sync::Notify;

use crate::core::push_schedule::{Piece, PushSchedule};

/// What the tap shares with the job.
struct Shared {
    /// What is sent of the sequence.
    moved: Moved,
    state: Mutex<State>,
    /// Held during a copy of the job. Taken under the lock of `state`.
    reading: Mutex<()>,
    /// There is something for the job to do.
    work: Notify,
}

struct State {
    schedule: PushSchedule,
    /// The block table; empty while the sequence has none.
    blocks: Vec<BlockId>,
    /// The compute thread could not hand over: why.
    problem: Option<String>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// What a piece is in the handoff.
    fn part(&self, piece: Piece) -> Part {
        Part {
            first_layer: piece.first_layer,
            layers: piece.layers,
            first_block: self.moved.number(piece.group as usize, piece.first_block),
            blocks: piece.blocks,
        }
    }

    /// The local blocks of a piece, by the sequence's block table.
    fn blocks_of(&self, piece: Piece, table: &[BlockId]) -> Result<Vec<BlockId>, String> {
        let blocks = GroupBlocks::new(table, self.moved.groups().count(), piece.group as usize);
        let (start, end) = (
            piece.first_block as usize,
            piece.first_block as usize + piece.blocks as usize,
        );
        let found: Option<Vec<BlockId>> = (start..end).map(|place| blocks.get(place)).collect();
        found.ok_or_else(|| format!("blocks {start}..{end} of a table of {}", blocks.len()))
    }

    /// Waits for the copy that may be under way. Not under the lock of `state`.
    fn wait_for_reader(&self) {
        drop(lock(&self.reading));
    }
}

/// The protected values are replaced as a whole: a panic leaves no half of one.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The job's side.
#[derive(Clone)]
pub(crate) struct Backlog {
    shared: Arc<Shared>,
}

impl Backlog {
    pub(crate) fn new(schedule: PushSchedule) -> Self {
        Self {
            shared: Arc::new(Shared {
                moved: schedule.moved(),
                state: Mutex::new(State {
                    schedule,
                    blocks: Vec::new(),
                    problem: None,
                }),
                reading: Mutex::new(()),
                work: Notify::new(),
            }),
        }
    }

    /// The compute thread's side.
    pub(crate) fn tap(&self, pool: Arc<KvPool>, push: PushHandle) -> Tap {
        Tap {
            shared: Arc::clone(&self.shared),
            pool,
            push,
            blocks: Vec::new(),
        }
    }

    /// Sends what is complete while the rest is computed. Returns only if that cannot go on: why. Cancel-safe: a piece is
    /// taken when there is room for it, and sent at once.
    pub(crate) async fn send_early(&self, pool: &KvPool, push: &PushHandle) -> String {
        loop {
            match self.send_complete(pool, push).await {
                Ok(()) => self.shared.work.notified().await,
                Err(problem) => return problem,
            }
        }
    }

    /// Sends what is left, waiting for room. Call once the sequence has ended and its blocks are held.
    pub(crate) async fn flush(&self, pool: &KvPool, push: &PushHandle) -> Result<(), String> {
        self.shared.lock().schedule.ends();
        self.send_complete(pool, push).await
    }

    async fn send_complete(&self, pool: &KvPool, push: &PushHandle) -> Result<(), String> {
        while let Some(piece) = self.next()? {
            let room = push
                .reserve(self.shared.part(piece))
                .await
                .map_err(|error| error.to_string())?;
            self.send(pool, piece, room)?;
        }
        Ok(())
    }

    fn next(&self) -> Result<Option<Piece>, String> {
        let state = self.shared.lock();
        match &state.problem {
            Some(problem) => Err(problem.clone()),
            None => Ok(state.schedule.early()),
        }
    }

    /// Copies and sends `piece`, if it is still the next one: the sequence may have lost its blocks meanwhile.
    fn send(&self, pool: &KvPool, piece: Piece, mut room: Room<'_>) -> Result<(), String> {
        let mut state = self.shared.lock();
        if state.schedule.early() != Some(piece) {
            return Ok(());
        }
        let blocks = self.shared.blocks_of(piece, &state.blocks)?;
        state.schedule.take_early();
        let reading = lock(&self.shared.reading);
        drop(state);
        let copied = pool.gather_into(layers(piece), &blocks, room.buffer());
        drop(reading);
        copied.map_err(|error| error.to_string())?;
        room.send().map_err(|error| error.to_string())
    }
}

/// Follows one sequence on the engine's thread.
pub(crate) struct Tap {
    shared: Arc<Shared>,
    pool: Arc<KvPool>,
    push: PushHandle,
    /// The block table of the step.
    blocks: Vec<BlockId>,
}

impl StepTap for Tap {
    fn step_begins(&mut self, computed_tokens: u32, blocks: &[BlockId]) {
        let exchanged = !blocks.starts_with(&self.blocks);
        blocks.clone_into(&mut self.blocks);
        let mut state = self.shared.lock();
        state.schedule.step_begins(computed_tokens);
        blocks.clone_into(&mut state.blocks);
        let work = state.schedule.early().is_some();
        drop(state);
        if exchanged {
            self.shared.wait_for_reader();
        }
        if work {
            self.shared.work.notify_one();
        }
    }

    fn layer_computed(&mut self, place: KvPlace, computed_tokens: u32) {
        self.shared.lock().schedule.layer_computed(place, computed_tokens);
        while self.hand_over_next() {}
    }

    fn preempted(&mut self) {
        self.blocks.clear();
        let mut state = self.shared.lock();
        state.schedule.preempted();
        state.blocks.clear();
        drop(state);
        self.shared.wait_for_reader();
    }
}

impl Drop for Tap {
    /// The sequence is gone, and with it its blocks.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.blocks.clear();
        state
            .problem
            .get_or_insert_with(|| "the sequence has left the engine".to_owned());
        drop(state);
        self.shared.wait_for_reader();
        self.shared.work.notify_one();
    }
}

impl Tap {
    /// Hands over the next fresh piece. False if there is none, or no room: it is kept then, and nothing was copied.
    fn hand_over_next(&self) -> bool {
        let Some(piece) = self.shared.lock().schedule.fresh() else {
            return false;
        };
        let room = match self.push.try_reserve(self.shared.part(piece)) {
            Ok(room) => room,
            Err(PushError::Full) => return false,
            Err(error @ (PushError::Closed | PushError::TooLarge { .. } | PushError::Invalid(_))) => {
                return self.give_up(error.to_string());
            }
        };
        match self.hand_over(piece, room) {
            Ok(()) => true,
            Err(problem) => self.give_up(problem),
        }
    }

    fn hand_over(&self, piece: Piece, mut room: Room<'_>) -> Result<(), String> {
        let blocks = self.shared.blocks_of(piece, &self.blocks)?;
        self.pool
            .gather_into(layers(piece), &blocks, room.buffer())
            .map_err(|error| error.to_string())?;
        self.shared.lock().schedule.take_fresh();
        room.send().map_err(|error| error.to_string())
    }

    fn give_up(&self, problem: String) -> bool {
        let mut state = self.shared.lock();
        state.problem.get_or_insert(problem);
        // Nothing more is handed over.
        while state.schedule.take_fresh().is_some() {}
        drop(state);
        self.shared.work.notify_one();
        false
    }
}

fn layers(piece: Piece) -> std::ops::Range<u32> {
    piece.first_layer..piece.first_layer + piece.layers
}

#[cfg(test)]
mod tests;
