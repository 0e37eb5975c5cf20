//! Chat.

use anyhow::{Context, Result, ensure};
use integration_tests::scene::MODEL;
use serde_json::{Value, json};

use crate::real;

#[test]
fn case_42_the_role_comes_first_and_the_end_has_no_content() -> Result<()> {
    let scene = real()?;
    let mut body = json!({
        "model": MODEL, "messages": [{ "role": "user", "content": "Name the capital of France." }],
        "temperature": 0, "max_tokens": 30,
    });
    let whole = scene.post("/v1/chat/completions", &body)?.ok()?;
    let message = &whole["choices"][0]["message"];
    ensure!(message["role"] == "assistant", "{whole}");
    let content = message["content"].as_str().context("content")?;
    ensure!(content.contains("Paris"), "{whole}");

    body["stream"] = json!(true);
    let answer = scene.post("/v1/chat/completions", &body)?;
    ensure!(answer.events()?.last().is_some_and(|event| event == "[DONE]"));
    let chunks = answer.json_events()?;
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    ensure!(deltas[0]["role"] == "assistant", "{deltas:?}");
    ensure!(
        deltas[1..]
            .iter()
            .all(|delta| delta.get("role").is_none_or(Value::is_null)),
        "{deltas:?}"
    );
    let last = chunks.last().context("no chunk")?;
    ensure!(
        last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"],
        "{last}"
    );
    ensure!(
        last["choices"][0]["delta"]
            .get("content")
            .is_none_or(|text| text.is_null() || text == ""),
        "{last}"
    );
    let ids: std::collections::BTreeSet<_> = chunks.iter().filter_map(|chunk| chunk["id"].as_str()).collect();
    ensure!(ids.len() == 1, "{ids:?}");
    let joined: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    ensure!(joined == content, "{joined:?} {content:?}");
    // Nobody asked for usage.
    ensure!(
        chunks.iter().all(|chunk| chunk.get("usage").is_none_or(Value::is_null)),
        "{chunks:?}"
    );
    Ok(())
}
