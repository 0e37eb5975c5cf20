//! Makes model files for tests: the tiny checkpoint, changed and written in either format.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::{read_json, tiny_llama};

/// A tensor: shape and numbers.
pub type Tensor = (Vec<usize>, Vec<f32>);

/// A checkpoint in the naming of Hugging Face.
#[derive(Clone)]
pub struct Checkpoint {
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

/// Element types that tests write.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Element {
    F32,
    F16,
    Bf16,
    F64,
    Q8_0,
}

impl Element {
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::BF16,
            Self::F64 => Dtype::F64,
            Self::Q8_0 => panic!("not a type of safetensors"),
        }
    }

    fn ggml_id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 8,
            Self::Bf16 => 30,
            Self::F64 => 28,
        }
    }

    pub fn encode(self, numbers: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::F16 => numbers.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
            Self::Bf16 => numbers.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            Self::F64 => numbers.iter().flat_map(|&x| f64::from(x).to_le_bytes()).collect(),
            Self::Q8_0 => numbers
                .chunks(32)
                .flat_map(|block| {
                    let scale = f16::from_f32(block.iter().fold(0.0_f32, |a, x| a.max(x.abs())) / 127.0);
                    let quantised = block.iter().map(move |x| (x / scale.to_f32()).round() as i8 as u8);
                    scale.to_le_bytes().into_iter().chain(quantised).collect::<Vec<_>>()
                })
                .collect(),
        }
    }

    /// The numbers as they are read back.
    pub fn rounded(self, numbers: &[f32]) -> Vec<f32> {
        let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32();
        let bytes = self.encode(numbers);
        match self {
            Self::F32 | Self::F64 => numbers.to_vec(),
            Self::F16 => bytes.chunks_exact(2).map(half).collect(),
            Self::Bf16 => bytes
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            Self::Q8_0 => bytes
                .chunks_exact(34)
                .flat_map(|b| b[2..].iter().map(|&q| f32::from(q as i8) * half(b)))
                .collect(),
        }
    }
}

impl Checkpoint {
    /// The tiny llama checkpoint.
    pub fn tiny() -> Self {
        Self::open(&tiny_llama())
    }

    /// A checkpoint in f32.
    pub fn open(directory: &Path) -> Self {
        let bytes = fs::read(directory.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file
            .tensors()
            .into_iter()
            .map(|(name, view)| {
                let numbers = view
                    .data()
                    .chunks_exact(4)
                    .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
                (name, (view.shape().to_vec(), numbers.collect()))
            })
            .collect();
        Self {
            config: read_json(&directory.join("config.json")),
            tensors,
        }
    }

    pub fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    /// The same with every matrix as it is after being stored.
    pub fn rounded(&self, element: Element) -> Self {
        let mut out = self.clone();
        for (shape, numbers) in out.tensors.values_mut() {
            if shape.len() > 1 {
                *numbers = element.rounded(numbers);
            }
        }
        out
    }

    /// Adds a bias to every projection.
    pub fn add_biases(&mut self) {
        self.config["attention_bias"] = true.into();
        self.config["mlp_bias"] = true.into();
        let names: Vec<String> = self
            .tensors
            .keys()
            .filter(|n| n.ends_with("_proj.weight"))
            .cloned()
            .collect();
        for name in names {
            let n = self.tensors[&name].0[0];
            let bias = (0..n)
                .map(|i| ((i * 37 + name.len() * 11) % 41) as f32 / 41.0 - 0.5)
                .collect();
            self.tensors.insert(name.replace(".weight", ".bias"), (vec![n], bias));
        }
    }

    /// Writes a model directory; vectors stay f32.
    pub fn write_directory(&self, at: &Path, element: Element) {
        fs::create_dir_all(at).unwrap();
        fs::write(at.join("config.json"), self.config.to_string()).unwrap();
        fs::copy(tiny_llama().join("tokenizer.json"), at.join("tokenizer.json")).unwrap();
        let encoded: Vec<_> = self
            .tensors
            .iter()
            .map(|(name, (shape, x))| {
                let element = if shape.len() == 1 { Element::F32 } else { element };
                (name.as_str(), element.dtype(), shape.clone(), element.encode(x))
            })
            .collect();
        write_safetensors(&at.join("model.safetensors"), &encoded);
    }

    /// The tensors by their GGUF names; query and key rows in the order that interleaved rotation expects.
    pub fn gguf_tensors(&self) -> Vec<(String, Tensor)> {
        let head_dim = self.size("head_dim");
        let short = [
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("model.embed_tokens", "token_embd"),
            ("model.norm", "output_norm"),
            ("lm_head", "output"),
            ("model.layers", "blk"),
        ];
        let mut out = Vec::new();
        for (name, (shape, numbers)) in &self.tensors {
            let renamed = short
                .iter()
                .fold(name.clone(), |n, (long, short)| n.replace(long, short));
            let mut numbers = numbers.clone();
            if renamed.contains("attn_q.") || renamed.contains("attn_k.") {
                let width = numbers.len() / shape[0];
                numbers = (0..shape[0])
                    .flat_map(|row| {
                        let (head, place) = (row / head_dim, row % head_dim);
                        // Row 2 i of a head was row i, row 2 i + 1 was row i + half.
                        let from = head * head_dim + place / 2 + place % 2 * (head_dim / 2);
                        numbers[from * width..(from + 1) * width].to_vec()
                    })
                    .collect();
            }
            out.push((renamed, (shape.clone(), numbers)));
        }
        out
    }

    /// The keys that describe the decoder.
    pub fn gguf_keys(&self) -> Vec<(String, Meta)> {
        let number = |key: &str| Meta::U32(self.size(key) as u32);
        let list: Vec<(&str, Meta)> = vec![
            ("general.architecture", Meta::Text("llama".into())),
            ("llama.block_count", number("num_hidden_layers")),
            ("llama.embedding_length", number("hidden_size")),
            ("llama.feed_forward_length", number("intermediate_size")),
            ("llama.attention.head_count", number("num_attention_heads")),
            ("llama.attention.head_count_kv", number("num_key_value_heads")),
            ("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-6)),
            ("llama.rope.freq_base", Meta::F32(10_000.0)),
            ("llama.context_length", number("max_position_embeddings")),
            ("tokenizer.ggml.model", Meta::Text("gpt2".into())),
        ];
        list.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }

    /// Writes a GGUF file; vectors stay f32.
    pub fn write_gguf(&self, at: &Path, keys: &[(String, Meta)], element: Element) {
        fs::write(at, write_gguf_file(&self.gguf_tensors(), keys, element)).unwrap();
    }
}

/// Writes a safetensors file of tensors by name, type, shape and bytes.
pub fn write_safetensors(at: &Path, tensors: &[(&str, Dtype, Vec<usize>, Vec<u8>)]) {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    fs::write(at, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// The bytes of a GGUF file; vectors stay f32.
pub fn write_gguf_file(tensors: &[(String, Tensor)], keys: &[(String, Meta)], element: Element) -> Vec<u8> {
    write_gguf_typed(tensors, keys, |_, (shape, numbers)| {
        let element = if shape.len() == 1 { Element::F32 } else { element };
        (element.ggml_id(), element.encode(numbers))
    })
}

/// The same with a type (ggml's number) and bytes for each tensor.
pub fn write_gguf_typed(
    tensors: &[(String, Tensor)],
    keys: &[(String, Meta)],
    encode: impl Fn(&str, &Tensor) -> (u32, Vec<u8>),
) -> Vec<u8> {
    let mut head = Vec::new();
    head.extend(b"GGUF");
    head.extend(3_u32.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((keys.len() as u64).to_le_bytes());
    let text = |out: &mut Vec<u8>, s: &str| {
        out.extend((s.len() as u64).to_le_bytes());
        out.extend(s.as_bytes());
    };
    for (key, value) in keys {
        text(&mut head, key);
        match value {
            Meta::U32(n) => [4_u32, *n].iter().for_each(|x| head.extend(x.to_le_bytes())),
            Meta::F32(x) => [6_u32, x.to_bits()].iter().for_each(|x| head.extend(x.to_le_bytes())),
            Meta::Bool(flag) => {
                head.extend(7_u32.to_le_bytes());
                head.push(u8::from(*flag));
            }
            Meta::Text(s) => {
                head.extend(8_u32.to_le_bytes());
                text(&mut head, s);
            }
        }
    }
    let mut data = Vec::new();
    for (name, tensor) in tensors {
        let (shape, (kind, bytes)) = (&tensor.0, encode(name, tensor));
        text(&mut head, name);
        head.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&n| head.extend((n as u64).to_le_bytes()));
        head.extend(kind.to_le_bytes());
        head.extend((data.len() as u64).to_le_bytes());
        data.extend(bytes);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    head.resize(head.len().next_multiple_of(32), 0);
    [head, data].concat()
}

/// A GGUF metadata value.
#[derive(Clone, Debug)]
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
}

/// A directory that goes away with the test, and a path in it.
pub fn temporary(name: &str) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(name);
    (directory, path)
}
