//! What the tensors of a decoder are called in the two file formats.

/// A tensor of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tensor {
    /// Token embeddings.
    Embedding,
    /// Weights of the norm before the output matrix.
    OutputNorm,
    /// Output matrix.
    Head,
    /// Weights of the norm before a layer's attention.
    AttentionNorm(usize),
    /// Weights of the norm before a layer's feed-forward network.
    FfnNorm(usize),
    /// The matrix of one of a layer's projections.
    Weight(usize, Part),
    /// Its bias.
    Bias(usize, Part),
}

/// A projection of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Query,
    Key,
    Value,
    Output,
    Gate,
    Up,
    Down,
}

/// A file format's way of naming tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Naming {
    Gguf,
    HuggingFace,
}

impl Part {
    /// All of them, in the order of their numbers.
    pub(crate) const ALL: [Self; 7] = [
        Self::Query,
        Self::Key,
        Self::Value,
        Self::Output,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];
}

impl Naming {
    /// The tensor's name in a file.
    pub(crate) fn name(self, tensor: Tensor) -> String {
        match self {
            Self::Gguf => gguf(tensor),
            Self::HuggingFace => hugging_face(tensor),
        }
    }
}

fn gguf(tensor: Tensor) -> String {
    let part = |part| match part {
        Part::Query => "attn_q",
        Part::Key => "attn_k",
        Part::Value => "attn_v",
        Part::Output => "attn_output",
        Part::Gate => "ffn_gate",
        Part::Up => "ffn_up",
        Part::Down => "ffn_down",
    };
    match tensor {
        Tensor::Embedding => "token_embd.weight".to_owned(),
        Tensor::OutputNorm => "output_norm.weight".to_owned(),
        Tensor::Head => "output.weight".to_owned(),
        Tensor::AttentionNorm(layer) => format!("blk.{layer}.attn_norm.weight"),
        Tensor::FfnNorm(layer) => format!("blk.{layer}.ffn_norm.weight"),
        Tensor::Weight(layer, p) => format!("blk.{layer}.{}.weight", part(p)),
        Tensor::Bias(layer, p) => format!("blk.{layer}.{}.bias", part(p)),
    }
}

fn hugging_face(tensor: Tensor) -> String {
    let part = |part| match part {
        Part::Query => "self_attn.q_proj",
        Part::Key => "self_attn.k_proj",
        Part::Value => "self_attn.v_proj",
        Part::Output => "self_attn.o_proj",
        Part::Gate => "mlp.gate_proj",
        Part::Up => "mlp.up_proj",
        Part::Down => "mlp.down_proj",
    };
    match tensor {
        Tensor::Embedding => "model.embed_tokens.weight".to_owned(),
        Tensor::OutputNorm => "model.norm.weight".to_owned(),
        Tensor::Head => "lm_head.weight".to_owned(),
        Tensor::AttentionNorm(layer) => format!("model.layers.{layer}.input_layernorm.weight"),
        Tensor::FfnNorm(layer) => format!("model.layers.{layer}.post_attention_layernorm.weight"),
        Tensor::Weight(layer, p) => format!("model.layers.{layer}.{}.weight", part(p)),
        Tensor::Bias(layer, p) => format!("model.layers.{layer}.{}.bias", part(p)),
    }
}
