//! The text side of a model: tokens from text, text from tokens, prompts from conversations.

mod bytes;
mod from_directory;
mod from_gguf;
mod hash;
mod incremental;
mod pre_tokenizer;
mod python;
mod sentence_piece;
mod strftime;
mod template;
mod tojson;
mod tokenizer;

#[cfg(test)]
mod tests;

pub use incremental::IncrementalDecoder;
pub use template::{ChatTemplate, RenderInput};
pub use tokenizer::TextTokenizer;

pub(crate) use from_directory::architecture as directory_architecture;
pub(crate) use hash::tokenizer_hash;

use crate::error::ModelFilesError;
use crate::files::{ModelFiles, Source};

/// Sampling defaults the model's publisher recommends (`generation_config.json`). `None`: no recommendation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Sampling temperature.
    pub temperature: Option<f32>,
    /// Keep the k most probable tokens.
    pub top_k: Option<u32>,
    /// Nucleus mass.
    pub top_p: Option<f32>,
}

/// Everything the text side of a server needs to know about a model.
#[derive(Debug, Clone)]
pub struct TextModel {
    /// Text to tokens and back. Cheap to clone.
    pub tokenizer: TextTokenizer,
    /// Tokens that end a generation, ascending, without repeats. May be empty.
    pub eos_token_ids: Vec<u32>,
    /// Begin-of-text token, if the model has one.
    pub bos_token_id: Option<u32>,
    /// True if [`TextTokenizer::encode`] puts the begin-of-text token in front.
    pub add_bos: bool,
    /// The model's chat template, if it has one.
    pub chat_template: Option<ChatTemplate>,
    /// Rows of the model's output: token ids are below this. May be larger than the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Longest sequence the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Architecture, as `llama`.
    pub architecture: String,
    /// Name for people.
    pub name: String,
    /// See [`ModelFiles::tokenizer_hash`].
    pub tokenizer_hash: u64,
    /// Recommended sampling.
    pub generation_defaults: GenerationDefaults,
}

impl TextModel {
    /// Builds the text side of an opened model.
    ///
    /// # Errors
    /// [`ModelFilesError`] naming the key or file that is missing, wrong or not supported.
    pub fn load(files: &ModelFiles) -> Result<Self, ModelFilesError> {
        match files.source() {
            Source::Gguf(file) => from_gguf::load(files, file),
            Source::Directory(directory) => from_directory::load(files, directory),
        }
    }
}
