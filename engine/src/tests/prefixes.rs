//! The prefix cache: what is used again, what is kept, what goes first.

use proptest::prelude::*;
use protocol::moved::HaveBlocks;

use super::{Bench, MODEL, limits, prompt, spec};
use crate::engine::Engine;
use crate::fake::ScriptedRunner;
use crate::limits::EngineLimits;
use crate::plan::{BlockId, SequenceId};
use crate::reservation::{Awaited, CommitError, Reservation};
use crate::runner::NoObserver;
use crate::sequence::{OnFinish, SequenceSpec};

/// Blocks of 4 tokens.
fn cached(total_blocks: usize) -> EngineLimits {
    EngineLimits {
        total_blocks,
        max_seq_len: (total_blocks * 4).min(64),
        prefix_cache: true,
        ..limits()
    }
}

fn bench(total_blocks: usize) -> Bench {
    Bench::new(cached(total_blocks))
}

/// Runs a sequence to its end, alone; its blocks that were computed are cached then. How many tokens it found cached.
fn serve(bench: &mut Bench, spec: SequenceSpec) -> u32 {
    let id = bench.add(spec);
    bench.run();
    bench.observed[&id].cached_tokens.unwrap()
}

/// The first `shared` tokens of prompt 1, then `own` tokens of prompt `salt`.
fn fork(shared: usize, salt: u32, own: usize) -> Vec<u32> {
    let mut tokens = prompt(1, shared);
    tokens.extend(prompt(salt, own));
    tokens
}

fn table(bench: &Bench, id: SequenceId) -> Vec<BlockId> {
    bench.engine.block_table(id).unwrap().to_vec()
}

#[test]
fn a_prompt_that_was_computed_is_computed_again_only_in_its_last_block() {
    for (len, expected) in [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (13, 12), (16, 12)] {
        let mut bench = bench(64);
        assert_eq!(serve(&mut bench, spec(prompt(1, len), 1)), 0);
        let rows = bench.engine.stats().rows;
        assert_eq!(serve(&mut bench, spec(prompt(1, len), 1)), expected, "{len} tokens");
        assert_eq!(bench.engine.stats().rows - rows, len as u64 - u64::from(expected));
        bench.assert_complete_and_idle();
    }
}

#[test]
fn what_was_generated_is_found_again_too() {
    let mut bench = bench(64);
    let id = bench.add(spec(prompt(1, 6), 8));
    bench.run();
    let mut tokens = prompt(1, 6);
    tokens.extend(bench.observed[&id].expected.iter().map(|token| token.token));
    tokens.extend(prompt(9, 5));
    // 13 of the 14 tokens have KV: three blocks are full.
    assert_eq!(serve(&mut bench, spec(tokens, 3)), 12);
}

#[test]
fn blocks_are_told_by_the_names_that_others_compute() {
    let mut bench = bench(64);
    let id = bench.add(SequenceSpec {
        cache_key: 7,
        ..spec(prompt(1, 6), 8)
    });
    bench.run();
    let mut tokens = prompt(1, 6);
    tokens.extend(bench.observed[&id].expected.iter().map(|token| token.token));
    // The last token has no KV.
    let names = protocol::prefix::block_hashes(&tokens[..13], 4, 7);
    assert_eq!(bench.cached_names, names.into_iter().collect());
}

#[test]
fn changes_that_nobody_asks_for_are_not_kept_for_ever() {
    let limits = cached(8);
    let (mut engine, mut runner) = (Engine::new(limits).unwrap(), ScriptedRunner::new(MODEL, 8, 4));
    let (mut events, mut changes) = (Vec::new(), Vec::new());
    for salt in 0..20 {
        engine.add(spec(prompt(salt, 20), 1)).unwrap();
        while engine
            .step(&mut runner, &mut NoObserver, &mut events)
            .unwrap()
            .is_some()
        {}
    }
    assert!(!engine.take_cache_changes(&mut changes));
    assert_eq!(changes.len(), 8);
    assert!(engine.take_cache_changes(&mut changes) && changes.len() == 8);
    let last = protocol::prefix::block_hashes(&prompt(19, 20), 4, 0);
    assert!(
        last.iter()
            .all(|name| engine.cached_names().any(|cached| cached == *name))
    );
}

#[test]
fn hits_end_where_the_prompts_part() {
    let mut bench = bench(64);
    serve(&mut bench, spec(fork(10, 2, 9), 1));
    assert_eq!(serve(&mut bench, spec(fork(10, 3, 9), 1)), 8);
    assert_eq!(serve(&mut bench, spec(fork(10, 2, 20), 1)), 16);
    assert_eq!(serve(&mut bench, spec(fork(3, 2, 9), 1)), 0);
    // The same tokens at another place are not the same.
    assert_eq!(serve(&mut bench, spec(prompt(1, 10)[4..].to_vec(), 1)), 0);
}

#[test]
fn only_sequences_of_one_key_share() {
    let mut bench = bench(64);
    let with = |key| SequenceSpec {
        cache_key: key,
        ..spec(prompt(1, 9), 1)
    };
    assert_eq!(serve(&mut bench, with(1)), 0);
    assert_eq!(serve(&mut bench, with(2)), 0);
    assert_eq!(serve(&mut bench, with(1)), 8);
    assert_eq!(serve(&mut bench, with(0)), 0);
}

#[test]
fn log_probabilities_of_a_prompt_are_computed_and_fill_the_cache() {
    let mut bench = bench(64);
    let with = |prompt_logprobs| SequenceSpec {
        prompt_logprobs,
        ..spec(prompt(1, 13), 2)
    };
    // `Bench` compares the log-probabilities.
    assert_eq!(serve(&mut bench, with(Some(0))), 0);
    assert_eq!(serve(&mut bench, with(Some(0))), 0);
    assert_eq!(serve(&mut bench, with(None)), 12);
    let stats = bench.engine.stats();
    assert_eq!((stats.cache_queried_tokens, stats.cache_hit_tokens), (13, 12));
}

#[test]
fn without_a_cache_nothing_is_kept() {
    let mut bench = Bench::new(limits());
    for _ in 0..2 {
        assert_eq!(serve(&mut bench, spec(prompt(1, 13), 2)), 0);
    }
    let stats = bench.engine.stats();
    assert_eq!((stats.cached_blocks, stats.cache_queried_tokens), (0, 0));
}

#[test]
fn a_running_sequence_shares_its_blocks_and_keeps_them() {
    let mut bench = bench(16);
    let first = bench.add(spec(prompt(1, 9), 9));
    bench.run_steps(2);
    let second = bench.add(spec(prompt(1, 9), 9));
    bench.step();
    assert_eq!(table(&bench, first)[..2], table(&bench, second)[..2]);
    assert_eq!(bench.engine.stats().owned_blocks, 4);
    // Nobody gets what a sequence refers to, even if its owner leaves.
    bench.cancel(first);
    assert_eq!(bench.engine.stats().owned_blocks, 3);
    let reservation = bench.engine.reserve(12, 1).unwrap();
    assert!(
        reservation
            .blocks()
            .iter()
            .all(|block| !table(&bench, second).contains(block))
    );
    bench.reservations.push(reservation);
    bench.run();
    let reservation = bench.reservations.pop().unwrap();
    bench.engine.release_reservation(reservation);
    bench.assert_complete_and_idle();
}

#[test]
fn of_two_that_compute_the_same_at_once_one_wins() {
    let mut bench = bench(64);
    let (first, second) = (bench.add(spec(prompt(1, 16), 9)), bench.add(spec(prompt(1, 16), 9)));
    bench.step();
    assert_eq!(
        bench.engine.stats().owned_blocks,
        2,
        "the second refers to the first one's blocks"
    );
    assert_eq!(table(&bench, first), table(&bench, second));
    bench.run();
    bench.assert_complete_and_idle();
    // A sequence that ends and whose blocks are read keeps its own.
    let held = |salt| SequenceSpec {
        on_finish: OnFinish::Hold,
        first_only: Some(1),
        ..spec(prompt(salt, 8), 9)
    };
    let (first, second) = (bench.add(held(5)), bench.add(held(5)));
    let plan = bench.engine.plan().unwrap().clone();
    let before: Vec<BlockId> = plan.block_ids.clone();
    bench.execute(&plan);
    assert_eq!([table(&bench, first), table(&bench, second)].concat(), before);
    for id in [first, second] {
        bench.engine.release_held(id);
    }
    bench.assert_complete_and_idle();
}

#[test]
fn the_end_of_what_was_used_longest_ago_goes_first() {
    let mut bench = bench(8);
    // Two prompts with two blocks in common and one of their own each; then a third one.
    serve(&mut bench, spec(fork(8, 2, 5), 1));
    serve(&mut bench, spec(fork(8, 3, 5), 1));
    serve(&mut bench, spec(prompt(4, 9), 1));
    let stats = bench.engine.stats();
    assert_eq!((stats.free_blocks, stats.cached_blocks), (2, 6));
    let mut take = |blocks: usize| {
        let reservation = bench.engine.reserve(blocks * 4, 0).unwrap();
        bench.engine.release_reservation(reservation);
        bench.engine.check_invariants().unwrap();
        let stats = bench.engine.stats();
        (stats.cached_blocks, stats.cache_evictions)
    };
    assert_eq!(take(2), (6, 0), "free blocks first");
    assert_eq!(take(3), (5, 1), "the end of the first prompt");
    assert_eq!(take(4), (4, 2), "the end of the second prompt");
    // The common beginning was last used by the second prompt, before the third.
    assert_eq!(take(6), (2, 4));
    assert_eq!(serve(&mut bench, spec(prompt(4, 9), 1)), 8);
    assert_eq!(serve(&mut bench, spec(fork(8, 2, 5), 1)), 0);
}

#[test]
fn use_keeps_a_prompt_in_the_cache() {
    let mut bench = bench(8);
    serve(&mut bench, spec(prompt(1, 9), 1));
    for salt in 10..30 {
        serve(&mut bench, spec(prompt(salt, 12), 1));
        assert_eq!(serve(&mut bench, spec(prompt(1, 9), 1)), 8);
    }
    assert!(bench.engine.stats().cache_evictions > 20);
}

#[test]
fn a_reservation_may_take_all_that_is_cached() {
    let mut bench = bench(8);
    serve(&mut bench, spec(prompt(1, 28), 4));
    assert_eq!(bench.engine.stats().cached_blocks, 7);
    let reservation = bench.engine.reserve(30, 1).unwrap();
    assert_eq!((reservation.blocks().len(), bench.engine.stats().cached_blocks), (8, 0));
    // What was received is found as if it had been computed here.
    bench.commit(reservation, spec(prompt(2, 30), 2));
    bench.run();
    bench.assert_complete_and_idle();
    assert_eq!(serve(&mut bench, spec(prompt(2, 30), 1)), 28);
}

/// Reserves for a prompt all of which will be computed when it comes.
fn awaited(bench: &mut Bench, prompt: &[u32], growth: usize, choices: usize) -> Reservation {
    let prompt = Awaited {
        token_ids: prompt,
        cache_key: 0,
        num_computed: prompt.len(),
    };
    bench.engine.reserve_prompt(&prompt, growth, choices).unwrap()
}

#[test]
fn a_handoff_brings_only_what_is_not_cached() {
    for (len, have) in [(3, 0), (4, 1), (7, 1), (8, 2), (13, 3), (16, 4)] {
        let mut bench = bench(64);
        // Computed here: all full blocks of the prompt.
        serve(&mut bench, spec(prompt(1, len), 2));
        let before = bench.engine.stats();
        let reservation = awaited(&mut bench, &prompt(1, len), 9, 1);
        let blocks = reservation.blocks().len();
        assert_eq!(
            (reservation.have_blocks().full as usize, blocks),
            (have, len.div_ceil(4)),
            "{len} tokens"
        );
        let stats = bench.engine.stats();
        assert_eq!(stats.cache_hit_tokens - before.cache_hit_tokens, have as u64 * 4);
        assert_eq!(stats.cache_queried_tokens - before.cache_queried_tokens, len as u64);
        bench.commit(reservation, spec(prompt(1, len), 9));
        bench.run();
        bench.assert_complete_and_idle();
    }
}

#[test]
fn cached_blocks_serve_several_handoffs_at_once_and_outlive_their_owners() {
    let mut bench = bench(40);
    let first = bench.add(spec(prompt(1, 13), 9));
    bench.run_steps(3);
    let many = SequenceSpec {
        cache_key: 0,
        ..spec(fork(12, 2, 5), 6)
    };
    let choices = awaited(&mut bench, &many.token_ids, 6, 3);
    let again = awaited(&mut bench, &prompt(1, 14), 4, 1);
    assert_eq!(
        (choices.have_blocks(), again.have_blocks()),
        (HaveBlocks::all(3), HaveBlocks::all(3))
    );
    assert_eq!(choices.blocks()[..3], table(&bench, first)[..3]);
    assert_eq!(choices.blocks()[..3], again.blocks()[..3]);
    bench.reservations.extend([again, choices]);
    bench.cancel(first);
    assert_eq!(bench.engine.stats().owned_blocks, 3 + 2 + 1);
    let choices = bench.reservations.pop().unwrap();
    bench.commit_choices(choices, &many);
    let again = bench.reservations.pop().unwrap();
    bench.commit(again, spec(prompt(1, 14), 4));
    bench.run();
    bench.assert_complete_and_idle();
}

#[test]
fn a_beam_search_computes_its_last_position_in_a_block_of_its_own() {
    let mut bench = bench(64);
    serve(&mut bench, spec(prompt(1, 16), 2));
    let tokens = prompt(1, 16);
    let prompt = Awaited {
        token_ids: &tokens,
        cache_key: 0,
        num_computed: 15,
    };
    let reservation = bench.engine.reserve_prompt(&prompt, 6, 3).unwrap();
    assert_eq!(reservation.have_blocks(), HaveBlocks::all(3));
    bench.commit_beams(reservation, spec(tokens, 6), 3).unwrap();
    bench.run();
    bench.assert_complete_and_idle();
}

#[test]
fn cached_blocks_are_not_taken_for_others() {
    let mut bench = bench(64);
    serve(&mut bench, spec(prompt(1, 12), 2));
    let reserve = |bench: &mut Bench| awaited(bench, &prompt(1, 14), 4, 1);
    // Another prompt, another key, and rows that would be written again.
    let keyed = SequenceSpec {
        cache_key: 5,
        ..spec(prompt(1, 14), 4)
    };
    let mut other = spec(prompt(2, 15), 4);
    other.prompt_len = 14;
    for (spec, computed) in [(other, 14), (keyed, 13), (spec(prompt(1, 14), 4), 11)] {
        let reservation = reserve(&mut bench);
        let error = bench.engine.commit(reservation, spec, computed).unwrap_err();
        assert_eq!(error, CommitError::Cached { have_blocks: 3 });
        bench.audit();
    }
    assert_eq!(bench.engine.stats().owned_blocks, 0);
    let reservation = reserve(&mut bench);
    assert!(bench.engine.release_reservation(reservation));
    assert_eq!(serve(&mut bench, spec(prompt(1, 13), 1)), 12, "they are still there");
}

#[test]
fn equal_handoffs_share_their_blocks_once_they_are_committed() {
    let mut bench = bench(16);
    for expected in [3, 4, 5] {
        let reservation = bench.engine.reserve(10, 5).unwrap();
        bench.commit(reservation, spec(prompt(1, 10), 5));
        assert_eq!(bench.engine.stats().owned_blocks, expected);
    }
    bench.run();
    bench.assert_complete_and_idle();
}

#[test]
fn a_preempted_sequence_goes_on_where_its_blocks_still_are() {
    let mut bench = Bench::reckless(cached(8));
    let (old, young) = (bench.add(spec(prompt(1, 8), 20)), bench.add(spec(prompt(2, 8), 20)));
    bench.run();
    bench.assert_complete_and_idle();
    let stats = bench.engine.stats();
    assert!(stats.preemptions > 0 && stats.cache_resumed_tokens > 0, "{stats:?}");
    assert_eq!(stats.cache_hit_tokens, 0, "resumed tokens are no hits");
    let computed: usize = 2 * (8 + 20) - 2;
    assert_eq!(
        stats.rows + stats.cache_resumed_tokens,
        computed as u64 + stats.preempted_rows
    );
    assert_eq!(bench.observed[&old].cached_tokens, Some(0));
    assert_eq!(bench.observed[&young].cached_tokens, Some(0));
}

#[test]
fn a_failed_step_leaves_what_earlier_ones_computed() {
    let mut bench = bench(16);
    bench.add(spec(prompt(1, 20), 2));
    bench.step();
    let plan = bench.engine.plan().unwrap().clone();
    bench.fail(&plan);
    assert_eq!(bench.engine.stats().cached_blocks, 2);
    assert_eq!(serve(&mut bench, spec(prompt(1, 20), 2)), 8);
}

#[test]
fn what_a_sequence_that_came_to_nothing_has_computed_is_not_used_again() {
    let mut bench = bench(32);
    // Computed by somebody who ended well.
    serve(&mut bench, spec(prompt(1, 9), 1));
    let breaks = |bench: &mut Bench, tokens: Vec<u32>| {
        let id = bench.add(spec(tokens, 2));
        bench.step();
        let plan = bench.engine.plan().unwrap().clone();
        bench.runner.break_next(id);
        bench.expect_failure(id);
        bench.execute(&plan);
    };
    breaks(&mut bench, fork(8, 2, 12));
    assert_eq!(
        (bench.engine.stats().cached_blocks, bench.engine.stats().owned_blocks),
        (0, 0),
        "neither its own blocks nor those it began with"
    );
    assert_eq!(serve(&mut bench, spec(fork(8, 2, 12), 1)), 0);
    // Two cached blocks follow the first two of the next one, which breaks: those stay.
    breaks(&mut bench, fork(8, 3, 12));
    assert_eq!(bench.engine.stats().cached_blocks, 5);
    assert_eq!(serve(&mut bench, spec(fork(8, 3, 12), 1)), 8);
}

#[test]
fn blocks_of_two_that_come_to_nothing_together_are_not_used_again() {
    let mut bench = bench(32);
    let ids = [1, 2].map(|salt| bench.add(spec(fork(8, salt, 3), 9)));
    bench.run_steps(3);
    assert_eq!(table(&bench, ids[0])[..2], table(&bench, ids[1])[..2], "they share two");
    for id in ids {
        let plan = bench.engine.plan().unwrap().clone();
        bench.runner.break_next(id);
        bench.expect_failure(id);
        bench.execute(&plan);
    }
    assert_eq!(bench.engine.stats().cached_blocks, 0);
    bench.assert_complete_and_idle();
}

/// Full blocks that `tokens` begins with, of those that are computed in `others`.
fn longest(others: &[Vec<u32>], tokens: &[u32]) -> u32 {
    let common = |other: &Vec<u32>| {
        let equal = other.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        equal.min(tokens.len() - 1) / 4
    };
    others.iter().map(common).max().unwrap_or(0) as u32 * 4
}

proptest! {
    /// In a pool with room for everything, a hit is the longest beginning that anybody has computed before.
    #[test]
    fn a_hit_is_the_longest_beginning_there_is(
        forks in prop::collection::vec((0usize..20, 2u32..5, 1usize..12, 1u32..9), 1..30),
    ) {
        let mut bench = Bench::new(EngineLimits { total_blocks: 1_000, ..cached(64) });
        let mut computed: Vec<Vec<u32>> = Vec::new();
        for (shared, salt, own, outputs) in forks {
            let tokens = fork(shared, salt, own);
            let id = bench.add(spec(tokens.clone(), outputs));
            bench.run();
            let observed = &bench.observed[&id];
            prop_assert_eq!(observed.cached_tokens, Some(longest(&computed, &tokens)));
            let mut all = tokens;
            all.extend(observed.expected.iter().map(|token| token.token));
            all.pop();
            computed.push(all);
        }
        let stats = bench.engine.stats();
        let hits: u64 = bench.observed.values().map(|observed| u64::from(observed.cached_tokens.unwrap())).sum();
        prop_assert_eq!(stats.cache_hit_tokens, hits);
        prop_assert_eq!(stats.cache_evictions, 0);
        let prompts: u64 = bench.observed.values().map(|observed| observed.spec.prompt_len as u64).sum();
        prop_assert_eq!(stats.cache_queried_tokens, prompts);
    }
}

#[test]
fn the_fake_model_would_notice_a_foreign_block() {
    // What all tests here stand on: another token in a shared block is another text.
    let other = MODEL.next_token(&fork(7, 2, 9), 16, &spec(vec![1], 1).sampling);
    let same = MODEL.next_token(&fork(8, 2, 8), 16, &spec(vec![1], 1).sampling);
    assert_ne!(other.token, same.token);
}
