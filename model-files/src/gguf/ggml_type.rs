//! The ggml element types this product can read: how many elements a block holds and how many bytes it takes.
//!
//! Source: `ggml_type` and the block structs of ggml; the set is what candle-core 0.11 reads (`GgmlDType`).

use std::fmt;

/// Element type of a GGUF tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GgmlType {
    /// 32 bit float.
    F32,
    /// 16 bit float.
    F16,
    /// bfloat16.
    BF16,
    /// 4 bit, blocks of 32, one scale.
    Q4_0,
    /// 4 bit, blocks of 32, scale and minimum.
    Q4_1,
    /// 5 bit, blocks of 32, one scale.
    Q5_0,
    /// 5 bit, blocks of 32, scale and minimum.
    Q5_1,
    /// 8 bit, blocks of 32, one scale.
    Q8_0,
    /// 8 bit, blocks of 32, scale and sum.
    Q8_1,
    /// 2 bit k-quant, blocks of 256.
    Q2K,
    /// 3 bit k-quant, blocks of 256.
    Q3K,
    /// 4 bit k-quant, blocks of 256.
    Q4K,
    /// 5 bit k-quant, blocks of 256.
    Q5K,
    /// 6 bit k-quant, blocks of 256.
    Q6K,
    /// 8 bit k-quant, blocks of 256.
    Q8K,
}

impl GgmlType {
    /// Every type, in the order of its id.
    pub const ALL: [Self; 15] = [
        Self::F32,
        Self::F16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q8_1,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::Q8K,
        Self::BF16,
    ];

    /// The type with this id in the file, if it is one of those this product reads.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.id() == id)
    }

    /// The id written in the file.
    pub const fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q5_0 => 6,
            Self::Q5_1 => 7,
            Self::Q8_0 => 8,
            Self::Q8_1 => 9,
            Self::Q2K => 10,
            Self::Q3K => 11,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
            Self::Q8K => 15,
            Self::BF16 => 30,
        }
    }

    /// Elements in a block (1 for plain floats). Rows are whole blocks.
    pub const fn block_elements(self) -> u64 {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Q8_1 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K | Self::Q8K => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 2 + 16,
            Self::Q4_1 => 4 + 16,
            Self::Q5_0 => 2 + 4 + 16,
            Self::Q5_1 => 4 + 4 + 16,
            Self::Q8_0 => 2 + 32,
            Self::Q8_1 => 4 + 32,
            Self::Q2K => 16 + 64 + 4,
            Self::Q3K => 32 + 64 + 12 + 2,
            Self::Q4K => 4 + 12 + 128,
            Self::Q5K => 4 + 12 + 32 + 128,
            Self::Q6K => 128 + 64 + 16 + 2,
            Self::Q8K => 4 + 256 + 32,
        }
    }

    /// The name used by model publishers, as in `Q4_1`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q8_1 => "Q8_1",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
            Self::Q8K => "Q8_K",
        }
    }

    /// All names, for error messages.
    pub(crate) fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
