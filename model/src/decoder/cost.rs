//! Counts a decoder's work and bytes.

use super::attention::Heads;
use super::{Adapter, Decoder, Ffn, Layer, Projection};
use crate::cost::{ModelMemory, StepCost};
use crate::kernels::Linear;

impl Layer {
    /// The matrices that all rows go through.
    fn linears(&self) -> Vec<&Linear> {
        let mut all = match &self.heads {
            Heads::Split(heads) => vec![&heads.query.linear, &heads.key.linear, &heads.value.linear],
            Heads::Latent(heads) => heads.linears(),
        };
        all.push(&self.output.linear);
        match &self.ffn {
            Ffn::Dense(dense) => all.extend(dense.projections().map(|projection| &projection.linear)),
            Ffn::Sparse(sparse) => {
                all.extend(&sparse.router);
                let shared = sparse.shared.iter().flat_map(|shared| shared.projections());
                all.extend(shared.map(|projection| &projection.linear));
            }
        }
        all
    }

    /// The matrices of experts.
    fn experts(&self) -> impl Iterator<Item = &Linear> {
        let sparse = match &self.ffn {
            Ffn::Sparse(sparse) => Some(sparse),
            Ffn::Dense(_) => None,
        };
        let experts = sparse.into_iter().flat_map(|sparse| &sparse.experts);
        experts.flat_map(|expert| expert.projections().map(|projection| &projection.linear))
    }

    /// Norms and biases.
    fn vectors(&self) -> Vec<&Vec<f32>> {
        let norms = [
            &self.attention_norm,
            &self.attention_out_norm,
            &self.ffn_norm,
            &self.ffn_out_norm,
        ];
        let mut all: Vec<_> = norms.into_iter().flatten().collect();
        all.extend(&self.output.bias);
        match &self.heads {
            Heads::Split(heads) => {
                all.extend(heads.query_norm.iter().chain(&heads.key_norm));
                let projections = [&heads.query, &heads.key, &heads.value];
                all.extend(projections.into_iter().filter_map(|p: &Projection| p.bias.as_ref()));
            }
            Heads::Latent(heads) => all.extend(heads.norms()),
        }
        match &self.ffn {
            Ffn::Dense(dense) => all.extend(dense.projections().into_iter().filter_map(|p| p.bias.as_ref())),
            Ffn::Sparse(sparse) => all.extend(&sparse.choice_bias),
        }
        all
    }
}

impl Decoder {
    /// What a step costs at least. `kv_bytes` is the size of one position's K and V in all layers.
    pub(crate) fn cost(&self, kv_bytes: u64) -> StepCost {
        // Each int8 pass over the input is a product of its own.
        let macs = |linear: &Linear| (linear.n() * linear.k() * linear.passes().max(1)) as u64;
        let bytes = |linear: &Linear| linear.bytes() as u64;
        let config = &self.config;
        // Of the experts, a row goes through some.
        let share = |of: u64| match &config.experts {
            Some(experts) => of / experts.count.max(1) as u64 * experts.used as u64,
            None => of,
        };
        let sum = |of: &dyn Fn(&Linear) -> u64| -> u64 {
            let all = |layer: &Layer| layer.linears().into_iter().map(of).sum::<u64>();
            let sparse: u64 = self.layers.iter().flat_map(Layer::experts).map(of).sum();
            self.layers.iter().map(all).sum::<u64>() + share(sparse)
        };
        StepCost {
            layer_macs: sum(&macs),
            head_macs: macs(&self.head),
            attention_macs: (2 * config.num_layers * config.num_heads * config.head_dim) as u64,
            layer_bytes: sum(&bytes),
            head_bytes: self.head.bytes() as u64,
            kv_bytes,
        }
    }

    /// What is kept in memory, but for the KV pool.
    pub(crate) fn memory(&self) -> ModelMemory {
        let floats = |values: &Vec<f32>| (values.len() * size_of::<f32>()) as u64;
        let layer = |layer: &Layer| -> (u64, u64) {
            let linears = layer.linears().into_iter().chain(layer.experts());
            let bytes = linears.map(|linear| linear.bytes() as u64).sum();
            (bytes, layer.vectors().into_iter().map(floats).sum())
        };
        let adapters: usize = self.adapters.iter().map(Adapter::bytes).sum();
        let (linears, vectors): (Vec<u64>, Vec<u64>) = self.layers.iter().map(layer).unzip();
        let ropes: usize = self.ropes.iter().map(|rope| rope.bytes()).sum();
        ModelMemory {
            weights: linears.iter().sum::<u64>() + self.head.bytes() as u64 + adapters as u64,
            embedding: self.embedding.bytes() as u64,
            tables: vectors.iter().sum::<u64>() + floats(&self.output_norm) + ropes as u64,
            kv_pool: 0,
        }
    }
}
