//! The bytes of a KV block in one layer, in the order that [`protocol::kv::KvLayout`] fixes, and how they are written.
#![allow(
    unsafe_code,
    reason = "vectors are written to bytes; a key's elements lie a block's length apart"
)]

use protocol::kv::{KvDtype, KvLayout};

use super::KernelError;
use super::cpu::Cpu;
use super::dispatch::{self, Kernel};
use super::kv_element::{Element, ElementKernel, with_element};
use super::lanes::{LANES, Lanes};
use super::math::load_part;

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
    /// Keys are values as well: a head has no values, nor scales for them.
    pub latent: bool,
}

impl From<&KvLayout> for KvShape {
    fn from(layout: &KvLayout) -> Self {
        Self {
            num_kv_heads: layout.num_kv_heads as usize,
            head_dim: layout.head_dim as usize,
            block_tokens: layout.block_tokens as usize,
            dtype: layout.dtype,
            latent: layout.latent,
        }
    }
}

impl KvShape {
    /// Bytes of a block in one layer.
    pub fn block_bytes(&self) -> usize {
        self.num_kv_heads * self.head_bytes()
    }

    /// Bytes of one head in a block: keys, values and their scales.
    #[inline(always)]
    pub(super) fn head_bytes(&self) -> usize {
        self.halves() * (self.half_bytes() + self.block_tokens * self.dtype.scale_bytes())
    }

    /// Keys and values, or keys alone.
    #[inline(always)]
    fn halves(&self) -> usize {
        if self.latent { 1 } else { 2 }
    }

    /// Bytes of a head's keys, or of its values. The keys come first.
    #[inline(always)]
    pub(super) fn half_bytes(&self) -> usize {
        self.head_dim * self.block_tokens * self.dtype.size()
    }

    /// Where the scale of a slot's key is in a head; that of its value, if it has one, is `block_tokens` scales behind.
    #[inline(always)]
    pub(super) fn scale_at(&self, slot: usize) -> usize {
        self.halves() * self.half_bytes() + slot * self.dtype.scale_bytes()
    }
}

/// Keys or values of some tokens to be written: \[token\]\[kv heads\]\[dim\].
type Rows<'a> = &'a [f32];

/// Writes the keys and values of tokens, \[token\]\[kv heads\]\[dim\] each, into a block, from slot `slot` on. There are
/// no values for a latent cache.
///
/// Numbers are rounded to the element type, ties to even. For [`KvDtype::Int8`] a head's row of a token is stored as
/// round(x / s) with s = largest |x| / 127 in single precision; s is NaN, so that the row is, if some x is not finite.
///
/// # Errors
/// If the slots are not in the block or a slice has the wrong length.
pub fn write_kv(
    cpu: &Cpu,
    shape: &KvShape,
    slot: usize,
    (keys, values): (&[f32], &[f32]),
    block: &mut [u8],
) -> Result<(), KernelError> {
    let row = shape.num_kv_heads * shape.head_dim;
    let tokens = keys.len() / row.max(1);
    if slot.saturating_add(tokens) > shape.block_tokens {
        let (what, rule) = ("end of the slots of a KV block", "at most the block's number of tokens");
        return Err(KernelError::Dimension {
            what,
            rule,
            found: slot.saturating_add(tokens),
        });
    }
    KernelError::check("length of the tokens' keys", tokens * row, keys.len())?;
    let value_row = if shape.latent { 0 } else { row };
    KernelError::check("length of the tokens' values", tokens * value_row, values.len())?;
    KernelError::check("bytes of a KV block in one layer", shape.block_bytes(), block.len())?;
    if tokens > 0 {
        dispatch::run(
            cpu,
            Write {
                shape,
                slot,
                tokens,
                keys,
                values,
                block,
            },
        );
    }
    Ok(())
}

/// Asks for the memory of one slot of a block; does nothing for a block of the wrong size.
pub fn prefetch_slot(cpu: &Cpu, shape: &KvShape, slot: usize, block: &[u8]) {
    if block.len() == shape.block_bytes() && slot < shape.block_tokens {
        dispatch::run(cpu, Prefetch { shape, slot, block });
    }
}

struct Prefetch<'a> {
    shape: &'a KvShape,
    slot: usize,
    block: &'a [u8],
}

impl Kernel for Prefetch<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        const CACHE_LINE: usize = 64;
        let (shape, size) = (self.shape, self.shape.dtype.size());
        // A key has an element in every row of the block; in small blocks a cache line holds several rows.
        let rows = (CACHE_LINE / (shape.block_tokens * size)).max(1);
        for head in 0..shape.num_kv_heads {
            let start = self.block.as_ptr().wrapping_add(head * shape.head_bytes());
            for d in (0..shape.head_dim).step_by(rows) {
                S::prefetch(start.wrapping_add((d * shape.block_tokens + self.slot) * size));
            }
            if shape.latent {
                continue;
            }
            let value = start.wrapping_add(shape.half_bytes() + self.slot * shape.head_dim * size);
            for at in (0..shape.head_dim * size).step_by(CACHE_LINE) {
                S::prefetch(value.wrapping_add(at));
            }
        }
    }
}

struct Write<'a> {
    shape: &'a KvShape,
    slot: usize,
    tokens: usize,
    keys: Rows<'a>,
    values: Rows<'a>,
    block: &'a mut [u8],
}

impl Kernel for Write<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        with_element::<S>(self.shape.dtype, self);
    }
}

impl ElementKernel for Write<'_> {
    #[inline(always)]
    fn run<S: Lanes, E: Element>(mut self) {
        let shape = self.shape;
        for head in 0..shape.num_kv_heads {
            // As many at a time as a vector of keys holds.
            for first in (0..self.tokens).step_by(LANES) {
                let count = LANES.min(self.tokens - first);
                let all = [self.keys, self.values];
                let halves = &all[..shape.halves()];
                let mut scales = [([1.0; LANES], [1.0; LANES]); 2];
                for (scales, x) in scales.iter_mut().zip(halves) {
                    *scales = self.scales::<S, E>(x, head, first, count);
                }
                self.write_keys::<S, E>(head, first, count, &scales[0].1);
                if !shape.latent {
                    self.write_values::<S, E>(head, first, count, &scales[1].1);
                }
                if E::SCALED {
                    let at = head * shape.head_bytes() + shape.scale_at(self.slot + first);
                    for (i, (scales, _)) in scales.iter().take(halves.len()).enumerate() {
                        let at = at + i * shape.block_tokens * size_of::<f32>();
                        let bytes = self.block[at..at + count * size_of::<f32>()].chunks_exact_mut(size_of::<f32>());
                        for (scale, bytes) in scales.iter().zip(bytes) {
                            bytes.copy_from_slice(&scale.to_le_bytes());
                        }
                    }
                }
            }
        }
    }
}

impl<'a> Write<'a> {
    /// A token's row of a head.
    #[inline(always)]
    fn row(&self, x: Rows<'a>, head: usize, token: usize) -> &'a [f32] {
        let dim = self.shape.head_dim;
        &x[(token * self.shape.num_kv_heads + head) * dim..][..dim]
    }

    /// Scales of some tokens' rows, and what to multiply the rows with.
    #[inline(always)]
    fn scales<S: Lanes, E: Element>(
        &self,
        x: Rows<'a>,
        head: usize,
        first: usize,
        count: usize,
    ) -> ([f32; LANES], [f32; LANES]) {
        let (mut scales, mut factors) = ([1.0; LANES], [1.0; LANES]);
        if E::SCALED {
            for i in 0..count {
                (scales[i], factors[i]) = int8_scale::<S>(self.row(x, head, first + i));
            }
        }
        (scales, factors)
    }

    /// Sixteen elements of a row as they are stored.
    #[inline(always)]
    fn part<S: Lanes, E: Element>(row: &[f32], at: usize, factor: f32) -> S {
        let v: S = load_part(row, at);
        if E::SCALED {
            // A NaN becomes 127 here; the scale makes it a NaN again.
            v.mul(S::splat(factor)).min(S::splat(127.0)).max(S::splat(-127.0))
        } else {
            v
        }
    }

    /// Keys go where their dimension's row of the block is, at their slots.
    #[inline(always)]
    fn write_keys<S: Lanes, E: Element>(&mut self, head: usize, first: usize, count: usize, factors: &[f32; LANES]) {
        let (shape, slot) = (self.shape, self.slot + first);
        let base = head * shape.head_bytes() + slot * E::SIZE;
        let dim_step = shape.block_tokens * E::SIZE;
        for d in (0..shape.head_dim).step_by(LANES) {
            let dims = LANES.min(shape.head_dim - d);
            if count == LANES {
                let mut rows = [S::splat(0.0); LANES];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = Self::part::<S, E>(self.row(self.keys, head, first + i), d, factors[i]);
                }
                for (i, column) in S::transpose(rows).into_iter().take(dims).enumerate() {
                    let to = &mut self.block[base + (d + i) * dim_step..][..LANES * E::SIZE];
                    // SAFETY: the slice has 16 elements.
                    unsafe { E::store(column, to.as_mut_ptr()) };
                }
                continue;
            }
            for (i, &factor) in factors.iter().enumerate().take(count) {
                let part = Self::part::<S, E>(self.row(self.keys, head, first + i), d, factor);
                let mut buffer = [0u8; LANES * size_of::<f32>()];
                // SAFETY: the buffer has room for 16 of the widest elements.
                unsafe { E::store(part, buffer.as_mut_ptr()) };
                let at = base + d * dim_step + i * E::SIZE;
                for (j, element) in buffer.chunks_exact(E::SIZE).take(dims).enumerate() {
                    self.block[at + j * dim_step..][..E::SIZE].copy_from_slice(element);
                }
            }
        }
    }

    /// Values lie token by token.
    #[inline(always)]
    fn write_values<S: Lanes, E: Element>(&mut self, head: usize, first: usize, count: usize, factors: &[f32; LANES]) {
        let (shape, slot) = (self.shape, self.slot + first);
        let base = head * shape.head_bytes() + shape.half_bytes() + slot * shape.head_dim * E::SIZE;
        for (i, &factor) in factors.iter().enumerate().take(count) {
            let row = self.row(self.values, head, first + i);
            let to = &mut self.block[base + i * row.len() * E::SIZE..][..row.len() * E::SIZE];
            for (part, to) in to.chunks_mut(LANES * E::SIZE).enumerate() {
                let v = Self::part::<S, E>(row, part * LANES, factor);
                if to.len() == LANES * E::SIZE {
                    // SAFETY: the slice has 16 elements.
                    unsafe { E::store(v, to.as_mut_ptr()) };
                } else {
                    let mut buffer = [0u8; LANES * size_of::<f32>()];
                    // SAFETY: the buffer has room for 16 of the widest elements.
                    unsafe { E::store(v, buffer.as_mut_ptr()) };
                    to.copy_from_slice(&buffer[..to.len()]);
                }
            }
        }
    }
}

/// The scale of a row in signed bytes, and what to multiply the row with: the largest number becomes 127.
#[inline(always)]
fn int8_scale<S: Lanes>(row: &[f32]) -> (f32, f32) {
    let (mut largest, mut finite) = (S::splat(0.0), S::splat(0.0));
    for at in (0..row.len()).step_by(LANES) {
        let v: S = load_part(row, at);
        largest = largest.max(v).max(S::splat(0.0).sub(v));
        // 0 for a finite number, else NaN.
        finite = finite.add(v.mul(S::splat(0.0)));
    }
    if finite.sum().is_nan() {
        return (f32::NAN, 0.0);
    }
    let scale = largest.largest() / 127.0;
    let factor = 1.0 / scale;
    // A row of nothing, or of next to nothing, is stored as nothing.
    if factor.is_finite() {
        (scale, factor)
    } else {
        (0.0, 0.0)
    }
}
