//! Random histories. Whatever happens, every sequence that is not cancelled or failed gets the answer of an undisturbed
//! run, and every block comes back. (`Bench` compares and audits after every call.)

use std::sync::Arc;

use proptest::prelude::*;
use proptest::sample::Index;
use protocol::sampling::{SamplingParams, StopRules};
use protocol::window::Groups;

use super::{Bench, MODEL, Observed, groups, prompt, spec};
use crate::beam::BeamError;
use crate::engine::{AddError, Engine};
use crate::limits::EngineLimits;
use crate::plan::SequenceId;
use crate::reservation::{Awaited, CommitError};
use crate::sequence::{OnFinish, SequenceSpec};

#[derive(Clone, Debug)]
enum Call {
    Add(Shape),
    /// A sequence that has generated some tokens elsewhere.
    AddResumed(Shape, usize),
    /// Choices of one prompt, some of which have generated tokens elsewhere.
    AddChoices(Shape, Vec<usize>),
    AddBeams(Shape, usize),
    Reserve {
        tokens: usize,
        growth: usize,
        choices: usize,
    },
    /// A reservation for a prompt that is known, `true`: for a beam search.
    Await(Shape, usize, bool),
    /// Its KV comes.
    Arrive(Index),
    Commit(Index, Shape),
    CommitBeams(Index, Shape),
    Drop(Index),
    Cancel(Index),
    Release(Index),
    Step,
    /// A step, with other calls between its plan and its end.
    Interrupted(Vec<Self>),
    /// As `Interrupted`, and the runner fails.
    Fail(Vec<Self>),
}

#[derive(Clone, Debug)]
struct Shape {
    prompt_len: usize,
    max_tokens: u32,
    /// Size of a set of tokens that end the sequence.
    stops: u32,
    sampling: SamplingParams,
    prompt_logprobs: Option<u8>,
    hold: bool,
    first_only: Option<u32>,
    /// Its first tokens are those of one of a few prompts.
    family: u32,
    shared: usize,
    cache_key: u64,
}

fn shape() -> impl Strategy<Value = Shape> {
    let sampling = (any::<bool>(), 0u64..4, any::<bool>(), prop::option::of(0u8..3)).prop_map(
        |(greedy, seed, penalty, top_logprobs)| SamplingParams {
            greedy,
            seed,
            frequency_penalty: if penalty { 0.5 } else { 0.0 },
            top_logprobs,
            ..SamplingParams::greedy()
        },
    );
    let first_only = prop::option::weighted(0.2, prop_oneof![3 => Just(1u32), 1 => Just(0), 1 => 2u32..5]);
    let flags = (prop::option::of(0u8..3), any::<bool>(), first_only);
    let numbers = (1usize..30, 1u32..30, prop_oneof![3 => Just(0u32), 1 => 1u32..200]);
    let origin = (0u32..3, 0usize..40, prop_oneof![4 => Just(0u64), 1 => Just(1)]);
    (numbers, sampling, flags, origin).prop_map(|((prompt_len, max_tokens, stops), sampling, flags, origin)| Shape {
        prompt_len,
        max_tokens,
        stops,
        sampling,
        prompt_logprobs: flags.0,
        hold: flags.1,
        first_only: flags.2,
        family: 1_000 + origin.0,
        shared: origin.1,
        cache_key: origin.2,
    })
}

fn simple_call() -> impl Strategy<Value = Call> {
    prop_oneof![
        4 => shape().prop_map(Call::Add),
        1 => (shape(), 1usize..6).prop_map(|(shape, generated)| Call::AddResumed(shape, generated)),
        1 => (shape(), prop::collection::vec(0usize..5, 1..4)).prop_map(|(shape, all)| Call::AddChoices(shape, all)),
        1 => (shape(), 1usize..4).prop_map(|(shape, width)| Call::AddBeams(shape, width)),
        3 => (1usize..30, 0usize..30, prop_oneof![Just(1usize), 1usize..4])
            .prop_map(|(tokens, growth, choices)| Call::Reserve { tokens, growth, choices }),
        3 => (shape(), prop_oneof![Just(1usize), 1usize..4], prop::bool::weighted(0.2))
            .prop_map(|(shape, choices, beams)| Call::Await(shape, choices, beams)),
        3 => any::<Index>().prop_map(Call::Arrive),
        3 => (any::<Index>(), shape()).prop_map(|(index, shape)| Call::Commit(index, shape)),
        1 => (any::<Index>(), shape()).prop_map(|(index, shape)| Call::CommitBeams(index, shape)),
        1 => any::<Index>().prop_map(Call::Drop),
        2 => any::<Index>().prop_map(Call::Cancel),
        3 => any::<Index>().prop_map(Call::Release),
    ]
}

fn call() -> impl Strategy<Value = Call> {
    let between = || prop::collection::vec(simple_call(), 0..4);
    prop_oneof![
        8 => simple_call(),
        8 => Just(Call::Step),
        3 => between().prop_map(Call::Interrupted),
        1 => between().prop_map(Call::Fail),
    ]
}

fn limits() -> impl Strategy<Value = EngineLimits> {
    let shares = (1usize..5, 1usize..9, 0usize..20, 1usize..12, 1usize..12);
    let flags = (prop::bool::weighted(0.8), groups(24));
    (2usize..24, shares, flags).prop_map(
        |(blocks, (block_tokens, max_num_seqs, more_rows, chunk, mixed), (prefix_cache, groups))| {
            let whole = EngineLimits {
                total_blocks: blocks,
                block_tokens,
                max_num_seqs,
                max_batch_tokens: max_num_seqs + more_rows,
                prefill_chunk_tokens: chunk,
                mixed_prefill_tokens: mixed,
                mixed_prefill_time: std::time::Duration::ZERO,
                max_seq_len: (blocks * block_tokens).min(50),
                prefix_cache,
                groups: Groups::ONE,
            };
            // Sequences that are longer than the pool.
            let windowed = EngineLimits {
                total_blocks: blocks * groups.count(),
                max_seq_len: 50,
                groups,
                ..whole
            };
            if windowed.longest_blocks() <= windowed.total_blocks {
                windowed
            } else {
                whole
            }
        },
    )
}

fn sequence_of(shape: &Shape, salt: u32, limits: &EngineLimits) -> SequenceSpec {
    let stop = StopRules {
        max_tokens: shape.max_tokens,
        eos_token_ids: (0..shape.stops).map(|i| i * 2 % MODEL.vocab_size).collect(),
        ignore_eos: false,
        stop_token_ids: (0..shape.stops).map(|i| (i * 2 + 1) % MODEL.vocab_size).collect(),
    };
    let len = shape.prompt_len.min(limits.max_seq_len - 1);
    let mut tokens = prompt(shape.family, len.min(shape.shared));
    tokens.extend(prompt(salt, len - tokens.len()));
    SequenceSpec {
        adapter: None,
        cache_key: shape.cache_key,
        sampling: Arc::new(shape.sampling.clone()),
        stop,
        prompt_logprobs: shape.prompt_logprobs,
        on_finish: if shape.hold { OnFinish::Hold } else { OnFinish::Release },
        first_only: shape.first_only,
        ..spec(tokens, 1)
    }
}

fn pick(bench: &Bench, index: &Index) -> Option<SequenceId> {
    (!bench.observed.is_empty()).then(|| *bench.observed.keys().nth(index.index(bench.observed.len())).unwrap())
}

fn perform(bench: &mut Bench, call: &Call) {
    let limits = *bench.engine.limits();
    let salt = bench.observed.len() as u32;
    match call {
        Call::Add(shape) => {
            bench.add(sequence_of(shape, salt, &limits));
        }
        Call::AddResumed(shape, generated) => add_resumed(bench, shape, *generated, salt),
        Call::AddChoices(shape, generated) => {
            bench.add_choices(&sequence_of(shape, salt, &limits), generated);
        }
        Call::AddBeams(shape, width) => add_beams(bench, shape, *width, salt),
        Call::Reserve {
            tokens,
            growth,
            choices,
        } => reserve(bench, (*tokens).min(limits.max_seq_len - 1), *growth, *choices),
        Call::Await(shape, choices, beams) => expect_prompt(bench, shape, *choices, *beams, salt),
        Call::Arrive(index) => arrive(bench, index),
        Call::Commit(index, shape) => commit(bench, index, shape, salt),
        Call::CommitBeams(index, shape) => commit_beams(bench, index, shape, salt),
        Call::Drop(index) => {
            if !bench.reservations.is_empty() {
                let reservation = bench.reservations.remove(index.index(bench.reservations.len()));
                assert!(bench.engine.release_reservation(reservation));
                bench.audit();
            } else if !bench.promised.is_empty() {
                let (reservation, ..) = bench.promised.remove(index.index(bench.promised.len()));
                assert!(bench.engine.release_reservation(reservation));
                bench.audit();
            }
        }
        Call::Cancel(index) if index.index(4) == 0 && !bench.beams.is_empty() => {
            let id = *bench.beams.keys().nth(index.index(bench.beams.len())).unwrap();
            let known = !bench.beams[&id].ended;
            assert_eq!(bench.cancel(id), known);
        }
        Call::Cancel(index) => {
            if let Some(id) = pick(bench, index) {
                let known = bench.engine.num_computed(id).is_some();
                assert_eq!(bench.cancel(id), known);
            }
        }
        Call::Release(index) => {
            if let Some(id) = pick(bench, index) {
                let held = bench.observed[&id].ended && bench.engine.num_computed(id).is_some();
                assert_eq!(bench.engine.release_held(id), held);
                bench.audit();
            }
        }
        Call::Step => {
            bench.step();
        }
        Call::Interrupted(calls) | Call::Fail(calls) => {
            let Some(plan) = bench.engine.plan().cloned() else {
                return;
            };
            for inner in calls {
                perform(bench, inner);
            }
            assert_eq!(format!("{:?}", bench.engine.plan().unwrap()), format!("{plan:?}"));
            if matches!(call, Call::Fail(_)) {
                bench.fail(&plan);
            } else {
                bench.execute(&plan);
            }
        }
    }
}

/// A sequence that has some tokens from elsewhere.
fn add_resumed(bench: &mut Bench, shape: &Shape, generated: usize, salt: u32) {
    let limits = *bench.engine.limits();
    let mut spec = sequence_of(shape, salt, &limits);
    let (tokens, _) = bench.model.generate(
        &spec.token_ids,
        spec.prompt_len,
        &spec.sampling,
        &spec.stop,
        limits.max_seq_len,
    );
    // Its last token would have ended it.
    let known = tokens[..tokens.len() - 1].iter().take(generated);
    spec.token_ids.extend(known.map(|token| token.token));
    bench.add(spec);
}

fn add_beams(bench: &mut Bench, shape: &Shape, width: usize, salt: u32) {
    let search = SequenceSpec {
        prompt_logprobs: shape.prompt_logprobs,
        ..search_of(shape, salt, bench.engine.limits())
    };
    match bench.add_beams(search, width) {
        Ok(_) | Err(AddError::Beam(BeamError::Width { .. } | BeamError::Blocks { .. })) => {}
        Err(error) => panic!("{error}"),
    }
}

fn reserve(bench: &mut Bench, tokens: usize, growth: usize, choices: usize) {
    let before = bench.engine.stats();
    match bench.engine.reserve_choices(tokens, growth, choices) {
        Ok(reservation) => bench.reservations.push(reservation),
        Err(_) => assert_eq!(bench.engine.stats(), before, "a refused reservation changed something"),
    }
    bench.audit();
}

fn expect_prompt(bench: &mut Bench, shape: &Shape, choices: usize, beams: bool, salt: u32) {
    let limits = *bench.engine.limits();
    let shape = Shape {
        prompt_logprobs: None,
        first_only: None,
        ..shape.clone()
    };
    let spec = if beams {
        search_of(&shape, salt, &limits)
    } else {
        sequence_of(&shape, salt, &limits)
    };
    let num_computed = spec.prompt_len - usize::from(beams);
    let before = bench.engine.stats();
    let prompt = Awaited {
        token_ids: &spec.token_ids,
        cache_key: spec.cache_key,
        num_computed,
    };
    match bench
        .engine
        .reserve_prompt(&prompt, spec.stop.max_tokens as usize, choices)
    {
        Ok(reservation) => {
            assert!(reservation.have_blocks().full as usize * limits.block_tokens <= num_computed);
            bench.promised.push((reservation, num_computed, spec));
        }
        Err(_) => assert_eq!(bench.engine.stats(), before, "a refused reservation changed something"),
    }
    bench.audit();
}

fn arrive(bench: &mut Bench, index: &Index) {
    if bench.promised.is_empty() {
        return;
    }
    let at = index.index(bench.promised.len());
    let (reservation, num_computed, spec) = bench.promised.remove(at);
    if num_computed < spec.prompt_len {
        let width = reservation.choices();
        match bench.commit_beams(reservation, spec, width) {
            Ok(_) | Err(CommitError::Beam(BeamError::Blocks { .. })) => {}
            Err(error) => panic!("{error}"),
        }
    } else if spec.stop.max_tokens < 2 || spec.prompt_len + 2 > bench.engine.limits().max_seq_len {
        assert!(bench.engine.release_reservation(reservation));
    } else {
        bench.commit_choices(reservation, &spec);
    }
    bench.audit();
}

/// Commits one of the open reservations, if the sequence's first token does not end it.
fn commit(bench: &mut Bench, index: &Index, shape: &Shape, salt: u32) {
    if bench.reservations.is_empty() || shape.max_tokens < 2 {
        return;
    }
    let at = index.index(bench.reservations.len());
    let tokens = bench.reservations[at].tokens();
    if tokens + 2 > bench.engine.limits().max_seq_len {
        return;
    }
    let shape = Shape {
        prompt_len: tokens,
        prompt_logprobs: None,
        ..shape.clone()
    };
    let spec = sequence_of(&shape, salt, bench.engine.limits());
    let reservation = bench.reservations.remove(at);
    if reservation.choices() == 1 {
        bench.commit(reservation, spec);
    } else {
        bench.commit_choices(reservation, &spec);
    }
}

/// Makes a beam search of one of the open reservations, as wide as it was made for.
fn commit_beams(bench: &mut Bench, index: &Index, shape: &Shape, salt: u32) {
    if bench.reservations.is_empty() {
        return;
    }
    let reservation = bench.reservations.remove(index.index(bench.reservations.len()));
    let shape = Shape {
        prompt_len: reservation.tokens(),
        ..shape.clone()
    };
    let search = search_of(&shape, salt, bench.engine.limits());
    let width = reservation.choices();
    match bench.commit_beams(reservation, search, width) {
        Ok(_) | Err(CommitError::Beam(BeamError::Blocks { .. })) => {}
        Err(error) => panic!("{error}"),
    }
}

/// As `sequence_of`, without what a beam search does not know.
fn search_of(shape: &Shape, salt: u32, limits: &EngineLimits) -> SequenceSpec {
    let shape = Shape {
        prompt_logprobs: None,
        first_only: None,
        max_tokens: shape.max_tokens.min(8),
        sampling: SamplingParams {
            frequency_penalty: 0.0,
            ..shape.sampling.clone()
        },
        ..shape.clone()
    };
    sequence_of(&shape, salt, limits)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn every_answer_is_the_undisturbed_one_and_every_block_comes_back(
        limits in limits(),
        horizon in prop_oneof![Just(0usize), 1usize..40],
        calls in prop::collection::vec(call(), 1..120),
    ) {
        let mut bench = Bench::over(Engine::with_horizon(limits, horizon).unwrap());
        for call in &calls {
            perform(&mut bench, call);
        }
        // Everybody who holds blocks from outside lets go; then the rest must come to its end.
        let awaited = std::mem::take(&mut bench.promised).into_iter().map(|(reservation, ..)| reservation);
        for reservation in std::mem::take(&mut bench.reservations).into_iter().chain(awaited) {
            bench.engine.release_reservation(reservation);
        }
        loop {
            let held = bench.observed.iter().filter(|(_, observed)| observed.ended).map(|(id, _)| *id);
            for id in held.collect::<Vec<_>>() {
                bench.engine.release_held(id);
            }
            if bench.step().is_none() {
                break;
            }
        }
        bench.assert_complete_and_idle();
    }

    /// The same requests under any limits: the same answers (each is compared with the undisturbed one), and no step more
    /// than the work needs if nothing is computed twice.
    #[test]
    fn answers_do_not_depend_on_chunks_batches_or_the_pool(
        limits in limits(),
        horizon in prop_oneof![Just(0usize), 1usize..40],
        shapes in prop::collection::vec(shape(), 1..24),
    ) {
        let mut bench = Bench::over(Engine::with_horizon(limits, horizon).unwrap());
        for (salt, shape) in shapes.iter().enumerate() {
            bench.add(sequence_of(&Shape { hold: false, ..shape.clone() }, salt as u32, &limits));
        }
        let steps = bench.run() as u64;
        bench.assert_complete_and_idle();
        let stats = bench.engine.stats();
        prop_assert!(steps <= stats.rows, "{} steps for {} rows", steps, stats.rows);
        let sampled = |observed: &Observed| (observed.seen + observed.others.len()) as u64;
        prop_assert_eq!(stats.sampled_tokens, bench.observed.values().map(sampled).sum::<u64>());
        // Every token is computed but the last.
        let generated: u64 = bench.observed.values().map(|observed| observed.seen.saturating_sub(1) as u64).sum();
        let prompts: u64 = bench.observed.values().map(|observed| observed.spec.prompt_len as u64).sum();
        let reused = stats.cache_hit_tokens + stats.cache_resumed_tokens;
        prop_assert_eq!(stats.rows + reused, prompts + generated + stats.preempted_rows);
        let hits: u64 = bench.observed.values().map(|observed| u64::from(observed.cached_tokens.unwrap())).sum();
        prop_assert_eq!(stats.cache_hit_tokens, hits);
    }
}
