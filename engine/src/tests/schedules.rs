//! What is planned when.

use super::script::check;
use crate::engine::Engine;
use crate::limits::EngineLimits;
use protocol::window::Groups;

fn engine(limits: EngineLimits) -> Engine {
    Engine::new(limits).unwrap()
}

fn limits() -> EngineLimits {
    EngineLimits {
        total_blocks: 16,
        block_tokens: 4,
        max_num_seqs: 3,
        max_batch_tokens: 8,
        prefill_chunk_tokens: 6,
        mixed_prefill_tokens: 1_000,
        mixed_prefill_time: std::time::Duration::ZERO,
        max_seq_len: 40,
        prefix_cache: false,
        groups: Groups::ONE,
    }
}

/// A pool of four blocks; newcomers are let in without regard to the future.
fn crowded() -> Engine {
    Engine::with_horizon(
        EngineLimits {
            total_blocks: 4,
            max_seq_len: 16,
            ..limits()
        },
        0,
    )
    .unwrap()
}

#[test]
fn prompts_are_cut_into_chunks_and_share_the_batch_with_running_sequences() {
    check(
        engine(limits()),
        "add 5 max 4       => 0
         add 13 max 2      => 1
         step              => 0:0-4* 1:0-2
         step              => 0:5-5* 1:3-8
         step              => 0:6-6* 1:9-12*
         step              => 0:7-7* 1:13-13* end 0 Length end 1 Length
         step              => idle
         stats             => free 16 owned 0 running 0 waiting 0 held 0",
    );
}

#[test]
fn slots_bound_the_batch_and_the_oldest_waits_least() {
    check(
        engine(limits()),
        "add 2 max 2       => 0
         add 2 max 3       => 1
         add 2 max 3       => 2
         add 2 max 1       => 3
         add 2 max 1       => 4
         step              => 0:0-1* 1:0-1* 2:0-1*
         stats             => free 13 owned 3 running 3 waiting 2 held 0
         step              => 0:2-2* 1:2-2* 2:2-2* end 0 Length
         step              => 1:3-3* 2:3-3* 3:0-1* end 1 Length end 2 Length end 3 Length
         step              => 4:0-1* end 4 Length
         step              => idle",
    );
}

#[test]
fn an_older_prompt_comes_before_a_younger_one() {
    check(
        engine(limits()),
        "add 20 max 1      => 0
         add 20 max 1      => 1
         step              => 0:0-5 1:0-1
         step              => 0:6-11 1:2-3
         step              => 0:12-17 1:4-5
         step              => 0:18-19* 1:6-11 end 0 Length
         step              => 1:12-17
         step              => 1:18-19* end 1 Length",
    );
}

#[test]
fn a_sequence_that_reaches_the_longest_length_ends() {
    check(
        engine(EngineLimits {
            max_seq_len: 5,
            ..limits()
        }),
        "add 3 max 100     => 0
         step              => 0:0-2*
         step              => 0:3-3* end 0 Length
         add 4 max 100     => 1
         step              => 1:0-3* end 1 Length
         add 5 max 100     => token_ids has 5 tokens; it may have at most 4, which leaves room for one output token",
    );
}

#[test]
fn the_youngest_gives_way_and_starts_again() {
    check(
        crowded(),
        "add 4 max 9       => 0
         add 4 max 6       => 1
         step              => 0:0-3* 1:0-3*
         step              => 0:4-4* 1:4-4*
         step              => 0:5-5* 1:5-5*
         step              => 0:6-6* 1:6-6*
         step              => 0:7-7* 1:7-7*
         stats             => free 0 owned 4 running 2 waiting 0 held 0
         step              => 0:8-8* preempted 1
         stats             => free 1 owned 3 running 1 waiting 1 held 0
         step              => 0:9-9*
         step              => 0:10-10*
         step              => 0:11-11* end 0 Length
         step              => 1:0-5
         step              => 1:6-8* end 1 Length",
    );
}

#[test]
fn the_youngest_waits_in_place_when_nobody_is_younger() {
    check(
        crowded(),
        "add 7 max 3       => 0
         add 8 max 3       => 1
         step              => 0:0-5 1:0-1
         step              => 0:6-6* 1:2-7*
         step              => 0:7-7*
         step              => 0:8-8* preempted 1 end 0 Length
         step              => 1:0-5
         step              => 1:6-8*
         step              => 1:9-9* end 1 Length",
    );
}

#[test]
fn nobody_is_let_in_who_could_force_a_preemption() {
    check(
        engine(EngineLimits {
            total_blocks: 4,
            max_seq_len: 16,
            ..limits()
        }),
        "add 4 max 9       => 0
         add 4 max 6       => 1
         step              => 0:0-3*
         stats             => free 3 owned 1 running 1 waiting 1 held 0
         step              => 0:4-4*
         step              => 0:5-5*
         step              => 0:6-6*
         step              => 0:7-7*
         step              => 0:8-8*
         step              => 0:9-9*
         step              => 0:10-10*
         step              => 0:11-11* 1:0-3* end 0 Length
         step              => 1:4-4*",
    );
}

#[test]
fn a_committed_reservation_runs_on_where_the_prompt_ends() {
    check(
        engine(limits()),
        "reserve 6 grow 4  => 0 [0, 1]
         step              => idle
         stats             => free 14 owned 2 running 0 waiting 0 held 0
         add 3 max 3       => 0
         step              => 0:0-2*
         commit 0 max 4    => 1
         step              => 0:3-3* 1:6-6*
         step              => 0:4-4* 1:7-7* end 0 Length
         step              => 1:8-8* end 1 Length
         stats             => free 16 owned 0 running 0 waiting 0 held 0",
    );
}

#[test]
fn reservations_leave_running_sequences_their_growth() {
    check(
        engine(EngineLimits {
            total_blocks: 6,
            max_seq_len: 16,
            ..limits()
        }),
        "add 4 max 9       => 0
         step              => 0:0-3*
         reserve 8 grow 9  => 2 blocks are needed and 5 of 6 are free; together with what the sequences here can \
                              still grow into, 7 blocks could be in use
         reserve 8 grow 5  => 0 [1, 2]
         reserve 4 grow 2  => 1 blocks are needed and 3 of 6 are free; together with what the sequences here can \
                              still grow into, 8 blocks could be in use
         drop 0            => yes
         cancel 0          => yes
         reserve 8 grow 9  => 1 [0, 1]
         drop 1            => yes
         stats             => free 6 owned 0 running 0 waiting 0 held 0",
    );
}

#[test]
fn reservations_do_not_overtake_waiting_sequences() {
    check(
        engine(EngineLimits {
            total_blocks: 4,
            max_seq_len: 16,
            ..limits()
        }),
        "reserve 8 grow 1  => 0 [0, 1]
         add 12 max 1      => 0
         step              => idle
         reserve 4 grow 1  => 1 blocks are needed and 2 of 4 are free; together with what the sequences here can \
                              still grow into, 6 blocks could be in use
         drop 0            => yes
         step              => 0:0-5
         reserve 4 grow 1  => 1 [2]
         step              => 0:6-11* end 0 Length
         drop 1            => yes",
    );
}

#[test]
fn reservations_take_slots() {
    check(
        engine(limits()),
        "reserve 1 grow 1  => 0 [0]
         reserve 1 grow 1  => 1 [1]
         add 2 max 9       => 0
         reserve 1 grow 1  => 3 of 3 sequence slots are taken by sequences and reservations, 1 are needed
         cancel 0          => yes
         reserve 1 grow 1  => 2 [2]
         drop 0            => yes
         drop 1            => yes
         drop 2            => yes",
    );
}

#[test]
fn a_commit_without_a_free_slot_is_first_in_line() {
    check(
        engine(EngineLimits {
            max_num_seqs: 1,
            ..limits()
        }),
        "reserve 4 grow 2  => 0 [0]
         add 2 max 2       => 0
         add 2 max 1       => 1
         step              => 0:0-1*
         commit 0 max 2    => 2
         step              => 0:2-2* end 0 Length
         stats             => free 15 owned 1 running 0 waiting 2 held 0
         step              => 2:4-4* end 2 Length
         step              => 1:0-1* end 1 Length",
    );
}

#[test]
fn held_blocks_stay_until_released() {
    check(
        engine(EngineLimits {
            total_blocks: 4,
            max_seq_len: 16,
            ..limits()
        }),
        "add 9 max 5 hold first => 0
         add 8 max 5 hold first => 1
         step              => 0:0-5
         step              => 0:6-8*
         step              => idle
         stats             => free 1 owned 3 running 0 waiting 1 held 1
         release 0         => yes
         release 0         => no
         cancel 0          => no
         step              => 1:0-5
         step              => 1:6-7*
         stats             => free 2 owned 2 running 0 waiting 0 held 1
         cancel 1          => yes
         release 1         => no
         stats             => free 4 owned 0 running 0 waiting 0 held 0",
    );
}

#[test]
fn running_sequences_keep_their_row_when_an_older_prompt_takes_the_rest() {
    check(
        engine(EngineLimits {
            prefill_chunk_tokens: 8,
            ..limits()
        }),
        "reserve 4 grow 9  => 0 [0]
         reserve 4 grow 9  => 1 [1]
         add 20 max 1      => 0
         commit 0 max 9    => 1
         commit 1 max 9    => 2
         step              => 1:4-4* 2:4-4* 0:0-5
         step              => 0:6-11 1:5-5* 2:5-5*
         step              => 0:12-17 1:6-6* 2:6-6*
         step              => 0:18-19* 1:7-7* 2:7-7* end 0 Length",
    );
}

#[test]
fn a_chunk_shrinks_to_the_blocks_there_are() {
    check(
        Engine::with_horizon(
            EngineLimits {
                total_blocks: 5,
                max_seq_len: 20,
                ..limits()
            },
            0,
        )
        .unwrap(),
        "add 3 max 9       => 0
         add 16 max 1      => 1
         step              => 0:0-2* 1:0-4
         step              => 0:3-3* 1:5-10
         step              => 0:4-4* 1:11-11
         step              => 0:5-5*",
    );
}

#[test]
fn a_held_sequence_is_not_expected_to_make_room() {
    check(
        engine(EngineLimits {
            total_blocks: 4,
            max_seq_len: 16,
            ..limits()
        }),
        "add 4 max 3 hold  => 0
         add 4 max 9       => 1
         step              => 0:0-3*
         step              => 0:4-4*
         step              => 0:5-5* end 0 Length
         step              => idle
         release 0         => yes
         step              => 1:0-3*",
    );
}

#[test]
fn a_prompt_in_progress_is_not_expected_to_make_room() {
    check(
        engine(EngineLimits {
            total_blocks: 4,
            max_seq_len: 16,
            prefill_chunk_tokens: 2,
            ..limits()
        }),
        "add 8 max 1       => 0
         add 4 max 9       => 1
         step              => 0:0-1
         step              => 0:2-3
         step              => 0:4-5
         step              => 0:6-7* end 0 Length
         step              => 1:0-1",
    );
}

#[test]
fn a_waiting_commit_gives_way_to_an_older_sequence() {
    check(
        Engine::with_horizon(
            EngineLimits {
                total_blocks: 2,
                max_seq_len: 8,
                max_num_seqs: 1,
                ..limits()
            },
            0,
        )
        .unwrap(),
        "reserve 4 grow 2  => 0 [0]
         add 4 max 3       => 0
         step              => 0:0-3*
         commit 0 max 2    => 1
         step              => 0:4-4* preempted 1
         step              => 0:5-5* end 0 Length
         step              => 1:0-4* end 1 Length",
    );
}

#[test]
fn of_two_commits_the_older_runs_first_and_the_younger_gives_way() {
    check(
        Engine::with_horizon(
            EngineLimits {
                total_blocks: 4,
                max_seq_len: 16,
                max_num_seqs: 2,
                ..limits()
            },
            0,
        )
        .unwrap(),
        "reserve 4 grow 9  => 0 [0]
         reserve 4 grow 9  => 1 [1]
         add 4 max 2       => 0
         add 4 max 3 hold  => 1
         step              => 0:0-3* 1:0-3*
         commit 0 max 9    => 2
         cancel 0          => yes
         commit 1 max 9    => 3
         step              => 1:4-4* 2:4-4* preempted 3
         step              => 1:5-5* 2:5-5* end 1 Length
         step              => 2:6-6*",
    );
}

#[test]
fn who_has_no_rows_left_takes_no_blocks_from_anybody() {
    check(
        engine(EngineLimits {
            max_num_seqs: 4,
            ..limits()
        }),
        "reserve 4 grow 9  => 0 [0]
         reserve 4 grow 9  => 1 [1]
         add 20 max 1      => 0
         add 12 max 1      => 1
         step              => 0:0-5 1:0-1
         commit 0 max 9    => 2
         commit 1 max 9    => 3
         step              => 0:6-11 2:4-4* 3:4-4*
         step              => 0:12-17 2:5-5* 3:5-5*
         step              => 0:18-19* 1:2-5 2:6-6* 3:6-6* end 0 Length",
    );
}

/// Somebody whose KV is on its way may have to wait for a step that has begun: it is kept as short as beside one who generates.
#[test]
fn prompts_are_cut_as_short_for_those_who_are_awaited_as_for_those_who_generate() {
    let limits = EngineLimits {
        mixed_prefill_tokens: 2,
        ..limits()
    };
    check(
        engine(limits),
        "add 10 max 1      => 0
         step              => 0:0-5
         reserve 4 grow 2  => 0 [2]
         step              => 0:6-7
         drop 0            => yes
         step              => 0:8-9* end 0 Length",
    );
}
