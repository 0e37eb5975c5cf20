//! Architectures as data: one decoder, and here what differs between models, read from a file's metadata.

use model_files::{GgufFile, ModelDirectory, ModelFiles, ModelFilesError, Source};
use serde_json::Value;
use thiserror::Error;

use crate::kernels::RopeStyle;
use crate::tensor_names::Part;

/// GGUF architectures (`general.architecture`) that the decoder computes.
pub const GGUF_ARCHITECTURES: [&str; 1] = ["llama"];
/// Classes of `config.json` (`architectures`) that the decoder computes.
pub const CONFIG_ARCHITECTURES: [&str; 1] = ["LlamaForCausalLM"];

/// Shape and switches of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ArchConfig {
    /// The file's word for the architecture.
    pub name: String,
    /// Decoder layers.
    pub num_layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward network.
    pub ffn_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// KV heads; divides the query heads.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Positions the model was made for.
    pub max_positions: usize,
    /// Added to the mean square in norms.
    pub norm_eps: f32,
    /// How rotary embeddings pair elements.
    pub rope_style: RopeStyle,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// The output matrix is the embedding matrix.
    pub tied_head: bool,
    /// Query, key, value and output projections have biases.
    pub attention_bias: bool,
    /// Feed-forward projections have biases.
    pub ffn_bias: bool,
}

/// Why a model's description cannot be served.
#[derive(Debug, Error)]
pub enum ArchError {
    /// The files could not be read.
    #[error(transparent)]
    Files(#[from] ModelFilesError),
    /// Not one of the architectures that exist here.
    #[error("architecture {found} is not supported; supported are {supported}")]
    Architecture {
        /// What the file says.
        found: String,
        /// What there is.
        supported: String,
    },
    /// A feature of a known architecture that the decoder does not compute.
    #[error("{key} = {value} is not supported; {supported}")]
    Feature {
        /// Key in the file.
        key: String,
        /// Its value.
        value: String,
        /// What would work.
        supported: &'static str,
    },
    /// A value that contradicts the format or another value.
    #[error("{key} = {value} makes no sense: it must be {right}")]
    Value {
        /// Key in the file.
        key: String,
        /// Its value.
        value: String,
        /// What would be right.
        right: String,
    },
}

fn value_error(key: impl Into<String>, value: impl ToString, right: impl Into<String>) -> ArchError {
    ArchError::Value {
        key: key.into(),
        value: value.to_string(),
        right: right.into(),
    }
}

const ROPE_SUPPORTED: &str = "only plain rotary embeddings (type none or default) are";

impl ArchConfig {
    /// Reads the description of a model's decoder.
    ///
    /// # Errors
    /// [`ArchError`] names the key, its value and what would be right.
    pub fn read(files: &ModelFiles) -> Result<Self, ArchError> {
        let config = match files.source() {
            Source::Gguf(file) => Self::from_gguf(file),
            Source::Directory(directory) => Self::from_config(directory),
        }?;
        config.check()
    }

    /// Outputs and inputs of a layer's matrix.
    pub(crate) fn matrix_shape(&self, part: Part) -> (usize, usize) {
        let (heads, kv_heads) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        match part {
            Part::Query => (heads, self.hidden_size),
            Part::Key | Part::Value => (kv_heads, self.hidden_size),
            Part::Output => (self.hidden_size, heads),
            Part::Gate | Part::Up => (self.ffn_size, self.hidden_size),
            Part::Down => (self.hidden_size, self.ffn_size),
        }
    }

    fn from_gguf(file: &GgufFile) -> Result<Self, ArchError> {
        let name = file.require_string("general.architecture")?.to_owned();
        if !GGUF_ARCHITECTURES.contains(&name.as_str()) {
            return Err(ArchError::Architecture {
                found: name,
                supported: GGUF_ARCHITECTURES.join(", "),
            });
        }
        let key = |suffix: &str| format!("{name}.{suffix}");
        let require = |suffix: &str| file.require_u32(&key(suffix)).map(|n| n as usize);
        let optional = |suffix: &str| file.u32(&key(suffix)).map(|n| n.map(|n| n as usize));
        let (hidden_size, num_heads) = (require("embedding_length")?, require("attention.head_count")?);
        let even_split = hidden_size.checked_div(num_heads).unwrap_or(0);
        let head_dim = optional("attention.key_length")?.unwrap_or(even_split);
        for suffix in ["attention.value_length", "rope.dimension_count"] {
            if let Some(width) = optional(suffix)?.filter(|&width| width != head_dim) {
                let supported = "only the width of a whole head is";
                return Err(ArchError::Feature {
                    key: key(suffix),
                    value: width.to_string(),
                    supported,
                });
            }
        }
        for (suffix, supported) in [
            ("expert_count", "only dense feed-forward networks are"),
            ("attention.sliding_window", "only full attention is"),
        ] {
            if let Some(value) = optional(suffix)?.filter(|&n| n > 0) {
                return Err(ArchError::Feature {
                    key: key(suffix),
                    value: value.to_string(),
                    supported,
                });
            }
        }
        refuse_gguf_rope_scaling(file, &name)?;
        let has = |tensor: &str| file.header().tensor(tensor).is_some();
        let embedding = file.tensor("token_embd.weight")?;
        Ok(Self {
            num_layers: require("block_count")?,
            hidden_size,
            ffn_size: require("feed_forward_length")?,
            num_heads,
            num_kv_heads: optional("attention.head_count_kv")?.unwrap_or(num_heads),
            head_dim,
            vocab_size: optional("vocab_size")?.unwrap_or(embedding.shape.first().map_or(0, |&n| n as usize)),
            max_positions: require("context_length")?,
            norm_eps: file.require_f32(&key("attention.layer_norm_rms_epsilon"))?,
            rope_style: RopeStyle::Interleaved,
            rope_theta: f64::from(file.f32(&key("rope.freq_base"))?.unwrap_or(10_000.0)),
            tied_head: !has("output.weight"),
            attention_bias: has("blk.0.attn_q.bias"),
            ffn_bias: has("blk.0.ffn_gate.bias"),
            name,
        })
    }

    fn from_config(directory: &ModelDirectory) -> Result<Self, ArchError> {
        let config = directory.config();
        let reader = Reader(config);
        let class = config
            .get("architectures")
            .and_then(|v| v.get(0))
            .and_then(Value::as_str);
        if !class.is_some_and(|class| CONFIG_ARCHITECTURES.contains(&class)) {
            let found = config.get("architectures").unwrap_or(&Value::Null).to_string();
            return Err(ArchError::Architecture {
                found,
                supported: CONFIG_ARCHITECTURES.join(", "),
            });
        }
        let activation = reader.text("hidden_act")?.unwrap_or("silu");
        if activation != "silu" {
            return Err(ArchError::Feature {
                key: "hidden_act".to_owned(),
                value: activation.to_owned(),
                supported: "only silu is",
            });
        }
        let (hidden_size, num_heads) = (reader.require("hidden_size")?, reader.require("num_attention_heads")?);
        let even_split = hidden_size.checked_div(num_heads).unwrap_or(0);
        Ok(Self {
            name: reader.text("model_type")?.unwrap_or("llama").to_owned(),
            num_layers: reader.require("num_hidden_layers")?,
            hidden_size,
            ffn_size: reader.require("intermediate_size")?,
            num_heads,
            num_kv_heads: reader.size("num_key_value_heads")?.unwrap_or(num_heads),
            head_dim: reader.size("head_dim")?.unwrap_or(even_split),
            vocab_size: reader.require("vocab_size")?,
            max_positions: reader.require("max_position_embeddings")?,
            norm_eps: reader.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope_style: RopeStyle::Half,
            rope_theta: rope_theta(config)?,
            tied_head: reader.flag("tie_word_embeddings")?.unwrap_or(false),
            attention_bias: reader.flag("attention_bias")?.unwrap_or(false),
            ffn_bias: reader.flag("mlp_bias")?.unwrap_or(false),
        })
    }

    /// Refuses shapes that cannot be computed.
    fn check(self) -> Result<Self, ArchError> {
        let sizes = [
            ("number of layers", self.num_layers),
            ("hidden size", self.hidden_size),
            ("feed-forward size", self.ffn_size),
            ("number of heads", self.num_heads),
            ("number of KV heads", self.num_kv_heads),
            ("head size", self.head_dim),
            ("vocabulary size", self.vocab_size),
            ("number of positions", self.max_positions),
        ];
        for (what, size) in sizes {
            if size == 0 || size > u32::MAX as usize {
                return Err(value_error(what, size, "between 1 and 4294967295"));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let right = format!("a divisor of the {} heads", self.num_heads);
            return Err(value_error("number of KV heads", self.num_kv_heads, right));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(value_error(
                "head size",
                self.head_dim,
                "even, as rotary embeddings take pairs",
            ));
        }
        if !(self.norm_eps >= 0.0 && self.norm_eps.is_finite()) {
            return Err(value_error(
                "epsilon of the norms",
                self.norm_eps,
                "a finite number, 0 or above",
            ));
        }
        if !(self.rope_theta > 0.0 && self.rope_theta.is_finite()) {
            return Err(value_error("rope theta", self.rope_theta, "a finite number above 0"));
        }
        Ok(self)
    }
}

fn refuse_gguf_rope_scaling(file: &GgufFile, name: &str) -> Result<(), ArchError> {
    let unsupported = |key: String, value: String| ArchError::Feature {
        key,
        value,
        supported: ROPE_SUPPORTED,
    };
    let key = format!("{name}.rope.scaling.type");
    if let Some(kind) = file.string(&key)?.filter(|&kind| kind != "none") {
        return Err(unsupported(key, kind.to_owned()));
    }
    for suffix in ["rope.scale_linear", "rope.scaling.factor"] {
        let key = format!("{name}.{suffix}");
        if let Some(factor) = file.f32(&key)?.filter(|&factor| factor != 1.0 && factor != 0.0) {
            return Err(unsupported(key, factor.to_string()));
        }
    }
    match file.header().tensor("rope_freqs.weight") {
        Some(info) => Err(unsupported(info.name.clone(), format!("{:?}", info.shape))),
        None => Ok(()),
    }
}

/// The rotary base of a `config.json`: `rope_parameters` (newer files) or `rope_theta` with `rope_scaling`.
fn rope_theta(config: &Value) -> Result<f64, ArchError> {
    let present = |key: &str| config.get(key).filter(|v| !v.is_null());
    for section in ["rope_parameters", "rope_scaling"] {
        let Some(value) = present(section) else { continue };
        let reader = Reader(value);
        for key in ["rope_type", "type"] {
            if let Some(kind) = reader.text(key)?.filter(|&kind| kind != "default") {
                let key = format!("{section}.{key}");
                return Err(ArchError::Feature {
                    key,
                    value: kind.to_owned(),
                    supported: ROPE_SUPPORTED,
                });
            }
        }
    }
    let newer = present("rope_parameters")
        .map(|v| Reader(v).number("rope_theta"))
        .transpose()?
        .flatten();
    Ok(newer.or(Reader(config).number("rope_theta")?).unwrap_or(10_000.0))
}

/// Typed access to a JSON object; `null` counts as absent.
struct Reader<'a>(&'a Value);

impl<'a> Reader<'a> {
    fn read<T>(&self, key: &str, right: &str, parse: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>, ArchError> {
        match self.0.get(key).filter(|v| !v.is_null()) {
            None => Ok(None),
            Some(value) => parse(value).map(Some).ok_or_else(|| value_error(key, value, right)),
        }
    }

    fn size(&self, key: &str) -> Result<Option<usize>, ArchError> {
        self.read(key, "a whole number, 0 or above", |v| {
            v.as_u64().and_then(|n| usize::try_from(n).ok())
        })
    }

    fn require(&self, key: &str) -> Result<usize, ArchError> {
        self.size(key)?
            .ok_or_else(|| value_error(key, "(missing)", "in config.json"))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ArchError> {
        self.read(key, "a number", Value::as_f64)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ArchError> {
        self.read(key, "true or false", Value::as_bool)
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, ArchError> {
        self.read(key, "a string", Value::as_str)
    }
}
