//! From the blocks of a GGUF file to tiles (see `tiles`), bit for bit.
//!
//! The formats are ggml's: a block of 32 values (Q4_0 to Q8_0) or a super-block of 256 (the K types), one after the
//! other along k.

use bytemuck::Zeroable;
use half::f16;

use super::KernelError;
use super::arena::Buffer;
use super::lanes::LANES;
use super::pack::{BLOCK, Source, filled};
use super::tiles::{
    Nibbles, Q4KTile, Q5KTile, Q6KTile, Q40Tile, Q41Tile, Q50Tile, Q51Tile, Q80Tile, QuantTile, SuperScales,
};

/// A scale or minimum that is infinite or not a number.
pub(super) struct BadScale(f32);

/// A tile that is made from blocks of a file.
pub(super) trait FromBlocks: QuantTile + Zeroable {
    /// Bytes of a block of the file.
    const BYTES: usize;
    /// Blocks of 32 values in a block of the file.
    const IN_FILE: usize;

    /// Writes a block of the file, which is [`FromBlocks::BYTES`] long, to a column; `at` is its index among the
    /// file's blocks of the tile.
    fn set(&mut self, at: usize, column: usize, block: &[u8]) -> Result<(), BadScale>;
}

/// Packs all blocks of a tensor.
pub(super) fn pack_blocks<T: FromBlocks>(source: Source<'_>) -> Result<Buffer<T>, KernelError> {
    let blocks = source.k / BLOCK / T::IN_FILE;
    let in_tile = T::BLOCKS / T::IN_FILE;
    filled(source, blocks.div_ceil(in_tile), |i, tiles: &mut [T]| {
        let rows = source.data.chunks_exact(blocks * T::BYTES).skip(LANES * i).take(LANES);
        for (column, row) in rows.enumerate() {
            for (at, block) in row.chunks_exact(T::BYTES).enumerate() {
                tiles[at / in_tile]
                    .set(at % in_tile, column, block)
                    .map_err(|BadScale(value)| KernelError::Scale {
                        row: LANES * i + column,
                        block: at * T::IN_FILE,
                        value,
                    })?;
            }
        }
        Ok(())
    })
}

/// The half at byte `at`, a scale or minimum, which must be finite.
fn scale(block: &[u8], at: usize) -> Result<u16, BadScale> {
    let half = f16::from_le_bytes([block[at], block[at + 1]]);
    if half.is_finite() {
        Ok(half.to_bits())
    } else {
        Err(BadScale(half.to_f32()))
    }
}

/// Sets a column of nibbles from 16 bytes: byte i holds values i and 16 + i.
fn set_nibbles(qs: &mut Nibbles, column: usize, bytes: &[u8]) {
    for (g, four) in bytes.chunks_exact(4).enumerate() {
        qs[(g * LANES + column) * 4..][..4].copy_from_slice(four);
    }
}

/// Sets a column of nibbles from the low four bits of 32 values.
fn set_low_bits(qs: &mut Nibbles, column: usize, values: &[u8; BLOCK]) {
    let mut bytes = [0; BLOCK / 2];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = values[i] & 15 | values[BLOCK / 2 + i] << 4;
    }
    set_nibbles(qs, column, &bytes);
}

/// Sets a column of fifth bits; bit i of `bits` belongs to value i.
fn set_fifth(fifth: &mut [u8; 64], column: usize, bits: u32) {
    for j in 0..4 {
        // Bits j, j + 4, ..., j + 28.
        let byte = (0..8).fold(0, |byte, g| byte | (bits >> (4 * g + j) & 1) << g);
        fifth[4 * column + j] = byte as u8;
    }
}

impl FromBlocks for Q40Tile {
    const BYTES: usize = 18;
    const IN_FILE: usize = 1;

    fn set(&mut self, at: usize, column: usize, block: &[u8]) -> Result<(), BadScale> {
        self.d[at][column] = scale(block, 0)?;
        set_nibbles(&mut self.qs[at], column, &block[2..]);
        Ok(())
    }
}

impl FromBlocks for Q41Tile {
    const BYTES: usize = 20;
    const IN_FILE: usize = 1;

    fn set(&mut self, _at: usize, column: usize, block: &[u8]) -> Result<(), BadScale> {
        self.d[column] = scale(block, 0)?;
        self.min[column] = scale(block, 2)?;
        set_nibbles(&mut self.qs, column, &block[4..]);
        Ok(())
    }
}

impl FromBlocks for Q50Tile {
    const BYTES: usize = 22;
    const IN_FILE: usize = 1;

    fn set(&mut self, at: usize, column: usize, block: &[u8]) -> Result<(), BadScale> {
        self.d[at][column] = scale(block, 0)?;
        let bits = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
        set_fifth(&mut self.fifth[at], column, bits);
        set_nibbles(&mut self.qs[at], column, &block[6..]);
        Ok(())
    }
}

impl FromBlocks for Q51Tile {
    const BYTES: usize = 24;
    const IN_FILE: usize = 1;

    fn set(&mut self, _at: usize, column: usize, block: &[u8]) -> Result<(), BadScale> {
        self.d[column] = scale(block, 0)?;
        self.min[column] = scale(block, 2)?;
        let bits = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
        set_fifth(&mut self.fifth, column, bits);
        set_nibbles(&mut self.qs, column, &block[8..]);
        Ok(())
    }
}

impl FromBlocks for Q80Tile {
    const BYTES: usize = 34;
    const IN_FILE: usize = 1;

    fn set(&mut self, at: usize, column: usize, block: &[u8]) -> Result<(), BadScale> {
        self.d[at][column] = scale(block, 0)?;
        for (g, four) in block[2..].chunks_exact(4).enumerate() {
            let offset = [four[0] ^ 128, four[1] ^ 128, four[2] ^ 128, four[3] ^ 128];
            self.qs[at][(g * LANES + column) * 4..][..4].copy_from_slice(&offset);
        }
        Ok(())
    }
}

impl SuperScales {
    /// Sets a column from the first 16 bytes of a Q4_K or Q5_K block: d, dmin, and eight scales and minima of six bits.
    fn set(&mut self, column: usize, block: &[u8]) -> Result<(), BadScale> {
        self.d[column] = scale(block, 0)?;
        // The file's values are scale * q - dmin * min.
        self.min[column] = scale(block, 2)? ^ 0x8000;
        let q = &block[4..16];
        for i in 0..4 {
            self.scales[i][column] = q[i] & 63;
            self.mins[i][column] = q[4 + i] & 63;
            self.scales[4 + i][column] = q[8 + i] & 15 | q[i] >> 6 << 4;
            self.mins[4 + i][column] = q[8 + i] >> 4 | q[4 + i] >> 6 << 4;
        }
        Ok(())
    }
}

/// Sets a column of eight blocks of nibbles from the 128 bytes of a Q4_K or Q5_K block: byte i of each 32 holds value
/// i of two blocks.
fn set_super_nibbles(qs: &mut [Nibbles; 8], column: usize, bytes: &[u8]) {
    for (pair, bytes) in qs.chunks_exact_mut(2).zip(bytes.as_chunks::<BLOCK>().0) {
        set_low_bits(&mut pair[0], column, bytes);
        set_low_bits(&mut pair[1], column, &bytes.map(|b| b >> 4));
    }
}

impl FromBlocks for Q4KTile {
    const BYTES: usize = 144;
    const IN_FILE: usize = 8;

    fn set(&mut self, _at: usize, column: usize, block: &[u8]) -> Result<(), BadScale> {
        self.scales.set(column, block)?;
        set_super_nibbles(&mut self.qs, column, &block[16..]);
        Ok(())
    }
}

impl FromBlocks for Q5KTile {
    const BYTES: usize = 176;
    const IN_FILE: usize = 8;

    fn set(&mut self, _at: usize, column: usize, block: &[u8]) -> Result<(), BadScale> {
        self.scales.set(column, block)?;
        // Bit b of byte i is the fifth bit of value i of block b.
        for (b, fifth) in self.fifth.iter_mut().enumerate() {
            let bits = block[16..48].iter().enumerate();
            let bits = bits.fold(0, |bits, (i, byte)| bits | u32::from(byte >> b & 1) << i);
            set_fifth(fifth, column, bits);
        }
        set_super_nibbles(&mut self.qs, column, &block[48..]);
        Ok(())
    }
}

impl FromBlocks for Q6KTile {
    const BYTES: usize = 210;
    const IN_FILE: usize = 8;

    fn set(&mut self, _at: usize, column: usize, block: &[u8]) -> Result<(), BadScale> {
        self.d[column] = scale(block, 208)?;
        for b in 0..8 {
            // Of each half of 128 values: 64 bytes of nibbles, 32 bytes of two bits for each of its four blocks.
            let (half, quarter) = (b / 4, b % 4);
            let low = &block[64 * half + 32 * (quarter % 2)..][..BLOCK];
            let high = &block[128 + 32 * half..][..BLOCK];
            let mut values = [0; BLOCK];
            let mut two = [0; BLOCK];
            for i in 0..BLOCK {
                values[i] = low[i] >> (4 * (quarter / 2));
                two[i] = high[i] >> (2 * quarter) & 3;
            }
            set_low_bits(&mut self.qs[b], column, &values);
            for (two, high) in two.chunks_exact(BLOCK / 2).zip(&mut self.high[b]) {
                for j in 0..4 {
                    high[4 * column + j] = two[j] | two[4 + j] << 2 | two[8 + j] << 4 | two[12 + j] << 6;
                }
            }
            for (i, scales) in self.scales[b].iter_mut().enumerate() {
                scales[column] = block[192 + 2 * b + i].cast_signed();
            }
        }
        Ok(())
    }
}
