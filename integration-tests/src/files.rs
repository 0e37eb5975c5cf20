//! Where binaries and models are.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The repository's root.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

/// A binary of this workspace, from the same target directory and profile as the running test or program.
pub fn binary(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("where the running program is")?;
    // <target>/<profile>/deps/<test>, <target>/<profile>/examples/<example> or <target>/<profile>/<program>
    let folder = own.parent().context("the running program has no folder")?;
    let profile = match folder.file_name().and_then(std::ffi::OsStr::to_str) {
        Some("deps" | "examples") => folder
            .parent()
            .context("the running program has no profile directory")?,
        _ => folder,
    };
    let path = profile.join(name);
    if !path.is_file() {
        bail!(
            "{} does not exist: run `cargo build --release` (scripts/test does)",
            path.display()
        );
    }
    Ok(path)
}

/// The tiny Llama checkpoint (3 layers, 512 tokens of vocabulary, 512 positions).
pub fn tiny_model() -> PathBuf {
    root().join("model/tests/fixtures/llama")
}

/// The default model. Errors, saying what to do, if it has not been fetched.
#[allow(
    clippy::disallowed_methods,
    reason = "tests are told by the environment where the model is"
)]
pub fn default_model() -> Result<PathBuf> {
    let path = std::env::var("BATON_TEST_MODEL").map_or_else(
        |_| root().join(".baton/models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        PathBuf::from,
    );
    if !path.is_file() {
        bail!(
            "{} does not exist: run scripts/fetch-model (scripts/test does)",
            path.display()
        );
    }
    Ok(path)
}
