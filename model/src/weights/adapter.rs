//! Reads low-rank adapters that PEFT has saved.

use std::collections::HashSet;
use std::path::Path;

use model_files::adapter::{AdapterDirectory, RankAndScale};
use xxhash_rust::xxh3::Xxh3;

use super::WeightError;
use super::indexed::SafeTensorFiles;
use super::store::{Stored, View};
use crate::arch::ArchConfig;
use crate::decoder::{Adapter, LowRank};
use crate::kernels::{Linear, RopeStyle, dequantise};
use crate::tensor_names::{Naming, Part, Place, Tensor};

/// Reads the adapter in the directory `path` for a model of this shape; also the hash of all that it computes.
///
/// # Errors
/// [`WeightError`] names the file, and the key or tensor that is wrong.
pub(crate) fn load_adapter(path: &Path, arch: &ArchConfig) -> Result<(Adapter, u64), WeightError> {
    let directory = AdapterDirectory::open(path)?;
    let file = directory.weight_file()?;
    let mut reader = Reader {
        directory,
        files: SafeTensorFiles::open(std::slice::from_ref(&file))?,
        hash: Xxh3::new(),
        used: HashSet::new(),
    };
    let mut adapter = Adapter::default();
    for layer in 0..arch.num_layers {
        let mut matrices = [const { None }; Part::ALL.len()];
        for part in Part::ALL {
            matrices[part as usize] = reader.matrix(layer, part, arch)?;
        }
        adapter.layers.push(matrices);
    }
    let names = reader.files.names();
    let left_over = names.into_iter().filter(|&name| !reader.used.contains(name)).min();
    if let Some(name) = left_over {
        return Err(WeightError::NotAdapted { name: name.to_owned() });
    }
    if reader.used.is_empty() {
        let reason = "holds no tensor".to_owned();
        return Err(WeightError::Safetensors { path: file, reason });
    }
    // 0 is the key of what has been computed without an adapter.
    Ok((adapter, reader.hash.digest().max(1)))
}

struct Reader {
    directory: AdapterDirectory,
    files: SafeTensorFiles,
    hash: Xxh3,
    used: HashSet<String>,
}

impl Reader {
    /// What is added to a matrix, if it is one that the configuration chooses.
    fn matrix(&mut self, layer: usize, part: Part, arch: &ArchConfig) -> Result<Option<LowRank>, WeightError> {
        let (n, k) = arch.matrix_shape(part);
        // Several matrices may be one module, with B's rows for one behind those for the other.
        let Place { name, outer, rows } = Naming::HuggingFace.place(arch, Tensor::Weight(layer, part), n);
        let (module, all) = (name.trim_end_matches(".weight"), outer.iter().product());
        if !arch.is_adaptable(layer, part) {
            return Ok(None);
        }
        if !self.directory.adapts(module, layer)? {
            return Ok(None);
        }
        let RankAndScale { rank, scale } = self.directory.rank_and_scale(module)?;
        let (a_name, a) = self.take(format!("base_model.model.{module}.lora_A.weight"), rank, k)?;
        let (b_name, mut b) = self.take(format!("base_model.model.{module}.lora_B.weight"), all, rank)?;
        b = b[rows.start * rank..rows.end * rank].to_vec();
        self.hash.update(format!("|{scale:?}|").as_bytes());
        for number in &mut b {
            *number = (f64::from(*number) * scale) as f32;
        }
        if let Some(bad) = b.iter().find(|number| !number.is_finite()) {
            let (name, value) = (b_name, *bad);
            return Err(WeightError::NotFinite { name, value });
        }
        // Files whose rotation takes neighbours have the rows of query and key in that order; PEFT's never have.
        if arch.rope_style == RopeStyle::Interleaved && matches!(part, Part::Query | Part::Key) {
            b = interleaved(&b, arch.head_dim, rank);
        }
        let pack = |name: String, n, k, numbers: &[f32]| {
            Linear::from_f32(n, k, numbers).map_err(|source| WeightError::Kernel { name, source })
        };
        Ok(Some(LowRank {
            a: pack(a_name, rank, k, &a)?,
            b: pack(b_name, n, rank, &b)?,
        }))
    }

    /// The numbers of a matrix of `n` rows of `k`, noted as used and hashed.
    fn take(&mut self, name: String, n: usize, k: usize) -> Result<(String, Vec<f32>), WeightError> {
        let expected = vec![n, k];
        let Some(View { stored, shape, bytes }) = self.files.find(&name)? else {
            return Err(WeightError::Missing { name, expected });
        };
        let Stored::Ggml(kind) = stored else {
            return Err(WeightError::Type {
                name,
                found: stored.as_str().to_owned(),
                supported: "F32, F16 and BF16 for adapters",
            });
        };
        if shape != expected {
            let found = shape;
            return Err(WeightError::Shape { name, expected, found });
        }
        // The file has as many bytes as the shape says, so this is no more than four times its size.
        let mut numbers = vec![0.0; n * k];
        let read = dequantise(kind, bytes, &mut numbers);
        if let Err(source) = read {
            return Err(WeightError::Kernel { name, source });
        }
        if let Some(&value) = numbers.iter().find(|number| !number.is_finite()) {
            return Err(WeightError::NotFinite { name, value });
        }
        self.hash
            .update(format!("|{name} {} {expected:?}|", kind.as_str()).as_bytes());
        self.hash.update(bytes);
        self.used.insert(name.clone());
        Ok((name, numbers))
    }
}

/// The rows of each head of `head_dim` rows in the order 0, h/2, 1, h/2 + 1, ...: those that rotate together side by side.
fn interleaved(rows: &[f32], head_dim: usize, width: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(rows.len());
    for head in rows.chunks_exact(head_dim * width) {
        for place in 0..head_dim {
            let from = place / 2 + place % 2 * (head_dim / 2);
            out.extend_from_slice(&head[from * width..(from + 1) * width]);
        }
    }
    out
}
