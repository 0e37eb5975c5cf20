//! Both ends in memory: what a job on a prefill node sees.

use std::time::Duration;

use bytes::Bytes;
use config::TransferConfig;
use kv_transfer::core::{Extent, SendError};
use kv_transfer::error::TransferError;
use kv_transfer::pusher::{PushError, PushSettings};
use kv_transfer::receiver::Outcome;
use kv_transfer::transport::{Incoming, Outgoing, memory};
use protocol::control::HandoffStats;
use protocol::transfer::{PushMessage, PushReply};
use runtime::clock::Clock;

use super::node::{Node, Options};
use super::{
    EXTENT, LAYOUT, NUM_TOKENS, computed, far, first_tokens, in_memory, once, open, payload, push_all, refused, soon,
    transfer, until,
};

#[tokio::test]
async fn a_handoff_moves_every_byte_and_the_first_token() {
    let node = Node::new();
    let (push, task) = in_memory(&node, 4);
    push_all(&push, EXTENT).await.expect("taken");
    let stats = soon("the commit", push.commit(NUM_TOKENS, first_tokens()))
        .await
        .expect("committed");
    assert_eq!(task.await.expect("no panic"), Outcome::Committed);
    node.assert_exact();
    assert_eq!(
        (node.opened(), node.aborted(), node.writes()),
        (1, 0, u64::from(stats.frames))
    );
    let commit = node.commits().pop().expect("one");
    assert_eq!((commit.num_tokens, commit.first_tokens), (NUM_TOKENS, first_tokens()));
    assert_eq!((stats.bytes, stats.resent), (50 * LAYOUT.layer_block_bytes() as u64, 0));
    let wire = HandoffStats::from(stats);
    assert_eq!((wire.bytes, wire.frames), (stats.bytes, stats.frames));
    assert_eq!(u128::from(wire.exposed_us), stats.exposed.as_micros());
}

#[tokio::test]
async fn dropping_the_push_cancels_on_the_other_side() {
    let node = Node::new();
    let (push, task) = in_memory(&node, 4);
    push_all(&push, EXTENT).await.expect("taken");
    until("some frames", || node.writes() > 0).await;
    let handle = push.staging();
    drop(push);
    assert!(matches!(
        soon("the cancel", task).await.expect("no panic"),
        Outcome::Cancelled(_)
    ));
    assert_eq!((node.aborted(), node.commits().len()), (1, 0));
    let part = computed(EXTENT, 3)[0];
    until("closed", || {
        handle.try_push(part, payload(&LAYOUT, part)) == Err(PushError::Closed)
    })
    .await;
    node.assert_clean();
}

#[tokio::test]
async fn a_revoked_reservation_is_told_at_once_even_if_nothing_moves() {
    let node = Node::new();
    let (mut push, task) = in_memory(&node, 4);
    until("open", || node.opened() == 1).await;
    node.revoke();
    assert_eq!(soon("the news", push.failed()).await, TransferError::Revoked);
    assert_eq!(soon("again", push.failed()).await, TransferError::Revoked);
    assert_eq!(soon("the end", task).await.expect("no panic"), Outcome::Revoked);
    assert_eq!(node.aborted(), 1);
    assert_eq!(push_all(&push, EXTENT).await, Err(PushError::Closed));
    assert_eq!(
        push.commit(NUM_TOKENS, first_tokens()).await,
        Err(TransferError::Revoked)
    );
}

#[tokio::test]
async fn a_refusal_reaches_the_job_with_its_reason() {
    let node = Node::with(Options {
        tickets: Vec::new(),
        ..Options::default()
    });
    let (mut push, task) = in_memory(&node, 4);
    let error = soon("the refusal", push.failed()).await;
    assert!(refused(&error).contains("is not known here"), "{error}");
    assert!(matches!(task.await.expect("no panic"), Outcome::Refused(_)));

    let node = Node::with(Options {
        refuse_commit: true,
        ..Options::default()
    });
    let (push, task) = in_memory(&node, 4);
    push_all(&push, EXTENT).await.expect("taken");
    let error = soon("the refusal", push.commit(NUM_TOKENS, first_tokens()))
        .await
        .expect_err("refused");
    assert_eq!(refused(&error), "the sequence is not wanted any more");
    assert!(matches!(task.await.expect("no panic"), Outcome::Refused(_)));
    assert_eq!((node.aborted(), node.commits().len()), (1, 0));
}

#[tokio::test]
async fn committing_too_early_fails_and_frees_the_reservation() {
    let node = Node::new();
    let (push, task) = in_memory(&node, 4);
    let part = computed(EXTENT, 3)[0];
    push.staging().try_push(part, payload(&LAYOUT, part)).expect("room");
    let error = soon("the error", push.commit(NUM_TOKENS, first_tokens()))
        .await
        .expect_err("incomplete");
    assert!(
        matches!(error, TransferError::Session(SendError::Incomplete { missing: 47, .. })),
        "{error}"
    );
    assert!(matches!(
        soon("the end", task).await.expect("no panic"),
        Outcome::Cancelled(_)
    ));
    assert_eq!((node.aborted(), node.commits().len()), (1, 0));
}

#[tokio::test]
async fn a_receiver_that_never_answers_is_given_up() {
    for grants in [false, true] {
        let (push_end, (mut replies, mut messages)) = memory::stream(64);
        let settings = TransferConfig {
            commit_timeout_ms: 100,
            ..transfer()
        };
        let settings = PushSettings::new(LAYOUT, &settings).expect("settings");
        let push = settings.start(once(push_end), open(), EXTENT, far()).expect("starts");
        push_all(&push, EXTENT).await.expect("taken");
        if grants {
            replies
                .send(PushReply::Received { below: 0 }, Bytes::new())
                .await
                .expect("room");
        }
        let error = soon("the error", push.commit(NUM_TOKENS, first_tokens()))
            .await
            .expect_err("no answer");
        assert_eq!(error, TransferError::NoAnswer { after_ms: 100 });
        let mut commits = 0;
        while let Ok(Some(message)) = soon("the end", messages.next()).await {
            commits += u32::from(matches!(message, PushMessage::Commit(_)));
        }
        assert_eq!(commits, u32::from(grants), "no commit before the grant");
    }
}

#[tokio::test]
async fn a_stream_that_was_dead_from_the_beginning_is_replaced_once() {
    let node = Node::new();
    let receiver = super::receiver(&node);
    let settings = PushSettings::new(LAYOUT, &transfer()).expect("settings");
    for dead in [1, 2] {
        let mut streams = 0;
        let receiver = receiver.clone();
        let connect = move || {
            streams += 1;
            let (push_end, (outgoing, incoming)) = memory::stream(64);
            if streams <= dead {
                let lost = TransferError::Lost {
                    reason: "restarted".to_owned(),
                };
                return std::future::ready(Err(lost));
            }
            let receiver = receiver.clone();
            tokio::spawn(async move { receiver.handle(outgoing, incoming).await.0 });
            std::future::ready(Ok(push_end))
        };
        let push = settings.start(connect, open(), EXTENT, far()).expect("starts");
        let pushed = push_all(&push, EXTENT).await;
        let result = soon("the end", push.commit(NUM_TOKENS, first_tokens())).await;
        if dead == 1 {
            pushed.expect("taken");
            result.expect("committed");
            node.assert_exact();
        } else {
            assert_eq!(
                result,
                Err(TransferError::Lost {
                    reason: "restarted".to_owned()
                })
            );
        }
    }
    assert_eq!((node.opened(), node.commits().len(), node.aborted()), (1, 1, 0));
}

#[tokio::test]
async fn everything_ends_at_the_jobs_deadline() {
    let node = Node::new();
    let (push_end, (outgoing, incoming)) = memory::stream(4);
    let receiver = super::receiver(&node);
    let task = tokio::spawn(async move { receiver.handle(outgoing, incoming).await.0 });
    let settings = PushSettings::new(LAYOUT, &transfer()).expect("settings");
    let soon_over = Clock.now() + Duration::from_millis(100);
    let mut push = settings
        .start(once(push_end), open(), EXTENT, soon_over)
        .expect("starts");
    let part = computed(EXTENT, 3)[0];
    push.staging().try_push(part, payload(&LAYOUT, part)).expect("room");
    assert!(matches!(
        soon("the deadline", push.failed()).await,
        TransferError::Deadline { .. }
    ));
    assert!(matches!(
        soon("the end", task).await.expect("no panic"),
        Outcome::Cancelled(_)
    ));
    assert_eq!(node.aborted(), 1);
    // A connection that never comes about is no exception.
    let never = std::future::pending::<Result<memory::PushEnd, TransferError>>;
    let soon_over = Clock.now() + Duration::from_millis(100);
    let mut push = settings.start(never, open(), EXTENT, soon_over).expect("starts");
    assert_eq!(
        soon("the deadline", push.failed()).await,
        TransferError::Deadline { unconfirmed: 0 }
    );
}

#[tokio::test]
async fn a_handoff_of_nothing_still_hands_over() {
    let extent = Extent {
        first_block: 12,
        blocks: 0,
        ..EXTENT
    };
    let node = Node::with(Options {
        extent,
        ..Options::default()
    });
    let (push_end, (outgoing, incoming)) = memory::stream(4);
    let receiver = super::receiver(&node);
    let task = tokio::spawn(async move { receiver.handle(outgoing, incoming).await.0 });
    let settings = PushSettings::new(LAYOUT, &transfer()).expect("settings");
    let push = settings.start(once(push_end), open(), extent, far()).expect("starts");
    let stats = soon("the commit", push.commit(NUM_TOKENS, first_tokens()))
        .await
        .expect("committed");
    assert_eq!((stats.frames, stats.bytes), (0, 0));
    assert_eq!(task.await.expect("no panic"), Outcome::Committed);
    assert_eq!(node.commits().len(), 1);
}

#[tokio::test]
async fn extents_and_settings_that_cannot_work_are_refused_at_once() {
    let settings = PushSettings::new(LAYOUT, &transfer()).expect("settings");
    let never = std::future::pending::<Result<memory::PushEnd, TransferError>>;
    let wrong = Extent { layers: 4, ..EXTENT };
    let error = settings
        .start(never, open(), wrong, far())
        .err()
        .expect("refused")
        .to_string();
    assert!(error.contains("layers 0..4") && error.contains("5 layers"), "{error}");
    let tiny = TransferConfig {
        staging_bytes: 255,
        ..transfer()
    };
    let error = PushSettings::new(LAYOUT, &tiny).err().expect("refused").to_string();
    assert!(
        error.contains("transfer.staging_bytes = 255") && error.contains("256 bytes"),
        "{error}"
    );
}
