//! A packed weight matrix and its product with rows of activations.
#![allow(
    unsafe_code,
    reason = "threads write disjoint columns of one output through a pointer"
)]

use std::ops::Range;

use super::KernelError;
use super::attention::AttentionBuffers;
use super::cpu::Cpu;
use super::dispatch::{self, IntKernel, Kernel};
use super::gemm::Product;
use super::ggml::GgmlType;
use super::int_gemm::{GROUP, IntProduct, Q4Weights, Q8Weights, Weights};
use super::lanes::{IntLanes, LANES, Lanes};
use super::operand::{Operand, Rows};
use super::pack::{BLOCK, Line, Packed, pack_dequantised, pack_f32, pack_q4, pack_q8};
use super::shared::SharedMut;

/// How a quantised matrix is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearMode {
    /// Quantised weights stay as they are and meet int8 activations.
    Quantised,
    /// The same with activations of about 15 bits: twice the arithmetic, close to what exact activations give.
    Precise,
    /// All weights become f32.
    Float32,
}

/// Buffers that kernels reuse from call to call. One for each thread that calls kernels.
#[derive(Default)]
pub struct Scratch {
    pub(super) operand: Operand,
    pub(super) attention: AttentionBuffers,
}

/// A weight matrix W\[n\]\[k\], packed for y = x W^T.
pub struct Linear {
    n: usize,
    k: usize,
    packed: Packed,
    /// Int8 blocks for each block of activations.
    passes: usize,
}

impl Linear {
    /// Packs f32 weights, `n` rows of `k`. The product is in f32.
    ///
    /// # Errors
    /// If `weights` is not `n * k` long or a dimension is 0.
    pub fn from_f32(n: usize, k: usize, weights: &[f32]) -> Result<Self, KernelError> {
        check_dimensions(n, k)?;
        KernelError::check("number of weights", n.saturating_mul(k), weights.len())?;
        let packed = pack_f32(n, k, |i, out| {
            out.copy_from_slice(&weights[i * k..(i + 1) * k]);
            Ok(())
        })?;
        Ok(Self {
            n,
            k,
            packed,
            passes: 1,
        })
    }

    /// Packs the bytes of a ggml tensor, `n` rows of `k`.
    ///
    /// # Errors
    /// If `data` has the wrong size, a dimension is 0 or does not fit the type, a scale is not finite, or the type
    /// cannot be read.
    pub fn from_ggml(
        ggml_type: GgmlType,
        n: usize,
        k: usize,
        data: &[u8],
        mode: LinearMode,
    ) -> Result<Self, KernelError> {
        check_dimensions(n, k)?;
        let bytes = ggml_type.row_bytes(k)?.saturating_mul(n);
        KernelError::check("bytes of a weight tensor", bytes, data.len())?;
        let packed = match (mode, ggml_type) {
            (LinearMode::Float32, _) => pack_dequantised(ggml_type, n, k, data),
            (_, GgmlType::Q4_0) => pack_q4(n, k, data, false),
            (_, GgmlType::Q4_1) => pack_q4(n, k, data, true),
            (_, GgmlType::Q8_0) => pack_q8(n, k, data),
            _ => pack_dequantised(ggml_type, n, k, data),
        }?;
        let passes = if mode == LinearMode::Precise { 2 } else { 1 };
        Ok(Self { n, k, packed, passes })
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes of the packed weights.
    pub fn bytes(&self) -> usize {
        self.packed.bytes()
    }

    /// An error unless the operand has the rows in the form that this matrix takes.
    fn check_operand(&self, operand: &Operand) -> Result<(), KernelError> {
        KernelError::check("input features of a product's operand", self.k, operand.k())?;
        match self.passes() {
            0 => KernelError::check(
                "f32 values of a product's operand",
                operand.rows() * self.k,
                operand.floats().len(),
            ),
            passes => KernelError::check("passes of a product's operand", passes, operand.passes()),
        }
    }

    /// Int8 blocks that it wants of each block of activations; 0 if it takes f32.
    pub(super) fn passes(&self) -> usize {
        if matches!(self.packed, Packed::F32(_)) {
            0
        } else {
            self.passes
        }
    }

    /// y\[m\]\[n\] = x\[m\]\[k\] W^T.
    ///
    /// # Errors
    /// If a slice has the wrong length.
    pub fn forward(
        &self,
        cpu: &Cpu,
        x: &[f32],
        m: usize,
        y: &mut [f32],
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        KernelError::check("length of a product's input", m.saturating_mul(self.k), x.len())?;
        scratch.operand.prepare(cpu, Rows::Plain(x), &[self])?;
        products(cpu, &scratch.operand, [(self, Target::Store(y))])
    }
}

fn check_dimensions(n: usize, k: usize) -> Result<(), KernelError> {
    let rule = "at least 1";
    match (n, k) {
        (0, _) => Err(KernelError::Dimension {
            what: "output features of a weight matrix",
            rule,
            found: 0,
        }),
        (_, 0) => Err(KernelError::Dimension {
            what: "input features of a weight matrix",
            rule,
            found: 0,
        }),
        _ => Ok(()),
    }
}

/// Where a product goes, \[m\]\[n\].
pub enum Target<'a> {
    /// Replaces what is there.
    Store(&'a mut [f32]),
    /// Is added to what is there.
    Add(&'a mut [f32]),
}

/// Tiles of columns that a thread takes at a time, at least: enough to keep its registers full.
const SHARE: usize = 8;

/// Several products of the same rows, for example a layer's query, key and value.
///
/// # Errors
/// If a target has the wrong length, or the operand was prepared for other matrices.
pub fn products<const N: usize>(
    cpu: &Cpu,
    operand: &Operand,
    products: [(&Linear, Target<'_>); N],
) -> Result<(), KernelError> {
    let m = operand.rows();
    for (linear, target) in &products {
        let (Target::Store(y) | Target::Add(y)) = target;
        KernelError::check("length of a product's output", m.saturating_mul(linear.n), y.len())?;
        linear.check_operand(operand)?;
    }
    if m == 0 {
        return Ok(());
    }
    let jobs = products.map(|(linear, target)| {
        let (y, add) = match target {
            Target::Store(y) => (y, false),
            Target::Add(y) => (y, true),
        };
        let y = SharedMut::new(y);
        let tiles = linear.n.div_ceil(LANES);
        // One share for each thread would make all wait for the one that the system holds up.
        let share = if cpu.threads() == 1 {
            tiles
        } else {
            tiles.div_ceil(4 * cpu.threads()).next_multiple_of(SHARE)
        };
        Job {
            linear,
            y,
            add,
            share,
            shares: tiles.div_ceil(share),
        }
    });
    let shares = jobs.iter().map(|job| job.shares).sum();
    cpu.share(shares, |mut index| {
        for job in &jobs {
            if index < job.shares {
                return job.run(cpu, operand, index);
            }
            index -= job.shares;
        }
    });
    Ok(())
}

/// One of the products of a call.
struct Job<'a> {
    linear: &'a Linear,
    y: SharedMut<'a, f32>,
    add: bool,
    /// Tiles that are taken at a time.
    share: usize,
    shares: usize,
}

impl Job<'_> {
    fn run(&self, cpu: &Cpu, operand: &Operand, index: usize) {
        let tiles = self.linear.n.div_ceil(LANES);
        let part = Part {
            linear: self.linear,
            operand,
            y: self.y.start(),
            add: self.add,
            tiles: index * self.share..tiles.min((index + 1) * self.share),
        };
        match self.linear.packed {
            Packed::F32(_) => dispatch::run(cpu, part),
            Packed::Q4(_) | Packed::Q8 { .. } => dispatch::run_int(cpu, part),
        }
    }
}

/// A range of a matrix's tiles of columns, for all rows. No two parts of a call have a tile in common.
struct Part<'a> {
    linear: &'a Linear,
    operand: &'a Operand,
    /// All columns' output, rows `linear.n` apart; as many rows as the operand has.
    y: *mut f32,
    add: bool,
    tiles: Range<usize>,
}

/// Where the product of some tiles goes.
#[derive(Clone, Copy)]
struct Place {
    y: *mut f32,
    y_row: usize,
    add: bool,
}

/// The product of one kind of weights. (A trait and not a closure: closures are not compiled with the caller's
/// instructions.)
trait Tiles<S> {
    /// True if [`Tiles::product`] can add.
    const ADDS: bool;

    /// The product for some tiles and rows.
    ///
    /// # Safety
    /// The place must have room for them.
    unsafe fn product(&self, part: &Part<'_>, place: Place, tiles: Range<usize>, rows: Range<usize>);
}

impl Part<'_> {
    /// The product for the full tiles, and for a last tile with fewer than 16 columns through a buffer, since a
    /// register tile always writes 16.
    #[inline(always)]
    fn run_tiles<S: Lanes, W: Tiles<S>>(&self, weights: W) {
        let Range { start, end } = self.tiles;
        let n = self.linear.n;
        let full = if self.add && !W::ADDS {
            start
        } else {
            end.min(n / LANES)
        };
        if start < full {
            let place = Place {
                y: self.y.wrapping_add(start * LANES),
                y_row: n,
                add: self.add,
            };
            // SAFETY: y is m x n, as `products` checked, and these tiles' columns are below n.
            unsafe { weights.product(self, place, start..full, 0..self.operand.rows()) };
        }
        for tile in full..end {
            self.buffered(&weights, tile);
        }
    }

    /// The product for one tile by way of a buffer.
    #[inline(always)]
    fn buffered<S: Lanes, W: Tiles<S>>(&self, weights: &W, tile: usize) {
        let (n, m) = (self.linear.n, self.operand.rows());
        let columns = LANES.min(n - tile * LANES);
        let mut buffer = [0.0; 8 * LANES];
        for row in (0..m).step_by(8) {
            let rows = row..m.min(row + 8);
            let place = Place {
                y: buffer.as_mut_ptr(),
                y_row: LANES,
                add: false,
            };
            // SAFETY: the buffer has 8 rows of one tile.
            unsafe { weights.product(self, place, tile..tile + 1, rows.clone()) };
            for (from, row) in buffer.chunks_exact(LANES).zip(rows) {
                let to = self.y.wrapping_add(row * n + tile * LANES);
                // SAFETY: values of a tile in a row of y, which `products` checked to be m x n, and which no other
                // thread's tiles cover.
                let to = unsafe { std::slice::from_raw_parts_mut(to, columns) };
                for (to, from) in to.iter_mut().zip(from) {
                    *to = if self.add { *to + *from } else { *from };
                }
            }
        }
    }
}

struct Floats<'a>(&'a [Line]);

impl<S: Lanes> Tiles<S> for Floats<'_> {
    const ADDS: bool = false;

    #[inline(always)]
    unsafe fn product(&self, part: &Part<'_>, place: Place, tiles: Range<usize>, rows: Range<usize>) {
        let k = part.linear.k;
        let product = Product {
            w: self.0[tiles.start * k..tiles.end * k].as_ptr().cast(),
            w_tile: k * LANES,
            w_k: LANES,
            k,
            x: part.operand.floats()[rows.start * k..rows.end * k].as_ptr(),
            x_row: k,
            y: place.y,
            y_row: place.y_row,
            accumulate: false,
            prefetch: true,
        };
        // SAFETY: the slices above have the rows and tiles; the caller vouches for the place.
        unsafe { product.run::<S>(rows.len(), tiles.len()) };
    }
}

struct Quants<W>(W);

impl<S: IntLanes, W: Weights> Tiles<S> for Quants<W> {
    const ADDS: bool = true;

    #[inline(always)]
    unsafe fn product(&self, part: &Part<'_>, place: Place, tiles: Range<usize>, rows: Range<usize>) {
        let blocks = part.linear.k / BLOCK;
        let x = part.operand.blocks();
        assert!(
            x.len() >= rows.end.next_multiple_of(GROUP) * blocks * part.linear.passes,
            "all rows were rounded to int8"
        );
        let product = IntProduct {
            w: self.0,
            tile: tiles.start,
            blocks,
            x: x.as_ptr(),
            passes: part.linear.passes,
            pass: 0,
            row: rows.start,
            y: place.y,
            y_row: place.y_row,
            add: place.add,
            prefetch: true,
        };
        // SAFETY: there are blocks of the rows; the matrix has the tiles, since `products` splits those it has; the
        // caller vouches for the place.
        unsafe { product.run::<S>(rows.len(), tiles.len()) };
    }
}

impl Kernel for Part<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        if let Packed::F32(lines) = &self.linear.packed {
            self.run_tiles::<S, _>(Floats(lines));
        }
    }
}

impl IntKernel for Part<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: IntLanes>(self) {
        match &self.linear.packed {
            Packed::Q4(tiles) => self.run_tiles::<S, _>(Quants(Q4Weights(tiles.as_ptr()))),
            Packed::Q8 { tiles, scales } => {
                self.run_tiles::<S, _>(Quants(Q8Weights(tiles.as_ptr(), scales.as_ptr())));
            }
            Packed::F32(_) => {}
        }
    }
}
