//! What a commit consists of, by the hub's list; and which of it is needed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

use config::{HubReference, is_commit};
use serde::{Deserialize, Serialize};

use crate::digest::Checksum;
use crate::error::HubError;

/// The index of weights that are in several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Weights in one file.
const SINGLE: &str = "model.safetensors";
/// What a model directory must have.
const CONFIG: &str = "config.json";
/// What describes a model and makes text of its tokens, beside files that begin with `tokenizer` or `chat_template`.
const TEXT: &[&str] = &[
    CONFIG,
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
];

/// A file, as far as the list tells.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// In bytes.
    pub(crate) size: Option<u64>,
    /// Digits of its checksum.
    pub(crate) checksum: Option<String>,
}

/// The files of a commit, by path. All paths stay below the folder that they are put into.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Listing {
    /// The commit.
    pub(crate) commit: String,
    /// By path.
    pub(crate) files: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    #[serde(alias = "oid")]
    sha256: Option<String>,
    size: Option<u64>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Listing {
    /// Reads the hub's answer. Files whose paths lead elsewhere are left out: nobody needs them.
    ///
    /// # Errors
    /// What is wrong with the answer.
    pub(crate) fn read(answer: &[u8]) -> Result<Self, String> {
        let answer: Answer = serde_json::from_slice(answer).map_err(|error| format!("no list of files: {error}"))?;
        if !is_commit(&answer.sha) {
            return Err("a list of files of no commit".to_owned());
        }
        let entry = |file: Sibling| {
            let lfs = file.lfs.as_ref();
            // What is in large file storage has a pointer in Git, whose name and size are not the file's.
            let entry = match lfs {
                Some(lfs) => Entry {
                    size: lfs.size.or(file.size),
                    checksum: lfs.sha256.clone(),
                },
                None => Entry {
                    size: file.size,
                    checksum: file.blob_id.clone(),
                },
            };
            (file.rfilename, entry)
        };
        let safe = answer.siblings.into_iter().filter(|file| is_inside(&file.rfilename));
        Ok(Self {
            commit: answer.sha,
            files: safe.map(entry).collect(),
        })
    }

    /// What is fetched first: all but weights. With `weights`, the index of those too.
    ///
    /// # Errors
    /// The repository holds no model that can be served.
    pub(crate) fn text(&self, reference: &HubReference, weights: bool) -> Result<Vec<String>, HubError> {
        if let Some(file) = &reference.file {
            return self.gguf(reference, file);
        }
        let no_model = |reason: &str| HubError::NoModel {
            repository: reference.repository.clone(),
            reason: reason.to_owned(),
        };
        if !self.files.contains_key(CONFIG) {
            let gguf = self.ending_with(".gguf");
            if let Some(first) = gguf.first() {
                let reason = format!(
                    "is no model directory (it has no {CONFIG}); one of its GGUF files would be right, for example hf://{}/{first}",
                    reference.repository
                );
                return Err(no_model(&reason));
            }
            return Err(no_model(&format!("is no model directory: it has no {CONFIG}")));
        }
        let indexed = self.files.contains_key(INDEX);
        if weights && !indexed && !self.files.contains_key(SINGLE) {
            return Err(no_model(&format!(
                "has neither {SINGLE} nor {INDEX}; weights of other forms are not read"
            )));
        }
        let text = self.files.keys().filter(|name| is_text(name)).cloned();
        Ok(text.chain((weights && indexed).then(|| INDEX.to_owned())).collect())
    }

    /// The files with weights of a model directory; `index` is the text of [`INDEX`], if it has one.
    ///
    /// # Errors
    /// The index names what is not there.
    pub(crate) fn weights(&self, reference: &HubReference, index: Option<&[u8]>) -> Result<Vec<String>, HubError> {
        let Some(index) = index else {
            return Ok(vec![SINGLE.to_owned()]);
        };
        let no_model = |reason: String| HubError::NoModel {
            repository: reference.repository.clone(),
            reason,
        };
        let index: Index =
            serde_json::from_slice(index).map_err(|error| no_model(format!("has a wrong {INDEX}: {error}")))?;
        let names: BTreeSet<String> = index.weight_map.into_values().collect();
        for name in &names {
            if name.contains('/') || !is_inside(name) {
                return Err(no_model(format!("has a wrong {INDEX}: {name:?} is no plain file name")));
            }
            self.entry(reference, name)?;
        }
        Ok(names.into_iter().collect())
    }

    /// What the list says about a file.
    ///
    /// # Errors
    /// It is not there.
    pub(crate) fn entry(&self, reference: &HubReference, file: &str) -> Result<&Entry, HubError> {
        self.files.get(file).ok_or_else(|| HubError::NoFile {
            repository: reference.repository.clone(),
            file: file.to_owned(),
            revision: reference.revision.clone(),
            there: self.ending_with(if file.ends_with(".gguf") {
                ".gguf"
            } else {
                ".safetensors"
            }),
        })
    }

    fn gguf(&self, reference: &HubReference, file: &str) -> Result<Vec<String>, HubError> {
        let parts = gguf_parts(file);
        for part in &parts {
            self.entry(reference, part)?;
        }
        Ok(parts)
    }

    fn ending_with(&self, ending: &str) -> Vec<String> {
        self.files
            .keys()
            .filter(|name| name.ends_with(ending))
            .cloned()
            .collect()
    }
}

impl Entry {
    /// Size and checksum, if the list has both.
    pub(crate) fn whole(&self) -> Option<(u64, Checksum)> {
        Some((self.size?, Checksum::parse(self.checksum.as_deref()?)?))
    }
}

fn is_text(name: &str) -> bool {
    let begins = name.starts_with("tokenizer") || name.starts_with("chat_template");
    !name.contains('/') && (begins || TEXT.contains(&name))
}

/// All parts of a split GGUF file (`x-00001-of-00003.gguf`), or the file alone.
pub(crate) fn gguf_parts(file: &str) -> Vec<String> {
    const DIGITS: usize = 5;
    const MOST: usize = 10_000;
    let number = |text: &str| -> Option<usize> {
        let plain = text.len() == DIGITS && text.bytes().all(|b| b.is_ascii_digit());
        text.parse().ok().filter(|n| plain && (1..=MOST).contains(n))
    };
    let split = file.strip_suffix(".gguf").and_then(|stem| {
        let (stem, count) = stem.rsplit_once("-of-")?;
        let (stem, part) = stem.rsplit_once('-')?;
        number(part)?;
        Some((stem, number(count)?))
    });
    match split {
        Some((stem, count)) => (1..=count)
            .map(|i| format!("{stem}-{i:05}-of-{count:05}.gguf"))
            .collect(),
        None => vec![file.to_owned()],
    }
}

/// Whether a path leads to a file below the folder that it is put into, and to no other.
fn is_inside(path: &str) -> bool {
    let normal = |part: Component<'_>| matches!(part, Component::Normal(_));
    let written = |part: &str| !part.is_empty() && part != "." && part != "..";
    let odd = path.chars().any(|c| c.is_control() || c == '\\');
    !odd && path.split('/').all(written) && Path::new(path).components().all(normal)
}

#[cfg(test)]
#[path = "listing_tests.rs"]
mod tests;
