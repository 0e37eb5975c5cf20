//! The compute thread is never blocked, and memory is bounded even though every frame is kept until it has arrived.

use bytes::Bytes;
use config::TransferConfig;
use kv_transfer::core::{Part, SendError};
use kv_transfer::pusher::{PushError, PushSettings};
use kv_transfer::receiver::Outcome;
use kv_transfer::transport::{Incoming, memory};
use protocol::transfer::PushMessage;

use super::node::Node;
use super::{
    EXTENT, LAYOUT, NUM_TOKENS, computed, far, first_tokens, once, open, payload, receiver, soon, transfer, until,
};

const BLOCK: usize = 256;

#[tokio::test]
async fn a_full_stage_says_so_and_empties_as_frames_arrive() {
    let node = Node::new();
    // Room for two pieces of 3 blocks; the handoff has 50 blocks.
    let settings = TransferConfig {
        staging_bytes: 6 * BLOCK,
        frame_bytes: BLOCK,
        ..transfer()
    };
    let settings = PushSettings::new(LAYOUT, &settings).expect("settings");
    let (push_end, (outgoing, incoming)) = memory::stream(1);
    let push = settings.start(once(push_end), open(), EXTENT, far()).expect("starts");
    let handle = push.staging();
    let parts = computed(EXTENT, 3);
    // Nobody receives yet.
    handle.try_push(parts[0], payload(&LAYOUT, parts[0])).expect("room");
    handle.try_push(parts[1], payload(&LAYOUT, parts[1])).expect("room");
    for _ in 0..100 {
        assert_eq!(
            handle.try_push(parts[2], payload(&LAYOUT, parts[2])),
            Err(PushError::Full)
        );
        tokio::task::yield_now().await;
    }
    let receiver = receiver(&node);
    let task = tokio::spawn(async move { receiver.handle(outgoing, incoming).await.0 });
    for part in &parts[2..] {
        until("room", || match handle.try_push(*part, payload(&LAYOUT, *part)) {
            Ok(()) => true,
            Err(PushError::Full) => false,
            Err(other) => panic!("{other}"),
        })
        .await;
    }
    soon("the commit", push.commit(NUM_TOKENS, first_tokens()))
        .await
        .expect("committed");
    assert_eq!(task.await.expect("no panic"), Outcome::Committed);
    node.assert_exact();
}

/// A handoff filled by room: first room, then bytes.
#[tokio::test]
async fn room_is_taken_before_bytes_are_copied() {
    let node = Node::new();
    let settings = TransferConfig {
        staging_bytes: 6 * BLOCK,
        frame_bytes: BLOCK,
        ..transfer()
    };
    let settings = PushSettings::new(LAYOUT, &settings).expect("settings");
    let (push_end, (outgoing, incoming)) = memory::stream(1);
    let push = settings.start(once(push_end), open(), EXTENT, far()).expect("starts");
    let handle = push.staging();
    let parts = computed(EXTENT, 3);
    for part in &parts[..2] {
        let mut room = handle.try_reserve(*part).expect("room");
        room.buffer().extend_from_slice(&payload(&LAYOUT, *part));
        room.send().expect("the part's bytes");
    }
    assert!(matches!(handle.try_reserve(parts[2]), Err(PushError::Full)));
    let receiver = receiver(&node);
    let task = tokio::spawn(async move { receiver.handle(outgoing, incoming).await.0 });
    let mut memory = Vec::new();
    for part in &parts[2..] {
        let mut room = soon("room", handle.reserve(*part)).await.expect("room");
        room.buffer().extend_from_slice(&payload(&LAYOUT, *part));
        memory.push(room.buffer().as_ptr());
        room.send().expect("the part's bytes");
    }
    memory.sort_unstable();
    memory.dedup();
    assert!(memory.len() < parts.len() - 2, "buffers are used again");
    soon("the commit", push.commit(NUM_TOKENS, first_tokens()))
        .await
        .expect("committed");
    assert_eq!(task.await.expect("no panic"), Outcome::Committed);
    node.assert_exact();
}

#[tokio::test]
async fn room_that_is_not_used_comes_back_and_must_be_filled_exactly() {
    let settings = TransferConfig {
        staging_bytes: 3 * BLOCK,
        ..transfer()
    };
    let settings = PushSettings::new(LAYOUT, &settings).expect("settings");
    let (end, _hold) = memory::stream(8);
    let push = settings.start(once(end), open(), EXTENT, far()).expect("starts");
    let (handle, part) = (push.staging(), computed(EXTENT, 3)[0]);
    let mut room = handle.try_reserve(part).expect("room");
    assert!(matches!(handle.try_reserve(part), Err(PushError::Full)));
    room.buffer().push(0);
    let refused = room.send();
    assert!(
        matches!(
            refused,
            Err(PushError::Invalid(SendError::PayloadLength { found: 1, .. }))
        ),
        "{refused:?}"
    );
    drop(handle.try_reserve(part).expect("the room is back"));
    let waiting = handle.try_reserve(part).expect("room");
    drop(push);
    let ended = soon("the end", handle.reserve(part)).await.map(drop);
    assert_eq!(ended, Err(PushError::Closed));
    drop(waiting);
}

#[tokio::test]
async fn the_budget_is_one_over_all_handoffs_and_a_dead_one_gives_it_back() {
    let settings = TransferConfig {
        staging_bytes: 3 * BLOCK,
        ..transfer()
    };
    let settings = PushSettings::new(LAYOUT, &settings).expect("settings");
    let (one, _hold_one) = memory::stream(8);
    let (two, _hold_two) = memory::stream(8);
    let one = settings.start(once(one), open(), EXTENT, far()).expect("starts");
    let two = settings.start(once(two), open(), EXTENT, far()).expect("starts");
    let part = computed(EXTENT, 3)[0];
    one.staging().try_push(part, payload(&LAYOUT, part)).expect("room");
    let handle = two.staging();
    assert_eq!(handle.try_push(part, payload(&LAYOUT, part)), Err(PushError::Full));
    let waiting = tokio::spawn(async move { handle.push(part, payload(&LAYOUT, part)).await });
    // The frames of the first are kept: their arrival was never confirmed. Dropping it, and what lies in its stream, frees.
    drop(one);
    drop(_hold_one);
    assert_eq!(soon("room", waiting).await.expect("no panic"), Ok(()));
    // Whoever waits for room learns that the handoff is over.
    let handle = two.staging();
    let waiting = tokio::spawn(async move { handle.push(part, payload(&LAYOUT, part)).await });
    tokio::task::yield_now().await;
    drop(two);
    assert_eq!(
        soon("the end", waiting).await.expect("no panic"),
        Err(PushError::Closed)
    );
}

#[tokio::test]
async fn pieces_that_can_never_go_are_refused_with_the_reason() {
    let settings = TransferConfig {
        staging_bytes: 3 * BLOCK,
        ..transfer()
    };
    let settings = PushSettings::new(LAYOUT, &settings).expect("settings");
    let (end, _hold) = memory::stream(8);
    let push = settings.start(once(end), open(), EXTENT, far()).expect("starts");
    let handle = push.staging();
    let large = Part {
        first_layer: 0,
        layers: 1,
        first_block: 2,
        blocks: 4,
    };
    let error = handle.try_push(large, payload(&LAYOUT, large));
    assert_eq!(
        error,
        Err(PushError::TooLarge {
            bytes: 4 * BLOCK,
            staging_bytes: 3 * BLOCK
        })
    );
    let outside = Part {
        first_layer: 0,
        layers: 1,
        first_block: 1,
        blocks: 1,
    };
    let error = handle.try_push(outside, Bytes::from(vec![0; BLOCK]));
    assert!(
        matches!(error, Err(PushError::Invalid(SendError::OutsideExtent { .. }))),
        "{error:?}"
    );
    let error = handle.try_push(
        Part {
            first_block: 2,
            ..outside
        },
        Bytes::from(vec![0; BLOCK - 1]),
    );
    assert!(
        matches!(error, Err(PushError::Invalid(SendError::PayloadLength { .. }))),
        "{error:?}"
    );
}

#[tokio::test]
async fn payload_bytes_are_not_copied_on_their_way_to_the_transport() {
    struct Seen(std::sync::Arc<std::sync::Mutex<Vec<(usize, usize)>>>);
    impl kv_transfer::transport::Outgoing<PushMessage> for Seen {
        async fn send(&mut self, _: PushMessage, payload: Bytes) -> Result<(), runtime::framing::FramingError> {
            tokio::task::yield_now().await;
            self.0
                .lock()
                .expect("not poisoned")
                .push((payload.as_ptr() as usize, payload.len()));
            Ok(())
        }
        fn finish(&mut self) -> Result<(), runtime::framing::FramingError> {
            Ok(())
        }
        fn reset(&mut self, _: quinn::VarInt) {}
    }
    let settings = PushSettings::new(LAYOUT, &transfer()).expect("settings");
    let ((_, replies), _hold) = memory::stream(8);
    let seen = std::sync::Arc::default();
    let end = (Seen(std::sync::Arc::clone(&seen)), replies);
    let push = settings.start(once(end), open(), EXTENT, far()).expect("starts");
    let part = Part {
        first_layer: 0,
        layers: 5,
        first_block: 2,
        blocks: 10,
    };
    let bytes = payload(&LAYOUT, part);
    push.staging().try_push(part, bytes.clone()).expect("room");
    until("all frames", || {
        seen.lock().expect("not poisoned").iter().map(|(_, n)| n).sum::<usize>() == bytes.len()
    })
    .await;
    let mut at = bytes.as_ptr() as usize;
    for (start, length) in seen
        .lock()
        .expect("not poisoned")
        .iter()
        .filter(|(_, length)| *length > 0)
    {
        assert_eq!(*start, at);
        at += length;
    }
}

#[tokio::test]
async fn memory_streams_end_reset_and_stop_like_real_ones() {
    use kv_transfer::transport::Outgoing;
    let ((mut outgoing, _), (_, mut incoming)) = memory::stream(1);
    outgoing
        .send(PushMessage::Open(open()), Bytes::new())
        .await
        .expect("room");
    outgoing.finish().expect("open");
    assert_eq!(incoming.next().await, Ok(Some(PushMessage::Open(open()))));
    assert_eq!(incoming.next().await, Ok(None));
    assert_eq!(incoming.next().await, Ok(None));
    let ((outgoing, _), (_, mut incoming)) = memory::stream(1);
    drop(outgoing);
    let cancelled = runtime::quic::code::CANCELLED.into_inner();
    assert_eq!(
        incoming.next().await,
        Err(runtime::framing::FramingError::Reset { code: cancelled })
    );
}
