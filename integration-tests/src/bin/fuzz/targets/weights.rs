//! What both forms of a model have in common: they are looked at and loaded, and what comes of it is an outcome.

use std::path::Path;

use config::{EngineConfig, ModelConfig, Quantize};
use model::inspect::inspect;

use crate::corpus::shape;

/// Positions that are asked for, and tokens of the KV pool.
const TOKENS: usize = 64;

/// Looks at the model at `path` and loads it; `number` chooses what its weights become.
pub(super) fn load(path: &Path, number: usize) -> String {
    let kinds = [Quantize::None, Quantize::Q8_0, Quantize::Q4K];
    let model = ModelConfig {
        path: path.to_string_lossy().into_owned(),
        quantize: kinds[number % kinds.len()],
        ..ModelConfig::default()
    };
    let engine = EngineConfig {
        kv_pool_tokens: TOKENS,
        ..EngineConfig::default()
    };
    let said = match inspect(path, &model, engine.kv_block_tokens, TOKENS) {
        Ok(inspection) => inspection.to_string().len().min(1),
        Err(_) => 0,
    };
    match model::load(&model, &engine, TOKENS) {
        Ok(loaded) => format!(
            "inspected {said}, loaded as {}",
            loaded.identity.architecture.len().min(1)
        ),
        Err(error) => format!("inspected {said}, {}", words(&shape(&error.to_string()))),
    }
}

/// The words of a message without names of tensors, keys and files, which mutations make ever new.
fn words(message: &str) -> String {
    let plain = |word: &str| {
        word.bytes()
            .all(|byte| byte.is_ascii_alphabetic() || b",;:".contains(&byte))
    };
    let words: Vec<&str> = message
        .split(' ')
        .map(|word| if plain(word) { word } else { "_" })
        .collect();
    words.join(" ")
}
