//! ggml's tensor types: their sizes, and turning their bytes to f32.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{CpuStorage, Device, Tensor};
use half::{bf16, f16};

use super::KernelError;

/// Element type of a tensor in a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are ggml's own")]
pub enum GgmlType {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    Q8K,
}

impl GgmlType {
    /// The type with ggml's number `id`, as written in a GGUF file.
    ///
    /// # Errors
    /// If the number is unknown.
    pub fn from_id(id: u32) -> Result<Self, KernelError> {
        Ok(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            9 => Self::Q8_1,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            15 => Self::Q8K,
            30 => Self::Bf16,
            _ => return Err(KernelError::UnknownGgmlType(id)),
        })
    }

    /// ggml's name of the type.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
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

    /// Whether weights of this type can stay as they are in products with int8 activations.
    pub fn has_int8_kernel(self) -> bool {
        matches!(
            self,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Q4K | Self::Q5K | Self::Q6K
        )
    }

    fn candle(self) -> GgmlDType {
        match self {
            Self::F32 => GgmlDType::F32,
            Self::F16 => GgmlDType::F16,
            Self::Bf16 => GgmlDType::BF16,
            Self::Q4_0 => GgmlDType::Q4_0,
            Self::Q4_1 => GgmlDType::Q4_1,
            Self::Q5_0 => GgmlDType::Q5_0,
            Self::Q5_1 => GgmlDType::Q5_1,
            Self::Q8_0 => GgmlDType::Q8_0,
            Self::Q8_1 => GgmlDType::Q8_1,
            Self::Q2K => GgmlDType::Q2K,
            Self::Q3K => GgmlDType::Q3K,
            Self::Q4K => GgmlDType::Q4K,
            Self::Q5K => GgmlDType::Q5K,
            Self::Q6K => GgmlDType::Q6K,
            Self::Q8K => GgmlDType::Q8K,
        }
    }

    /// Values of one block.
    pub fn block_len(self) -> usize {
        self.candle().block_size()
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.candle().type_size()
    }

    /// Bytes of a row of `k` values.
    ///
    /// # Errors
    /// If `k` is no multiple of the block length.
    pub fn row_bytes(self, k: usize) -> Result<usize, KernelError> {
        if k.is_multiple_of(self.block_len()) {
            Ok(k / self.block_len() * self.block_bytes())
        } else {
            Err(KernelError::RowLength { ggml_type: self, k })
        }
    }
}

fn half_at(bytes: &[u8], i: usize) -> f32 {
    f16::from_le_bytes([bytes[i], bytes[i + 1]]).to_f32()
}

/// Turns `out.len()` values of a type to f32, exactly (each value is a product and a sum of few-bit numbers, rounded
/// as ggml's own dequantisation does).
///
/// # Errors
/// If `bytes` is not what `out.len()` values take, or candle cannot read the type.
pub fn dequantise(ggml_type: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    KernelError::check(
        "bytes of a dequantised row",
        ggml_type.row_bytes(out.len())?,
        bytes.len(),
    )?;
    let size = ggml_type.block_bytes();
    let blocks = bytes
        .chunks_exact(size)
        .zip(out.chunks_exact_mut(ggml_type.block_len()));
    match ggml_type {
        GgmlType::F32 => blocks.for_each(|(b, o)| o[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        GgmlType::F16 => blocks.for_each(|(b, o)| o[0] = half_at(b, 0)),
        GgmlType::Bf16 => blocks.for_each(|(b, o)| o[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32()),
        GgmlType::Q4_0 => blocks.for_each(|(b, o)| {
            let d = half_at(b, 0);
            for (j, &q) in b[2..].iter().enumerate() {
                o[j] = (f32::from(q & 15) - 8.0) * d;
                o[j + 16] = (f32::from(q >> 4) - 8.0) * d;
            }
        }),
        GgmlType::Q4_1 => blocks.for_each(|(b, o)| {
            let (d, min) = (half_at(b, 0), half_at(b, 2));
            for (j, &q) in b[4..].iter().enumerate() {
                o[j] = f32::from(q & 15) * d + min;
                o[j + 16] = f32::from(q >> 4) * d + min;
            }
        }),
        GgmlType::Q8_0 => blocks.for_each(|(b, o)| {
            let d = half_at(b, 0);
            for (o, &q) in o.iter_mut().zip(&b[2..]) {
                *o = f32::from(q.cast_signed()) * d;
            }
        }),
        _ => by_candle(ggml_type, bytes, out)?,
    }
    Ok(())
}

/// The rarer types, through candle's own block formats.
fn by_candle(ggml_type: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), KernelError> {
    let fail = |reason: String| KernelError::Dequantise { ggml_type, reason };
    // candle casts the bytes to its block structs, so they must be aligned: f32 is the widest field.
    let mut aligned = vec![0u32; bytes.len().div_ceil(4)];
    let copy = &mut bytemuck::cast_slice_mut::<u32, u8>(&mut aligned)[..bytes.len()];
    copy.copy_from_slice(bytes);
    let blocks = ggml_type.candle().from_data((&*copy).into());
    match blocks.dequantize(out.len()).map_err(|e| fail(e.to_string()))? {
        CpuStorage::F32(values) if values.len() == out.len() => out.copy_from_slice(&values),
        _ => return Err(fail("candle gave no f32 values of the right number".to_owned())),
    }
    Ok(())
}

/// Turns whole blocks of f32 to a type, each block for itself: floats are rounded to the nearest, quantised types are made by
/// candle's quantiser.
///
/// # Errors
/// If `out` is not what the values take in that type, or candle cannot make it.
pub fn quantise(ggml_type: GgmlType, values: &[f32], out: &mut [u8]) -> Result<(), KernelError> {
    let bytes = ggml_type.row_bytes(values.len())?;
    KernelError::check("bytes of quantised values", bytes, out.len())?;
    let fail = |error: candle_core::Error| KernelError::Quantise {
        ggml_type,
        reason: error.to_string(),
    };
    match ggml_type {
        GgmlType::F32 => out
            .chunks_exact_mut(4)
            .zip(values)
            .for_each(|(o, x)| o.copy_from_slice(&x.to_le_bytes())),
        GgmlType::F16 => out
            .chunks_exact_mut(2)
            .zip(values)
            .for_each(|(o, &x)| o.copy_from_slice(&f16::from_f32(x).to_le_bytes())),
        GgmlType::Bf16 => out
            .chunks_exact_mut(2)
            .zip(values)
            .for_each(|(o, &x)| o.copy_from_slice(&bf16::from_f32(x).to_le_bytes())),
        _ => {
            let values = Tensor::from_slice(values, values.len(), &Device::Cpu).map_err(fail)?;
            let blocks = QTensor::quantize(&values, ggml_type.candle()).map_err(fail)?;
            out.copy_from_slice(&blocks.data().map_err(fail)?);
        }
    }
    Ok(())
}

/// Row `row` of a matrix `[..][k]` as f32: an embedding lookup.
///
/// # Errors
/// If the row lies outside of `bytes`, `out` is not `k` long, or the type cannot be read.
pub fn embedding_row(ggml_type: GgmlType, bytes: &[u8], row: usize, out: &mut [f32]) -> Result<(), KernelError> {
    let size = ggml_type.row_bytes(out.len())?;
    let start = row.saturating_mul(size);
    let found = bytes.len();
    let range = start..start.saturating_add(size);
    let slice = bytes.get(range.clone()).ok_or(KernelError::Shape {
        what: "bytes of the embedding up to the row asked for",
        expected: range.end,
        found,
    })?;
    dequantise(ggml_type, slice, out)
}
