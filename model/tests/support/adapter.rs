//! Makes low-rank adapters in PEFT's format, and merges them into the model's own matrices.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use serde_json::{Value, json};

use super::checkpoint::{Checkpoint, Element, Tensor};

/// All that can be adapted.
pub const ALL: [&str; 7] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

/// An adapter; the rank is the default one for all modules.
#[derive(Clone)]
pub struct Adapter {
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

impl Adapter {
    /// Random matrices for all layers' modules of these names.
    pub fn random(base: &Checkpoint, seed: u64, rank: usize, modules: &[&str]) -> Self {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut numbers = |count: usize| -> Vec<f32> {
            let mut next = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.3
            };
            (0..count).map(|_| next()).collect()
        };
        let mut tensors = BTreeMap::new();
        for (name, (shape, _)) in &base.tensors {
            let Some(module) = name.strip_suffix(".weight") else {
                continue;
            };
            if modules.iter().any(|end| module.ends_with(end)) {
                let name = |which: &str| format!("base_model.model.{module}.lora_{which}.weight");
                tensors.insert(name("A"), (vec![rank, shape[1]], numbers(rank * shape[1])));
                tensors.insert(name("B"), (vec![shape[0], rank], numbers(shape[0] * rank)));
            }
        }
        let config = json!({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
            "target_modules": modules, "lora_dropout": 0.1, "use_dora": false, "modules_to_save": null,
        });
        Self { config, tensors }
    }

    /// Writes the adapter's directory.
    pub fn write(&self, at: &Path, element: Element) -> PathBuf {
        fs::create_dir_all(at).unwrap();
        fs::write(at.join("adapter_config.json"), self.config.to_string()).unwrap();
        let encoded: Vec<_> = self
            .tensors
            .iter()
            .map(|(name, (shape, x))| (name.as_str(), shape.clone(), element.encode(x)))
            .collect();
        let views: Vec<_> = encoded
            .iter()
            .map(|(name, shape, bytes)| (*name, TensorView::new(element.dtype(), shape.clone(), bytes).unwrap()))
            .collect();
        let file = safetensors::serialize(views, None).unwrap();
        fs::write(at.join("adapter_model.safetensors"), file).unwrap();
        at.to_path_buf()
    }

    /// The model with W + `scale` B A in place of each adapted W, computed in f64.
    pub fn merged(&self, base: &Checkpoint, scale: f64) -> Checkpoint {
        let mut out = base.clone();
        for (name, (a_shape, a)) in &self.tensors {
            let Some(module) = name.strip_suffix(".lora_A.weight") else {
                continue;
            };
            let (_, b) = &self.tensors[&format!("{module}.lora_B.weight")];
            let module = module.strip_prefix("base_model.model.").unwrap();
            let (rank, k) = (a_shape[0], a_shape[1]);
            let (_, w) = out.tensors.get_mut(&format!("{module}.weight")).unwrap();
            for (row, w) in w.chunks_exact_mut(k).enumerate() {
                for (i, w) in w.iter_mut().enumerate() {
                    let product = |r: usize| f64::from(b[row * rank + r]) * f64::from(a[r * k + i]);
                    *w = (f64::from(*w) + scale * (0..rank).map(product).sum::<f64>()) as f32;
                }
            }
        }
        out
    }
}
