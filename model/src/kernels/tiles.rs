//! Quantised weights in tiles of 16 output features, as the file has them bit for bit, and how a kernel reads them.
//!
//! A tile holds one or more blocks of 32 of k, so that it fills whole cache lines; the tiles of 16 columns lie one
//! after the other in the order of k, so that a product with one row reads memory in one stream. Quants are unsigned,
//! above their value by an offset that the integer sums start with. Byte (g, column, j) of a block's nibbles holds
//! k = 4 g + j in its low half and k = 16 + 4 g + j in its high half.
#![allow(unsafe_code, reason = "tiles are read by pointer")]

use bytemuck::Zeroable;

use super::lanes::{IntLanes, LANES};
use super::pack::BLOCK;

/// One number for each column.
pub(super) type Columns<T> = [T; LANES];
/// The low four bits of 16 columns x 32 of k.
pub(super) type Nibbles = [u8; 256];

/// How a block's integers become its values; see `int_gemm::add_block`.
pub(super) enum Form {
    /// One scale.
    Plain,
    /// A scale and a minimum.
    Minimum,
    /// A scale for each 16 of k.
    Halves,
}

/// A kind of tile. Pointers to tiles are aligned as the tile is.
pub(super) trait QuantTile: Copy + Send + Sync {
    /// Blocks of 32 of k in a tile.
    const BLOCKS: usize;
    const FORM: Form;
    /// Register tiles are 8 rows high and one tile of columns wide instead of 4 and 2: worth it where taking a weight's
    /// bits apart costs more than loading activations.
    const TALL: bool = false;
    /// What quants are above their value.
    const OFFSET: u8;
    /// Rows from which on it is faster to take a weight's bits apart once for all of them (see `unpacked`): never, unless
    /// there is much to be done.
    const MANY_ROWS: usize = usize::MAX;

    /// What a sum of products starts with: `negative`, minus the sum of the activations, times the offset of the quants;
    /// `negative_128` is 128 times the former.
    fn start<S: IntLanes>(negative: i32, negative_128: i32) -> S::Int;

    /// The quants of k = 16 HALF + 4 G to 16 HALF + 4 G + 3.
    /// # Safety
    /// `tile` must point to a tile and `block` be below [`QuantTile::BLOCKS`].
    unsafe fn quants<S: IntLanes, const HALF: usize, const G: usize>(tile: *const Self, block: usize) -> S::Bytes;

    /// Adds the products of quants with four activations.
    #[inline(always)]
    fn dot<S: IntLanes>(acc: S::Int, quants: S::Bytes, x: i32) -> S::Int {
        S::dot_small(acc, quants, x)
    }

    /// The block's scales; then its minima ([`Form::Minimum`]) or the second half's scales ([`Form::Halves`]). They
    /// are exact: products of an 11-bit and at most an 8-bit number.
    /// # Safety
    /// As [`QuantTile::quants`].
    unsafe fn scales<S: IntLanes>(tile: *const Self, block: usize) -> [S; 2];
}

/// Q4_0: value = d * (q - 8).
#[repr(C, align(64))]
#[derive(Clone, Copy, Zeroable)]
pub(super) struct Q40Tile {
    pub(super) qs: [Nibbles; 2],
    pub(super) d: [Columns<u16>; 2],
}

/// Q4_1: value = d * q + min.
#[repr(C, align(64))]
#[derive(Clone, Copy, Zeroable)]
pub(super) struct Q41Tile {
    pub(super) qs: Nibbles,
    pub(super) d: Columns<u16>,
    pub(super) min: Columns<u16>,
}

/// Q5_0: value = d * (q - 16).
#[repr(C, align(64))]
#[derive(Clone, Copy, Zeroable)]
pub(super) struct Q50Tile {
    pub(super) qs: [Nibbles; 2],
    /// Bit g (for low nibbles) or 4 + g (for high ones) of byte (column, j) is the fifth bit of (g, column, j).
    pub(super) fifth: [[u8; 64]; 2],
    pub(super) d: [Columns<u16>; 2],
}

/// Q5_1: value = d * q + min.
#[repr(C, align(64))]
#[derive(Clone, Copy, Zeroable)]
pub(super) struct Q51Tile {
    pub(super) qs: Nibbles,
    /// As in [`Q50Tile`].
    pub(super) fifth: [u8; 64],
    pub(super) d: Columns<u16>,
    pub(super) min: Columns<u16>,
}

/// Q8_0: value = d * (q - 128). Byte (g, column, j) holds k = 4 g + j.
#[repr(C, align(64))]
#[derive(Clone, Copy, Zeroable)]
pub(super) struct Q80Tile {
    pub(super) qs: [[u8; 512]; 2],
    pub(super) d: [Columns<u16>; 2],
}

/// Scales of a super-block of Q4_K or Q5_K: scale = d * scales, min = min * mins.
#[repr(C)]
#[derive(Clone, Copy, Zeroable)]
pub(super) struct SuperScales {
    pub(super) scales: [Columns<u8>; 8],
    pub(super) mins: [Columns<u8>; 8],
    pub(super) d: Columns<u16>,
    /// Minus the file's `dmin`.
    pub(super) min: Columns<u16>,
}

/// Q4_K: value = scale * q + min.
#[repr(C, align(64))]
#[derive(Clone, Copy, Zeroable)]
pub(super) struct Q4KTile {
    pub(super) qs: [Nibbles; 8],
    pub(super) scales: SuperScales,
}

/// Q5_K: value = scale * q + min.
#[repr(C, align(64))]
#[derive(Clone, Copy, Zeroable)]
pub(super) struct Q5KTile {
    pub(super) qs: [Nibbles; 8],
    /// As in [`Q50Tile`].
    pub(super) fifth: [[u8; 64]; 8],
    pub(super) scales: SuperScales,
}

/// Q6_K: value = d * scale * (q - 32), a scale for each 16 of k.
#[repr(C, align(64))]
#[derive(Clone, Copy, Zeroable)]
pub(super) struct Q6KTile {
    pub(super) qs: [Nibbles; 8],
    /// For low and for high nibbles: bits 2 g and 2 g + 1 of byte (column, j) are the fifth and sixth of
    /// (g, column, j).
    pub(super) high: [[[u8; 64]; 2]; 8],
    pub(super) scales: [[Columns<i8>; 2]; 8],
    pub(super) d: Columns<u16>,
    /// To a full cache line.
    pub(super) padding: [u8; 32],
}

/// Where 64 bytes of a tile lie.
///
/// # Safety
/// `field` must be inside of a tile, at a multiple of 64 bytes, and `at + 64` not beyond its end.
#[inline(always)]
unsafe fn bytes<S: IntLanes, T>(field: *const T, at: usize) -> S::Bytes {
    // SAFETY: as the caller says.
    unsafe { S::load_bytes(field.cast::<u8>().add(at)) }
}

/// Group G of a block's low (HALF 0) or high nibbles.
///
/// # Safety
/// `qs` must point to the nibbles of a tile's block.
#[inline(always)]
unsafe fn nibbles<S: IntLanes, const HALF: usize, const G: usize>(qs: *const Nibbles) -> S::Bytes {
    // SAFETY: as the caller says; G < 4.
    let both = unsafe { bytes::<S, _>(qs, 64 * G) };
    if HALF == 0 {
        S::low_nibbles(both)
    } else {
        S::high_nibbles(both)
    }
}

/// Sixteen halves.
///
/// # Safety
/// `field` must be good for reading.
#[inline(always)]
unsafe fn halves<S: IntLanes>(field: *const Columns<u16>) -> S {
    // SAFETY: as the caller says.
    unsafe { S::load_f16(field.cast()) }
}

/// A pointer to element `$block` of an array field, which the compiler need not check against the array's length.
macro_rules! field {
    ($tile:ident, $field:ident, $block:ident) => {
        first(&raw const (*$tile).$field).add($block)
    };
}

/// A pointer to an array's first element.
#[inline(always)]
fn first<T, const N: usize>(array: *const [T; N]) -> *const T {
    array.cast()
}

/// [`QuantTile::OFFSET`] and [`QuantTile::start`] of tiles without an offset, and of those with 2^shift.
macro_rules! start {
    (none) => {
        const OFFSET: u8 = 0;
        #[inline(always)]
        fn start<S: IntLanes>(_negative: i32, _negative_128: i32) -> S::Int {
            S::int_zero()
        }
    };
    ($shift:literal) => {
        const OFFSET: u8 = 1 << $shift;
        #[inline(always)]
        fn start<S: IntLanes>(negative: i32, _negative_128: i32) -> S::Int {
            S::shifted::<$shift>(negative)
        }
    };
}

impl QuantTile for Q40Tile {
    const BLOCKS: usize = 2;
    const FORM: Form = Form::Plain;
    const MANY_ROWS: usize = 64;
    start!(3);

    #[inline(always)]
    unsafe fn quants<S: IntLanes, const HALF: usize, const G: usize>(tile: *const Self, block: usize) -> S::Bytes {
        // SAFETY: the caller vouches for the tile.
        unsafe { nibbles::<S, HALF, G>(field!(tile, qs, block)) }
    }
    #[inline(always)]
    unsafe fn scales<S: IntLanes>(tile: *const Self, block: usize) -> [S; 2] {
        // SAFETY: the caller vouches for the tile.
        unsafe { [halves(field!(tile, d, block)), S::splat(0.0)] }
    }
}

impl QuantTile for Q41Tile {
    const BLOCKS: usize = 1;
    const FORM: Form = Form::Minimum;
    start!(none);

    #[inline(always)]
    unsafe fn quants<S: IntLanes, const HALF: usize, const G: usize>(tile: *const Self, _block: usize) -> S::Bytes {
        // SAFETY: the caller vouches for the tile.
        unsafe { nibbles::<S, HALF, G>(&raw const (*tile).qs) }
    }
    #[inline(always)]
    unsafe fn scales<S: IntLanes>(tile: *const Self, _block: usize) -> [S; 2] {
        // SAFETY: the caller vouches for the tile.
        unsafe { [halves(&raw const (*tile).d), halves(&raw const (*tile).min)] }
    }
}

impl QuantTile for Q50Tile {
    const BLOCKS: usize = 2;
    const FORM: Form = Form::Plain;
    const MANY_ROWS: usize = 16;
    start!(4);

    #[inline(always)]
    unsafe fn quants<S: IntLanes, const HALF: usize, const G: usize>(tile: *const Self, block: usize) -> S::Bytes {
        // SAFETY: the caller vouches for the tile.
        unsafe {
            let fifth = bytes::<S, _>(field!(tile, fifth, block), 0);
            S::with_bit(nibbles::<S, HALF, G>(field!(tile, qs, block)), fifth, 4 * HALF + G)
        }
    }
    #[inline(always)]
    unsafe fn scales<S: IntLanes>(tile: *const Self, block: usize) -> [S; 2] {
        // SAFETY: the caller vouches for the tile.
        unsafe { [halves(field!(tile, d, block)), S::splat(0.0)] }
    }
}

impl QuantTile for Q51Tile {
    const BLOCKS: usize = 1;
    const FORM: Form = Form::Minimum;
    const TALL: bool = true;
    const MANY_ROWS: usize = 64;
    start!(none);

    #[inline(always)]
    unsafe fn quants<S: IntLanes, const HALF: usize, const G: usize>(tile: *const Self, _block: usize) -> S::Bytes {
        // SAFETY: the caller vouches for the tile.
        unsafe {
            let fifth = bytes::<S, _>(&raw const (*tile).fifth, 0);
            S::with_bit(nibbles::<S, HALF, G>(&raw const (*tile).qs), fifth, 4 * HALF + G)
        }
    }
    #[inline(always)]
    unsafe fn scales<S: IntLanes>(tile: *const Self, _block: usize) -> [S; 2] {
        // SAFETY: the caller vouches for the tile.
        unsafe { [halves(&raw const (*tile).d), halves(&raw const (*tile).min)] }
    }
}

impl QuantTile for Q80Tile {
    const BLOCKS: usize = 2;
    const FORM: Form = Form::Plain;
    const OFFSET: u8 = 128;

    #[inline(always)]
    fn start<S: IntLanes>(_negative: i32, negative_128: i32) -> S::Int {
        S::offset_start(negative_128)
    }
    #[inline(always)]
    unsafe fn quants<S: IntLanes, const HALF: usize, const G: usize>(tile: *const Self, block: usize) -> S::Bytes {
        // SAFETY: the caller vouches for the tile.
        unsafe { bytes::<S, _>(field!(tile, qs, block), 64 * (4 * HALF + G)) }
    }
    #[inline(always)]
    fn dot<S: IntLanes>(acc: S::Int, quants: S::Bytes, x: i32) -> S::Int {
        S::dot_offset(acc, quants, x)
    }
    #[inline(always)]
    unsafe fn scales<S: IntLanes>(tile: *const Self, block: usize) -> [S; 2] {
        // SAFETY: the caller vouches for the tile.
        unsafe { [halves(field!(tile, d, block)), S::splat(0.0)] }
    }
}

/// A block's scales and minima.
///
/// # Safety
/// `scales` must point to those of a tile, and `block` be below 8.
#[inline(always)]
unsafe fn super_scales<S: IntLanes>(scales: *const SuperScales, block: usize) -> [S; 2] {
    // SAFETY: as the caller says.
    unsafe {
        let scale = S::load_u8(field!(scales, scales, block).cast());
        let min = S::load_u8(field!(scales, mins, block).cast());
        let (d, factor) = (
            halves::<S>(&raw const (*scales).d),
            halves::<S>(&raw const (*scales).min),
        );
        [scale.mul(d), min.mul(factor)]
    }
}

impl QuantTile for Q4KTile {
    const BLOCKS: usize = 8;
    const FORM: Form = Form::Minimum;
    const TALL: bool = true;
    const MANY_ROWS: usize = 64;
    start!(none);

    #[inline(always)]
    unsafe fn quants<S: IntLanes, const HALF: usize, const G: usize>(tile: *const Self, block: usize) -> S::Bytes {
        // SAFETY: the caller vouches for the tile.
        unsafe { nibbles::<S, HALF, G>(field!(tile, qs, block)) }
    }
    #[inline(always)]
    unsafe fn scales<S: IntLanes>(tile: *const Self, block: usize) -> [S; 2] {
        // SAFETY: the caller vouches for the tile.
        unsafe { super_scales(&raw const (*tile).scales, block) }
    }
}

impl QuantTile for Q5KTile {
    const BLOCKS: usize = 8;
    const FORM: Form = Form::Minimum;
    const TALL: bool = true;
    const MANY_ROWS: usize = 64;
    start!(none);

    #[inline(always)]
    unsafe fn quants<S: IntLanes, const HALF: usize, const G: usize>(tile: *const Self, block: usize) -> S::Bytes {
        // SAFETY: the caller vouches for the tile.
        unsafe {
            let fifth = bytes::<S, _>(field!(tile, fifth, block), 0);
            S::with_bit(nibbles::<S, HALF, G>(field!(tile, qs, block)), fifth, 4 * HALF + G)
        }
    }
    #[inline(always)]
    unsafe fn scales<S: IntLanes>(tile: *const Self, block: usize) -> [S; 2] {
        // SAFETY: the caller vouches for the tile.
        unsafe { super_scales(&raw const (*tile).scales, block) }
    }
}

impl QuantTile for Q6KTile {
    const BLOCKS: usize = 8;
    const FORM: Form = Form::Halves;
    const TALL: bool = true;
    const MANY_ROWS: usize = 16;

    start!(5);

    #[inline(always)]
    unsafe fn quants<S: IntLanes, const HALF: usize, const G: usize>(tile: *const Self, block: usize) -> S::Bytes {
        // SAFETY: the caller vouches for the tile.
        unsafe {
            let high = bytes::<S, _>(field!(tile, high, block), 64 * HALF);
            S::with_two_bits(nibbles::<S, HALF, G>(field!(tile, qs, block)), high, G)
        }
    }
    #[inline(always)]
    unsafe fn scales<S: IntLanes>(tile: *const Self, block: usize) -> [S; 2] {
        // SAFETY: the caller vouches for the tile.
        unsafe {
            let d = halves::<S>(&raw const (*tile).d);
            let scales = field!(tile, scales, block).cast::<u8>();
            [S::load_i8(scales).mul(d), S::load_i8(scales.add(LANES)).mul(d)]
        }
    }
}

const _: () = assert!(BLOCK == 32 && LANES == 16, "the tiles' arrays are made for these");
