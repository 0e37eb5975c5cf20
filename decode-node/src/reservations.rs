//! Open reservations by ticket: where pushed KV may go, and who waits for the commit.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kv_transfer::core::Extent;
use kv_transfer::receiver::{BlockSink, Grant, ReservationTable};
use model::kv_pool::KvWriter;
use protocol::ids::{Epoch, RequestId, Ticket};
use protocol::kv::{Fingerprint, KvLayout};
use protocol::moved::{HaveBlocks, Moved};
use protocol::transfer::{FrameHeader, PushCommit, PushOpen};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// All open reservations of a node.
pub struct Reservations {
    layout: KvLayout,
    fingerprint: Fingerprint,
    open: Mutex<HashMap<Ticket, Entry>>,
}

struct Entry {
    request: RequestId,
    epoch: Epoch,
    num_tokens: u32,
    sink: Arc<Sink>,
    revoked: CancellationToken,
    deadline: Instant,
    /// A push is under way.
    pushing: bool,
    committed: oneshot::Sender<PushCommit>,
}

/// Writes into the blocks of one reservation, but for the first ones, which are cached and may be others' too: the writer
/// does not have them.
struct Sink {
    writer: KvWriter,
    extent: Extent,
}

impl BlockSink for Sink {
    fn extent(&self) -> Extent {
        self.extent
    }

    fn write(&self, header: &FrameHeader, payload: &[u8]) -> Result<(), String> {
        let Some(first_block) = header.first_block.checked_sub(self.extent.first_block) else {
            return Err(format!(
                "block {} is none that has to come: these have numbers from {} on",
                header.first_block, self.extent.first_block
            ));
        };
        self.writer
            .write(header.first_layer, header.layers, first_block, header.blocks, payload)
            .map_err(|error| error.to_string())
    }
}

/// A reservation while its KV is awaited. Dropping it closes the door: no byte is written to its blocks afterwards.
pub struct Pending {
    table: Arc<Reservations>,
    ticket: Ticket,
    committed: oneshot::Receiver<PushCommit>,
}

impl Pending {
    /// The reservation's name.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Resolves when the prefill node has committed; `None` if that cannot happen any more. Cancel-safe.
    pub async fn committed(&mut self) -> Option<PushCommit> {
        (&mut self.committed).await.ok()
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(entry) = self.table.lock().remove(&self.ticket) {
            entry.sink.writer.revoke();
            entry.revoked.cancel();
        }
    }
}

/// What a push must name to be let in, and until when it may last.
#[derive(Clone, Copy, Debug)]
pub struct Admission {
    /// The reservation's name.
    pub ticket: Ticket,
    /// Whose it is.
    pub request: RequestId,
    /// Its generation.
    pub epoch: Epoch,
    /// Tokens of the prompt.
    pub num_tokens: u32,
    /// Blocks of the prompt, from its first on, that need not come.
    pub have_blocks: HaveBlocks,
    /// By when they must have come.
    pub deadline: Instant,
}

impl Reservations {
    /// No reservations yet, on a pool of the given layout.
    pub fn new(layout: KvLayout, fingerprint: Fingerprint) -> Arc<Self> {
        Arc::new(Self {
            layout,
            fingerprint,
            open: Mutex::new(HashMap::new()),
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Ticket, Entry>> {
        // Every change under the lock is a single insert, remove or flag: a panic leaves no half of it.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the door for a push into the blocks of `writer`: those of the prompt that have to come, in the order of their numbers
    /// ([`Moved`]). `None` if the ticket is taken, or if the writer has another number of them.
    pub fn admit(self: &Arc<Self>, admission: Admission, writer: KvWriter) -> Option<Pending> {
        let (sender, committed) = oneshot::channel();
        let ticket = admission.ticket;
        let blocks = admission.num_tokens.div_ceil(self.layout.block_tokens);
        let moved = Moved::new(self.layout.groups, admission.have_blocks, blocks)?;
        if moved.len() as usize != writer.num_blocks() {
            return None;
        }
        let extent = Extent::of(&self.layout, &moved);
        let entry = Entry {
            request: admission.request,
            epoch: admission.epoch,
            num_tokens: admission.num_tokens,
            sink: Arc::new(Sink { writer, extent }),
            revoked: CancellationToken::new(),
            deadline: admission.deadline,
            pushing: false,
            committed: sender,
        };
        let mut open = self.lock();
        if open.contains_key(&ticket) {
            return None;
        }
        open.insert(ticket, entry);
        drop(open);
        Some(Pending {
            table: Arc::clone(self),
            ticket,
            committed,
        })
    }

    /// Number of open reservations.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ReservationTable for Reservations {
    fn open(&self, open: &PushOpen) -> Result<Grant, String> {
        if open.fingerprint != self.fingerprint {
            return Err(format!(
                "fingerprint: this node has {}, the sender {}",
                self.fingerprint, open.fingerprint
            ));
        }
        let mut table = self.lock();
        let entry = table
            .get_mut(&open.ticket)
            .ok_or_else(|| format!("ticket {} is not open", open.ticket))?;
        if entry.epoch != open.epoch || entry.request != open.request {
            return Err(format!(
                "ticket {} belongs to request {} epoch {}, not to request {} epoch {}",
                open.ticket, entry.request, entry.epoch.0, open.request, open.epoch.0
            ));
        }
        if entry.pushing {
            return Err(format!("ticket {} is being pushed to already", open.ticket));
        }
        entry.pushing = true;
        let sink: Arc<dyn BlockSink> = Arc::<Sink>::clone(&entry.sink);
        Ok(Grant {
            sink,
            revoked: entry.revoked.clone(),
            deadline: entry.deadline,
        })
    }

    fn committed(&self, open: &PushOpen, commit: PushCommit) -> Result<(), String> {
        let mut table = self.lock();
        let entry = table
            .get(&open.ticket)
            .ok_or_else(|| format!("ticket {} is not open any more", open.ticket))?;
        if entry.epoch != open.epoch {
            return Err(format!(
                "epoch is {}, the reservation's {}",
                open.epoch.0, entry.epoch.0
            ));
        }
        if entry.num_tokens != commit.num_tokens {
            return Err(format!(
                "num_tokens is {}, reserved for {}",
                commit.num_tokens, entry.num_tokens
            ));
        }
        let Some(entry) = table.remove(&open.ticket) else {
            return Err("the reservation is gone".to_owned());
        };
        drop(table);
        // The blocks change hands: nothing is written to them from here on.
        entry.sink.writer.revoke();
        entry
            .committed
            .send(commit)
            .map_err(|_| "the request has been cancelled".to_owned())
    }

    fn aborted(&self, open: &PushOpen) {
        // The prefill node may try again over another link while the reservation lives.
        if let Some(entry) = self.lock().get_mut(&open.ticket)
            && entry.epoch == open.epoch
        {
            entry.pushing = false;
        }
    }
}
