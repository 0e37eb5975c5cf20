//! Reads what a GGUF file or a model directory says, without computing anything: header and tensor table, configuration,
//! tokenizer, chat template, detokeniser. The coordinator needs the text side, the model crate the tensors; neither knows
//! the other's half.
//!
//! * [`ModelFiles::open`] finds out which of the two forms a path is and checks it.
//! * [`gguf`]: bounded GGUF reader over a memory map; [`directory`]: Hugging Face layout; [`map`]: safe memory map.
//! * [`adapter`]: the configuration of a low-rank adapter.
//! * [`text`]: [`TextModel`] (tokenizer, end tokens, template, defaults), [`TextTokenizer`], [`IncrementalDecoder`],
//!   [`ChatTemplate`].

pub mod adapter;
pub mod directory;
pub mod gguf;
pub mod map;
pub mod text;

mod error;
mod files;
mod positions;

pub use directory::ModelDirectory;
pub use error::{ModelFilesError, TextError};
pub use files::{ModelFiles, Source};
pub use gguf::{GgmlType, GgufFile, TensorInfo};
pub use map::FileMap;
pub use text::{ChatTemplate, GenerationDefaults, IncrementalDecoder, RenderInput, TextModel, TextTokenizer};
