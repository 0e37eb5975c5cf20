//! What the tests of bad input share: the shape of every error.

use anyhow::{Context, Result, ensure};
use integration_tests::scene::{MODEL, Scene};
use integration_tests::wire::Answer;
use serde_json::{Value, json};

/// Every path that generates, and a request that it answers with 200.
pub(crate) fn generating() -> Vec<(&'static str, Value)> {
    let inputs = json!({ "inputs": "a" });
    let prompt = json!({ "model": MODEL, "prompt": "a", "max_tokens": 4 });
    let with = |mut body: Value, name: &str, value: Value| {
        body[name] = value;
        body
    };
    vec![
        ("/generate", inputs.clone()),
        ("/generate_stream", inputs.clone()),
        ("/", inputs.clone()),
        ("/invocations", with(inputs, "stream", json!(true))),
        ("/v1/completions", prompt.clone()),
        ("/v1/completions", with(prompt, "stream", json!(true))),
    ]
}

/// Checks that an answer is an error of the path's family, and returns its message.
pub(crate) fn error_message(path: &str, answer: &Answer, status: u16, word: &str) -> Result<String> {
    let text = answer.text();
    ensure!(
        answer.status == status,
        "{path}: status {} instead of {status}: {text}",
        answer.status
    );
    ensure!(
        answer.header("content-type") == Some("application/json"),
        "{path}: {:?}",
        answer.headers
    );
    ensure!(
        answer.header("x-request-id").is_some_and(|id| !id.is_empty()),
        "{path}: {:?}",
        answer.headers
    );
    ensure!(
        answer.header("access-control-allow-origin") == Some("*"),
        "{path}: {:?}",
        answer.headers
    );
    ensure!(!text.contains('\n'), "{path}: a line break in {text:?}");
    let body = answer.json()?;
    let keys = |value: &Value| {
        value
            .as_object()
            .map(|object| object.keys().cloned().collect::<Vec<_>>())
    };
    let message = if path == "/v1" || path.starts_with("/v1/") {
        ensure!(keys(&body) == Some(vec!["error".to_owned()]), "{path}: {text}");
        let error = &body["error"];
        let mut found = keys(error).with_context(|| format!("{path}: {text}"))?;
        found.sort();
        ensure!(found == ["code", "message", "param", "type"], "{path}: {text}");
        ensure!(
            error["type"] == word && error["code"] == status,
            "{path}: not {word} {status}: {text}"
        );
        ensure!(error["param"].is_string() || error["param"].is_null(), "{path}: {text}");
        error["message"].as_str()
    } else {
        let mut found = keys(&body).with_context(|| format!("{path}: {text}"))?;
        found.sort();
        ensure!(found == ["error", "error_type"], "{path}: {text}");
        ensure!(body["error_type"] == word, "{path}: not {word}: {text}");
        body["error"].as_str()
    };
    let message = message.with_context(|| format!("{path}: {text}"))?.to_owned();
    ensure!(message.len() > 4, "{path}: {text}");
    Ok(message)
}

/// Checks that an answer is the error of a request that is wrong: 422 on TGI's paths, 400 on OpenAI's.
pub(crate) fn invalid(path: &str, answer: &Answer) -> Result<String> {
    if path.starts_with("/v1/") {
        error_message(path, answer, 400, "BadRequestError")
    } else {
        error_message(path, answer, 422, "validation")
    }
}

/// Checks that nothing is computed while `act` runs.
pub(crate) fn without_work(scene: &Scene, act: impl FnOnce() -> Result<()>) -> Result<()> {
    scene.wait_idle()?;
    let before = scene.rows()?;
    ensure!(
        before.iter().all(|rows| *rows > 0.0),
        "the counters do not count: {before:?}"
    );
    let (prompts, tokens) = admitted(scene)?;
    act()?;
    ensure!(
        scene.rows()? == before,
        "a node has worked: {before:?} -> {:?}",
        scene.rows()?
    );
    ensure!(
        admitted(scene)? == (prompts, tokens),
        "the coordinator has admitted a request"
    );
    Ok(())
}

fn admitted(scene: &Scene) -> Result<(f64, f64)> {
    Ok((
        scene.metric("baton_prompt_tokens_total", &[])?,
        scene.metric("baton_generation_tokens_total", &[])?,
    ))
}
