//! What a kernel refuses.

use thiserror::Error;

use super::{CpuLevel, GgmlType};

/// Why a kernel was not run or a weight was not packed.
#[derive(Debug, Error)]
pub enum KernelError {
    /// An instruction set was asked for that this CPU lacks.
    #[error("kernels: cpu level {} is not supported here, the best level is {}", .wanted.as_str(), .best.as_str())]
    UnsupportedLevel {
        /// The level asked for.
        wanted: CpuLevel,
        /// The best one this CPU has.
        best: CpuLevel,
    },
    /// The thread pool could not be made.
    #[error(
        "kernels: cannot run on {threads} threads: {reason}; between 1 and {} are possible",
        Self::MAX_THREADS
    )]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What went wrong.
        reason: String,
    },
    /// A thread cannot be kept on a core.
    #[error("kernels: a thread cannot be pinned to core {core}: {reason}")]
    Core {
        /// Number of the core.
        core: usize,
        /// What went wrong.
        reason: String,
    },
    /// The system has no memory left.
    #[error("kernels: cannot get {bytes} bytes for weights: {reason}")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What went wrong.
        reason: String,
    },
    /// A slice or dimension has the wrong size.
    #[error("kernels: {what} is {found}, must be {expected}")]
    Shape {
        /// The slice or dimension.
        what: &'static str,
        /// What it would have to be.
        expected: usize,
        /// What it is.
        found: usize,
    },
    /// A dimension is outside of what the kernel can do.
    #[error("kernels: {what} is {found}, must be {rule}")]
    Dimension {
        /// The dimension.
        what: &'static str,
        /// What is allowed.
        rule: &'static str,
        /// What it is.
        found: usize,
    },
    /// A ggml type id without meaning here.
    #[error(
        "ggml type {0} is not known; known are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1 and Q2_K to Q8_K"
    )]
    UnknownGgmlType(u32),
    /// The row length of a quantised tensor is no multiple of its block.
    #[error("a row of {k} values cannot be {}, whose blocks have {} values", .ggml_type.as_str(), .ggml_type.block_len())]
    RowLength {
        /// The tensor's type.
        ggml_type: GgmlType,
        /// Values of a row.
        k: usize,
    },
    /// A block's scale or minimum is infinite, not a number, or too large to be represented.
    #[error("weight row {row}, block {block}: scale {value} cannot be used, it must be a finite half-precision number")]
    Scale {
        /// Output feature.
        row: usize,
        /// Block of 32 input features.
        block: usize,
        /// The scale or minimum.
        value: f32,
    },
    /// candle refused to quantise a tensor.
    #[error("cannot quantise weights to {}: {reason}", .ggml_type.as_str())]
    Quantise {
        /// The type that they should become.
        ggml_type: GgmlType,
        /// candle's words.
        reason: String,
    },
    /// candle refused to dequantise a tensor.
    #[error("cannot dequantise {} weights: {reason}", .ggml_type.as_str())]
    Dequantise {
        /// The tensor's type.
        ggml_type: GgmlType,
        /// candle's words.
        reason: String,
    },
}

impl KernelError {
    /// More threads than this are a mistake in a configuration.
    pub const MAX_THREADS: usize = 1024;

    /// An error unless `found` equals `expected`.
    pub(super) fn check(what: &'static str, expected: usize, found: usize) -> Result<(), Self> {
        if expected == found {
            Ok(())
        } else {
            Err(Self::Shape { what, expected, found })
        }
    }
}
