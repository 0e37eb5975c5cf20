//! A step that generates allocates nothing once the buffers have their size.

mod support;

use allocation_counter::measure;
use engine::plan::StepOutput;
use engine::runner::{NoObserver, Runner};
use protocol::sampling::SamplingParams;
use support::{Setup, tiny_llama};

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
