//! A sender that breaks every rule: nothing of it reaches a block, and the receiver says what was wrong.

use bytes::Bytes;
use kv_transfer::core::{Frame, Part, ReceiveCounters, SendLimits, SendSession};
use kv_transfer::receiver::Outcome;
use kv_transfer::transport::memory::{self, PushEnd};
use kv_transfer::transport::{Incoming, Outgoing};
use protocol::ids::{Epoch, Ticket};
use protocol::kv::Fingerprint;
use protocol::transfer::{FrameHeader, PushCommit, PushMessage, PushOpen, PushReply};
use runtime::quic::code;
use tokio::task::JoinHandle;

use super::node::{Node, Options};
use super::{
    EPOCH, EXTENT, FINGERPRINT, LAYOUT, NUM_TOKENS, TICKET, computed, far, first_tokens, open, payload, receiver, soon,
    until,
};

/// A sender in full control of its messages.
struct Rogue {
    end: PushEnd,
    task: JoinHandle<(Outcome, ReceiveCounters)>,
}

impl Rogue {
    fn new(node: &Node) -> Self {
        let (end, (outgoing, incoming)) = memory::stream(64);
        let receiver = receiver(node);
        Self {
            end,
            task: tokio::spawn(async move { receiver.handle(outgoing, incoming).await }),
        }
    }

    async fn opened(node: &Node) -> Self {
        let mut rogue = Self::new(node);
        rogue.send(PushMessage::Open(open()), Bytes::new()).await;
        rogue
    }

    async fn send(&mut self, message: PushMessage, payload: Bytes) {
        self.end.0.send(message, payload).await.expect("the receiver listens");
    }

    async fn frame(&mut self, frame: &Frame) {
        self.send(PushMessage::Frame(frame.header), frame.payload.clone()).await;
    }

    /// The receiver's last word.
    async fn reason(&mut self) -> String {
        loop {
            match soon("the reply", self.end.1.next()).await.expect("a reply") {
                Some(PushReply::Refused { reason }) => return reason,
                Some(PushReply::Received { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    async fn outcome(self) -> (Outcome, ReceiveCounters) {
        soon("the end", self.task).await.expect("no panic")
    }
}

fn good_frames() -> (Vec<Frame>, PushCommit) {
    let limits = SendLimits {
        frame_bytes: 4_096,
        max_resends: 8,
    };
    let mut session = SendSession::new(TICKET, EPOCH, LAYOUT, EXTENT, limits);
    for part in computed(EXTENT, 5) {
        session.push(part, &payload(&LAYOUT, part)).expect("belongs");
    }
    let frames = std::iter::from_fn(|| session.next_frame()).collect();
    (frames, session.commit(NUM_TOKENS, first_tokens()).expect("complete"))
}

fn resized(frame: &Frame, header: FrameHeader) -> Frame {
    let mut bytes = frame.payload.to_vec();
    bytes.resize(header.payload_len as usize, 0);
    let checksum = kv_transfer::core::checksum(&bytes);
    Frame {
        header: FrameHeader { checksum, ..header },
        payload: Bytes::from(bytes),
    }
}

#[tokio::test]
async fn a_frame_that_does_not_fit_is_refused_and_never_written() {
    let (frames, _) = good_frames();
    let good = frames[0].header;
    let block = LAYOUT.layer_block_bytes() as u32;
    let cases = [
        (FrameHeader { first_block: 1, ..good }, "outside of the reservation"),
        (FrameHeader { first_block: 8, ..good }, "outside of the reservation"),
        (FrameHeader { first_layer: 5, ..good }, "outside of the reservation"),
        (
            FrameHeader {
                layers: 0,
                payload_len: 0,
                ..good
            },
            "is empty or outside",
        ),
        (
            FrameHeader {
                blocks: u32::MAX,
                ..good
            },
            "outside of the reservation",
        ),
        (
            FrameHeader {
                payload_len: good.payload_len - 1,
                ..good
            },
            "needs 1280 bytes",
        ),
        (
            FrameHeader {
                payload_len: good.payload_len + block,
                ..good
            },
            "needs 1280 bytes",
        ),
        (FrameHeader { number: 50, ..good }, "frame number is 50"),
    ];
    for (header, expected) in cases {
        let node = Node::new();
        let mut rogue = Rogue::opened(&node).await;
        rogue.frame(&resized(&frames[0], header)).await;
        let reason = rogue.reason().await;
        assert!(reason.contains(expected), "{reason}");
        let (outcome, counters) = rogue.outcome().await;
        assert_eq!(outcome, Outcome::Refused(reason));
        assert_eq!((counters.frames, node.writes(), node.aborted()), (0, 0, 1));
        node.assert_clean();
    }
}

#[tokio::test]
async fn a_payload_beyond_the_limit_is_refused_before_it_is_read() {
    let node = Node::new();
    let mut rogue = Rogue::opened(&node).await;
    let header = FrameHeader {
        payload_len: u32::MAX,
        ..good_frames().0[0].header
    };
    // No payload follows: a receiver that wanted to read it would not answer.
    rogue.send(PushMessage::Frame(header), Bytes::new()).await;
    let reason = rogue.reason().await;
    assert!(
        reason.contains("payload_len is 4294967295, at most 4194304"),
        "{reason}"
    );
    assert_eq!((node.writes(), node.aborted()), (0, 1));
}

#[tokio::test]
async fn frames_of_others_and_repeats_are_dropped_and_counted() {
    let node = Node::new();
    let (frames, commit) = good_frames();
    let mut rogue = Rogue::opened(&node).await;
    let foreign = |header| Frame {
        header,
        payload: Bytes::from(vec![0xEE; frames[0].payload.len()]),
    };
    for _ in 0..2 {
        rogue
            .frame(&foreign(FrameHeader {
                ticket: Ticket(9),
                ..frames[0].header
            }))
            .await;
    }
    for epoch in [EPOCH.0 - 1, EPOCH.0 + 1, 0] {
        rogue
            .frame(&foreign(FrameHeader {
                epoch: Epoch(epoch),
                ..frames[0].header
            }))
            .await;
    }
    for frame in &frames {
        rogue.frame(frame).await;
        rogue.frame(frame).await;
    }
    rogue.send(PushMessage::Commit(commit.clone()), Bytes::new()).await;
    let (outcome, counters) = rogue.outcome().await;
    assert_eq!(outcome, Outcome::Committed);
    assert_eq!((counters.wrong_ticket, counters.wrong_epoch), (2, 3));
    assert_eq!(
        (counters.frames, counters.duplicate),
        (frames.len() as u64, frames.len() as u64)
    );
    assert_eq!(counters.bytes, 50 * LAYOUT.layer_block_bytes() as u64);
    assert_eq!(node.writes(), frames.len() as u64);
    assert_eq!(node.commits(), [commit]);
    node.assert_exact();
}

#[tokio::test]
async fn a_number_or_a_place_cannot_be_used_twice() {
    let (frames, _) = good_frames();
    let overlap = FrameHeader {
        number: frames[1].header.number,
        ..frames[0].header
    };
    let conflict = FrameHeader {
        number: frames[0].header.number,
        ..frames[1].header
    };
    for (second, expected) in [
        (overlap, "overlaps a frame of another number"),
        (conflict, "came before as another frame"),
    ] {
        let node = Node::new();
        let mut rogue = Rogue::opened(&node).await;
        rogue.frame(&frames[0]).await;
        let other = Frame {
            header: second,
            payload: frames[1].payload.clone(),
        };
        rogue.frame(&resized(&other, second)).await;
        let reason = rogue.reason().await;
        assert!(reason.contains(expected), "{reason}");
        assert_eq!((node.writes(), node.aborted()), (1, 1));
        node.assert_clean();
    }
}

#[tokio::test]
async fn a_damaged_frame_is_asked_for_again_but_not_for_ever() {
    let node = Node::new();
    let (frames, _) = good_frames();
    let mut rogue = Rogue::opened(&node).await;
    let damaged = Frame {
        header: frames[0].header,
        payload: Bytes::from(vec![1; frames[0].payload.len()]),
    };
    let granted = soon("the grant", rogue.end.1.next()).await.expect("a reply");
    assert_eq!(granted, Some(PushReply::Received { below: 0 }));
    for _ in 0..8 {
        rogue.frame(&damaged).await;
        let reply = soon("the reply", rogue.end.1.next()).await.expect("a reply");
        assert_eq!(reply, Some(PushReply::Resend { number: 0 }));
    }
    rogue.frame(&damaged).await;
    let reason = rogue.reason().await;
    assert!(reason.contains("frame 0 is damaged, and 8 repeats"), "{reason}");
    let (_, counters) = rogue.outcome().await;
    assert_eq!((counters.damaged, node.writes(), node.aborted()), (9, 0, 1));
}

#[tokio::test]
async fn an_open_that_does_not_fit_is_refused_and_nothing_is_aborted() {
    let cases = [
        (
            PushOpen {
                ticket: Ticket(1),
                ..open()
            },
            vec!["ticket 0000000000000001 is not known here".to_owned()],
        ),
        (
            PushOpen {
                epoch: Epoch(2),
                ..open()
            },
            vec!["epoch 2 is not that of the reservation, 3".to_owned()],
        ),
        (
            PushOpen {
                fingerprint: Fingerprint(0xbad),
                ..open()
            },
            vec![FINGERPRINT.to_string(), Fingerprint(0xbad).to_string()],
        ),
    ];
    for (bad, expected) in cases {
        let node = Node::new();
        let mut rogue = Rogue::new(&node);
        rogue.send(PushMessage::Open(bad), Bytes::new()).await;
        let reason = rogue.reason().await;
        assert!(expected.iter().all(|part| reason.contains(part)), "{reason}");
        assert_eq!((node.opened(), node.aborted()), (0, 0));
    }
    let node = Node::new();
    let mut rogue = Rogue::new(&node);
    rogue.send(PushMessage::Commit(good_frames().1), Bytes::new()).await;
    assert_eq!(rogue.reason().await, "first message is not Open");
    assert_eq!((node.opened(), node.aborted()), (0, 0));
}

#[tokio::test]
async fn a_ticket_is_pushed_by_one_stream_at_a_time() {
    let node = Node::new();
    let receiver = receiver(&node);
    let start = || {
        let (end, (outgoing, incoming)) = memory::stream(64);
        let receiver = receiver.clone();
        Rogue {
            end,
            task: tokio::spawn(async move { receiver.handle(outgoing, incoming).await }),
        }
    };
    let mut first = start();
    first.send(PushMessage::Open(open()), Bytes::new()).await;
    until("open", || node.opened() == 1).await;
    let mut second = start();
    second.send(PushMessage::Open(open()), Bytes::new()).await;
    assert!(second.reason().await.contains("is being pushed by another stream"));
    assert_eq!(node.aborted(), 0);
    // The first is not disturbed, and when it is gone the ticket may be opened again.
    drop(first.end);
    assert!(matches!(
        soon("the end", first.task).await.expect("no panic").0,
        Outcome::Cancelled(_)
    ));
    assert_eq!(node.aborted(), 1);
    let mut third = start();
    third.send(PushMessage::Open(open()), Bytes::new()).await;
    until("open", || node.opened() == 2).await;
}

#[tokio::test]
async fn an_end_without_commit_and_a_second_open_are_no_handoff() {
    let node = Node::new();
    let mut rogue = Rogue::opened(&node).await;
    Outgoing::finish(&mut rogue.end.0).expect("open");
    let (outcome, _) = rogue.outcome().await;
    assert_eq!(outcome, Outcome::Cancelled("stream ended before the commit".to_owned()));
    assert_eq!(node.aborted(), 1);

    let node = Node::new();
    let mut rogue = Rogue::opened(&node).await;
    rogue.send(PushMessage::Open(open()), Bytes::new()).await;
    assert_eq!(rogue.reason().await, "Open came twice");
    assert_eq!(node.aborted(), 1);
}

#[tokio::test]
async fn a_sender_that_falls_silent_is_given_up_at_the_deadline() {
    let deadline = runtime::clock::Clock.now() + std::time::Duration::from_millis(200);
    let node = Node::with(Options {
        deadline,
        ..Options::default()
    });
    let (frames, _) = good_frames();
    let mut rogue = Rogue::opened(&node).await;
    rogue.frame(&frames[0]).await;
    let reason = rogue.reason().await;
    assert!(
        reason.contains("not complete in time: 45 (layer, block) missing after 1 frames"),
        "{reason}"
    );
    assert_eq!(node.aborted(), 1);
    // Whoever never even opens is given up too.
    let node = Node::with(Options {
        deadline: far(),
        ..Options::default()
    });
    let (mut end, (outgoing, incoming)) = memory::stream(4);
    let transfer = config::TransferConfig {
        commit_timeout_ms: 100,
        ..super::transfer()
    };
    let receiver = kv_transfer::receiver::Receiver::new(node.table(), FINGERPRINT, LAYOUT, &transfer);
    let (outcome, _) = soon("the end", receiver.handle(outgoing, incoming)).await;
    assert_eq!(outcome, Outcome::Refused("Open did not come in time".to_owned()));
    let stopped = end
        .0
        .send(PushMessage::Open(open()), Bytes::new())
        .await
        .expect_err("stopped");
    assert_eq!(
        stopped,
        runtime::framing::FramingError::Reset {
            code: code::REFUSED.into_inner()
        }
    );
}

#[tokio::test]
async fn a_commit_that_counts_frames_which_never_come_is_given_up() {
    let node = Node::new();
    let (frames, commit) = good_frames();
    let (end, (outgoing, incoming)) = memory::stream(64);
    let transfer = config::TransferConfig {
        commit_timeout_ms: 100,
        ..super::transfer()
    };
    let receiver = kv_transfer::receiver::Receiver::new(node.table(), FINGERPRINT, LAYOUT, &transfer);
    let task = tokio::spawn(async move { receiver.handle(outgoing, incoming).await });
    let mut rogue = Rogue { end, task };
    rogue.send(PushMessage::Open(open()), Bytes::new()).await;
    for frame in &frames[1..] {
        rogue.frame(frame).await;
    }
    rogue.send(PushMessage::Commit(commit), Bytes::new()).await;
    let reason = rogue.reason().await;
    assert!(
        reason.contains("not complete in time: 5 (layer, block) missing"),
        "{reason}"
    );
    assert_eq!((node.commits().len(), node.aborted()), (0, 1));
}

#[tokio::test]
async fn a_writer_that_fails_ends_the_handoff_with_its_reason() {
    let node = Node::with(Options {
        fail_from: 3,
        ..Options::default()
    });
    let (frames, _) = good_frames();
    let mut rogue = Rogue::opened(&node).await;
    for frame in &frames[..4] {
        rogue.frame(frame).await;
    }
    let reason = rogue.reason().await;
    assert!(reason.contains("cannot write frame 3: the pool is on fire"), "{reason}");
    assert_eq!(node.aborted(), 1);
    node.assert_clean();
}

#[test]
fn a_part_of_the_right_size_has_1280_bytes() {
    // The number in the cases above.
    let part = Part::from(&good_frames().0[0].header);
    assert_eq!(part.payload_bytes(&LAYOUT), Some(1_280));
}
