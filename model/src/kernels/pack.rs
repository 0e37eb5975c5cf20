//! Weights in tiles of 16 output features, so that one vector holds one input feature (or four bytes) of 16 outputs.
//!
//! Output features beyond the last multiple of 16 are padded with zeros, which no caller sees.

use std::mem::size_of_val;

use half::f16;

use super::KernelError;
use super::ggml::{GgmlType, dequantise};
use super::lanes::LANES;

/// Values of k in one quantised tile, and of one block of int8 activations.
pub(super) const BLOCK: usize = 32;

/// 16 f32 on one cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Line(pub(super) [f32; LANES]);

/// 16 columns x 32 of k, four bits each: value = d * q + min. 320 bytes, as much as Q4_1 has.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Q4Tile {
    /// Byte (g, column, j) holds k = 4 g + j in its low half and k = 16 + 4 g + j in its high half.
    pub(super) qs: [u8; 256],
    /// Scales, as halves.
    pub(super) d: [u16; LANES],
    /// Minima, as halves.
    pub(super) min: [u16; LANES],
}

/// 16 columns x 32 of k, eight bits each, stored + 128. Byte (g, column, j) holds k = 4 g + j.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Q8Tile(pub(super) [u8; 512]);

/// The scales of a [`Q8Tile`], as halves.
#[repr(C, align(32))]
#[derive(Clone, Copy)]
pub(super) struct Q8Scales(pub(super) [u16; LANES]);

/// A packed matrix. Tiles are in the order (tile of columns, block of k).
pub(super) enum Packed {
    /// Line (tile, k).
    F32(Vec<Line>),
    /// Q4_0 and Q4_1.
    Q4(Vec<Q4Tile>),
    /// Q8_0.
    Q8 { tiles: Vec<Q8Tile>, scales: Vec<Q8Scales> },
}

impl Packed {
    /// Bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::F32(lines) => size_of_val(&lines[..]),
            Self::Q4(tiles) => size_of_val(&tiles[..]),
            Self::Q8 { tiles, scales } => size_of_val(&tiles[..]) + size_of_val(&scales[..]),
        }
    }
}

/// Packs f32 rows; `row(i, out)` writes row `i`.
pub(super) fn pack_f32(
    n: usize,
    k: usize,
    mut row: impl FnMut(usize, &mut [f32]) -> Result<(), KernelError>,
) -> Result<Packed, KernelError> {
    let mut lines = vec![Line([0.0; LANES]); n.div_ceil(LANES) * k];
    let mut values = vec![0.0; k];
    for i in 0..n {
        row(i, &mut values)?;
        let tile = &mut lines[i / LANES * k..][..k];
        for (line, &value) in tile.iter_mut().zip(&values) {
            line.0[i % LANES] = value;
        }
    }
    Ok(Packed::F32(lines))
}

/// Packs rows of any ggml type as f32.
pub(super) fn pack_dequantised(ggml_type: GgmlType, n: usize, k: usize, data: &[u8]) -> Result<Packed, KernelError> {
    let size = ggml_type.row_bytes(k)?;
    // Several rows at a time, for candle's sake: it copies what it dequantises.
    let mut rows = vec![0.0; LANES * k];
    pack_f32(n, k, |i, out| {
        if i % LANES == 0 {
            let count = LANES.min(n - i);
            dequantise(ggml_type, &data[i * size..(i + count) * size], &mut rows[..count * k])?;
        }
        out.copy_from_slice(&rows[i % LANES * k..][..k]);
        Ok(())
    })
}

/// Scale or minimum of a block, which must be finite.
fn scale(bytes: &[u8], factor: f32, row: usize, block: usize) -> Result<u16, KernelError> {
    let value = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32() * factor;
    let half = f16::from_f32(value);
    if half.is_finite() {
        Ok(half.to_bits())
    } else {
        Err(KernelError::Scale { row, block, value })
    }
}

/// Packs Q4_0 (`minimum` false) or Q4_1 blocks, exactly. A Q4_0 value d * (q - 8) is d * q + min with min = -8 d,
/// which a half holds exactly.
pub(super) fn pack_q4(n: usize, k: usize, data: &[u8], minimum: bool) -> Result<Packed, KernelError> {
    let blocks = k / BLOCK;
    let header = if minimum { 4 } else { 2 };
    let empty = Q4Tile {
        qs: [0; 256],
        d: [0; LANES],
        min: [0; LANES],
    };
    let mut tiles = vec![empty; n.div_ceil(LANES) * blocks];
    for (i, bytes) in data.chunks_exact(header + BLOCK / 2).enumerate() {
        let (row, block, column) = (i / blocks, i % blocks, i / blocks % LANES);
        let tile = &mut tiles[row / LANES * blocks + block];
        tile.d[column] = scale(bytes, 1.0, row, block)?;
        tile.min[column] = if minimum {
            scale(&bytes[2..], 1.0, row, block)?
        } else {
            scale(bytes, -8.0, row, block)?
        };
        for (g, four) in bytes[header..].chunks_exact(4).enumerate() {
            tile.qs[(g * LANES + column) * 4..][..4].copy_from_slice(four);
        }
    }
    Ok(Packed::Q4(tiles))
}

/// Packs Q8_0 blocks, exactly.
pub(super) fn pack_q8(n: usize, k: usize, data: &[u8]) -> Result<Packed, KernelError> {
    let blocks = k / BLOCK;
    let count = n.div_ceil(LANES) * blocks;
    let (mut tiles, mut scales) = (vec![Q8Tile([128; 512]); count], vec![Q8Scales([0; LANES]); count]);
    for (i, bytes) in data.chunks_exact(2 + BLOCK).enumerate() {
        let (row, block, column) = (i / blocks, i % blocks, i / blocks % LANES);
        let at = row / LANES * blocks + block;
        scales[at].0[column] = scale(bytes, 1.0, row, block)?;
        for (g, four) in bytes[2..].chunks_exact(4).enumerate() {
            let offset = [four[0] ^ 128, four[1] ^ 128, four[2] ^ 128, four[3] ^ 128];
            tiles[at].0[(g * LANES + column) * 4..][..4].copy_from_slice(&offset);
        }
    }
    Ok(Packed::Q8 { tiles, scales })
}
