//! What can be wrong with a model's files.

use std::path::{Path, PathBuf};

use crate::gguf::GgufProblem;

/// Why a model could not be opened. Every message names the file, the key or tensor, its value and what would be right.
#[derive(Debug, thiserror::Error)]
pub enum ModelFilesError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A GGUF file breaks the format.
    #[error("{}: {problem}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        problem: Box<GgufProblem>,
    },
    /// A JSON file does not parse.
    #[error("{}: not valid JSON: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why the parser stopped.
        source: serde_json::Error,
    },
    /// A file says something this crate cannot work with.
    #[error("{}: {what}", path.display())]
    Invalid {
        /// The file or directory.
        path: PathBuf,
        /// Key, value and what would be right.
        what: String,
    },
}

impl ModelFilesError {
    pub(crate) fn invalid(path: &Path, what: impl Into<String>) -> Self {
        Self::Invalid {
            path: path.to_path_buf(),
            what: what.into(),
        }
    }

    pub(crate) fn gguf(path: &Path, problem: GgufProblem) -> Self {
        Self::Gguf {
            path: path.to_path_buf(),
            problem: Box::new(problem),
        }
    }
}

/// Why text could not be turned into tokens or a conversation into a prompt.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The tokenizer failed on this text.
    #[error("tokenizer: {0}")]
    Tokenize(String),
    /// The chat template does not compile.
    #[error("chat template does not compile: {0}")]
    TemplateSyntax(String),
    /// The chat template refused this conversation (`raise_exception`) or failed while rendering it.
    #[error("chat template: {0}")]
    TemplateRender(String),
}
