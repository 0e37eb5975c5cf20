//! What peers assert in their public tests, against real processes. Each test carries the number of its behaviour in
//! docs/conformance.md, which also says what is not built yet.

mod bad_requests;
mod choices;
mod completions;
mod generate;
mod sampling;
mod streams;

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use integration_tests::scene::{Scene, Shared};
use serde_json::Value;

/// The tiny checkpoint, for all cases that neither count what the cluster did nor change its settings.
static SCENE: Shared = Shared::new();

pub(crate) fn scene() -> Result<Arc<Scene>> {
    SCENE.get(|| Scene::tiny(&[]))
}

/// The text of a whole completion.
pub(crate) fn text(answer: &Value) -> Result<String> {
    Ok(answer["choices"][0]["text"]
        .as_str()
        .with_context(|| answer.to_string())?
        .to_owned())
}

/// The texts of a stream's chunks, joined.
pub(crate) fn joined(chunks: &[Value]) -> String {
    let choices = chunks.iter().filter_map(|chunk| chunk["choices"].as_array()).flatten();
    choices.filter_map(|choice| choice["text"].as_str()).collect()
}

/// Checks that a request is refused with 400, and that the message or the field at fault has this word in it.
pub(crate) fn refused(scene: &Scene, body: &Value, word: &str) -> Result<()> {
    let answer = scene.complete(body.clone())?;
    ensure!(
        answer.status == 400,
        "{body}: status {}: {}",
        answer.status,
        answer.text()
    );
    let error = &answer.json()?["error"];
    let told = format!("{} {}", error["param"], error["message"]);
    ensure!(told.contains(word), "{body}: no {word} in {told}");
    ensure!(error["type"] == "BadRequestError", "{body}: {error}");
    Ok(())
}
