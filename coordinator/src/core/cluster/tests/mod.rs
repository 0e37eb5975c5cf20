//! The cluster by script: every state, and in every state a cancel, a loss, a deadline.

mod bench;
mod blocks;
mod choices;
mod health;
mod joining;
mod local;
mod orders;
mod routing;
mod states;
mod turns;

use std::time::Duration;

use protocol::control::{ChoiceStart, Job, JobErrorKind, JobEvent, KvSource};
use protocol::moved::HaveBlocks;

use self::bench::{Bench, STATES, at};
use super::{Action, is_last};
use crate::core::fixtures::{EOS, request};
use crate::core::types::{ClientEvent, Finish, ServeErrorKind};

#[test]
fn a_request_goes_through_both_nodes_and_leaves_nothing_behind() {
    let mut bench = Bench::with_nodes();
    bench.submit(request(1, 6, 3));
    let decode = bench.started("d0");
    let Job::Decode(job) = bench.job(decode) else {
        panic!("a reservation comes first")
    };
    assert_eq!(
        (job.source, job.token_ids.len(), job.choices.clone()),
        (KvSource::Handoff, 6, vec![ChoiceStart::default()])
    );
    bench.granted(decode, 3);
    let prefill = bench.started("p0");
    let Job::Prefill(job) = bench.job(prefill) else {
        panic!("then the prefill job")
    };
    let target = job.handoff.clone().expect("with a target");
    assert_eq!(
        (target.address.as_str(), target.ticket.0, target.have_blocks),
        ("d0.test:1", 3, HaveBlocks::NONE)
    );
    bench.first_token(prefill, 65);
    bench.event(decode, JobEvent::Committed);
    bench.event(prefill, JobEvent::HandedOff(Default::default()));
    bench.token(decode, 1, 66);
    assert_eq!(
        bench.booked("d0"),
        3,
        "6 prompt tokens, 2 generated and the next: 3 blocks of 4"
    );
    bench.token(decode, 2, 67);
    let end = bench.completion(1);
    assert_eq!(
        (end.finish, end.generated_tokens, end.limit_reached),
        (Finish::Length, 3, true)
    );
    assert_eq!(bench.text(1), "ABC");
    bench.assert_idle();
}

#[test]
fn one_token_needs_no_decode_node() {
    let mut bench = Bench::default();
    bench.join_prefill("p0");
    bench.submit(request(1, 6, 1));
    let prefill = bench.started("p0");
    let Job::Prefill(job) = bench.job(prefill) else {
        panic!("a prefill job")
    };
    assert_eq!(job.handoff, None);
    bench.first_token(prefill, 65);
    assert_eq!(bench.completion(1).finish, Finish::Length);
    bench.assert_idle();
}

#[test]
fn a_first_token_that_ends_the_request_resets_the_reservation_at_once() {
    for (token, finish) in [
        (EOS, Finish::Eos),
        (46, Finish::StopToken(46)),
        (66, Finish::StopString("B".to_owned())),
    ] {
        let mut bench = Bench::with_nodes();
        let mut wanted = request(1, 6, 8);
        wanted.stop.stop_token_ids = vec![46];
        wanted.stop_strings = ["B".to_owned()].into();
        bench.submit(wanted);
        let decode = bench.started("d0");
        bench.granted(decode, 3);
        let prefill = bench.started("p0");
        let actions = bench.first_token(prefill, token);
        let resets: Vec<_> = actions
            .iter()
            .filter(|a| matches!(a, Action::ResetJob { .. }))
            .collect();
        assert_eq!(
            resets,
            [&Action::ResetJob { leg: prefill }, &Action::ResetJob { leg: decode }]
        );
        let end = bench.completion(1);
        assert_eq!((end.finish, end.generated_tokens), (finish, 1));
        bench.assert_idle();
    }
}

#[test]
fn what_the_decode_node_says_early_waits_for_the_first_token() {
    let mut bench = Bench::with_nodes();
    bench.submit(request(1, 6, 3));
    let decode = bench.started("d0");
    bench.granted(decode, 3);
    let prefill = bench.started("p0");
    bench.event(decode, JobEvent::Committed);
    bench.token(decode, 1, 66);
    bench.token(decode, 2, 67);
    bench.event(decode, JobEvent::Finished);
    assert_eq!(bench.text(1), "");
    bench.first_token(prefill, 65);
    assert_eq!(bench.text(1), "ABC");
    assert_eq!(bench.completion(1).generated_tokens, 3);
    bench.assert_idle();
}

#[test]
fn a_cancel_resets_every_leg_in_the_same_tick_whatever_the_state() {
    for &state in STATES {
        let mut bench = at(state);
        let open = bench.open_legs();
        let actions = bench.cancel(1);
        let mut reset: Vec<_> = actions
            .iter()
            .filter_map(|action| {
                if let Action::ResetJob { leg } = action {
                    Some(*leg)
                } else {
                    None
                }
            })
            .collect();
        reset.sort_unstable();
        assert_eq!(reset, open, "{state}");
        assert_eq!(bench.failure(1), ServeErrorKind::Cancelled, "{state}");
        bench.assert_idle();
    }
}

#[test]
fn events_of_a_leg_that_is_over_change_nothing() {
    for &state in STATES {
        let mut bench = at(state);
        let legs = bench.open_legs();
        bench.cancel(1);
        for leg in legs {
            for event in bench::every_event() {
                let expected = usize::from(!is_last(&event));
                let actions = bench.event(leg, event);
                assert_eq!(actions.len(), expected, "{state}: {actions:?}");
                assert!(
                    actions.iter().all(|action| matches!(action, Action::Late { .. })),
                    "{state}: {actions:?}"
                );
            }
        }
        bench.assert_idle();
    }
}

#[test]
fn duplicates_are_harmless() {
    let mut bench = Bench::with_nodes();
    bench.submit(request(1, 6, 3));
    let decode = bench.started("d0");
    bench.granted(decode, 3);
    let prefill = bench.started("p0");
    bench.granted(decode, 3);
    bench.first_token(prefill, 65);
    bench.first_token(prefill, 65);
    bench.event(decode, JobEvent::Committed);
    bench.event(decode, JobEvent::Committed);
    bench.granted(decode, 3);
    bench.token(decode, 1, 66);
    bench.token(decode, 1, 66);
    bench.first_token(prefill, 65);
    bench.token(decode, 2, 67);
    assert_eq!(bench.text(1), "ABC");
    assert_eq!(bench.completion(1).generated_tokens, 3);
    bench.assert_idle();
}

#[test]
fn any_event_in_any_state_leaves_the_books_right_and_the_request_alive_or_ended_once() {
    for &state in STATES {
        for side in 0..2 {
            for event in bench::every_event() {
                let mut bench = at(state);
                let Some(&leg) = bench.open_legs().get(side) else {
                    continue;
                };
                bench.event(leg, event.clone());
                bench.cancel(1);
                assert_eq!(bench.ends(1), 1, "{state}, {event:?}");
                bench.assert_idle();
            }
        }
    }
}

#[test]
fn a_busy_node_is_left_alone_for_a_while_and_then_asked_again() {
    let mut bench = Bench::with_nodes();
    bench.submit(request(1, 6, 3));
    let first = bench.started("d0");
    bench.event(
        first,
        JobEvent::Busy {
            needed_blocks: 2,
            free_blocks: 50,
        },
    );
    assert_eq!(bench.state(1), "queued");
    bench.advance(Duration::from_millis(10));
    let second = bench.started("d0");
    assert!(second > first);
    bench.event(
        second,
        JobEvent::Busy {
            needed_blocks: 2,
            free_blocks: 50,
        },
    );
    bench.advance(Duration::from_millis(19));
    assert_eq!(bench.state(1), "queued", "the second pause is twice as long");
    bench.advance(Duration::from_millis(1));
    bench.granted(bench.started("d0"), 3);
    assert_eq!(bench.state(1), "prefilling");
}

#[test]
fn a_busy_node_is_asked_again_as_soon_as_it_has_more_room() {
    let mut bench = Bench::with_nodes();
    let refuse = |bench: &mut Bench| {
        let busy = JobEvent::Busy {
            needed_blocks: 2,
            free_blocks: 50,
        };
        bench.event(bench.last_started("d0"), busy);
        assert_eq!(bench.state(2), "queued");
    };
    bench.submit(request(1, 6, 3));
    bench.granted(bench.started("d0"), 3);
    bench.first_token(bench.started("p0"), 65);
    bench.submit(request(2, 6, 3));
    refuse(&mut bench);
    for millis in [10, 20, 40, 80] {
        bench.advance(Duration::from_millis(millis));
        refuse(&mut bench);
    }
    bench.report("d0", 50, false);
    assert_eq!(
        bench.state(2),
        "queued",
        "a report that is no news does not end the pause"
    );
    bench.report("d0", 51, false);
    assert_eq!(bench.state(2), "reserving");
    refuse(&mut bench);
    bench.cancel(1);
    assert_eq!(bench.state(2), "reserving", "the other job's blocks are free");
    refuse(&mut bench);
    bench.advance(Duration::from_millis(10));
    assert_eq!(bench.state(2), "reserving", "the pauses are short again");
}

#[test]
fn a_busy_node_is_passed_over_for_another() {
    let mut bench = Bench::with_nodes();
    bench.join_decode("d1");
    bench.submit(request(1, 6, 3));
    bench.event(
        bench.started("d0"),
        JobEvent::Busy {
            needed_blocks: 2,
            free_blocks: 0,
        },
    );
    bench.granted(bench.started("d1"), 3);
    assert_eq!(bench.state(1), "prefilling");
}

#[test]
fn a_request_that_no_node_can_hold_is_refused_and_others_wait_their_turn() {
    let mut bench = Bench::with_nodes();
    let error = bench
        .try_submit(request(1, 200, 300))
        .expect_err("100 blocks of 4 tokens");
    assert_eq!(error.kind, ServeErrorKind::TooLong);
    assert_eq!(
        error.message,
        "the request may grow to 500 tokens; the connected nodes hold 400"
    );
    // 50 + 1 tokens: 13 blocks each, and one to grow for each that runs there.
    for id in 2..12 {
        bench.submit(request(id, 50, 3));
        if bench.state(id) == "reserving" {
            bench.granted(bench.last_started("d0"), 3);
            bench.first_token(bench.last_started("p0"), 65);
        }
    }
    let reserved = (2..12).filter(|id| bench.state(*id) == "transferring").count();
    assert_eq!(reserved, 7, "7 x 13 + 6 of 100 blocks");
    bench.cancel(2);
    assert_eq!(bench.state(9), "reserving", "the head of the queue takes the place");
    assert_eq!(bench.state(10), "queued");
}

#[test]
fn without_a_node_a_request_is_refused_unless_one_was_there_lately() {
    let mut bench = Bench::default();
    bench.join_prefill("p0");
    let error = bench.try_submit(request(1, 6, 3)).expect_err("no decode node");
    assert_eq!(
        (error.kind, error.message.as_str()),
        (ServeErrorKind::Unavailable, "no decode node is connected")
    );
    bench.join_decode("d0");
    bench.lose("d0");
    bench.submit(request(2, 6, 3));
    assert_eq!(bench.state(2), "queued");
    bench.advance(Duration::from_secs(60));
    assert_eq!(bench.failure(2), ServeErrorKind::Unavailable);
    assert_eq!(
        bench.try_submit(request(3, 6, 3)).expect_err("gone for long").kind,
        ServeErrorKind::Unavailable
    );
    bench.assert_idle();
}

#[test]
fn a_node_that_drains_gets_nothing_new_and_finishes_what_it_has() {
    let mut bench = Bench::with_nodes();
    bench.submit(request(1, 6, 3));
    let decode = bench.started("d0");
    bench.granted(decode, 3);
    bench.report("d0", 100, true);
    bench.submit(request(2, 6, 3));
    assert_eq!(bench.state(2), "queued");
    bench.first_token(bench.started("p0"), 65);
    bench.token(decode, 1, 66);
    bench.token(decode, 2, 67);
    assert_eq!(bench.text(1), "ABC");
    // A refusal says the same before the report does.
    bench.report("d0", 100, false);
    assert_eq!(bench.state(2), "reserving");
    bench.failed(bench.last_started("d0"), JobErrorKind::Draining);
    assert_eq!(bench.state(2), "queued");
    bench.advance(Duration::from_secs(1));
    assert_eq!(bench.state(2), "queued", "no node takes jobs");
}

#[test]
fn a_stopping_coordinator_takes_nothing_new_and_ends_what_is_left_on_demand() {
    let mut bench = at("decoding");
    bench.fact(super::Fact::Drain);
    assert_eq!(
        bench.try_submit(request(2, 6, 3)).expect_err("drains").kind,
        ServeErrorKind::Unavailable
    );
    assert_eq!(bench.state(1), "decoding");
    bench.fact(super::Fact::Abort);
    assert_eq!(bench.failure(1), ServeErrorKind::Unavailable);
    bench.assert_idle();
}

#[test]
fn the_prefill_event_carries_what_the_answer_needs() {
    let mut bench = Bench::with_nodes();
    bench.report("d0", 0, false);
    bench.submit(request(1, 6, 3));
    bench.advance(Duration::from_millis(250));
    bench.report("d0", 100, false);
    bench.granted(bench.started("d0"), 3);
    bench.first_token(bench.started("p0"), 65);
    let events = bench.events(1);
    let ClientEvent::Prefill {
        queue_us,
        cached_tokens,
        ..
    } = events[0]
    else {
        panic!("{events:?}")
    };
    assert_eq!((queue_us, cached_tokens), (250_000, 2));
}

#[test]
fn a_short_prompt_shares_the_node_with_a_long_one_and_no_more_is_sent_ahead() {
    let mut bench = Bench::with_nodes();
    let mut run = |id, prompt| {
        bench.submit(request(id, prompt, 3));
        if bench.state(id) == "reserving" {
            bench.granted(bench.last_started("d0"), 3);
        }
        bench.state(id)
    };
    // 64 tokens ahead are permitted; a prompt that is alone may be of any length.
    assert_eq!(run(1, 100), "prefilling");
    assert_eq!(run(2, 40), "prefilling", "less than half");
    assert_eq!(run(3, 10), "queued", "two share a step");
    let long = bench.on("p0")[0];
    bench.first_token(long, 65);
    assert_eq!(bench.state(3), "reserving", "40 + 10 tokens are ahead");
    bench.granted(bench.last_started("d0"), 3);
    bench.submit(request(4, 30, 3));
    assert_eq!(
        bench.state(4),
        "queued",
        "40 + 10 + 30 are too many, and not less than half"
    );
}
