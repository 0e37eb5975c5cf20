//! Promise 1 at the runner: a sequence's outputs are the same bits however its rows are cut and mixed.

use engine::runner::{LayerObserver, Runner};
use model::kv_pool::KvPool;
use protocol::sampling::{SampledToken, SamplingParams};

use super::Bench;

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
    blocks: &'a [engine::plan::BlockId],
    layers: Vec<bytes::Bytes>,
}

impl LayerObserver for Pusher<'_> {
    fn layer_computed(&mut self, layer: u32) {
        assert_eq!(layer as usize, self.layers.len(), "layers are reported in order, once");
        self.layers
            .push(self.pool.gather(layer..layer + 1, self.blocks).unwrap());
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
    let num_layers = from_pool.layout().num_layers;
    // The two pools hand out different ids.
    to.take_blocks(5 * to.block_tokens);
    for case in cases {
        let s = from.add(&case.prompt, &case.params, 0, case.prompt_logprobs);
        from.sequences[s].adapter = case.adapter;
        let blocks = from.sequences[s].blocks.clone();
        let plan = from.plan(&[(s, case.prompt.len())]);
        let mut pusher = Pusher {
            pool: from_pool,
            blocks: &blocks,
            layers: Vec::new(),
        };
        let out = from.runner.run(&plan, &mut pusher).unwrap();
        let layers = pusher.layers;
        assert_eq!(layers.concat(), from_pool.gather(0..num_layers, &blocks).unwrap());
        from.apply(out);

        let d = to.add(&case.prompt, &case.params, outputs, false);
        let (target, source) = (&mut to.sequences[d], &from.sequences[s]);
        target.tokens.clone_from(&source.tokens);
        target.sampled.clone_from(&source.sampled);
        target.logprobs.clone_from(&source.logprobs);
        target.computed = case.prompt.len();
        target.adapter = case.adapter;
        let writer = to_pool.writer(target.blocks.clone()).unwrap();
        for (layer, payload) in layers.iter().enumerate() {
            writer.write(layer as u32, 1, 0, blocks.len() as u32, payload).unwrap();
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
