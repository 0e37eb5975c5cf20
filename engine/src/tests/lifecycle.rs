//! Every way into the engine and out of it.

use std::sync::Arc;

use protocol::sampling::{FinishReason, SamplingParams, StopRules};

use super::{Bench, MODEL, limits, prompt, spec, stop_at};
use crate::engine::{Engine, StepError};
use crate::event::EngineEvent;
use crate::fake::ScriptedRunner;
use crate::limits::EngineLimits;
use crate::plan::SequenceId;
use crate::reservation::ReserveError;
use crate::runner::NoObserver;
use crate::sequence::{OnFinish, SequenceSpec};

#[test]
fn ends_by_eos_stop_token_or_length_wherever_they_fall() {
    let (tokens, _) = MODEL.generate(&prompt(1, 5), 5, &SamplingParams::greedy(), &stop_at(6), 64);
    for at in 0..5 {
        let token = tokens[at].token;
        let first = tokens.iter().position(|other| other.token == token).unwrap();
        let eos = StopRules {
            eos_token_ids: vec![token],
            ..stop_at(6)
        };
        let ignored = StopRules {
            ignore_eos: true,
            ..eos.clone()
        };
        let stop = StopRules {
            stop_token_ids: vec![token],
            ignore_eos: true,
            ..stop_at(6)
        };
        let cases = [
            (eos, first + 1, FinishReason::Eos),
            (ignored, 6, FinishReason::Length),
            (stop, first + 1, FinishReason::StopToken(token)),
            (stop_at(at as u32 + 1), at + 1, FinishReason::Length),
        ];
        for (stop, generated, reason) in cases {
            let mut bench = Bench::new(limits());
            let id = bench.add(SequenceSpec {
                stop,
                ..spec(prompt(1, 5), 1)
            });
            bench.run();
            bench.assert_complete_and_idle();
            assert_eq!(
                (bench.observed[&id].seen, bench.observed[&id].finish),
                (generated, Some(reason))
            );
        }
    }
}

#[test]
fn a_sequence_with_generated_tokens_goes_on_where_it_was() {
    let sampling = SamplingParams {
        greedy: false,
        seed: 3,
        presence_penalty: 0.5,
        ..SamplingParams::greedy()
    };
    let (whole, _) = MODEL.generate(&prompt(1, 9), 9, &sampling, &stop_at(8), 64);
    let mut tokens = prompt(1, 9);
    tokens.extend(whole[..5].iter().map(|token| token.token));
    let mut bench = Bench::new(limits());
    let id = bench.add(SequenceSpec {
        prompt_len: 9,
        sampling: Arc::new(sampling),
        prompt_logprobs: Some(0),
        ..spec(tokens, 8)
    });
    bench.run();
    bench.assert_complete_and_idle();
    assert_eq!(bench.observed[&id].expected, whole[5..]);
}

#[test]
fn first_only_ends_after_one_token_and_says_what_the_rules_say() {
    let token = MODEL.next_token(&prompt(1, 5), 5, &SamplingParams::greedy()).token;
    let eos = StopRules {
        eos_token_ids: vec![token],
        ..stop_at(9)
    };
    let cases = [
        (stop_at(9), None),
        (stop_at(1), Some(FinishReason::Length)),
        (eos, Some(FinishReason::Eos)),
    ];
    for (stop, finish) in cases {
        let mut bench = Bench::new(limits());
        let id = bench.add(SequenceSpec {
            stop,
            first_only: Some(1),
            prompt_logprobs: Some(0),
            ..spec(prompt(1, 5), 1)
        });
        bench.run();
        bench.assert_complete_and_idle();
        assert_eq!((bench.observed[&id].seen, bench.observed[&id].finish), (1, finish));
    }
    let mut bench = Bench::new(EngineLimits {
        max_seq_len: 6,
        ..limits()
    });
    let id = bench.add(SequenceSpec {
        first_only: Some(1),
        ..spec(prompt(1, 5), 9)
    });
    bench.run();
    assert_eq!(bench.observed[&id].finish, Some(FinishReason::Length));
}

#[test]
fn held_blocks_can_be_read_and_hold_the_prompt() {
    let mut bench = Bench::new(limits());
    let held = SequenceSpec {
        on_finish: OnFinish::Hold,
        first_only: Some(1),
        ..spec(prompt(1, 13), 9)
    };
    let id = bench.add(held);
    bench.step();
    assert_eq!(
        (
            bench.engine.num_computed(id),
            bench.engine.block_table(id).unwrap().len()
        ),
        (Some(8), 2)
    );
    bench.run();
    assert_eq!(bench.engine.num_computed(id), Some(13));
    let blocks = bench.engine.block_table(id).unwrap();
    assert_eq!(bench.runner.read_kv(blocks, 13).unwrap(), prompt(1, 13));
    assert!(bench.engine.release_held(id));
    assert_eq!(
        (bench.engine.num_computed(id), bench.engine.block_table(id)),
        (None, None)
    );
    bench.assert_complete_and_idle();
}

#[test]
fn prompt_logprobs_survive_chunks_and_a_preemption() {
    let tight = EngineLimits {
        total_blocks: 16,
        max_num_seqs: 2,
        prefill_chunk_tokens: 1,
        ..limits()
    };
    let mut bench = Bench::reckless(tight);
    bench.add(spec(prompt(1, 20), 40));
    bench.run_steps(24);
    // Is thrown out in the middle of its prompt, when the other one has grown.
    let id = bench.add(SequenceSpec {
        prompt_logprobs: Some(0),
        ..spec(prompt(2, 36), 2)
    });
    bench.run();
    bench.assert_complete_and_idle();
    assert!(bench.preempted > 0, "nobody was preempted");
    assert_eq!(bench.observed[&id].seen, 2);
}

#[test]
fn a_prompt_of_one_token_has_no_log_probabilities_to_report() {
    let mut bench = Bench::new(limits());
    bench.add(SequenceSpec {
        prompt_logprobs: Some(0),
        ..spec(vec![5], 2)
    });
    bench.run();
    bench.assert_complete_and_idle();
}

#[test]
fn cancel_frees_in_every_state_and_is_idempotent() {
    let mut bench = Bench::new(EngineLimits {
        max_num_seqs: 2,
        ..limits()
    });
    let running = bench.add(spec(prompt(1, 5), 9));
    let partly = bench.add(spec(prompt(2, 30), 9));
    let waiting = bench.add(spec(prompt(3, 5), 9));
    bench.step();
    assert_eq!((bench.engine.stats().running, bench.engine.stats().waiting), (2, 1));
    for id in [running, partly, waiting] {
        assert!(bench.cancel(id));
        assert!(!bench.cancel(id));
    }
    assert!(!bench.cancel(SequenceId(12345)));
    assert_eq!(bench.step(), None);
    bench.assert_complete_and_idle();
}

#[test]
fn a_sequence_cancelled_in_flight_says_nothing_and_keeps_its_blocks_until_the_step_is_over() {
    let mut bench = Bench::new(EngineLimits {
        total_blocks: 4,
        max_seq_len: 16,
        ..limits()
    });
    let (gone, stays) = (bench.add(spec(prompt(1, 8), 1)), bench.add(spec(prompt(2, 5), 3)));
    let plan = bench.engine.plan().unwrap().clone();
    assert!(bench.cancel(gone));
    assert_eq!(bench.engine.stats().owned_blocks, 4);
    assert!(matches!(
        bench.engine.reserve(4, 1),
        Err(ReserveError::NoBlocks { needed: 1, free: 0, .. })
    ));
    bench.execute(&plan);
    assert_eq!(bench.engine.stats().owned_blocks, 2);
    let reservation = bench.engine.reserve(8, 1).unwrap();
    assert!(bench.engine.release_reservation(reservation));
    bench.run();
    bench.assert_complete_and_idle();
    assert_eq!((bench.observed[&gone].seen, bench.observed[&stays].seen), (0, 3));
}

#[test]
fn a_sequence_cancelled_after_its_preemption_is_not_reported() {
    let mut bench = Bench::reckless(EngineLimits {
        total_blocks: 4,
        max_seq_len: 16,
        ..limits()
    });
    bench.add(spec(prompt(1, 4), 9));
    let younger = bench.add(spec(prompt(2, 4), 9));
    bench.run_steps(5);
    let plan = bench.engine.plan().unwrap().clone();
    assert_eq!((plan.sequences.len(), bench.engine.stats().preemptions), (1, 1));
    assert!(bench.cancel(younger));
    // `Bench` does not accept events of a sequence that was cancelled.
    bench.execute(&plan);
    bench.run();
    bench.assert_complete_and_idle();
}

#[test]
fn a_plan_in_flight_is_given_out_again_unchanged() {
    let mut bench = Bench::new(limits());
    bench.add(spec(prompt(1, 5), 2));
    let first = format!("{:?}", bench.engine.plan().unwrap());
    bench.add(spec(prompt(2, 5), 2));
    assert_eq!(format!("{:?}", bench.engine.plan().unwrap()), first);
    let plan = bench.engine.plan().unwrap().clone();
    bench.execute(&plan);
    assert_eq!(bench.engine.plan().unwrap().step, 2);
}

#[test]
fn a_failed_step_ends_its_sequences_and_no_others() {
    let mut bench = Bench::new(EngineLimits {
        max_num_seqs: 2,
        ..limits()
    });
    let held = SequenceSpec {
        on_finish: OnFinish::Hold,
        ..spec(prompt(1, 5), 9)
    };
    let (a, b, c) = (
        bench.add(held),
        bench.add(spec(prompt(2, 5), 9)),
        bench.add(spec(prompt(3, 5), 2)),
    );
    let plan = bench.engine.plan().unwrap().clone();
    bench.fail(&plan);
    assert!(bench.observed[&a].failed && bench.observed[&b].failed && !bench.observed[&c].failed);
    assert_eq!(bench.engine.stats().free_blocks, 64);
    bench.run();
    bench.assert_complete_and_idle();
    let mut events = Vec::new();
    bench.engine.fail_step("nothing is in flight", &mut events);
    assert_eq!(events, []);
}

#[test]
fn a_sequence_that_comes_to_nothing_ends_alone() {
    let mut bench = Bench::new(limits());
    let ids: Vec<SequenceId> = (0..4)
        .map(|salt| {
            bench.add(SequenceSpec {
                prompt_logprobs: Some(0),
                on_finish: OnFinish::Hold,
                ..spec(prompt(salt, 3), 4)
            })
        })
        .collect();
    bench.step();
    let plan = bench.engine.plan().unwrap().clone();
    bench.runner.break_next(ids[2]);
    bench.expect_failure(ids[2]);
    bench.execute(&plan);
    assert_eq!(bench.engine.block_table(ids[2]), None, "its blocks are not held");
    bench.run();
    for id in &ids {
        assert_eq!(bench.engine.release_held(*id), *id != ids[2]);
        assert_eq!(bench.observed[id].seen, if *id == ids[2] { 1 } else { 4 });
    }
    bench.assert_complete_and_idle();
}

#[test]
fn step_reports_a_runner_that_fails() {
    let mut engine = Engine::new(limits()).unwrap();
    let mut runner = ScriptedRunner::new(MODEL, 64, 4);
    let mut events = Vec::new();
    let mut step = |engine: &mut Engine, events: &mut Vec<EngineEvent>, broken: bool| {
        if broken {
            runner.fail_next("power cut");
        }
        engine.step(&mut runner, &mut NoObserver, events)
    };
    assert!(matches!(step(&mut engine, &mut events, false), Ok(None)));
    let id = engine.add(spec(prompt(1, 3), 5)).unwrap();
    assert_eq!(step(&mut engine, &mut events, false).unwrap().unwrap().rows, 3);
    assert!(matches!(&events[..], [EngineEvent::Token { .. }]));
    events.clear();
    assert!(matches!(
        step(&mut engine, &mut events, true),
        Err(StepError::Runner(_))
    ));
    assert_eq!(
        events,
        [EngineEvent::Failed {
            id,
            message: "step failed: power cut".to_owned()
        }]
    );
    assert!(matches!(step(&mut engine, &mut events, false), Ok(None)));
    engine.check_invariants().unwrap();
}
