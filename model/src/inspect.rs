//! What a model is and what it needs, without loading its weights.

use std::fmt;
use std::path::Path;

use config::{EngineConfig, ModelConfig, Quantize};
use model_files::{ModelFiles, Source};
use protocol::kv::KvLayout;

use crate::arch::ArchConfig;
use crate::load::{LoadError, describe, kv_layout};
use crate::pool_size::machine_memory;
use crate::weights::Held;

/// What [`inspect`] has found out.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// Shape and switches of the decoder.
    pub arch: ArchConfig,
    /// Shape of the KV cache.
    pub layout: KvLayout,
    /// Bytes of the files with the weights.
    pub weight_bytes: u64,
    /// What the weights become when they are loaded.
    pub held: Held,
    /// What was asked for them to become.
    pub quantize: Quantize,
    /// Tokens that a KV pool is asked to hold.
    pub tokens: usize,
    /// Memory of this machine that a process may use, in bytes.
    pub memory: Option<u64>,
    /// Number of tokens of the vocabulary, or why the tokenizer cannot be used.
    pub tokenizer: Result<usize, String>,
    /// One GGUF file, or a directory with safetensors files.
    pub form: &'static str,
}

/// Looks at the model at `path`, for a KV pool of `tokens` tokens (0: one of the longest sequences). Of `model` the element
/// type of the KV cache counts, what weights become at loading, and whether long texts are meant.
///
/// # Errors
/// [`LoadError`] names what cannot be served.
pub fn inspect(path: &Path, model: &ModelConfig, block_tokens: usize, tokens: usize) -> Result<Inspection, LoadError> {
    let files = ModelFiles::open(path)?;
    let (arch, weights) = describe(&files, model.long_texts)?;
    let held = weights.held(&arch, model.quantize);
    let held = held.map_err(|source| LoadError::Weights {
        path: path.display().to_string(),
        source,
    })?;
    let layout = kv_layout(&arch, model, block_tokens.max(1));
    let text = files.text();
    Ok(Inspection {
        layout,
        weight_bytes: files.weight_bytes(),
        held,
        quantize: model.quantize,
        tokens: if tokens > 0 { tokens } else { arch.max_positions },
        memory: machine_memory(),
        tokenizer: text
            .map(|text| text.tokenizer.vocab_size())
            .map_err(|error| error.to_string()),
        form: match files.source() {
            Source::Gguf(file) if file.paths().count() > 1 => "split GGUF file",
            Source::Gguf(_) => "GGUF file",
            Source::Directory(_) => "directory of safetensors",
        },
        arch,
    })
}

impl Inspection {
    /// Bytes of KV that a position takes.
    pub fn kv_bytes_per_token(&self) -> usize {
        self.layout.token_bytes()
    }

    /// Bytes of KV of a sequence of the tokens asked for. Where layers have a window: the most that it has at once, while its prompt is computed in chunks of the default size.
    pub fn kv_bytes(&self) -> u128 {
        let rows = EngineConfig::default().prefill_chunk_tokens;
        self.layout.kept().most_blocks(self.tokens, rows) as u128 * self.layout.block_bytes() as u128
    }

    /// Weights as they are held, and KV pool.
    pub fn needed_bytes(&self) -> u128 {
        u128::from(self.held.bytes()) + self.kv_bytes()
    }
}

impl Inspection {
    /// What the weights become.
    fn write_held(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let types = self.held.types.iter();
        let types: Vec<String> = types
            .map(|(kind, (count, bytes))| format!("{count} {kind} ({bytes})"))
            .collect();
        writeln!(f, "in memory         {} bytes: {}", self.held.bytes(), types.join(", "))?;
        for ((wanted, to), count) in &self.held.fallbacks {
            let asked = self.quantize.as_str();
            writeln!(
                f,
                "quantize {asked:<9}{count} matrices are {to} and not {wanted}, whose blocks do not fit their rows"
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (arch, layout) = (&self.arch, &self.layout);
        writeln!(f, "architecture      {} ({})", arch.name, self.form)?;
        writeln!(f, "layers            {}", arch.num_layers)?;
        writeln!(f, "hidden size       {}", arch.hidden_size)?;
        writeln!(
            f,
            "attention         {} heads, {} KV heads of {}{}",
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_dim,
            if arch.latent.is_some() { ", latent" } else { "" }
        )?;
        let windows: Vec<usize> = arch.windows.iter().copied().flatten().collect();
        if let Some(window) = windows.first() {
            let (some, all) = (windows.len(), arch.num_layers);
            let kept = match layout.groups.window() {
                Some(_) => "; what lies before it is not kept",
                None => "",
            };
            writeln!(
                f,
                "sliding window    {window} positions, in {some} of {all} layers{kept}"
            )?;
        }
        match &arch.experts {
            Some(experts) => writeln!(
                f,
                "feed-forward      {} experts of {}, {} a token; dense layers {}",
                experts.count, experts.ffn_size, experts.used, arch.ffn_size
            )?,
            None => writeln!(f, "feed-forward      {}", arch.ffn_size)?,
        }
        writeln!(f, "positions         {}", arch.max_positions)?;
        match &self.tokenizer {
            Ok(tokens) => writeln!(f, "vocabulary        {} outputs, {tokens} tokens", arch.vocab_size)?,
            Err(error) => writeln!(
                f,
                "vocabulary        {} outputs; no tokenizer: {error}",
                arch.vocab_size
            )?,
        }
        writeln!(f, "weights           {} bytes", self.weight_bytes)?;
        self.write_held(f)?;
        let (each, block, dtype) = (self.kv_bytes_per_token(), layout.block_tokens, layout.dtype.as_str());
        let groups = match layout.groups.count() {
            1 => String::new(),
            count => format!(", a block for {} of the layers ({count} groups)", layout.num_layers),
        };
        writeln!(
            f,
            "KV                {each} bytes a token ({dtype}), in blocks of {block} tokens{groups}"
        )?;
        writeln!(f, "KV of {} tokens   {} bytes", self.tokens, self.kv_bytes())?;
        let needed = self.needed_bytes();
        match self.memory {
            Some(memory) if needed > u128::from(memory) => {
                writeln!(
                    f,
                    "memory            {needed} bytes, more than the {memory} bytes of this machine"
                )
            }
            Some(memory) => writeln!(f, "memory            {needed} bytes of {memory}"),
            None => writeln!(f, "memory            {needed} bytes"),
        }
    }
}
