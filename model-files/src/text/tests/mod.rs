//! Tests of the text side.

mod decoding;
mod directory;
mod gguf;
mod pre_tokenizing;
mod template;

use std::path::{Path, PathBuf};

use super::{TextModel, TextTokenizer};
use crate::files::ModelFiles;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn fixture_json(name: &str) -> serde_json::Value {
    let path = fixtures().join(name);
    serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap()
}

fn tiny() -> TextModel {
    ModelFiles::open(fixtures().join("llama")).unwrap().text().unwrap()
}

/// A directory with this tokenizer.json (and the tiny checkpoint's other files), and the text model read from it.
fn with_tokenizer_json(json: &serde_json::Value) -> Result<TextTokenizer, String> {
    let directory = copy_of_tiny();
    std::fs::write(directory.path().join("tokenizer.json"), json.to_string()).unwrap();
    text_of(directory.path()).map(|text| text.tokenizer)
}

fn copy_of_tiny() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for name in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        std::fs::copy(fixtures().join("llama").join(name), directory.path().join(name)).unwrap();
    }
    // Opening looks for weights but does not read them.
    std::fs::write(directory.path().join("model.safetensors"), [0; 8]).unwrap();
    directory
}

fn text_of(path: &Path) -> Result<TextModel, String> {
    ModelFiles::open(path)
        .and_then(|files| files.text())
        .map_err(|error| error.to_string())
}
