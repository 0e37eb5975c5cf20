//! From the compute thread into the push: copies finished layers, never blocks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::plan::BlockId;
use kv_transfer::core::Part;
use kv_transfer::pusher::{PushError, PushHandle};
use model::kv_pool::KvPool;
use node_shell::engine_thread::StepTap;

use crate::core::push_schedule::{Piece, PushSchedule};

/// What the tap shares with the job that waits for the first token.
#[derive(Clone)]
pub(crate) struct Backlog {
    state: Arc<Mutex<State>>,
}

struct State {
    /// Computed, but not taken by the push yet; in the order of computing.
    pieces: Vec<Piece>,
    /// Block table, as of the last layer.
    blocks: Vec<BlockId>,
    /// Copying failed: why.
    problem: Option<String>,
}

impl Backlog {
    pub(crate) fn new() -> Self {
        let state = State {
            pieces: Vec::new(),
            blocks: Vec::new(),
            problem: None,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Left in a consistent state by every panic: each field is replaced as a whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends what is left, waiting for room. Call once the sequence has ended and its blocks are held.
    pub(crate) async fn flush(&self, pool: &KvPool, push: &PushHandle) -> Result<(), String> {
        let (pieces, blocks) = {
            let mut state = self.lock();
            if let Some(problem) = state.problem.take() {
                return Err(problem);
            }
            (std::mem::take(&mut state.pieces), std::mem::take(&mut state.blocks))
        };
        for piece in pieces {
            let payload = pool
                .gather(layers(piece), of(piece, &blocks)?)
                .map_err(|error| error.to_string())?;
            push.push(part(piece), payload)
                .await
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

/// Follows one sequence on the compute thread.
pub(crate) struct Tap {
    pub(crate) schedule: PushSchedule,
    pub(crate) pool: Arc<KvPool>,
    pub(crate) push: PushHandle,
    pub(crate) backlog: Backlog,
}

impl StepTap for Tap {
    fn layer_computed(&mut self, layer: u32, computed_tokens: u32, blocks: &[BlockId]) {
        let due = self.schedule.layer_computed(layer, computed_tokens);
        let mut state = self.backlog.lock();
        if state.problem.is_some() {
            return;
        }
        if state.blocks != blocks {
            blocks.clone_into(&mut state.blocks);
        }
        state.pieces.extend(due);
        while let Some(piece) = state.pieces.first().copied() {
            match self.hand_over(piece, blocks) {
                Ok(()) => drop(state.pieces.remove(0)),
                // The network is behind: the piece is copied again when there is room, from blocks that stay as they are.
                Err(Stuck::Full) => return,
                Err(Stuck::Problem(problem)) => state.problem = Some(problem),
            }
            if state.problem.is_some() {
                return;
            }
        }
    }
}

enum Stuck {
    Full,
    Problem(String),
}

impl Tap {
    fn hand_over(&self, piece: Piece, blocks: &[BlockId]) -> Result<(), Stuck> {
        let blocks = of(piece, blocks).map_err(Stuck::Problem)?;
        let payload = self
            .pool
            .gather(layers(piece), blocks)
            .map_err(|error| Stuck::Problem(error.to_string()))?;
        self.push.try_push(part(piece), payload).map_err(|error| match error {
            PushError::Full => Stuck::Full,
            PushError::Closed | PushError::TooLarge { .. } | PushError::Invalid(_) => Stuck::Problem(error.to_string()),
        })
    }
}

fn layers(piece: Piece) -> std::ops::Range<u32> {
    piece.first_layer..piece.first_layer + piece.layers
}

fn part(piece: Piece) -> Part {
    Part {
        first_layer: piece.first_layer,
        layers: piece.layers,
        first_block: piece.first_block,
        blocks: piece.blocks,
    }
}

/// The local blocks of a piece.
fn of(piece: Piece, blocks: &[BlockId]) -> Result<&[BlockId], String> {
    let (start, end) = (
        piece.first_block as usize,
        piece.first_block as usize + piece.blocks as usize,
    );
    blocks
        .get(start..end)
        .ok_or_else(|| format!("blocks {start}..{end} of a table of {}", blocks.len()))
}
