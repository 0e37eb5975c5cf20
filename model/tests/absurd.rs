//! What a `config.json` or a GGUF header can say, true or not: it is loaded or refused, and nothing panics.

mod support;

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

use config::{EngineConfig, KvDtypeConfig, ModelConfig};
use model::inspect::inspect;
use serde_json::{Value, json};
use support::checkpoint::temporary;
use support::fixture;
use support::twin::write_twin;

/// Models of the fixtures.
const FAMILIES: [&str; 10] = [
    "deepseek-v3",
    "gemma3",
    "llama",
    "llama3-rope-tied",
    "mistral-swa",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3-moe",
];

fn wide() -> ModelConfig {
    ModelConfig {
        kv_dtype: KvDtypeConfig::F32,
        ..ModelConfig::default()
    }
}

/// Whatever comes of it, in words.
fn load(path: &Path) -> String {
    let model = ModelConfig {
        path: path.to_str().unwrap().to_owned(),
        ..ModelConfig::default()
    };
    let engine = EngineConfig {
        kv_pool_tokens: 1_024,
        ..EngineConfig::default()
    };
    model::load(&model, &engine, 4_096).map_or_else(|error| error.to_string(), |_| String::new())
}

/// Every leaf of a JSON value, by its path.
fn leaves(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => fields
            .iter()
            .for_each(|(key, field)| leaves(field, &format!("{at}/{key}"), found)),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(index, item)| leaves(item, &format!("{at}/{index}"), found)),
        _ => found.push(at.to_owned()),
    }
}

#[test]
fn nothing_that_a_config_can_say_makes_a_panic() {
    let numbers = "0 1 3 16777216 4294967296 18446744073709551615 -1 0.5 1e308";
    let others = ["null", "true", "\"x\"", "[]", "{}", "[1, \"a\"]"];
    let mut panics = Vec::new();
    for family in FAMILIES {
        let from = fixture(family);
        let (_keep, path) = temporary("model");
        fs::create_dir_all(&path).unwrap();
        for file in ["model.safetensors", "tokenizer.json"] {
            fs::copy(from.join(file), path.join(file)).unwrap();
        }
        let config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
        let mut all = Vec::new();
        leaves(&config, "", &mut all);
        let mut check = |changed: &Value, what: String| {
            fs::write(path.join("config.json"), changed.to_string()).unwrap();
            let looked = catch_unwind(|| {
                inspect(&path, &wide(), 65_536, 0).map_or_else(|e| e.to_string(), |i| i.to_string());
                load(&path);
            });
            if looked.is_err() {
                panics.push(format!("{family}: {what}"));
            }
        };
        for leaf in &all {
            for absurd in numbers.split(' ').chain(others) {
                let mut changed = config.clone();
                *changed.pointer_mut(leaf).unwrap() = serde_json::from_str(absurd).unwrap();
                check(&changed, format!("{leaf} = {absurd}"));
            }
        }
        // Sizes that are bearable one by one.
        for size in [1_u64 << 16, 1 << 24] {
            let mut changed = config.clone();
            for leaf in &all {
                let value = changed.pointer_mut(leaf).unwrap();
                if value.is_u64() {
                    *value = json!(size);
                }
            }
            check(&changed, format!("all whole numbers are {size}"));
            for leaf in &all {
                let mut one_less = changed.clone();
                *one_less.pointer_mut(leaf).unwrap() = config.pointer(leaf).unwrap().clone();
                check(&one_less, format!("all whole numbers but {leaf} are {size}"));
            }
        }
    }
    assert!(panics.is_empty(), "{panics:#?}");
}

/// Where the values of four bytes lie in a file of the tests' own writer, by key.
fn numbers_in(bytes: &[u8]) -> Vec<(String, usize)> {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let (mut at, mut found) = (24, Vec::new());
    for _ in 0..long(16) {
        let key = String::from_utf8(bytes[at + 8..at + 8 + long(at)].to_vec()).unwrap();
        at += 8 + long(at);
        let kind = word(at);
        at += 4;
        at += match kind {
            4 | 6 => {
                found.push((key, at));
                4
            }
            7 => 1,
            8 => 8 + long(at),
            other => panic!("{key} has type {other}"),
        };
    }
    found
}

#[test]
fn nothing_that_a_gguf_header_can_say_makes_a_panic() {
    let floats = [f32::NAN, f32::INFINITY, -1.0, 1e30, 1e-30].map(f32::to_bits);
    let absurd = [0, 1, 3, 65_536, 1 << 24, u32::MAX].into_iter().chain(floats);
    let mut panics = Vec::new();
    let (_keep, path) = temporary("model.gguf");
    for family in FAMILIES {
        write_twin(&fixture(family), &path, false);
        let file = fs::read(&path).unwrap();
        let numbers = numbers_in(&file);
        assert!(numbers.len() >= 8, "{family}: {numbers:?}");
        let mut check = |changed: &[(String, usize)], value: u32| {
            let mut bytes = file.clone();
            for (_, at) in changed {
                bytes[*at..at + 4].copy_from_slice(&value.to_le_bytes());
            }
            fs::write(&path, bytes).unwrap();
            let looked = catch_unwind(|| {
                inspect(&path, &wide(), 65_536, 0).map_or_else(|e| e.to_string(), |i| i.to_string());
                load(&path);
            });
            if looked.is_err() {
                panics.push(format!("{family}: {changed:?} = {value}"));
            }
        };
        for value in absurd.clone() {
            check(&numbers, value);
            for one in 0..numbers.len() {
                check(&numbers[one..=one], value);
                check(&[&numbers[..one], &numbers[one + 1..]].concat(), value);
            }
        }
    }
    assert!(panics.is_empty(), "{panics:#?}");
}
