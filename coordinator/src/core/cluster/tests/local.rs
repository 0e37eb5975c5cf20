//! Decode nodes that compute prompts themselves.

use std::time::Duration;

use protocol::control::{Beam, Job, JobErrorKind, JobEvent, KvSource, PromptComputed, StepTiming};
use protocol::ids::{RequestId, Role};

use super::bench::Bench;
use crate::core::decisions::Way;
use crate::core::fixtures::{EOS, hello, request, sampled, settings};
use crate::core::nodes::{LegId, PeerName};
use crate::core::routing::{LocalPrefill, Policy};
use crate::core::types::{ClientEvent, ServeErrorKind, ServeRequest};

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
    // Whatever is asked for.
    for change in [told, searched] {
        let mut wanted = request(2, 6, 3);
        change(&mut wanted);
        bench.submit(wanted);
        let Job::Decode(job) = bench.job(bench.last_started("b0")) else {
            panic!("a decode job")
        };
        assert_eq!(job.source, KvSource::Compute);
        bench.cancel(2);
    }
    bench.assert_idle();
}

fn told(request: &mut ServeRequest) {
    request.prompt_logprobs = Some(0);
}

fn searched(request: &mut ServeRequest) {
    (request.beam_width, request.choices) = (Some(2), 2);
}

fn prompt_only(request: &mut ServeRequest) {
    (request.choices, request.prompt_logprobs) = (0, Some(2));
}

/// What a node says of a prompt whose log-probabilities are asked for.
fn of_the_prompt(tokens: &[u32]) -> PromptComputed {
    PromptComputed {
        tokens: tokens.iter().map(|token| sampled(0, *token)).collect(),
        step: StepTiming::default(),
        cached_tokens: 0,
        prompt_logprobs: Some(Vec::new()),
    }
}

#[test]
fn a_decode_node_tells_of_the_prompt_whose_log_probabilities_are_asked_for() {
    let mut bench = cluster(LocalPrefill::Always, &["p0", "d0"]);
    let mut wanted = request(1, 6, 3);
    told(&mut wanted);
    bench.submit(wanted);
    let asks = |bench: &Bench, leg| match bench.job(leg) {
        Job::Decode(job) => job.prompt_logprobs,
        Job::Prefill(_) => panic!("a decode job"),
    };
    let leg = bench.started("d0");
    assert_eq!(asks(&bench, leg), Some(0));
    // A node that leaves them out, or goes on without them, has not done what it was asked for.
    bench.first_token(leg, 65);
    assert_eq!((bench.state(1), bench.events(1).len()), ("local", 0));
    bench.token(bench.started("d0"), 0, 65);
    assert_eq!((bench.state(1), bench.events(1).len()), ("local", 0));
    let leg = bench.started("d0");
    bench.event(leg, JobEvent::Computed(of_the_prompt(&[65])));
    assert!(matches!(
        bench.events(1)[0],
        ClientEvent::Prefill {
            prompt_logprobs: Some(_),
            ..
        }
    ));
    // The next node need not tell it again.
    bench.join_decode("d1");
    bench.lose("d0");
    let leg = bench.started("d1");
    assert_eq!(asks(&bench, leg), None);
    bench.token(leg, 1, 66);
    bench.token(leg, 2, 67);
    assert_eq!(bench.text(1), "ABC");
    bench.assert_idle();
}

#[test]
fn a_decode_node_searches_from_a_prompt_that_it_computed() {
    let mut bench = cluster(LocalPrefill::Auto, &["d0"]);
    let mut wanted = request(1, 6, 10);
    searched(&mut wanted);
    bench.submit(wanted);
    let leg = bench.started("d0");
    let Job::Decode(job) = bench.job(leg) else {
        panic!("a decode job")
    };
    assert_eq!((job.beam_width, job.choices.len()), (Some(2), 0));
    bench.first_tokens(leg, &[]);
    assert_eq!(bench.state(1), "decoding");
    // It says nothing before its end, and has the time of all its tokens.
    bench.advance(Duration::from_secs(199));
    assert_eq!(bench.state(1), "decoding");
    let beam = |last| Beam {
        tokens: vec![
            (sampled(0, 65), StepTiming::default()),
            (sampled(1, last), StepTiming::default()),
        ],
        score: 0.0,
    };
    bench.event(leg, JobEvent::Beams(vec![beam(EOS), beam(EOS)]));
    assert_eq!([bench.text_of(1, 0), bench.text_of(1, 1)], ["A", "A"]);
    bench.assert_idle();
}

#[test]
fn a_prompt_alone_ends_with_what_is_told_of_it() {
    for local in [LocalPrefill::Auto, LocalPrefill::Always] {
        let mut bench = cluster(local, &["d0"]);
        let mut wanted = request(1, 6, 3);
        prompt_only(&mut wanted);
        bench.submit(wanted.clone());
        let leg = bench.started("d0");
        assert_eq!(bench.state(1), "local");
        bench.event(leg, JobEvent::Computed(of_the_prompt(&[])));
        assert!(matches!(
            bench.events(1),
            [ClientEvent::Prefill { .. }, ClientEvent::Done { .. }]
        ));
        bench.assert_idle();
        // Without a decode node a prefill node does it.
        let mut bench = cluster(local, &["p0"]);
        bench.submit(wanted);
        bench.event(bench.started("p0"), JobEvent::Computed(of_the_prompt(&[])));
        assert_eq!(bench.ends(1), 1);
        bench.assert_idle();
    }
}

/// Of nodes of both roles only earlier ones hand over to later ones, whoever chooses: a prompt may wait for blocks that other
/// handoffs have, and were there both directions, two could wait for each other.
#[test]
fn nodes_of_both_roles_hand_over_in_one_direction_only() {
    let mut seen = Vec::new();
    for policy in [Policy::PrefixAffinity, Policy::LeastLoaded, Policy::RoundRobin] {
        for local in [LocalPrefill::Never, LocalPrefill::Auto] {
            let mut settings = settings();
            (settings.policy, settings.local_prefill) = (policy, local);
            let mut bench = Bench::new(settings);
            for node in ["b2", "b0", "b1"] {
                bench.join(Role::Both, node, 1);
            }
            for id in 1..=60 {
                bench.submit(request(id, 8 + id as usize % 40, 5));
                for leg in bench.open_legs() {
                    let number = bench.request_of(leg);
                    match bench.state(number) {
                        "reserving" => {
                            let told = bench.cluster.decisions(bench.now, RequestId(number));
                            let (from, to) = (told[0].prefill.clone(), told[0].decode.clone());
                            assert!(from < to, "{from:?} hands over to {to:?}");
                            seen.push((policy, local));
                            bench.granted(leg, 1);
                            let of_it = |leg: &LegId| bench.request_of(*leg) == number;
                            let prefill = bench.open_legs().into_iter().rfind(of_it);
                            let prefill = prefill.expect("a prefill job");
                            bench.first_token(prefill, 65);
                        }
                        // Some prompts take long: others are computed on other nodes.
                        "local" if !number.is_multiple_of(3) => {
                            bench.first_token(leg, 65);
                        }
                        _ => {}
                    }
                }
                bench.cancel(id.saturating_sub(6));
            }
            for id in 50..=60 {
                bench.cancel(id);
            }
            bench.assert_idle();
        }
    }
    for policy in [Policy::PrefixAffinity, Policy::LeastLoaded, Policy::RoundRobin] {
        assert!(seen.contains(&(policy, LocalPrefill::Never)), "{seen:?}");
    }
}

#[test]
fn what_no_prefill_node_can_take_a_decode_node_computes_if_it_may() {
    let small = |local| {
        let mut bench = cluster(local, &["d0"]);
        let hello = hello(Role::Prefill, "p0", 1, 5);
        let peer = PeerName {
            role: hello.role,
            node: hello.node.clone(),
        };
        bench.join_as(peer, hello);
        bench
    };
    let mut bench = small(LocalPrefill::Auto);
    bench.submit(request(1, 40, 3));
    assert_eq!(bench.state(1), "local");
    let error = small(LocalPrefill::Never).try_submit(request(1, 40, 3));
    assert_eq!(error.expect_err("too long").kind, ServeErrorKind::TooLong);
    // And the other way round: one token needs no decode node that could hold it.
    let mut bench = cluster(LocalPrefill::Auto, &["p0"]);
    let hello = hello(Role::Decode, "d0", 1, 5);
    let peer = PeerName {
        role: hello.role,
        node: hello.node.clone(),
    };
    bench.join_as(peer, hello);
    bench.submit(request(1, 40, 1));
    assert_eq!(bench.state(1), "prefilling");
}

#[test]
fn never_means_never() {
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
