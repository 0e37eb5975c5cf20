//! A step that generates allocates nothing once the buffers have their size.

mod support;

use allocation_counter::measure;
use engine::plan::StepOutput;
use engine::runner::{NoObserver, Runner};
use model::sampler::{Draw, Sampler};
use protocol::sampling::SamplingParams;
use support::{Setup, tiny_llama};

#[test]
fn a_sampler_has_its_memory_from_the_start() {
    // Which of several threads meets a request that samples is chance: none may grow its buffers then.
    let logits: Vec<f32> = (0..5_000_u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) % 1_000) as f32 / 100.0)
        .collect();
    let sampled = SamplingParams {
        greedy: false,
        seed: 5,
        ..SamplingParams::greedy()
    };
    let changed: [fn(&mut SamplingParams); 7] = [
        |_| {},
        |p| p.top_k = 50,
        |p| p.top_p = 0.9,
        |p| p.typical_p = 0.5,
        |p| p.min_p = 0.01,
        |p| p.repetition_penalty = 1.2,
        |p| p.watermark = true,
    ];
    for (i, change) in changed.iter().enumerate() {
        let mut params = sampled.clone();
        change(&mut params);
        let draw = Draw {
            params: &params,
            further: 0,
            position: 1,
            history: &[7, 8, 9],
            prompt_len: 2,
            mask: None,
        };
        let mut sampler = Sampler::with_vocabulary(logits.len());
        let counted = measure(|| drop(sampler.sample(&logits, &draw).unwrap()));
        assert_eq!(counted.count_total, 0, "change {i}");
    }
}

#[test]
fn steps_that_generate_allocate_nothing() {
    // Of two threads one is counted; what the helper is given needs no memory either, or the first would make it.
    for (batch, threads) in [(1, 1), (2, 1), (9, 1), (1, 2), (9, 2)] {
        let setup = Setup {
            threads,
            ..Setup::quantised()
        };
        let mut bench = setup.bench(&tiny_llama());
        let sampled = SamplingParams {
            greedy: false,
            temperature: 0.8,
            top_p: 0.9,
            seed: 5,
            ..SamplingParams::greedy()
        };
        for i in 0..batch {
            let params = if i % 2 == 0 {
                &sampled
            } else {
                &SamplingParams::greedy()
            };
            bench.add(&[3, 1, 4, 1, 5, 9, 2, 6], params, 40, false);
        }
        bench.finish(64, batch, 3);
        let rows: Vec<(usize, usize)> = (0..batch).map(|s| (s, 1)).collect();
        let plan = bench.plan(&rows);
        let mut out = StepOutput::default();
        let mut run = || bench.runner.execute(&plan, &mut NoObserver, &mut out).unwrap();
        run();
        run();
        let counted = measure(|| (0..10).for_each(|_| run()));
        assert_eq!(
            counted.count_total, 0,
            "allocations in 10 steps of {batch} sequences on {threads} threads"
        );
    }
}
