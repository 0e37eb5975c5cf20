//! Blocks that someone fills from outside before a sequence may use them.

use std::sync::Arc;

use thiserror::Error;

use crate::admission::Holder;
use crate::block_manager::BlockTable;
use crate::plan::BlockId;
use crate::sequence::SpecError;

/// Exclusive right to write into some blocks. It cannot be scheduled; only `Engine::commit` makes a sequence of it. Give
/// it back with `Engine::release_reservation`: one that is merely dropped keeps its blocks, and the audit reports it.
#[derive(Debug)]
#[must_use = "a reservation keeps its blocks until it is committed or released"]
pub struct Reservation {
    table: BlockTable,
    tokens: usize,
    alive: Arc<()>,
}

impl Reservation {
    /// The blocks, in the order of the sequence's positions.
    pub fn blocks(&self) -> &[BlockId] {
        self.table.blocks()
    }

    /// How many tokens the blocks are reserved for.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

/// Why blocks cannot be reserved.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ReserveError {
    /// Nothing to reserve.
    #[error("tokens is 0; a reservation is for at least 1 token")]
    Empty,
    /// No sequence may be that long; the same reservation will never succeed.
    #[error("tokens is {tokens}; it must be at most {limit}, which leaves room for one output token")]
    TooLong {
        /// Tokens asked for.
        tokens: usize,
        /// Most tokens.
        limit: usize,
    },
    /// Not enough blocks now.
    #[error(
        "{needed} blocks are needed and {free} of {total} are free; together with what the sequences here can still \
         grow into, {peak} blocks could be in use"
    )]
    NoBlocks {
        /// Blocks needed now.
        needed: usize,
        /// Blocks that can be given away now: free or cached.
        free: usize,
        /// Most blocks in use if the reservation were granted and nobody ended early.
        peak: usize,
        /// Blocks of the pool.
        total: usize,
    },
    /// Every slot of the batch is taken or promised.
    #[error("{in_use} of {limit} sequence slots are taken by sequences and reservations")]
    NoSlots {
        /// Sequences running or waiting, and reservations.
        in_use: usize,
        /// `EngineLimits::max_num_seqs`.
        limit: usize,
    },
}

/// Why a reservation cannot become a sequence. Its blocks have been released.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum CommitError {
    /// The sequence itself is impossible.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The computed tokens do not lie within the reservation, or leave nothing to compute.
    #[error(
        "num_computed is {num_computed}; it must be at least 1 and at most {limit} (reserved for {reserved} tokens)"
    )]
    NumComputed {
        /// What was said to be computed.
        num_computed: usize,
        /// Most that may be: the reservation's tokens, and all tokens of the sequence but the last.
        limit: usize,
        /// Tokens of the reservation.
        reserved: usize,
    },
    /// Log-probabilities of a prompt that was computed elsewhere.
    #[error("prompt_logprobs is set, but the prompt was computed elsewhere; ask whoever computed it")]
    PromptLogprobs,
    /// The reservation belongs to another engine.
    #[error("the reservation is not one of this engine")]
    Unknown,
}

/// What the engine remembers of a reservation it gave away.
#[derive(Debug)]
struct OpenReservation {
    alive: Arc<()>,
    blocks: usize,
    tokens: usize,
    /// Most tokens with KV that the sequence can add after the reserved ones.
    growth: usize,
}

/// All reservations that are out.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    open: Vec<OpenReservation>,
}

impl Reservations {
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// Their shares in the forecast. When the KV arrives nobody knows.
    pub(crate) fn holders(&self) -> impl Iterator<Item = Holder> {
        let holder = |open: &OpenReservation| Holder {
            blocks: open.blocks,
            tokens: open.tokens,
            growth: open.growth,
            leaves: false,
        };
        self.open.iter().map(holder)
    }

    /// Gives a table away.
    pub(crate) fn issue(&mut self, table: BlockTable, tokens: usize, growth: usize) -> Reservation {
        let alive = Arc::new(());
        self.open.push(OpenReservation {
            alive: alive.clone(),
            blocks: table.len(),
            tokens,
            growth,
        });
        Reservation { table, tokens, alive }
    }

    /// Takes a table back; `None` if it never was given away here.
    pub(crate) fn redeem(&mut self, reservation: Reservation) -> Option<BlockTable> {
        let index = self
            .open
            .iter()
            .position(|open| Arc::ptr_eq(&open.alive, &reservation.alive))?;
        self.open.swap_remove(index);
        Some(reservation.table)
    }

    /// References to blocks that are out.
    pub(crate) fn blocks(&self) -> usize {
        self.open.iter().map(|open| open.blocks).sum()
    }

    /// Reports reservations whose holder is gone.
    pub(crate) fn audit(&self, problems: &mut Vec<String>) {
        for open in self.open.iter().filter(|open| Arc::strong_count(&open.alive) == 1) {
            problems.push(format!(
                "a reservation of {} blocks for {} tokens was dropped without being released",
                open.blocks, open.tokens
            ));
        }
    }
}
