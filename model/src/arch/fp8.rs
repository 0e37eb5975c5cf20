//! How the 8-bit floats of a checkpoint are scaled: the `quantization_config` of `config.json`.
//!
//! Three ways of saying it are read: that of DeepSeek-V3 and of transformers' `FineGrainedFP8Config` (`fp8`), that of
//! `FbgemmFp8Config` (`fbgemm_fp8`), and that of compressed-tensors. Whatever else there is (other methods, packed integers,
//! zero points, transforms, KV scales) changes what weights mean and is refused by key and value. What the section says of
//! activations is left out: here they are not rounded to 8-bit floats.

use model_files::{ModelFiles, Source};
use serde_json::Value;

use super::{ArchError, feature_error, value_error};
use crate::kernels::GgmlType;

/// How many numbers share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scales {
    /// All of a tensor.
    Tensor,
    /// Those of a row.
    Row,
    /// Those of a block of so many rows and columns.
    Block(usize, usize),
}

/// How 8-bit floats become weights: each is multiplied with its scale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fp8Scheme {
    /// Ends of the scale tensor's name behind that of the weight; one of them is there.
    pub(crate) suffixes: &'static [&'static str],
    /// Which numbers share a scale.
    pub(crate) scales: Scales,
    /// What weights become: BF16 where the model was made in it, otherwise F32.
    pub(crate) becomes: GgmlType,
}

/// Largest block in one direction.
const LARGEST_BLOCK: u64 = 1 << 16;

impl Fp8Scheme {
    /// Reads what a model says of scales; `None` if it says nothing.
    ///
    /// # Errors
    /// [`ArchError`] names the key that cannot be served, and its value.
    pub(crate) fn read(files: &ModelFiles) -> Result<Option<Self>, ArchError> {
        let Source::Directory(directory) = files.source() else {
            return Ok(None);
        };
        Self::of_config(directory.config())
    }

    fn of_config(config: &Value) -> Result<Option<Self>, ArchError> {
        let all = Section::new(String::new(), config);
        if let Some(value) = all.get("compression_config") {
            return Err(feature_error(
                "compression_config",
                short(value),
                "quantization_config is",
            ));
        }
        let Some(value) = all.get("quantization_config") else {
            return Ok(None);
        };
        let section = Section::new("quantization_config.".to_owned(), value);
        let (suffixes, scales): (&[&str], Scales) = match section.get("quant_method").and_then(Value::as_str) {
            Some("fp8") => section.fine_grained()?,
            Some("fbgemm_fp8") => {
                section.refuse_others(&["quant_method", "activation_scale_ub", "modules_to_not_convert"])?;
                (&["_scale"], Scales::Row)
            }
            Some("compressed-tensors") => (&["_scale"], section.compressed()?),
            _ => return Err(section.feature("quant_method", "fp8, fbgemm_fp8 and compressed-tensors are")),
        };
        let dtype = all.get("dtype").or(all.get("torch_dtype"));
        let becomes = match dtype.and_then(Value::as_str) {
            Some("bfloat16") => GgmlType::Bf16,
            _ => GgmlType::F32,
        };
        Ok(Some(Self {
            suffixes,
            scales,
            becomes,
        }))
    }

    /// Whether a tensor is for activations, which are not rounded here.
    pub(crate) fn is_for_activations(name: &str) -> bool {
        let ends = [".input_scale", ".output_scale", ".activation_scale", ".input_scale_ub"];
        ends.iter().any(|end| name.ends_with(end))
    }
}

/// A part of `config.json`, and what its keys are called from the top.
struct Section<'a> {
    path: String,
    value: &'a Value,
}

impl<'a> Section<'a> {
    fn new(path: String, value: &'a Value) -> Self {
        Self { path, value }
    }

    /// A value, unless it is absent or `null`.
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    fn feature(&self, key: &str, supported: &'static str) -> ArchError {
        let value = self.value.get(key).map_or_else(|| "(missing)".to_owned(), short);
        feature_error(format!("{}{key}", self.path), value, supported)
    }

    /// Refuses a value other than these; it may be absent.
    fn only(&self, key: &str, values: &[Value], supported: &'static str) -> Result<(), ArchError> {
        match self.get(key) {
            Some(value) if !values.contains(value) => Err(self.feature(key, supported)),
            _ => Ok(()),
        }
    }

    /// Refuses keys other than these that say something.
    fn refuse_others(&self, known: &[&str]) -> Result<(), ArchError> {
        let Value::Object(keys) = self.value else {
            let path = self.path.trim_end_matches('.');
            return Err(value_error(path, short(self.value), "an object"));
        };
        for (key, value) in keys {
            let off = match value {
                Value::Null | Value::Bool(false) => true,
                Value::String(text) => text.is_empty(),
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                Value::Bool(true) | Value::Number(_) => false,
            };
            if !off && !known.contains(&key.as_str()) {
                return Err(self.feature(key, "only absent, null, false and empty are"));
            }
        }
        Ok(())
    }

    /// The sizes of a block, rows first.
    fn block(&self, key: &str) -> Result<Option<Scales>, ArchError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let sizes: Option<Vec<u64>> = value
            .as_array()
            .and_then(|list| list.iter().map(Value::as_u64).collect());
        match sizes.as_deref() {
            Some(&[rows, columns]) if (1..=LARGEST_BLOCK).contains(&rows) && (1..=LARGEST_BLOCK).contains(&columns) => {
                Ok(Some(Scales::Block(rows as usize, columns as usize)))
            }
            _ => {
                let right = format!("two numbers from 1 to {LARGEST_BLOCK}, rows and columns of a block");
                Err(value_error(format!("{}{key}", self.path), short(value), right))
            }
        }
    }

    /// The form of DeepSeek-V3.
    fn fine_grained(&self) -> Result<(&'static [&'static str], Scales), ArchError> {
        self.only("fmt", &["e4m3".into()], "e4m3 is")?;
        self.only("scale_fmt", &["ue8m0".into(), "float".into()], "ue8m0 and float are")?;
        self.refuse_others(&[
            "quant_method",
            "activation_scheme",
            "fmt",
            "ignored_layers",
            "modules_to_not_convert",
            "scale_fmt",
            "weight_block_size",
        ])?;
        Ok(match self.block("weight_block_size")? {
            Some(block) => (&["_scale_inv"], block),
            None => (&["_scale", "_scale_inv"], Scales::Tensor),
        })
    }

    /// The form of compressed-tensors.
    fn compressed(&self) -> Result<Scales, ArchError> {
        let formats = ["float-quantized".into(), "naive-quantized".into()];
        self.only("format", &formats, "float-quantized and naive-quantized are")?;
        let stages = ["compressed".into(), "frozen".into()];
        self.only("quantization_status", &stages, "compressed is")?;
        if let Some(sparsity) = self.get("sparsity_config") {
            let sparsity = Section::new(format!("{}sparsity_config.", self.path), sparsity);
            sparsity.only("format", &["dense".into()], "dense is")?;
        }
        self.refuse_others(&[
            "quant_method",
            "config_groups",
            "format",
            "global_compression_ratio",
            "ignore",
            "quantization_status",
            "sparsity_config",
            "version",
        ])?;
        let groups = self.get("config_groups").and_then(Value::as_object);
        let mut found = None;
        for (name, group) in groups.into_iter().flatten() {
            let path = format!("{}config_groups.{name}.", self.path);
            let scales = Section::new(path, group).group()?;
            if found.is_some_and(|found| found != scales) {
                return Err(self.feature("config_groups", "groups that scale their weights alike are"));
            }
            found = Some(scales);
        }
        found.ok_or_else(|| self.feature("config_groups", "an object with at least one group is"))
    }

    /// A group of compressed-tensors.
    fn group(&self) -> Result<Scales, ArchError> {
        let (known, formats) = (
            [
                "format",
                "input_activations",
                "output_activations",
                "targets",
                "weights",
            ],
            ["float-quantized".into()],
        );
        self.refuse_others(&known)?;
        self.only("format", &formats, "float-quantized is")?;
        let Some(weights) = self.get("weights") else {
            return Err(self.feature("weights", "an object is"));
        };
        let weights = Section::new(format!("{}weights.", self.path), weights);
        let must_be = |key: &str, right: Value, supported| match weights.get(key) {
            Some(value) if *value == right => Ok(()),
            _ => Err(weights.feature(key, supported)),
        };
        must_be("num_bits", 8.into(), "8 is")?;
        must_be("type", "float".into(), "float is")?;
        weights.only("symmetric", &[true.into()], "true is")?;
        weights.refuse_others(&[
            "block_structure",
            "num_bits",
            "observer",
            "observer_kwargs",
            "scale_dtype",
            "strategy",
            "symmetric",
            "type",
            "zp_dtype",
        ])?;
        match weights.get("strategy").and_then(Value::as_str) {
            Some("tensor") => Ok(Scales::Tensor),
            Some("channel") => Ok(Scales::Row),
            Some("block") => weights
                .block("block_structure")?
                .ok_or_else(|| weights.feature("block_structure", "rows and columns of a block are")),
            _ => Err(weights.feature("strategy", "tensor, channel and block are")),
        }
    }
}

/// A value in few words.
fn short(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match text.char_indices().nth(120) {
        Some((at, _)) => format!("{}..", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests;
