//! Models whose rotary embeddings change with the length of a text, served with those for long texts.

mod support;

use std::path::Path;

use config::{Compute, EngineConfig, KvDtypeConfig, ModelConfig};
use model::{LoadError, LoadedModel};
use protocol::sampling::SamplingParams;
use serde_json::{Value, json};
use support::Bench;
use support::checkpoint::{Checkpoint, Element, temporary};

/// Longer than the first training's texts of the models here.
const PROMPT: usize = 100;

fn load(path: &Path, long_texts: bool) -> Result<LoadedModel, LoadError> {
    let model = ModelConfig {
        path: path.to_str().expect("UTF-8").to_owned(),
        compute: Compute::Float32,
        kv_dtype: KvDtypeConfig::F32,
        long_texts,
        ..ModelConfig::default()
    };
    let engine = EngineConfig {
        kv_pool_tokens: 1_024,
        ..EngineConfig::default()
    };
    model::load(&model, &engine, 4_096)
}

/// The tiny model with other rotary embeddings.
fn with_rope(path: &Path, rope: &Value, trained: usize) {
    let mut checkpoint = Checkpoint::tiny();
    checkpoint.config["max_position_embeddings"] = json!(trained);
    checkpoint.config["rope_parameters"] = rope.clone();
    checkpoint.write_directory(path, Element::F32);
}

/// Log-probabilities of a prompt and of the greedy tokens behind it.
fn answer(loaded: LoadedModel) -> (Vec<f32>, Vec<u32>) {
    let mut bench = Bench::new(loaded.runner, 16, 64);
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|i| 3 + (i * 37) % 500).collect();
    let sequence = bench.add(&prompt, &SamplingParams::greedy(), 8, true);
    bench.finish(32, 1, 8);
    let sequence = &bench.sequences[sequence];
    (sequence.logprobs.clone(), sequence.output().to_vec())
}

/// With `long_texts` the model says what one with the rotary embeddings `same_as`, fixed, says, and takes `long` positions.
fn serves_long_texts(rope: &Value, trained: usize, (short, long): (u32, u32), same_as: &Value) {
    let (_keep, path) = temporary("model");
    with_rope(&path, rope, trained);
    let (plain, stretched) = (load(&path, false).expect("loads"), load(&path, true).expect("loads"));
    assert_eq!(
        (plain.max_position_embeddings, stretched.max_position_embeddings),
        (short, long)
    );
    assert_ne!(
        plain.identity, stretched.identity,
        "nodes that differ in this must not serve together"
    );
    let (_keep, path) = temporary("twin");
    with_rope(&path, same_as, long as usize);
    assert_eq!(answer(stretched), answer(load(&path, false).expect("loads")));
}

#[test]
fn dynamic_is_the_base_for_its_longest_text() {
    let rope = json!({"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0});
    let width = 16.0_f64;
    let head_dim = Checkpoint::tiny().size("hidden_size") / Checkpoint::tiny().size("num_attention_heads");
    assert_eq!(head_dim as f64, width);
    // transformers: base * (factor * length / trained - (factor - 1))^(width / (width - 2)), at 256 of 64 positions.
    let theta = 10_000.0 * (4.0_f64 * 256.0 / 64.0 - 3.0).powf(width / (width - 2.0));
    let same = json!({"rope_type": "default", "rope_theta": theta});
    serves_long_texts(&rope, 64, (64, 256), &same);
}

#[test]
fn longrope_has_its_other_list() {
    let short: Vec<f64> = (0..8).map(|i| 1.0 + 0.1 * f64::from(i)).collect();
    let long: Vec<f64> = (0..8).map(|i| 1.5 + f64::from(i)).collect();
    let rope = |short: &[f64]| {
        json!({"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": short, "long_factor": long,
            "original_max_position_embeddings": 64, "attention_factor": 1.25})
    };
    // The twin has the long list as its short one, and was trained on long texts from the first.
    let mut same = rope(&long);
    same["original_max_position_embeddings"] = json!(256);
    serves_long_texts(&rope(&short), 256, (64, 256), &same);
}

#[test]
fn a_model_without_the_choice_is_refused() {
    let (_keep, path) = temporary("model");
    Checkpoint::tiny().write_directory(&path, Element::F32);
    let error = load(&path, true).err().expect("refused").to_string();
    assert!(
        error.contains("model.long_texts = true") && error.contains("false"),
        "{error}"
    );
}
