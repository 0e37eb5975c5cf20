//! The bytes of a KV block in one layer: K then V, each \[kv head\]\[token\]\[dim\], little-endian.
#![allow(unsafe_code, reason = "vectors are read from and written to bytes")]

use std::ops::Range;
use std::slice::ChunksExact;

use protocol::kv::{KvDtype, KvLayout};

use super::KernelError;
use super::cpu::Cpu;
use super::dispatch::{self, Kernel};
use super::lanes::{LANES, Lanes};
use super::math::load_part;
use super::pack::Line;

/// The halves of a block.
#[derive(Clone, Copy)]
pub(super) enum Half {
    Keys,
    Values,
}

/// Shape of a KV block in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements of one head's key, and of its value.
    pub head_dim: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Element type.
    pub dtype: KvDtype,
}

impl From<&KvLayout> for KvShape {
    fn from(layout: &KvLayout) -> Self {
        Self {
            num_kv_heads: layout.num_kv_heads as usize,
            head_dim: layout.head_dim as usize,
            block_tokens: layout.block_tokens as usize,
            dtype: layout.dtype,
        }
    }
}

impl KvShape {
    /// Bytes of a block in one layer.
    pub fn block_bytes(&self) -> usize {
        2 * self.half_bytes()
    }

    fn half_bytes(&self) -> usize {
        self.num_kv_heads * self.block_tokens * self.row_bytes()
    }

    /// Bytes of one head's key or value of one token.
    fn row_bytes(&self) -> usize {
        self.head_dim * self.dtype.size()
    }

    /// Where a token's row is in a half.
    #[inline(always)]
    fn row_at(&self, kv_head: usize, slot: usize) -> usize {
        (kv_head * self.block_tokens + slot) * self.row_bytes()
    }

    /// Keys or values of `slots` tokens in a block, one row after another.
    #[inline(always)]
    pub(super) fn rows<'a>(
        &self,
        block: &'a [u8],
        half: Half,
        kv_head: usize,
        slots: Range<usize>,
    ) -> ChunksExact<'a, u8> {
        let half = match half {
            Half::Keys => &block[..self.half_bytes()],
            Half::Values => &block[self.half_bytes()..],
        };
        let bytes = &half[self.row_at(kv_head, slots.start)..self.row_at(kv_head, slots.end)];
        bytes.chunks_exact(self.row_bytes())
    }
}

/// Writes one token's key and value, each \[kv heads\]\[dim\], into slot `slot` of a block; to half precision ties go
/// to even.
///
/// # Errors
/// If the slot is not in the block or a slice has the wrong length.
pub fn write_kv(
    cpu: &Cpu,
    shape: &KvShape,
    slot: usize,
    (key, value): (&[f32], &[f32]),
    block: &mut [u8],
) -> Result<(), KernelError> {
    if slot >= shape.block_tokens {
        let (what, rule) = ("slot of a KV block", "below the block's number of tokens");
        return Err(KernelError::Dimension {
            what,
            rule,
            found: slot,
        });
    }
    let row = shape.num_kv_heads * shape.head_dim;
    KernelError::check("length of a token's key", row, key.len())?;
    KernelError::check("length of a token's value", row, value.len())?;
    KernelError::check("bytes of a KV block in one layer", shape.block_bytes(), block.len())?;
    dispatch::run(
        cpu,
        Write {
            shape,
            slot,
            key,
            value,
            block,
        },
    );
    Ok(())
}

struct Write<'a> {
    shape: &'a KvShape,
    slot: usize,
    key: &'a [f32],
    value: &'a [f32],
    block: &'a mut [u8],
}

impl Kernel for Write<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        let (dim, size, dtype) = (self.shape.head_dim, self.shape.row_bytes(), self.shape.dtype);
        let (keys, values) = self.block.split_at_mut(self.shape.half_bytes());
        for (rows, half) in [(self.key, keys), (self.value, values)] {
            for (kv_head, row) in rows.chunks_exact(dim.max(1)).enumerate() {
                let at = self.shape.row_at(kv_head, self.slot);
                store_row::<S>(dtype, row, &mut half[at..at + size]);
            }
        }
    }
}

/// Stores a row; `bytes` is as long as the row takes.
#[inline(always)]
fn store_row<S: Lanes>(dtype: KvDtype, row: &[f32], bytes: &mut [u8]) {
    let step = LANES * dtype.size();
    for (x, bytes) in row.chunks(LANES).zip(bytes.chunks_mut(step)) {
        let v: S = load_part(x, 0);
        let mut buffer = [0u8; LANES * 4];
        // SAFETY: the buffer has room for 16 f32; it needs no alignment.
        unsafe {
            match dtype {
                KvDtype::F16 => v.store_f16(buffer.as_mut_ptr()),
                KvDtype::F32 => v.store(buffer.as_mut_ptr().cast()),
            }
        }
        bytes.copy_from_slice(&buffer[..bytes.len()]);
    }
}

/// A row of a block as f32, padded with zeros to whole lines.
#[inline(always)]
pub(super) fn load_row<S: Lanes>(dtype: KvDtype, row: &[u8], lines: &mut [Line]) {
    let step = LANES * dtype.size();
    let mut parts = row.chunks_exact(step);
    let mut lines = lines.iter_mut();
    for (part, line) in parts.by_ref().zip(lines.by_ref()) {
        // SAFETY: a part has 16 elements.
        line.0 = unsafe { load::<S>(dtype, part.as_ptr()) }.to_array();
    }
    if let (rest @ [_, ..], Some(line)) = (parts.remainder(), lines.next()) {
        let mut padded = [0u8; LANES * 4];
        padded[..rest.len()].copy_from_slice(rest);
        // SAFETY: the buffer has room for 16 of the widest elements.
        line.0 = unsafe { load::<S>(dtype, padded.as_ptr()) }.to_array();
    }
}

/// # Safety
/// `p` must be good for reading 16 elements; no alignment is needed.
#[inline(always)]
unsafe fn load<S: Lanes>(dtype: KvDtype, p: *const u8) -> S {
    // SAFETY: passed on from the caller.
    unsafe {
        match dtype {
            KvDtype::F16 => S::load_f16(p),
            KvDtype::F32 => S::load(p.cast()),
        }
    }
}
