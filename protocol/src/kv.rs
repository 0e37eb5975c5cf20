//! The KV layout both ends of a handoff agree on, and what identifies a model.

use std::fmt;

use bincode::{Decode, Encode};
use xxhash_rust::xxh3::xxh3_128;

use crate::window::{Groups, Kept};

/// Element type of the KV cache, in memory and on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum KvDtype {
    /// IEEE half precision, 2 bytes.
    F16,
    /// IEEE single precision, 4 bytes.
    F32,
    /// The upper half of IEEE single precision, 2 bytes.
    Bf16,
    /// Signed bytes; each token's key and value of each head have a scale of their own, in single precision.
    Int8,
}

impl KvDtype {
    /// All types.
    pub const ALL: [Self; 4] = [Self::F16, Self::F32, Self::Bf16, Self::Int8];

    /// Bytes of one element.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::Int8 => 1,
        }
    }

    /// Bytes of the scale that belongs to one head's key of one token, and of the one that belongs to its value; 0
    /// where elements stand for themselves.
    #[inline]
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 | Self::F32 => 0,
            Self::Int8 => 4,
        }
    }

    /// The type's word in configuration and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }
}

/// Shape of the KV cache.
///
/// A block holds the KV of the layers of one group ([`Groups`]): all layers of a model, or, where some have a window and
/// others have none, so many of them that all groups are of one size. The last group of either kind may be short of layers; its
/// blocks have room for them that nobody uses.
///
/// The canonical order of bytes is (layer, block, kv head). There lie, little-endian: the keys \[dim\]\[token\], the
/// values \[token\]\[dim\], and where the type has scales those of the keys \[token\] and those of the values
/// \[token\]. A latent cache has neither values nor their scales.
/// Keys are transposed so that a vector holds one dimension of neighbouring tokens: a query then meets 16 keys at
/// once, without a shuffle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub struct KvLayout {
    /// Layers of a block.
    pub num_layers: u32,
    /// KV heads of a layer.
    pub num_kv_heads: u32,
    /// Elements of one head's key, and of its value.
    pub head_dim: u32,
    /// Tokens of one block.
    pub block_tokens: u32,
    /// Element type.
    pub dtype: KvDtype,
    /// Latent attention: a head's key is its value as well, and is there once.
    pub latent: bool,
    /// The groups of layers, and which of them have a window: their blocks before it are neither kept nor sent.
    pub groups: Groups,
}

/// Where the KV of a layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvPlace {
    /// Which of the groups it belongs to.
    pub group: u32,
    /// Which layer of the group's blocks it is.
    pub layer: u32,
}

impl KvPlace {
    /// The place of a layer of a model whose layers are all in one group.
    pub const fn in_one_group(layer: u32) -> Self {
        Self { group: 0, layer }
    }
}

/// A block of any model that exists has far fewer bytes; more is nonsense that a file or a node says.
pub const MAX_BLOCK_BYTES: usize = 1 << 40;

impl KvLayout {
    /// Bytes of one block in one layer (K and V of all heads); the largest number where they are more.
    pub fn layer_block_bytes(&self) -> usize {
        let row = self.head_dim as usize * self.dtype.size() + self.dtype.scale_bytes();
        // Without elements there is nothing to scale.
        let row = if self.head_dim == 0 { 0 } else { row };
        let halves = if self.latent { 1 } else { 2 };
        let rows = halves * self.num_kv_heads as usize;
        rows.saturating_mul(self.block_tokens as usize).saturating_mul(row)
    }

    /// Bytes of one block in all its layers; the largest number where they are more.
    pub fn block_bytes(&self) -> usize {
        self.layer_block_bytes().saturating_mul(self.num_layers as usize)
    }

    /// Layers of the model in a group; the blocks' other layers are not used.
    pub fn layers_of(&self, group: usize) -> u32 {
        self.num_layers.saturating_sub(self.groups.spare(group))
    }

    /// Places for the layers of a model that is computed group after group: all those of a group, then those of the next one.
    pub fn places(&self) -> impl Iterator<Item = KvPlace> + use<> {
        let layout = *self;
        (0..layout.groups.count() as u32).flat_map(move |group| {
            let layers = 0..layout.layers_of(group as usize);
            layers.map(move |layer| KvPlace { group, layer })
        })
    }

    /// What is wrong with a layout that somebody else names, beside what is 0.
    pub fn check(&self) -> Result<(), String> {
        self.groups.check()?;
        match (0..self.groups.count()).find(|group| self.layers_of(*group) == 0) {
            Some(group) if self.num_layers > 0 => Err(format!("groups: group {group} has no layers")),
            _ => Ok(()),
        }
    }

    /// Bytes of KV that a token takes in all groups; the largest number where they are more.
    pub fn token_bytes(&self) -> usize {
        self.block_bytes().saturating_mul(self.groups.count()) / (self.block_tokens as usize).max(1)
    }

    /// Blocks of a group that hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens as usize)
    }

    /// Which blocks of a sequence are kept.
    pub fn kept(&self) -> Kept {
        Kept::new(self.groups, self.block_tokens as usize)
    }
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} layers x {} kv heads x {} dims{}, {} tokens a block, {}",
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            if self.latent { " (latent)" } else { "" },
            self.block_tokens,
            self.dtype.as_str()
        )?;
        if self.groups == Groups::ONE {
            return Ok(());
        }
        write!(f, ", {}", self.groups)
    }
}

/// What identifies the function from tokens to logits that a node computes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub struct ModelIdentity {
    /// Architecture word of the model file, for example `llama`.
    pub architecture: String,
    /// Size of the vocabulary, in tokens.
    pub vocab_size: u32,
    /// Hash of the tokenizer (vocabulary and merges) that belongs to the weights.
    pub tokenizer_hash: u64,
    /// Hash of all weight bytes and shapes.
    pub weights_hash: u128,
    /// Arithmetic of the node: compute mode and CPU feature level (for example `quantised-3/avx512-vnni/f16`). Nodes that
    /// would round differently must not serve one request together.
    pub numerics: String,
    /// The adapters it can be served with, by name.
    pub adapters: Vec<AdapterIdentity>,
}

/// A low-rank adapter of a model.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub struct AdapterIdentity {
    /// The name that requests use.
    pub name: String,
    /// Hash of all its numbers, shapes and scales. KV depends on it as on the tokens.
    pub hash: u64,
}

impl fmt::Display for AdapterIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:016x}", self.name, self.hash)
    }
}

impl ModelIdentity {
    /// The adapter of this name, with its place in the list.
    pub fn adapter(&self, name: &str) -> Option<(usize, &AdapterIdentity)> {
        self.adapters
            .iter()
            .enumerate()
            .find(|(_, adapter)| adapter.name == name)
    }

    /// What the KV of a sequence depends on beside its tokens: the hash of the adapter of this name, 0 without one. `None`
    /// if the model has no adapter of this name.
    pub fn cache_key(&self, adapter: Option<&str>) -> Option<u64> {
        match adapter {
            Some(name) => self.adapter(name).map(|(_, adapter)| adapter.hash),
            None => Some(0),
        }
    }
}

/// Hash over a [`ModelIdentity`] and a [`KvLayout`]: equal on all nodes of a cluster.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Encode, Decode)]
pub struct Fingerprint(pub u128);

impl Fingerprint {
    /// Fingerprint of a model served with a layout.
    pub fn new(model: &ModelIdentity, layout: &KvLayout) -> Self {
        Self(xxh3_128(format!("{model:?}|{layout:?}").as_bytes()))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

/// Says in words how two (model, layout) pairs differ; empty if they do not.
pub fn differences(ours: (&ModelIdentity, &KvLayout), theirs: (&ModelIdentity, &KvLayout)) -> Vec<String> {
    let mut out = Vec::new();
    let mut differ = |what: &str, a: &dyn fmt::Display, b: &dyn fmt::Display| {
        let (a, b) = (a.to_string(), b.to_string());
        if a != b {
            out.push(format!("{what}: cluster has {a}, node has {b}"));
        }
    };
    let ((m, l), (n, k)) = (ours, theirs);
    differ("architecture", &m.architecture, &n.architecture);
    differ("vocabulary size", &m.vocab_size, &n.vocab_size);
    differ(
        "tokenizer hash",
        &format_args!("{:016x}", m.tokenizer_hash),
        &format_args!("{:016x}", n.tokenizer_hash),
    );
    differ(
        "weights hash",
        &format_args!("{:032x}", m.weights_hash),
        &format_args!("{:032x}", n.weights_hash),
    );
    differ("numerics", &m.numerics, &n.numerics);
    let adapters = |of: &ModelIdentity| match of.adapters.iter().map(ToString::to_string).collect::<Vec<_>>() {
        none if none.is_empty() => "none".to_owned(),
        some => some.join(", "),
    };
    differ("adapters", &adapters(m), &adapters(n));
    differ("KV layout", l, k);
    out
}
