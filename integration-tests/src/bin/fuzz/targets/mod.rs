//! What is fuzzed.

mod configuration;
mod control;
mod gguf;
mod http;
mod kv;
mod planted;
mod safetensors;
mod weights;

/// Something that takes bytes from outside.
pub(crate) trait Target {
    /// Its name on the command line and in the corpus.
    fn name(&self) -> &'static str;

    /// Inputs to begin with, beside those of the repository.
    fn seeds(&self) -> Vec<Vec<u8>>;

    /// Takes an input. Returns its outcome in a few words, or which promise it broke. Must not panic.
    fn run(&self, input: &[u8]) -> Result<String, String>;

    /// Makes lengths and checksums fit what is there, so that more than the first check is reached.
    fn repair(&self, _input: &mut Vec<u8>) {}
}

/// The names of all targets.
pub(crate) const NAMES: [&str; 6] = ["http", "control", "kv", "gguf", "safetensors", "config"];

/// The target of this name.
pub(crate) fn find(name: &str) -> Option<Box<dyn Target>> {
    Some(match name {
        "http" => Box::new(http::Http::new()),
        "control" => Box::new(control::Control),
        "kv" => Box::new(kv::Frames),
        "gguf" => Box::new(gguf::Gguf::new()?),
        "safetensors" => Box::new(safetensors::Directory::new()?),
        "config" => Box::new(configuration::Configuration),
        "planted" => Box::new(planted::Planted),
        _ => return None,
    })
}
