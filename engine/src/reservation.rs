//! Blocks that someone fills from outside before a sequence may use them.

use std::sync::Arc;

use protocol::moved::{HaveBlocks, Moved};
use protocol::window::Groups;
use thiserror::Error;

use crate::admission::{Holder, Kin};
use crate::beam::BeamError;
use crate::block_manager::BlockTable;
use crate::owners::Owner;
use crate::plan::BlockId;
use crate::sequence::SpecError;

/// A prompt whose KV is to come from elsewhere, unless it is cached here.
#[derive(Clone, Copy, Debug)]
pub struct Awaited<'a> {
    /// The prompt; a block for each `block_tokens` of them, the last one perhaps not full, is reserved.
    pub token_ids: &'a [u32],
    /// What the KV depends on beside the tokens: `SequenceSpec::cache_key`.
    pub cache_key: u64,
    /// How many of the tokens will have been computed when the reservation is committed. Blocks within them may be cached
    /// ones: nobody writes them afterwards.
    pub num_computed: usize,
}

/// Name of a reservation; never used twice by an engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ReservationId(pub u64);

/// Exclusive right to write into some blocks, but for the first ones if those were cached. It cannot be scheduled; only `Engine::commit` makes a sequence of it. Give
/// it back with `Engine::release_reservation`: one that is merely dropped keeps its blocks, and the audit reports it.
#[derive(Debug)]
#[must_use = "a reservation keeps its blocks until it is committed or released"]
pub struct Reservation {
    id: ReservationId,
    table: BlockTable,
    groups: Groups,
    tokens: usize,
    choices: usize,
    alive: Arc<()>,
}

impl Reservation {
    /// Its name.
    pub fn id(&self) -> ReservationId {
        self.id
    }

    /// The blocks of all groups of layers, place by place in the order of the sequence's positions; [`BlockId::NONE`] for those
    /// before the window of the first row that will be computed.
    pub fn blocks(&self) -> &[BlockId] {
        self.table.blocks()
    }

    /// How many of the first blocks need not be filled: they lie before the window, or hold their KV already, and others may have
    /// them too.
    pub fn have_blocks(&self) -> HaveBlocks {
        // Nothing that is reserved has more blocks than a plan can name, in 32 bits.
        let ready = |slides: bool| {
            let group = (0..self.groups.count()).find(|group| self.groups.slides(*group) == slides);
            group.map(|group| self.table.ready(group) as u32)
        };
        let (full, sliding) = (ready(false), ready(true));
        HaveBlocks {
            full: full.or(sliding).unwrap_or(0),
            sliding: sliding.or(full).unwrap_or(0),
        }
    }

    /// The blocks that have to be filled, as a handoff moves them.
    pub fn moved(&self) -> Option<Moved> {
        Moved::new(self.groups, self.have_blocks(), self.table.places() as u32)
    }

    /// The blocks of [`Reservation::moved`], in the order of their numbers.
    pub fn blocks_to_fill(&self) -> Vec<BlockId> {
        let (count, blocks) = (self.groups.count(), self.table.blocks());
        let all = self.moved().into_iter().flat_map(|moved| moved.iter());
        all.filter_map(|(group, place)| blocks.get(place as usize * count + group).copied())
            .collect()
    }

    /// How many tokens the blocks are reserved for.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// How many sequences may share the blocks.
    pub fn choices(&self) -> usize {
        self.choices
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
    /// More sequences than a step may have; the same reservation will never succeed.
    #[error("choices is {choices}; it must be at least 1 and at most {limit}, the most sequences of a step")]
    Choices {
        /// Sequences asked for.
        choices: usize,
        /// `EngineLimits::max_num_seqs`.
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
    #[error("{in_use} of {limit} sequence slots are taken by sequences and reservations, {choices} are needed")]
    NoSlots {
        /// Sequences running or waiting, and those that reservations are for.
        in_use: usize,
        /// Slots asked for.
        choices: usize,
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
    /// More sequences than blocks were reserved for, or none.
    #[error("{sequences} sequences are committed; at least 1 and at most {reserved} were reserved for")]
    Choices {
        /// Sequences.
        sequences: usize,
        /// Sequences of the reservation.
        reserved: usize,
    },
    /// The sequences do not begin with the same computed tokens.
    #[error(
        "sequence {index} has other tokens than the first one among the first {num_computed}, or another cache key"
    )]
    Beginning {
        /// Which, from 0.
        index: usize,
        /// How many tokens have to be equal.
        num_computed: usize,
    },
    /// The sequences do not begin as the cached blocks do that were reserved, or would write into them.
    #[error(
        "the first {have_blocks} blocks were cached: the sequences must begin with the tokens, and have the cache key, \
         that were reserved for, and all of these tokens must be computed"
    )]
    Cached {
        /// Cached blocks of the reservation.
        have_blocks: usize,
    },
    /// The sequences would read blocks that were not reserved.
    #[error(
        "num_computed is {num_computed}; the first {missing_blocks} blocks were not reserved, as the rows after the tokens \
         reserved for do not see them"
    )]
    Window {
        /// What was said to be computed.
        num_computed: usize,
        /// Blocks that are not there.
        missing_blocks: usize,
    },
    /// A beam search that does not fit.
    #[error(transparent)]
    Beam(#[from] BeamError),
    /// The reservation belongs to another engine.
    #[error("the reservation is not one of this engine")]
    Unknown,
}

/// What the engine remembers of a reservation it gave away.
#[derive(Debug)]
struct OpenReservation {
    id: ReservationId,
    alive: Arc<()>,
    /// Those of its table: whose blocks they are shows also when the table is lost.
    blocks: Box<[BlockId]>,
    tokens: usize,
    /// Most tokens with KV that each sequence can add after the reserved ones.
    growth: usize,
    choices: usize,
    kin: Kin,
}

impl OpenReservation {
    /// Its holder is gone.
    fn is_dropped(&self) -> bool {
        Arc::strong_count(&self.alive) == 1
    }
}

/// What a reservation is for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Newcomer {
    /// Most tokens with KV that each sequence can add.
    pub(crate) growth: usize,
    pub(crate) choices: usize,
    pub(crate) kin: Kin,
}

/// All reservations that are out.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    open: Vec<OpenReservation>,
    issued: u64,
}

/// Families of reservations; those of sequences are named by ids, which count from 0.
const FAMILIES: u64 = 1 << 63;

impl Reservations {
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// Sequences that may come of them.
    pub(crate) fn choices(&self) -> usize {
        self.open.iter().map(|open| open.choices).sum()
    }

    /// Their shares in the forecast. When the KV arrives nobody knows.
    pub(crate) fn holders(&self) -> impl Iterator<Item = Holder> {
        let holder = |open: &OpenReservation| Holder {
            blocks: open.blocks.len(),
            tokens: open.tokens,
            growth: open.growth,
            rows: 1,
            leaves: false,
            kin: Some(open.kin),
        };
        self.open
            .iter()
            .flat_map(move |open| std::iter::repeat_n(holder(open), open.choices))
    }

    /// Of whom the next reservation's sequences are kin, sharing `blocks` full blocks.
    pub(crate) fn next_kin(&self, blocks: usize) -> Kin {
        Kin {
            family: FAMILIES | self.issued,
            blocks,
        }
    }

    /// Gives a table away, which has blocks for `groups`.
    pub(crate) fn issue(
        &mut self,
        (table, groups): (BlockTable, Groups),
        tokens: usize,
        newcomer: &Newcomer,
    ) -> Reservation {
        let alive = Arc::new(());
        let id = ReservationId(self.issued);
        self.open.push(OpenReservation {
            id,
            alive: alive.clone(),
            blocks: table.present().collect(),
            tokens,
            growth: newcomer.growth,
            choices: newcomer.choices,
            kin: newcomer.kin,
        });
        self.issued += 1;
        Reservation {
            id,
            table,
            groups,
            tokens,
            choices: newcomer.choices,
            alive,
        }
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
        self.open.iter().map(|open| open.blocks.len()).sum()
    }

    /// Those that are out, with their blocks.
    pub(crate) fn owners(&self) -> impl Iterator<Item = (Owner, &[BlockId])> {
        self.open.iter().map(|open| {
            let owner = if open.is_dropped() {
                Owner::Dropped(open.id)
            } else {
                Owner::Reservation(open.id)
            };
            (owner, &*open.blocks)
        })
    }

    /// Reports reservations whose holder is gone.
    pub(crate) fn audit(&self, problems: &mut Vec<String>) {
        for open in self.open.iter().filter(|open| open.is_dropped()) {
            problems.push(format!(
                "a reservation of {} blocks for {} tokens was dropped without being released",
                open.blocks.len(),
                open.tokens
            ));
        }
    }
}
