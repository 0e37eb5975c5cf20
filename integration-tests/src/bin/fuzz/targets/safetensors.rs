//! A model directory: `config.json`, the index of the weights, and one or two safetensors files, all in one input with lines
//! of two equals signs between them.

use std::path::PathBuf;

use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::{Target, weights};

/// What is between the files of an input.
const BETWEEN: &[u8] = b"\n==\n";
/// Names of the weights: of the only file, or of the files that the index of the seeds names.
const SINGLE: &str = "model.safetensors";
const PARTS: [&str; 2] = ["a.safetensors", "b.safetensors"];
const INDEX: &str = "model.safetensors.index.json";

pub(crate) struct Directory {
    _dir: TempDir,
    path: PathBuf,
}

impl Directory {
    pub(crate) fn new() -> Option<Self> {
        // In memory where that is possible.
        let dir = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).ok()?;
        let path = dir.path().join("model");
        std::fs::create_dir_all(&path).ok()?;
        // Nodes take its hash; the text side is the target of GGUF files.
        std::fs::write(path.join("tokenizer.json"), "{}").ok()?;
        Some(Self { _dir: dir, path })
    }
}

impl Target for Directory {
    fn name(&self) -> &'static str {
        "safetensors"
    }

    fn seeds(&self) -> Vec<Vec<u8>> {
        let mut all = vec![
            llama("F32", json!({})).single(),
            llama("BF16", json!({"tie_word_embeddings": true})).single(),
            llama("F16", json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}})).sharded(),
            sparse().single(),
            latent().single(),
            fused().single(),
        ];
        let scheme = |section: Value| json!({"torch_dtype": "bfloat16", "quantization_config": section});
        let blocks = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4]});
        all.push(llama("F32", scheme(blocks)).rounded("_scale_inv", &[2, 2]).single());
        let weights = json!({"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": true});
        let groups = json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}});
        all.push(llama("F32", scheme(groups)).rounded("_scale", &[1]).single());
        all
    }

    fn run(&self, input: &[u8]) -> Result<String, String> {
        let mut pieces = split(input).into_iter();
        for name in PARTS.into_iter().chain([SINGLE, INDEX]) {
            // What is not there cannot be removed, and the others must not stay.
            std::fs::remove_file(self.path.join(name)).ok();
        }
        let put = |name: &str, bytes: &[u8]| std::fs::write(self.path.join(name), bytes).map_err(|e| e.to_string());
        put("config.json", pieces.next().unwrap_or_default())?;
        let index = pieces.next().unwrap_or_default();
        if index.is_empty() {
            put(SINGLE, pieces.next().unwrap_or_default())?;
        } else {
            put(INDEX, index)?;
            for (name, bytes) in PARTS.into_iter().zip(pieces) {
                put(name, bytes)?;
            }
        }
        Ok(weights::load(&self.path, input.len()))
    }

    /// The lengths of the headers.
    fn repair(&self, input: &mut Vec<u8>) {
        let mut pieces: Vec<Vec<u8>> = split(input).into_iter().map(<[u8]>::to_vec).collect();
        for piece in pieces.iter_mut().skip(2) {
            // The header ends with the last brace that has another one before it.
            let end = piece.windows(2).rposition(|two| two == b"}}");
            if let (Some(end), Some(length)) = (end, piece.first_chunk_mut::<8>()) {
                *length = (end as u64 + 2).saturating_sub(8).to_le_bytes();
            }
        }
        *input = pieces.join(BETWEEN);
    }
}

fn split(input: &[u8]) -> Vec<&[u8]> {
    let mut pieces = Vec::new();
    let mut rest = input;
    while let Some(at) = rest.windows(BETWEEN.len()).position(|window| window == BETWEEN) {
        pieces.push(&rest[..at]);
        rest = &rest[at + BETWEEN.len()..];
    }
    pieces.push(rest);
    pieces
}

/// A model of one layer with all sizes 8 or less.
struct Tiny {
    config: Value,
    tensors: Vec<(String, &'static str, Vec<usize>)>,
}

impl Tiny {
    /// Norms, embedding and head of a class of models.
    fn new(class: &str, dtype: &'static str, more: Value) -> Self {
        let mut config = json!({
            "architectures": [class], "model_type": "tiny", "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 8,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        });
        for (key, value) in more.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        let mut tiny = Self {
            config,
            tensors: Vec::new(),
        };
        tiny.put("model.embed_tokens", dtype, &[8, 8]);
        if tiny.config["tie_word_embeddings"] != true {
            tiny.put("lm_head", dtype, &[8, 8]);
        }
        tiny.put("model.norm", "F32", &[8]);
        tiny.put("model.layers.0.input_layernorm", "F32", &[8]);
        tiny.put("model.layers.0.post_attention_layernorm", "F32", &[8]);
        tiny
    }

    fn put(&mut self, name: &str, dtype: &'static str, shape: &[usize]) {
        self.tensors.push((format!("{name}.weight"), dtype, shape.to_vec()));
    }

    fn layer(&mut self, parts: &[(&str, &[usize])], dtype: &'static str) {
        for (part, shape) in parts {
            self.put(&format!("model.layers.0.{part}"), dtype, shape);
        }
    }

    /// Projections become 8-bit floats with scales of this shape.
    fn rounded(mut self, suffix: &str, shape: &[usize]) -> Self {
        let mut scales = Vec::new();
        for (name, dtype, own) in &mut self.tensors {
            if name.ends_with("proj.weight") {
                *dtype = "F8_E4M3";
                let shape = if shape.len() == 2 {
                    vec![own[0].div_ceil(4), own[1].div_ceil(4)]
                } else {
                    shape.to_vec()
                };
                scales.push((format!("{name}{suffix}"), "F32", shape));
            }
        }
        self.tensors.extend(scales);
        self
    }

    fn single(&self) -> Vec<u8> {
        [self.config.to_string().as_bytes(), b"", &file(&self.tensors)].join(BETWEEN)
    }

    fn sharded(&self) -> Vec<u8> {
        let (first, second) = self.tensors.split_at(self.tensors.len() / 2);
        let mut map = Map::new();
        for (tensors, part) in [(first, PARTS[0]), (second, PARTS[1])] {
            for (name, ..) in tensors {
                map.insert(name.clone(), part.into());
            }
        }
        let index = json!({"metadata": {"total_size": 0}, "weight_map": map}).to_string();
        let config = self.config.to_string();
        [config.as_bytes(), index.as_bytes(), &file(first), &file(second)].join(BETWEEN)
    }
}

/// A safetensors file whose numbers are all bytes of 0x3c.
fn file(tensors: &[(String, &'static str, Vec<usize>)]) -> Vec<u8> {
    let (mut header, mut end) = (Map::new(), 0);
    for (name, dtype, shape) in tensors {
        let size = match *dtype {
            "F32" => 4,
            "F8_E4M3" => 1,
            _ => 2,
        };
        let start = end;
        end += size * shape.iter().product::<usize>();
        let tensor = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        header.insert(name.clone(), tensor);
    }
    let header = Value::Object(header).to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.resize(out.len() + end, 0x3c);
    out
}

const ATTENTION: [(&str, &[usize]); 4] = [
    ("self_attn.q_proj", &[8, 8]),
    ("self_attn.k_proj", &[4, 8]),
    ("self_attn.v_proj", &[4, 8]),
    ("self_attn.o_proj", &[8, 8]),
];
const FFN: [(&str, &[usize]); 3] = [
    ("mlp.gate_proj", &[8, 8]),
    ("mlp.up_proj", &[8, 8]),
    ("mlp.down_proj", &[8, 8]),
];

fn llama(dtype: &'static str, more: Value) -> Tiny {
    let mut tiny = Tiny::new("LlamaForCausalLM", dtype, more);
    tiny.layer(&ATTENTION, dtype);
    tiny.layer(&FFN, dtype);
    tiny
}

fn sparse() -> Tiny {
    let more = json!({"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "norm_topk_prob": true});
    let mut tiny = Tiny::new("Qwen3MoeForCausalLM", "BF16", more);
    tiny.layer(&ATTENTION, "BF16");
    tiny.layer(&[("self_attn.q_norm", &[4]), ("self_attn.k_norm", &[4])], "F32");
    tiny.layer(&[("mlp.gate", &[2, 8])], "F32");
    for expert in 0..2 {
        for (part, shape) in FFN {
            let name = part.replace("mlp.", &format!("mlp.experts.{expert}."));
            tiny.layer(&[(&name, shape)], "BF16");
        }
    }
    tiny
}

fn latent() -> Tiny {
    let more = json!({
        "kv_lora_rank": 4, "q_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
        "num_key_value_heads": 2,
    });
    let mut tiny = Tiny::new("DeepseekV3ForCausalLM", "BF16", more);
    let parts: [(&str, &[usize]); 7] = [
        ("self_attn.q_a_proj", &[4, 8]),
        ("self_attn.q_a_layernorm", &[4]),
        ("self_attn.q_b_proj", &[12, 4]),
        ("self_attn.kv_a_proj_with_mqa", &[6, 8]),
        ("self_attn.kv_a_layernorm", &[4]),
        ("self_attn.kv_b_proj", &[16, 4]),
        ("self_attn.o_proj", &[8, 8]),
    ];
    tiny.layer(&parts, "BF16");
    tiny.layer(&FFN, "BF16");
    tiny
}

fn fused() -> Tiny {
    let mut tiny = Tiny::new("Phi3ForCausalLM", "BF16", json!({}));
    let parts: [(&str, &[usize]); 4] = [
        ("self_attn.qkv_proj", &[16, 8]),
        ("self_attn.o_proj", &[8, 8]),
        ("mlp.gate_up_proj", &[16, 8]),
        ("mlp.down_proj", &[8, 8]),
    ];
    tiny.layer(&parts, "BF16");
    tiny
}
