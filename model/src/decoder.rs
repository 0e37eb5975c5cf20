//! The decoder: from the rows of a step to the hidden states that need logits.
//!
//! Every number of a row is computed in an order that depends on the row alone (see [`crate::kernels`]), and rows meet
//! only in attention, through the KV pool. So the rows of a step may be cut and mixed in any way.

use engine::plan::{BlockId, StepPlan};
use engine::runner::LayerObserver;

use crate::arch::ArchConfig;
use crate::kernels::{
    Activation, AttentionShape, Cpu, KernelError, KvShape, Linear, Operand, PagedAttention, RopeTable, Rows, Scratch,
    SequenceRows, Target, add_bias, products, rms_norm_in_place, rope,
};
use crate::kv_pool::StepAccess;
use crate::tensor_names::{Part, Tensor};
use crate::weights::{Embedding, WeightError, WeightLoader};

mod cost;
mod lora;

use lora::Adapted;
pub(crate) use lora::{Adapter, LowRank};

/// A matrix and, where the architecture has one, its bias.
struct Projection {
    linear: Linear,
    bias: Option<Vec<f32>>,
}

impl Projection {
    fn add_bias(&self, cpu: &Cpu, y: &mut [f32]) -> Result<(), KernelError> {
        self.bias.as_ref().map_or(Ok(()), |bias| add_bias(cpu, y, bias))
    }
}

struct Layer {
    attention_norm: Vec<f32>,
    query: Projection,
    key: Projection,
    value: Projection,
    output: Projection,
    ffn_norm: Vec<f32>,
    gate: Projection,
    up: Projection,
    down: Projection,
}

/// The weights of a model, packed, and what follows from its shape.
pub(crate) struct Decoder {
    pub(crate) config: ArchConfig,
    pub(crate) cpu: Cpu,
    rope: RopeTable,
    embedding: Embedding,
    layers: Vec<Layer>,
    output_norm: Vec<f32>,
    head: Linear,
    /// By number, as plans name them.
    pub(crate) adapters: Vec<Adapter>,
}

/// Buffers of a step, `[rows][width]` each, reused from step to step.
#[derive(Default)]
pub(crate) struct Buffers {
    positions: Vec<u32>,
    /// Residual stream.
    x: Vec<f32>,
    /// What is multiplied with the weights next.
    operand: Operand,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    adapted: Adapted,
    /// Empty: memory for the lists of a step's sequences.
    lists: [Vec<SequenceRows<'static>>; 2],
    kernels: Scratch,
}

/// An empty list for a step, in the memory of an empty one of another step.
#[allow(
    clippy::unnecessary_filter_map,
    reason = "`filter` would keep the elements' lifetime, which has to change"
)]
fn recycled<'a>(list: &mut Vec<SequenceRows<'_>>) -> Vec<SequenceRows<'a>> {
    let mut empty = std::mem::take(list);
    empty.clear();
    // Collecting in place keeps the memory; no element changes its lifetime, since there is none.
    empty.into_iter().filter_map(|_| None).collect()
}

/// A run of rows of one sequence whose hidden states are wanted after the last layer.
#[derive(Clone, Debug)]
pub(crate) struct WantedRows {
    /// Index into the plan's sequences.
    pub(crate) sequence: usize,
    /// First row, counted from the sequence's first.
    pub(crate) first: usize,
    /// How many rows.
    pub(crate) count: usize,
}

fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

impl Decoder {
    /// Takes the weights out of a file. `positions` is the longest sequence that will be computed.
    pub(crate) fn load(
        config: ArchConfig,
        cpu: Cpu,
        positions: usize,
        loader: &mut WeightLoader<'_>,
    ) -> Result<Self, WeightError> {
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let (embedding, tied) = loader.embedding(vocab, hidden, config.tied_head)?;
        let layers = (0..config.num_layers)
            .map(|l| Layer::load(&config, l, loader))
            .collect::<Result<_, _>>()?;
        let output_norm = loader.vector(Tensor::OutputNorm, hidden)?;
        let head = match tied {
            Some(head) => head,
            None => loader.matrix(Tensor::Head, vocab, hidden)?,
        };
        let frequencies = RopeTable::plain_frequencies(config.rope_theta, config.head_dim);
        let rope = RopeTable::new(&frequencies, positions, 1.0);
        Ok(Self {
            config,
            cpu,
            rope,
            embedding,
            layers,
            output_norm,
            head,
            adapters: Vec::new(),
        })
    }

    /// Tokens of the vocabulary.
    pub(crate) fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    /// Computes the rows of a checked plan, writes their K and V, and returns the normed hidden states of the wanted
    /// rows, `[wanted rows][hidden]`.
    pub(crate) fn forward<'b>(
        &self,
        plan: &StepPlan,
        wanted: &[WantedRows],
        access: &mut StepAccess<'_>,
        observer: &mut dyn LayerObserver,
        buffers: &'b mut Buffers,
    ) -> Result<(&'b [f32], &'b mut Scratch), KernelError> {
        let rows = plan.token_ids.len();
        self.embed(plan, buffers)?;
        let mut all = recycled(&mut buffers.lists[0]);
        all.extend(plan.sequences.iter().map(|s| SequenceRows {
            rows: s.rows.range(),
            first_position: s.start_position as usize,
            blocks: &plan.block_ids[s.blocks.range()],
        }));
        let adapters = plan.sequences.iter().map(|s| (s.adapter, s.rows.range()));
        buffers.adapted.group(adapters);
        for index in 0..self.layers.len() {
            self.project(index, rows, buffers)?;
            store(&self.cpu, access, index as u32, &all, buffers, self.kv_width());
            observer.layer_computed(index as u32);
            if index + 1 < self.layers.len() {
                self.attend(index as u32, &all, rows, access, buffers)?;
                self.finish_layer(index, rows, buffers)?;
            }
        }
        buffers.lists[0] = recycled(&mut all);
        let Some(last) = self.layers.len().checked_sub(1) else {
            return Ok((&[], &mut buffers.kernels));
        };
        // Only wanted rows have a use for the rest of the last layer.
        let (mut some, count) = self.compact(plan, wanted, buffers);
        if count > 0 {
            self.attend(last as u32, &some, count, access, buffers)?;
            self.finish_layer(last, count, buffers)?;
        }
        buffers.lists[1] = recycled(&mut some);
        let hidden = &mut buffers.x[..count * self.config.hidden_size];
        rms_norm_in_place(&self.cpu, hidden, &self.output_norm, self.config.norm_eps)?;
        Ok((hidden, &mut buffers.kernels))
    }

    /// Logits `[rows][vocab]` of normed hidden states.
    pub(crate) fn logits(&self, hidden: &[f32], logits: &mut [f32], scratch: &mut Scratch) -> Result<(), KernelError> {
        self.head.forward(
            &self.cpu,
            hidden,
            hidden.len() / self.config.hidden_size,
            logits,
            scratch,
        )
    }

    fn kv_width(&self) -> usize {
        self.config.num_kv_heads * self.config.head_dim
    }

    /// Fills in the rows' embeddings and positions.
    fn embed(&self, plan: &StepPlan, buffers: &mut Buffers) -> Result<(), KernelError> {
        let hidden = self.config.hidden_size;
        let x = sized(&mut buffers.x, plan.token_ids.len() * hidden);
        for (&token, row) in plan.token_ids.iter().zip(x.chunks_exact_mut(hidden)) {
            self.embedding.row(&self.head, token, row)?;
        }
        buffers.positions.clear();
        for s in &plan.sequences {
            buffers
                .positions
                .extend(s.start_position..s.start_position + s.rows.len);
        }
        Ok(())
    }

    /// Query, key and value of all rows, rotated.
    fn project(&self, index: usize, rows: usize, b: &mut Buffers) -> Result<(), KernelError> {
        let (config, cpu, layer) = (&self.config, &self.cpu, &self.layers[index]);
        let width = config.num_heads * config.head_dim;
        let norm = Rows::Normed {
            x: &b.x[..rows * config.hidden_size],
            weight: &layer.attention_norm,
            eps: config.norm_eps,
        };
        let (q, k, v) = (&layer.query.linear, &layer.key.linear, &layer.value.linear);
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
        layer.query.add_bias(cpu, query)?;
        layer.key.add_bias(cpu, key)?;
        layer.value.add_bias(cpu, value)?;
        let targets = [(Part::Query, &mut *query), (Part::Key, &mut *key), (Part::Value, value)];
        b.adapted.add(cpu, &self.adapters, index, norm, targets)?;
        rope(cpu, &self.rope, config.rope_style, query, config.head_dim, &b.positions)?;
        rope(cpu, &self.rope, config.rope_style, key, config.head_dim, &b.positions)
    }

    /// Attention of the rows in `query`, and its output projection, added to the residual stream.
    fn attend(
        &self,
        index: u32,
        sequences: &[SequenceRows<'_>],
        rows: usize,
        access: &StepAccess<'_>,
        b: &mut Buffers,
    ) -> Result<(), KernelError> {
        let config = &self.config;
        let layer = &self.layers[index as usize];
        let shape = AttentionShape {
            kv: KvShape::from(access.pool().layout()),
            num_heads: config.num_heads,
            scale: (1.0 / (config.head_dim as f64).sqrt()) as f32,
            window: None,
        };
        let width = config.num_heads * config.head_dim;
        let attended = sized(&mut b.attended, rows * width);
        let attention = PagedAttention {
            shape: &shape,
            sequences,
            kv: &|block: BlockId| access.block(index, block),
        };
        attention.run(&self.cpu, &b.query[..rows * width], attended, &mut b.kernels)?;
        let output = &layer.output;
        b.operand.prepare(&self.cpu, Rows::Plain(attended), &[&output.linear])?;
        let x = &mut b.x[..rows * config.hidden_size];
        products(&self.cpu, &b.operand, [(&output.linear, Target::Add(&mut *x))])?;
        output.add_bias(&self.cpu, x)?;
        let input = Rows::Plain(&*attended);
        let targets = [(Part::Output, x)];
        b.adapted.add(&self.cpu, &self.adapters, index as usize, input, targets)
    }

    /// The feed-forward network of the first `rows` rows of the residual stream.
    fn finish_layer(&self, index: usize, rows: usize, b: &mut Buffers) -> Result<(), KernelError> {
        let (config, cpu, layer) = (&self.config, &self.cpu, &self.layers[index]);
        let norm = Rows::Normed {
            x: &b.x[..rows * config.hidden_size],
            weight: &layer.ffn_norm,
            eps: config.norm_eps,
        };
        b.operand.prepare(cpu, norm, &[&layer.gate.linear, &layer.up.linear])?;
        let gate = sized(&mut b.gate, rows * config.ffn_size);
        let up = sized(&mut b.up, rows * config.ffn_size);
        let targets = [
            (&layer.gate.linear, Target::Store(&mut *gate)),
            (&layer.up.linear, Target::Store(&mut *up)),
        ];
        products(cpu, &b.operand, targets)?;
        layer.gate.add_bias(cpu, gate)?;
        layer.up.add_bias(cpu, up)?;
        let targets = [(Part::Gate, &mut *gate), (Part::Up, &mut *up)];
        b.adapted.add(cpu, &self.adapters, index, norm, targets)?;
        let gated = Rows::Gated {
            gate,
            up,
            activation: Activation::Silu,
        };
        b.operand.prepare(cpu, gated, &[&layer.down.linear])?;
        let x = &mut b.x[..rows * config.hidden_size];
        products(cpu, &b.operand, [(&layer.down.linear, Target::Add(&mut *x))])?;
        layer.down.add_bias(cpu, x)?;
        b.adapted.add(cpu, &self.adapters, index, gated, [(Part::Down, x)])
    }

    /// Moves the wanted rows of `x` and `query` to the front; returns them as rows of sequences, and their number. The rows
    /// with adapters are the moved ones from here on.
    fn compact<'a>(
        &self,
        plan: &'a StepPlan,
        wanted: &[WantedRows],
        b: &mut Buffers,
    ) -> (Vec<SequenceRows<'a>>, usize) {
        let mut count = 0;
        let mut sequences = recycled(&mut b.lists[1]);
        let mut first = 0;
        b.adapted.group(wanted.iter().map(|run| {
            let rows = first..first + run.count;
            first = rows.end;
            (plan.sequences[run.sequence].adapter, rows)
        }));
        for run in wanted {
            let s = &plan.sequences[run.sequence];
            let from = s.rows.start as usize + run.first;
            for (buffer, width) in [
                (&mut b.x, self.config.hidden_size),
                (&mut b.query, self.config.num_heads * self.config.head_dim),
            ] {
                buffer.copy_within(from * width..(from + run.count) * width, count * width);
            }
            sequences.push(SequenceRows {
                rows: count..count + run.count,
                first_position: s.start_position as usize + run.first,
                blocks: &plan.block_ids[s.blocks.range()],
            });
            count += run.count;
        }
        (sequences, count)
    }
}

impl Layer {
    fn load(config: &ArchConfig, layer: usize, loader: &mut WeightLoader<'_>) -> Result<Self, WeightError> {
        let (hidden, ffn) = (config.hidden_size, config.ffn_size);
        let (heads, kv_heads) = (
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        );
        let mut projection = |part: Part, n: usize, k: usize, bias: bool| -> Result<Projection, WeightError> {
            Ok(Projection {
                linear: loader.matrix(Tensor::Weight(layer, part), n, k)?,
                bias: bias.then(|| loader.vector(Tensor::Bias(layer, part), n)).transpose()?,
            })
        };
        let query = projection(Part::Query, heads, hidden, config.attention_bias)?;
        let key = projection(Part::Key, kv_heads, hidden, config.attention_bias)?;
        let value = projection(Part::Value, kv_heads, hidden, config.attention_bias)?;
        let output = projection(Part::Output, hidden, heads, config.attention_bias)?;
        let gate = projection(Part::Gate, ffn, hidden, config.ffn_bias)?;
        let up = projection(Part::Up, ffn, hidden, config.ffn_bias)?;
        let down = projection(Part::Down, hidden, ffn, config.ffn_bias)?;
        let attention_norm = loader.vector(Tensor::AttentionNorm(layer), hidden)?;
        let ffn_norm = loader.vector(Tensor::FfnNorm(layer), hidden)?;
        Ok(Self {
            attention_norm,
            query,
            key,
            value,
            output,
            ffn_norm,
            gate,
            up,
            down,
        })
    }
}

/// Writes the K and V of all rows into the pool.
fn store(
    cpu: &Cpu,
    access: &mut StepAccess<'_>,
    layer: u32,
    sequences: &[SequenceRows<'_>],
    b: &Buffers,
    width: usize,
) {
    let block_tokens = access.pool().layout().block_tokens as usize;
    for (i, s) in sequences.iter().enumerate() {
        // A decoding sequence writes one slot of a block that is in no cache.
        if let Some(next) = sequences.get(i + 2).filter(|next| next.rows.len() == 1) {
            let (block, slot) = (next.first_position / block_tokens, next.first_position % block_tokens);
            access.expect_write(cpu, layer, next.blocks[block], slot);
        }
        let numbers = s.rows.start * width..s.rows.end * width;
        let rows = (&b.key[numbers.clone()], &b.value[numbers]);
        access.write_rows(cpu, layer, (s.blocks, s.first_position), rows);
    }
}
