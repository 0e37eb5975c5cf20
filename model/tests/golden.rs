//! Models against outputs of Hugging Face transformers in float32.

mod support;

use config::{Compute, KvDtypeConfig};
use engine::runner::Runner;
use protocol::sampling::SamplingParams;
use support::{Bench, Setup, fixture, floats, ids, read_json, smollm2, tiny_llama};

fn with_alternatives(n: u8) -> SamplingParams {
    SamplingParams {
        top_logprobs: Some(n),
        ..SamplingParams::greedy()
    }
}

/// Log-probabilities of `tokens[1..]`, each given the ones before it.
fn teacher_forced<R: Runner>(bench: &mut Bench<R>, tokens: &[u32]) -> Vec<f32> {
    let s = bench.add(tokens, &SamplingParams::greedy(), 1, true);
    bench.finish(64, 1, 1);
    let out = bench.sequences[s].logprobs.clone();
    bench.clear();
    out
}

fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::MIN, f64::max);
    let sum = max + logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
    logits.iter().map(|x| x - sum).collect()
}

fn largest(differences: impl IntoIterator<Item = f64>) -> f64 {
    differences
        .into_iter()
        .fold(0.0, |a, d| if d > a || d.is_nan() { d } else { a })
}

#[test]
fn tiny_llama_gives_the_reference_logits() {
    let golden = read_json(&tiny_llama().join("golden.json"));
    let mut bench = Setup::float().bench(&tiny_llama());
    for prompt in golden["prompts"].as_array().unwrap() {
        let tokens = ids(&prompt["ids"]);
        let expected = log_softmax(&floats(&prompt["last_logits"]));
        let s = bench.add(&tokens, &SamplingParams::greedy(), 1, true);
        bench.finish(64, 1, 1);
        // The last row once more for every token of the vocabulary as its target.
        let mut logprobs = Vec::new();
        for token in 0..expected.len() as u32 {
            let sequence = &mut bench.sequences[s];
            sequence.tokens = [&tokens[..], &[token]].concat();
            sequence.prompt_len = sequence.tokens.len();
            sequence.computed = tokens.len() - 1;
            bench.advance(&[(s, 1)]);
            logprobs.extend(bench.sequences[s].logprobs.last().copied());
        }
        bench.clear();
        let worst = largest(logprobs.iter().zip(&expected).map(|(&a, b)| (f64::from(a) - b).abs()));
        eprintln!(
            "prompt of {} tokens: largest difference at the last position {worst:.6}",
            tokens.len()
        );
        assert!(worst < 1e-3);
    }
}

#[test]
fn tiny_llama_gives_the_reference_prompt_logprobs_and_greedy_tokens() {
    let golden = read_json(&tiny_llama().join("golden.json"));
    let mut bench = Setup::float().bench(&tiny_llama());
    for prompt in golden["prompts"].as_array().unwrap() {
        let (tokens, greedy) = (ids(&prompt["ids"]), ids(&prompt["greedy"]));
        let s = bench.add(&tokens, &SamplingParams::greedy(), greedy.len(), true);
        bench.finish(usize::MAX, 1, greedy.len());
        let s = &bench.sequences[s];
        let expected = floats(&prompt["prompt_logprobs"]);
        assert_eq!(s.logprobs.len(), expected.len());
        let prompt_worst = largest(s.logprobs.iter().zip(&expected).map(|(&a, b)| (f64::from(a) - b).abs()));
        assert_eq!(s.output(), greedy);
        let expected = floats(&prompt["greedy_logprobs"]);
        let greedy_worst = largest(
            s.sampled
                .iter()
                .zip(&expected)
                .map(|(a, b)| (f64::from(a.raw_logprob) - b).abs()),
        );
        eprintln!(
            "prompt of {} tokens: prompt {prompt_worst:.6}, greedy {greedy_worst:.6}",
            tokens.len()
        );
        assert!(prompt_worst < 1e-3 && greedy_worst < 1e-3);
        bench.clear();
    }
}

/// Measured distance of a path from the reference.
struct Distance {
    top20_mean: f64,
    top20_worst: f64,
    prompt_mean: f64,
    prompt_worst: f64,
    path_mean: f64,
    path_worst: f64,
}

/// Runs all golden prompts; greedy tokens must agree up to the first position whose margin is below `margin`.
fn against_golden(setup: Setup, margin: f64) -> Distance {
    let golden = read_json(&fixture("smollm2-135m-instruct-q4_1.golden.json"));
    let mut bench = setup.bench(&smollm2());
    let (mut top20, mut in_prompt, mut in_path) = (Vec::new(), Vec::new(), Vec::new());
    let (mut agreed, mut total) = (0, 0);
    for prompt in golden["prompts"].as_array().unwrap() {
        let (tokens, greedy) = (ids(&prompt["ids"]), ids(&prompt["greedy"]));
        let s = bench.add(&tokens, &with_alternatives(255), greedy.len(), false);
        bench.finish(64, 1, greedy.len());
        let s = &bench.sequences[s];
        for pair in prompt["top20"].as_array().unwrap() {
            let (token, expected) = (pair[0].as_u64().unwrap() as u32, pair[1].as_f64().unwrap());
            let found = s.sampled[0].top_logprobs.iter().find(|x| x.0 == token);
            let found = found.unwrap_or_else(|| panic!("token {token} is not among the best 255"));
            top20.push((f64::from(found.1) - expected).abs());
        }
        let same = s.output().iter().zip(&greedy).take_while(|(a, b)| a == b).count();
        let margins = floats(&prompt["margins"]);
        let sure = margins.iter().take_while(|&&m| m >= margin).count();
        eprintln!(
            "{} tokens: {same} of {} greedy tokens agree, {sure} must",
            tokens.len(),
            greedy.len()
        );
        assert!(
            same >= sure.min(greedy.len()),
            "left the reference at a margin of {}",
            margins[same]
        );
        (agreed, total) = (agreed + same, total + greedy.len());
        bench.clear();

        let path = teacher_forced(&mut bench, &[&tokens[..], &greedy[..]].concat());
        let (own_prompt, own_path) = path.split_at(tokens.len() - 1);
        let difference = |own: &[f32], expected: &[f64]| -> Vec<f64> {
            assert_eq!(own.len(), expected.len());
            own.iter()
                .zip(expected)
                .map(|(&a, b)| (f64::from(a) - b).abs())
                .collect()
        };
        in_prompt.extend(difference(own_prompt, &floats(&prompt["prompt_logprobs"])));
        in_path.extend(difference(own_path, &floats(&prompt["greedy_logprobs"])));
    }
    let mean = |d: &[f64]| d.iter().sum::<f64>() / d.len() as f64;
    let distance = Distance {
        top20_mean: mean(&top20),
        top20_worst: largest(top20),
        prompt_mean: mean(&in_prompt),
        prompt_worst: largest(in_prompt),
        path_mean: mean(&in_path),
        path_worst: largest(in_path),
    };
    eprintln!(
        "{:?}/{:?}: |difference| mean (worst): top 20 {:.5} ({:.5}), prompt {:.5} ({:.5}), golden path {:.5} ({:.5}); \
         {agreed} of {total} greedy tokens before the first difference",
        setup.compute,
        setup.kv_dtype,
        distance.top20_mean,
        distance.top20_worst,
        distance.prompt_mean,
        distance.prompt_worst,
        distance.path_mean,
        distance.path_worst
    );
    distance
}

#[test]
fn smollm2_in_float_is_the_reference() {
    let d = against_golden(Setup::float(), 0.01);
    assert!(d.top20_worst < 2e-3 && d.prompt_worst < 2e-3 && d.path_worst < 2e-3);
}

#[test]
fn smollm2_as_served_by_default_is_close_to_the_reference() {
    // llama.cpp's distances on the same file.
    let d = against_golden(Setup::quantised(), 0.56);
    assert!(d.top20_mean <= 0.085, "top 20: {}", d.top20_mean);
    assert!(d.path_mean <= 0.021, "golden path: {}", d.path_mean);
}

#[test]
fn smollm2_in_precise_is_almost_the_reference() {
    let setup = Setup {
        compute: Compute::Precise,
        ..Setup::quantised()
    };
    let d = against_golden(setup, 0.02);
    assert!(d.top20_mean <= 2e-3, "top 20: {}", d.top20_mean);
    assert!(d.path_mean <= 1e-3, "golden path: {}", d.path_mean);
}

/// What coarser caches cost, on top of that.
#[test]
fn smollm2_with_other_caches_stays_close() {
    for kv_dtype in [KvDtypeConfig::Bf16, KvDtypeConfig::Int8] {
        let setup = Setup {
            kv_dtype,
            ..Setup::quantised()
        };
        let d = against_golden(setup, 0.7);
        assert!(d.top20_mean <= 0.085, "{kv_dtype:?}, top 20: {}", d.top20_mean);
        assert!(d.path_mean <= 0.085, "{kv_dtype:?}, golden path: {}", d.path_mean);
    }
}
