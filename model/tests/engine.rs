//! The runners under the real scheduler, with room for all sequences and with a pool in which most have to wait: the plans
//! it makes are accepted, and the bits are those of each sequence alone.

mod support;

use std::collections::HashMap;
use std::sync::Arc;

use engine::engine::Engine;
use engine::event::EngineEvent;
use engine::limits::EngineLimits;
use engine::plan::SequenceId;
use engine::runner::{NoObserver, Runner};
use engine::sequence::{OnFinish, SequenceSpec};
use model::fake::{FakeConfig, FakeModel};
use protocol::kv::{KvDtype, KvLayout};
use protocol::sampling::{SampledToken, StopRules};
use protocol::window::Groups;
use support::one_answer::{Bits, Case, alone, cases};
use support::{Bench, Setup, fixture, tiny_llama};

/// Runs all cases through an engine; returns their bits and the largest batch.
fn scheduled<R: Runner>(runner: &mut R, limits: EngineLimits, cases: &[Case], outputs: usize) -> (Vec<Bits>, usize) {
    let mut engine = Engine::new(limits).unwrap();
    let mut order: Vec<SequenceId> = Vec::new();
    for case in cases {
        let spec = SequenceSpec {
            token_ids: case.prompt.clone(),
            prompt_len: case.prompt.len(),
            sampling: Arc::new(case.params.clone()),
            stop: StopRules {
                max_tokens: outputs as u32,
                eos_token_ids: Vec::new(),
                ignore_eos: true,
                stop_token_ids: Vec::new(),
            },
            prompt_logprobs: case.prompt_logprobs.then_some(0),
            on_finish: OnFinish::Release,
            first_only: None,
            adapter: None,
            cache_key: 0,
        };
        order.push(engine.add(spec).unwrap());
    }
    let mut results: HashMap<SequenceId, (Vec<SampledToken>, Vec<f32>)> = HashMap::new();
    let (mut events, mut largest) = (Vec::new(), 0);
    while let Some(plan) = engine.plan() {
        largest = largest.max(plan.sequences.len());
        let out = runner.run(plan, &mut NoObserver).unwrap();
        engine.apply(&out, &mut events).unwrap();
        engine.check_invariants().unwrap();
        for event in events.drain(..) {
            match event {
                EngineEvent::Token {
                    id,
                    token,
                    prompt_logprobs,
                    ..
                } => {
                    let entry = results.entry(id).or_default();
                    entry.0.push(token);
                    let targets = prompt_logprobs.unwrap_or_default().into_iter();
                    entry.1.extend(targets.map(|target| target.logprob));
                }
                EngineEvent::Preempted { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
    (
        order
            .iter()
            .map(|id| Bits::new(&results[id].0, &results[id].1))
            .collect(),
        largest,
    )
}

/// With a window, sequences let go of blocks under the engine; alone they keep all.
fn check<R: Runner>(make: impl Fn() -> R, total_blocks: usize, groups: Groups) {
    let (outputs, block_tokens) = (40, 16);
    let cases = cases(16, 120, 500);
    let expected = alone(
        &mut Bench::new(make(), block_tokens, total_blocks).in_groups(groups),
        &cases,
        outputs,
    );
    let roomy = EngineLimits {
        total_blocks,
        block_tokens,
        max_num_seqs: 16,
        max_batch_tokens: 96,
        prefill_chunk_tokens: 40,
        max_seq_len: 512,
        mixed_prefill_tokens: 1_000,
        mixed_prefill_time: std::time::Duration::ZERO,
        prefix_cache: true,
        groups,
    };
    let (found, largest) = scheduled(&mut make(), roomy, &cases, outputs);
    assert!(largest > 12, "{largest} sequences in the largest step");
    assert_eq!(found, expected);
    let tight = EngineLimits {
        // Less than the longest sequence has tokens for, if it need not keep them.
        total_blocks: if groups.slides(0) { 9 } else { 14 * groups.count() },
        max_batch_tokens: 50,
        max_seq_len: 200,
        ..roomy
    };
    let (found, largest) = scheduled(&mut make(), tight, &cases, outputs);
    assert!((2..10).contains(&largest), "{largest} sequences in the largest step");
    assert_eq!(found, expected);
}

#[test]
fn tiny_llama_under_the_engine() {
    check(|| Setup::quantised().load(&tiny_llama()).runner, 512, Groups::ONE);
}

#[test]
fn tiny_mistral_under_the_engine() {
    let mistral = fixture("mistral-swa");
    check(|| Setup::quantised().load(&mistral).runner, 512, Groups::sliding(32));
}

#[test]
fn the_fake_under_the_engine() {
    let config = |groups| FakeConfig {
        layout: KvLayout {
            num_layers: 2,
            num_kv_heads: 1,
            head_dim: 4,
            block_tokens: 16,
            dtype: KvDtype::F16,
            latent: false,
            groups,
        },
        total_blocks: 512,
        vocab_size: 512,
        max_position_embeddings: 512,
        seed: 1,
    };
    check(
        || FakeModel::new(&config(Groups::ONE)).unwrap().runner,
        512,
        Groups::ONE,
    );
    let sliding = Groups::sliding(40);
    check(|| FakeModel::new(&config(sliding)).unwrap().runner, 512, sliding);
    let mixed = Groups::mixed(1, 2, 40).with_spare(1, 1);
    check(|| FakeModel::new(&config(mixed)).unwrap().runner, 512, mixed);
}
