//! The inputs that mutations begin with: those of the repository, the target's own, and what was found interesting.

use std::collections::{BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use integration_tests::files::root;

use crate::Args;
use crate::targets::Target;

/// Most inputs of a run.
const MOST: usize = 4_000;
/// Longest input, and most inputs, that the repository keeps for a target.
const KEPT_BYTES: usize = 1_024;
const KEPT: usize = 60;

pub(crate) struct Corpus {
    pub(crate) inputs: Vec<Vec<u8>>,
    pub(crate) words: Vec<Vec<u8>>,
    outcomes: HashSet<u64>,
    /// Where inputs are kept for later runs, and how many may still be.
    keep: Option<(PathBuf, usize)>,
}

/// The folder of a target's corpus in the repository.
fn folder(target: &str) -> PathBuf {
    root().join("integration-tests/fuzz-corpus").join(target)
}

impl Corpus {
    /// The repository's inputs and the target's seeds.
    pub(crate) fn load(target: &dyn Target, args: &Args) -> Result<Self> {
        let folder = args.corpus.clone().unwrap_or_else(|| folder(target.name()));
        let mut inputs = target.seeds();
        let mut files = 0;
        if folder.is_dir() {
            let mut paths: Vec<PathBuf> = Vec::new();
            for entry in std::fs::read_dir(&folder)? {
                paths.push(entry?.path());
            }
            paths.sort();
            files = paths.len();
            for path in paths {
                inputs.push(std::fs::read(&path).with_context(|| path.display().to_string())?);
            }
        }
        anyhow::ensure!(!inputs.is_empty(), "{} has no inputs to begin with", target.name());
        Ok(Self {
            words: words(&inputs),
            inputs,
            outcomes: HashSet::new(),
            keep: args.keep.then(|| (folder, KEPT.saturating_sub(files))),
        })
    }

    /// An input led to an outcome; true if it is new.
    pub(crate) fn learn(&mut self, input: &[u8], outcome: &str) -> Result<bool> {
        let mut hasher = DefaultHasher::new();
        outcome.hash(&mut hasher);
        let name = hasher.finish();
        if self.outcomes.len() >= 1 << 20 || !self.outcomes.insert(name) {
            return Ok(false);
        }
        if self.inputs.len() < MOST {
            self.inputs.push(input.to_vec());
        }
        if let Some((folder, left)) = &mut self.keep
            && *left > 0
            && input.len() <= KEPT_BYTES
        {
            *left -= 1;
            write(folder, &format!("{name:016x}"), input)?;
        }
        Ok(true)
    }

    pub(crate) fn outcomes(&self) -> usize {
        self.outcomes.len()
    }
}

/// Writes a file, and the folder if it is not there.
pub(crate) fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<PathBuf> {
    std::fs::create_dir_all(folder)?;
    let path = folder.join(name);
    std::fs::write(&path, bytes)?;
    Ok(path)
}

/// The words in the inputs: runs of letters, digits, dots and underscores.
fn words(inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut all = BTreeSet::new();
    for input in inputs {
        for word in input.split(|byte| !byte.is_ascii_alphanumeric() && !b"._-".contains(byte)) {
            if (2..=48).contains(&word.len()) {
                all.insert(word.to_vec());
            }
        }
    }
    all.into_iter().take(4_096).collect()
}

/// What an outcome is by its words: numbers and quoted texts are left out, and repeats of a shape.
pub(crate) fn shape(text: &str) -> String {
    let mut out = String::new();
    let (mut quote, mut escaped) = (None, false);
    for c in text.chars() {
        if let Some(end) = quote {
            quote = (escaped || c != end).then_some(end);
            escaped = c == '\\' && !escaped;
            continue;
        }
        match c {
            '"' | '`' => {
                (quote, escaped) = (Some(c), false);
                out.push(c);
            }
            '0'..='9' | '\u{80}'.. => {
                if !out.ends_with('#') {
                    out.push('#');
                }
            }
            _ => out.push(c),
        }
        // Elements of a list look alike: the first few tell what it is.
        if out.ends_with("#, #, #, #") {
            out.truncate(out.len() - 3);
        }
        if out.len() > 600 {
            break;
        }
    }
    out
}
