//! Attention of a layer: what the rows ask, what they leave in the KV pool, and what they take from it.

use engine::plan::BlockId;
use protocol::kv::KvPlace;

use super::latent::LatentHeads;
use super::{Buffers, Decoder, Ending, Projection, input, sized};
use crate::kernels::{
    AttentionShape, Cpu, KernelError, KvShape, PagedAttention, Rows, SequenceRows, Target, products, rms_norm_in_place,
    rope,
};
use crate::kv_pool::StepAccess;
use crate::tensor_names::Part;

/// Where a layer's queries, keys and values come from.
pub(super) enum Heads {
    /// Each head has its own.
    Split(SplitHeads),
    /// All share a latent vector.
    Latent(LatentHeads),
}

/// A projection each for queries, keys and values.
pub(super) struct SplitHeads {
    pub(super) query: Projection,
    pub(super) key: Projection,
    pub(super) value: Projection,
    /// As long as a head, or as all heads.
    pub(super) query_norm: Option<Vec<f32>>,
    pub(super) key_norm: Option<Vec<f32>>,
}

impl Decoder {
    /// Query, key and value of all rows, rotated.
    pub(super) fn project(&self, index: usize, rows: usize, b: &mut Buffers) -> Result<(), KernelError> {
        match &self.layers[index].heads {
            Heads::Split(heads) => self.project_split(index, heads, rows, b),
            Heads::Latent(heads) => self.project_latent(index, heads, rows, b),
        }
    }

    fn project_split(&self, index: usize, heads: &SplitHeads, rows: usize, b: &mut Buffers) -> Result<(), KernelError> {
        let (config, cpu, layer) = (&self.config, &self.cpu, &self.layers[index]);
        let width = config.num_heads * config.head_dim;
        let x = &b.x[..rows * config.hidden_size];
        let norm = input(x, layer.attention_norm.as_ref(), config.norm_eps);
        let (q, k, v) = (&heads.query.linear, &heads.key.linear, &heads.value.linear);
        b.operand.prepare(cpu, norm, &[q, k, v])?;
        let query = sized(&mut b.query, rows * width);
        let key = sized(&mut b.key, rows * self.kv_width());
        let value = sized(&mut b.value, rows * self.kv_width());
        let targets = [
            (q, Target::Store(&mut *query)),
            (k, Target::Store(&mut *key)),
            (v, Target::Store(&mut *value)),
        ];
        products(cpu, &b.operand, targets)?;
        heads.query.add_bias(cpu, query)?;
        heads.key.add_bias(cpu, key)?;
        heads.value.add_bias(cpu, value)?;
        let targets = [(Part::Query, &mut *query), (Part::Key, &mut *key), (Part::Value, value)];
        b.adapted.add(cpu, &self.adapters, index, norm, targets)?;
        for (x, norm) in [(&mut *query, &heads.query_norm), (&mut *key, &heads.key_norm)] {
            if let Some(weight) = norm {
                rms_norm_in_place(cpu, x, weight, config.norm_eps)?;
            }
        }
        let table = &self.ropes[layer.rope];
        rope(cpu, table, config.rope_style, query, config.head_dim, &b.positions)?;
        rope(cpu, table, config.rope_style, key, config.head_dim, &b.positions)
    }

    /// Attention of the rows in `query`, and its output projection, added to the residual stream.
    pub(super) fn attend(
        &self,
        index: usize,
        sequences: &[SequenceRows<'_>],
        rows: usize,
        access: &StepAccess<'_>,
        b: &mut Buffers,
    ) -> Result<(), KernelError> {
        let (config, layer) = (&self.config, &self.layers[index]);
        let shape = AttentionShape {
            kv: KvShape::from(access.pool().layout()),
            num_heads: config.num_heads,
            scale: config.attention_scale,
            window: layer.window,
            cap: config.attention_cap,
        };
        let width = config.num_heads * config.head_dim;
        let mut buffer = std::mem::take(&mut b.attended);
        let attended = sized(&mut buffer, rows * width);
        let place = layer.place;
        let attention = PagedAttention {
            shape: &shape,
            group: place.group as usize,
            sequences,
            kv: &|block: BlockId| access.block(place.layer, block),
        };
        attention.run(&self.cpu, &b.query[..rows * width], attended, &mut b.kernels)?;
        let ending = Ending {
            layer: index,
            part: Part::Output,
            projection: &layer.output,
            norm: layer.attention_out_norm.as_deref(),
        };
        let ended = match &layer.heads {
            Heads::Split(_) => self.end_sublayer(&ending, Rows::Plain(attended), rows, b),
            Heads::Latent(heads) => {
                let mut values = std::mem::take(&mut b.latent.values);
                let expanded = self.expand(heads, attended, rows, &mut b.latent, &mut values);
                let ended = expanded.and_then(|values| self.end_sublayer(&ending, Rows::Plain(values), rows, b));
                b.latent.values = values;
                ended
            }
        };
        b.attended = buffer;
        ended
    }
}

/// Writes the K and V of all rows into the pool.
pub(super) fn store(
    cpu: &Cpu,
    access: &mut StepAccess<'_>,
    place: KvPlace,
    sequences: &[SequenceRows<'_>],
    b: &Buffers,
    width: usize,
) {
    let layout = access.pool().layout();
    let (block_tokens, latent) = (layout.block_tokens as usize, layout.latent);
    let group = place.group as usize;
    for (i, s) in sequences.iter().enumerate() {
        // A decoding sequence writes one slot of a block that is in no cache.
        if let Some(next) = sequences.get(i + 2).filter(|next| next.rows.len() == 1) {
            let (block, slot) = (next.first_position / block_tokens, next.first_position % block_tokens);
            let block = next.blocks.of(group).get(block).unwrap_or(BlockId::NONE);
            access.expect_write(cpu, place.layer, block, slot);
        }
        let numbers = s.rows.start * width..s.rows.end * width;
        let values = if latent { &[] } else { &b.value[numbers.clone()] };
        let rows = (&b.key[numbers], values);
        access.write_rows(cpu, place.layer, (s.blocks.of(group), s.first_position), rows);
    }
}
