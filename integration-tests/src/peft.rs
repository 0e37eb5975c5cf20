//! Low-rank adapters, as PEFT would write them.

use std::path::Path;

use anyhow::Result;
use model::arch::ArchConfig;
use model_files::ModelFiles;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::files::tiny_model;
use crate::random::Random;

/// Directories of adapters; they go away with it.
#[derive(Debug)]
pub struct Adapters {
    dir: TempDir,
    names: Vec<String>,
}

impl Adapters {
    /// Random adapters of the tiny checkpoint with these names, ranks and modules (such as `q_proj`), all of them different.
    pub fn random(adapters: &[(&str, usize, &[&str])]) -> Result<Self> {
        Self::of_model(&tiny_model(), 0.3, adapters)
    }

    /// The same for a model; their numbers are at most `size`.
    pub fn of_model(model: &Path, size: f32, adapters: &[(&str, usize, &[&str])]) -> Result<Self> {
        let (dir, shape) = (TempDir::new()?, ArchConfig::read(&ModelFiles::open(model)?)?);
        for (i, (name, rank, modules)) in adapters.iter().enumerate() {
            let mut random = Random::new(i as u64 + 1);
            let mut number = || size * (random.between(0, 2_000) as f32 / 1_000.0 - 1.0);
            write(&dir.path().join(i.to_string()), &shape, &mut number, *rank, modules)?;
            anyhow::ensure!(!name.is_empty(), "adapters have names");
        }
        let names = adapters.iter().map(|(name, ..)| (*name).to_owned()).collect();
        Ok(Self { dir, names })
    }

    /// Each as name=path.
    pub fn listed(&self) -> Vec<String> {
        let path = |i: usize| self.dir.path().join(i.to_string());
        let named = self.names.iter().enumerate();
        named.map(|(i, name)| format!("{name}={}", path(i).display())).collect()
    }

    /// The setting that lists them.
    pub fn setting(&self) -> String {
        format!("model.adapters={}", json!(self.listed()))
    }

    /// The directory of the `i`-th.
    pub fn path(&self, i: usize) -> std::path::PathBuf {
        self.dir.path().join(i.to_string())
    }
}

/// Writes an adapter's two files.
fn write(at: &Path, shape: &ArchConfig, number: &mut impl FnMut() -> f32, rank: usize, modules: &[&str]) -> Result<()> {
    std::fs::create_dir_all(at)?;
    let config = json!({
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules, "bias": "none",
        "task_type": "CAUSAL_LM",
    });
    std::fs::write(at.join("adapter_config.json"), config.to_string())?;
    let (hidden, ffn, dim) = (shape.hidden_size, shape.ffn_size, shape.head_dim);
    let (heads, kv_heads) = (shape.num_heads, shape.num_kv_heads);
    let (mut header, mut data) = (Map::new(), Vec::new());
    for layer in 0..shape.num_layers {
        for module in modules {
            let (part, n, k) = match *module {
                "q_proj" => ("self_attn", heads * dim, hidden),
                "k_proj" | "v_proj" => ("self_attn", kv_heads * dim, hidden),
                "o_proj" => ("self_attn", hidden, heads * dim),
                "down_proj" => ("mlp", hidden, ffn),
                _ => ("mlp", ffn, hidden),
            };
            for (letter, rows, columns) in [("A", rank, k), ("B", n, rank)] {
                let start = data.len();
                for _ in 0..rows * columns {
                    data.extend(number().to_le_bytes());
                }
                let name = format!("base_model.model.model.layers.{layer}.{part}.{module}.lora_{letter}.weight");
                let tensor = json!({"dtype": "F32", "shape": [rows, columns], "data_offsets": [start, data.len()]});
                header.insert(name, tensor);
            }
        }
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    std::fs::write(at.join("adapter_model.safetensors"), file)?;
    Ok(())
}
