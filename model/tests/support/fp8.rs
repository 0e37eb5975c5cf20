//! Rounds the matrices of a checkpoint to 8-bit floats with scales, and writes it as such checkpoints are written.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::bf16;
use safetensors::Dtype;
use serde_json::Value;

use super::checkpoint::{Checkpoint, Element, write_safetensors};
use super::tiny_llama;

/// The number of a byte of `float8_e4m3fn`, from its definition.
pub fn number(byte: u8) -> f32 {
    let (sign, exponent, mantissa) = (byte >> 7, i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let size = match exponent {
        15 if mantissa == 7.0 => f32::NAN,
        0 => mantissa / 8.0 * 2.0_f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    };
    if sign == 1 { -size } else { size }
}

/// The nearest byte.
fn encode(x: f32) -> u8 {
    let distance = |byte: u8| (number(byte) - x).abs();
    let finite = (0..=255_u8).filter(|byte| byte & 0x7f != 0x7f);
    finite.min_by(|&a, &b| distance(a).total_cmp(&distance(b))).unwrap()
}

/// A matrix as bytes and scales.
#[derive(Clone)]
pub struct Scaled {
    pub shape: [usize; 2],
    pub bytes: Vec<u8>,
    pub scale_shape: Vec<usize>,
    pub scales: Vec<f32>,
    /// What it becomes.
    pub numbers: Vec<f32>,
}

/// Rounds a matrix; blocks of `block` rows and columns share a scale.
pub fn scaled(shape: [usize; 2], numbers: &[f32], block: [usize; 2]) -> Scaled {
    let [n, k] = shape;
    let (down, across) = (n.div_ceil(block[0]), k.div_ceil(block[1]));
    let mut scales = vec![0.0_f32; down * across];
    let place = |i: usize| i / k / block[0] * across + i % k / block[1];
    for (i, x) in numbers.iter().enumerate() {
        let scale = &mut scales[place(i)];
        *scale = scale.max(x.abs() / 448.0);
    }
    let bytes: Vec<u8> = numbers
        .iter()
        .enumerate()
        .map(|(i, x)| encode(x / scales[place(i)]))
        .collect();
    let widened = |(i, &byte): (usize, &u8)| bf16::from_f32(number(byte) * scales[place(i)]).to_f32();
    Scaled {
        shape,
        numbers: bytes.iter().enumerate().map(widened).collect(),
        bytes,
        scale_shape: vec![down, across],
        scales,
    }
}

/// A checkpoint of 8-bit floats, and the one that it stands for.
pub struct Twins {
    /// All but the matrices in `scaled`, with `quantization_config`.
    pub rest: Checkpoint,
    pub scaled: BTreeMap<String, Scaled>,
    pub suffix: &'static str,
    /// The matrices as numbers of bfloat16.
    pub widened: Checkpoint,
}

impl Twins {
    /// Rounds all projections of a checkpoint that is made in bfloat16. A block side of 0 is all of the matrix.
    pub fn new(from: &Checkpoint, section: Value, suffix: &'static str, block: [usize; 2]) -> Self {
        let mut rest = from.clone();
        rest.config["dtype"] = "bfloat16".into();
        let mut widened = rest.clone();
        rest.config["quantization_config"] = section;
        let mut all = BTreeMap::new();
        for (name, (shape, numbers)) in &from.tensors {
            let projection = name.ends_with("proj.weight") || name.ends_with("proj_with_mqa.weight");
            if !projection {
                continue;
            }
            let side = |i: usize| if block[i] == 0 { shape[i] } else { block[i] };
            let matrix = scaled([shape[0], shape[1]], numbers, [side(0), side(1)]);
            widened
                .tensors
                .insert(name.clone(), (shape.clone(), matrix.numbers.clone()));
            rest.tensors.remove(name);
            all.insert(name.clone(), matrix);
        }
        assert!(!all.is_empty());
        Self {
            rest,
            scaled: all,
            suffix,
            widened,
        }
    }

    /// Writes the checkpoint of 8-bit floats.
    pub fn write(&self, at: &Path) {
        let mut tensors = self.others();
        let names: Vec<(String, &Scaled)> = self
            .scaled
            .iter()
            .map(|(name, one)| (format!("{name}{}", self.suffix), one))
            .collect();
        for (name, one) in &self.scaled {
            tensors.push((name, Dtype::F8_E4M3, one.shape.to_vec(), one.bytes.clone()));
        }
        for (name, one) in &names {
            tensors.push((
                name,
                Dtype::F32,
                one.scale_shape.clone(),
                Element::F32.encode(&one.scales),
            ));
        }
        write(at, &self.rest.config, &tensors);
    }

    /// Writes the one that it stands for, with the same matrices in bfloat16.
    pub fn write_widened(&self, at: &Path) {
        let mut tensors = self.others();
        for name in self.scaled.keys() {
            let (shape, numbers) = &self.widened.tensors[name];
            tensors.push((name, Dtype::BF16, shape.clone(), Element::Bf16.encode(numbers)));
        }
        write(at, &self.widened.config, &tensors);
    }

    fn others(&self) -> Vec<(&str, Dtype, Vec<usize>, Vec<u8>)> {
        let others = self.rest.tensors.iter();
        others
            .map(|(name, (shape, numbers))| (name.as_str(), Dtype::F32, shape.clone(), Element::F32.encode(numbers)))
            .collect()
    }
}

fn write(at: &Path, config: &Value, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) {
    fs::create_dir_all(at).unwrap();
    fs::write(at.join("config.json"), config.to_string()).unwrap();
    fs::copy(tiny_llama().join("tokenizer.json"), at.join("tokenizer.json")).unwrap();
    write_safetensors(&at.join("model.safetensors"), tensors);
}
