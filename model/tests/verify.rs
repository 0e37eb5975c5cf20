//! The program that looks at models, and what it is made of.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use config::ModelConfig;
use model::inspect::inspect;
use model::verify::verify;
use serde_json::json;
use support::checkpoint::temporary;
use support::{fixture, read_json};

fn program(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_model"))
        .args(arguments)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn a_checkpoint_is_held_against_its_reference() {
    let llama = fixture("llama");
    let output = program(&["verify", llama.to_str().unwrap()]);
    let words = text(&output.stdout);
    assert!(output.status.success(), "{words}");
    assert_eq!(words.matches(": ok").count(), 4, "{words}");

    // One number of the reference, one token of its answer.
    let (_keep, wrong) = temporary("golden.json");
    let mut golden = read_json(&llama.join("golden.json"));
    golden["prompts"][1]["prompt_logprobs"][2] =
        json!(golden["prompts"][1]["prompt_logprobs"][2].as_f64().unwrap() + 0.01);
    golden["prompts"][2]["greedy"][5] = json!((golden["prompts"][2]["greedy"][5].as_u64().unwrap() + 1) % 512);
    std::fs::write(&wrong, golden.to_string()).unwrap();
    let output = program(&["verify", llama.to_str().unwrap(), "--golden", wrong.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let lines: Vec<bool> = text(&output.stdout)
        .lines()
        .map(|line| line.ends_with(": ok"))
        .collect();
    assert_eq!(lines, [true, false, false, true]);
    let checks = verify(&llama, &wrong, 1).unwrap();
    assert!((checks[1].prompt - 0.01).abs() < 1e-3 && checks[1].last < 1e-3);
    assert_eq!(checks[2].agreed, 5);
}

#[test]
fn references_that_cannot_be_read_are_named() {
    let llama = fixture("llama");
    for (content, words) in [
        ("{", "not valid JSON"),
        ("{}", "`prompts`"),
        (r#"{"prompts": [{"ids": [1]}]}"#, "prompts[0]"),
    ] {
        let (_keep, path) = temporary("golden.json");
        std::fs::write(&path, content).unwrap();
        let error = verify(&llama, &path, 1).unwrap_err().to_string();
        assert!(error.contains(words) && error.contains("golden.json"), "{error}");
    }
    let output = program(&["verify", "/nowhere"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("/nowhere/golden.json"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn what_a_model_is_and_needs_is_printed() {
    let say = |family: &str, arguments: &[&str]| {
        let path = fixture(family);
        let output = program(&[&["inspect", path.to_str().unwrap()], arguments].concat());
        assert!(output.status.success());
        text(&output.stdout).to_owned()
    };
    let gemma = say("gemma3", &["--tokens", "100"]);
    // 7 layers, K and V of 2 heads of 32 in 2 bytes; 7 blocks of 16.
    for words in [
        "gemma3_text (directory of safetensors)",
        "4 heads, 2 KV heads of 32",
        "16 positions, in 6 of 7 layers",
        "512 outputs, 485 tokens",
        "16 positions, in 6 of 7 layers; what lies before it is not kept",
        "1792 bytes a token (f16), in blocks of 16 tokens, a block for 1 of the layers (7 groups)",
        "KV of 100 tokens   200704 bytes",
    ] {
        assert!(gemma.contains(words), "{words}: {gemma}");
    }
    // Of a longer text the layers with a window keep that, and what a chunk of 256 is computed into.
    let long = say("gemma3", &["--tokens", "4000"]);
    assert!(
        long.contains(&format!("KV of 4000 tokens   {} bytes", (250 + 6 * 18) * 4_096)),
        "{long}"
    );
    let deepseek = say("deepseek-v3", &["--kv-dtype", "f32", "--block-tokens", "32"]);
    // 3 layers, 24 latent and 8 rotated numbers of 4 bytes.
    for words in [
        "1 KV heads of 32, latent",
        "8 experts of 48, 2 a token",
        "384 bytes a token (f32)",
    ] {
        assert!(deepseek.contains(words), "{words}: {deepseek}");
    }
    let huge = inspect(&fixture("llama"), &ModelConfig::default(), 16, 1 << 50).unwrap();
    assert!(huge.to_string().contains("more than the"), "{huge}");

    let output = program(&["inspect", fixture("llama").join("config.json").to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
}

/// The 4-bit file of Gemma 3 270M, from where the caller says, from the cache, or fetched.
fn gemma() -> Option<PathBuf> {
    let name = "gemma-3-270m-q4_k_m.gguf";
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    #[allow(
        clippy::disallowed_methods,
        reason = "a test's parameter, not the product's configuration"
    )]
    let given = std::env::var("BATON_TEST_GEMMA").ok().map(PathBuf::from);
    let cached = given.unwrap_or_else(|| root.join(".baton/models").join(name));
    if cached.is_file() {
        return Some(cached);
    }
    let fetched = Command::new(root.join("scripts/fetch-model"))
        .arg("gemma-3-270m")
        .output();
    match fetched {
        Ok(output) if output.status.success() => {
            let path = text(&output.stdout).lines().last().map(PathBuf::from);
            assert!(path.as_ref().is_some_and(|path| path.is_file()));
            path
        }
        failed => {
            eprintln!("WARNING: {name} cannot be fetched, so Gemma 3 270M was NOT checked: {failed:?}");
            None
        }
    }
}

#[test]
fn gemma_3_270m_is_the_reference() {
    let Some(path) = gemma() else { return };
    let golden = fixture("gemma-3-270m-q4_k_m.golden.json");
    let checks = verify(&path, &golden, 2).unwrap();
    assert_eq!(checks.len(), 10);
    for check in checks {
        eprintln!("{check:?}");
        assert!(check.passes(2e-3), "{check:?}");
    }
    // Its text side: SentencePiece, out of the file alone.
    let text = model_files::ModelFiles::open(&path).unwrap().text().unwrap();
    for prompt in read_json(&golden)["prompts"].as_array().unwrap() {
        let words = prompt["prompt"].as_str().unwrap();
        assert_eq!(
            text.tokenizer.encode(words).unwrap(),
            support::ids(&prompt["ids"]),
            "{words:?}"
        );
        let answer = support::ids(&prompt["greedy"]);
        assert_eq!(text.tokenizer.decode(&answer, true), prompt["text"].as_str().unwrap());
    }
}
