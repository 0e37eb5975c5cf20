//! What must hold after a simulation, and the simulations.

use super::node::token;
use super::{Faults, REQUESTS, Simulation, Tally, ends};
use crate::core::fixtures::EOS;
use crate::core::types::{ClientEvent, Finish, ServeErrorKind, ServeRequest};

/// Visible text and finish of an undisturbed run: text up to the end token or limit, cut at the first stop string.
fn expected(request: &ServeRequest) -> (Vec<u32>, String, Finish) {
    let mut tokens = Vec::new();
    let mut text = String::new();
    for position in 0..request.stop.max_tokens {
        let token = token(request.id, position);
        tokens.push(token);
        if token == EOS {
            return (tokens, text, Finish::Eos);
        }
        text.push(char::from(token as u8));
        let found = request.stop_strings.iter().find(|stop| text.ends_with(stop.as_str()));
        if let Some(stop) = found {
            let keep = if request.include_stop_str {
                text.len()
            } else {
                text.len() - stop.len()
            };
            text.truncate(keep);
            return (tokens, text, Finish::StopString(stop.clone()));
        }
    }
    (tokens, text, Finish::Length)
}

/// Runs one seed.
fn check(seed: u64, faults: Faults) -> Tally {
    let mut simulation = Simulation::new(seed, faults);
    simulation.run();
    for (request, cancelled) in &simulation.planned {
        let events = &simulation.seen[&request.id];
        let calm = faults.deaths == 0 && faults.broken_streams == 0;
        simulation.tally.answered += usize::from(answered(request, events, *cancelled, calm, seed));
    }
    assert_eq!(simulation.cluster.open_requests(), 0);
    for status in simulation.cluster.status().nodes {
        let booked = (status.booked_blocks, status.jobs);
        assert_eq!(booked, (0, 0), "seed {seed}: {}", status.node);
    }
    for node in simulation.nodes.iter().flatten() {
        let held = node.total - node.free;
        assert!(node.is_idle(), "seed {seed}: {} holds {held} blocks", node.name);
    }
    simulation.tally
}

/// Checks the events of one request; true if it was answered.
fn answered(request: &ServeRequest, events: &[ClientEvent], cancelled: bool, calm: bool, seed: u64) -> bool {
    let (end, before) = events.split_last().expect("an end");
    assert_eq!((ends(before), ends(events)), (0, 1), "seed {seed}: {events:?}");
    let mut got = Vec::new();
    let mut shown = String::new();
    for event in before {
        if let ClientEvent::Token(token) = event {
            got.push(token.sampled.token);
            shown.push_str(&token.visible);
        }
    }
    let (tokens, text, finish) = expected(request);
    assert!(tokens.starts_with(&got), "seed {seed}: {got:?} of {tokens:?}");
    match end {
        ClientEvent::Done(end) => {
            shown.push_str(&end.tail);
            assert_eq!((got, shown, &end.finish), (tokens, text, &finish), "seed {seed}");
            true
        }
        ClientEvent::Failed(error) => {
            let gone = cancelled && error.kind == ServeErrorKind::Cancelled;
            assert!(gone || !calm, "seed {seed}: {error:?}");
            assert_ne!(error.kind, ServeErrorKind::Internal, "seed {seed}: {error:?}");
            false
        }
        ClientEvent::Prefill { .. } | ClientEvent::Token(_) => unreachable!("it is an end"),
    }
}

fn check_all(seeds: std::ops::Range<u64>, faults: Faults) -> Tally {
    let mut tally = Tally::default();
    seeds.for_each(|seed| tally += check(seed, faults));
    tally
}

#[test]
fn without_faults_every_request_is_answered() {
    let tally = check_all(
        0..40,
        Faults {
            broken_streams: 0,
            deaths: 0,
            cancels: false,
        },
    );
    assert_eq!(tally.answered, 40 * REQUESTS as usize);
    assert_eq!((tally.restarted, tally.moved), (0, 0), "{tally:?}");
}

#[test]
fn cancels_leave_nothing_behind() {
    let tally = check_all(
        100..140,
        Faults {
            broken_streams: 0,
            deaths: 0,
            cancels: true,
        },
    );
    assert!(tally.late > 0, "{tally:?}");
}

#[test]
fn broken_streams_and_dying_nodes_cost_only_the_requests_they_hit_too_often() {
    let tally = check_all(
        200..300,
        Faults {
            broken_streams: 10,
            deaths: 3,
            cancels: false,
        },
    );
    assert!(tally.answered * 100 >= REQUESTS as usize * 100 * 99, "{tally:?}");
    assert!(tally.restarted > 100 && tally.moved > 100, "{tally:?}");
}

#[test]
fn everything_at_once() {
    let tally = check_all(
        300..400,
        Faults {
            broken_streams: 40,
            deaths: 8,
            cancels: true,
        },
    );
    assert!(
        tally.restarted > 100 && tally.moved > 100 && tally.busy > 0,
        "{tally:?}"
    );
}
