//! CPU kernels of the decoder: products with packed weights, attention over paged KV, norms, rope, activations.
//!
//! Two rules hold for every function here, and tests prove both:
//! * **Fixed order.** The bits of an output element depend on its own inputs alone: not on how many rows share the
//!   call, which rows they are, how a prompt is cut in chunks, or how many threads work. Sums run in an order fixed
//!   by the shape; nothing is chosen by batch size unless the variants agree bit for bit.
//! * **One source, several instruction sets.** A kernel is written once over 16 lanes (module `lanes`) and compiled for
//!   AVX-512, AVX2, NEON and plain Rust. Every lane operation is exact or a single IEEE operation (fused multiply-add
//!   included), so the levels agree bit for bit.
//!
//! Matrices are row-major. `m` counts rows (tokens), `n` output features, `k` input features: y\[m\]\[n\] =
//! x\[m\]\[k\] W\[n\]\[k\]^T.

#[cfg(target_endian = "big")]
compile_error!("the kernels read weights and KV bytes as little-endian numbers");

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod activation;
mod affinity;
mod arena;
mod attention;
mod attention_chunk;
mod attention_shared;
mod attention_single;
mod cpu;
mod dispatch;
mod error;
mod gemm;
mod ggml;
mod int8_block;
mod int_gemm;
mod kv_block;
mod kv_element;
mod lanes;
mod linear;
mod math;
mod norm;
mod operand;
mod pack;
mod pack_blocks;
mod plain;
pub mod roofline;
mod rope;
mod rounding;
mod rows;
mod shared;
mod softmax;
mod team;
mod tiles;
mod unpacked;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

pub use activation::{Activation, add, add_bias, add_scaled, gelu_tanh_mul, scale_and_cap, sigmoid, silu_mul};
pub use affinity::pin_current_thread;
pub use attention::{AttentionShape, PagedAttention, SequenceRows};
pub use cpu::{Cpu, CpuLevel};
pub use error::KernelError;
pub use ggml::{GgmlType, dequantise, embedding_row, quantise};
pub use kv_block::{KvShape, prefetch_slot, write_kv};
pub use linear::{Linear, LinearMode, Scratch, Target, products};
pub use norm::{rms_norm, rms_norm_in_place};
pub use operand::{Operand, Rows};
pub(crate) use plain::{Plain, run_plain};
pub use rope::{RopeStyle, RopeTable, rope};
pub use softmax::{argmax, log_softmax, log_sum_exp, softmax};
