//! Multi-head latent attention (DeepSeek V2): all keys and values of a position are made from one vector, and that vector is
//! what the KV pool holds, together with the rotated part of the key that all heads share.
//!
//! A head's key is U c, its value V c, with the latent vector c. So q (U c) = (q U) c, and sum over j of p_j (V c_j) =
//! V (sum over j of p_j c_j): queries go down to the latent space instead of keys coming up, and values come up once a row.
//! What meets in attention is \[rotated, latent\], as wide for queries as for keys, with one KV head. The products of each
//! head are f32, in the order of k.

use super::{Buffers, Decoder, input, sized};
use crate::arch::{ArchConfig, Latent};
use crate::kernels::{Cpu, KernelError, Linear, Operand, Rows, Target, products, rms_norm_in_place, rope};
use crate::tensor_names::{LatentPart, NormPart, Tensor};
use crate::weights::{WeightError, WeightLoader};

/// The weights of a layer's latent attention, but for the output projection.
pub(super) struct LatentHeads {
    shape: Latent,
    /// From the hidden state to the queries' latent vector, and its norm.
    query_down: Option<(Linear, Vec<f32>)>,
    /// From there, or from the hidden state, to all heads' queries: \[head\]\[plain, rotated\].
    query: Linear,
    /// From the hidden state to \[latent, rotated\].
    kv_down: Linear,
    kv_norm: Vec<f32>,
    /// By head: U, transposed.
    key_up: Vec<Linear>,
    /// By head: V.
    value_up: Vec<Linear>,
}

/// Buffers, reused from step to step.
#[derive(Default)]
pub(super) struct LatentBuffers {
    down: Vec<f32>,
    query: Vec<f32>,
    latent: Vec<f32>,
    gathered: Vec<f32>,
    product: Vec<f32>,
    /// All heads' values.
    pub(super) values: Vec<f32>,
    operand: Operand,
}

impl LatentHeads {
    pub(super) fn load(
        config: &ArchConfig,
        shape: &Latent,
        layer: usize,
        loader: &mut WeightLoader<'_>,
    ) -> Result<Self, WeightError> {
        let (hidden, heads) = (config.hidden_size, config.num_heads);
        let of = |part| Tensor::Latent(layer, part);
        let wide = heads * (shape.plain_dim + shape.rope_dim);
        let (query_down, query) = match shape.query_rank {
            0 => (None, loader.matrix(of(LatentPart::Query), wide, hidden)?),
            rank => {
                let down = loader.matrix(of(LatentPart::QueryDown), rank, hidden)?;
                let norm = loader.norm(Tensor::Norm(layer, NormPart::LatentQuery), rank)?;
                (Some((down, norm)), loader.matrix(of(LatentPart::QueryUp), wide, rank)?)
            }
        };
        let (key_up, value_up) = ups(shape, heads, layer, loader)?;
        Ok(Self {
            shape: *shape,
            query_down,
            query,
            kv_down: loader.matrix(of(LatentPart::KvDown), shape.kv_rank + shape.rope_dim, hidden)?,
            kv_norm: loader.norm(Tensor::Norm(layer, NormPart::LatentKv), shape.kv_rank)?,
            key_up,
            value_up,
        })
    }

    pub(super) fn linears(&self) -> Vec<&Linear> {
        let mut all = vec![&self.query, &self.kv_down];
        all.extend(self.query_down.iter().map(|(down, _)| down));
        all.extend(self.key_up.iter().chain(&self.value_up));
        all
    }

    pub(super) fn norms(&self) -> impl Iterator<Item = &Vec<f32>> {
        self.query_down.iter().map(|(_, norm)| norm).chain([&self.kv_norm])
    }
}

/// Each head's U, transposed, and V: of one tensor or of two.
fn ups(
    shape: &Latent,
    heads: usize,
    layer: usize,
    loader: &mut WeightLoader<'_>,
) -> Result<(Vec<Linear>, Vec<Linear>), WeightError> {
    let (rank, plain, value) = (shape.kv_rank, shape.plain_dim, shape.value_dim);
    let of = |part| Tensor::Latent(layer, part);
    let name = of(LatentPart::KvUp);
    let pack = |n, k, numbers: &[f32]| loader_error(name, Linear::from_f32(n, k, numbers));
    let (mut key_up, mut value_up) = (Vec::new(), Vec::new());
    if loader.has(of(LatentPart::KeyUp))? {
        // Files with two tensors have the first one transposed.
        let keys = loader.floats(of(LatentPart::KeyUp), &[heads, rank], plain)?;
        let values = loader.floats(of(LatentPart::ValueUp), &[heads, value], rank)?;
        for (keys, values) in keys.chunks_exact(rank * plain).zip(values.chunks_exact(value * rank)) {
            key_up.push(pack(rank, plain, keys)?);
            value_up.push(pack(value, rank, values)?);
        }
        return Ok((key_up, value_up));
    }
    let both = loader.floats(name, &[heads * (plain + value)], rank)?;
    let mut transposed = vec![0.0; rank * plain];
    for head in both.chunks_exact((plain + value) * rank) {
        let (keys, values) = head.split_at(plain * rank);
        for (i, row) in keys.chunks_exact(rank).enumerate() {
            for (j, &number) in row.iter().enumerate() {
                transposed[j * plain + i] = number;
            }
        }
        key_up.push(pack(rank, plain, &transposed)?);
        value_up.push(pack(value, rank, values)?);
    }
    Ok((key_up, value_up))
}

fn loader_error(tensor: Tensor, packed: Result<Linear, KernelError>) -> Result<Linear, WeightError> {
    packed.map_err(|source| WeightError::Kernel {
        name: format!("{tensor:?}"),
        source,
    })
}

/// Copies a piece of each row: from `from`, in rows of `from_row`, to `to`, in rows of `to_row`.
fn copy_pieces(width: usize, (from, from_row): (&[f32], usize), (to, to_row): (&mut [f32], usize)) {
    for (from, to) in from.chunks(from_row).zip(to.chunks_mut(to_row)) {
        to[..width].copy_from_slice(&from[..width]);
    }
}

/// `out`\[row\] = W `x`\[row\] for pieces of rows: `n` numbers out of each row of `to`, `k` of each row of `from`.
fn product_of_pieces(
    cpu: &Cpu,
    linear: &Linear,
    rows: usize,
    (from, from_row): (&[f32], usize),
    (to, to_row): (&mut [f32], usize),
    b: (&mut Vec<f32>, &mut Vec<f32>, &mut Operand),
) -> Result<(), KernelError> {
    let (gathered, product, operand) = b;
    let gathered = sized(gathered, rows * linear.k());
    copy_pieces(linear.k(), (from, from_row), (&mut *gathered, linear.k()));
    operand.prepare(cpu, Rows::Plain(gathered), &[linear])?;
    let product = sized(product, rows * linear.n());
    products(cpu, operand, [(linear, Target::Store(&mut *product))])?;
    copy_pieces(linear.n(), (product, linear.n()), (to, to_row));
    Ok(())
}

impl Decoder {
    /// Queries of all rows in the latent space, and what the KV pool gets of them, rotated.
    pub(super) fn project_latent(
        &self,
        index: usize,
        heads: &LatentHeads,
        rows: usize,
        b: &mut Buffers,
    ) -> Result<(), KernelError> {
        let (config, cpu, layer, shape) = (&self.config, &self.cpu, &self.layers[index], &heads.shape);
        let x = &b.x[..rows * config.hidden_size];
        let norm = input(x, layer.attention_norm.as_ref(), config.norm_eps);
        let l = &mut b.latent;
        let down = sized(&mut l.down, rows * heads.kv_down.n());
        let query = sized(&mut l.query, rows * heads.query.n());
        match &heads.query_down {
            None => {
                b.operand.prepare(cpu, norm, &[&heads.query, &heads.kv_down])?;
                let targets = [
                    (&heads.query, Target::Store(&mut *query)),
                    (&heads.kv_down, Target::Store(&mut *down)),
                ];
                products(cpu, &b.operand, targets)?;
            }
            Some((query_down, weight)) => {
                b.operand.prepare(cpu, norm, &[query_down, &heads.kv_down])?;
                let latent = sized(&mut l.latent, rows * query_down.n());
                let targets = [
                    (query_down, Target::Store(&mut *latent)),
                    (&heads.kv_down, Target::Store(&mut *down)),
                ];
                products(cpu, &b.operand, targets)?;
                rms_norm_in_place(cpu, latent, weight, config.norm_eps)?;
                b.operand.prepare(cpu, Rows::Plain(latent), &[&heads.query])?;
                products(cpu, &b.operand, [(&heads.query, Target::Store(&mut *query))])?;
            }
        }
        // The pool's vector: the rotated part first, then the latent one, normed.
        let (rank, turned) = (shape.kv_rank, shape.rope_dim);
        let latent = sized(&mut l.gathered, rows * rank);
        copy_pieces(rank, (down, rank + turned), (&mut *latent, rank));
        rms_norm_in_place(cpu, latent, &heads.kv_norm, config.norm_eps)?;
        let key = sized(&mut b.key, rows * (turned + rank));
        copy_pieces(turned, (&down[rank..], rank + turned), (&mut *key, turned + rank));
        copy_pieces(rank, (latent, rank), (&mut key[turned..], turned + rank));
        // Queries likewise, each head's plain part brought down.
        let (from_row, to_row) = (heads.query.n(), config.num_heads * config.head_dim);
        let to = sized(&mut b.query, rows * to_row);
        for (head, up) in heads.key_up.iter().enumerate() {
            let from = &query[head * (shape.plain_dim + turned)..];
            let at = head * config.head_dim;
            copy_pieces(turned, (&from[shape.plain_dim..], from_row), (&mut to[at..], to_row));
            let buffers = (&mut l.gathered, &mut l.product, &mut l.operand);
            let to = (&mut to[at + turned..], to_row);
            product_of_pieces(cpu, up, rows, (from, from_row), to, buffers)?;
        }
        let table = &self.ropes[layer.rope];
        rope(cpu, table, config.rope_style, to, config.head_dim, &b.positions)?;
        rope(cpu, table, config.rope_style, key, config.head_dim, &b.positions)
    }

    /// All heads' values, \[rows\]\[heads\]\[dim\], of what attention gave in the latent space.
    pub(super) fn expand<'a>(
        &self,
        heads: &LatentHeads,
        attended: &[f32],
        rows: usize,
        l: &mut LatentBuffers,
        values: &'a mut Vec<f32>,
    ) -> Result<&'a [f32], KernelError> {
        let (config, shape) = (&self.config, &heads.shape);
        let (from_row, to_row) = (config.num_heads * config.head_dim, config.num_heads * shape.value_dim);
        let values = sized(values, rows * to_row);
        for (head, up) in heads.value_up.iter().enumerate() {
            let from = (&attended[head * config.head_dim + shape.rope_dim..], from_row);
            let to = (&mut values[head * shape.value_dim..], to_row);
            let buffers = (&mut l.gathered, &mut l.product, &mut l.operand);
            product_of_pieces(&self.cpu, up, rows, from, to, buffers)?;
        }
        Ok(values)
    }
}
