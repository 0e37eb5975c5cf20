//! Promise 1 at the runner: a sequence's outputs are the same bits however its rows are cut and mixed.

use std::path::Path;

use engine::plan::{BlockId, GroupBlocks};
use engine::runner::{LayerObserver, Runner};
use model::kv_pool::KvPool;
use protocol::kv::KvPlace;
use protocol::sampling::{SampledToken, SamplingParams};

use super::{Bench, Setup};

/// A prompt and what is asked of it.
pub struct Case {
    pub prompt: Vec<u32>,
    pub params: SamplingParams,
    pub prompt_logprobs: bool,
    pub adapter: Option<u32>,
}

/// What must be equal, as bits.
#[derive(Clone, PartialEq, Debug)]
pub struct Bits {
    pub tokens: Vec<u32>,
    numbers: Vec<u32>,
}

impl Bits {
    pub fn new(sampled: &[SampledToken], prompt_logprobs: &[f32]) -> Self {
        let mut numbers: Vec<u32> = prompt_logprobs.iter().map(|x| x.to_bits()).collect();
        for s in sampled {
            numbers.extend([s.position, s.logprob.to_bits(), s.raw_logprob.to_bits()]);
            numbers.extend(
                s.top_logprobs
                    .iter()
                    .flat_map(|&(token, logprob)| [token, logprob.to_bits()]),
            );
        }
        Self {
            tokens: sampled.iter().map(|s| s.token).collect(),
            numbers,
        }
    }
}

/// Cases of many lengths and all kinds of sampling; `longest` bounds the prompts.
pub fn cases(count: usize, longest: usize, vocab: u32) -> Vec<Case> {
    (0..count)
        .map(|i| {
            let length = 1 + (i * 37 + 11) % longest;
            let prompt = (0..length as u32)
                .map(|t| (t * t * 31 + t * 7 + i as u32 * 101 + 3) % vocab)
                .collect();
            let mut params = SamplingParams {
                seed: 1_000 + i as u64,
                ..SamplingParams::greedy()
            };
            params.greedy = i % 3 == 0;
            params.temperature = 0.9;
            match i % 4 {
                0 => params.top_logprobs = Some(5),
                1 => params.top_p = 0.95,
                2 => params.repetition_penalty = 1.2,
                _ => (params.top_k, params.frequency_penalty, params.choice) = (30, 0.3, 2),
            }
            Case {
                prompt,
                params,
                prompt_logprobs: i % 2 == 0,
                adapter: None,
            }
        })
        .collect()
}

/// Runs the cases with at most `chunk` rows of a sequence and `batch` sequences in a step.
pub fn run<R: Runner>(bench: &mut Bench<R>, cases: &[Case], chunk: usize, batch: usize, outputs: usize) -> Vec<Bits> {
    for case in cases {
        let s = bench.add(&case.prompt, &case.params, outputs, case.prompt_logprobs);
        bench.sequences[s].adapter = case.adapter;
    }
    bench.finish(chunk, batch, outputs);
    let bits = bench
        .sequences
        .iter()
        .map(|s| Bits::new(&s.sampled, &s.logprobs))
        .collect();
    bench.clear();
    bits
}

/// Every case alone, its prompt in one step.
pub fn alone<R: Runner>(bench: &mut Bench<R>, cases: &[Case], outputs: usize) -> Vec<Bits> {
    cases
        .iter()
        .flat_map(|case| run(bench, std::slice::from_ref(case), usize::MAX, 1, outputs))
        .collect()
}

/// Copies every layer within the step, as a prefill node does, and checks at the end that nothing changed afterwards.
struct Pusher<'a> {
    pool: &'a KvPool,
    blocks: GroupBlocks<'a>,
    layers: Vec<(KvPlace, bytes::Bytes)>,
}

impl Pusher<'_> {
    fn gather(&self, place: KvPlace) -> bytes::Bytes {
        let blocks: Vec<BlockId> = self.blocks.of(place.group as usize).iter().collect();
        self.pool.gather(place.layer..place.layer + 1, &blocks).unwrap()
    }
}

impl LayerObserver for Pusher<'_> {
    fn layer_computed(&mut self, place: KvPlace) {
        let of_group = self.layers.iter().filter(|(other, _)| other.group == place.group);
        assert_eq!(
            place.layer as usize,
            of_group.count(),
            "layers are reported in order, once"
        );
        self.layers.push((place, self.gather(place)));
    }
}

/// Prefills each case on one runner, moves its KV to other blocks of another runner's pool, and goes on there.
pub fn handed_over<R: Runner>(
    prefill: (&mut Bench<R>, &std::sync::Arc<KvPool>),
    decode: (&mut Bench<R>, &std::sync::Arc<KvPool>),
    cases: &[Case],
    outputs: usize,
) -> Vec<Bits> {
    let ((from, from_pool), (to, to_pool)) = (prefill, decode);
    let groups = from_pool.layout().groups.count();
    // The two pools hand out different ids.
    to.take_blocks(5 * to.block_tokens);
    for case in cases {
        let s = from.add(&case.prompt, &case.params, 0, case.prompt_logprobs);
        from.sequences[s].adapter = case.adapter;
        let blocks = from.sequences[s].blocks.clone();
        let plan = from.plan(&[(s, case.prompt.len())]);
        let mut pusher = Pusher {
            pool: from_pool,
            blocks: GroupBlocks::new(&blocks, groups, 0),
            layers: Vec::new(),
        };
        let out = from.runner.run(&plan, &mut pusher).unwrap();
        for (place, layer) in &pusher.layers {
            assert_eq!(*layer, pusher.gather(*place), "nothing changes a layer that is done");
        }
        let layers = pusher.layers;
        from.apply(out);

        let d = to.add(&case.prompt, &case.params, outputs, false);
        let (target, source) = (&mut to.sequences[d], &from.sequences[s]);
        target.tokens.clone_from(&source.tokens);
        target.sampled.clone_from(&source.sampled);
        target.logprobs.clone_from(&source.logprobs);
        target.computed = case.prompt.len();
        target.adapter = case.adapter;
        let table = GroupBlocks::new(&target.blocks, groups, 0);
        let by_group = (0..groups).flat_map(|group| table.of(group).iter());
        let writer = to_pool.writer(by_group.collect()).unwrap();
        let of_prompt = (blocks.len() / groups) as u32;
        for (place, payload) in &layers {
            let first = place.group * table.len() as u32;
            writer.write(place.layer, 1, first, of_prompt, payload).unwrap();
        }
        writer.revoke();
        from.clear();
    }
    to.finish(16, 16, outputs);
    let bits = to
        .sequences
        .iter()
        .map(|s| Bits::new(&s.sampled, &s.logprobs))
        .collect();
    to.clear();
    bits
}

/// Loses a sequence's blocks in the middle of its answer and computes it again in others.
pub fn preempted<R: Runner>(bench: &mut Bench<R>, cases: &[Case], outputs: usize) -> Vec<Bits> {
    for case in cases {
        let s = bench.add(&case.prompt, &case.params, outputs, case.prompt_logprobs);
        bench.sequences[s].adapter = case.adapter;
    }
    bench.finish(5, 16, outputs / 2);
    for s in 0..cases.len() {
        let tokens = bench.sequences[s].tokens.len() + outputs;
        let fresh = bench.take_blocks(tokens);
        let sequence = &mut bench.sequences[s];
        sequence.blocks = fresh;
        sequence.computed = 0;
        sequence.prompt_logprobs = false;
    }
    bench.finish(9, 7, outputs);
    let bits = bench
        .sequences
        .iter()
        .map(|s| Bits::new(&s.sampled, &s.logprobs))
        .collect();
    bench.clear();
    bits
}

/// Goes on where another sequence has computed the full blocks of the prompt, as after a hit in the prefix cache.
pub fn behind_a_shared_prefix<R: Runner>(bench: &mut Bench<R>, cases: &[Case], outputs: usize) -> Vec<Bits> {
    let mut all = Vec::new();
    for case in cases {
        let first = bench.add(&case.prompt, &case.params, 0, false);
        bench.advance(&[(first, case.prompt.len())]);
        let second = bench.add(&case.prompt, &case.params, outputs, false);
        let full = (case.prompt.len() - 1) / bench.block_tokens;
        for i in 0..full * bench.groups {
            // Exchanged, so that each is given back once.
            let own = bench.sequences[second].blocks[i];
            bench.sequences[second].blocks[i] = std::mem::replace(&mut bench.sequences[first].blocks[i], own);
        }
        bench.sequences[second].computed = full * bench.block_tokens;
        while bench.sequences[second].sampled.len() < outputs {
            let rows = bench.sequences[second].left();
            bench.advance(&[(second, rows)]);
        }
        all.push(Bits::new(&bench.sequences[second].sampled, &[]));
        bench.clear();
    }
    all
}

/// Every case alone against other chunks, batches, block sizes and threads, after preemption, behind a prefix that another
/// sequence computed, and after a hand-over. `variants`: (chunk, batch, block size, threads).
pub fn same_bits(path: &Path, setup: Setup, longest: usize, vocab: u32, variants: &[(usize, usize, usize, usize)]) {
    let outputs = 6;
    let cases = cases(16, longest, vocab);
    let expected = alone(&mut setup.bench(path), &cases, outputs);
    let distinct: std::collections::HashSet<_> = expected.iter().map(|b| b.tokens.clone()).collect();
    assert!(distinct.len() > 12, "the cases are too alike to show a mix-up");
    for &(chunk, batch, block_tokens, threads) in variants {
        let mut bench = Setup {
            block_tokens,
            threads,
            ..setup
        }
        .bench(path);
        let found = run(&mut bench, &cases, chunk, batch, outputs);
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(
                found, expected,
                "case {i}, chunk {chunk}, batch {batch}, block {block_tokens}, {threads} threads"
            );
        }
    }
    assert_eq!(
        preempted(&mut setup.bench(path), &cases, outputs),
        expected,
        "after preemption"
    );
    let shared = behind_a_shared_prefix(&mut setup.bench(path), &cases, outputs);
    for (i, (found, expected)) in shared.iter().zip(&expected).enumerate() {
        assert!(found.tokens == expected.tokens, "case {i} behind a shared prefix");
        assert!(
            expected.numbers.ends_with(&found.numbers),
            "case {i} behind a shared prefix"
        );
    }
    let (a, b) = (setup.load(path), setup.load(path));
    let groups = a.layout.groups;
    let total = a.pool.total_blocks();
    let mut prefill = Bench::new(a.runner, setup.block_tokens, total).in_groups(groups);
    let mut decode = Bench::new(b.runner, setup.block_tokens, total).in_groups(groups);
    let found = handed_over((&mut prefill, &a.pool), (&mut decode, &b.pool), &cases, outputs);
    assert_eq!(found, expected, "after the hand-over");
}
