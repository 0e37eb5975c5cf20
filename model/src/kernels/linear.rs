//! A packed weight matrix and its product with rows of activations.
#![allow(
    unsafe_code,
    reason = "threads write disjoint columns of one output through a pointer"
)]

use std::ops::Range;

use super::KernelError;
use super::attention::Unit;
use super::attention_unit::AttentionScratch;
use super::cpu::Cpu;
use super::dispatch::{self, IntKernel, Kernel};
use super::gemm::Product;
use super::ggml::GgmlType;
use super::int_gemm::{GROUP, Int8Block, IntProduct, Q4Weights, Q8Weights, Weights, quantise_row};
use super::lanes::{IntLanes, LANES, Lanes};
use super::pack::{BLOCK, Line, Packed, pack_dequantised, pack_f32, pack_q4, pack_q8};

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
    pub(super) activations: Vec<Int8Block>,
    pub(super) units: Vec<Unit>,
    pub(super) attention: Vec<AttentionScratch>,
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
        forward_many(cpu, &mut [(self, y)], x, m, scratch)
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

/// Several products of the same rows, for example a layer's query, key and value: the rows are rounded to int8 once.
/// Gives the same bits as one [`Linear::forward`] for each.
///
/// # Errors
/// If a slice has the wrong length, or quantised matrices want activations of different precision.
pub fn forward_many(
    cpu: &Cpu,
    products: &mut [(&Linear, &mut [f32])],
    x: &[f32],
    m: usize,
    scratch: &mut Scratch,
) -> Result<(), KernelError> {
    for (linear, y) in products.iter() {
        KernelError::check("length of a product's input", m.saturating_mul(linear.k), x.len())?;
        KernelError::check("length of a product's output", m.saturating_mul(linear.n), y.len())?;
    }
    if m == 0 {
        return Ok(());
    }
    let mut quantised = products
        .iter()
        .filter(|(linear, _)| !matches!(linear.packed, Packed::F32(_)))
        .map(|(linear, _)| linear.passes);
    if let Some(passes) = quantised.next() {
        if let Some(other) = quantised.find(|&other| other != passes) {
            KernelError::check("passes of a matrix that shares its input with others", passes, other)?;
        }
        quantise(cpu, x, m, passes, &mut scratch.activations);
    }
    for (linear, y) in products {
        let y = Output(y.as_mut_ptr());
        let tiles = linear.n.div_ceil(LANES);
        let mut parts = split(tiles, cpu.threads());
        cpu.each(&mut parts, |tiles| {
            let part = Part {
                linear,
                x,
                blocks: &scratch.activations,
                m,
                y,
                tiles: tiles.clone(),
            };
            match linear.packed {
                Packed::F32(_) => dispatch::run(cpu, part),
                Packed::Q4(_) | Packed::Q8 { .. } => dispatch::run_int(cpu, part),
            }
        });
    }
    Ok(())
}

/// 0..count in at most `parts` even ranges.
pub(super) fn split(count: usize, parts: usize) -> Vec<Range<usize>> {
    let parts = parts.min(count).max(1);
    (0..parts).map(|i| count * i / parts..count * (i + 1) / parts).collect()
}

/// Where threads write, each its own columns.
#[derive(Clone, Copy)]
struct Output(*mut f32);
// SAFETY: `forward_many` gives every thread other columns of the slice it borrows mutably, for the call's duration.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

/// A range of a matrix's tiles of columns, for all rows.
struct Part<'a> {
    linear: &'a Linear,
    x: &'a [f32],
    blocks: &'a [Int8Block],
    m: usize,
    y: Output,
    tiles: Range<usize>,
}

/// The product of one kind of weights. (A trait and not a closure: closures are not compiled with the caller's
/// instructions.)
trait Tiles<S> {
    /// The product for `tiles` tiles from `tile` on and some rows, to `y` with rows `y_row` apart.
    ///
    /// # Safety
    /// `y` must have room for them.
    unsafe fn product(&self, part: &Part<'_>, y: (*mut f32, usize), tiles: Range<usize>, rows: Range<usize>);
}

impl Part<'_> {
    /// The product for the full tiles, and for a last tile with fewer than 16 columns through a buffer, since a
    /// register tile always writes 16.
    #[inline(always)]
    fn run_tiles<S: Lanes>(&self, weights: impl Tiles<S>) {
        let Range { start, end } = self.tiles;
        let n = self.linear.n;
        let full = end.min(n / LANES);
        if start < full {
            let y = (self.y.0.wrapping_add(start * LANES), n);
            // SAFETY: y is m x n, as `forward_many` checked, and these tiles' columns are below n.
            unsafe { weights.product(self, y, start..full, 0..self.m) };
        }
        if full < end {
            let columns = n % LANES;
            let mut buffer = [0.0; 8 * LANES];
            for row in (0..self.m).step_by(8) {
                let rows = row..self.m.min(row + 8);
                // SAFETY: the buffer has 8 rows of one tile.
                unsafe { weights.product(self, (buffer.as_mut_ptr(), LANES), full..end, rows.clone()) };
                for (from, row) in buffer.chunks_exact(LANES).zip(rows) {
                    let to = self.y.0.wrapping_add(row * n + full * LANES);
                    // SAFETY: the last `columns` values of a row of y, which `forward_many` checked to be m x n, and
                    // which no other thread's tiles cover.
                    unsafe { to.copy_from_nonoverlapping(from.as_ptr(), columns) };
                }
            }
        }
    }
}

struct Floats<'a>(&'a [Line]);

impl<S: Lanes> Tiles<S> for Floats<'_> {
    #[inline(always)]
    unsafe fn product(&self, part: &Part<'_>, y: (*mut f32, usize), tiles: Range<usize>, rows: Range<usize>) {
        let k = part.linear.k;
        let product = Product {
            w: self.0[tiles.start * k..tiles.end * k].as_ptr().cast(),
            w_tile: k * LANES,
            w_k: LANES,
            k,
            x: part.x[rows.start * k..rows.end * k].as_ptr(),
            x_row: k,
            y: y.0,
            y_row: y.1,
            accumulate: false,
            prefetch: true,
        };
        // SAFETY: the slices above have the rows and tiles; the caller vouches for y.
        unsafe { product.run::<S>(rows.len(), tiles.len()) };
    }
}

struct Quants<W>(W);

impl<S: IntLanes, W: Weights> Tiles<S> for Quants<W> {
    #[inline(always)]
    unsafe fn product(&self, part: &Part<'_>, y: (*mut f32, usize), tiles: Range<usize>, rows: Range<usize>) {
        let blocks = part.linear.k / BLOCK;
        assert!(
            part.blocks.len() >= rows.end.next_multiple_of(GROUP) * blocks * part.linear.passes,
            "all rows were rounded to int8"
        );
        let product = IntProduct {
            w: self.0,
            tile: tiles.start,
            blocks,
            x: part.blocks.as_ptr(),
            passes: part.linear.passes,
            row: rows.start,
            y: y.0,
            y_row: y.1,
            prefetch: true,
        };
        // SAFETY: there are blocks of the rows; the matrix has the tiles, since `forward_many` splits those it has;
        // the caller vouches for y.
        unsafe { product.run::<S>(rows.len(), tiles.len()) };
    }
}

impl Kernel for Part<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        if let Packed::F32(lines) = &self.linear.packed {
            self.run_tiles::<S>(Floats(lines));
        }
    }
}

impl IntKernel for Part<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: IntLanes>(self) {
        match &self.linear.packed {
            Packed::Q4(tiles) => self.run_tiles::<S>(Quants(Q4Weights(tiles.as_ptr()))),
            Packed::Q8 { tiles, scales } => {
                self.run_tiles::<S>(Quants(Q8Weights(tiles.as_ptr(), scales.as_ptr())));
            }
            Packed::F32(_) => {}
        }
    }
}

/// Rounds `m` rows to int8 blocks.
fn quantise(cpu: &Cpu, x: &[f32], m: usize, passes: usize, out: &mut Vec<Int8Block>) {
    struct Quantise<'a> {
        x: &'a [f32],
        k: usize,
        passes: usize,
        out: &'a mut [Int8Block],
    }
    impl Kernel for Quantise<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Lanes>(self) {
            for (row, x) in self.x.chunks_exact(self.k).enumerate() {
                quantise_row(x, row, self.passes, self.out);
            }
        }
    }
    let k = x.len() / m;
    let len = m.next_multiple_of(GROUP) * (k / BLOCK) * passes;
    if out.len() < len {
        out.resize(len, Int8Block::ZERO);
    }
    dispatch::run(cpu, Quantise { x, k, passes, out });
}
