//! Decode nodes that compute prompts themselves.

use std::time::Duration;

use protocol::control::{Job, JobErrorKind, JobEvent, KvSource};
use protocol::ids::{RequestId, Role};

use super::bench::Bench;
use crate::core::decisions::Way;
use crate::core::fixtures::{request, settings};
use crate::core::routing::LocalPrefill;
use crate::core::types::{ClientEvent, ServeErrorKind};

fn cluster(local: LocalPrefill, nodes: &[&str]) -> Bench {
    let mut settings = settings();
    settings.local_prefill = local;
    let mut bench = Bench::new(settings);
    for node in nodes {
        if node.starts_with('p') {
            bench.join_prefill(node);
        } else {
            bench.join_decode(node);
        }
    }
    bench
}

#[test]
fn without_a_prefill_node_a_decode_node_does_all_of_it() {
    let mut bench = cluster(LocalPrefill::Auto, &["d0"]);
    assert!(bench.cluster.status().is_ready());
    bench.submit(request(1, 6, 3));
    assert_eq!(bench.state(1), "local");
    let leg = bench.started("d0");
    let Job::Decode(job) = bench.job(leg) else {
        panic!("a decode job")
    };
    assert_eq!(
        (job.source, job.choices.len(), job.choices[0].generated.len()),
        (KvSource::Compute, 1, 0)
    );
    bench.first_token(leg, 65);
    assert_eq!(bench.state(1), "decoding");
    assert!(matches!(
        bench.events(1)[0],
        ClientEvent::Prefill { cached_tokens: 2, .. }
    ));
    bench.token(leg, 1, 66);
    bench.token(leg, 2, 67);
    assert_eq!(
        (bench.text(1).as_str(), bench.completion(1).generated_tokens),
        ("ABC", 3)
    );
    let told = bench.cluster.decisions(bench.now, RequestId(1));
    assert_eq!((told[0].way, told[0].remote_us), (Way::Local, None));
    // Also what wants one token only.
    bench.submit(request(2, 6, 1));
    let leg = bench.started("d0");
    bench.first_token(leg, 65);
    assert_eq!(bench.text(2), "A");
    bench.assert_idle();
}

#[test]
fn a_node_of_both_roles_hands_nothing_over_to_itself() {
    let mut bench = cluster(LocalPrefill::Never, &[]);
    bench.join(Role::Both, "b0", 1);
    bench.submit(request(1, 6, 3));
    let leg = bench.started("b0");
    let Job::Decode(job) = bench.job(leg) else {
        panic!("a decode job")
    };
    assert_eq!(job.source, KvSource::Compute);
    bench.first_token(leg, 65);
    bench.token(leg, 1, 66);
    bench.token(leg, 2, 67);
    assert_eq!(bench.text(1), "ABC");
    // What needs a prefill node is handed over, to another node if there is one.
    let mut told = request(2, 6, 3);
    told.prompt_logprobs = Some(0);
    bench.submit(told.clone());
    let leg = bench.last_started("b0");
    let Job::Decode(job) = bench.job(leg) else {
        panic!("a decode job")
    };
    assert_eq!(job.source, KvSource::Handoff);
    bench.cancel(2);
    bench.join(Role::Both, "b1", 1);
    told.id = RequestId(3);
    bench.submit(told);
    let reservation = bench.last_started("b0");
    bench.granted(reservation, 7);
    let jobs = ["b0", "b1"].map(|node| bench.on(node).len());
    assert_eq!(jobs, [1, 1], "one has the reservation, the other computes the prompt");
}

#[test]
fn what_a_decode_node_cannot_do_alone_needs_a_prefill_node_and_never_means_never() {
    let mut bench = cluster(LocalPrefill::Always, &["d0"]);
    let mut told = request(1, 6, 3);
    told.prompt_logprobs = Some(0);
    let mut searched = request(2, 6, 3);
    (searched.beam_width, searched.choices) = (Some(2), 2);
    for wanted in [told, searched] {
        assert_eq!(
            bench.try_submit(wanted).expect_err("no prefill node").kind,
            ServeErrorKind::Unavailable
        );
    }
    let mut never = cluster(LocalPrefill::Never, &["d0"]);
    assert!(!never.cluster.status().is_ready());
    assert_eq!(
        never.try_submit(request(1, 6, 3)).expect_err("no prefill node").kind,
        ServeErrorKind::Unavailable
    );
}

#[test]
fn the_cheaper_way_is_taken() {
    let mut bench = cluster(LocalPrefill::Auto, &["p0", "d0"]);
    // One row is computed faster than it is handed over.
    bench.submit(request(1, 1, 3));
    assert_eq!(bench.state(1), "local");
    bench.cancel(1);
    // Beside ten sequences that wait for each of its rows a long prompt is dear; they came in by handoff.
    let mut bench = cluster(LocalPrefill::Never, &["p0", "d0"]);
    for id in 1..=10 {
        bench.submit(request(id, 6, 3));
        bench.granted(bench.last_started("d0"), 1);
        bench.first_token(bench.last_started("p0"), 65);
    }
    bench.submit(request(11, 60, 3));
    let told = bench.cluster.decisions(bench.now, RequestId(11));
    assert!(told[0].local_us > told[0].remote_us.map(|us| 2 * us), "{told:?}");
    assert_eq!(bench.state(11), "reserving");
}

#[test]
fn what_is_lost_before_the_first_token_starts_again_and_afterwards_goes_on() {
    let mut bench = cluster(LocalPrefill::Always, &["p0", "d0", "d1"]);
    bench.submit(request(1, 6, 4));
    bench.failed(bench.started("d0"), JobErrorKind::Internal);
    assert_eq!(bench.state(1), "local");
    let leg = bench.started("d1");
    bench.event(
        leg,
        JobEvent::Busy {
            needed_blocks: 3,
            free_blocks: 0,
        },
    );
    let leg = bench.started("d0");
    bench.first_token(leg, 65);
    bench.lose("d0");
    assert_eq!(bench.state(1), "stranded");
    bench.report("d1", 100, false);
    bench.advance(Duration::from_millis(500));
    assert_eq!(bench.state(1), "resuming");
    let leg = bench.started("d1");
    for (position, token) in [(1, 66), (2, 67), (3, 68)] {
        bench.token(leg, position, token);
    }
    assert_eq!(bench.text(1), "ABCD");
    bench.assert_idle();
}

#[test]
fn in_the_local_state_every_event_and_the_deadline_leave_the_books_right() {
    for event in super::bench::every_event() {
        let mut bench = cluster(LocalPrefill::Always, &["d0"]);
        bench.submit(request(1, 6, 4));
        bench.event(bench.started("d0"), event.clone());
        bench.cancel(1);
        assert_eq!(bench.ends(1), 1, "{event:?}");
        bench.assert_idle();
    }
    let mut bench = cluster(LocalPrefill::Always, &["d0"]);
    bench.submit(request(1, 6, 4));
    bench.advance(Duration::from_millis(119_999));
    assert_eq!(bench.state(1), "local");
    bench.advance(Duration::from_millis(1));
    assert_eq!(bench.failure(1), ServeErrorKind::Timeout);
    bench.assert_idle();
}

#[test]
fn prompts_wait_here_when_the_decode_node_has_enough_to_compute() {
    let mut bench = cluster(LocalPrefill::Always, &["d0"]);
    bench.submit(request(1, 40, 3));
    bench.submit(request(2, 40, 3));
    assert_eq!((bench.state(1), bench.state(2)), ("local", "queued"));
    bench.first_token(bench.started("d0"), 65);
    assert_eq!(bench.state(2), "local");
}
