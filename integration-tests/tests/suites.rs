//! Suites that others have written, against real processes: an evaluation harness, and property tests of the OpenAPI
//! document.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use integration_tests::files::{default_model, tiny_model};
use integration_tests::python::Script;
use integration_tests::scene::{MODEL, Scene};
use serde_json::{Map, Value, json};

/// Examples of each operation.
const EXAMPLES: u32 = 500;
/// What they are drawn with.
const SEED: u32 = 1;

/// Runs the harness twice. `tokenizer`: a folder; without one the harness asks the server.
fn lm_eval(scene: &Scene, tokenizer: Option<&Path>, least_accuracy: f64) -> Result<()> {
    let reference = json!({
        "url": scene.cluster.url(), "model": MODEL, "tokenizer": tokenizer, "least_accuracy": least_accuracy,
    });
    let passed = Script::start("lm_eval", "lm_eval_client.py", scene.cluster.dir(), &reference)?.finish()?;
    ensure!(passed == 1);
    scene.is_well()
}

#[test]
fn lm_eval_agrees_with_itself_to_the_digit_with_the_server_s_tokenizer() -> Result<()> {
    let scene = Scene::start(&default_model()?, &[])?;
    lm_eval(&scene, None, 0.8)?;
    scene.close()
}

#[test]
fn lm_eval_agrees_with_itself_to_the_digit_with_a_local_tokenizer() -> Result<()> {
    // A model of random weights: any accuracy will do.
    let scene = Scene::tiny(&[])?;
    lm_eval(&scene, Some(&tiny_model()), 0.0)?;
    scene.close()
}

#[test]
fn every_operation_of_the_openapi_document_keeps_its_word() -> Result<()> {
    // Many short answers: what is asked for is what counts.
    let scene = Scene::start(&tiny_model(), &["limits.max_iter_times=4"])?;
    let document: Value = serde_json::from_str(&scene.get("/openapi.json")?.text())?;
    let paths = document["paths"].as_object().context("no paths")?;
    // It does not ask for what it reads at its start.
    let asked = paths.iter().filter(|(path, _)| *path != "/openapi.json");
    let operations: usize = asked.filter_map(|(_, item)| item.as_object()).map(Map::len).sum();
    let reference = json!({
        "url": scene.cluster.url(), "examples": EXAMPLES, "seed": SEED, "operations": operations,
    });
    let passed = Script::start("schemathesis", "openapi_client.py", scene.cluster.dir(), &reference)?.finish()?;
    ensure!(passed == 1);
    scene.close()
}
