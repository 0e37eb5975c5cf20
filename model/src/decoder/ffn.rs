//! The feed-forward network of a layer.

use super::{Buffers, Decoder, Ending, Ffn, Projection, input, sized};
use crate::kernels::{KernelError, Rows, Target, products};
use crate::tensor_names::Part;

/// down(activation(gate(x)) * up(x)).
pub(super) struct Dense {
    pub(super) gate: Projection,
    pub(super) up: Projection,
    pub(super) down: Projection,
}

impl Dense {
    pub(super) fn projections(&self) -> [&Projection; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

impl Decoder {
    /// The feed-forward network of the first `rows` rows of the residual stream.
    pub(super) fn finish_layer(&self, index: usize, rows: usize, b: &mut Buffers) -> Result<(), KernelError> {
        match &self.layers[index].ffn {
            Ffn::Dense(dense) => self.dense(index, dense, rows, b),
            Ffn::Sparse(sparse) => self.sparse(index, sparse, rows, b),
        }
    }

    fn dense(&self, index: usize, dense: &Dense, rows: usize, b: &mut Buffers) -> Result<(), KernelError> {
        let (config, cpu, layer) = (&self.config, &self.cpu, &self.layers[index]);
        let x = &b.x[..rows * config.hidden_size];
        let norm = input(x, layer.ffn_norm.as_ref(), config.norm_eps);
        b.operand.prepare(cpu, norm, &[&dense.gate.linear, &dense.up.linear])?;
        let (mut gate_buffer, mut up_buffer) = (std::mem::take(&mut b.gate), std::mem::take(&mut b.up));
        let gate = sized(&mut gate_buffer, rows * config.ffn_size);
        let up = sized(&mut up_buffer, rows * config.ffn_size);
        let targets = [
            (&dense.gate.linear, Target::Store(&mut *gate)),
            (&dense.up.linear, Target::Store(&mut *up)),
        ];
        products(cpu, &b.operand, targets)?;
        dense.gate.add_bias(cpu, gate)?;
        dense.up.add_bias(cpu, up)?;
        let targets = [(Part::Gate, &mut *gate), (Part::Up, &mut *up)];
        b.adapted.add(cpu, &self.adapters, index, norm, targets)?;
        let gated = Rows::Gated {
            gate,
            up,
            activation: config.activation,
        };
        let ending = Ending {
            layer: index,
            part: Part::Down,
            projection: &dense.down,
            norm: layer.ffn_out_norm.as_deref(),
        };
        let ended = self.end_sublayer(&ending, gated, rows, b);
        (b.gate, b.up) = (gate_buffer, up_buffer);
        ended
    }
}
