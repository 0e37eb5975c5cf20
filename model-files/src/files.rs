//! The front door: one path, either form.

use std::path::{Path, PathBuf};

use crate::directory::ModelDirectory;
use crate::error::ModelFilesError;
use crate::gguf::{GgufFile, split};
use crate::positions;
use crate::text::{self, TextModel};

/// The two forms a model comes in.
#[derive(Debug)]
pub enum Source {
    /// A GGUF file, or the parts of a split one.
    Gguf(GgufFile),
    /// A directory with `config.json`, safetensors and `tokenizer.json`.
    Directory(ModelDirectory),
}

/// An opened model: everything is found and the GGUF header is checked; the tokenizer is built only by [`Self::text`], the
/// weights are read by whoever needs them.
#[derive(Debug)]
pub struct ModelFiles {
    path: PathBuf,
    source: Source,
}

impl ModelFiles {
    /// Opens a `.gguf` file (any part of a split model stands for all), a model directory, or a directory that holds one model
    /// as GGUF.
    ///
    /// # Errors
    /// [`ModelFilesError`] naming the file and what is wrong.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ModelFilesError> {
        Self::open_with(path.as_ref(), ModelDirectory::open)
    }

    /// Opens it for [`Self::text`] alone: a model directory needs no weights then.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_text(path: impl AsRef<Path>) -> Result<Self, ModelFilesError> {
        Self::open_with(path.as_ref(), ModelDirectory::open_text)
    }

    fn open_with(
        path: &Path,
        open: impl FnOnce(&Path) -> Result<ModelDirectory, ModelFilesError>,
    ) -> Result<Self, ModelFilesError> {
        let metadata = std::fs::metadata(path).map_err(|source| ModelFilesError::Io {
            path: path.to_path_buf(),
            source,
        })?;
        let source = if metadata.is_dir() {
            let gguf = match path.join("config.json").exists() {
                true => None,
                false => split::only_model(path)?,
            };
            match gguf {
                Some(file) => Source::Gguf(GgufFile::open(&file)?),
                None => Source::Directory(open(path)?),
            }
        } else {
            Source::Gguf(GgufFile::open(path)?)
        };
        Ok(Self {
            path: path.to_path_buf(),
            source,
        })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the files with the weights.
    pub fn weight_bytes(&self) -> u64 {
        match &self.source {
            Source::Gguf(file) => file.file_bytes(),
            Source::Directory(directory) => {
                let len = |path: &PathBuf| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
                directory.weight_files().iter().map(len).sum()
            }
        }
    }

    /// The opened form.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Architecture: `general.architecture` of a GGUF file, `model_type` of `config.json`.
    ///
    /// # Errors
    /// [`ModelFilesError`] if it is not there or no string.
    pub fn architecture(&self) -> Result<String, ModelFilesError> {
        match &self.source {
            Source::Gguf(file) => Ok(file.require_string("general.architecture")?.to_string()),
            Source::Directory(directory) => text::directory_architecture(directory),
        }
    }

    /// Name for people and for `model_name`: `general.name` of a GGUF file or the file's or directory's own name.
    ///
    /// # Errors
    /// [`ModelFilesError`] if `general.name` is no string.
    pub fn name(&self) -> Result<String, ModelFilesError> {
        let own = || match split::PartName::read(&self.path) {
            Some(part) => part.stem.to_owned(),
            None => {
                let stem = self.path.file_stem().unwrap_or(self.path.as_os_str());
                stem.to_string_lossy().into_owned()
            }
        };
        match &self.source {
            Source::Gguf(file) => Ok(file.string("general.name")?.map_or_else(own, str::to_string)),
            Source::Directory(_) => Ok(self
                .path
                .file_name()
                .map_or_else(own, |name| name.to_string_lossy().into_owned())),
        }
    }

    /// Longest text, in tokens, that the model can be served with. `long_texts`: with rotary embeddings for long texts, where
    /// a model has others for them.
    ///
    /// # Errors
    /// [`ModelFilesError`] if the files do not say how long the texts of its training were.
    pub fn positions(&self, long_texts: bool) -> Result<usize, ModelFilesError> {
        positions::positions(&self.source, long_texts)
    }

    /// Hash of everything that decides how text becomes tokens and back: equal for equal vocabularies, merges, rules and
    /// special flags. Does not build the tokenizer, so a node can afford it.
    ///
    /// # Errors
    /// [`ModelFilesError`] if the tokenizer's data is missing or of the wrong kind.
    pub fn tokenizer_hash(&self) -> Result<u64, ModelFilesError> {
        text::tokenizer_hash(&self.source)
    }

    /// Builds the text side: tokenizer, end tokens, chat template, defaults.
    ///
    /// # Errors
    /// [`ModelFilesError`] naming the key or file that is missing, wrong or not supported.
    pub fn text(&self) -> Result<TextModel, ModelFilesError> {
        TextModel::load(self)
    }
}
