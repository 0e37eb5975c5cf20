//! Takes a layer's weights out of a file.

use protocol::kv::KvPlace;

use super::attention::{Heads, SplitHeads};
use super::experts::Sparse;
use super::ffn::Dense;
use super::latent::LatentHeads;
use super::{Ffn, Layer, Projection};
use crate::arch::{ArchConfig, Norms, QkNorm};
use crate::tensor_names::{NormPart, Part, Tensor};
use crate::weights::{WeightError, WeightLoader};

impl Layer {
    pub(super) fn load(
        config: &ArchConfig,
        (layer, place): (usize, KvPlace),
        loader: &mut WeightLoader<'_>,
    ) -> Result<Self, WeightError> {
        let heads = match &config.latent {
            Some(latent) => Heads::Latent(LatentHeads::load(config, latent, layer, loader)?),
            None => Heads::Split(SplitHeads::load(config, layer, loader)?),
        };
        let output = projection(config, (layer, Part::Output), config.output_bias, loader)?;
        let ffn = if config.is_sparse(layer) {
            Ffn::Sparse(Sparse::load(config, layer, loader)?)
        } else {
            Ffn::Dense(Dense::load(config, layer, loader)?)
        };
        let mut norm = |part, there: bool| {
            there
                .then(|| loader.norm(Tensor::Norm(layer, part), config.hidden_size))
                .transpose()
        };
        let (before, after) = (config.norms != Norms::After, config.norms != Norms::Before);
        let ffn_norm = if after { NormPart::FfnIn } else { NormPart::Ffn };
        let window = config.windows.get(layer).copied().flatten();
        Ok(Self {
            rope: usize::from(window.is_some() && config.local_rope.is_some()),
            window,
            place,
            heads,
            output,
            ffn,
            attention_norm: norm(NormPart::Attention, before)?,
            attention_out_norm: norm(NormPart::AttentionOut, after)?,
            ffn_norm: norm(ffn_norm, before)?,
            ffn_out_norm: norm(NormPart::FfnOut, after)?,
        })
    }
}

/// One of a layer's projections.
fn projection(
    config: &ArchConfig,
    (layer, part): (usize, Part),
    bias: bool,
    loader: &mut WeightLoader<'_>,
) -> Result<Projection, WeightError> {
    let (n, k) = config.matrix_shape(part);
    Ok(Projection {
        linear: loader.matrix(Tensor::Weight(layer, part), n, k)?,
        bias: bias.then(|| loader.vector(Tensor::Bias(layer, part), n)).transpose()?,
    })
}

impl SplitHeads {
    fn load(config: &ArchConfig, layer: usize, loader: &mut WeightLoader<'_>) -> Result<Self, WeightError> {
        let mut one = |part| projection(config, (layer, part), config.qkv_bias, loader);
        let (query, key, value) = (one(Part::Query)?, one(Part::Key)?, one(Part::Value)?);
        let width = |heads: usize| match config.qk_norm {
            QkNorm::None => None,
            QkNorm::Heads => Some(config.head_dim),
            QkNorm::Whole => Some(heads * config.head_dim),
        };
        let mut norm = |part, heads| {
            let width: Option<usize> = width(heads);
            width
                .map(|width| loader.norm(Tensor::Norm(layer, part), width))
                .transpose()
        };
        Ok(Self {
            query,
            key,
            value,
            query_norm: norm(NormPart::Query, config.num_heads)?,
            key_norm: norm(NormPart::Key, config.num_kv_heads)?,
        })
    }
}

impl Dense {
    fn load(config: &ArchConfig, layer: usize, loader: &mut WeightLoader<'_>) -> Result<Self, WeightError> {
        let mut one = |part| projection(config, (layer, part), config.ffn_bias, loader);
        Ok(Self {
            gate: one(Part::Gate)?,
            up: one(Part::Up)?,
            down: one(Part::Down)?,
        })
    }

    /// A network without biases of its own width, whose matrices have these names.
    fn of_width(
        (hidden, width): (usize, usize),
        name: impl Fn(Part) -> Tensor,
        loader: &mut WeightLoader<'_>,
    ) -> Result<Self, WeightError> {
        let mut one = |part, n, k| -> Result<Projection, WeightError> {
            Ok(Projection {
                linear: loader.matrix(name(part), n, k)?,
                bias: None,
            })
        };
        Ok(Self {
            gate: one(Part::Gate, width, hidden)?,
            up: one(Part::Up, width, hidden)?,
            down: one(Part::Down, hidden, width)?,
        })
    }
}

impl Sparse {
    fn load(config: &ArchConfig, layer: usize, loader: &mut WeightLoader<'_>) -> Result<Self, WeightError> {
        let hidden = config.hidden_size;
        let Some(shape) = &config.experts else {
            return Ok(Self::default());
        };
        let router = loader.matrix(Tensor::Router(layer, shape.names), shape.count, hidden)?;
        let bias = shape.choice_bias;
        let choice_bias = bias
            .then(|| loader.vector(Tensor::RouterBias(layer), shape.count))
            .transpose()?;
        let experts = (0..shape.count)
            .map(|expert| {
                let name = |part| Tensor::Expert(layer, expert, part, shape.names);
                Dense::of_width((hidden, shape.ffn_size), name, loader)
            })
            .collect::<Result<_, _>>()?;
        let shared = match shape.shared_ffn_size {
            0 => None,
            width => {
                let name = |part| Tensor::SharedExpert(layer, part);
                Some(Dense::of_width((hidden, width), name, loader)?)
            }
        };
        Ok(Self {
            router: Some(router),
            choice_bias,
            experts,
            shared,
        })
    }
}
