//! Weights in tiles of 16 output features, so that one vector holds one input feature (or four bytes) of 16 outputs.
//!
//! Output features beyond the last multiple of 16 are padded with zeros, which no caller sees.

use std::mem::size_of_val;
use std::thread;

use bytemuck::Zeroable;

use super::KernelError;
use super::arena::Buffer;
use super::ggml::{GgmlType, dequantise};
use super::lanes::LANES;
use super::pack_blocks::pack_blocks;
use super::tiles::{Q4KTile, Q5KTile, Q6KTile, Q40Tile, Q41Tile, Q50Tile, Q51Tile, Q80Tile};

/// Values of k in one block of a tile, and of one block of int8 activations.
pub(super) const BLOCK: usize = 32;

/// 16 f32 on one cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, Zeroable)]
pub(super) struct Line(pub(super) [f32; LANES]);

/// 16 numbers of two bytes.
#[repr(C, align(32))]
#[derive(Clone, Copy, Zeroable)]
pub(super) struct HalfLine(pub(super) [u16; LANES]);

/// A packed matrix. Lines and tiles are in the order (16 columns, k).
pub(super) enum Packed {
    F32(Buffer<Line>),
    F16(Buffer<HalfLine>),
    Bf16(Buffer<HalfLine>),
    Q40(Buffer<Q40Tile>),
    Q41(Buffer<Q41Tile>),
    Q50(Buffer<Q50Tile>),
    Q51(Buffer<Q51Tile>),
    Q80(Buffer<Q80Tile>),
    Q4K(Buffer<Q4KTile>),
    Q5K(Buffer<Q5KTile>),
    Q6K(Buffer<Q6KTile>),
}

impl Packed {
    /// Bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::F32(lines) => size_of_val(&lines[..]),
            Self::F16(lines) | Self::Bf16(lines) => size_of_val(&lines[..]),
            Self::Q40(tiles) => size_of_val(&tiles[..]),
            Self::Q41(tiles) => size_of_val(&tiles[..]),
            Self::Q50(tiles) => size_of_val(&tiles[..]),
            Self::Q51(tiles) => size_of_val(&tiles[..]),
            Self::Q80(tiles) => size_of_val(&tiles[..]),
            Self::Q4K(tiles) => size_of_val(&tiles[..]),
            Self::Q5K(tiles) => size_of_val(&tiles[..]),
            Self::Q6K(tiles) => size_of_val(&tiles[..]),
        }
    }

    /// Whether the products are in f32, and not with activations rounded to int8.
    pub(super) fn is_float(&self) -> bool {
        matches!(self, Self::F32(_) | Self::F16(_) | Self::Bf16(_))
    }
}

/// A tensor's bytes, `n` rows of `k` values, and how many threads may pack it.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) data: &'a [u8],
    pub(super) threads: usize,
}

/// Packs the bytes of a ggml tensor: those with kernels of their own as they are, others as f32. `quantised` false
/// turns all quantised types to f32.
pub(super) fn pack(ggml_type: GgmlType, source: Source<'_>, quantised: bool) -> Result<Packed, KernelError> {
    Ok(match (quantised, ggml_type) {
        (_, GgmlType::F16) => Packed::F16(pack_halves(source)?),
        (_, GgmlType::Bf16) => Packed::Bf16(pack_halves(source)?),
        (true, GgmlType::Q4_0) => Packed::Q40(pack_blocks(source)?),
        (true, GgmlType::Q4_1) => Packed::Q41(pack_blocks(source)?),
        (true, GgmlType::Q5_0) => Packed::Q50(pack_blocks(source)?),
        (true, GgmlType::Q5_1) => Packed::Q51(pack_blocks(source)?),
        (true, GgmlType::Q8_0) => Packed::Q80(pack_blocks(source)?),
        (true, GgmlType::Q4K) => Packed::Q4K(pack_blocks(source)?),
        (true, GgmlType::Q5K) => Packed::Q5K(pack_blocks(source)?),
        (true, GgmlType::Q6K) => Packed::Q6K(pack_blocks(source)?),
        _ => Packed::F32(pack_dequantised(ggml_type, source)?),
    })
}

/// A buffer of `per` elements for each 16 columns, filled by several threads: `fill(i, elements)` for the columns from
/// 16 i on.
pub(super) fn filled<T: Copy + Zeroable + Send>(
    source: Source<'_>,
    per: usize,
    fill: impl Fn(usize, &mut [T]) -> Result<(), KernelError> + Sync,
) -> Result<Buffer<T>, KernelError> {
    let tiles = source.n.div_ceil(LANES);
    let mut buffer = Buffer::new(tiles * per)?;
    // A thread costs about as much as packing this many bytes.
    let threads = source.threads.min(tiles).min(1 + source.data.len() / 500_000);
    let share = tiles.div_ceil(threads.max(1));
    let run = |from: usize, elements: &mut [T]| {
        let mut columns = elements.chunks_exact_mut(per).enumerate();
        columns.try_for_each(|(i, elements)| fill(from + i, elements))
    };
    thread::scope(|scope| {
        let mut shares = buffer.as_mut_slice().chunks_mut(share * per).enumerate();
        let first = shares.next();
        let run = &run;
        let others: Vec<_> = shares
            .map(|(i, elements)| scope.spawn(move || run(i * share, elements)))
            .collect();
        first.map_or(Ok(()), |(_, elements)| run(0, elements))?;
        // A panic of a packing thread goes on here.
        others
            .into_iter()
            .try_for_each(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    Ok(buffer)
}

/// Packs f32 rows.
pub(super) fn pack_f32(n: usize, k: usize, weights: &[f32]) -> Result<Packed, KernelError> {
    let mut lines: Buffer<Line> = Buffer::new(n.div_ceil(LANES) * k)?;
    for (i, row) in weights.chunks_exact(k).enumerate() {
        let tile = &mut lines.as_mut_slice()[i / LANES * k..][..k];
        for (line, &value) in tile.iter_mut().zip(row) {
            line.0[i % LANES] = value;
        }
    }
    Ok(Packed::F32(lines))
}

/// Packs rows of F16 or BF16, exactly.
fn pack_halves(source: Source<'_>) -> Result<Buffer<HalfLine>, KernelError> {
    let size = 2 * source.k;
    filled(source, source.k, |i, lines: &mut [HalfLine]| {
        let rows = source.data.chunks_exact(size).skip(LANES * i).take(LANES);
        for (column, row) in rows.enumerate() {
            for (line, value) in lines.iter_mut().zip(row.as_chunks().0) {
                line.0[column] = u16::from_le_bytes(*value);
            }
        }
        Ok(())
    })
}

/// Packs rows of any ggml type as f32.
fn pack_dequantised(ggml_type: GgmlType, source: Source<'_>) -> Result<Buffer<Line>, KernelError> {
    let (k, size) = (source.k, ggml_type.row_bytes(source.k)?);
    filled(source, k, |i, lines: &mut [Line]| {
        // 16 rows at a time, for candle's sake: it copies what it dequantises.
        let count = LANES.min(source.n - LANES * i);
        let mut values = vec![0.0; count * k];
        dequantise(ggml_type, &source.data[LANES * i * size..][..count * size], &mut values)?;
        for (column, row) in values.chunks_exact(k).enumerate() {
            for (line, &value) in lines.iter_mut().zip(row) {
                line.0[column] = value;
            }
        }
        Ok(())
    })
}
