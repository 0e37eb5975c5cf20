//! Weights in forms that become others at loading: 8-bit floats, floats that are quantised, files in parts. Each gives, bit
//! for bit, what the other form gives that it stands for.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor as CandleTensor};
use config::{ModelConfig, Quantize};
use model::inspect::inspect;
use protocol::sampling::SamplingParams;
use serde_json::{Value, json};
use support::checkpoint::{Checkpoint, Element, Meta, Tensor, temporary, write_gguf_file, write_gguf_typed};
use support::fp8::{Twins, number};
use support::twin::twin;
use support::{Setup, fixture, read_json};

/// What a model computes, as bits: log-probabilities of a prompt, greedy tokens and theirs; and the hash of its weights.
fn bits(setup: Setup, path: &Path) -> (u128, Vec<u32>, Vec<u32>) {
    let loaded = setup.load_with(path, &[]).unwrap_or_else(|error| panic!("{error}"));
    let (vocab, hash) = (loaded.identity.vocab_size, loaded.identity.weights_hash);
    let mut bench = support::Bench::new(loaded.runner, setup.block_tokens, loaded.pool.total_blocks())
        .in_groups(loaded.layout.groups);
    let prompt: Vec<u32> = (0..40).map(|t| (t * t * 7 + t * 3 + 5) % vocab).collect();
    let s = bench.add(&prompt, &SamplingParams::greedy(), 8, true);
    bench.finish(16, 1, 8);
    let s = &bench.sequences[s];
    let sampled = s.sampled.iter().map(|token| token.raw_logprob);
    let logprobs = s.logprobs.iter().copied().chain(sampled).map(f32::to_bits).collect();
    (hash, s.output().to_vec(), logprobs)
}

fn refused(setup: Setup, path: &Path, words: &[&str]) {
    let message = match setup.load_with(path, &[]) {
        Ok(_) => panic!("loaded, but must be refused for {words:?}"),
        Err(error) => error.to_string(),
    };
    for word in words {
        assert!(message.contains(word), "{message:?} does not name {word:?}");
    }
}

fn fine_grained(block: [usize; 2]) -> Value {
    json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block})
}

fn compressed(strategy: &str) -> Value {
    json!({
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 8, "type": "float", "symmetric": true, "dynamic": false, "strategy": strategy,
        }}},
    })
}

#[test]
fn eight_bit_floats_are_the_matrices_that_they_stand_for() {
    let static_scheme = json!({"quant_method": "fp8", "activation_scheme": "static"});
    let fbgemm = json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0});
    for (family, section, suffix, block) in [
        // Blocks that are cut at both edges, and blocks larger than most of the matrices.
        ("llama", fine_grained([24, 40]), "_scale_inv", [24, 40]),
        ("qwen3", fine_grained([128, 128]), "_scale_inv", [128, 128]),
        ("deepseek-v3", fine_grained([32, 32]), "_scale_inv", [32, 32]),
        ("qwen3-moe", static_scheme.clone(), "_scale", [0, 0]),
        ("llama", static_scheme, "_scale_inv", [0, 0]),
        // Three matrices in one tensor, two in another.
        ("phi3", compressed("channel"), "_scale", [1, 0]),
        ("phi3", fine_grained([48, 48]), "_scale_inv", [48, 48]),
        ("llama", compressed("tensor"), "_scale", [0, 0]),
        ("llama3-rope-tied", fbgemm, "_scale", [1, 0]),
    ] {
        let twins = Twins::new(&Checkpoint::open(&fixture(family)), section, suffix, block);
        let ((_a, narrow), (_b, wide)) = (temporary("narrow"), temporary("wide"));
        twins.write(&narrow);
        twins.write_widened(&wide);
        let threads = Setup {
            threads: 2,
            ..Setup::quantised()
        };
        for setup in [Setup::float(), threads] {
            assert_eq!(bits(setup, &narrow), bits(setup, &wide), "{family} {suffix} {block:?}");
        }
        let quantised = Setup {
            quantize: Quantize::Q8_0,
            ..threads
        };
        assert_eq!(bits(quantised, &narrow), bits(quantised, &wide), "{family}, quantised");
        // The original differs, so that the comparison could fail.
        assert_ne!(
            bits(Setup::float(), &narrow).2,
            bits(Setup::float(), &fixture(family)).2
        );
    }
}

#[test]
fn what_is_wrong_with_eight_bit_floats_is_named() {
    let name = "model.layers.1.mlp.up_proj.weight";
    let scale = "model.layers.1.mlp.up_proj.weight_scale_inv";
    let case = |change: &dyn Fn(&mut Twins), words: &[&str]| {
        let mut twins = Twins::new(&Checkpoint::tiny(), fine_grained([32, 32]), "_scale_inv", [32, 32]);
        change(&mut twins);
        let (_keep, path) = temporary("model");
        twins.write(&path);
        refused(Setup::quantised(), &path, words);
    };
    // Both encodings of what is no number.
    for nan in [0x7f, 0xff] {
        assert!(number(nan).is_nan());
        let set = |t: &mut Twins| t.scaled.get_mut(name).unwrap().bytes[3 * 64 + 5] = nan;
        case(&set, &[name, "NaN", "row 3", "column 5"]);
    }
    let one = |t: &mut Twins| t.scaled.get_mut(name).unwrap().scales[3] = f32::INFINITY;
    case(&one, &[scale, "inf", "row 1", "column 1"]);
    case(
        &|t| t.suffix = "_scale",
        &["_proj.weight_scale_inv", "missing", "[2, 2]"],
    );
    let reshaped = |t: &mut Twins| t.scaled.get_mut(name).unwrap().scale_shape = vec![2, 5];
    case(&reshaped, &[scale, "[2, 5]", "[5, 2]"]);
    let says = |block: [usize; 2]| {
        move |t: &mut Twins| t.rest.config["quantization_config"]["weight_block_size"] = json!(block)
    };
    case(&says([64, 64]), &["_scale_inv", "[2, 2]", "[1, 1]"]);
    case(&says([0, 64]), &["quantization_config.weight_block_size", "[0,64]"]);
    let silent = |t: &mut Twins| t.rest.config["quantization_config"] = Value::Null;
    case(&silent, &["_proj.weight", "F8_E4M3", "quantization_config"]);
    let other = |t: &mut Twins| t.rest.config["quantization_config"]["quant_method"] = "awq".into();
    case(&other, &["quantization_config.quant_method", "awq", "fp8"]);
    let foreign = |t: &mut Twins| {
        drop(
            t.rest
                .tensors
                .insert("x.weight_scale_inv".to_owned(), (vec![1], vec![1.0])),
        )
    };
    case(&foreign, &["x.weight_scale_inv", "not used"]);
    // Scales of activations are left out.
    let mut twins = Twins::new(&Checkpoint::tiny(), fine_grained([32, 32]), "_scale_inv", [32, 32]);
    let scale = name.replace(".weight", ".input_scale");
    twins.rest.tensors.insert(scale, (vec![1], vec![0.5]));
    let (_keep, path) = temporary("model");
    twins.write(&path);
    bits(Setup::quantised(), &path);
}

/// A model of two layers whose rows fit all types.
fn wide() -> Checkpoint {
    let mut out = Checkpoint::tiny();
    for (key, value) in [
        ("hidden_size", 256),
        ("intermediate_size", 512),
        ("num_hidden_layers", 2),
        ("vocab_size", 96),
        ("head_dim", 64),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
    ] {
        out.config[key] = value.into();
    }
    out.tensors.clear();
    let mut state = 88_172_645_463_325_252_u64;
    let mut put = |name: String, shape: &[usize], middle: f32| {
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            middle + ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.15
        };
        let numbers = (0..shape.iter().product()).map(|_| next()).collect();
        out.tensors.insert(name, (shape.to_vec(), numbers));
    };
    put("model.embed_tokens.weight".to_owned(), &[96, 256], 0.0);
    put("lm_head.weight".to_owned(), &[96, 256], 0.0);
    put("model.norm.weight".to_owned(), &[256], 1.0);
    for layer in 0..2 {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        for (part, n, k) in [("q", 256, 256), ("k", 128, 256), ("v", 128, 256), ("o", 256, 256)] {
            put(name(&format!("self_attn.{part}_proj")), &[n, k], 0.0);
        }
        for (part, n, k) in [("gate", 512, 256), ("up", 512, 256), ("down", 256, 512)] {
            put(name(&format!("mlp.{part}_proj")), &[n, k], 0.0);
        }
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            put(name(norm), &[256], 1.0);
        }
    }
    out
}

/// ggml's number of a type, and how candle calls it.
fn type_of(word: &str) -> (u32, GgmlDType) {
    match word {
        "q4_0" => (2, GgmlDType::Q4_0),
        "q4_1" => (3, GgmlDType::Q4_1),
        "q5_0" => (6, GgmlDType::Q5_0),
        "q5_1" => (7, GgmlDType::Q5_1),
        "q8_0" => (8, GgmlDType::Q8_0),
        "q4_k" => (12, GgmlDType::Q4K),
        "q5_k" => (13, GgmlDType::Q5K),
        "q6_k" => (14, GgmlDType::Q6K),
        other => panic!("{other}"),
    }
}

/// What llama.cpp makes of a tensor of a GGUF file.
fn rule(name: &str, asked: &'static str, width: usize, tied: bool) -> Option<&'static str> {
    if name.ends_with("norm.weight") || name.ends_with(".bias") || name.contains("ffn_gate_inp") {
        return None;
    }
    let head = name == "output.weight" || tied && name == "token_embd.weight";
    let wanted = if head && asked != "q8_0" { "q6_k" } else { asked };
    if !width.is_multiple_of(32) {
        return None;
    }
    let narrow = !width.is_multiple_of(256);
    Some(match wanted {
        "q4_k" if narrow => "q5_0",
        "q5_k" if narrow => "q5_1",
        "q6_k" if narrow => "q8_0",
        other => other,
    })
}

/// A GGUF file whose matrices candle has quantised whole, tensor by tensor.
fn quantised_before(keys: &[(String, Meta)], tensors: &[(String, Tensor)], asked: &'static str) -> Vec<u8> {
    let tied = !tensors.iter().any(|(name, _)| name == "output.weight");
    write_gguf_typed(tensors, keys, |name, (shape, numbers)| {
        match rule(name, asked, *shape.last().unwrap(), tied).filter(|_| shape.len() > 1) {
            None => (0, Element::F32.encode(numbers)),
            Some(word) => {
                let (id, dtype) = type_of(word);
                let tensor = CandleTensor::from_slice(numbers, shape.clone(), &Device::Cpu).unwrap();
                (
                    id,
                    QTensor::quantize(&tensor, dtype).unwrap().data().unwrap().into_owned(),
                )
            }
        }
    })
}

#[test]
fn quantising_at_loading_gives_what_a_quantised_file_gives() {
    let wide = wide();
    let narrow = |family: &str| twin(&Checkpoint::open(&fixture(family)), false);
    for (what, (keys, tensors)) in [
        ("wide", (wide.gguf_keys(), wide.gguf_tensors())),
        ("qwen3", narrow("qwen3")),
        ("qwen3-moe", narrow("qwen3-moe")),
        ("tied", narrow("llama3-rope-tied")),
    ] {
        let mut hashes = BTreeMap::new();
        for quantize in Quantize::ALL.into_iter().skip(1) {
            let ((_a, floats), (_b, blocks)) = (temporary("floats.gguf"), temporary("blocks.gguf"));
            fs::write(&floats, write_gguf_file(&tensors, &keys, Element::F32)).unwrap();
            fs::write(&blocks, quantised_before(&keys, &tensors, quantize.as_str())).unwrap();
            let asked = Setup {
                quantize,
                ..Setup::quantised()
            };
            let expected = bits(Setup::quantised(), &blocks);
            assert_eq!(bits(asked, &floats), expected, "{what}, {quantize:?}");
            let threads = Setup { threads: 2, ..asked };
            assert_eq!(bits(threads, &floats), expected, "{what}, {quantize:?}, 2 threads");
            // What is quantised stays.
            assert_eq!(bits(asked, &blocks), expected, "{what}, {quantize:?}, twice");
            assert_ne!(bits(Setup::quantised(), &floats).0, expected.0);
            hashes.insert(expected.0, quantize);
        }
        // Where 256 does not fit, the K types are those that they fall back to.
        let different = if what == "wide" { 8 } else { 5 };
        assert_eq!(hashes.len(), different, "{what}: {hashes:?}");
    }
}

#[test]
fn directories_and_narrower_floats_are_quantised_too() {
    let checkpoint = Checkpoint::open(&fixture("qwen3"));
    let q8 = Setup {
        quantize: Quantize::Q8_0,
        ..Setup::quantised()
    };
    for element in [Element::F32, Element::F16, Element::Bf16] {
        let ((_a, directory), (_b, file)) = (temporary("directory"), temporary("file.gguf"));
        checkpoint.write_directory(&directory, element);
        let (keys, mut tensors) = twin(&checkpoint, false);
        for (_, (shape, numbers)) in &mut tensors {
            if shape.len() > 1 {
                *numbers = element.rounded(numbers);
            }
        }
        fs::write(&file, quantised_before(&keys, &tensors, "q8_0")).unwrap();
        // The names differ, and so do the hashes.
        let (found, expected) = (bits(q8, &directory), bits(Setup::quantised(), &file));
        assert_eq!((found.1, found.2), (expected.1, expected.2), "{element:?}");
    }
    let mut broken = Checkpoint::tiny();
    broken.tensors.get_mut("lm_head.weight").unwrap().1[64 + 7] = f32::NAN;
    let (_keep, path) = temporary("model");
    broken.write_directory(&path, Element::F32);
    refused(q8, &path, &["lm_head.weight", "NaN", "row 1", "column 7"]);
}

#[test]
fn inspect_tells_what_weights_become() {
    let look = |path: &Path, quantize| {
        let model = ModelConfig {
            quantize,
            ..ModelConfig::default()
        };
        inspect(path, &model, 16, 64).unwrap()
    };
    let plain = look(&fixture("qwen3"), Quantize::None);
    assert_eq!(plain.held.types.keys().copied().collect::<Vec<_>>(), ["F32"]);
    assert!(plain.held.bytes() < plain.weight_bytes && plain.held.bytes() + 10_000 > plain.weight_bytes);
    let eight = look(&fixture("qwen3"), Quantize::Q8_0);
    let matrices: usize = eight.held.types["Q8_0"].0;
    assert_eq!(matrices + eight.held.types["F32"].0, plain.held.types["F32"].0);
    assert!(eight.held.fallbacks.is_empty() && eight.held.bytes() * 7 < plain.held.bytes() * 2);
    let four = look(&fixture("qwen3"), Quantize::Q4K);
    let said = four.to_string();
    for words in [
        "in memory",
        "quantize q4_k",
        "are Q5_0 and not Q4_K",
        "are Q8_0 and not Q6_K",
    ] {
        assert!(said.contains(words), "{said}");
    }
    // The same sizes as the file that was quantised before.
    let (keys, tensors) = twin(&Checkpoint::open(&fixture("qwen3")), false);
    let (_keep, file) = temporary("blocks.gguf");
    fs::write(&file, quantised_before(&keys, &tensors, "q4_k")).unwrap();
    assert_eq!(look(&file, Quantize::None).held.types, four.held.types);
    // 8-bit floats become bfloat16, or are quantised.
    let twins = Twins::new(&Checkpoint::tiny(), fine_grained([32, 32]), "_scale_inv", [32, 32]);
    let (_keep, path) = temporary("model");
    twins.write(&path);
    let numbers: usize = twins.scaled.values().map(|one| one.bytes.len()).sum();
    assert_eq!(look(&path, Quantize::None).held.types["BF16"].1, 2 * numbers as u64);
    assert!(!look(&path, Quantize::Q8_0).held.types.contains_key("BF16"));
}

/// The parts of a GGUF file of these keys and tensors, written beside each other; the first has all keys.
fn write_parts(at: &Path, keys: &[(String, Meta)], tensors: &[(String, Tensor)], parts: usize) -> Vec<PathBuf> {
    let share = tensors.len().div_ceil(parts);
    let path = |i: usize| at.join(format!("tiny-{:05}-of-{parts:05}.gguf", i + 1));
    for (i, some) in tensors.chunks(share).enumerate() {
        let mut own: Vec<(String, Meta)> = if i == 0 { keys.to_vec() } else { Vec::new() };
        for (key, value) in [("no", i), ("count", parts), ("tensors.count", tensors.len())] {
            own.push((format!("split.{key}"), Meta::U32(value as u32)));
        }
        fs::write(path(i), write_gguf_file(some, &own, Element::F16)).unwrap();
    }
    (0..parts).map(path).collect()
}

#[test]
fn a_file_in_parts_is_the_whole_file() {
    for family in ["llama", "qwen3-moe", "deepseek-v3"] {
        let (keys, tensors) = twin(&Checkpoint::open(&fixture(family)), false);
        let (_keep, whole) = temporary("whole.gguf");
        fs::write(&whole, write_gguf_file(&tensors, &keys, Element::F16)).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let parts = write_parts(directory.path(), &keys, &tensors, 3);
        let expected = bits(Setup::quantised(), &whole);
        for path in parts.iter().map(PathBuf::as_path).chain([directory.path()]) {
            assert_eq!(bits(Setup::quantised(), path), expected, "{family}: {}", path.display());
        }
        let seen = inspect(directory.path(), &ModelConfig::default(), 16, 64).unwrap();
        assert!(seen.form.contains("split"), "{seen}");
        // What is in any of the files counts.
        let mut changed = tensors.clone();
        changed.last_mut().unwrap().1.1[0] += 0.5;
        write_parts(directory.path(), &keys, &changed, 3);
        assert_ne!(bits(Setup::quantised(), &parts[0]).0, expected.0);
        fs::remove_file(&parts[1]).unwrap();
        refused(
            Setup::quantised(),
            &parts[0],
            &["tiny-00001-of-00003.gguf", "tiny-00002-of-00003.gguf"],
        );
    }
}

#[test]
fn progress_reaches_the_end() {
    for path in [fixture("llama"), fixture("phi3"), fixture("qwen3-moe")] {
        let model = ModelConfig {
            path: path.to_str().unwrap().to_owned(),
            quantize: Quantize::Q8_0,
            ..ModelConfig::default()
        };
        let engine = config::EngineConfig {
            kv_pool_tokens: 1_024,
            ..config::EngineConfig::default()
        };
        let (mut all, config) = (Vec::new(), read_json(&path.join("config.json")));
        model::load_watched(&model, &engine, 64, &mut |now| all.push(now)).unwrap();
        let last = all.last().unwrap();
        assert_eq!(last.done, last.total, "{config}");
        assert!(
            all.len() > 10
                && all
                    .windows(2)
                    .all(|two| two[0].done < two[1].done && two[0].total == two[1].total)
        );
    }
}
