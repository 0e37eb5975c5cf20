//! Prompts that are too long: refused before any node works on them. Answers that are too long: cut.

use anyhow::{Result, ensure};
use integration_tests::scene::Scene;
use serde_json::json;

use crate::support::{generating, invalid, without_work};

/// Positions of the tiny checkpoint, and so the length of its longest prompt.
const POSITIONS: usize = 512;

#[test]
fn prompts_beyond_the_context_are_refused_before_any_work() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    // Every letter is at least one token of this vocabulary.
    let text: String = ('a'..='z').cycle().take(4 * POSITIONS).collect();
    let ids = vec![5; POSITIONS + 1];
    without_work(&scene, || {
        for (path, mut body) in generating() {
            let field = if path.starts_with("/v1/") { "prompt" } else { "inputs" };
            body[field] = json!(text);
            let message = invalid(path, &scene.post(path, &body)?)?;
            ensure!(message.contains(field) && message.contains("512"), "{message}");
        }
        for stream in [false, true] {
            for prompt in [json!(ids), json!([ids])] {
                let answer = scene.complete(json!({ "prompt": prompt, "stream": stream }))?;
                let message = invalid("/v1/completions", &answer)?;
                ensure!(message.contains("prompt") && message.contains("512"), "{message}");
            }
        }
        Ok(())
    })?;
    scene.close()
}

#[test]
fn a_prompt_that_fills_the_context_is_answered_with_one_token() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    for (length, room) in [
        (POSITIONS, 1),
        (POSITIONS - 1, 1),
        (POSITIONS - 2, 2),
        (POSITIONS - 17, 17),
    ] {
        for stream in [false, true] {
            let prompt = vec![5; length];
            let body =
                json!({ "prompt": prompt, "max_tokens": 100, "ignore_eos": true, "temperature": 0, "stream": stream });
            let answer = scene.complete(body)?;
            let last = if stream {
                answer.json_events()?.pop().unwrap_or_default()
            } else {
                answer.ok()?
            };
            ensure!(last["choices"][0]["finish_reason"] == "length", "{length}: {last}");
            ensure!(last["usage"]["prompt_tokens"] == length, "{length}: {last}");
            ensure!(last["usage"]["completion_tokens"] == room, "{length}: {last}");
        }
    }
    scene.close()
}

#[test]
fn truncation_comes_before_the_length_check() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let text: String = ('a'..='z').cycle().take(4 * POSITIONS).collect();
    let parameters = json!({ "truncate": 20, "details": true, "max_new_tokens": 2 });
    let answer = scene
        .post("/generate", &json!({ "inputs": text, "parameters": parameters }))?
        .ok()?;
    ensure!(answer["details"]["prompt_tokens"] == 20, "{answer}");
    scene.close()
}

#[test]
fn configured_limits_of_characters_and_tokens_hold() -> Result<()> {
    let scene = Scene::tiny(&[
        "limits.max_input_chars=40",
        "limits.max_input_token_len=30",
        "limits.max_iter_times=8",
    ])?;
    without_work(&scene, || {
        for (path, mut body) in generating() {
            let field = if path.starts_with("/v1/") { "prompt" } else { "inputs" };
            body[field] = json!("é".repeat(41));
            let message = invalid(path, &scene.post(path, &body)?)?;
            ensure!(
                message.contains("has 41 characters, but must have at most 40"),
                "{message}"
            );
        }
        let message = invalid("/v1/completions", &scene.complete(json!({ "prompt": vec![5; 31] }))?)?;
        ensure!(message.contains("30"), "{message}");
        Ok(())
    })?;
    ensure!(
        scene
            .complete(json!({ "prompt": vec![5; 30], "max_tokens": 1 }))?
            .status
            == 200
    );
    // Four bytes each and two units of UTF-16, but one character.
    let faces = json!({ "inputs": "\u{1f600}".repeat(40), "parameters": { "truncate": 5 } });
    ensure!(scene.post("/generate", &faces)?.status == 200);
    for (asked, given) in [
        (json!(null), 9),
        (json!(20), 9),
        (json!(9), 9),
        (json!(8), 8),
        (json!(3), 3),
        (json!(1), 1),
    ] {
        let answer = scene
            .complete(json!({ "prompt": "a", "max_tokens": asked, "ignore_eos": true }))?
            .ok()?;
        ensure!(
            answer["usage"]["completion_tokens"] == given,
            "max_tokens {asked}: {answer}"
        );
        ensure!(
            answer["choices"][0]["finish_reason"] == "length",
            "max_tokens {asked}: {answer}"
        );
    }
    scene.close()
}
