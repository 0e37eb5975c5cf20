//! Losses and deadlines, state by state.

use std::collections::BTreeSet;
use std::time::Duration;

use protocol::control::{Job, JobErrorKind, JobEvent, KvSource};

use super::bench::{Bench, STATES, at};
use crate::core::fixtures::request;
use crate::core::request::State;
use crate::core::types::ServeErrorKind;

#[test]
fn every_state_is_once_in_the_list_of_words() {
    let words: BTreeSet<&str> = State::WORDS.iter().copied().collect();
    assert_eq!((words.len(), State::WORDS.len()), (9, 9));
    for state in STATES {
        assert!(words.contains(at(state).state(1)), "{state}");
    }
}

/// Lets request 1 run to its end, wherever it is; the tokens of a position are always the same.
fn complete(bench: &mut Bench) {
    for _ in 0..20 {
        let nodes = ["p0", "p1", "d0", "d1"];
        let Some((node, leg)) = nodes
            .iter()
            .find_map(|node| bench.on(node).last().map(|leg| (*node, *leg)))
        else {
            break;
        };
        let job = bench.job(leg).clone();
        match (bench.state(1), job) {
            ("reserving", Job::Decode(_)) => bench.granted(leg, 3),
            ("prefilling", Job::Prefill(_)) => drop(bench.first_token(leg, 65)),
            ("transferring" | "decoding", Job::Prefill(_)) => {
                drop(bench.event(leg, JobEvent::HandedOff(Default::default())));
            }
            ("transferring" | "decoding" | "resuming", Job::Decode(_)) => {
                let tokens = bench
                    .events(1)
                    .iter()
                    .filter(|e| matches!(e, crate::core::types::ClientEvent::Token { .. }));
                let next = tokens.count() as u32;
                bench.token(leg, next, 65 + next);
            }
            (state, job) => panic!("{state} with {job:?} on {node}"),
        }
    }
}

#[test]
fn a_lost_decode_node_is_replaced_in_every_state_and_the_answer_is_the_same() {
    for &state in STATES
        .iter()
        .filter(|state| !["stranded", "prefilling alone"].contains(state))
    {
        let mut bench = at(state);
        let node = if state == "resuming" { "d1" } else { "d0" };
        bench.lose(node);
        let expected = match state {
            "queued" | "reserving" | "prefilling" | "prefilling, committed" => "queued",
            _ => "stranded",
        };
        assert_eq!(bench.state(1), expected, "{state}");
        bench.join_decode("d1");
        complete(&mut bench);
        assert_eq!(bench.text(1), "ABCD", "{state}");
        assert_eq!(bench.completion(1).generated_tokens, 4, "{state}");
        bench.assert_idle();
    }
}

#[test]
fn a_lost_prefill_node_is_replaced_in_every_state_and_the_answer_is_the_same() {
    for &state in STATES {
        let mut bench = at(state);
        bench.lose("p0");
        let expected = match state {
            "queued" | "reserving" | "prefilling" | "prefilling, committed" | "prefilling alone" => "queued",
            // The only decode node is there, and free: the request moves at once.
            "transferring" => "resuming",
            // The prefill node is not needed any more.
            "transferring, handed off" => "transferring",
            "decoding, prefill open" | "decoding" => "decoding",
            "stranded" => "stranded",
            "resuming" => "resuming",
            other => panic!("{other}"),
        };
        assert_eq!(bench.state(1), expected, "{state}");
        bench.join_prefill("p1");
        bench.join_decode("d1");
        if state == "queued" {
            bench.report("d0", 100, false);
        }
        complete(&mut bench);
        assert_eq!(
            bench.text(1),
            if state == "prefilling alone" { "A" } else { "ABCD" },
            "{state}"
        );
        bench.assert_idle();
    }
}

#[test]
fn a_moved_request_goes_on_behind_its_accepted_tokens() {
    let bench = at("resuming");
    let Job::Decode(job) = bench.job(bench.started("d1")) else {
        panic!("a decode job")
    };
    assert_eq!((job.source, job.epoch.0), (KvSource::Compute, 2));
    assert_eq!(job.token_ids, [0, 1, 2, 3, 4, 5]);
    assert_eq!(job.choices[0].generated, [65, 66]);
    assert_eq!(job.stop.max_tokens, 4, "the limit counts all tokens of the request");
}

#[test]
fn a_request_is_moved_twice_and_then_given_up() {
    let mut bench = at("decoding");
    for boot in 2..4 {
        bench.lose("d0");
        bench.join(protocol::ids::Role::Decode, "d0", boot);
        assert_eq!(bench.state(1), "resuming");
    }
    bench.lose("d0");
    assert_eq!(bench.failure(1), ServeErrorKind::NodeLost);
    bench.join_decode("d0");
    bench.assert_idle();
}

#[test]
fn an_attempt_is_repeated_twice_before_the_first_token_and_then_given_up() {
    let causes = [
        (JobErrorKind::Internal, ServeErrorKind::Internal),
        (JobErrorKind::TransferFailed, ServeErrorKind::TransferFailed),
        (JobErrorKind::DeadlineExceeded, ServeErrorKind::Timeout),
    ];
    for (kind, expected) in causes {
        let mut bench = at("reserving");
        for epoch in 1..=3 {
            let decode = bench.started("d0");
            let Job::Decode(job) = bench.job(decode) else {
                panic!("a reservation")
            };
            assert_eq!(job.epoch.0, epoch);
            bench.granted(decode, u64::from(epoch));
            bench.failed(bench.started("p0"), kind);
        }
        assert_eq!(bench.failure(1), expected);
        bench.assert_idle();
    }
}

#[test]
fn a_failed_node_is_avoided_if_there_is_another() {
    let mut bench = at("prefilling");
    bench.join_prefill("p1");
    bench.failed(bench.started("p0"), JobErrorKind::Internal);
    bench.granted(bench.started("d0"), 4);
    assert_eq!(bench.on("p0"), []);
    assert_eq!(bench.on("p1").len(), 1);
}

#[test]
fn a_job_that_fails_everywhere_is_not_repeated() {
    for state in ["reserving", "prefilling", "transferring", "decoding", "resuming"] {
        let mut bench = at(state);
        let leg = bench.open_legs()[0];
        bench.failed(leg, JobErrorKind::Invalid);
        assert_eq!(bench.failure(1), ServeErrorKind::Internal, "{state}");
        bench.assert_idle();
    }
}

#[test]
fn a_failed_transfer_moves_the_request() {
    let mut bench = at("transferring");
    bench.failed(bench.started("p0"), JobErrorKind::TransferFailed);
    assert_eq!(bench.state(1), "resuming");
    complete(&mut bench);
    assert_eq!(bench.text(1), "ABCD");
    bench.assert_idle();
}

#[test]
fn a_lost_stream_is_a_failed_attempt() {
    for (state, expected) in [
        ("prefilling", "reserving"),
        ("transferring", "resuming"),
        ("decoding", "resuming"),
    ] {
        let mut bench = at(state);
        let leg = bench.started("d0");
        bench.fact(crate::core::cluster::Fact::JobLost {
            leg,
            reason: "reset".to_owned(),
        });
        assert_eq!(bench.state(1), expected, "{state}");
        complete(&mut bench);
        assert_eq!(bench.text(1), "ABCD", "{state}");
        bench.assert_idle();
    }
}

/// Every state has a deadline: which, and what it leads to. Nothing happens a moment before.
#[test]
fn every_state_has_a_deadline() {
    let cases: &[(&str, u64, &str)] = &[
        ("queued", 60_000, "gone"),
        ("reserving", 5_000, "reserving"),
        ("prefilling", 120_000, "gone"),
        ("prefilling, committed", 120_000, "gone"),
        ("prefilling alone", 120_000, "gone"),
        ("transferring", 30_000, "resuming"),
        ("transferring, handed off", 30_000, "resuming"),
        ("decoding, prefill open", 20_000, "resuming"),
        ("decoding", 20_000, "resuming"),
        ("stranded", 20_000, "gone"),
        ("resuming", 120_000, "resuming"),
    ];
    assert_eq!(cases.iter().map(|case| case.0).collect::<Vec<_>>(), STATES);
    for &(state, deadline_ms, next) in cases {
        let mut bench = at(state);
        let legs = bench.open_legs();
        let before = bench.state(1);
        bench.advance(Duration::from_millis(deadline_ms - 1));
        assert_eq!(
            (bench.state(1), bench.open_legs()),
            (before, legs.clone()),
            "{state}, just before"
        );
        bench.advance(Duration::from_millis(1));
        assert_eq!(bench.state(1), next, "{state}");
        assert!(
            legs.iter().all(|leg| !bench.open_legs().contains(leg)),
            "{state}: the old legs are released"
        );
        if next == "gone" {
            let expected = match state {
                "queued" => ServeErrorKind::Overloaded { retry_after_s: 1 },
                "stranded" => ServeErrorKind::Unavailable,
                _ => ServeErrorKind::Timeout,
            };
            assert_eq!(bench.failure(1), expected, "{state}");
            bench.assert_idle();
        }
    }
}

#[test]
fn a_request_left_alone_ends_whatever_state_it_is_in() {
    for &state in STATES {
        let mut bench = at(state);
        bench.advance(Duration::from_secs(3600));
        assert_eq!(bench.ends(1), 1, "{state}");
        bench.assert_idle();
    }
}

#[test]
fn a_token_gap_moves_the_request() {
    let mut bench = at("decoding");
    bench.token(bench.started("d0"), 3, 68);
    assert_eq!(bench.state(1), "resuming");
    complete(&mut bench);
    assert_eq!(bench.text(1), "ABCD");
}

#[test]
fn requests_that_come_back_keep_their_order() {
    let mut bench = Bench::with_nodes();
    for id in 1..=3 {
        bench.submit(request(id, 6, 3));
    }
    bench.lose("d0");
    bench.submit(request(4, 6, 3));
    bench.join_decode("d1");
    let ids: Vec<u128> = bench
        .on("d1")
        .into_iter()
        .map(|leg| match bench.job(leg) {
            Job::Decode(job) => job.request.0,
            Job::Prefill(job) => job.request.0,
        })
        .collect();
    assert_eq!(ids, [1, 2, 3, 4]);
}
