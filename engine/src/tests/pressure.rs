//! More work than the pool holds.

use protocol::window::Groups;
use std::sync::Arc;
use std::time::Duration;

use protocol::sampling::SamplingParams;

use super::{Bench, prompt, spec, stop_at};
use crate::engine::{AddError, MAX_WAITING};
use crate::limits::EngineLimits;
use crate::plan::PlannedSequence;
use crate::sequence::SequenceSpec;

/// A pool for 4 sequences of 64 tokens, with slots for 16.
fn limits() -> EngineLimits {
    EngineLimits {
        total_blocks: 32,
        block_tokens: 8,
        max_num_seqs: 16,
        max_batch_tokens: 48,
        prefill_chunk_tokens: 16,
        mixed_prefill_tokens: 1_000,
        mixed_prefill_time: Duration::ZERO,
        max_seq_len: 64,
        prefix_cache: false,
        groups: Groups::ONE,
    }
}

fn request(salt: u32) -> SequenceSpec {
    let sampling = SamplingParams {
        greedy: salt.is_multiple_of(3),
        seed: u64::from(salt),
        repetition_penalty: if salt.is_multiple_of(4) { 1.1 } else { 1.0 },
        top_logprobs: Some((salt % 3) as u8),
        ..SamplingParams::greedy()
    };
    let prompt_len = 20 + salt as usize % 13;
    SequenceSpec {
        sampling: Arc::new(sampling),
        prompt_logprobs: salt.is_multiple_of(5).then_some(1),
        ..spec(prompt(salt, prompt_len), 64 - prompt_len as u32)
    }
}

#[test]
fn sixty_four_requests_on_a_pool_for_four_are_all_answered_in_spite_of_preemptions() {
    let mut bench = Bench::reckless(limits());
    for salt in 0..64 {
        bench.add(request(salt));
    }
    let steps = bench.run();
    bench.assert_complete_and_idle();
    let stats = bench.engine.stats();
    assert!(stats.preemptions > 0, "the pool was not under pressure: {stats:?}");
    assert_eq!(bench.preempted as u64, stats.preemptions);
    let generated: u64 = bench.observed.values().map(|observed| observed.seen as u64).sum();
    assert_eq!(stats.sampled_tokens, generated);
    let prompts: u64 = bench
        .observed
        .values()
        .map(|observed| observed.spec.prompt_len as u64)
        .sum();
    // Every token but each sequence's last is computed once, and once more for each preemption that threw it away.
    assert_eq!(stats.rows, prompts + generated - 64 + stats.preempted_rows);
    assert_eq!(steps as u64, stats.steps);
}

#[test]
fn with_the_forecast_nothing_is_computed_twice() {
    let mut bench = Bench::new(limits());
    for salt in 0..64 {
        bench.add(request(salt));
    }
    bench.run();
    bench.assert_complete_and_idle();
    assert_eq!(
        (bench.engine.stats().preemptions, bench.engine.stats().preempted_rows),
        (0, 0)
    );
}

#[test]
fn sixty_four_handoffs_on_a_pool_for_four_are_all_answered_without_a_preemption() {
    let mut bench = Bench::new(limits());
    let mut requests = (0..64)
        .map(request)
        .map(|spec| SequenceSpec {
            prompt_logprobs: None,
            ..spec
        })
        .peekable();
    let (mut steps, mut batch) = (0, 0);
    while requests.peek().is_some() || bench.engine.stats().running > 0 {
        while let Some(spec) = requests.peek() {
            let Ok(reservation) = bench.engine.reserve(spec.prompt_len, spec.stop.max_tokens as usize) else {
                break;
            };
            bench.commit(reservation, spec.clone());
            requests.next();
        }
        batch += bench.step().map_or(0, |stats| stats.batch_size);
        steps += 1;
        assert!(steps < 10_000);
    }
    bench.assert_complete_and_idle();
    assert_eq!(bench.engine.stats().preemptions, 0);
    // At full length 4 fit. They do not all have that at the same time, so on average it should be no fewer.
    assert!(
        f64::from(batch) / f64::from(steps) >= 4.0,
        "{batch} rows in {steps} steps"
    );
}

#[test]
fn a_pool_for_one_serves_one_after_the_other() {
    let limits = EngineLimits {
        total_blocks: 8,
        ..limits()
    };
    for mut bench in [Bench::new(limits), Bench::reckless(limits)] {
        for salt in 0..12 {
            bench.add(request(salt));
        }
        bench.run();
        bench.assert_complete_and_idle();
    }
}

#[test]
fn the_oldest_sequence_advances_in_every_step() {
    let mut bench = Bench::reckless(limits());
    for salt in 0..40 {
        bench.add(request(salt));
    }
    while let Some(plan) = bench.engine.plan().cloned() {
        let oldest = bench
            .observed
            .iter()
            .find(|(_, observed)| !observed.ended)
            .map(|(id, _)| *id);
        assert_eq!(oldest, plan.sequences.first().map(|planned| planned.id));
        bench.execute(&plan);
    }
    bench.assert_complete_and_idle();
}

#[test]
fn a_long_prompt_delays_running_sequences_by_no_step() {
    let limits = EngineLimits {
        total_blocks: 128,
        max_seq_len: 400,
        ..limits()
    };
    let mut bench = Bench::new(limits);
    for salt in 0..8 {
        bench.add(spec(prompt(salt, 3), 60));
    }
    bench.step();
    bench.add(spec(prompt(99, 300), 2));
    for _ in 0..300 / limits.prefill_chunk_tokens {
        let stats = bench.step().unwrap();
        assert_eq!(
            (stats.batch_size, stats.rows as usize),
            (9, 8 + limits.prefill_chunk_tokens)
        );
        assert_eq!(stats.sampled_tokens, 8);
    }
    bench.run();
    bench.assert_complete_and_idle();
}

#[test]
fn beside_those_that_generate_prompts_and_preempted_ones_get_a_few_rows_a_step() {
    let limits = EngineLimits {
        total_blocks: 128,
        max_seq_len: 400,
        mixed_prefill_tokens: 5,
        ..limits()
    };
    let mut bench = Bench::new(limits);
    for salt in 0..8 {
        bench.add(spec(prompt(salt, 3), 60));
    }
    bench.step();
    let late = [bench.add(spec(prompt(99, 100), 2)), bench.add(spec(prompt(98, 100), 2))];
    for _ in 0..40 {
        let stats = bench.step().unwrap();
        assert_eq!(
            (stats.rows, stats.sampled_tokens),
            (8 + 5, if bench.observed[&late[0]].seen == 1 { 9 } else { 8 })
        );
        if bench.observed[&late[0]].seen > 0 {
            break;
        }
    }
    assert_eq!(
        bench.observed[&late[0]].seen, 1,
        "the older prompt goes on in every step"
    );
    bench.run();
    // Once nobody generates, a chunk is a chunk.
    bench.add(spec(prompt(97, 100), 1));
    assert_eq!(bench.step().unwrap().rows, 16);
    bench.run();
    bench.assert_complete_and_idle();
    // The same under preemptions: `Bench` checks every plan.
    let mut bench = Bench::reckless(EngineLimits {
        mixed_prefill_tokens: 3,
        ..self::limits()
    });
    for salt in 0..40 {
        bench.add(request(salt));
    }
    bench.run();
    bench.assert_complete_and_idle();
    assert!(bench.preempted > 0);
}

#[test]
fn beside_those_that_generate_prompts_get_the_rows_that_fit_the_time() {
    let limits = EngineLimits {
        total_blocks: 512,
        max_seq_len: 400,
        max_batch_tokens: 300,
        prefill_chunk_tokens: 200,
        mixed_prefill_tokens: 200,
        mixed_prefill_time: Duration::from_millis(20),
        ..limits()
    };
    // A millisecond for each row, and 20 us more for each token that it looks back on.
    let time = |planned: &PlannedSequence| {
        let (start, rows) = (u64::from(planned.start_position), u64::from(planned.rows.len));
        Duration::from_micros(1_000 * rows + 20 * (rows * start + rows * (rows + 1) / 2))
    };
    let mut bench = Bench::new(limits);
    for salt in 0..4 {
        bench.add(spec(prompt(salt, 3), 390));
    }
    bench.step();
    let mut chunks = Vec::new();
    for salt in 90..93 {
        let late = bench.add(spec(prompt(salt, 300), 2));
        while bench.observed[&late].seen == 0 {
            let plan = bench.engine.plan().unwrap().clone();
            bench.engine.note_step_time(plan.sequences.iter().map(time).sum());
            let chunk = plan.sequences.iter().find(|planned| planned.id == late).unwrap();
            chunks.push((chunk.start_position, chunk.rows.len, time(chunk)));
            bench.execute(&plan);
        }
        bench.cancel(late);
    }
    assert!(
        chunks.iter().all(|(.., time)| *time <= Duration::from_millis(23)),
        "{chunks:?}"
    );
    // The last prompt, but for its end.
    let last = &chunks[chunks.iter().rposition(|(start, ..)| *start == 0).unwrap()..];
    let (first, end) = (last[0], last[last.len() - 2]);
    assert!(first.1 >= 12 && end.1 <= 4, "{first:?}, {end:?}");
    bench.run();
    bench.assert_complete_and_idle();
}

#[test]
fn two_hundred_and_fifty_six_sequences_generate_in_one_step() {
    for prefix_cache in [false, true] {
        let mut bench = Bench::new(EngineLimits {
            total_blocks: 8_192,
            block_tokens: 16,
            max_num_seqs: 256,
            max_batch_tokens: 512,
            prefill_chunk_tokens: 256,
            mixed_prefill_tokens: 32,
            mixed_prefill_time: Duration::ZERO,
            max_seq_len: 512,
            prefix_cache,
            groups: Groups::ONE,
        });
        for salt in 0..300 {
            let sampling = SamplingParams {
                repetition_penalty: if salt % 16 == 0 { 1.1 } else { 1.0 },
                ..SamplingParams::greedy()
            };
            let spec = SequenceSpec {
                sampling: Arc::new(sampling),
                ..spec(prompt(salt, 20 + salt as usize % 30), 240)
            };
            if salt % 2 == 0 {
                bench.add(spec);
            } else if let Ok(reservation) = bench.engine.reserve(spec.prompt_len, 240) {
                bench.commit(reservation, spec);
            }
        }
        let mut largest = 0;
        while let Some(plan) = bench.engine.plan().cloned() {
            largest = largest.max(plan.sequences.len());
            let histories: usize = plan
                .sequences
                .iter()
                .filter_map(|planned| planned.sample.as_ref())
                .map(|sample| sample.history.len as usize)
                .sum();
            assert_eq!(plan.history.len(), histories, "only histories that somebody needs");
            bench.execute(&plan);
        }
        bench.assert_complete_and_idle();
        assert!(largest >= 250, "{largest} sequences in the largest step");
    }
}

#[test]
fn a_stream_of_reservations_does_not_starve_a_waiting_sequence() {
    let mut bench = Bench::new(limits());
    let mut salt = 100;
    let mut reserve_all = |bench: &mut Bench| {
        loop {
            let spec = SequenceSpec {
                prompt_logprobs: None,
                ..request(salt)
            };
            let Ok(reservation) = bench.engine.reserve(spec.prompt_len, spec.stop.max_tokens as usize) else {
                return;
            };
            bench.commit(reservation, spec);
            salt += 1;
        }
    };
    reserve_all(&mut bench);
    // Needs half of the pool at once.
    let late = bench.add(spec(prompt(1, 63), 1));
    let mut steps = 0;
    while !bench.observed[&late].ended {
        reserve_all(&mut bench);
        bench.step().unwrap();
        steps += 1;
        // Those who ran before it need at most 44 steps, itself 4.
        assert!(steps <= 48, "still waiting after {steps} steps");
    }
    assert!(steps > 1, "it did not have to wait");
    bench.run();
    bench.assert_complete_and_idle();
}

#[test]
fn waiting_sequences_do_not_starve_reservations_beyond_their_own_life() {
    let mut bench = Bench::new(limits());
    for salt in 0..8 {
        bench.add(request(salt));
    }
    let mut steps = 0;
    let reservation = loop {
        match bench.engine.reserve(30, 20) {
            Ok(reservation) => break reservation,
            Err(_) => assert!(bench.step().is_some(), "idle, and still refused"),
        }
        steps += 1;
    };
    assert!(steps > 0, "it did not have to wait");
    assert!(
        bench.observed.values().any(|observed| !observed.ended),
        "it waited for everybody"
    );
    bench.commit(reservation, spec(prompt(77, 30), 20));
    bench.run();
    bench.assert_complete_and_idle();
}

#[test]
fn the_queue_is_bounded() {
    let mut bench = Bench::new(limits());
    for _ in 0..MAX_WAITING {
        bench.engine.add(spec(vec![1], 1)).unwrap();
    }
    let refused = bench.engine.add(spec(vec![1], 1));
    assert_eq!(
        refused,
        Err(AddError::Full {
            waiting: MAX_WAITING,
            limit: MAX_WAITING
        })
    );
    bench.engine.plan().unwrap();
    bench
        .engine
        .add(SequenceSpec {
            stop: stop_at(2),
            ..spec(vec![1], 1)
        })
        .unwrap();
}
