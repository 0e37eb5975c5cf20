//! Low-rank adapters: what they compute, that they change nothing else, and which files are refused.

mod support;

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use config::{EngineConfig, ModelConfig};
use model::kernels::{Cpu, CpuLevel};
use model_files::ModelFiles;
use protocol::sampling::SamplingParams;
use serde_json::json;
use support::adapter::{ALL, Adapter};
use support::checkpoint::{Checkpoint, Element};
use support::one_answer::{Bits, Case, alone, cases, handed_over, preempted, run};
use support::twin::write_twin;
use support::{Bench, Setup, fixture, tiny_llama};

/// Two adapters of different rank, modules and element type.
fn two_adapters(at: &Path) -> Vec<PathBuf> {
    let base = Checkpoint::tiny();
    vec![
        Adapter::random(&base, 1, 4, &ALL).write(&at.join("one"), Element::F32),
        Adapter::random(&base, 2, 11, &["q_proj", "v_proj", "down_proj"]).write(&at.join("two"), Element::Bf16),
    ]
}

/// Log-probabilities of the tokens of a fixed text and of what follows greedily.
fn numbers(bench: &mut Bench<model::ModelRunner>, adapter: Option<u32>) -> (Vec<u32>, Vec<f32>) {
    let prompt: Vec<u32> = (0..60).map(|t| (t * t * 7 + t * 3 + 5) % 512).collect();
    let s = bench.add(&prompt, &SamplingParams::greedy(), 8, true);
    bench.sequences[s].adapter = adapter;
    bench.finish(16, 1, 8);
    let s = &bench.sequences[s];
    let mut logprobs = s.logprobs.clone();
    logprobs.extend(s.sampled.iter().map(|token| token.raw_logprob));
    let found = (s.output().to_vec(), logprobs);
    bench.clear();
    found
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |most, (a, b)| {
        if (a - b).abs() > most || b.is_nan() {
            (a - b).abs()
        } else {
            most
        }
    })
}

/// In float32, with both file formats of the base model: GGUF has the rows of query and key in another order.
#[test]
fn an_adapter_gives_what_merged_weights_give() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let base = Checkpoint::tiny();
    base.write_directory(&at("base"), Element::F32);
    base.write_gguf(&at("base.gguf"), &base.gguf_keys(), Element::F32);
    let mut stabilised = Adapter::random(&base, 3, 4, &["q_proj", "k_proj", "up_proj"]);
    stabilised.config["use_rslora"] = true.into();
    stabilised.config["lora_alpha"] = 3.into();
    for (i, (adapter, scale)) in [
        (Adapter::random(&base, 1, 4, &ALL), 2.0),
        (Adapter::random(&base, 2, 9, &["q_proj", "k_proj"]), 2.0),
        (Adapter::random(&base, 4, 1, &["o_proj", "gate_proj"]), 2.0),
        (stabilised, 1.5),
    ]
    .into_iter()
    .enumerate()
    {
        let merged = at(&format!("merged-{i}"));
        adapter.merged(&base, scale).write_directory(&merged, Element::F32);
        let (tokens, expected) = numbers(&mut Setup::float().bench(&merged), None);
        let adapters = [adapter.write(&at(&format!("adapter-{i}")), Element::F32)];
        for model in [at("base"), at("base.gguf")] {
            let mut bench = Setup::float().bench_with(&model, &adapters);
            let (found_tokens, found) = numbers(&mut bench, Some(0));
            let (plain_tokens, plain) = numbers(&mut bench, None);
            let (worst, changed) = (distance(&found, &expected), distance(&plain, &expected));
            eprintln!(
                "adapter {i} on {}: {worst:.2e}; without it {changed:.2e}",
                model.display()
            );
            assert_eq!(found_tokens, tokens);
            // Log-probabilities; float32 rounds each of the two ways differently.
            assert!(worst < 1e-4, "{worst}");
            assert!(changed > 0.1 && plain_tokens != tokens, "the adapter does something");
        }
    }
}

/// Where query, key and value are one module, and gate and up another.
#[test]
fn an_adapter_of_fused_modules_gives_what_merged_weights_give() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let base = Checkpoint::open(&fixture("phi3"));
    write_twin(&fixture("phi3"), &at("base.gguf"), false);
    let fused = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"];
    for (i, modules) in [&fused[..], &fused[..1], &fused[2..3]].into_iter().enumerate() {
        let adapter = Adapter::random(&base, 7, 5, modules);
        assert!(!adapter.tensors.is_empty());
        let merged = at(&format!("merged-{i}"));
        adapter.merged(&base, 2.0).write_directory(&merged, Element::F32);
        let (tokens, expected) = numbers(&mut Setup::float().bench(&merged), None);
        let adapters = [adapter.write(&at(&format!("adapter-{i}")), Element::F32)];
        for model in [fixture("phi3"), at("base.gguf")] {
            let mut bench = Setup::float().bench_with(&model, &adapters);
            let (found_tokens, found) = numbers(&mut bench, Some(0));
            let (_, plain) = numbers(&mut bench, None);
            let (worst, changed) = (distance(&found, &expected), distance(&plain, &expected));
            eprintln!("fused {modules:?}: {worst:.2e}; without it {changed:.2e}");
            assert!(worst < 1e-4 && changed > 0.1, "{worst}, {changed}");
            assert_eq!(found_tokens, tokens);
        }
    }
    // The modules that other models have are none of this one.
    let mut other = Adapter::random(&base, 7, 5, &["o_proj"]);
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    other.tensors.insert(name.to_owned(), (vec![5, 64], vec![0.0; 320]));
    let path = other.write(&at("other"), Element::F32);
    let Err(error) = Setup::float().load_with(&fixture("phi3"), &[path]) else {
        panic!("not refused");
    };
    assert!(error.to_string().contains(name), "{error}");
}

fn adapted_cases() -> Vec<Case> {
    let mut cases = cases(18, 120, 512);
    for (i, case) in cases.iter_mut().enumerate() {
        case.adapter = [None, Some(0), Some(1)][i % 3];
    }
    cases
}

/// Rows of two adapters and of none share steps, are cut, preempted and handed over, and the bits stay.
fn same_bits(setup: Setup, variants: &[(usize, usize, usize, usize)]) {
    let directory = tempfile::tempdir().unwrap();
    let adapters = two_adapters(directory.path());
    let (cases, outputs, path) = (adapted_cases(), 6, tiny_llama());
    let bench = |setup: Setup| setup.bench_with(&path, &adapters);
    let expected = alone(&mut bench(setup), &cases, outputs);
    let distinct: HashSet<_> = expected.iter().map(|bits| bits.tokens.clone()).collect();
    assert!(distinct.len() > 12, "the cases are too alike to show a mix-up");
    for &(chunk, batch, block_tokens, threads) in variants {
        let setup = Setup {
            block_tokens,
            threads,
            ..setup
        };
        let found = run(&mut bench(setup), &cases, chunk, batch, outputs);
        assert_eq!(
            found, expected,
            "chunk {chunk}, batch {batch}, block {block_tokens}, {threads} threads"
        );
    }
    assert_eq!(
        preempted(&mut bench(setup), &cases, outputs),
        expected,
        "after preemption"
    );
    let load = || setup.load_with(&path, &adapters).unwrap();
    let (a, b) = (load(), load());
    let total = a.pool.total_blocks();
    let mut prefill = Bench::new(a.runner, setup.block_tokens, total);
    let mut decode = Bench::new(b.runner, setup.block_tokens, total);
    let found = handed_over((&mut prefill, &a.pool), (&mut decode, &b.pool), &cases, outputs);
    assert_eq!(found, expected, "after the hand-over");

    // Sequences without an adapter are those of a model without adapters; the others are not.
    let mut cases = cases;
    let adapted: Vec<bool> = cases.iter().map(|case| case.adapter.is_some()).collect();
    cases.iter_mut().for_each(|case| case.adapter = None);
    let plain: Vec<Bits> = alone(&mut setup.bench(&path), &cases, outputs);
    for ((plain, found), adapted) in plain.iter().zip(&expected).zip(adapted) {
        assert_eq!(plain != found, adapted);
    }
}

#[test]
fn mixed_batches_keep_the_bits_quantised() {
    let variants = [(1, 18, 16, 1), (16, 5, 32, 2), (64, 18, 16, 2), (usize::MAX, 18, 16, 1)];
    same_bits(Setup::quantised(), &variants);
}

#[test]
fn mixed_batches_keep_the_bits_in_float() {
    same_bits(
        Setup::float(),
        &[(1, 18, 32, 2), (16, 3, 16, 1), (usize::MAX, 18, 1, 1)],
    );
}

#[test]
fn every_cpu_level_gives_the_same_bits() {
    let directory = tempfile::tempdir().unwrap();
    let adapters = two_adapters(directory.path());
    let cases = adapted_cases();
    let model = ModelConfig {
        adapters: vec![
            format!("a={}", adapters[0].display()),
            format!("b={}", adapters[1].display()),
        ],
        ..ModelConfig::default()
    };
    let engine = EngineConfig {
        kv_pool_tokens: 8_192,
        ..EngineConfig::default()
    };
    let files = ModelFiles::open(tiny_llama()).unwrap();
    let mut expected = None;
    for level in CpuLevel::ALL.into_iter().filter(|level| level.is_supported()) {
        let cpu = Cpu::with_level(level, 1).unwrap();
        let loaded = model::load_with(&files, &model, &engine, 8_192, cpu).unwrap();
        let mut bench = Bench::new(loaded.runner, 16, loaded.pool.total_blocks());
        let found = run(&mut bench, &cases, 32, 18, 3);
        assert_eq!(&found, expected.get_or_insert(found.clone()), "{level:?}");
    }
}

#[test]
fn adapters_are_known_by_all_their_numbers() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let base = Checkpoint::tiny();
    let one = Adapter::random(&base, 1, 4, &ALL);
    let mut scaled = one.clone();
    scaled.config["lora_alpha"] = 9.into();
    let mut changed = one.clone();
    changed.tensors.values_mut().next().unwrap().1[0] += 1.0;
    let paths = [
        one.write(&at("one"), Element::F32),
        one.write(&at("copy"), Element::F32),
        scaled.write(&at("scaled"), Element::F32),
        changed.write(&at("changed"), Element::F32),
    ];
    let loaded = Setup::float().load_with(&tiny_llama(), &paths).unwrap();
    let hashes: Vec<u64> = loaded.identity.adapters.iter().map(|adapter| adapter.hash).collect();
    assert_eq!(hashes[0], hashes[1]);
    assert_eq!(HashSet::<u64>::from_iter(hashes.iter().copied()).len(), 3, "{hashes:?}");
    let plain = Setup::float().load(&tiny_llama());
    assert!(plain.identity.adapters.is_empty() && plain.identity.weights_hash == loaded.identity.weights_hash);
    assert!(loaded.memory.weights > plain.memory.weights);
}

/// The message with which an adapter is refused.
fn refusal(adapter: &Adapter, spoil: impl FnOnce(&Path)) -> String {
    let directory = tempfile::tempdir().unwrap();
    let path = adapter.write(&directory.path().join("spoilt"), Element::F32);
    spoil(&path);
    let Err(error) = Setup::float().load_with(&tiny_llama(), &[path]) else {
        panic!("not refused");
    };
    let message = error.to_string();
    assert!(message.contains("adapter 0") && message.contains("spoilt"), "{message}");
    message
}

#[test]
fn adapters_that_do_not_fit_are_refused_by_name() {
    let base = Checkpoint::tiny();
    let right = Adapter::random(&base, 1, 4, &["q_proj", "down_proj"]);
    let a = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight";
    let b = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight";
    let changed = |change: &dyn Fn(&mut Adapter)| {
        let mut adapter = right.clone();
        change(&mut adapter);
        refusal(&adapter, |_| {})
    };
    let shape = |name: &'static str, shape: [usize; 2]| {
        move |adapter: &mut Adapter| {
            let numbers = vec![0.5; shape[0] * shape[1]];
            adapter.tensors.insert(name.to_owned(), (shape.to_vec(), numbers));
        }
    };
    for (message, words) in [
        (changed(&|x| drop(x.tensors.remove(a))), [a, "missing"]),
        (changed(&|x| drop(x.tensors.remove(b))), [b, "missing"]),
        (changed(&|x| x.config["r"] = 5.into()), ["lora_A", "[5, "]),
        (
            changed(&|x| x.config["rank_pattern"] = json!({"layers.1.self_attn.q_proj": 3})),
            [a, "[3, "],
        ),
        (changed(&shape(a, [4, 8])), [a, "[4, 8]"]),
        (changed(&shape(b, [8, 4])), [b, "[8, 4]"]),
        (
            changed(&shape("base_model.model.lm_head.lora_A.weight", [4, 8])),
            ["lm_head.lora_A", "not"],
        ),
        (
            changed(&shape(
                "base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight",
                [4, 8],
            )),
            ["layers.7", "not"],
        ),
        (
            changed(&|x| x.config["target_modules"] = json!(["q_proj"])),
            ["down_proj", "chooses"],
        ),
        (
            changed(&|x| x.config["target_modules"] = json!("all-linear")),
            ["k_proj", "missing"],
        ),
        (
            changed(&|x| x.config["use_dora"] = true.into()),
            ["use_dora", "not supported"],
        ),
        (
            changed(&|x| x.tensors.get_mut(b).unwrap().1[7] = f32::NAN),
            [b, "finite"],
        ),
        (
            changed(&|x| x.tensors.get_mut(a).unwrap().1[7] = f32::INFINITY),
            [a, "finite"],
        ),
        (
            changed(&|x| x.config["lora_alpha"] = json!(1e300)),
            ["lora_B", "finite"],
        ),
        (changed(&|x| x.tensors.clear()), ["lora_A", "missing"]),
    ] {
        assert!(words.iter().all(|word| message.contains(word)), "{words:?}: {message}");
    }
    let none = Adapter {
        config: json!({"peft_type": "LORA", "target_modules": ["query"]}),
        tensors: Adapter::random(&base, 1, 4, &[]).tensors,
    };
    assert!(refusal(&none, |_| {}).contains("holds no tensor"));
}

#[test]
fn damaged_files_are_refused() {
    let right = Adapter::random(&Checkpoint::tiny(), 1, 4, &["q_proj"]);
    let file = |at: &Path| at.join("adapter_model.safetensors");
    let cut = |keep: usize| {
        refusal(&right, |at| {
            let bytes = fs::read(file(at)).unwrap();
            fs::write(file(at), &bytes[..keep.min(bytes.len() - 1)]).unwrap();
        })
    };
    for keep in [1, 7, 8, 100, usize::MAX] {
        let message = cut(keep);
        assert!(message.contains("adapter_model.safetensors"), "{message}");
    }
    let message = refusal(&right, |at| {
        let mut bytes = fs::read(file(at)).unwrap();
        bytes[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        fs::write(file(at), bytes).unwrap();
    });
    assert!(message.contains("cut or damaged"), "{message}");
    assert!(refusal(&right, |at| fs::remove_file(file(at)).unwrap()).contains("adapter_model.safetensors"));
    let message = refusal(&right, |at| fs::remove_file(at.join("adapter_config.json")).unwrap());
    assert!(message.contains("adapter_config.json"), "{message}");
    assert!(refusal(&right, |at| fs::remove_dir_all(at).unwrap()).contains("adapter_config.json"));
}
