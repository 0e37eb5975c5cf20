//! Chat templates as people have them, on many conversations, against jinja2 in the environment of Hugging Face transformers.
//! `tests/templates/render.py` made the expectations.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use model_files::{ChatTemplate, RenderInput, TextError};
use serde_json::{Map, Value};

/// 2024-07-26 09:05:03, as in render.py.
const NOW: u64 = 1_721_984_703;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates")
}

fn read(path: &Path) -> Map<String, Value> {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(NOW)
}

fn render(template: &ChatTemplate, case: &Value) -> Result<String, TextError> {
    let mut variables = case["variables"].as_object().cloned().unwrap_or_default();
    if let Some(documents) = case.get("documents") {
        variables.insert("documents".into(), documents.clone());
    }
    template.render(&RenderInput {
        messages: &case["messages"],
        tools: case.get("tools"),
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap_or(true),
        now: Some(now()),
        variables: Some(&variables),
    })
}

/// What is wrong with the outcome of one conversation, if anything.
fn fault(found: &Result<String, TextError>, expected: &Value) -> Option<String> {
    if let Some(text) = expected["text"].as_str() {
        return match found {
            Ok(found) if found == text => None,
            found => Some(format!("expected {text:?}\n   found {found:?}")),
        };
    }
    match (found, expected["raises"].as_str()) {
        (Err(TextError::TemplateRender(found)), Some(message)) if found.starts_with(message) => None,
        // jinja2 fails where this engine may be lenient: it loops over nothing where Python has no loop over `None`.
        (Ok(_) | Err(TextError::TemplateRender(_)), None) => None,
        _ => Some(format!("expected {expected}\n   found {found:?}")),
    }
}

/// All that is wrong with one template.
fn faults(source: &Path, conversations: &Map<String, Value>) -> Vec<String> {
    let name = source.file_stem().unwrap().to_string_lossy();
    let template = ChatTemplate::new(&std::fs::read_to_string(source).unwrap(), "<s>", "</s>");
    if let Some(problem) = template.problem() {
        return vec![format!("{name}: {problem}")];
    }
    let expected = read(&source.with_extension("json"));
    assert_eq!(expected.len(), conversations.len(), "{name}: run render.py again");
    let outcomes = conversations.iter().filter_map(|(conversation, case)| {
        let fault = fault(&render(&template, case), &expected[conversation])?;
        Some(format!("{name} on {conversation}: {fault}"))
    });
    outcomes.collect()
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut sources: Vec<PathBuf> = entries
        .filter(|path| path.extension().is_some_and(|extension| extension == "jinja"))
        .collect();
    sources.sort();
    sources
}

#[test]
fn real_templates_render_as_in_transformers() {
    let conversations = read(&folder().join("conversations.json"));
    let sources = sources(&folder());
    assert!(conversations.len() >= 40 && sources.len() >= 12, "{}", sources.len());
    let faults: Vec<String> = sources
        .iter()
        .flat_map(|source| faults(source, &conversations))
        .collect();
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}
