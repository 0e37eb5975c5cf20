//! What the tensors of a decoder are called in the two file formats.

use std::ops::Range;

use crate::arch::{ArchConfig, ExpertNames};

/// A tensor of the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tensor {
    /// Token embeddings.
    Embedding,
    /// Weights of the norm before the output matrix.
    OutputNorm,
    /// Output matrix.
    Head,
    /// Weights of a layer's norm.
    Norm(usize, NormPart),
    /// The matrix of one of a layer's projections.
    Weight(usize, Part),
    /// Its bias.
    Bias(usize, Part),
    /// The matrix of latent attention.
    Latent(usize, LatentPart),
    /// The matrix that scores experts.
    Router(usize, ExpertNames),
    /// What is added to the scores where experts are chosen.
    RouterBias(usize),
    /// A matrix of an expert.
    Expert(usize, usize, Part, ExpertNames),
    /// A matrix of what all tokens go through beside experts.
    SharedExpert(usize, Part),
}

/// A norm of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormPart {
    /// Before attention.
    Attention,
    /// After attention.
    AttentionOut,
    /// Before the feed-forward network, where attention has none after it.
    Ffn,
    /// Before the feed-forward network, where attention has one after it.
    FfnIn,
    /// After the feed-forward network.
    FfnOut,
    /// Of queries.
    Query,
    /// Of keys.
    Key,
    /// Of the vector that latent attention makes queries of.
    LatentQuery,
    /// Of the vector that latent attention makes keys and values of.
    LatentKv,
}

/// A matrix of latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LatentPart {
    /// From the hidden state to the queries' latent vector.
    QueryDown,
    /// From there to the queries.
    QueryUp,
    /// From the hidden state to the queries, where they have no latent vector.
    Query,
    /// From the hidden state to the latent vector of keys and values, and the rotated part of the key.
    KvDown,
    /// From the latent vector to each head's key and value.
    KvUp,
    /// The keys' part of it, each head's transposed.
    KeyUp,
    /// The values' part of it.
    ValueUp,
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

/// Where a matrix is: in some rows of a tensor, whose first dimensions (all but the last) are counted as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) name: String,
    /// The tensor's shape, but for the last dimension.
    pub(crate) outer: Vec<usize>,
    pub(crate) rows: Range<usize>,
}

impl Naming {
    /// The tensor's name in a file.
    pub(crate) fn name(self, tensor: Tensor) -> String {
        match self {
            Self::Gguf => gguf(tensor),
            Self::HuggingFace => hugging_face(tensor),
        }
    }

    /// Where a matrix of `n` rows is: most have a tensor of their own, but some files keep several in one.
    pub(crate) fn place(self, arch: &ArchConfig, tensor: Tensor, n: usize) -> Place {
        let part = |name: String, outer: Vec<usize>, first: usize| Place {
            name,
            outer,
            rows: first..first.saturating_add(n),
        };
        match (self, tensor) {
            (_, Tensor::Weight(layer, which @ (Part::Query | Part::Key | Part::Value))) if arch.fused => {
                let (heads, kv) = (arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim);
                let first = match which {
                    Part::Query => 0,
                    Part::Key => heads,
                    _ => heads + kv,
                };
                let name = match self {
                    Self::Gguf => format!("blk.{layer}.attn_qkv.weight"),
                    Self::HuggingFace => format!("model.layers.{layer}.self_attn.qkv_proj.weight"),
                };
                part(name, vec![heads + 2 * kv], first)
            }
            (_, Tensor::Weight(layer, which @ (Part::Gate | Part::Up))) if arch.fused => {
                let name = match self {
                    Self::Gguf => format!("blk.{layer}.ffn_up.weight"),
                    Self::HuggingFace => format!("model.layers.{layer}.mlp.gate_up_proj.weight"),
                };
                part(name, vec![2 * n], if which == Part::Up { n } else { 0 })
            }
            (Self::Gguf, Tensor::Expert(_, expert, ..)) => {
                let experts = arch.experts.as_ref().map_or(0, |experts| experts.count);
                part(self.name(tensor), vec![experts, n], expert * n)
            }
            _ => part(self.name(tensor), vec![n], 0),
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
    let norm = |norm| match norm {
        NormPart::Attention => "attn_norm",
        NormPart::AttentionOut => "post_attention_norm",
        NormPart::Ffn | NormPart::FfnIn => "ffn_norm",
        NormPart::FfnOut => "post_ffw_norm",
        NormPart::Query => "attn_q_norm",
        NormPart::Key => "attn_k_norm",
        NormPart::LatentQuery => "attn_q_a_norm",
        NormPart::LatentKv => "attn_kv_a_norm",
    };
    let latent = |part| match part {
        LatentPart::QueryDown => "attn_q_a",
        LatentPart::QueryUp => "attn_q_b",
        LatentPart::Query => "attn_q",
        LatentPart::KvDown => "attn_kv_a_mqa",
        LatentPart::KvUp => "attn_kv_b",
        LatentPart::KeyUp => "attn_k_b",
        LatentPart::ValueUp => "attn_v_b",
    };
    match tensor {
        Tensor::Embedding => "token_embd.weight".to_owned(),
        Tensor::OutputNorm => "output_norm.weight".to_owned(),
        Tensor::Head => "output.weight".to_owned(),
        Tensor::Norm(layer, n) => format!("blk.{layer}.{}.weight", norm(n)),
        Tensor::Weight(layer, p) => format!("blk.{layer}.{}.weight", part(p)),
        Tensor::Bias(layer, p) => format!("blk.{layer}.{}.bias", part(p)),
        Tensor::Latent(layer, p) => format!("blk.{layer}.{}.weight", latent(p)),
        Tensor::Router(layer, _) => format!("blk.{layer}.ffn_gate_inp.weight"),
        Tensor::RouterBias(layer) => format!("blk.{layer}.exp_probs_b.bias"),
        Tensor::Expert(layer, _, p, _) => format!("blk.{layer}.{}_exps.weight", part(p)),
        Tensor::SharedExpert(layer, p) => format!("blk.{layer}.{}_shexp.weight", part(p)),
    }
}

fn hugging_face(tensor: Tensor) -> String {
    let matrix = |part| match part {
        Part::Query => "q_proj",
        Part::Key => "k_proj",
        Part::Value => "v_proj",
        Part::Output => "o_proj",
        Part::Gate => "gate_proj",
        Part::Up => "up_proj",
        Part::Down => "down_proj",
    };
    let part = |part: Part| match part {
        Part::Query | Part::Key | Part::Value | Part::Output => format!("self_attn.{}", matrix(part)),
        Part::Gate | Part::Up | Part::Down => format!("mlp.{}", matrix(part)),
    };
    let norm = |norm| match norm {
        NormPart::Attention => "input_layernorm",
        NormPart::AttentionOut | NormPart::Ffn => "post_attention_layernorm",
        NormPart::FfnIn => "pre_feedforward_layernorm",
        NormPart::FfnOut => "post_feedforward_layernorm",
        NormPart::Query => "self_attn.q_norm",
        NormPart::Key => "self_attn.k_norm",
        NormPart::LatentQuery => "self_attn.q_a_layernorm",
        NormPart::LatentKv => "self_attn.kv_a_layernorm",
    };
    let latent = |part| match part {
        LatentPart::QueryDown => "q_a_proj",
        LatentPart::QueryUp => "q_b_proj",
        LatentPart::Query => "q_proj",
        LatentPart::KvDown => "kv_a_proj_with_mqa",
        LatentPart::KvUp => "kv_b_proj",
        LatentPart::KeyUp => "k_b_proj",
        LatentPart::ValueUp => "v_b_proj",
    };
    let mixtral = |part| match part {
        Part::Gate => "w1",
        Part::Down => "w2",
        _ => "w3",
    };
    let of_layer = |layer: usize, rest: String| format!("model.layers.{layer}.{rest}");
    match tensor {
        Tensor::Embedding => "model.embed_tokens.weight".to_owned(),
        Tensor::OutputNorm => "model.norm.weight".to_owned(),
        Tensor::Head => "lm_head.weight".to_owned(),
        Tensor::Norm(layer, n) => of_layer(layer, format!("{}.weight", norm(n))),
        Tensor::Weight(layer, p) => of_layer(layer, format!("{}.weight", part(p))),
        Tensor::Bias(layer, p) => of_layer(layer, format!("{}.bias", part(p))),
        Tensor::Latent(layer, p) => of_layer(layer, format!("self_attn.{}.weight", latent(p))),
        Tensor::Router(layer, ExpertNames::Mlp) => of_layer(layer, "mlp.gate.weight".to_owned()),
        Tensor::Router(layer, ExpertNames::BlockSparse) => of_layer(layer, "block_sparse_moe.gate.weight".to_owned()),
        Tensor::RouterBias(layer) => of_layer(layer, "mlp.gate.e_score_correction_bias".to_owned()),
        Tensor::Expert(layer, expert, p, ExpertNames::Mlp) => {
            of_layer(layer, format!("mlp.experts.{expert}.{}.weight", matrix(p)))
        }
        Tensor::Expert(layer, expert, p, ExpertNames::BlockSparse) => of_layer(
            layer,
            format!("block_sparse_moe.experts.{expert}.{}.weight", mixtral(p)),
        ),
        Tensor::SharedExpert(layer, p) => of_layer(layer, format!("mlp.shared_experts.{}.weight", matrix(p))),
    }
}
