//! Models whose rows see a limited number of positions: sequences let go of the blocks before them, and nothing else changes.
//! (`Bench` compares every answer with the undisturbed one; its runner reads the blocks that rows see.)

use std::collections::BTreeSet;

use proptest::prelude::*;
use protocol::moved::HaveBlocks;
use protocol::sampling::{FinishReason, StopRules};
use protocol::window::{GroupKept, Groups, Kept};

use super::{Bench, limits, prompt, spec, stop_at};
use crate::admission::{Forecast, Holder, Kin};
use crate::engine::Engine;
use crate::limits::{EngineLimits, LimitsError};
use crate::plan::BlockId;
use crate::reservation::{Awaited, CommitError};
use crate::sequence::SequenceSpec;

/// Blocks of 4 tokens, a window of 12, chunks of 8: sequences have at most 6 blocks, and 4 while they generate.
fn windowed(total_blocks: usize) -> EngineLimits {
    EngineLimits {
        total_blocks,
        max_batch_tokens: 16,
        prefill_chunk_tokens: 8,
        max_seq_len: 400,
        groups: Groups::sliding(12),
        ..limits()
    }
}

/// As many tokens as asked for, with the KV of each beginning in a place of its own.
fn long(salt: u32, tokens: usize, max_tokens: u32) -> SequenceSpec {
    SequenceSpec {
        stop: StopRules {
            ignore_eos: true,
            ..stop_at(max_tokens)
        },
        ..spec(prompt(salt, tokens), max_tokens)
    }
}

#[test]
fn a_long_sequence_has_the_blocks_of_its_window_and_its_chunk() {
    for prefix_cache in [false, true] {
        let mut bench = Bench::new(EngineLimits {
            prefix_cache,
            ..windowed(6)
        });
        let id = bench.add(long(1, 150, 60));
        let (mut steps, mut most) = (0, 0);
        while bench.step().is_some() {
            let stats = bench.engine.stats();
            most = most.max(stats.owned_blocks);
            steps += 1;
            let Some(table) = bench.engine.block_table(id).filter(|table| table.len() > 10) else {
                continue;
            };
            // Of what it let go of nothing is left in the table, and the last blocks are there.
            let gone = table.iter().filter(|block| !block.is_some()).count();
            assert!(!table[0].is_some() && table.len() - gone <= 6);
            assert!(table[gone..].iter().all(|block| block.is_some()));
        }
        assert!(steps >= 59 + 150 / 8, "{steps} steps");
        assert!((4..=6).contains(&most), "{most} blocks");
        bench.assert_complete_and_idle();
        let stats = bench.engine.stats();
        assert_eq!((stats.preemptions, stats.cached_blocks > 0), (0, prefix_cache));
    }
}

#[test]
fn more_sequences_run_at_once() {
    let most = |groups| {
        let mut bench = Bench::new(EngineLimits {
            groups,
            max_seq_len: 130,
            ..windowed(33)
        });
        for salt in 0..6 {
            bench.add(long(salt, 60, 60));
        }
        let mut most = 0;
        while bench.step().is_some() {
            most = most.max(bench.engine.stats().running);
        }
        bench.assert_complete_and_idle();
        assert_eq!(bench.engine.stats().preemptions, 0, "the forecast knows of the window");
        most
    };
    assert_eq!(most(Groups::ONE), 1);
    assert_eq!(most(Groups::sliding(12)), 6);
}

#[test]
fn a_pool_needs_room_for_a_window_and_a_chunk_only() {
    let refused = Engine::new(windowed(5)).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "total_blocks is 5; it must be at least 6, which hold a sequence of 400 tokens in layers with a window of 12 tokens, and a \
         chunk of 8 rows"
    );
    let nothing = EngineLimits {
        groups: Groups::sliding(0),
        ..windowed(100)
    };
    assert!(matches!(Engine::new(nothing).unwrap_err(), LimitsError::Groups(_)));
}

#[test]
fn a_reservation_is_for_what_the_first_row_sees() {
    for prefix_cache in [false, true] {
        let mut bench = Bench::new(EngineLimits {
            prefix_cache,
            ..windowed(16)
        });
        let wanted = long(3, 101, 40);
        let prompt = wanted.token_ids.clone();
        let reservation = bench
            .engine
            .reserve_prompt(
                &Awaited {
                    token_ids: &prompt,
                    cache_key: 0,
                    num_computed: 101,
                },
                40,
                3,
            )
            .unwrap();
        // The row of position 101 sees 90..=101: of 26 blocks those from 22 on.
        assert_eq!(
            (reservation.blocks().len(), reservation.have_blocks()),
            (26, HaveBlocks::all(22))
        );
        assert_eq!(reservation.blocks()[..22], [BlockId::NONE; 22]);
        assert_eq!(bench.engine.stats().owned_blocks, 4);
        let ids = bench.commit_choices(reservation, &wanted);
        assert_eq!(ids.len(), 3);
        bench.run();
        bench.assert_complete_and_idle();
        if prefix_cache {
            // What came was indexed, without the blocks before it: the next one finds all but the last, partial block.
            let again = bench.add(long(3, 101, 2));
            bench.run();
            assert_eq!(bench.observed[&again].cached_tokens, Some(100));
        }
    }
}

#[test]
fn what_was_not_reserved_cannot_be_missing() {
    let mut bench = Bench::new(windowed(16));
    let reservation = bench.engine.reserve(101, 10).unwrap();
    let error = bench.engine.commit(reservation, long(1, 101, 10), 40).unwrap_err();
    assert_eq!(
        error,
        CommitError::Window {
            num_computed: 40,
            missing_blocks: 22
        }
    );
    bench.assert_complete_and_idle();
}

/// Of a text whose first blocks have been given to another one of `other` tokens, the whole is found, and no beginning.
fn finds_a_text_without_its_beginning(limits: EngineLimits, other: usize) {
    let mut bench = Bench::new(EngineLimits {
        prefix_cache: true,
        ..limits
    });
    bench.add(long(1, 60, 4));
    bench.run();
    // What left the window first goes first.
    bench.add(long(2, other, 4));
    bench.run();
    assert!(bench.engine.stats().cache_evictions > 0);
    let (start, whole) = (bench.add(long(1, 20, 2)), bench.add(long(1, 61, 2)));
    bench.run();
    assert_eq!(bench.observed[&start].cached_tokens, Some(0));
    assert_eq!(bench.observed[&whole].cached_tokens, Some(60));
    bench.assert_complete_and_idle();
}

#[test]
fn a_prefix_is_found_though_its_beginning_is_forgotten() {
    finds_a_text_without_its_beginning(windowed(16), 30);
}

#[test]
fn preempted_sequences_go_on_with_their_window() {
    let mut bench = Bench::reckless(EngineLimits {
        prefix_cache: true,
        ..windowed(6)
    });
    // Both have three blocks when the first one needs a fourth.
    bench.add(long(1, 5, 14));
    bench.add(long(2, 5, 60));
    bench.run();
    bench.assert_complete_and_idle();
    assert!(bench.preempted > 0);
    assert!(bench.engine.stats().cache_resumed_tokens > 0);
}

#[test]
fn what_a_failed_sequence_let_go_of_is_forgotten_too() {
    let mut bench = Bench::new(EngineLimits {
        prefix_cache: true,
        ..windowed(32)
    });
    let id = bench.add(long(1, 60, 40));
    bench.run_steps(12);
    assert!(bench.engine.stats().cached_blocks > 5, "it has let go of some");
    bench.runner.break_next(id);
    bench.expect_failure(id);
    bench.run();
    assert_eq!(bench.engine.stats().cached_blocks, 0);
    let again = bench.add(long(1, 60, 2));
    bench.run();
    assert_eq!(bench.observed[&again].cached_tokens, Some(0));
}

#[test]
fn sequences_end_at_the_longest_length_as_ever() {
    let mut bench = Bench::new(windowed(6));
    let id = bench.add(long(1, 390, 100));
    bench.run();
    assert_eq!(bench.observed[&id].finish, Some(FinishReason::Length));
    assert_eq!(bench.observed[&id].seen, 10);
}

/// Blocks of 4 tokens for one group of layers that see everything, and two with a window of 12.
fn mixed(places: usize) -> EngineLimits {
    EngineLimits {
        groups: Groups::mixed(1, 2, 12),
        max_seq_len: 4 * places - 100,
        ..windowed(3 * places)
    }
}

#[test]
fn beside_layers_that_see_everything_the_others_keep_their_window() {
    for prefix_cache in [false, true] {
        let mut bench = Bench::new(EngineLimits {
            prefix_cache,
            ..mixed(100)
        });
        let id = bench.add(long(1, 150, 60));
        let mut most = 0;
        while bench.step().is_some() {
            most = most.max(bench.engine.stats().owned_blocks);
            let Some(table) = bench.engine.block_table(id).filter(|table| table.len() > 3 * 10) else {
                continue;
            };
            let gone = |group: usize| {
                table
                    .iter()
                    .skip(group)
                    .step_by(3)
                    .filter(|block| !block.is_some())
                    .count()
            };
            assert!(gone(0) == 0 && gone(1) == gone(2) && gone(1) + 6 >= table.len() / 3);
        }
        // 208 tokens before the last step: 52 blocks, and of the two others 4 to 6 each.
        assert!((52 + 2 * 4..=53 + 2 * 6).contains(&most), "{most} blocks");
        bench.assert_complete_and_idle();
        assert_eq!(bench.engine.stats().preemptions, 0);
    }
}

#[test]
fn a_sequence_fits_a_pool_that_would_not_hold_it_in_all_layers() {
    let limits = EngineLimits {
        total_blocks: 50 + 2 * 6,
        max_seq_len: 200,
        ..mixed(100)
    };
    let mut bench = Bench::new(limits);
    let ids = [bench.add(long(1, 100, 99)), bench.add(long(2, 40, 20))];
    bench.run();
    assert_eq!(ids.map(|id| bench.observed[&id].seen), [99, 20]);
    bench.assert_complete_and_idle();
    let small = EngineLimits {
        total_blocks: 50 + 2 * 6 - 1,
        ..limits
    };
    assert_eq!(
        Engine::new(small).unwrap_err().to_string(),
        "total_blocks is 61; it must be at least 62, which hold a sequence of 200 tokens in layers with a window of 12 tokens in 2 \
         of 3 groups of layers, and a chunk of 8 rows"
    );
}

#[test]
fn of_a_prompt_comes_all_in_some_layers_and_a_window_in_others() {
    let mut bench = Bench::new(EngineLimits {
        prefix_cache: true,
        ..mixed(100)
    });
    let expected = |token_ids| Awaited {
        token_ids,
        cache_key: 0,
        num_computed: 101,
    };
    let wanted = long(3, 101, 40);
    let prompt = wanted.token_ids.clone();
    let reservation = bench.engine.reserve_prompt(&expected(&prompt), 40, 2).unwrap();
    // The row of position 101 sees 90..=101: of 26 blocks those from 22 on, in two groups of three.
    let have = HaveBlocks { full: 0, sliding: 22 };
    assert_eq!(reservation.have_blocks(), have);
    assert_eq!(reservation.blocks_to_fill().len(), 26 + 2 * 4);
    assert_eq!(bench.engine.stats().owned_blocks, 26 + 2 * 4);
    bench.commit_choices(reservation, &wanted);
    bench.run();
    // What came is found again: all but the last, partial block, which begins behind the window's beginning.
    let again = bench.engine.reserve_prompt(&expected(&prompt), 40, 2).unwrap();
    assert_eq!(again.have_blocks(), HaveBlocks { full: 25, sliding: 25 });
    assert_eq!(again.blocks_to_fill().len(), 3);
    bench.commit_choices(again, &wanted);
    bench.run();
    // Of a longer prompt the beginning is there where everything is kept, and the window begins behind it.
    let longer = long(3, 160, 40);
    let reservation = bench
        .engine
        .reserve_prompt(
            &Awaited {
                num_computed: 160,
                ..expected(&longer.token_ids)
            },
            40,
            2,
        )
        .unwrap();
    assert_eq!(reservation.have_blocks(), HaveBlocks { full: 25, sliding: 37 });
    assert_eq!(reservation.blocks_to_fill().len(), 15 + 2 * 3);
    bench.commit_choices(reservation, &longer);
    bench.run();
    bench.assert_complete_and_idle();
}

#[test]
fn a_beginning_is_found_where_all_groups_have_what_they_need_of_it() {
    let limits = EngineLimits {
        total_blocks: 48,
        max_seq_len: 96,
        ..mixed(100)
    };
    finds_a_text_without_its_beginning(limits, 20);
}

proptest! {
    /// Generating sequences, some of which begin alike: in no step up to the horizon have they more blocks than was foreseen.
    #[test]
    fn the_forecast_holds(
        (block_tokens, window, horizon) in (1usize..6, 1u32..30, 0usize..60),
        (full, sliding) in (0u32..3, 1u32..3),
        shared in 0usize..8,
        sequences in prop::collection::vec((0usize..40, 0usize..60, any::<bool>(), any::<bool>()), 1..7),
    ) {
        let kept = Kept::new(Groups::mixed(full, sliding, window), block_tokens);
        let by_group: Vec<GroupKept> = kept.groups().collect();
        let begun = |more: usize| shared * block_tokens + more + 1;
        let holders = sequences.iter().map(|&(more, growth, leaves, kin)| Holder {
            blocks: 0,
            tokens: begun(more),
            growth,
            rows: 1,
            leaves,
            kin: kin.then_some(Kin { family: 7, blocks: shared }),
        });
        let peak = Forecast::new(kept, 8, horizon).peak(holders, 0);
        for step in 0..=horizon {
            let mut blocks = BTreeSet::new();
            for (number, (more, growth, leaves, kin)) in sequences.iter().enumerate() {
                if *leaves && *growth < step {
                    continue;
                }
                let tokens = begun(*more) + step.min(*growth);
                for (group, kept) in by_group.iter().enumerate() {
                    let own = kept.first_block(tokens - 1)..tokens.div_ceil(block_tokens);
                    blocks.extend(own.map(|block| (group, if *kin && block < shared { usize::MAX } else { number }, block)));
                }
            }
            prop_assert!(blocks.len() <= peak, "{} blocks in step {step}, {peak} were foreseen", blocks.len());
        }
    }
}
