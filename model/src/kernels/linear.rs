//! A packed weight matrix and its product with rows of activations.
#![allow(
    unsafe_code,
    reason = "threads write disjoint columns of one output through a pointer"
)]

use std::ops::Range;

use half::{bf16, f16};

use super::KernelError;
use super::attention::AttentionBuffers;
use super::cpu::Cpu;
use super::dispatch::{self, IntKernel, Kernel};
use super::gemm::{Product, Weights16};
use super::ggml::GgmlType;
use super::int_gemm::IntProduct;
use super::int8_block::GROUP;
use super::lanes::{IntLanes, LANES, Lanes};
use super::operand::{Operand, Rows};
use super::pack::{BLOCK, Packed, Source, pack, pack_f32};
use super::shared::SharedMut;
use super::tiles::QuantTile;
use super::unpacked::HEIGHT;

/// How a quantised matrix is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearMode {
    /// Types with [`GgmlType::has_int8_kernel`] stay as they are and meet int8 activations. All others are as with
    /// [`LinearMode::Float32`].
    Quantised,
    /// The same with activations of about 15 bits: twice the arithmetic, close to what exact activations give.
    Precise,
    /// All products are in f32: F16 and BF16 weights are widened when they are read, all other types when they are
    /// packed.
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
        let packed = pack_f32(n, k, weights)?;
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
        Self::from_ggml_on(ggml_type, n, k, data, mode, 1)
    }

    /// [`Linear::from_ggml`] with `threads` threads.
    ///
    /// # Errors
    /// As [`Linear::from_ggml`].
    pub fn from_ggml_on(
        ggml_type: GgmlType,
        n: usize,
        k: usize,
        data: &[u8],
        mode: LinearMode,
        threads: usize,
    ) -> Result<Self, KernelError> {
        check_dimensions(n, k)?;
        let bytes = ggml_type.row_bytes(k)?.saturating_mul(n);
        KernelError::check("bytes of a weight tensor", bytes, data.len())?;
        let source = Source { n, k, data, threads };
        let packed = pack(ggml_type, source, mode != LinearMode::Float32)?;
        let passes = if mode == LinearMode::Precise { 2 } else { 1 };
        Ok(Self { n, k, packed, passes })
    }

    pub(super) fn packed(&self) -> &Packed {
        &self.packed
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
    pub(crate) fn passes(&self) -> usize {
        if self.packed.is_float() { 0 } else { self.passes }
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
        part.run(cpu);
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
    /// The product with the kernel of the matrix's kind.
    fn run(self, cpu: &Cpu) {
        match &self.linear.packed {
            Packed::F32(lines) => dispatch::run(cpu, Floats(self, Lines(lines.as_ptr().cast::<f32>()))),
            Packed::F16(lines) => dispatch::run(cpu, Floats(self, Lines(lines.as_ptr().cast::<f16>()))),
            Packed::Bf16(lines) => dispatch::run(cpu, Floats(self, Lines(lines.as_ptr().cast::<bf16>()))),
            Packed::Q40(tiles) => self.run_packed(cpu, tiles),
            Packed::Q41(tiles) => dispatch::run_int(cpu, Quants(self, tiles)),
            Packed::Q50(tiles) => self.run_packed(cpu, tiles),
            Packed::Q51(tiles) => self.run_packed(cpu, tiles),
            Packed::Q80(tiles) => dispatch::run_int(cpu, Quants(self, tiles)),
            Packed::Q4K(tiles) => self.run_packed(cpu, tiles),
            Packed::Q5K(tiles) => self.run_packed(cpu, tiles),
            Packed::Q6K(tiles) => self.run_packed(cpu, tiles),
        }
    }

    /// The product with weights whose bits must be taken apart: for all rows together if they are many.
    fn run_packed<Q: QuantTile>(self, cpu: &Cpu, tiles: &[Q]) {
        if self.operand.rows() < Q::MANY_ROWS {
            return dispatch::run_int(cpu, Quants(self, tiles));
        }
        if let Err(Unpacking(part, tiles)) = dispatch::run_wide(cpu, Unpacking(self, tiles)) {
            dispatch::run_int(cpu, Quants(part, tiles));
        }
    }

    /// The product for the full tiles, and for what a kernel cannot write itself tile by tile through a buffer: a last
    /// tile with fewer than 16 columns, since a register tile always writes 16, and sums of kernels that do not add.
    #[inline(always)]
    fn run_tiles<S: Lanes, W: Tiles<S>>(&self, weights: &W) {
        let (n, m, end) = (self.linear.n, self.operand.rows(), self.tiles.end);
        let full = if self.add && !W::ADDS { 0 } else { end.min(n / LANES) };
        let mut buffer = [0.0; GROUP * LANES];
        // Strips of rows, so that their activations stay in the second-level cache from tile to tile.
        let (mut tile, mut row) = (self.tiles.start, 0);
        // One call for both ways, since all of the kernel is inlined there.
        while tile < end {
            let direct = tile < full;
            let (place, tiles, height) = if direct {
                // y is m x n, as `products` checked, and these tiles' columns are below n.
                let y = self.y.wrapping_add(row * n + tile * LANES);
                let (y_row, add) = (n, self.add);
                (Place { y, y_row, add }, tile..full, HEIGHT)
            } else {
                // The buffer has as many rows of one tile.
                let y = buffer.as_mut_ptr();
                let (y_row, add) = (LANES, false);
                (Place { y, y_row, add }, tile..tile + 1, GROUP)
            };
            let rows = row..m.min(row + height);
            // SAFETY: the place has room for them, as said above.
            unsafe { weights.product(self, place, tiles, rows.clone()) };
            row = if rows.end == m { 0 } else { rows.end };
            if !direct {
                self.copy(&buffer, tile, rows);
            }
            if row == 0 {
                tile = if direct { full } else { tile + 1 };
            }
        }
    }

    /// Stores or adds rows of a tile that lie in a buffer.
    #[inline(always)]
    fn copy(&self, buffer: &[f32], tile: usize, rows: Range<usize>) {
        let n = self.linear.n;
        let columns = LANES.min(n - tile * LANES);
        for (from, row) in buffer.chunks_exact(LANES).zip(rows) {
            let to = self.y.wrapping_add(row * n + tile * LANES);
            // SAFETY: values of a tile in a row of y, which `products` checked to be m x n, and which no other thread's
            // tiles cover.
            let to = unsafe { std::slice::from_raw_parts_mut(to, columns) };
            for (to, from) in to.iter_mut().zip(from) {
                *to = if self.add { *to + *from } else { *from };
            }
        }
    }
}

/// A product with float weights.
struct Floats<'a, W>(Part<'a>, Lines<W>);

/// A matrix of float weights: lines of 16 for each (tile of columns, k).
struct Lines<W>(*const W);

impl<S: Lanes, W: Weights16> Tiles<S> for Lines<W> {
    const ADDS: bool = false;

    #[inline(always)]
    unsafe fn product(&self, part: &Part<'_>, place: Place, tiles: Range<usize>, rows: Range<usize>) {
        let k = part.linear.k;
        let product = Product {
            w: self.0.wrapping_add(tiles.start * k * LANES),
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
        // SAFETY: the slice above has the rows; the matrix has k lines for each of its tiles, and `products` splits those
        // it has; the caller vouches for the place.
        unsafe { product.run::<S>(rows.len(), tiles.len()) };
    }
}

impl<W: Weights16> Kernel for Floats<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run<S: Lanes>(self) {
        self.0.run_tiles::<S, _>(&self.1);
    }
}

/// A product with quantised weights.
struct Quants<'a, Q>(Part<'a>, &'a [Q]);

/// The same for many rows. (A kernel of its own: its buffers on the stack would cost a single row time.)
struct Unpacking<'a, Q>(Part<'a>, &'a [Q]);

/// Tiles that are taken apart once for all rows.
struct Once<'a, Q>(&'a [Q]);

/// The product of some tiles and rows of a part.
fn int_product<Q: QuantTile>(
    weights: &[Q],
    part: &Part<'_>,
    place: Place,
    tiles: &Range<usize>,
    rows: &Range<usize>,
) -> IntProduct<Q> {
    let blocks = part.linear.k / BLOCK;
    let x = part.operand.blocks();
    assert!(
        x.len() >= rows.end.next_multiple_of(GROUP) * blocks * part.linear.passes,
        "all rows were rounded to int8"
    );
    IntProduct {
        w: weights[tiles.start * blocks.div_ceil(Q::BLOCKS)..].as_ptr(),
        blocks,
        x: x.as_ptr(),
        passes: part.linear.passes,
        pass: 0,
        row: rows.start,
        y: place.y,
        y_row: place.y_row,
        add: place.add,
        prefetch: true,
    }
}

impl<S: IntLanes, Q: QuantTile> Tiles<S> for &[Q] {
    const ADDS: bool = true;

    #[inline(always)]
    unsafe fn product(&self, part: &Part<'_>, place: Place, tiles: Range<usize>, rows: Range<usize>) {
        let product = int_product(self, part, place, &tiles, &rows);
        // SAFETY: there are blocks of the rows' groups; the matrix has the tiles, since `products` splits those it has;
        // the caller vouches for the place.
        unsafe { product.run::<S>(rows.len(), tiles.len()) };
    }
}

impl<S: IntLanes, Q: QuantTile> Tiles<S> for Once<'_, Q> {
    const ADDS: bool = true;

    #[inline(always)]
    unsafe fn product(&self, part: &Part<'_>, place: Place, tiles: Range<usize>, rows: Range<usize>) {
        let product = int_product(self.0, part, place, &tiles, &rows);
        // SAFETY: as for `run`.
        unsafe { product.run_unpacked::<S>(rows.len(), tiles.len()) };
    }
}

impl<Q: QuantTile> IntKernel for Quants<'_, Q> {
    type Output = ();
    #[inline(always)]
    fn run<S: IntLanes>(self) {
        self.0.run_tiles::<S, _>(&self.1);
    }
}

impl<Q: QuantTile> IntKernel for Unpacking<'_, Q> {
    type Output = ();
    #[inline(always)]
    fn run<S: IntLanes>(self) {
        self.0.run_tiles::<S, _>(&Once(self.1));
    }
}
