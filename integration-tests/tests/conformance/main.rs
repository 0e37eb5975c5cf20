//! What peers assert in their public tests (`case_NN`), and what was reported as a fault of theirs (`report_NN`), against
//! real processes. The numbers are those of docs/conformance.md.

mod bad_requests;
mod chat;
mod choices;
mod completions;
mod generate;
mod reports_input;
mod reports_pools;
mod reports_text;
mod sampling;
mod streams;
mod structured;

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use integration_tests::files::default_model;
use integration_tests::scene::{Scene, Shared};
use serde_json::Value;

/// The tiny checkpoint, for all cases that neither count what the cluster did nor change its settings.
static SCENE: Shared = Shared::new();

pub(crate) fn scene() -> Result<Arc<Scene>> {
    SCENE.get(|| Scene::tiny(&[]))
}

/// The default model, for cases that need an answer with a meaning, or a chat template.
static REAL: Shared = Shared::new();

pub(crate) fn real() -> Result<Arc<Scene>> {
    REAL.get(|| Scene::start(&default_model()?, &[]))
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

/// The fields of a body, or of an object in one, that the server's own document has under this name.
pub(crate) fn documented(scene: &Scene, schema: &str) -> Result<Vec<String>> {
    let document = scene.get("/openapi.json")?.ok()?;
    let mut open = vec![document["components"]["schemas"][schema].clone()];
    let mut fields = Vec::new();
    while let Some(schema) = open.pop() {
        if let Some(pointer) = schema["$ref"]
            .as_str()
            .and_then(|reference| reference.strip_prefix('#'))
        {
            open.extend(document.pointer(pointer).cloned());
        }
        open.extend(schema["allOf"].as_array().into_iter().flatten().cloned());
        let properties = schema["properties"].as_object().into_iter().flatten();
        fields.extend(properties.map(|(name, _)| name.clone()));
    }
    ensure!(fields.len() > 10, "{schema}: {fields:?}");
    Ok(fields)
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
