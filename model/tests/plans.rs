//! Plans that break a limit are refused with a reason, change nothing, and never panic.

mod support;

use std::sync::Arc;

use engine::plan::{BlockCopy, BlockId, SequenceId, Span, StepPlan, Wanted};
use engine::runner::{NoObserver, Runner, RunnerError};
use model::fake::{FakeConfig, FakeModel};
use protocol::kv::{KvDtype, KvLayout};
use protocol::sampling::SamplingParams;
use protocol::window::Groups;
use support::{Bench, Setup, tiny_llama};

/// Two sequences: one prefills 20 rows with targets, one decodes with a history.
fn valid<R: Runner>(bench: &mut Bench<R>) -> StepPlan {
    let params = SamplingParams {
        greedy: false,
        presence_penalty: 0.5,
        ..SamplingParams::greedy()
    };
    let a = bench.add(&(0..20).collect::<Vec<_>>(), &SamplingParams::greedy(), 4, true);
    let b = bench.add(&(40..70).collect::<Vec<_>>(), &params, 4, false);
    bench.advance(&[(b, 30)]);
    bench.plan(&[(a, 20), (b, 1)])
}

fn copy(from: u32, to: BlockId, tokens: u32) -> BlockCopy {
    BlockCopy {
        from: BlockId(from),
        to,
        tokens,
    }
}

type Change = (&'static str, fn(&mut StepPlan));

const CHANGES: &[Change] = &[
    ("input token 512 is outside of the vocabulary of 512", |p| {
        p.token_ids[3] = 512
    }),
    ("target 4294967295 is outside of the vocabulary", |p| {
        p.targets[1] = u32::MAX
    }),
    ("history token 700 is outside of the vocabulary", |p| p.history[0] = 700),
    ("input tokens 20..22 lie outside of the plan's 21", |p| {
        p.sequences[1].rows.len = 2
    }),
    ("its rows start at 19, the ones before end at 20", |p| {
        p.sequences[1].rows.start = 19
    }),
    ("no rows", |p| p.sequences[1].rows.len = 0),
    ("22 input tokens for 21 rows", |p| p.token_ids.push(1)),
    ("input tokens 0..20 lie outside of the plan's 0", |p| {
        p.token_ids.clear()
    }),
    ("21 input tokens for 20 rows", |p| drop(p.sequences.pop())),
    ("blocks 2..99 lie outside", |p| p.sequences[1].blocks.len = 97),
    ("lie outside of the plan's", |p| {
        p.sequences[1].blocks = Span {
            start: u32::MAX,
            len: u32::MAX,
        }
    }),
    ("1 blocks of 16 tokens do not cover 31 positions", |p| {
        p.sequences[1].blocks.len = 1
    }),
    ("block 512 of a pool of 512", |p| p.block_ids[0] = BlockId(512)),
    ("is beyond the model's 512 positions", |p| {
        p.sequences[1].start_position = u32::MAX
    }),
    ("position 512 is beyond the model's 512 positions", |p| {
        p.sequences[1].start_position = 512
    }),
    ("targets 0..99 lie outside", |p| p.sequences[0].targets.len = 99),
    ("19 targets for 1 rows", |p| {
        p.sequences[1].targets = Span { start: 0, len: 19 }
    }),
    ("history tokens 0..99 lie outside", |p| {
        p.sequences[1].sample.as_mut().unwrap().history.len = 99
    }),
    ("history of 31 tokens for a prompt of 32", |p| {
        p.sequences[1].sample.as_mut().unwrap().prompt_len = 32
    }),
    ("is written and also used by sequence 0", |p| {
        let own = p.sequences[1].blocks.start as usize;
        p.block_ids[own + 1] = p.block_ids[0];
    }),
    ("sequence 0: block 503 is written and also used by sequence 0", |p| {
        p.block_ids[1] = p.block_ids[0]
    }),
    ("nothing is wanted of its last row", |p| {
        p.sequences[1].sample.as_mut().unwrap().wanted = Wanted::Tokens(0)
    }),
    ("is copied to block 400, which no sequence writes from slot 0 on", |p| {
        p.copies.push(copy(300, BlockId(400), 0))
    }),
    ("which no sequence writes from slot 13 on", |p| {
        let written = p.block_ids[p.sequences[1].blocks.start as usize + 1];
        p.copies.push(copy(300, written, 13));
    }),
    ("block 512 of a pool of 512 is copied", |p| {
        let written = p.block_ids[p.sequences[1].blocks.start as usize + 1];
        p.copies.push(copy(512, written, 14));
    }),
    ("is copied to block 482, which no sequence writes", |p| {
        let read = p.block_ids[p.sequences[1].blocks.start as usize];
        p.copies.push(copy(300, read, 14));
    }),
    ("temperature is 0", |p| {
        let sample = p.sequences[1].sample.as_mut().unwrap();
        sample.params = Arc::new(SamplingParams {
            temperature: 0.0,
            ..(*sample.params).clone()
        });
    }),
    ("top_p is NaN", |p| {
        let sample = p.sequences[1].sample.as_mut().unwrap();
        sample.params = Arc::new(SamplingParams {
            top_p: f32::NAN,
            ..(*sample.params).clone()
        });
    }),
];

fn check<R: Runner>(make: impl Fn() -> Bench<R>) {
    let mut bench = make();
    let good = valid(&mut bench);
    let expected = bench.runner.run(&good, &mut NoObserver).unwrap();
    let mut bench = make();
    valid(&mut bench);
    for (words, change) in CHANGES {
        let mut plan = good.clone();
        change(&mut plan);
        match bench.runner.run(&plan, &mut NoObserver) {
            Err(RunnerError::InvalidPlan(message)) if message.contains(words) => {}
            other => panic!("expected {words:?}, got {other:?}"),
        }
    }
    // The runner is as good as new.
    let found = bench.runner.run(&good, &mut NoObserver).unwrap();
    assert_eq!(found.sampled, expected.sampled);
    assert_eq!(found.prompt_logprobs, expected.prompt_logprobs);
    let empty = bench.runner.run(&StepPlan::default(), &mut NoObserver).unwrap();
    assert!(empty.sampled.is_empty() && empty.prompt_logprobs.is_empty());
}

#[test]
fn the_model_refuses_wrong_plans() {
    check(|| Setup::quantised().bench(&tiny_llama()));
}

#[test]
fn the_fake_refuses_wrong_plans() {
    check(|| {
        let config = FakeConfig {
            layout: KvLayout {
                num_layers: 2,
                num_kv_heads: 1,
                head_dim: 4,
                block_tokens: 16,
                dtype: KvDtype::F16,
                latent: false,
                groups: Groups::ONE,
            },
            total_blocks: 512,
            vocab_size: 512,
            max_position_embeddings: 512,
            seed: 1,
        };
        Bench::new(FakeModel::new(&config).unwrap().runner, 16, 512)
    });
}

#[test]
fn blocks_that_rows_see_must_be_there() {
    let layout = KvLayout {
        num_layers: 2,
        num_kv_heads: 1,
        head_dim: 4,
        block_tokens: 16,
        dtype: KvDtype::F16,
        latent: false,
        groups: Groups::sliding(20),
    };
    let config = FakeConfig {
        layout,
        total_blocks: 16,
        vocab_size: 512,
        max_position_embeddings: 512,
        seed: 1,
    };
    let mut bench = Bench::new(FakeModel::new(&config).unwrap().runner, 16, 16);
    let s = bench.add(&(0..60).collect::<Vec<_>>(), &SamplingParams::greedy(), 4, false);
    bench.advance(&[(s, 60)]);
    // Position 60 sees 41..=60: of the blocks those from the third on.
    let plan = bench.plan(&[(s, 1)]);
    let without = |gone: &[usize]| {
        let mut plan = plan.clone();
        gone.iter().for_each(|at| plan.block_ids[*at] = BlockId::NONE);
        plan
    };
    let expected = bench.runner.run(&plan, &mut NoObserver).unwrap().sampled;
    for gone in [&[0][..], &[0, 1]] {
        let found = bench.runner.run(&without(gone), &mut NoObserver).unwrap();
        assert_eq!(found.sampled, expected, "{gone:?} are gone");
    }
    for (gone, first) in [(&[1][..], 1), (&[0, 1, 2], 2), (&[0, 1, 3], 3), (&[3], 3)] {
        let words = format!("block {first} of its table is gone");
        match bench.runner.run(&without(gone), &mut NoObserver) {
            Err(RunnerError::InvalidPlan(message)) if message.contains(&words) => {}
            other => panic!("expected {words:?}, got {other:?}"),
        }
    }
}

#[test]
fn shared_prefix_blocks_may_be_read_by_several_sequences() {
    let mut bench = Setup::quantised().bench(&tiny_llama());
    let prompt: Vec<u32> = (0..40).collect();
    let a = bench.add(&prompt, &SamplingParams::greedy(), 8, false);
    bench.advance(&[(a, 40)]);
    let first = bench.sequences[a].sampled[0].clone();
    bench.finish(1, 1, 8);
    let alone = bench.sequences[a].output().to_vec();
    // A second choice shares the two full blocks of the prompt and owns a copy of the third.
    let b = bench.add(&prompt, &SamplingParams::greedy(), 8, false);
    let shared = bench.sequences[a].blocks[..2].to_vec();
    bench.sequences[b].blocks[..2].copy_from_slice(&shared);
    bench.sequences[b].computed = 32;
    bench.sequences[a].tokens.truncate(41);
    bench.sequences[a].sampled.truncate(1);
    bench.sequences[a].computed = 40;
    bench.advance(&[(a, 1), (b, 8)]);
    assert_eq!(bench.sequences[b].sampled[0], first);
    bench.finish(1, 2, 8);
    assert_eq!(bench.sequences[a].output(), alone);
    assert_eq!(bench.sequences[b].output(), alone);
    assert_eq!(bench.plan(&[(b, 1)]).sequences[0].id, SequenceId(b as u64));
}
