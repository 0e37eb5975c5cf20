//! A decode node for tests: blocks with canaries around them, and a diary of what the receiver did.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kv_transfer::core::{Extent, Part};
use kv_transfer::receiver::{BlockSink, Grant, ReservationTable};
use protocol::ids::Ticket;
use protocol::kv::KvLayout;
use protocol::transfer::{FrameHeader, PushCommit, PushOpen};
use tokio_util::sync::CancellationToken;

use super::{EPOCH, EXTENT, LAYOUT, block_bytes, far};

/// Fills every byte that no frame may touch.
const CANARY: u8 = 0xA5;

/// What a node did with one reservation.
#[derive(Clone)]
pub(crate) struct Node {
    inner: Arc<Inner>,
}

struct Inner {
    tickets: Vec<Ticket>,
    extent: Extent,
    blocks: Mutex<Vec<u8>>,
    commits: Mutex<Vec<PushCommit>>,
    opened: AtomicU64,
    aborted: AtomicU64,
    writes: AtomicU64,
    revoked: CancellationToken,
    deadline: Instant,
    /// Writes from this one on fail.
    fail_from: u64,
    refuse_commit: bool,
}

pub(crate) struct Options {
    pub(crate) tickets: Vec<Ticket>,
    pub(crate) extent: Extent,
    pub(crate) deadline: Instant,
    pub(crate) fail_from: u64,
    pub(crate) refuse_commit: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            tickets: vec![super::TICKET],
            extent: EXTENT,
            deadline: far(),
            fail_from: u64::MAX,
            refuse_commit: false,
        }
    }
}

impl Node {
    pub(crate) fn new() -> Self {
        Self::with(Options::default())
    }

    pub(crate) fn with(options: Options) -> Self {
        let Options {
            tickets,
            extent,
            deadline,
            fail_from,
            refuse_commit,
        } = options;
        // One more block on either side of the reservation, in every layer.
        let blocks = (extent.end_block() + 1) as usize * extent.layers as usize * LAYOUT.layer_block_bytes();
        Self {
            inner: Arc::new(Inner {
                tickets,
                extent,
                blocks: Mutex::new(vec![CANARY; blocks]),
                commits: Mutex::default(),
                opened: AtomicU64::new(0),
                aborted: AtomicU64::new(0),
                writes: AtomicU64::new(0),
                revoked: CancellationToken::new(),
                deadline,
                fail_from,
                refuse_commit,
            }),
        }
    }

    pub(crate) fn table(&self) -> Arc<dyn ReservationTable> {
        Arc::new(Table(Arc::clone(&self.inner)))
    }

    pub(crate) fn revoke(&self) {
        self.inner.revoked.cancel();
    }

    pub(crate) fn opened(&self) -> u64 {
        self.inner.opened.load(Ordering::SeqCst)
    }

    pub(crate) fn aborted(&self) -> u64 {
        self.inner.aborted.load(Ordering::SeqCst)
    }

    pub(crate) fn writes(&self) -> u64 {
        self.inner.writes.load(Ordering::SeqCst)
    }

    pub(crate) fn commits(&self) -> Vec<PushCommit> {
        self.inner.commits.lock().expect("not poisoned").clone()
    }

    /// Every block of the reservation holds the sender's bytes, and the others are untouched.
    pub(crate) fn assert_exact(&self) {
        self.assert_blocks(true);
    }

    /// Every block holds the sender's bytes or none, and the others are untouched.
    pub(crate) fn assert_clean(&self) {
        self.assert_blocks(false);
    }

    fn assert_blocks(&self, complete: bool) {
        let (blocks, extent) = (self.inner.blocks.lock().expect("not poisoned"), self.inner.extent);
        let size = LAYOUT.layer_block_bytes();
        for (n, bytes) in blocks.chunks(size).enumerate() {
            let (layer, block) = (
                n as u32 / (extent.end_block() as u32 + 1),
                n as u32 % (extent.end_block() as u32 + 1),
            );
            let reserved = block >= extent.first_block && u64::from(block) < extent.end_block();
            let untouched = bytes.iter().all(|byte| *byte == CANARY);
            let exact = bytes == block_bytes(&LAYOUT, layer, block);
            let good = if reserved {
                exact || (!complete && untouched)
            } else {
                untouched
            };
            assert!(
                good,
                "layer {layer}, block {block}: reserved {reserved}, untouched {untouched}, exact {exact}"
            );
        }
    }
}

/// Copies a frame into canonical blocks 0..=end_block of every layer, as a KV pool would.
pub(crate) fn place(blocks: &mut [u8], layout: &KvLayout, end_block: u64, header: &FrameHeader, payload: &[u8]) {
    let size = layout.layer_block_bytes();
    let part = Part::from(header);
    for (n, bytes) in payload.chunks(size).enumerate() {
        let layer = part.first_layer as usize + n / part.blocks as usize;
        let block = part.first_block as usize + n % part.blocks as usize;
        let at = (layer * (end_block as usize + 1) + block) * size;
        blocks[at..at + size].copy_from_slice(bytes);
    }
}

impl BlockSink for Inner {
    fn extent(&self) -> Extent {
        self.extent
    }

    fn write(&self, header: &FrameHeader, payload: &[u8]) -> Result<(), String> {
        assert!(
            self.tickets.contains(&header.ticket),
            "foreign ticket {}",
            header.ticket
        );
        assert_eq!(header.epoch, EPOCH, "foreign epoch");
        if self.revoked.is_cancelled() {
            return Err("the reservation is revoked".to_owned());
        }
        if self.writes.fetch_add(1, Ordering::SeqCst) >= self.fail_from {
            return Err("the pool is on fire".to_owned());
        }
        let mut blocks = self.blocks.lock().expect("not poisoned");
        place(&mut blocks, &LAYOUT, self.extent.end_block(), header, payload);
        Ok(())
    }
}

/// The table hands itself out as the sink.
struct Table(Arc<Inner>);

impl ReservationTable for Table {
    fn open(&self, open: &PushOpen) -> Result<Grant, String> {
        if !self.0.tickets.contains(&open.ticket) {
            return Err(format!("ticket {} is not known here", open.ticket));
        }
        if open.epoch != EPOCH {
            return Err(format!(
                "epoch {} is not that of the reservation, {}",
                open.epoch.0, EPOCH.0
            ));
        }
        self.0.opened.fetch_add(1, Ordering::SeqCst);
        let sink = Arc::clone(&self.0) as Arc<dyn BlockSink>;
        Ok(Grant {
            sink,
            revoked: self.0.revoked.clone(),
            deadline: self.0.deadline,
        })
    }

    fn committed(&self, _: &PushOpen, commit: PushCommit) -> Result<(), String> {
        if self.0.refuse_commit {
            return Err("the sequence is not wanted any more".to_owned());
        }
        self.0.commits.lock().expect("not poisoned").push(commit);
        Ok(())
    }

    fn aborted(&self, _: &PushOpen) {
        self.0.aborted.fetch_add(1, Ordering::SeqCst);
    }
}
