//! Whole completions: counts, log-probabilities, finish reasons.

use anyhow::{Context, Result, ensure};
use integration_tests::scene::Scene;
use serde_json::{Value, json};

use crate::{refused, scene, text};

#[test]
fn case_01_counts_on_a_fresh_server() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let answer = scene
        .complete(json!({ "prompt": "Hello, my name is", "max_tokens": 5, "temperature": 0, "ignore_eos": true }))?
        .ok()?;
    let usage = &answer["usage"];
    ensure!(answer["choices"][0]["finish_reason"] == "length", "{answer}");
    ensure!(usage["completion_tokens"] == 5, "{usage}");
    let prompt = usage["prompt_tokens"].as_u64().context("prompt_tokens")?;
    ensure!(prompt > 0 && usage["total_tokens"] == prompt + 5, "{usage}");
    ensure!(usage["prompt_tokens_details"]["cached_tokens"] == 0, "{usage}");
    scene.close()
}

#[test]
fn case_02_a_prompt_of_equal_token_ids() -> Result<()> {
    let answer = scene()?
        .complete(json!({ "prompt": [0, 0, 0, 0, 0], "max_tokens": 5, "temperature": 0 }))?
        .ok()?;
    ensure!(answer["usage"]["prompt_tokens"] == 5, "{answer}");
    ensure!(answer["choices"][0]["text"].is_string(), "{answer}");
    Ok(())
}

/// The log-probabilities of five greedy tokens.
fn logprobs(count: Value) -> Result<Value> {
    let body = json!({ "prompt": "Hello", "max_tokens": 5, "temperature": 0, "ignore_eos": true, "logprobs": count });
    Ok(scene()?.complete(body)?.ok()?["choices"][0]["logprobs"].clone())
}

/// Entries of each position.
fn entries(logprobs: &Value) -> Result<Vec<usize>> {
    let lengths: Vec<usize> = ["tokens", "token_logprobs", "text_offset"]
        .iter()
        .filter_map(|name| logprobs[*name].as_array())
        .map(Vec::len)
        .collect();
    ensure!(lengths == [5, 5, 5], "{logprobs}");
    let tops = logprobs["top_logprobs"].as_array().context("top_logprobs")?;
    tops.iter()
        .map(|top| Ok(top.as_object().context("an object")?.len()))
        .collect()
}

#[test]
fn case_03_log_probabilities_of_the_chosen_token_only() -> Result<()> {
    ensure!(logprobs(Value::Null)?.is_null());
    ensure!(entries(&logprobs(json!(0))?)? == [1; 5]);
    Ok(())
}

#[test]
fn case_04_five_log_probabilities() -> Result<()> {
    let told = logprobs(json!(5))?;
    let entries = entries(&told)?;
    ensure!(entries.iter().all(|entries| (4..=6).contains(entries)), "{told}");
    // Two tokens of this vocabulary may have the same text, and then share an entry.
    ensure!(entries.iter().any(|entries| *entries >= 5), "{told}");
    Ok(())
}

#[test]
fn case_05_too_many_log_probabilities() -> Result<()> {
    let scene = scene()?;
    for stream in [false, true] {
        for count in [6, 21, 1_000_000] {
            refused(
                &scene,
                &json!({ "prompt": "a", "max_tokens": 5, "stream": stream, "logprobs": count }),
                "logprobs",
            )?;
        }
        scene
            .complete(json!({ "prompt": "a", "max_tokens": 5, "logprobs": 5 }))?
            .ok()?;
    }
    scene.is_well()
}

#[test]
fn case_34_the_end_token_can_be_ignored() -> Result<()> {
    let scene = scene()?;
    // Sampled from a flat distribution the end token comes sooner or later; with a seed, always at the same place.
    let body = |seed: u64, ignore: bool| json!({ "prompt": "a", "max_tokens": 200, "seed": seed, "temperature": 3, "ignore_eos": ignore });
    for seed in 1..100 {
        let stopped = scene.complete(body(seed, false))?.ok()?;
        if stopped["choices"][0]["finish_reason"] != "stop" {
            continue;
        }
        ensure!(stopped["choices"][0]["stop_reason"].is_null(), "{stopped}");
        let ignored = scene.complete(body(seed, true))?.ok()?;
        ensure!(ignored["choices"][0]["finish_reason"] == "length", "{ignored}");
        ensure!(ignored["usage"]["completion_tokens"] == 200, "{ignored}");
        let before = stopped["usage"]["completion_tokens"]
            .as_u64()
            .context("completion_tokens")?;
        ensure!(before < 200, "{stopped}");
        ensure!(text(&ignored)?.starts_with(&text(&stopped)?), "{stopped} {ignored}");
        return Ok(());
    }
    anyhow::bail!("no answer ended by itself")
}

#[test]
fn case_36_a_client_that_gives_up_frees_its_place() -> Result<()> {
    let model = integration_tests::scene::stretched_tiny_model(131_072)?;
    let settings = [
        "limits.max_seq_len=131072",
        "limits.max_iter_times=131072",
        "engine.kv_pool_tokens=131072",
        "engine.max_num_seqs=1",
    ];
    let scene = Scene::start(model.path(), &settings)?;
    for stream in [false, true] {
        let body = json!({ "model": integration_tests::scene::MODEL, "prompt": "a", "max_tokens": 131_000, "ignore_eos": true, "stream": stream });
        let mut wire = scene.wire()?;
        wire.send(integration_tests::wire::post_bytes("/v1/completions", body.to_string()))?;
        integration_tests::scene::pause(std::time::Duration::from_millis(100));
        ensure!(scene.held()? == 1.0, "the request is not there");
        drop(wire);
        // The only place is free again: another request gets it.
        scene.until("the place is free", || Ok(scene.held()? == 0.0))?;
        ensure!(scene.complete(json!({ "prompt": "b", "max_tokens": 3 }))?.status == 200);
    }
    scene.close()
}
