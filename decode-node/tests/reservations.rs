//! Who may push where, and until when.

use std::sync::Arc;
use std::time::Duration;

use decode_node::reservations::{Admission, Pending, Reservations};
use engine::plan::BlockId;
use kv_transfer::receiver::ReservationTable;
use model::kv_pool::KvPool;
use protocol::ids::{Epoch, RequestId, Ticket};
use protocol::kv::{Fingerprint, KvDtype, KvLayout};
use protocol::moved::HaveBlocks;
use protocol::transfer::{FrameHeader, PushCommit, PushOpen};
use protocol::window::Groups;
use runtime::clock::Clock;

const LAYOUT: KvLayout = KvLayout {
    num_layers: 2,
    num_kv_heads: 1,
    head_dim: 4,
    block_tokens: 4,
    dtype: KvDtype::F32,
    latent: false,
    groups: Groups::ONE,
};
const FINGERPRINT: Fingerprint = Fingerprint(7);

fn open() -> PushOpen {
    PushOpen {
        request: RequestId(1),
        ticket: Ticket(2),
        epoch: Epoch(3),
        fingerprint: FINGERPRINT,
    }
}

fn commit(num_tokens: u32) -> PushCommit {
    PushCommit {
        ticket: Ticket(2),
        epoch: Epoch(3),
        digest: 0,
        frames: 1,
        num_tokens,
        first_tokens: vec![9],
    }
}

fn frame(first_block: u32, blocks: u32) -> (FrameHeader, Vec<u8>) {
    let payload = vec![0xab; 2 * blocks as usize * LAYOUT.layer_block_bytes()];
    let header = FrameHeader {
        ticket: Ticket(2),
        epoch: Epoch(3),
        number: 0,
        first_layer: 0,
        layers: 2,
        first_block,
        blocks,
        checksum: 0,
        payload_len: payload.len() as u32,
    };
    (header, payload)
}

/// A table with one reservation of 10 tokens in the blocks 4, 2 and 6 of a pool of 8.
fn reserved() -> (Arc<Reservations>, Arc<KvPool>, Pending) {
    let pool = Arc::new(KvPool::new(LAYOUT, 8).expect("a pool"));
    let table = Reservations::new(LAYOUT, FINGERPRINT);
    let writer = pool
        .writer(vec![BlockId(4), BlockId(2), BlockId(6)])
        .expect("idle blocks");
    let deadline = Clock.now() + Duration::from_secs(60);
    let admission = Admission {
        ticket: Ticket(2),
        request: RequestId(1),
        epoch: Epoch(3),
        num_tokens: 10,
        have_blocks: HaveBlocks::NONE,
        deadline,
    };
    let pending = table.admit(admission, writer).expect("a free ticket");
    assert!(
        table
            .admit(admission, pool.writer(vec![BlockId(0)]).expect("idle"))
            .is_none(),
        "the ticket is taken"
    );
    (table, pool, pending)
}

#[test]
fn only_the_right_push_gets_in_and_only_once() {
    let (table, _pool, _pending) = reserved();
    let wrong = [
        (
            PushOpen {
                ticket: Ticket(5),
                ..open()
            },
            "ticket",
        ),
        (
            PushOpen {
                epoch: Epoch(2),
                ..open()
            },
            "epoch 2",
        ),
        (
            PushOpen {
                request: RequestId(8),
                ..open()
            },
            "request",
        ),
        (
            PushOpen {
                fingerprint: Fingerprint(8),
                ..open()
            },
            "fingerprint",
        ),
    ];
    for (push, word) in wrong {
        let refused = table.open(&push).map(drop);
        assert!(refused.as_ref().is_err_and(|e| e.contains(word)), "{word}: {refused:?}");
    }
    assert!(table.open(&open()).is_ok());
    assert!(table.open(&open()).is_err(), "a second push at the same time");
    table.aborted(&open());
    assert!(table.open(&open()).is_ok(), "again after an abort");
}

#[test]
fn bytes_go_into_the_reserved_blocks_and_nowhere_else() {
    let (table, pool, _pending) = reserved();
    let grant = table.open(&open()).expect("granted");
    assert_eq!((grant.sink.extent().layers, grant.sink.extent().blocks), (2, 3));
    let (header, payload) = frame(1, 2);
    grant.sink.write(&header, &payload).expect("within the reservation");
    let (outside, long) = frame(2, 2);
    assert!(
        grant.sink.write(&outside, &long).is_err(),
        "the fourth block is not reserved"
    );
    table.committed(&open(), commit(10)).expect("the job waits");
    for block in 0..8 {
        let bytes = pool.gather(0..2, &[BlockId(block)]).expect("idle");
        let expected = if block == 2 || block == 6 { 0xab } else { 0 };
        assert!(bytes.iter().all(|b| *b == expected), "block {block}");
    }
}

#[test]
fn blocks_that_are_here_are_neither_expected_nor_written() {
    let pool = Arc::new(KvPool::new(LAYOUT, 8).expect("a pool"));
    let table = Reservations::new(LAYOUT, FINGERPRINT);
    // The prompt's first block is cached; of its others somebody else may read no byte before they are committed.
    let writer = pool.writer(vec![BlockId(2), BlockId(6)]).expect("idle blocks");
    let admission = Admission {
        ticket: Ticket(2),
        request: RequestId(1),
        epoch: Epoch(3),
        num_tokens: 10,
        have_blocks: HaveBlocks::all(1),
        deadline: Clock.now() + Duration::from_secs(60),
    };
    let _pending = table.admit(admission, writer).expect("a free ticket");
    let grant = table.open(&open()).expect("granted");
    let extent = grant.sink.extent();
    assert_eq!((extent.first_block, extent.blocks), (1, 2));
    let (header, payload) = frame(0, 2);
    assert!(
        grant
            .sink
            .write(&header, &payload)
            .is_err_and(|e| e.contains("none that has to come"))
    );
    let (header, payload) = frame(1, 2);
    grant.sink.write(&header, &payload).expect("within the reservation");
    table.committed(&open(), commit(10)).expect("the job waits");
    for block in 0..8 {
        let bytes = pool.gather(0..2, &[BlockId(block)]).expect("idle");
        let expected = if block == 2 || block == 6 { 0xab } else { 0 };
        assert!(bytes.iter().all(|b| *b == expected), "block {block}");
    }
    let more = Admission {
        ticket: Ticket(3),
        have_blocks: HaveBlocks::all(4),
        ..admission
    };
    let writer = pool.writer(vec![]).expect("no blocks");
    assert!(table.admit(more, writer).is_none(), "the prompt has 3 blocks");
}

#[tokio::test]
async fn the_commit_reaches_the_job_and_shuts_the_door() {
    let (table, _pool, mut pending) = reserved();
    let grant = table.open(&open()).expect("granted");
    assert!(
        table
            .committed(&open(), commit(9))
            .is_err_and(|e| e.contains("num_tokens is 9"))
    );
    table.committed(&open(), commit(10)).expect("the job waits");
    let (header, payload) = frame(0, 1);
    assert!(
        grant.sink.write(&header, &payload).is_err(),
        "after the commit nothing is written"
    );
    assert_eq!(pending.committed().await, Some(commit(10)));
    assert!(table.is_empty());
}

#[test]
fn a_dropped_job_revokes_and_its_blocks_can_be_used_again() {
    let (table, pool, pending) = reserved();
    let grant = table.open(&open()).expect("granted");
    assert!(pool.writer(vec![BlockId(2)]).is_err(), "the reservation holds it");
    drop(pending);
    assert!(grant.revoked.is_cancelled());
    let (header, payload) = frame(0, 1);
    assert!(grant.sink.write(&header, &payload).is_err());
    assert!(table.committed(&open(), commit(10)).is_err());
    table.aborted(&open());
    assert!(pool.writer(vec![BlockId(2)]).is_ok());
}
