//! Copies of the tiny checkpoint that differ in one thing.

use std::path::Path;

use anyhow::{Result, ensure};
use tempfile::TempDir;

use crate::files::tiny_model;

/// A copy of the tiny checkpoint, changed.
pub fn changed_model(change: impl FnOnce(&Path) -> Result<()>) -> Result<TempDir> {
    let copy = TempDir::new()?;
    for entry in std::fs::read_dir(tiny_model())? {
        let entry = entry?;
        std::fs::copy(entry.path(), copy.path().join(entry.file_name()))?;
    }
    change(copy.path())?;
    Ok(copy)
}

/// Changes the bytes of a file.
pub fn edit(dir: &Path, file: &str, change: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
    let path = dir.join(file);
    let mut bytes = std::fs::read(&path)?;
    change(&mut bytes);
    Ok(std::fs::write(path, bytes)?)
}

/// Replaces text in a file; an error if it is not there.
pub fn replace(dir: &Path, file: &str, old: &str, new: &str) -> Result<()> {
    let path = dir.join(file);
    let text = std::fs::read_to_string(&path)?;
    ensure!(text.contains(old), "no {old} in {file}");
    Ok(std::fs::write(path, text.replace(old, new))?)
}
