//! What is refused when a model is loaded, and what its identity depends on.

mod support;

use std::fs;
use std::path::Path;

use config::{Compute, EngineConfig, KvDtypeConfig, ModelConfig, Quantize};
use model::LoadError;
use protocol::kv::{Fingerprint, KvDtype, KvLayout, ModelIdentity};
use protocol::window::Groups;
use serde_json::{Value, json};
use support::checkpoint::{Checkpoint, Element, Meta, temporary};
use support::{Setup, fixture, tiny_llama};

fn load(path: &Path) -> Result<model::LoadedModel, LoadError> {
    let model = ModelConfig {
        path: path.to_str().unwrap().to_owned(),
        ..ModelConfig::default()
    };
    let engine = EngineConfig {
        kv_pool_tokens: 1_024,
        ..EngineConfig::default()
    };
    model::load(&model, &engine, 4_096)
}

/// The message of the error, which must name all `words`.
fn refused(path: &Path, words: &[&str]) {
    match load(path) {
        Ok(_) => panic!("loaded, but must be refused for {words:?}"),
        Err(error) => {
            let message = error.to_string();
            eprintln!("{message}");
            for word in words {
                assert!(message.contains(word), "{message:?} does not name {word:?}");
            }
        }
    }
}

fn directory(change: impl FnOnce(&mut Checkpoint), words: &[&str]) {
    let mut checkpoint = Checkpoint::tiny();
    change(&mut checkpoint);
    let (_keep, path) = temporary("model");
    checkpoint.write_directory(&path, Element::F32);
    refused(&path, words);
}

fn gguf(key: &str, value: Option<Meta>, words: &[&str]) {
    let checkpoint = Checkpoint::tiny();
    let (_keep, path) = temporary("model.gguf");
    let mut keys = checkpoint.gguf_keys();
    keys.retain(|(k, _)| k != key);
    keys.extend(value.map(|v| (key.to_owned(), v)));
    checkpoint.write_gguf(&path, &keys, Element::F32);
    refused(&path, words);
}

#[test]
fn other_architectures_are_named_with_the_supported_ones() {
    directory(
        |c| c.config["architectures"] = json!(["MambaForCausalLM"]),
        &["MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"],
    );
    directory(
        |c| c.config["architectures"] = json!(null),
        &["null", "LlamaForCausalLM"],
    );
    gguf(
        "general.architecture",
        Some(Meta::Text("mamba".into())),
        &["mamba", "supported are llama", "gemma3"],
    );
    gguf("general.architecture", None, &["general.architecture"]);
}

#[test]
fn features_that_are_not_computed_are_named() {
    let spiral = json!({"rope_theta": 500000.0, "rope_type": "spiral", "factor": 8.0});
    directory(
        move |c| c.config["rope_parameters"] = spiral,
        &["rope_parameters.rope_type", "spiral", "default"],
    );
    let llama3 = json!({"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0});
    directory(
        move |c| c.config["rope_parameters"] = llama3,
        &["rope_parameters.low_freq_factor", "missing", "llama3"],
    );
    directory(
        |c| {
            c.config["architectures"] = json!(["Qwen2ForCausalLM"]);
            c.config["layer_types"] = json!(["full_attention", "linear_attention", "full_attention"]);
        },
        &["layer_types", "linear_attention", "sliding_attention"],
    );
    directory(
        |c| c.config["hidden_act"] = json!("gelu"),
        &["hidden_act", "gelu", "silu"],
    );
    gguf(
        "llama.rope.scaling.type",
        Some(Meta::Text("spiral".into())),
        &["llama.rope.scaling.type", "spiral"],
    );
    gguf(
        "llama.attention.value_length",
        Some(Meta::U32(8)),
        &["llama.attention.value_length", "8", "key"],
    );
    gguf("llama.expert_count", Some(Meta::U32(8)), &["llama.expert_used_count"]);
}

#[test]
fn values_that_make_no_sense_are_named() {
    directory(
        |c| c.config["num_key_value_heads"] = json!(3),
        &["KV heads", "3", "divisor of the 4 heads"],
    );
    directory(
        |c| c.config["num_hidden_layers"] = json!(-1),
        &["num_hidden_layers", "-1"],
    );
    directory(|c| c.config["hidden_size"] = json!("64"), &["hidden_size", "\"64\""]);
    directory(|c| c.config["vocab_size"] = json!(null), &["vocab_size", "missing"]);
    directory(|c| c.config["head_dim"] = json!(15), &["head size", "15", "even"]);
    directory(
        |c| c.config["hidden_size"] = json!(1_u64 << 40),
        &["hidden size", "1099511627776", "16777216"],
    );
    directory(
        |c| c.config["rope_parameters"]["partial_rotary_factor"] = json!(1.5),
        &["partial_rotary_factor", "1.5", "at most 1"],
    );
    gguf(
        "llama.rope.dimension_count",
        Some(Meta::U32(18)),
        &["rotated width", "18", "head size"],
    );
    directory(
        |c| c.config["num_attention_heads"] = json!(0),
        &["number of heads", "0"],
    );
    directory(
        |c| c.config["rms_norm_eps"] = json!("small"),
        &["rms_norm_eps", "small", "a number"],
    );
    gguf("llama.block_count", None, &["llama.block_count"]);
    gguf(
        "llama.block_count",
        Some(Meta::Text("three".into())),
        &["llama.block_count", "three"],
    );
    gguf("llama.rope.freq_base", Some(Meta::F32(-1.0)), &["rope theta", "-1"]);
}

#[test]
fn missing_foreign_and_misshapen_tensors_are_named() {
    let up = "model.layers.1.mlp.up_proj.weight";
    directory(|c| drop(c.tensors.remove(up)), &[up, "missing", "[160, 64]"]);
    directory(
        |c| c.config["intermediate_size"] = json!(96),
        &["mlp.gate_proj.weight", "[160, 64]", "[96, 64]"],
    );
    directory(
        |c| c.config["num_hidden_layers"] = json!(4),
        &["model.layers.3.", "missing"],
    );
    directory(
        |c| c.config["num_hidden_layers"] = json!(2),
        &["model.layers.2.", "9 tensors", "not used"],
    );
    directory(
        |c| c.config["attention_bias"] = json!(true),
        &["self_attn.q_proj.bias", "missing", "[64]"],
    );
    directory(
        |c| {
            c.add_biases();
            c.config["mlp_bias"] = json!(false);
        },
        &["mlp.down_proj.bias", "not used"],
    );
    gguf(
        "llama.feed_forward_length",
        Some(Meta::U32(96)),
        &["blk.0.ffn_gate.weight", "[160, 64]", "[96, 64]"],
    );
    gguf("llama.block_count", Some(Meta::U32(4)), &["blk.3.", "missing"]);
    gguf(
        "llama.attention.head_count_kv",
        Some(Meta::U32(4)),
        &["blk.0.attn_k.weight", "[32, 64]", "[64, 64]"],
    );
}

#[test]
fn element_types_that_cannot_be_read_are_named() {
    let (_keep, path) = temporary("model");
    Checkpoint::tiny().write_directory(&path, Element::F64);
    refused(&path, &["lm_head.weight", "F64", "F32, F16 and BF16"]);
    let (_keep, path) = temporary("model.gguf");
    Checkpoint::tiny().write_gguf(&path, &Checkpoint::tiny().gguf_keys(), Element::F64);
    refused(&path, &["28"]);
}

#[test]
fn damaged_files_are_errors() {
    let (_keep, path) = temporary("model");
    Checkpoint::tiny().write_directory(&path, Element::F32);
    let weights = path.join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    for length in [0, 4, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(&weights, &whole[..length]).unwrap();
        refused(&path, &["model.safetensors"]);
    }
    let mut not_finite = Checkpoint::tiny();
    not_finite.tensors.get_mut("lm_head.weight").unwrap().1[5] = f32::NAN;
    not_finite.write_directory(&path, Element::F32);
    // Such weights load (nothing reads them all), but no answer comes of them.
    let loaded = load(&path).unwrap();
    let mut bench = support::Bench::new(loaded.runner, 16, loaded.pool.total_blocks()).in_groups(loaded.layout.groups);
    bench.add(&[1, 2, 3], &protocol::sampling::SamplingParams::greedy(), 1, false);
    let plan = bench.plan(&[(0, 3)]);
    let output = engine::runner::Runner::run(&mut bench.runner, &plan, &mut engine::runner::NoObserver).unwrap();
    assert!(output.sampled.is_empty());
    assert!(
        output.failed.len() == 1 && output.failed[0].1.contains("not a number"),
        "{:?}",
        output.failed
    );
    refused(Path::new("/nowhere/model.gguf"), &["/nowhere/model.gguf"]);
    refused(Path::new(""), &["model.path"]);
}

#[test]
fn pools_that_do_not_fit_are_refused() {
    let model = ModelConfig {
        path: tiny_llama().to_str().unwrap().to_owned(),
        ..ModelConfig::default()
    };
    let engine = |kv_pool_tokens, threads| EngineConfig {
        kv_pool_tokens,
        threads,
        ..EngineConfig::default()
    };
    let message = |e: &EngineConfig| model::load(&model, e, 100).map(|_| ()).unwrap_err().to_string();
    assert!(message(&engine(8, 1)).contains("engine.kv_pool_tokens is 8, which holds 0 tokens"));
    assert!(message(&engine(usize::MAX, 1)).contains("KV pool"));
    assert!(message(&engine(1_024, 0)).contains("threads"));
    // 3 layers, K and V of 2 heads of 16 in 2 bytes, 16 tokens.
    let block = 3 * 2 * 2 * 16 * 2 * 16;
    let in_bytes = |kv_pool_bytes| EngineConfig {
        kv_pool_bytes,
        ..EngineConfig::default()
    };
    // 100 tokens need 7 blocks.
    assert!(message(&in_bytes(block - 1)).contains("engine.kv_pool_bytes is 6143, which holds 0 tokens"));
    assert!(message(&in_bytes(7 * block - 1)).contains("so at least 43008 would be right"));
    assert!(message(&in_bytes(1 << 44)).contains("engine.kv_pool_bytes is 17592186044416, a KV pool of"));
    for (bytes, blocks) in [(7 * block, 7), (8 * block - 1, 7), (10 * block, 10)] {
        let loaded = model::load(&model, &in_bytes(bytes), 100).unwrap();
        assert_eq!(loaded.pool.total_blocks(), blocks);
    }
}

#[test]
fn the_layout_and_the_identity_say_what_was_loaded() {
    let loaded = Setup {
        block_tokens: 32,
        pool_tokens: 640,
        ..Setup::quantised()
    }
    .load(&tiny_llama());
    let layout = KvLayout {
        num_layers: 3,
        num_kv_heads: 2,
        head_dim: 16,
        block_tokens: 32,
        dtype: KvDtype::F16,
        latent: false,
        groups: Groups::ONE,
    };
    assert_eq!(
        (loaded.layout, *loaded.pool.layout(), loaded.pool.total_blocks()),
        (layout, layout, 20)
    );
    assert_eq!(loaded.max_position_embeddings, 512);
    let identity = &loaded.identity;
    assert_eq!((identity.architecture.as_str(), identity.vocab_size), ("llama", 512));
    let parts: Vec<&str> = identity.numerics.split('/').collect();
    assert!(
        parts.len() == 3 && parts[0].starts_with("quantised-") && parts[2] == "f16",
        "{}",
        identity.numerics
    );
}

#[test]
fn everything_that_changes_answers_changes_the_fingerprint() {
    let mut seen: Vec<(String, ModelIdentity, Fingerprint)> = Vec::new();
    let mut note = |what: &str, path: &Path, setup: Setup| {
        let loaded = setup.load(path);
        let fingerprint = Fingerprint::new(&loaded.identity, &loaded.layout);
        for (other, identity, f) in &seen {
            assert_ne!(fingerprint, *f, "{what} and {other}: {identity:?}");
        }
        assert_eq!(setup.load(path).identity, loaded.identity, "{what}: loaded twice");
        seen.push((what.to_owned(), loaded.identity, fingerprint));
    };
    let base = Setup::quantised();
    note("the fixture", &tiny_llama(), base);
    note(
        "float32",
        &tiny_llama(),
        Setup {
            compute: Compute::Float32,
            ..base
        },
    );
    note(
        "f32 KV",
        &tiny_llama(),
        Setup {
            kv_dtype: KvDtypeConfig::F32,
            ..base
        },
    );
    for quantize in [Quantize::Q8_0, Quantize::Q4_0] {
        note(quantize.as_str(), &tiny_llama(), Setup { quantize, ..base });
    }
    note(
        "larger blocks",
        &tiny_llama(),
        Setup {
            block_tokens: 32,
            ..base
        },
    );
    let variant = |change: &dyn Fn(&mut Checkpoint), element| {
        let mut checkpoint = Checkpoint::tiny();
        change(&mut checkpoint);
        let (keep, path) = temporary("model");
        checkpoint.write_directory(&path, element);
        (keep, path)
    };
    let (_a, path) = variant(
        &|c| c.tensors.get_mut("model.norm.weight").unwrap().1[7] += 1e-7,
        Element::F32,
    );
    note("one bit of one weight", &path, base);
    let (_b, path) = variant(&|c| c.config["rms_norm_eps"] = json!(1e-5), Element::F32);
    note("another epsilon", &path, base);
    let (_c, path) = variant(
        &|c| c.config["rope_parameters"]["rope_theta"] = json!(20_000.0),
        Element::F32,
    );
    note("another rope theta", &path, base);
    let (_d, path) = variant(&|_| (), Element::F16);
    note("narrower weights", &path, base);
    // The place of the files does not matter.
    let (_e, path) = variant(&|_| (), Element::F32);
    let moved = base.load(&path).identity;
    assert_eq!(moved.weights_hash, base.load(&tiny_llama()).identity.weights_hash);
}

#[test]
fn both_forms_of_rope_settings_are_read() {
    let (_keep, older) = temporary("older");
    let mut checkpoint = Checkpoint::tiny();
    let entries = checkpoint.config.as_object_mut().unwrap();
    entries.remove("rope_parameters");
    entries.insert("rope_theta".to_owned(), json!(20_000.0));
    entries.insert("rope_scaling".to_owned(), json!(null));
    checkpoint.write_directory(&older, Element::F32);
    let (_keep_too, newer) = temporary("newer");
    let mut checkpoint = Checkpoint::tiny();
    checkpoint.config["rope_parameters"]["rope_theta"] = json!(20_000.0);
    checkpoint.write_directory(&newer, Element::F32);
    let hash = |path| load(path).unwrap().identity.weights_hash;
    assert_eq!(hash(&older), hash(&newer));
    assert_ne!(hash(&older), hash(&tiny_llama()));
}

#[test]
fn experts_that_make_no_sense_are_named() {
    let family = |name: &str, change: &dyn Fn(&mut Value), words: &[&str]| {
        let (_keep, path) = temporary("model");
        fs::create_dir_all(&path).unwrap();
        let from = fixture(name);
        let mut config = support::read_json(&from.join("config.json"));
        change(&mut config);
        fs::write(path.join("config.json"), config.to_string()).unwrap();
        for file in ["model.safetensors", "tokenizer.json"] {
            fs::copy(from.join(file), path.join(file)).unwrap();
        }
        refused(&path, words);
    };
    family(
        "mixtral",
        &|c| c["num_experts_per_tok"] = json!(5),
        &["token's experts", "5", "4"],
    );
    family(
        "mixtral",
        &|c| c["num_local_experts"] = json!(5),
        &["block_sparse_moe.gate.weight", "[4, 64]", "[5, 64]"],
    );
    family(
        "deepseek-v3",
        &|c| c["n_group"] = json!(3),
        &["groups of experts", "3", "divisor"],
    );
    family(
        "deepseek-v3",
        &|c| c["topk_method"] = json!("random"),
        &["topk_method", "random", "greedy"],
    );
    family(
        "deepseek-v3",
        &|c| c["attention_bias"] = json!(true),
        &["attention_bias", "latent"],
    );
    family(
        "deepseek-v3",
        &|c| c["kv_lora_rank"] = json!(0),
        &["rank of keys and values", "0"],
    );
    family(
        "qwen3-moe",
        &|c| c["moe_intermediate_size"] = json!(null),
        &["moe_intermediate_size", "missing"],
    );
    family("gemma3", &|c| c["sliding_window"] = json!(0), &["sliding window", "0"]);
    family(
        "phi3",
        &|c| c["hidden_act"] = json!("relu"),
        &["hidden_act", "relu", "gelu_pytorch_tanh"],
    );
}
