//! The decoder: from the rows of a step to the hidden states that need logits.
//!
//! Every number of a row is computed in an order that depends on the row alone (see [`crate::kernels`]), and rows meet
//! only in attention, through the KV pool. So the rows of a step may be cut and mixed in any way.

use engine::plan::{GroupBlocks, StepPlan};
use engine::runner::LayerObserver;
use protocol::kv::KvPlace;

use crate::arch::ArchConfig;
use crate::kernels::{
    Cpu, KernelError, Linear, Operand, RopeTable, Rows, Scratch, SequenceRows, Target, add_bias, add_scaled, products,
    rms_norm_in_place, scale_and_cap,
};
use crate::kv_groups::LayerGroups;
use crate::kv_pool::StepAccess;
use crate::tensor_names::{Part, Tensor};
use crate::weights::{Embedding, WeightError, WeightLoader};

mod attention;
mod cost;
mod experts;
mod ffn;
mod latent;
mod layer;
mod lora;

use attention::Heads;
use experts::{Routes, Sparse};
use ffn::Dense;
use latent::LatentBuffers;
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

/// A layer's feed-forward network.
enum Ffn {
    Dense(Dense),
    Sparse(Sparse),
}

struct Layer {
    /// Of the last so many positions, attention sees no others.
    window: Option<usize>,
    /// Where its KV is.
    place: KvPlace,
    /// Which table of rotary angles.
    rope: usize,
    attention_norm: Option<Vec<f32>>,
    heads: Heads,
    output: Projection,
    attention_out_norm: Option<Vec<f32>>,
    ffn_norm: Option<Vec<f32>>,
    ffn: Ffn,
    ffn_out_norm: Option<Vec<f32>>,
}

/// The weights of a model, packed, and what follows from its shape.
pub(crate) struct Decoder {
    pub(crate) config: ArchConfig,
    pub(crate) cpu: Cpu,
    /// The table of most layers, and that of layers with a window if they have another.
    ropes: Vec<RopeTable>,
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
    /// What a sub-layer adds to the residual stream, where that is not the product itself.
    delta: Vec<f32>,
    routes: Routes,
    latent: LatentBuffers,
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

/// The input of a sub-layer: the residual stream, normed if there is a norm.
fn input<'a>(x: &'a [f32], norm: Option<&'a Vec<f32>>, eps: f32) -> Rows<'a> {
    match norm {
        Some(weight) => Rows::Normed { x, weight, eps },
        None => Rows::Plain(x),
    }
}

/// The last product of a sub-layer.
struct Ending<'a> {
    layer: usize,
    part: Part,
    projection: &'a Projection,
    /// Norm of what comes out.
    norm: Option<&'a [f32]>,
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
        let places = LayerGroups::of(&config).places.into_iter().enumerate();
        let layers = places
            .map(|layer| Layer::load(&config, layer, loader))
            .collect::<Result<_, _>>()?;
        let output_norm = loader.norm(Tensor::OutputNorm, hidden)?;
        let head = match tied {
            Some(head) => head,
            None => loader.matrix(Tensor::Head, vocab, hidden)?,
        };
        let ropes = [Some(&config.rope), config.local_rope.as_ref()];
        let table = |rope: &crate::arch::Rope| RopeTable::new(&rope.frequencies(), positions, rope.amplitude());
        Ok(Self {
            ropes: ropes.into_iter().flatten().map(table).collect(),
            config,
            cpu,
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
        let groups = access.pool().layout().groups.count();
        let mut all = recycled(&mut buffers.lists[0]);
        all.extend(plan.sequences.iter().map(|s| SequenceRows {
            rows: s.rows.range(),
            first_position: s.start_position as usize,
            blocks: GroupBlocks::new(&plan.block_ids[s.blocks.range()], groups, 0),
        }));
        let adapters = plan.sequences.iter().map(|s| (s.adapter, s.rows.range()));
        buffers.adapted.group(adapters);
        for index in 0..self.layers.len() {
            self.project(index, rows, buffers)?;
            let place = self.layers[index].place;
            attention::store(&self.cpu, access, place, &all, buffers, self.kv_width());
            observer.layer_computed(place);
            if index + 1 < self.layers.len() {
                self.attend(index, &all, rows, access, buffers)?;
                self.finish_layer(index, rows, buffers)?;
            }
        }
        buffers.lists[0] = recycled(&mut all);
        let Some(last) = self.layers.len().checked_sub(1) else {
            return Ok((&[], &mut buffers.kernels));
        };
        // Only wanted rows have a use for the rest of the last layer.
        let (mut some, count) = self.compact(plan, groups, wanted, buffers);
        if count > 0 {
            self.attend(last, &some, count, access, buffers)?;
            self.finish_layer(last, count, buffers)?;
        }
        buffers.lists[1] = recycled(&mut some);
        let hidden = &mut buffers.x[..count * self.config.hidden_size];
        rms_norm_in_place(&self.cpu, hidden, &self.output_norm, self.config.norm_eps)?;
        Ok((hidden, &mut buffers.kernels))
    }

    /// Logits `[rows][vocab]` of normed hidden states.
    pub(crate) fn logits(&self, hidden: &[f32], logits: &mut [f32], scratch: &mut Scratch) -> Result<(), KernelError> {
        let rows = hidden.len() / self.config.hidden_size;
        self.head.forward(&self.cpu, hidden, rows, logits, scratch)?;
        let (factor, cap) = (self.config.logit_scale, self.config.logit_cap);
        if factor != 1.0 || cap.is_some() {
            scale_and_cap(&self.cpu, logits, factor, cap);
        }
        Ok(())
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
        if self.config.embedding_scale != 1.0 {
            scale_and_cap(&self.cpu, x, self.config.embedding_scale, None);
        }
        buffers.positions.clear();
        for s in &plan.sequences {
            buffers
                .positions
                .extend(s.start_position..s.start_position + s.rows.len);
        }
        Ok(())
    }

    /// A sub-layer's last product, added to the first `rows` rows of the residual stream.
    fn end_sublayer(
        &self,
        ending: &Ending<'_>,
        input: Rows<'_>,
        rows: usize,
        b: &mut Buffers,
    ) -> Result<(), KernelError> {
        let (cpu, projection) = (&self.cpu, ending.projection);
        b.operand.prepare(cpu, input, &[&projection.linear])?;
        let x = &mut b.x[..rows * self.config.hidden_size];
        if ending.norm.is_none() && self.config.residual_scale == 1.0 {
            products(cpu, &b.operand, [(&projection.linear, Target::Add(&mut *x))])?;
            projection.add_bias(cpu, x)?;
            let targets = [(ending.part, x)];
            return b.adapted.add(cpu, &self.adapters, ending.layer, input, targets);
        }
        let delta = sized(&mut b.delta, x.len());
        products(cpu, &b.operand, [(&projection.linear, Target::Store(&mut *delta))])?;
        projection.add_bias(cpu, delta)?;
        let targets = [(ending.part, &mut *delta)];
        b.adapted.add(cpu, &self.adapters, ending.layer, input, targets)?;
        self.add_delta(ending.norm, delta, x)
    }

    /// Adds what a sub-layer gives to the residual stream.
    fn add_delta(&self, norm: Option<&[f32]>, delta: &mut [f32], x: &mut [f32]) -> Result<(), KernelError> {
        if let Some(weight) = norm {
            rms_norm_in_place(&self.cpu, delta, weight, self.config.norm_eps)?;
        }
        add_scaled(&self.cpu, x, delta, self.config.residual_scale)
    }

    /// Moves the wanted rows of `x` and `query` to the front; returns them as rows of sequences, and their number. The rows
    /// with adapters are the moved ones from here on.
    fn compact<'a>(
        &self,
        plan: &'a StepPlan,
        groups: usize,
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
                blocks: GroupBlocks::new(&plan.block_ids[s.blocks.range()], groups, 0),
            });
            count += run.count;
        }
        (sequences, count)
    }
}
