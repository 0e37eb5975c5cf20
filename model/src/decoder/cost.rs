//! Counts a decoder's work and bytes.

use super::{Adapter, Decoder, Layer, Projection};
use crate::cost::{ModelMemory, StepCost};
use crate::kernels::Linear;

impl Layer {
    fn projections(&self) -> [&Projection; 7] {
        [
            &self.query,
            &self.key,
            &self.value,
            &self.output,
            &self.gate,
            &self.up,
            &self.down,
        ]
    }
}

impl Decoder {
    /// What a step costs at least. `kv_bytes` is the size of one position's K and V in all layers.
    pub(crate) fn cost(&self, kv_bytes: u64) -> StepCost {
        let linears = || {
            let projections = self.layers.iter().flat_map(Layer::projections);
            projections.map(|projection| &projection.linear)
        };
        // Each int8 pass over the input is a product of its own.
        let macs = |linear: &Linear| (linear.n() * linear.k() * linear.passes().max(1)) as u64;
        let config = &self.config;
        StepCost {
            layer_macs: linears().map(macs).sum(),
            head_macs: macs(&self.head),
            attention_macs: (2 * config.num_layers * config.num_heads * config.head_dim) as u64,
            layer_bytes: linears().map(|linear| linear.bytes() as u64).sum(),
            head_bytes: self.head.bytes() as u64,
            kv_bytes,
        }
    }

    /// What is kept in memory, but for the KV pool.
    pub(crate) fn memory(&self) -> ModelMemory {
        let cost = self.cost(0);
        let floats = |values: &Vec<f32>| (values.len() * size_of::<f32>()) as u64;
        let layer = |layer: &Layer| {
            let biases = layer.projections().into_iter().filter_map(|p| p.bias.as_ref());
            floats(&layer.attention_norm) + floats(&layer.ffn_norm) + biases.map(floats).sum::<u64>()
        };
        let adapters: usize = self.adapters.iter().map(Adapter::bytes).sum();
        let vectors: u64 = self.layers.iter().map(layer).sum();
        ModelMemory {
            weights: cost.layer_bytes + cost.head_bytes + adapters as u64,
            embedding: self.embedding.bytes() as u64,
            tables: vectors + floats(&self.output_norm) + self.rope.bytes() as u64,
            kv_pool: 0,
        }
    }
}
