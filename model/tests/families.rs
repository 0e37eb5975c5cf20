//! A tiny checkpoint of each family of architectures against Hugging Face transformers in float32, and against itself.

mod support;

use config::KvDtypeConfig;
use protocol::sampling::SamplingParams;
use support::checkpoint::temporary;
use support::one_answer::same_bits;
use support::twin::write_twin;
use support::{Setup, fixture, floats, ids, read_json};

fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::MIN, f64::max);
    let sum = max + logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
    logits.iter().map(|x| x - sum).collect()
}

/// The largest difference; NaN if there is one.
fn largest(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let differences = found.iter().zip(expected).map(|(&a, b)| (f64::from(a) - b).abs());
    differences.fold(0.0, |a, d| if d > a || d.is_nan() { d } else { a })
}

/// Last logits, log-probabilities of the prompt and greedy tokens are the reference's.
fn gives_the_reference(family: &str) {
    let golden = read_json(&fixture(family).join("golden.json"));
    let mut bench = Setup::float().bench(&fixture(family));
    for prompt in golden["prompts"].as_array().unwrap() {
        let (tokens, greedy) = (ids(&prompt["ids"]), ids(&prompt["greedy"]));
        let s = bench.add(&tokens, &SamplingParams::greedy(), greedy.len(), true);
        bench.finish(64, 1, greedy.len());
        let found = bench.sequences[s].clone();
        let in_prompt = largest(&found.logprobs, &floats(&prompt["prompt_logprobs"]));
        let sampled: Vec<f32> = found.sampled.iter().map(|token| token.raw_logprob).collect();
        let in_answer = largest(&sampled, &floats(&prompt["greedy_logprobs"]));
        // The last row once more for every token of the vocabulary as its target.
        let expected = log_softmax(&floats(&prompt["last_logits"]));
        let mut logprobs = Vec::new();
        for token in 0..expected.len() as u32 {
            let sequence = &mut bench.sequences[s];
            sequence.tokens = [&tokens[..], &[token]].concat();
            sequence.prompt_len = sequence.tokens.len();
            sequence.computed = tokens.len() - 1;
            sequence.sampled.clear();
            bench.advance(&[(s, 1)]);
            logprobs.extend(bench.sequences[s].logprobs.last().copied());
        }
        let last = largest(&logprobs, &expected);
        eprintln!(
            "{family}, {} tokens: largest differences {last:.6} at the last position, {in_prompt:.6} in the prompt, \
             {in_answer:.6} in the answer",
            tokens.len()
        );
        assert!(last < 1e-3 && in_prompt < 1e-3 && in_answer < 1e-3, "{family}");
        assert_eq!(found.output(), greedy, "{family}");
        bench.clear();
    }
}

/// Promise 1: (chunk, batch, block size, threads) change nothing, nor do preemption, prefix hits and hand-overs.
fn gives_one_answer(family: &str) {
    let variants = [
        (1, 16, 32, 2),
        (16, 3, 16, 1),
        (16, 16, 16, 2),
        (64, 9, 8, 2),
        (usize::MAX, 16, 16, 1),
    ];
    same_bits(&fixture(family), Setup::float(), 200, 512, &variants);
    let variants = [(1, 5, 16, 2), (16, 16, 32, 1), (usize::MAX, 7, 16, 2)];
    same_bits(&fixture(family), Setup::quantised(), 150, 512, &variants);
    let coarse = Setup {
        kv_dtype: KvDtypeConfig::Int8,
        ..Setup::quantised()
    };
    same_bits(&fixture(family), coarse, 150, 512, &variants[1..]);
}

/// The same model as a GGUF file computes the same, but for the order of sums in rotated heads.
fn has_a_gguf_twin(family: &str) {
    let golden = read_json(&fixture(family).join("golden.json"));
    let tokens = ids(&golden["prompts"][3]["ids"]);
    let run = |path: &std::path::Path| {
        let mut bench = Setup::float().bench(path);
        let s = bench.add(&tokens, &SamplingParams::greedy(), 24, true);
        bench.finish(64, 1, 24);
        bench.sequences[s].clone()
    };
    let expected = run(&fixture(family));
    let wide: Vec<f64> = expected.logprobs.iter().map(|&x| f64::from(x)).collect();
    for split in [false, true] {
        let (_keep, path) = temporary("twin.gguf");
        write_twin(&fixture(family), &path, split);
        let found = run(&path);
        let worst = largest(&found.logprobs, &wide);
        eprintln!("{family}: largest difference to its twin {worst:.7}");
        assert!(worst < 1e-4, "{family}");
        assert_eq!(found.output(), expected.output(), "{family}");
    }
}

macro_rules! families {
    ($($name:ident: $family:literal),* $(,)?) => {
        $(mod $name {
            #[test]
            fn gives_the_reference() {
                super::gives_the_reference($family);
            }

            #[test]
            fn gives_one_answer() {
                super::gives_one_answer($family);
            }

            #[test]
            fn has_a_gguf_twin() {
                super::has_a_gguf_twin($family);
            }
        })*
    };
}

families! {
    llama: "llama",
    llama3_stretched_and_tied: "llama3-rope-tied",
    mistral_with_a_window: "mistral-swa",
    mixtral: "mixtral",
    qwen2: "qwen2",
    qwen3: "qwen3",
    qwen3_moe: "qwen3-moe",
    gemma3: "gemma3",
    phi3: "phi3",
    deepseek_v3: "deepseek-v3",
}
