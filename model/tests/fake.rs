//! The fake model keeps promise 1, and notices what happens to the bytes in its blocks.

mod support;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use engine::plan::{BlockId, GroupBlocks};
use engine::runner::{NoObserver, Runner, RunnerError};
use model::fake::{FakeConfig, FakeModel, FakeRunner};
use model::kernels::Cpu;
use model::kv_pool::KvPool;
use protocol::kv::{KvDtype, KvLayout};
use protocol::sampling::SamplingParams;
use protocol::window::Groups;
use support::Bench;
use support::one_answer::{alone, cases, handed_over, preempted, run};

fn config(block_tokens: u32, dtype: KvDtype) -> FakeConfig {
    FakeConfig {
        layout: KvLayout {
            num_layers: 3,
            num_kv_heads: 2,
            head_dim: 4,
            block_tokens,
            dtype,
            latent: false,
            groups: Groups::ONE,
        },
        total_blocks: 16_384 / block_tokens as usize,
        vocab_size: 300,
        max_position_embeddings: 4_096,
        seed: 5,
    }
}

fn bench(block_tokens: u32) -> (Bench<FakeRunner>, Arc<KvPool>) {
    let config = config(block_tokens, KvDtype::F16);
    let model = FakeModel::new(&config).unwrap();
    (
        Bench::new(model.runner, block_tokens as usize, config.total_blocks),
        model.pool,
    )
}

#[test]
fn answers_do_not_depend_on_the_schedule() {
    let outputs = 20;
    let cases = cases(16, 120, 300);
    let expected = alone(&mut bench(16).0, &cases, outputs);
    assert_eq!(
        expected.iter().map(|b| b.tokens.clone()).collect::<HashSet<_>>().len(),
        16
    );
    for chunk in [1, 7, 64, usize::MAX] {
        for batch in [1, 4, 16] {
            for block in [1, 16, 32] {
                let found = run(&mut bench(block).0, &cases, chunk, batch, outputs);
                assert_eq!(found, expected, "chunk {chunk}, batch {batch}, block {block}");
            }
        }
    }
    assert_eq!(preempted(&mut bench(16).0, &cases, outputs), expected);
    let ((mut a, a_pool), (mut b, b_pool)) = (bench(16), bench(16));
    assert_eq!(
        handed_over((&mut a, &a_pool), (&mut b, &b_pool), &cases, outputs),
        expected
    );
}

#[test]
fn a_window_changes_nothing_of_that() {
    let outputs = 12;
    let cases = cases(6, 90, 300);
    let bench = || {
        let mut config = config(16, KvDtype::F16);
        config.layout.groups = Groups::sliding(40);
        let model = FakeModel::new(&config).unwrap();
        Bench::new(model.runner, 16, config.total_blocks)
    };
    let expected = alone(&mut bench(), &cases, outputs);
    for (chunk, batch) in [(1, 4), (16, 6), (usize::MAX, 1)] {
        let found = run(&mut bench(), &cases, chunk, batch, outputs);
        assert_eq!(found, expected, "chunk {chunk}, batch {batch}");
    }
}

/// Does something to a pool, given a sequence's blocks and its table.
type Harm<'a> = &'a dyn Fn(&KvPool, &[BlockId], &mut Vec<BlockId>);

#[test]
fn a_swapped_lost_or_damaged_block_changes_the_text() {
    let prompt: Vec<u32> = (0..70).collect();
    let text = |harm: Harm<'_>| -> Vec<u32> {
        let (mut bench, pool) = bench(16);
        let s = bench.add(&prompt, &SamplingParams::greedy(), 10, false);
        bench.finish(usize::MAX, 1, 1);
        let blocks = bench.sequences[s].blocks.clone();
        harm(&pool, &blocks, &mut bench.sequences[s].blocks);
        bench.finish(usize::MAX, 1, 10);
        bench.sequences[s].output().to_vec()
    };
    let copy = |pool: &KvPool, from: BlockId| pool.gather(0..3, &[from]).unwrap();
    let overwrite = |pool: &KvPool, block: BlockId, bytes: &[u8]| {
        // A step of the same thread could not do this: it is what a foreign frame would be.
        let mut access = pool.claim(std::slice::from_ref(&block)).unwrap();
        let numbers: Vec<f32> = bytes.iter().take(8).map(|&b| f32::from(b)).collect();
        access.write_rows(
            &Cpu::portable(),
            0,
            (GroupBlocks::new(&[block], 1, 0), 3),
            (&numbers, &numbers),
        );
    };
    let healthy = text(&|_, _, _| ());
    assert_eq!(healthy, text(&|_, _, _| ()));
    let swapped = text(&|_, _, table| table.swap(0, 2));
    let lost = text(&|_, _, table| table[1] = table[3]);
    let damaged = text(&|pool, blocks, _| overwrite(pool, blocks[1], &copy(pool, blocks[2])));
    for (what, found) in [("swapped", swapped), ("lost", lost), ("damaged", damaged)] {
        assert_eq!(found[0], healthy[0], "{what}: the first token was sampled before");
        assert_ne!(found[1], healthy[1], "{what}");
    }
}

#[test]
fn seeds_stand_for_weights() {
    let prompt: Vec<u32> = (0..20).collect();
    let text = |seed: u64, dtype| {
        let config = FakeConfig {
            seed,
            ..config(16, dtype)
        };
        let model = FakeModel::new(&config).unwrap();
        let mut bench = Bench::new(model.runner, 16, config.total_blocks);
        let s = bench.add(&prompt, &SamplingParams::greedy(), 10, false);
        bench.finish(4, 1, 10);
        (bench.sequences[s].output().to_vec(), model.identity)
    };
    let (a, identity) = text(1, KvDtype::F16);
    let (b, other) = text(2, KvDtype::F16);
    assert_ne!(a, b);
    assert_ne!(identity, other);
    assert_eq!(text(1, KvDtype::F16), (a, identity));
}

#[test]
fn hooks_see_steps_and_rows() {
    let config = config(16, KvDtype::F32);
    let steps = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&steps);
    let runner = FakeModel::new(&config)
        .unwrap()
        .runner
        .with_step_hook(move |plan| {
            count.fetch_add(plan.token_ids.len() as u64, Ordering::Relaxed);
        })
        .with_logits_hook(|position, logits| {
            if position == 21 {
                logits[77] = 100.0;
            }
        });
    let mut bench = Bench::new(runner, 16, config.total_blocks);
    let s = bench.add(&(0..20).collect::<Vec<_>>(), &SamplingParams::greedy(), 5, false);
    bench.finish(8, 1, 5);
    // Position 19 is the last of the prompt: its row gives output 0, position 21 gives output 2.
    assert_eq!(bench.sequences[s].output()[2], 77);
    assert_eq!(steps.load(Ordering::Relaxed), 24);
}

#[test]
fn a_handoff_that_still_writes_keeps_the_step_out() {
    let (mut bench, pool) = bench(16);
    bench.add(&[1, 2, 3], &SamplingParams::greedy(), 1, false);
    let plan = bench.plan(&[(0, 3)]);
    let writer = pool.writer(bench.sequences[0].blocks.clone()).unwrap();
    let error = bench.runner.run(&plan, &mut NoObserver).unwrap_err();
    assert!(
        matches!(&error, RunnerError::InvalidPlan(m) if m.contains("in use by a handoff")),
        "{error}"
    );
    writer.revoke();
    bench.runner.run(&plan, &mut NoObserver).unwrap();
}
