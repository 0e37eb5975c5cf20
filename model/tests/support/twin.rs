//! Writes a model directory's twin as a GGUF file, as llama.cpp's converter names and arranges things.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::checkpoint::{Checkpoint, Element, Meta, Tensor, write_gguf_file};

/// Names of one format and the other; parts of longer names come first.
const NAMES: [(&str, &str); 31] = [
    ("model.layers", "blk"),
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("input_layernorm", "attn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("block_sparse_moe.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("post_attention_layernorm", "ffn_norm"),
];

/// Keys of sizes, in `config.json` and behind the architecture's name.
const SIZES: [(&str, &str); 18] = [
    ("num_hidden_layers", "block_count"),
    ("hidden_size", "embedding_length"),
    ("intermediate_size", "feed_forward_length"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("max_position_embeddings", "context_length"),
    ("vocab_size", "vocab_size"),
    ("sliding_window", "attention.sliding_window"),
    ("num_local_experts", "expert_count"),
    ("n_routed_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
    ("n_shared_experts", "expert_shared_count"),
    ("n_group", "expert_group_count"),
    ("topk_group", "expert_group_used_count"),
    ("first_k_dense_replace", "leading_dense_block_count"),
    ("q_lora_rank", "attention.q_lora_rank"),
    ("kv_lora_rank", "attention.kv_lora_rank"),
];

fn architecture(config: &Value) -> &'static str {
    match config["model_type"].as_str().unwrap() {
        "llama" | "mistral" | "mixtral" => "llama",
        "qwen2" => "qwen2",
        "qwen3" => "qwen3",
        "qwen3_moe" => "qwen3moe",
        "gemma3_text" => "gemma3",
        "phi3" => "phi3",
        "deepseek_v3" => "deepseek2",
        other => panic!("no GGUF architecture for {other}"),
    }
}

/// Writes the twin. `split`: the newer form of latent attention, with a tensor each for keys and values.
pub fn write_twin(directory: &Path, at: &Path, split: bool) {
    let (keys, tensors) = twin(&Checkpoint::open(directory), split);
    fs::write(at, write_gguf_file(&tensors, &keys, Element::F32)).unwrap();
}

/// Keys and tensors of a GGUF file.
type Contents = (Vec<(String, Meta)>, Vec<(String, Tensor)>);

/// The twin's keys and tensors.
pub fn twin(checkpoint: &Checkpoint, split: bool) -> Contents {
    let name = architecture(&checkpoint.config);
    (keys(checkpoint, name, split), tensors(checkpoint, name, split))
}

fn keys(checkpoint: &Checkpoint, name: &str, split: bool) -> Vec<(String, Meta)> {
    let config = &checkpoint.config;
    let mut keys = vec![
        ("general.architecture".to_owned(), Meta::Text(name.to_owned())),
        ("tokenizer.ggml.model".to_owned(), Meta::Text("gpt2".to_owned())),
    ];
    let mut put = |key: &str, value: Meta| keys.push((format!("{name}.{key}"), value));
    for (from, to) in SIZES {
        if let Some(size) = config[from].as_u64() {
            put(to, Meta::U32(size as u32));
        }
    }
    let theta = |section: &Value| Meta::F32(section["rope_theta"].as_f64().unwrap() as f32);
    let rope = &config["rope_parameters"];
    let global = if rope["full_attention"].is_object() {
        &rope["full_attention"]
    } else {
        rope
    };
    put("rope.freq_base", theta(global));
    let eps = config["rms_norm_eps"].as_f64().unwrap() as f32;
    put("attention.layer_norm_rms_epsilon", Meta::F32(eps));
    if name == "deepseek2" {
        let size = |key: &str| checkpoint.size(key) as u32;
        let (rope, plain) = (size("qk_rope_head_dim"), size("qk_nope_head_dim"));
        put("rope.dimension_count", Meta::U32(rope));
        let scale = config["routed_scaling_factor"].as_f64().unwrap() as f32;
        put("expert_weights_scale", Meta::F32(scale));
        put("expert_weights_norm", Meta::Bool(true));
        put("expert_gating_func", Meta::U32(2));
        if split {
            put("attention.key_length", Meta::U32(size("kv_lora_rank") + rope));
            put("attention.value_length", Meta::U32(size("kv_lora_rank")));
            put("attention.key_length_mla", Meta::U32(plain + rope));
            put("attention.value_length_mla", Meta::U32(size("v_head_dim")));
        } else {
            put("attention.key_length", Meta::U32(plain + rope));
            put("attention.value_length", Meta::U32(size("v_head_dim")));
        }
    } else if let Some(dim) = config["head_dim"].as_u64() {
        put("attention.key_length", Meta::U32(dim as u32));
        put("attention.value_length", Meta::U32(dim as u32));
    }
    keys
}

fn tensors(checkpoint: &Checkpoint, name: &str, split: bool) -> Vec<(String, Tensor)> {
    let mut out = BTreeMap::new();
    let mut stacks: BTreeMap<String, BTreeMap<usize, Tensor>> = BTreeMap::new();
    for (from, (shape, numbers)) in &checkpoint.tensors {
        let mut tensor = (shape.clone(), numbers.clone());
        let mut from = from.clone();
        if name == "gemma3" {
            if from.ends_with("norm.weight") {
                tensor.1.iter_mut().for_each(|x| *x += 1.0);
            }
            from = from.replace("post_attention_layernorm", "post_attention_norm");
        }
        if let Some((stack, expert)) = of_expert(&from) {
            stacks.entry(renamed(&stack)).or_default().insert(expert, tensor);
            continue;
        }
        let to = renamed(&from);
        if name == "llama" && (to.ends_with("attn_q.weight") || to.ends_with("attn_k.weight")) {
            let heads = if to.contains("attn_q") {
                "num_attention_heads"
            } else {
                "num_key_value_heads"
            };
            tensor.1 = side_by_side(&tensor, tensor.0[0] / checkpoint.size(heads));
        }
        if split && to.ends_with("attn_kv_b.weight") {
            let (keys, values) = halves(checkpoint, &tensor);
            out.insert(to.replace("attn_kv_b", "attn_k_b"), keys);
            out.insert(to.replace("attn_kv_b", "attn_v_b"), values);
        } else {
            out.insert(to, tensor);
        }
    }
    for (stack, experts) in stacks {
        let one = experts[&0].0.clone();
        let numbers = experts.values().flat_map(|tensor| tensor.1.clone()).collect();
        out.insert(stack, (vec![experts.len(), one[0], one[1]], numbers));
    }
    if checkpoint.config["rope_parameters"]["rope_type"] == "llama3" {
        let factors = llama3_factors(&checkpoint.config);
        out.insert("rope_freqs.weight".to_owned(), (vec![factors.len()], factors));
    }
    out.into_iter().collect()
}

fn renamed(name: &str) -> String {
    NAMES
        .iter()
        .fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// The name of the tensor that holds all experts, and the expert's number.
fn of_expert(name: &str) -> Option<(String, usize)> {
    let (layer, rest) = name.split_once(".experts.")?;
    let (expert, part) = rest.split_once('.')?;
    let part = match part {
        "w1.weight" | "gate_proj.weight" => "ffn_gate_exps.weight",
        "w2.weight" | "down_proj.weight" => "ffn_down_exps.weight",
        _ => "ffn_up_exps.weight",
    };
    let (layer, _) = layer.rsplit_once('.')?;
    Some((format!("{layer}.{part}"), expert.parse().ok()?))
}

/// Rows of each head in the order of interleaved rotation: row 2 i was row i, row 2 i + 1 was row i + half.
fn side_by_side((shape, numbers): &Tensor, head_dim: usize) -> Vec<f32> {
    let width = shape[1];
    (0..shape[0])
        .flat_map(|row| {
            let (head, place) = (row / head_dim, row % head_dim);
            let from = head * head_dim + place / 2 + place % 2 * (head_dim / 2);
            numbers[from * width..(from + 1) * width].to_vec()
        })
        .collect()
}

/// Each head's key part, transposed, and value part.
fn halves(checkpoint: &Checkpoint, (shape, numbers): &Tensor) -> (Tensor, Tensor) {
    let heads = checkpoint.size("num_attention_heads");
    let (plain, value) = (checkpoint.size("qk_nope_head_dim"), checkpoint.size("v_head_dim"));
    let rank = shape[1];
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for head in numbers.chunks((plain + value) * rank) {
        for j in 0..rank {
            keys.extend((0..plain).map(|i| head[i * rank + j]));
        }
        values.extend_from_slice(&head[plain * rank..]);
    }
    ((vec![heads, rank, plain], keys), (vec![heads, value, rank], values))
}

/// What llama.cpp divides frequencies by for Llama 3.1's stretch.
fn llama3_factors(config: &Value) -> Vec<f32> {
    let rope = &config["rope_parameters"];
    let number = |key: &str| rope[key].as_f64().unwrap();
    let (factor, low, high) = (number("factor"), number("low_freq_factor"), number("high_freq_factor"));
    let dim = config["head_dim"].as_u64().unwrap() as f64;
    let original = number("original_max_position_embeddings");
    (0..dim as usize / 2)
        .map(|i| {
            let length = 2.0 * std::f64::consts::PI * number("rope_theta").powf(2.0 * i as f64 / dim);
            let by = if length < original / high {
                1.0
            } else if length > original / low {
                factor
            } else {
                let smooth = (original / length - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            };
            by as f32
        })
        .collect()
}
