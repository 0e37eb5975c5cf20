//! 8-bit floats with scales (F8_E4M3, the type that torch calls `float8_e4m3fn`).
//!
//! A byte is a sign, 4 bits of exponent and 3 of mantissa: (1 + m/8) 2^(e - 7), or m/8 2^-6 where e is 0; all seven bits set
//! are no number. Source: "FP8 Formats for Deep Learning" (arXiv 2209.05433), section 3. A weight is that, times its scale, in
//! f32.

use crate::arch::Scales;

/// The number of each byte.
static NUMBERS: [f32; 256] = numbers();

const fn numbers() -> [f32; 256] {
    let mut all = [0.0; 256];
    let mut byte: usize = 0;
    while byte < 256 {
        let (exponent, mantissa) = ((byte >> 3) & 15, byte & 7);
        let size = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            // All are multiples of 2^-9.
            (0, _) => mantissa as f32 / 512.0,
            _ => (((8 + mantissa) as u32) << (exponent - 1)) as f32 / 512.0,
        };
        all[byte] = if byte < 128 { size } else { -size };
        byte += 1;
    }
    all
}

/// A tensor's scales.
pub(super) struct RowScales {
    pub(super) kind: Scales,
    /// All of them; of blocks, row by row.
    pub(super) numbers: Vec<f32>,
}

/// Shapes that the scales of `n` rows of `k` numbers may have.
pub(super) fn shapes(kind: Scales, n: usize, k: usize) -> Vec<Vec<usize>> {
    match kind {
        Scales::Tensor => vec![vec![1], vec![], vec![1, 1]],
        Scales::Row => vec![vec![n, 1], vec![n]],
        Scales::Block(rows, columns) => vec![vec![n.div_ceil(rows), k.div_ceil(columns)]],
    }
}

/// The numbers of whole rows of `k` bytes, the first of which is the tensor's row `first`.
pub(super) fn widen(bytes: &[u8], first: usize, k: usize, scales: &RowScales, out: &mut [f32]) {
    for (i, (bytes, out)) in bytes.chunks_exact(k).zip(out.chunks_exact_mut(k)).enumerate() {
        let row = first + i;
        let mut times = |scale: f32, from: usize, to: usize| {
            for (out, &byte) in out[from..to].iter_mut().zip(&bytes[from..to]) {
                *out = NUMBERS[usize::from(byte)] * scale;
            }
        };
        match scales.kind {
            Scales::Tensor => times(scales.numbers[0], 0, k),
            Scales::Row => times(scales.numbers[row], 0, k),
            Scales::Block(rows, columns) => {
                let across = k.div_ceil(columns);
                let of_row = &scales.numbers[row / rows * across..][..across];
                for (block, &scale) in of_row.iter().enumerate() {
                    times(scale, block * columns, k.min((block + 1) * columns));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_the_numbers_of_the_format() {
        assert_eq!((NUMBERS[0x7e], NUMBERS[0xfe]), (448.0, -448.0));
        assert_eq!((NUMBERS[0x38], NUMBERS[0xb8]), (1.0, -1.0));
        assert_eq!((NUMBERS[0x01], NUMBERS[0x07]), (0.001_953_125, 0.013_671_875));
        assert_eq!((NUMBERS[0x08], NUMBERS[0x40]), (0.015_625, 2.0));
        assert_eq!(NUMBERS[0x80].to_bits(), (-0.0_f32).to_bits());
        assert!(NUMBERS[0x7f].is_nan() && NUMBERS[0xff].is_nan());
        assert_eq!(NUMBERS.iter().filter(|x| x.is_nan()).count(), 2);
        let rising = NUMBERS[..0x7f].windows(2).all(|pair| pair[0] < pair[1]);
        assert!(rising);
    }

    #[test]
    fn each_number_has_the_scale_of_its_place() {
        // 3 rows of 5, in blocks of 2 by 2; the second call begins at row 2.
        let numbers: Vec<f32> = (1..=6).map(|n| n as f32).collect();
        let scales = RowScales {
            kind: Scales::Block(2, 2),
            numbers,
        };
        let (bytes, mut out) = ([0x38; 15], [0.0; 15]);
        widen(&bytes[..10], 0, 5, &scales, &mut out[..10]);
        widen(&bytes[10..], 2, 5, &scales, &mut out[10..]);
        let row = [1.0, 1.0, 2.0, 2.0, 3.0];
        assert_eq!((&out[..5], &out[5..10]), (&row[..], &row[..]));
        assert_eq!(out[10..], [4.0, 4.0, 5.0, 5.0, 6.0]);
        assert_eq!(shapes(Scales::Block(2, 2), 3, 5), [[2, 3]]);
        let scales = RowScales {
            kind: Scales::Row,
            numbers: vec![1.0, 2.0, 4.0],
        };
        widen(&[0x38; 4], 1, 2, &scales, &mut out[..4]);
        assert_eq!(out[..4], [2.0, 2.0, 4.0, 4.0]);
    }
}
