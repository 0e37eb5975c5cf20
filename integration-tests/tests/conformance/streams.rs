//! Streamed completions.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{joined, refused, scene, text};

const TOKENS: usize = 6;

/// A greedy stream's chunks.
fn chunks(options: Value) -> Result<Vec<Value>> {
    let mut body =
        json!({ "prompt": "Hello", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": true, "stream": true });
    if !options.is_null() {
        body["stream_options"] = options;
    }
    let answer = scene()?.complete(body)?;
    ensure!(
        answer.events()?.last().is_some_and(|event| event == "[DONE]"),
        "{}",
        answer.text()
    );
    answer.json_events()
}

fn check_usage(usage: &Value, completion: usize) -> Result<()> {
    ensure!(usage["completion_tokens"] == completion, "{usage}");
    let prompt = usage["prompt_tokens"].as_u64().context("prompt_tokens")?;
    ensure!(
        prompt > 0 && usage["total_tokens"] == prompt + completion as u64,
        "{usage}"
    );
    Ok(())
}

#[test]
fn case_06_streamed_and_whole_texts_are_equal() -> Result<()> {
    let scene = scene()?;
    for prompt in ["Hello", "What is an LLM?", "1 2 3", "\u{1f600}"] {
        let mut body = json!({ "prompt": prompt, "max_tokens": 30, "temperature": 0 });
        let whole = scene.complete(body.clone())?.ok()?;
        body["stream"] = json!(true);
        let chunks = scene.complete(body)?.json_events()?;
        ensure!(joined(&chunks) == text(&whole)?, "{prompt}: {whole} {chunks:?}");
        let reasons: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0]["finish_reason"])
            .filter(|reason| !reason.is_null())
            .collect();
        ensure!(
            reasons == [&whole["choices"][0]["finish_reason"]],
            "{prompt}: {reasons:?}"
        );
    }
    Ok(())
}

#[test]
fn case_09_usage_is_null_unless_asked_for() -> Result<()> {
    for options in [
        json!({}),
        json!({ "include_usage": false }),
        json!({ "include_usage": false, "continuous_usage_stats": true }),
    ] {
        let chunks = chunks(options.clone())?;
        ensure!(chunks.len() == TOKENS, "{options}: {chunks:?}");
        ensure!(
            chunks.iter().all(|chunk| chunk["usage"].is_null()),
            "{options}: {chunks:?}"
        );
    }
    Ok(())
}

#[test]
fn case_10_usage_comes_in_a_chunk_of_its_own() -> Result<()> {
    let mut chunks = chunks(json!({ "include_usage": true }))?;
    let last = chunks.pop().context("no chunk")?;
    ensure!(chunks.len() == TOKENS, "{chunks:?}");
    ensure!(
        chunks
            .iter()
            .all(|chunk| chunk.get("usage").is_some_and(Value::is_null)),
        "{chunks:?}"
    );
    ensure!(last["choices"] == json!([]), "{last}");
    check_usage(&last["usage"], TOKENS)
}

#[test]
fn case_11_usage_in_every_chunk() -> Result<()> {
    let mut chunks = chunks(json!({ "include_usage": true, "continuous_usage_stats": true }))?;
    let last = chunks.pop().context("no chunk")?;
    for (index, chunk) in chunks.iter().enumerate() {
        check_usage(&chunk["usage"], index + 1)?;
        ensure!(
            chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"],
            "{chunk}"
        );
    }
    ensure!(last["choices"] == json!([]), "{last}");
    check_usage(&last["usage"], TOKENS)
}

#[test]
fn case_12_stream_options_need_a_stream() -> Result<()> {
    let scene = scene()?;
    for options in [
        json!({}),
        json!({ "include_usage": true }),
        json!({ "include_usage": false }),
    ] {
        refused(
            &scene,
            &json!({ "prompt": "a", "stream_options": options }),
            "stream_options",
        )?;
        refused(
            &scene,
            &json!({ "prompt": "a", "stream": false, "stream_options": options }),
            "stream_options",
        )?;
    }
    scene
        .complete(json!({ "prompt": "a", "stream": false, "stream_options": null }))?
        .ok()?;
    Ok(())
}
