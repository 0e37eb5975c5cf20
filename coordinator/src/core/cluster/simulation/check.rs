//! What must hold after a simulation, and the simulations.

use super::node::token;
use super::{Faults, REQUESTS, Simulation, Tally, ends};
use crate::core::fixtures::EOS;
use crate::core::types::{ClientEvent, Finish, ServeErrorKind, ServeRequest};

/// Tokens, visible text and finish of a choice of an undisturbed run: text up to the end token or limit, cut at the first stop string.
fn expected(request: &ServeRequest, choice: u32) -> (Vec<u32>, String, Finish) {
    let mut tokens = Vec::new();
    let mut text = String::new();
    for position in 0..request.stop.max_tokens {
        let token = token(request.id, choice, position);
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
    let mut got: Vec<Seen> = (0..request.choices).map(|_| Seen::default()).collect();
    for event in before {
        match event {
            ClientEvent::Prefill { .. } => {}
            ClientEvent::Token { choice, token } => {
                let seen = &mut got[*choice as usize];
                assert_eq!(seen.finish, None, "seed {seed}: a token behind the end");
                seen.tokens.push(token.sampled.token);
                seen.text.push_str(&token.visible);
            }
            ClientEvent::Ended { choice, completion } => {
                let seen = &mut got[*choice as usize];
                seen.text.push_str(&completion.tail);
                let before = seen.finish.replace(completion.finish.clone());
                assert_eq!(before, None, "seed {seed}: choice {choice} ends twice");
            }
            ClientEvent::Done | ClientEvent::Failed(_) => unreachable!("counted"),
        }
    }
    for (choice, seen) in (0..).zip(&got) {
        let (tokens, text, finish) = expected(request, choice);
        assert!(tokens.starts_with(&seen.tokens), "seed {seed}: {seen:?} of {tokens:?}");
        if let Some(ended) = &seen.finish {
            assert_eq!(
                (&seen.tokens, &seen.text, ended),
                (&tokens, &text, &finish),
                "seed {seed}"
            );
        }
    }
    match end {
        ClientEvent::Done => {
            assert!(got.iter().all(|seen| seen.finish.is_some()), "seed {seed}: {events:?}");
            true
        }
        ClientEvent::Failed(error) => {
            let gone = cancelled && error.kind == ServeErrorKind::Cancelled;
            assert!(gone || !calm, "seed {seed}: {error:?}");
            assert_ne!(error.kind, ServeErrorKind::Internal, "seed {seed}: {error:?}");
            false
        }
        ClientEvent::Prefill { .. } | ClientEvent::Token { .. } | ClientEvent::Ended { .. } => {
            unreachable!("it is an end")
        }
    }
}

/// What came of a choice.
#[derive(Debug, Default)]
struct Seen {
    tokens: Vec<u32>,
    text: String,
    finish: Option<Finish>,
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
    assert!(tally.ended_alone > 10, "{tally:?}");
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
