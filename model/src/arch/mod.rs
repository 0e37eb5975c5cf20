//! Architectures as data: one decoder, and here what differs between models, read from a file's metadata.
//!
//! [`ArchConfig::read`] takes the words of either file format ([`from_config`], [`from_gguf`]) to the same switches;
//! nothing behind it asks which family a model is of.

use model_files::{ModelFiles, ModelFilesError, Source};
use thiserror::Error;

use crate::kernels::{Activation, RopeStyle};
use crate::tensor_names::Part;

mod fp8;
mod from_config;
mod from_gguf;
mod json;
mod rope;

pub(crate) use fp8::{Fp8Scheme, Scales};
pub use from_config::CONFIG_ARCHITECTURES;
pub use from_gguf::GGUF_ARCHITECTURES;
pub use rope::{Rope, RopeScaling};

/// Where a sub-layer (attention, feed-forward network) has its norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// x + f(norm(x)).
    Before,
    /// x + norm(f(x)).
    After,
    /// x + norm(f(norm(x))).
    Around,
}

/// Norms of queries and keys, before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// Each head by itself, all with the same weights.
    Heads,
    /// All heads of a row together.
    Whole,
}

/// How a model's files call a sparse layer's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertNames {
    /// `mlp.gate`, `mlp.experts.N.gate_proj`.
    Mlp,
    /// `block_sparse_moe.gate`, `block_sparse_moe.experts.N.w1`: Mixtral.
    BlockSparse,
}

/// What turns a router's output into the weights of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// e^x over the sum of all.
    Softmax,
    /// 1 / (1 + e^-x), each for itself.
    Sigmoid,
}

/// Groups of neighbouring experts, of which the best are looked at only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups of equal size.
    pub count: usize,
    /// Groups that a token's experts come from.
    pub used: usize,
    /// A group is as good as the sum of so many of its best experts.
    pub best: usize,
}

/// Sparse feed-forward networks: each token goes through a few of many.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// Experts of a layer.
    pub count: usize,
    /// Experts that a token goes through.
    pub used: usize,
    /// Width of an expert.
    pub ffn_size: usize,
    /// Width of the network that all tokens go through beside their experts; 0: there is none.
    pub shared_ffn_size: usize,
    /// How experts are scored.
    pub scoring: Scoring,
    /// A number for each expert is added to its score where experts are chosen, and there alone.
    pub choice_bias: bool,
    /// The scores of the chosen ones are divided by their sum.
    pub normalised: bool,
    /// Factor of all weights.
    pub scale: f32,
    /// Groups, if not all experts are looked at.
    pub groups: Option<ExpertGroups>,
    /// By layer: whether its network is sparse.
    pub layers: Vec<bool>,
    /// Names of the tensors.
    pub names: ExpertNames,
}

/// Multi-head latent attention: what is cached of a position is one vector for all heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latent {
    /// Width of the vector that queries are made from; 0: they are made from the hidden state.
    pub query_rank: usize,
    /// Width of the vector that keys and values are made from.
    pub kv_rank: usize,
    /// Elements of a head's key that are made from it.
    pub plain_dim: usize,
    /// Elements of a key that are rotated, the same for all heads.
    pub rope_dim: usize,
    /// Elements of a head's value.
    pub value_dim: usize,
}

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
    /// KV heads that are cached; divides the query heads. 1 with latent attention.
    pub num_kv_heads: usize,
    /// Elements of a head's query and key as they meet in attention.
    pub head_dim: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Positions the model was made for.
    pub max_positions: usize,
    /// Added to the mean square in norms.
    pub norm_eps: f32,
    /// Where the norms are.
    pub norms: Norms,
    /// Added to the weights of all norms as the file has them.
    pub norm_offset: f32,
    /// Norms of queries and keys.
    pub qk_norm: QkNorm,
    /// How rotary embeddings pair elements.
    pub rope_style: RopeStyle,
    /// Rotary embeddings.
    pub rope: Rope,
    /// Rotary embeddings of the layers with a window, if they have others.
    pub local_rope: Option<Rope>,
    /// By layer: the last so many positions are seen, the row's own included; `None`: all.
    pub windows: Vec<Option<usize>>,
    /// Factor of the scores of attention.
    pub attention_scale: f32,
    /// Scores s become cap * tanh(s / cap).
    pub attention_cap: Option<f32>,
    /// Logits do so.
    pub logit_cap: Option<f32>,
    /// What gates the feed-forward network.
    pub activation: Activation,
    /// Factor of the embeddings.
    pub embedding_scale: f32,
    /// Factor of what a sub-layer adds to the residual stream.
    pub residual_scale: f32,
    /// Factor of the logits.
    pub logit_scale: f32,
    /// The output matrix is the embedding matrix.
    pub tied_head: bool,
    /// Query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The output projection of attention has one.
    pub output_bias: bool,
    /// Feed-forward projections have biases.
    pub ffn_bias: bool,
    /// Query, key and value are one tensor of the file, gate and up are another.
    pub fused: bool,
    /// Sparse feed-forward networks.
    pub experts: Option<Experts>,
    /// Latent attention.
    pub latent: Option<Latent>,
    /// Layers behind the decoder's that the files may have and that are not used: they guess further tokens.
    pub prediction_layers: usize,
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

fn feature_error(key: impl Into<String>, value: impl ToString, supported: &'static str) -> ArchError {
    ArchError::Feature {
        key: key.into(),
        value: value.to_string(),
        supported,
    }
}

/// Far more than any model has in one direction, all heads together included.
const LARGEST_SIZE: usize = 1 << 24;
/// Far more layers than any model has. Lists by layer are no longer, whatever a file says.
const MOST_LAYERS: usize = 1 << 16;

fn check_size(what: &str, size: usize) -> Result<(), ArchError> {
    if size == 0 || size > LARGEST_SIZE {
        return Err(value_error(what, size, format!("between 1 and {LARGEST_SIZE}")));
    }
    Ok(())
}

impl ArchConfig {
    /// Reads the description of a model's decoder, as it is for texts of its first training's length where it differs.
    ///
    /// # Errors
    /// [`ArchError`] names the key, its value and what would be right.
    pub fn read(files: &ModelFiles) -> Result<Self, ArchError> {
        Self::read_for(files, false)
    }

    /// [`Self::read`]; with `long_texts` what the model has for long texts, where it has rotary embeddings of their own for them.
    ///
    /// # Errors
    /// [`ArchError`] names the key, its value and what would be right.
    pub fn read_for(files: &ModelFiles, long_texts: bool) -> Result<Self, ArchError> {
        let mut config = match files.source() {
            Source::Gguf(file) => from_gguf::read(file, long_texts),
            Source::Directory(directory) => from_config::read(directory, long_texts),
        }?;
        config.max_positions = files.positions(long_texts)?;
        if long_texts && config.max_positions == files.positions(false)? {
            let right = "false: this model's rotary embeddings do not change with the length of a text";
            return Err(value_error("model.long_texts", true, right));
        }
        config.check()
    }

    /// Outputs and inputs of a layer's matrix.
    pub(crate) fn matrix_shape(&self, part: Part) -> (usize, usize) {
        let (heads, kv_heads) = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
        match part {
            Part::Query => (heads, self.hidden_size),
            Part::Key | Part::Value => (kv_heads, self.hidden_size),
            Part::Output => (self.hidden_size, self.num_heads * self.value_dim()),
            Part::Gate | Part::Up => (self.ffn_size, self.hidden_size),
            Part::Down => (self.hidden_size, self.ffn_size),
        }
    }

    /// Elements of a head's output, as the output projection takes it.
    pub(crate) fn value_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.value_dim)
    }

    /// Whether a layer's feed-forward network is sparse.
    pub(crate) fn is_sparse(&self, layer: usize) -> bool {
        let experts = self.experts.as_ref();
        experts.is_some_and(|experts| experts.layers.get(layer) == Some(&true))
    }

    /// Whether low-rank adapters can be added to this matrix: it is one in the layer, or some rows of one.
    pub(crate) fn is_adaptable(&self, layer: usize, part: Part) -> bool {
        let ffn = matches!(part, Part::Gate | Part::Up | Part::Down);
        !(self.latent.is_some() && !ffn || self.is_sparse(layer) && ffn)
    }

    /// Refuses shapes that cannot be computed.
    fn check(self) -> Result<Self, ArchError> {
        let mut sizes = vec![
            ("number of layers", self.num_layers),
            ("hidden size", self.hidden_size),
            ("feed-forward size", self.ffn_size),
            ("number of heads", self.num_heads),
            ("number of KV heads", self.num_kv_heads),
            ("head size", self.head_dim),
            ("vocabulary size", self.vocab_size),
            ("number of positions", self.max_positions),
        ];
        if let Some(latent) = &self.latent {
            sizes.extend([
                ("rank of keys and values", latent.kv_rank),
                ("head size without rotary embeddings", latent.plain_dim),
                ("head size of values", latent.value_dim),
            ]);
        }
        for (what, size) in sizes {
            check_size(what, size)?;
        }
        if self.num_layers > MOST_LAYERS {
            return Err(value_error(
                "number of layers",
                self.num_layers,
                format!("at most {MOST_LAYERS}"),
            ));
        }
        check_size("size of all heads", self.num_heads * self.head_dim)?;
        check_size("size of all heads' values", self.num_heads * self.value_dim())?;
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let right = format!("a divisor of the {} heads", self.num_heads);
            return Err(value_error("number of KV heads", self.num_kv_heads, right));
        }
        if !self.head_dim.is_multiple_of(2) {
            let right = "even, as rotary embeddings take pairs";
            return Err(value_error("head size", self.head_dim, right));
        }
        self.check_numbers()?;
        if self.windows.contains(&Some(0)) {
            return Err(value_error("sliding window", 0, "at least 1, the row's own position"));
        }
        for rope in [Some(&self.rope), self.local_rope.as_ref()].into_iter().flatten() {
            rope.check(self.latent.map_or(self.head_dim, |latent| latent.rope_dim))?;
        }
        if let Some(experts) = &self.experts {
            experts.check()?;
        }
        Ok(self)
    }

    fn check_numbers(&self) -> Result<(), ArchError> {
        let (eps, right) = (self.norm_eps, "a finite number, 0 or above");
        if !(eps >= 0.0 && eps.is_finite()) {
            return Err(value_error("epsilon of the norms", eps, right));
        }
        let above = [
            ("scale of attention", Some(self.attention_scale)),
            ("soft cap of attention", self.attention_cap),
            ("soft cap of the logits", self.logit_cap),
        ];
        for (what, value) in above {
            if let Some(value) = value.filter(|value| !(*value > 0.0 && value.is_finite())) {
                return Err(value_error(what, value, "a finite number above 0"));
            }
        }
        let factors = [
            ("scale of the embeddings", self.embedding_scale),
            ("scale of the residual stream", self.residual_scale),
            ("scale of the logits", self.logit_scale),
        ];
        for (what, value) in factors {
            if !value.is_finite() || value == 0.0 {
                return Err(value_error(what, value, "a finite number other than 0"));
            }
        }
        Ok(())
    }
}

impl Experts {
    fn check(&self) -> Result<(), ArchError> {
        check_size("number of experts", self.count)?;
        if self.used == 0 || self.used > self.count {
            let right = format!("between 1 and {}, the number of experts", self.count);
            return Err(value_error("number of a token's experts", self.used, right));
        }
        check_size("feed-forward size of an expert", self.ffn_size)?;
        check_size("feed-forward size of shared experts", self.shared_ffn_size.max(1))?;
        if !self.scale.is_finite() {
            return Err(value_error("scale of the experts", self.scale, "a finite number"));
        }
        let Some(groups) = self.groups else { return Ok(()) };
        if groups.count == 0 || !self.count.is_multiple_of(groups.count) {
            let right = format!("a divisor of the {} experts", self.count);
            return Err(value_error("number of groups of experts", groups.count, right));
        }
        if groups.used == 0 || groups.used > groups.count {
            let right = format!("between 1 and {}, the number of groups", groups.count);
            return Err(value_error("number of a token's groups of experts", groups.used, right));
        }
        let size = self.count / groups.count;
        if groups.best > size || groups.used * size < self.used {
            let right = format!(
                "so few that {} groups hold the {} experts of a token, and each at least {}",
                groups.used, self.used, groups.best
            );
            return Err(value_error("number of groups of experts", groups.count, right));
        }
        Ok(())
    }
}
