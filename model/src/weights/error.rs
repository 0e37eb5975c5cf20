//! What can be wrong with weights.

use std::path::PathBuf;

use model_files::ModelFilesError;
use thiserror::Error;

use crate::kernels::KernelError;

/// Why the weights could not be loaded. Every message names the tensor.
#[derive(Debug, Error)]
pub enum WeightError {
    /// The files could not be read.
    #[error(transparent)]
    Files(#[from] ModelFilesError),
    /// A safetensors file breaks its format.
    #[error("{}: {reason}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A tensor that the decoder needs is not there.
    #[error("tensor {name} is missing; it must have the shape {expected:?}")]
    Missing {
        /// Its name.
        name: String,
        /// Its shape, outermost dimension first.
        expected: Vec<usize>,
    },
    /// A tensor has another shape than the model's description says.
    #[error("tensor {name} has the shape {found:?}; the model's description calls for {expected:?}")]
    Shape {
        /// Its name.
        name: String,
        /// The shape that follows from the description.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor's element type cannot be read.
    #[error("tensor {name} is {found}; supported are {supported}")]
    Type {
        /// Its name.
        name: String,
        /// Its type.
        found: String,
        /// What can be read.
        supported: &'static str,
    },
    /// The file has tensors that the decoder would leave out, so it would compute another function.
    #[error("{count} tensors of the file are not used by the decoder, for example {example}; another architecture?")]
    Unused {
        /// How many.
        count: usize,
        /// The first by name.
        example: String,
    },
    /// An adapter's file has a tensor that the decoder would leave out.
    #[error(
        "tensor {name} is not the lora_A.weight or lora_B.weight of a module that adapter_config.json chooses and that \
         can be adapted (base_model.model.model.layers.N.self_attn.q_proj, k_proj, v_proj, o_proj and \
         .mlp.gate_proj, up_proj, down_proj; of fused models .self_attn.qkv_proj and .mlp.gate_up_proj)"
    )]
    NotAdapted {
        /// Its name.
        name: String,
    },
    /// An adapter's numbers must be numbers, also when they are multiplied with its scale.
    #[error("tensor {name} has the value {value} (B's with the adapter's scale), must be finite")]
    NotFinite {
        /// Its name.
        name: String,
        /// One of its values.
        value: f32,
    },
    /// A tensor that is converted while it is read must hold numbers.
    #[error(
        "tensor {name} has the value {value} in row {row}, column {column}; what is converted at loading must be finite"
    )]
    Value {
        /// Its name.
        name: String,
        /// Row of the value.
        row: usize,
        /// Its column.
        column: usize,
        /// The value.
        value: f32,
    },
    /// A tensor cannot be packed.
    #[error("tensor {name}: {source}")]
    Kernel {
        /// Its name.
        name: String,
        /// What is wrong with it.
        source: KernelError,
    },
}
