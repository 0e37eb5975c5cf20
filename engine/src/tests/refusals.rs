//! What the engine does not accept, and what it says.

use super::{Bench, limits, prompt, spec};
use crate::engine::{AddError, Engine, StepError};
use crate::event::EngineEvent;
use crate::limits::{EngineLimits, LimitsError};
use crate::plan::{SequenceId, StepOutput};
use crate::reservation::{CommitError, ReserveError};
use crate::runner::{NoObserver, Runner};
use crate::sequence::{SequenceSpec, SpecError};

#[test]
fn an_output_that_contradicts_its_plan_fails_the_step() {
    type Damage = fn(&mut StepOutput);
    let damages: [(Damage, &str); 8] = [
        (|o| o.sampled.truncate(1), "1 tokens were sampled instead of 2"),
        (
            |o| o.sampled.swap(0, 1),
            "sequence 1 has a token at position 0; expected: sequence 0 at position 0",
        ),
        (
            |o| o.sampled[1].1.position = 4,
            "sequence 1 has a token at position 4; expected: sequence 1 at position 0",
        ),
        (
            |o| o.prompt_logprobs.clear(),
            "0 sequences have prompt log-probabilities instead of 1",
        ),
        (
            |o| o.prompt_logprobs[0].0 = SequenceId(7),
            "sequence 7 has 4 prompt log-probabilities; expected: sequence 1 with 4",
        ),
        (
            |o| {
                o.prompt_logprobs[0]
                    .1
                    .push(protocol::sampling::PromptLogprob::default())
            },
            "sequence 1 has 5 prompt log-probabilities; expected: sequence 1 with 4",
        ),
        (
            |o| o.failed.push((SequenceId(1), String::new())),
            "2 tokens were sampled instead of 1",
        ),
        (
            |o| o.failed.push((SequenceId(7), String::new())),
            "sequence 7 failed, which is not planned or not in the plan's order",
        ),
    ];
    for (damage, reason) in damages {
        let mut bench = Bench::new(limits());
        let ids = [
            bench.add(spec(prompt(1, 4), 2)),
            bench.add(SequenceSpec {
                prompt_logprobs: Some(0),
                ..spec(prompt(2, 5), 2)
            }),
        ];
        let plan = bench.engine.plan().unwrap().clone();
        let mut output = bench.runner.run(&plan, &mut NoObserver).unwrap();
        damage(&mut output);
        let mut events = Vec::new();
        let error = bench.engine.apply(&output, &mut events).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("the output of step 1 contradicts its plan: {reason}")
        );
        assert_eq!(
            events,
            ids.map(|id| EngineEvent::Failed {
                id,
                message: error.to_string()
            })
        );
        bench.audit();
        assert_eq!(bench.engine.stats().free_blocks, 64);
        let again = bench.engine.apply(&output, &mut events);
        assert!(matches!(again, Err(StepError::NoStep)));
    }
}

#[test]
fn impossible_sequences_are_refused_with_the_reason() {
    let mut engine = Engine::new(limits()).unwrap();
    let mut refused = |spec: SequenceSpec| match engine.add(spec) {
        Err(AddError::Spec(error)) => error,
        other => panic!("{other:?}"),
    };
    let with_prompt_len = |prompt_len| SequenceSpec {
        prompt_len,
        ..spec(prompt(1, 5), 2)
    };
    assert_eq!(
        refused(spec(Vec::new(), 1)),
        SpecError::PromptLen {
            prompt_len: 0,
            tokens: 0
        }
    );
    assert_eq!(
        refused(with_prompt_len(0)),
        SpecError::PromptLen {
            prompt_len: 0,
            tokens: 5
        }
    );
    assert_eq!(
        refused(with_prompt_len(6)),
        SpecError::PromptLen {
            prompt_len: 6,
            tokens: 5
        }
    );
    assert_eq!(
        refused(spec(prompt(1, 64), 1)),
        SpecError::TooLong { tokens: 64, limit: 63 }
    );
    assert_eq!(
        refused(with_prompt_len(3)),
        SpecError::NothingLeft {
            generated: 2,
            max_tokens: 2
        }
    );
    assert_eq!(
        refused(spec(prompt(1, 5), 0)),
        SpecError::NothingLeft {
            generated: 0,
            max_tokens: 0
        }
    );
    assert_eq!(engine.stats().waiting, 0);
}

#[test]
fn impossible_reservations_are_refused_with_the_reason() {
    let mut engine = Engine::new(limits()).unwrap();
    assert_eq!(engine.reserve(0, 1).unwrap_err(), ReserveError::Empty);
    assert_eq!(
        engine.reserve(64, 1).unwrap_err(),
        ReserveError::TooLong { tokens: 64, limit: 63 }
    );
    // Whatever growth is asked for, the longest length bounds it.
    let reservation = engine.reserve(63, usize::MAX).unwrap();
    assert!(engine.release_reservation(reservation));
}

#[test]
fn an_impossible_commit_is_refused_and_releases_the_blocks() {
    let mut engine = Engine::new(limits()).unwrap();
    let mut refused = |num_computed: usize, spec: SequenceSpec| {
        let reservation = engine.reserve(6, 4).unwrap();
        let error = engine.commit(reservation, spec, num_computed).unwrap_err();
        engine.check_invariants().unwrap();
        assert_eq!(engine.stats().free_blocks, 64);
        error
    };
    let tokens = || SequenceSpec {
        prompt_len: 6,
        ..spec(prompt(1, 7), 4)
    };
    let out_of_range = |num_computed, limit| CommitError::NumComputed {
        num_computed,
        limit,
        reserved: 6,
    };
    assert_eq!(refused(0, tokens()), out_of_range(0, 6));
    assert_eq!(refused(7, tokens()), out_of_range(7, 6));
    assert_eq!(refused(6, spec(prompt(1, 6), 4)), out_of_range(6, 5));
    assert_eq!(
        refused(
            6,
            SequenceSpec {
                prompt_logprobs: Some(0),
                ..tokens()
            }
        ),
        CommitError::PromptLogprobs
    );
    let too_long = SpecError::TooLong { tokens: 64, limit: 63 };
    assert_eq!(refused(6, spec(prompt(1, 64), 4)), CommitError::Spec(too_long));
}

#[test]
fn a_reservation_of_another_engine_is_not_taken() {
    let (mut ours, mut theirs) = (Engine::new(limits()).unwrap(), Engine::new(limits()).unwrap());
    let own = ours.reserve(6, 4).unwrap();
    let foreign = theirs.reserve(6, 4).unwrap();
    assert_eq!(
        ours.commit(foreign, spec(prompt(1, 7), 4), 6),
        Err(CommitError::Unknown)
    );
    let foreign = theirs.reserve(6, 4).unwrap();
    assert!(!ours.release_reservation(foreign));
    assert!(ours.release_reservation(own));
    assert_eq!(ours.stats().free_blocks, 64);
    ours.check_invariants().unwrap();
}

#[test]
fn a_dropped_reservation_is_reported() {
    let mut engine = Engine::new(limits()).unwrap();
    let kept = engine.reserve(3, 4).unwrap();
    drop(engine.reserve(6, 4).unwrap());
    let error = engine.check_invariants().unwrap_err();
    assert_eq!(
        error.problems,
        ["a reservation of 2 blocks for 6 tokens was dropped without being released"]
    );
    assert_eq!(
        (kept.tokens(), kept.blocks().len(), engine.stats().owned_blocks),
        (3, 1, 3)
    );
}

#[test]
fn limits_that_cannot_work_are_refused_with_the_reason() {
    let refused = |limits: EngineLimits| Engine::new(limits).unwrap_err();
    let zero = |field| LimitsError::Zero { field };
    assert_eq!(
        refused(EngineLimits {
            total_blocks: 0,
            ..limits()
        }),
        zero("total_blocks")
    );
    assert_eq!(
        refused(EngineLimits {
            block_tokens: 0,
            ..limits()
        }),
        zero("block_tokens")
    );
    assert_eq!(
        refused(EngineLimits {
            max_num_seqs: 0,
            ..limits()
        }),
        zero("max_num_seqs")
    );
    assert_eq!(
        refused(EngineLimits {
            max_batch_tokens: 0,
            ..limits()
        }),
        zero("max_batch_tokens")
    );
    assert_eq!(
        refused(EngineLimits {
            prefill_chunk_tokens: 0,
            ..limits()
        }),
        zero("prefill_chunk_tokens")
    );
    let short = EngineLimits {
        max_seq_len: 1,
        ..limits()
    };
    assert_eq!(refused(short), LimitsError::ShortSequence { max_seq_len: 1 });
    let small_batch = EngineLimits {
        max_batch_tokens: 7,
        ..limits()
    };
    assert_eq!(
        refused(small_batch),
        LimitsError::SmallBatch {
            max_batch_tokens: 7,
            max_num_seqs: 8
        }
    );
    let small_pool = EngineLimits {
        max_seq_len: 257,
        ..limits()
    };
    assert_eq!(
        refused(small_pool),
        LimitsError::SmallPool {
            max_seq_len: 257,
            pool_tokens: 256
        }
    );
    let huge = EngineLimits {
        total_blocks: 1 << 32,
        ..limits()
    };
    assert_eq!(refused(huge), LimitsError::TooLarge { largest: 1 << 32 });
}
