//! Seeded faults between two unmodified ends: the bytes are exact, or the failure has a name on both sides.

use std::time::Duration;

use kv_transfer::error::TransferError;
use kv_transfer::pusher::PushSettings;
use kv_transfer::receiver::Outcome;
use kv_transfer::stats::TransferStats;
use kv_transfer::transport::faulty::{Faults, Faulty};
use kv_transfer::transport::memory;

use super::node::Node;
use super::{EXTENT, LAYOUT, NUM_TOKENS, far, first_tokens, once, open, push_all, receiver, soon, transfer};

async fn handoff(
    faults: Faults,
    seed: u64,
    frame_bytes: usize,
) -> (Node, Result<TransferStats, TransferError>, Outcome) {
    let node = Node::new();
    let ((outgoing, replies), (answers, incoming)) = memory::stream(1 + seed as usize % 5);
    let receiver = receiver(&node);
    let task = tokio::spawn(async move { receiver.handle(answers, incoming).await.0 });
    let settings = config::TransferConfig {
        frame_bytes,
        ..transfer()
    };
    let settings = PushSettings::new(LAYOUT, &settings).expect("settings");
    let end = (Faulty::new(outgoing, faults, seed), replies);
    let push = settings.start(once(end), open(), EXTENT, far()).expect("starts");
    // A push that has failed meanwhile takes no more: the commit says why.
    let pushed = soon("room", push_all(&push, EXTENT)).await;
    let result = soon("the end", push.commit(NUM_TOKENS, first_tokens())).await;
    assert!(pushed.is_ok() || result.is_err());
    (node, result, soon("the end", task).await.expect("no panic"))
}

#[tokio::test]
async fn damage_repeats_delays_and_disorder_are_repaired() {
    let faults = Faults {
        corrupt: 8,
        duplicate: 10,
        reorder: 20,
        delay: 5,
        cut: 0,
        delay_for: Duration::from_millis(1),
    };
    let (mut resent, mut repaired) = (0, 0);
    for seed in 0..150 {
        let (node, result, outcome) = handoff(faults, seed, 600).await;
        match result {
            Ok(stats) => {
                node.assert_exact();
                assert_eq!(outcome, Outcome::Committed, "seed {seed}");
                assert_eq!((node.commits().len(), node.aborted()), (1, 0), "seed {seed}");
                resent += stats.resent;
                repaired += u32::from(stats.resent > 0);
            }
            // More damage than `max_resends` allows.
            Err(error) => {
                assert!(
                    super::refused(&error).contains("is damaged, and 8 repeats"),
                    "seed {seed}: {error}"
                );
                assert_eq!((node.commits().len(), node.aborted()), (0, 1), "seed {seed}");
                node.assert_clean();
            }
        }
    }
    assert!(
        repaired > 75 && resent > repaired,
        "the faults must strike: {repaired} repaired, {resent} resent"
    );
}

#[tokio::test]
async fn a_cut_ends_both_sides_and_frees_the_reservation() {
    let (mut cut, mut whole) = (0, 0);
    for seed in 0..150 {
        let faults = Faults {
            cut: 3,
            duplicate: 5,
            reorder: 5,
            ..Faults::default()
        };
        let (node, result, outcome) = handoff(faults, seed, 600).await;
        match result {
            Ok(_) => {
                whole += 1;
                node.assert_exact();
                assert_eq!((node.commits().len(), node.aborted()), (1, 0), "seed {seed}");
            }
            Err(error) => {
                cut += 1;
                // A stream that dies before the grant is replaced; there is no second one here.
                let known = matches!(error, TransferError::Lost { .. } | TransferError::Link { .. });
                assert!(known, "seed {seed}: {error}");
                assert!(matches!(outcome, Outcome::Cancelled(_)), "seed {seed}: {outcome:?}");
                assert_eq!((node.commits().len(), node.aborted()), (0, 1), "seed {seed}");
                node.assert_clean();
            }
        }
    }
    assert!(cut > 10 && whole > 10, "both must happen: {cut} cut, {whole} whole");
}

#[tokio::test]
async fn the_same_seed_gives_the_same_faults() {
    let faults = Faults {
        corrupt: 10,
        ..Faults::default()
    };
    let resent = async |seed| handoff(faults, seed, 600).await.1.map(|stats| stats.resent);
    let mut different = std::collections::BTreeSet::new();
    for seed in 0..10 {
        let first = resent(seed).await;
        assert_eq!(first, resent(seed).await, "seed {seed}");
        different.insert(first.unwrap_or(u32::MAX));
    }
    assert!(different.len() > 2, "{different:?}");
}
