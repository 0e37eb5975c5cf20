//! Nodes that do not get on, and nodes whose jobs fail.

use std::time::Duration;

use proptest::prelude::*;
use protocol::control::{JobErrorKind, JobEvent, LoadReport};
use protocol::ids::Role;

use super::bench::{Bench, at};
use crate::core::cluster::Fact;
use crate::core::fixtures::{request, settings};

const STALL: Duration = Duration::from_secs(2);

/// Nodes p0, d0 and d1, which have to report.
fn watched() -> Bench {
    with(STALL)
}

/// Nodes p0, d0 and d1, which need not report; two failures open a breaker for a second.
fn unwatched() -> Bench {
    with(settings().health.stall)
}

fn with(stall: Duration) -> Bench {
    let mut settings = settings();
    settings.health.stall = stall;
    settings.health.breaker.failures = 2;
    settings.request.max_restarts = 100;
    let mut bench = Bench::new(settings);
    bench.join_prefill("p0");
    bench.join_decode("d0");
    bench.join_decode("d1");
    bench
}

fn report(bench: &mut Bench, node: &str, sequence: u64, steps: u64, pending: bool) {
    let report = LoadReport {
        sequence,
        steps,
        pending,
        free_blocks: 100,
        ..LoadReport::default()
    };
    let link = bench.link(node);
    bench.fact(Fact::NodeReport { link, report });
}

/// Lets `millis` pass, in which `nodes` report that they get on.
fn pass(bench: &mut Bench, millis: u64, from: u64, nodes: &[&str]) -> u64 {
    let steps = millis / 100;
    for step in 0..steps {
        bench.advance(Duration::from_millis(100));
        for node in nodes {
            report(bench, node, from + step, from + step, true);
        }
    }
    from + steps
}

fn is_stalled(bench: &Bench, name: &str) -> bool {
    let nodes = bench.cluster.status().nodes;
    nodes.iter().any(|node| node.node == name && node.stalled)
}

fn breaker(bench: &Bench, name: &str) -> &'static str {
    let nodes = bench.cluster.status().nodes;
    nodes.iter().find(|node| node.node == name).expect("connected").breaker
}

/// Request 1 generates on d0.
fn decoding() -> Bench {
    let mut bench = watched();
    bench.submit(request(1, 6, 4));
    let decode = bench.started("d0");
    bench.granted(decode, 3);
    let prefill = bench.started("p0");
    bench.first_token(prefill, 65);
    bench.event(decode, JobEvent::Committed);
    bench.event(prefill, JobEvent::HandedOff(Default::default()));
    bench
}

#[test]
fn a_node_that_takes_no_step_loses_its_jobs_and_gets_new_ones_when_it_gets_on() {
    let mut bench = decoding();
    let next = pass(&mut bench, 1_000, 1, &["p0", "d0", "d1"]);
    for step in 0..19 {
        bench.advance(Duration::from_millis(100));
        report(&mut bench, "d0", next + step, next - 1, true);
        for node in ["p0", "d1"] {
            report(&mut bench, node, next + step, next + step, true);
        }
        assert_eq!(bench.state(1), "decoding", "after {step} reports");
    }
    bench.advance(Duration::from_millis(300));
    assert!(is_stalled(&bench, "d0") && !is_stalled(&bench, "d1"));
    assert_eq!(bench.state(1), "resuming");
    let moved = bench.started("d1");
    assert!(bench.on("d0").is_empty(), "its job is reset");
    // Neither a repeated report nor one without a step changes that.
    report(&mut bench, "d0", next + 18, next + 7, true);
    report(&mut bench, "d0", next + 40, next - 1, true);
    bench.submit(request(2, 6, 4));
    assert!(bench.on("d0").is_empty());
    report(&mut bench, "d0", next + 41, next, true);
    assert!(!is_stalled(&bench, "d0"));
    bench.submit(request(3, 6, 4));
    assert_eq!(bench.on("d0").len(), 1);
    for (position, token) in [(1, 66), (2, 67), (3, 68)] {
        bench.token(moved, position, token);
    }
    assert_eq!(bench.text(1), "ABCD");
}

#[test]
fn a_node_that_says_nothing_any_more_is_stalled_and_one_without_work_may_stand_still() {
    let mut bench = decoding();
    for next in 1..=40 {
        bench.advance(Duration::from_millis(100));
        // p0 has nothing to do; d0 is silent.
        report(&mut bench, "p0", next, 7, false);
        report(&mut bench, "d1", next, 7, false);
    }
    assert!(is_stalled(&bench, "d0") && !is_stalled(&bench, "p0") && !is_stalled(&bench, "d1"));
    assert_eq!(bench.on("d1").len(), 1);
    report(&mut bench, "d0", 1, 0, false);
    assert!(!is_stalled(&bench, "d0"));
}

#[test]
fn a_pause_of_the_coordinator_is_no_silence_of_the_nodes() {
    let mut bench = decoding();
    pass(&mut bench, 1_000, 1, &["p0", "d0", "d1"]);
    bench.now += Duration::from_secs(15);
    bench.cancel(99);
    assert!(!is_stalled(&bench, "d0"));
    assert_eq!(bench.state(1), "decoding");
}

/// Lets the newest job on `node` fail.
fn fail(bench: &mut Bench, node: &str) {
    bench.failed(bench.last_started(node), JobErrorKind::Internal);
}

#[test]
fn a_node_on_which_jobs_fail_gets_none_for_a_while_and_then_one() {
    let mut bench = unwatched();
    bench.submit(request(1, 6, 4));
    fail(&mut bench, "d0");
    assert_eq!((breaker(&bench, "d0"), bench.on("d1").len()), ("closed", 1));
    bench.submit(request(2, 6, 4));
    fail(&mut bench, "d0");
    assert_eq!(breaker(&bench, "d0"), "open");
    (3..6).for_each(|id| bench.submit(request(id, 6, 4)));
    assert!(bench.on("d0").is_empty());
    assert_eq!(bench.on("d1").len(), 5);
    bench.advance(Duration::from_millis(1_000));
    (6..9).for_each(|id| bench.submit(request(id, 6, 4)));
    assert_eq!((breaker(&bench, "d0"), bench.on("d0").len()), ("half_open", 1));
    fail(&mut bench, "d0");
    bench.advance(Duration::from_millis(1_900));
    bench.submit(request(9, 6, 4));
    assert!(bench.on("d0").is_empty(), "twice as long");
    bench.advance(Duration::from_millis(100));
    bench.submit(request(10, 6, 4));
    let probe = bench.started("d0");
    bench.granted(probe, 1);
    bench.submit(request(11, 6, 4));
    assert_eq!(bench.on("d0").len(), 1, "a reservation proves nothing");
    bench.first_token(bench.last_started("p0"), 65);
    bench.event(probe, JobEvent::Committed);
    assert_eq!(breaker(&bench, "d0"), "closed");
    bench.cancel(1);
    bench.submit(request(12, 6, 4));
    assert_eq!(bench.on("d0").len(), 2);
}

#[test]
fn with_every_breaker_open_requests_wait_until_one_may_be_tried() {
    let mut bench = unwatched();
    bench.lose("d1");
    bench.submit(request(1, 6, 4));
    fail(&mut bench, "d0");
    fail(&mut bench, "d0");
    assert_eq!((bench.state(1), bench.on("d0").len()), ("queued", 0));
    bench.advance(Duration::from_millis(999));
    assert_eq!(bench.state(1), "queued");
    bench.advance(Duration::from_millis(1));
    assert_eq!(bench.state(1), "reserving");
}

#[test]
fn a_node_that_is_alone_is_tried_every_second_and_one_that_is_not_ever_less_often() {
    let mut bench = unwatched();
    bench.lose("d1");
    bench.submit(request(1, 6, 4));
    fail(&mut bench, "d0");
    fail(&mut bench, "d0");
    for again in 0..5 {
        bench.advance(Duration::from_millis(999));
        assert!(bench.on("d0").is_empty(), "{again}");
        bench.advance(Duration::from_millis(1));
        assert_eq!(
            (breaker(&bench, "d0"), bench.on("d0").len()),
            ("half_open", 1),
            "{again}"
        );
        fail(&mut bench, "d0");
    }
    bench.join_decode("d1");
    bench.cancel(1);
    for id in 2..6 {
        bench.advance(Duration::from_millis(1_000));
        bench.submit(request(id, 6, 4));
        assert!(bench.on("d0").is_empty(), "there is another one");
    }
    // It is gone: the one that has failed is asked at once.
    bench.lose("d1");
    assert_eq!((breaker(&bench, "d0"), bench.on("d0").len()), ("half_open", 1));
}

#[test]
fn a_node_that_connects_anew_has_not_failed() {
    let mut bench = unwatched();
    bench.lose("d1");
    bench.submit(request(1, 6, 4));
    fail(&mut bench, "d0");
    fail(&mut bench, "d0");
    assert_eq!(breaker(&bench, "d0"), "open");
    bench.lose("d0");
    bench.join_decode("d0");
    assert_eq!((breaker(&bench, "d0"), bench.on("d0").len()), ("closed", 1));
}

#[test]
fn busy_is_no_failure_and_another_node_is_asked_at_once() {
    let mut bench = unwatched();
    bench.submit(request(1, 6, 4));
    let busy = JobEvent::Busy {
        needed_blocks: 2,
        free_blocks: 50,
    };
    bench.event(bench.started("d0"), busy.clone());
    assert_eq!(bench.on("d1").len(), 1, "in the same moment");
    let mut asked = 1;
    let until = bench.now + Duration::from_secs(61);
    while bench.now < until {
        for node in ["d0", "d1"] {
            while let Some(leg) = bench.on(node).first().copied() {
                bench.event(leg, busy.clone());
                asked += 1;
                assert!(asked < 500, "without an end");
            }
        }
        bench.advance(Duration::from_millis(10));
    }
    assert!(asked > 50 && asked < 300, "{asked} times in a minute");
    assert_eq!(breaker(&bench, "d0"), "closed");
    assert_eq!(bench.ends(1), 1, "the wait has an end");
}

#[test]
fn a_node_that_died_and_is_back_does_not_get_what_died_with_it_while_there_is_another() {
    let mut bench = decoding();
    bench.submit(request(2, 6, 4));
    let second = bench.started("d1");
    bench.granted(second, 3);
    bench.first_token(bench.last_started("p0"), 65);
    bench.event(second, JobEvent::Committed);
    assert_eq!((bench.on("d0").len(), bench.on("d1").len()), (1, 1));
    // Its new life is here before anybody has missed the old one.
    bench.join(Role::Decode, "d0", 2);
    assert_eq!(bench.state(1), "resuming");
    assert_eq!((bench.on("d0").len(), bench.on("d1").len()), (0, 2));
    bench.submit(request(3, 6, 4));
    assert_eq!(bench.on("d0").len(), 1, "others go there");
    // Better there than nowhere.
    bench.lose("d1");
    assert_eq!(bench.on("d0").len(), 3);
}

proptest! {
    /// Reports that come late, never, or twice harm nobody: the answer is right, and nothing stays booked.
    #[test]
    fn reports_that_are_late_lost_or_repeated_are_harmless(
        reports in proptest::collection::vec((0_usize..3, 0_u64..30, 0_u64..20, any::<bool>(), 0_u64..900), 0..60),
    ) {
        let mut bench = at("decoding");
        bench.join_decode("d1");
        let mut position = 2;
        for (node, sequence, steps, pending, queued_tokens) in reports {
            let report = LoadReport { sequence, steps, pending, queued_tokens, free_blocks: 100, ..LoadReport::default() };
            let link = bench.link(["p0", "d0", "d1"][node]);
            bench.fact(Fact::NodeReport { link, report });
            bench.advance(Duration::from_millis(50));
            if position < 4 && sequence % 3 == 0 {
                let leg = bench.open_legs()[0];
                bench.token(leg, position, 65 + position);
                position += 1;
            }
        }
        while position < 4 {
            let leg = bench.open_legs()[0];
            bench.token(leg, position, 65 + position);
            position += 1;
        }
        prop_assert_eq!(bench.text(1), "ABCD");
        bench.assert_idle();
    }
}
