//! The two sessions against each other, without any shell: cases.

use kv_transfer::core::{
    CommitAction, Extent, Frame, HeaderAction, Part, PayloadAction, ReceiveLimits, ReceiveSession, Refusal, SendError,
    SendLimits, SendSession, checksum, digest,
};
use protocol::codec::MAX_PAYLOAD_BYTES;
use protocol::ids::{Epoch, Ticket};
use protocol::transfer::{FrameHeader, PushCommit};

use super::node::place;
use super::{EPOCH, EXTENT, LAYOUT, NUM_TOKENS, TICKET, block_bytes, computed, first_tokens, payload};

const MAX_RESENDS: u32 = 8;

pub(crate) fn receive(extent: Extent) -> ReceiveSession {
    let limits = ReceiveLimits {
        max_payload_bytes: MAX_PAYLOAD_BYTES as u32,
        max_resends: MAX_RESENDS,
    };
    ReceiveSession::new(TICKET, EPOCH, LAYOUT, extent, limits)
}

fn send(extent: Extent, frame_bytes: usize) -> SendSession {
    SendSession::new(
        TICKET,
        EPOCH,
        LAYOUT,
        extent,
        SendLimits {
            frame_bytes,
            max_resends: MAX_RESENDS,
        },
    )
}

/// All frames of an extent and its commit.
pub(crate) fn frames(extent: Extent, frame_bytes: usize, chunk_blocks: u32) -> (Vec<Frame>, PushCommit) {
    let mut session = send(extent, frame_bytes);
    for part in computed(extent, chunk_blocks) {
        session.push(part, &payload(&LAYOUT, part)).expect("belongs");
    }
    let frames = std::iter::from_fn(|| session.next_frame()).collect();
    let num_tokens = extent.end_block() as u32 * LAYOUT.block_tokens;
    (frames, session.commit(num_tokens, first_tokens()).expect("complete"))
}

/// Feeds a frame in; writes what may be written. `None`: nothing to do.
pub(crate) fn feed(session: &mut ReceiveSession, frame: &Frame, memory: &mut [u8]) -> (Option<u32>, CommitAction) {
    let extent = EXTENT;
    match session.on_header(&frame.header) {
        HeaderAction::Skip => return (None, CommitAction::Wait),
        HeaderAction::Refuse(refusal) => return (None, CommitAction::Refuse(refusal)),
        HeaderAction::Read => {}
    }
    match session.on_payload(&frame.header, &frame.payload) {
        PayloadAction::Skip => (None, CommitAction::Wait),
        PayloadAction::Refuse(refusal) => (None, CommitAction::Refuse(refusal)),
        PayloadAction::Resend { number } => (Some(number), CommitAction::Wait),
        PayloadAction::Write => {
            place(memory, &LAYOUT, extent.end_block(), &frame.header, &frame.payload);
            (None, session.on_written(&frame.header))
        }
    }
}

pub(crate) fn memory() -> Vec<u8> {
    vec![0xA5; (EXTENT.end_block() as usize + 1) * EXTENT.layers as usize * LAYOUT.layer_block_bytes()]
}

/// True if the reservation is exact; panics if anything outside of it, or half a block, was written.
pub(crate) fn examine(memory: &[u8]) -> bool {
    let columns = EXTENT.end_block() as u32 + 1;
    let mut complete = true;
    for (n, bytes) in memory.chunks(LAYOUT.layer_block_bytes()).enumerate() {
        let (layer, block) = (n as u32 / columns, n as u32 % columns);
        let reserved = block >= EXTENT.first_block && block + 1 < columns;
        let untouched = bytes.iter().all(|byte| *byte == 0xA5);
        assert!(reserved || untouched, "layer {layer}, block {block} is not reserved");
        complete &= !reserved || bytes == block_bytes(&LAYOUT, layer, block);
    }
    complete
}

#[test]
fn the_digest_is_xxh3_over_little_endian_checksums() {
    let bytes: Vec<u8> = [1_u64, 0x0203]
        .iter()
        .flat_map(|checksum| checksum.to_le_bytes())
        .collect();
    assert_eq!(digest([1, 0x0203]), checksum(&bytes));
    assert_ne!(digest([1, 2]), digest([2, 1]));
}

#[test]
fn a_commit_that_does_not_match_is_refused_by_what_differs() {
    let (frames, commit) = frames(EXTENT, 4_096, 3);
    let cases: [(PushCommit, &str); 6] = [
        (
            PushCommit {
                ticket: Ticket(1),
                ..commit.clone()
            },
            "commit is for ticket",
        ),
        (
            PushCommit {
                epoch: Epoch(2),
                ..commit.clone()
            },
            "epoch 2",
        ),
        (
            PushCommit {
                digest: commit.digest ^ 1,
                ..commit.clone()
            },
            "digest is",
        ),
        (
            PushCommit {
                frames: commit.frames - 1,
                ..commit.clone()
            },
            "commit counts",
        ),
        (
            PushCommit {
                frames: commit.frames + 1,
                ..commit.clone()
            },
            "commit counts",
        ),
        (
            PushCommit {
                num_tokens: 40,
                ..commit.clone()
            },
            "num_tokens is 40: that is 10 blocks",
        ),
    ];
    for (bad, expected) in cases {
        let mut session = receive(EXTENT);
        let mut memory = memory();
        for frame in &frames {
            assert_eq!(feed(&mut session, frame, &mut memory), (None, CommitAction::Wait));
        }
        let CommitAction::Refuse(refusal) = session.on_commit(bad) else {
            panic!("{expected}: not refused")
        };
        assert!(refusal.to_string().contains(expected), "{refusal}");
        assert!(session.is_over());
        assert_eq!(session.on_commit(commit.clone()), CommitAction::Refuse(Refusal::Over));
    }
}

#[test]
fn a_commit_waits_for_the_frames_it_counts() {
    let (frames, commit) = frames(EXTENT, 4_096, 3);
    let (last, first) = frames.split_last().expect("frames");
    let mut session = receive(EXTENT);
    let mut memory = memory();
    for frame in first {
        feed(&mut session, frame, &mut memory);
    }
    assert_eq!(session.on_commit(commit.clone()), CommitAction::Wait);
    assert!(session.is_commit_pending());
    let mut twice = session.clone();
    assert_eq!(
        twice.on_commit(commit.clone()),
        CommitAction::Refuse(Refusal::SecondCommit)
    );
    assert_eq!(
        feed(&mut session, last, &mut memory),
        (None, CommitAction::Complete(commit))
    );
    assert!(examine(&memory));
}

#[test]
fn receipts_are_cumulative_and_free_what_the_sender_keeps() {
    let (frames, _) = frames(EXTENT, 1, 10);
    let mut session = receive(EXTENT);
    let mut memory = memory();
    for (n, below) in [(0, 1), (2, 1), (3, 1), (1, 4)] {
        feed(&mut session, &frames[n], &mut memory);
        assert_eq!(session.received_below(), below);
    }
    let mut sender = send(EXTENT, 1);
    let part = Part {
        first_layer: 0,
        layers: 1,
        first_block: 2,
        blocks: 10,
    };
    sender.push(part, &payload(&LAYOUT, part)).expect("belongs");
    assert_eq!(sender.unconfirmed(), 10);
    sender.on_received(4).expect("sent");
    assert_eq!(sender.unconfirmed(), 6);
    sender.on_received(2).expect("an older receipt changes nothing");
    assert_eq!(sender.unconfirmed(), 6);
    assert_eq!(
        sender.on_received(11),
        Err(SendError::UnknownFrame {
            number: 11,
            first: 4,
            end: 10
        })
    );
    assert_eq!(
        sender.on_resend(3),
        Err(SendError::UnknownFrame {
            number: 3,
            first: 4,
            end: 10
        })
    );
    let waiting: Vec<u32> = std::iter::from_fn(|| sender.next_frame())
        .map(|frame| frame.header.number)
        .collect();
    assert_eq!(waiting, [4, 5, 6, 7, 8, 9]);
    for n in 0..MAX_RESENDS {
        sender.on_resend(5 + n % 2).expect("kept");
    }
    assert_eq!(
        sender.on_resend(5),
        Err(SendError::TooManyResends {
            number: 5,
            limit: MAX_RESENDS
        })
    );
    assert_eq!(sender.next_frame().map(|frame| frame.header.number), Some(6));
}

#[test]
fn the_sender_refuses_what_is_no_handoff() {
    let mut session = send(EXTENT, 4_096);
    let part = Part {
        first_layer: 0,
        layers: 1,
        first_block: 2,
        blocks: 10,
    };
    let bytes = payload(&LAYOUT, part);
    let outside = Part { first_block: 3, ..part };
    assert!(matches!(
        session.push(outside, &bytes),
        Err(SendError::OutsideExtent { .. })
    ));
    let short = bytes.slice(1..);
    assert!(matches!(
        session.push(part, &short),
        Err(SendError::PayloadLength { .. })
    ));
    session.push(part, &bytes).expect("belongs");
    assert!(matches!(session.push(part, &bytes), Err(SendError::Repeated { .. })));
    let early = session.commit(NUM_TOKENS, first_tokens());
    assert_eq!(
        early,
        Err(SendError::Incomplete {
            missing: 40,
            layer: 1,
            block: 2
        })
    );
    let rest = Part {
        first_layer: 1,
        layers: 4,
        ..part
    };
    session.push(rest, &payload(&LAYOUT, rest)).expect("belongs");
    assert!(matches!(
        session.commit(49, first_tokens()),
        Err(SendError::NumTokens { needs: 13, .. })
    ));
    session.commit(NUM_TOKENS, first_tokens()).expect("complete");
    assert_eq!(session.commit(NUM_TOKENS, first_tokens()), Err(SendError::Committed));
    assert_eq!(session.push(part, &bytes), Err(SendError::Committed));
}

#[test]
fn absurd_headers_are_refused_without_overflow() {
    let header = FrameHeader {
        ticket: TICKET,
        epoch: EPOCH,
        number: u32::MAX,
        first_layer: u32::MAX,
        layers: u32::MAX,
        first_block: u32::MAX,
        blocks: u32::MAX,
        checksum: 0,
        payload_len: 0,
    };
    let action = receive(EXTENT).on_header(&header);
    assert!(
        matches!(action, HeaderAction::Refuse(Refusal::OutsideExtent { .. })),
        "{action:?}"
    );
    let long = FrameHeader {
        payload_len: u32::MAX,
        ..header
    };
    let action = receive(EXTENT).on_header(&long);
    assert!(
        matches!(action, HeaderAction::Refuse(Refusal::PayloadTooLong { .. })),
        "{action:?}"
    );
    // An empty reservation takes no frame, and an empty handoff commits.
    let nothing = Extent::of_one_group(5, 12, 0);
    let (none, commit) = frames(nothing, 4_096, 1);
    assert!(none.is_empty());
    assert!(matches!(
        receive(nothing).on_header(&FrameHeader {
            first_layer: 0,
            layers: 1,
            first_block: 12,
            blocks: 1,
            payload_len: 4096,
            number: 0,
            ..header
        }),
        HeaderAction::Refuse(_)
    ));
    assert_eq!(
        receive(nothing).on_commit(commit.clone()),
        CommitAction::Complete(commit)
    );
}
