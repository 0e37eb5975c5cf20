//! A model directory in the layout of the Hugging Face hub.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use crate::error::ModelFilesError;

/// Largest small JSON file (`config.json` and friends) that is read.
pub(crate) const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Largest `tokenizer.json` or weight index that is read (the largest known ones are about 35 MB).
const MAX_LARGE_JSON_BYTES: u64 = 512 << 20;

/// What a model directory holds. JSON files are read at once; weights only when asked for.
#[derive(Debug)]
pub struct ModelDirectory {
    path: PathBuf,
    config: Value,
    generation_config: Option<Value>,
    tokenizer_config: Option<Value>,
    chat_template: Option<String>,
    weight_files: Vec<PathBuf>,
    weight_map: BTreeMap<String, PathBuf>,
}

#[derive(Deserialize)]
struct WeightIndex {
    weight_map: BTreeMap<String, String>,
}

impl ModelDirectory {
    /// Opens a directory: `config.json` and weights (`model.safetensors`, or `model.safetensors.index.json` with its
    /// parts) must be there, `generation_config.json`, `tokenizer_config.json` and `chat_template.jinja` may be.
    ///
    /// # Errors
    /// [`ModelFilesError`] naming the file that is missing or wrong.
    pub fn open(path: &Path) -> Result<Self, ModelFilesError> {
        let mut directory = Self::open_text(path)?;
        (directory.weight_files, directory.weight_map) = find_weights(path)?;
        Ok(directory)
    }

    /// Opens a directory for its text alone: weights need not be there, and are not looked for.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_text(path: &Path) -> Result<Self, ModelFilesError> {
        if !path.join("config.json").is_file() {
            let what = "holds no config.json; give a model directory in the hub's layout, or the path of a GGUF file";
            return Err(ModelFilesError::invalid(path, what));
        }
        let config = read_json(&path.join("config.json"), MAX_CONFIG_BYTES)?;
        if !config.is_object() {
            return Err(ModelFilesError::invalid(
                &path.join("config.json"),
                "holds no JSON object at its top level",
            ));
        }
        let chat_template = read_optional(&path.join("chat_template.jinja"), MAX_CONFIG_BYTES)?;
        Ok(Self {
            path: path.to_path_buf(),
            config,
            generation_config: read_optional_json(&path.join("generation_config.json"))?,
            tokenizer_config: read_optional_json(&path.join("tokenizer_config.json"))?,
            chat_template,
            weight_files: Vec::new(),
            weight_map: BTreeMap::new(),
        })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json`, as it is.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// `generation_config.json`, if there is one.
    pub fn generation_config(&self) -> Option<&Value> {
        self.generation_config.as_ref()
    }

    /// `tokenizer_config.json`, if there is one.
    pub fn tokenizer_config(&self) -> Option<&Value> {
        self.tokenizer_config.as_ref()
    }

    /// The text of `chat_template.jinja`, if there is one.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// The safetensors files that hold the weights, each once, in the order of their names. None after [`Self::open_text`].
    pub fn weight_files(&self) -> &[PathBuf] {
        &self.weight_files
    }

    /// For an indexed model: which file the index says each tensor is in. Empty for a single `model.safetensors`.
    pub fn weight_map(&self) -> &BTreeMap<String, PathBuf> {
        &self.weight_map
    }

    /// Path of `tokenizer.json`.
    pub fn tokenizer_path(&self) -> PathBuf {
        self.path.join("tokenizer.json")
    }

    /// The text of `tokenizer.json`.
    ///
    /// # Errors
    /// [`ModelFilesError::Io`] if it is missing.
    pub fn read_tokenizer(&self) -> Result<String, ModelFilesError> {
        read_limited(&self.tokenizer_path(), MAX_LARGE_JSON_BYTES)
    }
}

fn find_weights(path: &Path) -> Result<(Vec<PathBuf>, BTreeMap<String, PathBuf>), ModelFilesError> {
    let index_path = path.join("model.safetensors.index.json");
    if index_path.is_file() {
        let text = read_limited(&index_path, MAX_LARGE_JSON_BYTES)?;
        let index: WeightIndex = serde_json::from_str(&text).map_err(|source| ModelFilesError::Json {
            path: index_path.clone(),
            source,
        })?;
        let mut files = BTreeSet::new();
        let mut map = BTreeMap::new();
        for (tensor, file) in index.weight_map {
            // A name that leaves the directory would let a downloaded index read any file.
            let mut parts = Path::new(&file).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
                let what =
                    format!("weight_map.{tensor} is {file:?}; a plain file name in this directory would be right");
                return Err(ModelFilesError::invalid(&index_path, what));
            }
            let full = path.join(&file);
            if !full.is_file() {
                let what = format!("weight_map.{tensor} is {file:?}, but that file is not in this directory");
                return Err(ModelFilesError::invalid(&index_path, what));
            }
            files.insert(full.clone());
            map.insert(tensor, full);
        }
        if files.is_empty() {
            return Err(ModelFilesError::invalid(
                &index_path,
                "weight_map is empty; it must name at least one file",
            ));
        }
        return Ok((files.into_iter().collect(), map));
    }
    let single = path.join("model.safetensors");
    if single.is_file() {
        return Ok((vec![single], BTreeMap::new()));
    }
    Err(ModelFilesError::invalid(
        path,
        "holds neither model.safetensors nor model.safetensors.index.json",
    ))
}

fn read_limited(path: &Path, limit: u64) -> Result<String, ModelFilesError> {
    let io = |source| ModelFilesError::Io {
        path: path.to_path_buf(),
        source,
    };
    let length = fs::metadata(path).map_err(io)?.len();
    if length > limit {
        return Err(ModelFilesError::invalid(
            path,
            format!("is {length} bytes long; at most {limit} are read"),
        ));
    }
    fs::read_to_string(path).map_err(io)
}

fn read_optional(path: &Path, limit: u64) -> Result<Option<String>, ModelFilesError> {
    if path.is_file() {
        read_limited(path, limit).map(Some)
    } else {
        Ok(None)
    }
}

pub(crate) fn parse_json(path: &Path, text: &str) -> Result<Value, ModelFilesError> {
    serde_json::from_str(text).map_err(|source| ModelFilesError::Json {
        path: path.to_path_buf(),
        source,
    })
}

pub(crate) fn read_json(path: &Path, limit: u64) -> Result<Value, ModelFilesError> {
    parse_json(path, &read_limited(path, limit)?)
}

fn read_optional_json(path: &Path) -> Result<Option<Value>, ModelFilesError> {
    if path.is_file() {
        read_json(path, MAX_CONFIG_BYTES).map(Some)
    } else {
        Ok(None)
    }
}
