//! Several choices of one prompt, several prompts of one call, beam search, prompts alone.

use std::time::Duration;

use protocol::control::{Beam, ChoiceStart, Job, JobEvent, JobUpdate, KvSource, StepTiming};

use super::bench::Bench;
use super::{Action, EOS, Finish, ServeErrorKind, request};
use crate::core::fixtures::sampled;
use crate::core::nodes::LegId;
use crate::core::types::{ClientEvent, ServeRequest};

/// Request 1: 6 prompt tokens, 4 to generate, stop string "X".
fn wanted(choices: u32) -> ServeRequest {
    let mut wanted = request(1, 6, 4);
    wanted.choices = choices;
    wanted.stop_strings = ["X".to_owned()].into();
    wanted
}

/// Three choices with first tokens A, B, C, which a decode node has taken over.
fn decoding() -> (Bench, LegId) {
    let mut bench = Bench::with_nodes();
    bench.submit(wanted(3));
    let decode = bench.started("d0");
    bench.granted(decode, 3);
    let prefill = bench.started("p0");
    bench.first_tokens(prefill, &[65, 66, 67]);
    bench.event(decode, JobEvent::Committed);
    bench.event(prefill, JobEvent::HandedOff(Default::default()));
    (bench, decode)
}

fn updates(actions: &[Action]) -> Vec<JobUpdate> {
    let update = |action: &Action| {
        if let Action::UpdateJob { update, .. } = action {
            Some(*update)
        } else {
            None
        }
    };
    actions.iter().filter_map(update).collect()
}

#[test]
fn one_prompt_and_one_transfer_serve_all_choices() {
    let mut bench = Bench::with_nodes();
    bench.submit(wanted(3));
    let decode = bench.started("d0");
    let Job::Decode(job) = bench.job(decode) else {
        panic!("a reservation")
    };
    let start = |choice| ChoiceStart {
        choice,
        generated: Vec::new(),
    };
    assert_eq!(job.choices, [start(0), start(1), start(2)]);
    assert_eq!(
        bench.booked("d0"),
        4,
        "one full block of the prompt, and for each choice what follows"
    );
    bench.granted(decode, 3);
    let Job::Prefill(job) = bench.job(bench.started("p0")) else {
        panic!("a prefill job")
    };
    assert_eq!(job.choices, 3);
    assert_eq!(bench.booked("p0"), 2);
}

#[test]
fn each_choice_ends_once_and_gives_its_blocks_back_and_the_last_one_ends_the_request() {
    let (mut bench, decode) = decoding();
    assert_eq!(bench.booked("d0"), 4, "8 tokens each are two blocks");
    for choice in 0..3 {
        bench.token_of(decode, choice, 1, 97 + choice);
    }
    assert_eq!(bench.booked("d0"), 7, "the ninth token of each needs one more");
    let actions = bench.token_of(decode, 1, 2, EOS);
    assert_eq!(updates(&actions), [], "the node knows itself");
    assert_eq!(bench.booked("d0"), 5);
    bench.token_of(decode, 0, 2, 100);
    bench.token_of(decode, 2, 2, 101);
    bench.token_of(decode, 2, 3, 102);
    assert_eq!(bench.state(1), "decoding");
    bench.token_of(decode, 0, 3, 103);
    let ends: Vec<_> = bench
        .completions(1)
        .into_iter()
        .map(|(c, end)| (c, end.finish))
        .collect();
    assert_eq!(ends, [(1, Finish::Eos), (2, Finish::Length), (0, Finish::Length)]);
    assert_eq!(
        [bench.text_of(1, 0), bench.text_of(1, 1), bench.text_of(1, 2)],
        ["Aadg", "Bb", "Ccef"]
    );
    assert!(matches!(bench.events(1).last(), Some(ClientEvent::Done { .. })));
    bench.assert_idle();
}

#[test]
fn a_stop_string_ends_one_choice_and_the_node_is_told() {
    let (mut bench, decode) = decoding();
    let actions = bench.token_of(decode, 2, 1, 88);
    assert_eq!(updates(&actions), [JobUpdate::EndChoice { choice: 2 }]);
    assert_eq!(bench.text_of(1, 2), "C");
    // What was generated meanwhile changes nothing, and tells nobody again.
    assert_eq!(updates(&bench.token_of(decode, 2, 2, 88)), []);
    assert_eq!(bench.state(1), "decoding");
    bench.token_of(decode, 0, 1, 88);
    let actions = bench.token_of(decode, 1, 1, 88);
    assert_eq!(updates(&actions), [], "the last one: the job is reset");
    assert!(actions.contains(&Action::ResetJob { leg: decode }));
    assert_eq!(bench.completions(1).len(), 3);
    bench.assert_idle();
}

#[test]
fn a_first_token_that_ends_a_choice_leaves_the_others() {
    let mut bench = Bench::with_nodes();
    bench.submit(wanted(3));
    let decode = bench.started("d0");
    bench.granted(decode, 3);
    let prefill = bench.started("p0");
    let actions = bench.first_tokens(prefill, &[EOS, 88, 67]);
    assert_eq!(updates(&actions), [JobUpdate::EndChoice { choice: 1 }]);
    assert_eq!(bench.state(1), "transferring");
    assert_eq!(bench.booked("d0"), 2);
    bench.event(decode, JobEvent::Committed);
    bench.event(prefill, JobEvent::HandedOff(Default::default()));
    for position in 1..4 {
        bench.token_of(decode, 2, position, 97);
    }
    assert_eq!(bench.text_of(1, 2), "Caaa");
    assert_eq!(bench.completions(1).len(), 3);
    bench.assert_idle();
}

#[test]
fn first_tokens_that_end_all_choices_need_no_transfer() {
    let mut bench = Bench::with_nodes();
    bench.submit(wanted(2));
    let decode = bench.started("d0");
    bench.granted(decode, 3);
    let actions = bench.first_tokens(bench.started("p0"), &[EOS, 88]);
    assert!(actions.contains(&Action::ResetJob { leg: decode }));
    assert_eq!(bench.completions(1).len(), 2);
    bench.assert_idle();
}

#[test]
fn a_moved_request_takes_only_its_open_choices_along() {
    let (mut bench, decode) = decoding();
    bench.token_of(decode, 0, 1, 97);
    bench.token_of(decode, 1, 1, EOS);
    bench.lose("d0");
    bench.join_decode("d1");
    let decode = bench.started("d1");
    let Job::Decode(job) = bench.job(decode) else {
        panic!("a decode job")
    };
    assert_eq!(job.source, KvSource::Compute);
    let start = |choice, generated: &[u32]| ChoiceStart {
        choice,
        generated: generated.to_vec(),
    };
    assert_eq!(job.choices, [start(0, &[65, 97]), start(2, &[67])]);
    assert_eq!(bench.booked("d1"), 4, "1 + 2 (9 tokens) + 1 (8 tokens)");
    bench.token_of(decode, 2, 1, 88);
    bench.token_of(decode, 0, 2, 98);
    bench.token_of(decode, 0, 3, 99);
    assert_eq!([bench.text_of(1, 0), bench.text_of(1, 2)], ["Aabc", "C"]);
    bench.assert_idle();
}

#[test]
fn a_token_of_no_choice_or_first_tokens_for_some_are_nonsense() {
    let (mut bench, decode) = decoding();
    bench.token_of(decode, 3, 1, 97);
    assert_eq!(bench.state(1), "resuming");
    let mut bench = Bench::with_nodes();
    bench.submit(wanted(3));
    bench.granted(bench.started("d0"), 3);
    bench.first_tokens(bench.started("p0"), &[65, 66]);
    assert_eq!(bench.state(1), "reserving", "the attempt is repeated");
    assert_eq!(bench.events(1), []);
}

#[test]
fn a_prompt_alone_needs_no_decode_node_and_no_token() {
    let mut bench = Bench::default();
    bench.join_prefill("p0");
    let mut alone = request(1, 6, 1);
    alone.choices = 0;
    bench.submit(alone);
    let prefill = bench.started("p0");
    let Job::Prefill(job) = bench.job(prefill) else {
        panic!("a prefill job")
    };
    assert_eq!((job.choices, &job.handoff), (0, &None));
    bench.first_tokens(prefill, &[]);
    bench.event(prefill, JobEvent::Finished);
    assert!(
        matches!(bench.events(1), [ClientEvent::Prefill { .. }, ClientEvent::Done { .. }]),
        "{:?}",
        bench.events(1)
    );
    bench.assert_idle();
}

fn beam(tokens: &[u32]) -> Beam {
    let step = StepTiming::default();
    let tokens = (0..)
        .zip(tokens)
        .map(|(position, token)| (sampled(position, *token), step));
    Beam {
        tokens: tokens.collect(),
        score: -1.0,
    }
}

fn beams(max_tokens: u32) -> ServeRequest {
    let mut wanted = request(1, 6, max_tokens);
    wanted.choices = 2;
    wanted.beam_width = Some(2);
    wanted
}

#[test]
fn a_beam_search_is_answered_at_once_also_where_one_token_is_wanted() {
    for (most, found) in [
        (3, [beam(&[65, 66, 67]), beam(&[68, EOS])]),
        (1, [beam(&[65]), beam(&[EOS])]),
    ] {
        let mut bench = Bench::with_nodes();
        bench.submit(beams(most));
        let decode = bench.started("d0");
        let Job::Decode(job) = bench.job(decode) else {
            panic!("a reservation")
        };
        assert_eq!((job.beam_width, job.choices.len()), (Some(2), 0));
        bench.granted(decode, 3);
        let prefill = bench.started("p0");
        let Job::Prefill(job) = bench.job(prefill) else {
            panic!("a prefill job")
        };
        assert!(job.choices == 0 && job.handoff.is_some());
        bench.first_tokens(prefill, &[]);
        assert_eq!(bench.state(1), "transferring");
        bench.event(decode, JobEvent::Committed);
        bench.event(prefill, JobEvent::HandedOff(Default::default()));
        // A search is silent: it may take the time of all its tokens.
        bench.advance(Duration::from_secs(20 * u64::from(most)) - Duration::from_millis(1));
        assert_eq!(bench.state(1), "decoding");
        bench.event(decode, JobEvent::Beams(found.to_vec()));
        let ends: Vec<_> = bench
            .completions(1)
            .into_iter()
            .map(|(c, end)| (c, end.finish))
            .collect();
        assert_eq!(ends, [(0, Finish::Length), (1, Finish::Eos)]);
        bench.assert_idle();
    }
}

#[test]
fn a_beam_search_whose_node_is_lost_is_done_again() {
    let mut bench = Bench::with_nodes();
    bench.submit(beams(2));
    let decode = bench.started("d0");
    bench.granted(decode, 3);
    bench.first_tokens(bench.started("p0"), &[]);
    bench.event(decode, JobEvent::Committed);
    bench.lose("d0");
    bench.join_decode("d1");
    let decode = bench.started("d1");
    let Job::Decode(job) = bench.job(decode) else {
        panic!("a decode job")
    };
    assert_eq!(
        (job.source, job.beam_width, job.choices.len()),
        (KvSource::Compute, Some(2), 0)
    );
    bench.event(decode, JobEvent::Beams(vec![beam(&[65, 66]), beam(&[EOS])]));
    assert_eq!([bench.text_of(1, 0), bench.text_of(1, 1)], ["AB", ""]);
    let prefills = bench
        .events(1)
        .iter()
        .filter(|e| matches!(e, ClientEvent::Prefill { .. }));
    assert_eq!(prefills.count(), 1);
    bench.cancel(1);
    bench.assert_idle();
}

#[test]
fn beams_before_the_prompt_wait_for_it_and_wrong_ones_are_nonsense() {
    let mut bench = Bench::with_nodes();
    bench.submit(beams(2));
    let decode = bench.started("d0");
    bench.granted(decode, 3);
    bench.event(decode, JobEvent::Committed);
    bench.event(decode, JobEvent::Beams(vec![beam(&[65, 66]), beam(&[EOS])]));
    assert_eq!(bench.events(1), []);
    bench.first_tokens(bench.started("p0"), &[]);
    assert_eq!(bench.completions(1).len(), 2);
    bench.assert_idle();

    for wrong in [
        vec![],
        vec![beam(&[65, 66])],
        vec![beam(&[65, 66]), beam(&[])],
        vec![beam(&[65, 66]), beam(&[65])],
        vec![beam(&[65, 66, 67]), beam(&[EOS])],
        vec![beam(&[EOS, 66]), beam(&[EOS])],
    ] {
        let mut bench = Bench::with_nodes();
        bench.submit(beams(2));
        let decode = bench.started("d0");
        bench.granted(decode, 3);
        bench.first_tokens(bench.started("p0"), &[]);
        bench.event(decode, JobEvent::Beams(wrong));
        assert_eq!(bench.state(1), "resuming");
        assert_eq!(bench.completions(1), []);
    }
}

#[test]
fn what_no_node_can_hold_is_refused_with_the_reason() {
    let mut bench = Bench::with_nodes();
    for (choices, message) in [
        (17, "the request has 17 choices; the connected nodes run 16 sequences"),
        (
            16,
            "the request has 16 choices that may grow to 56 tokens each; the connected nodes cannot hold them",
        ),
    ] {
        let mut wanted = request(1, 6, 50);
        wanted.choices = choices;
        let error = bench.try_submit(wanted).expect_err("too many");
        assert_eq!((error.kind, error.message.as_str()), (ServeErrorKind::TooLong, message));
    }
    // 1 + 7 x 13 = 92 of 100 blocks.
    let mut wanted = request(1, 6, 50);
    wanted.choices = 7;
    bench.submit(wanted);
    assert_eq!(bench.state(1), "reserving");
}

#[test]
fn sequences_count_against_the_slots_of_a_node() {
    let mut bench = Bench::with_nodes();
    let mut many = request(1, 6, 2);
    many.choices = 10;
    bench.submit(many);
    bench.granted(bench.started("d0"), 3);
    let mut more = request(2, 6, 2);
    more.choices = 7;
    bench.submit(more);
    assert_eq!(bench.state(2), "queued", "16 at once");
    bench.first_tokens(bench.started("p0"), &[EOS, 65, 65, 65, 65, 65, 65, 65, 65, 65]);
    assert_eq!(bench.state(2), "reserving", "one has ended");
}

#[test]
fn the_requests_of_a_call_are_taken_together_or_refused_together() {
    let mut bench = Bench::with_nodes();
    let error = bench
        .submit_call(vec![request(1, 6, 3), request(2, 200, 300)])
        .expect_err("the second is too long");
    assert_eq!(error.kind, ServeErrorKind::TooLong);
    assert_eq!((bench.state(1), bench.state(2)), ("gone", "gone"));
    let twice = bench.submit_call(vec![request(1, 6, 3), request(1, 6, 3)]);
    assert_eq!(twice.expect_err("one name").kind, ServeErrorKind::Internal);
    // 40 requests of one call are one call of 32 that may wait.
    bench.report("d0", 0, false);
    bench
        .submit_call((1..=40).map(|id| request(id, 6, 3)).collect())
        .expect("admitted");
    for id in 41..72 {
        bench.submit(request(id, 6, 3));
    }
    let full = bench.submit_call(vec![request(72, 6, 3), request(73, 6, 3)]);
    assert!(matches!(
        full.expect_err("32 wait").kind,
        ServeErrorKind::Overloaded { .. }
    ));
    assert_eq!((bench.state(72), bench.state(73)), ("gone", "gone"));
    for id in 1..72 {
        bench.cancel(id);
    }
    bench.assert_idle();
}

#[test]
fn a_call_with_many_requests_takes_turns_with_those_behind_it() {
    let mut bench = Bench::with_nodes();
    bench.report("d0", 0, false);
    bench
        .submit_call((1..=5).map(|id| request(id, 6, 3)).collect())
        .expect("admitted");
    bench.submit(request(11, 6, 3));
    bench.submit(request(12, 6, 3));
    bench.report("d0", 100, false);
    let request_of = |leg: LegId| match bench.job(leg) {
        Job::Decode(job) => job.request.0,
        Job::Prefill(_) => panic!("reservations"),
    };
    let order: Vec<u128> = bench.on("d0").into_iter().map(request_of).collect();
    assert_eq!(order.len(), 7);
    let place = |id: u128| order.iter().position(|of| *of == id).expect("served");
    assert!(
        place(1) < place(11) && place(11) < place(3) && place(12) < place(4),
        "{order:?}"
    );
}
