//! Rows of a packed matrix, for models whose embedding is their output matrix: the weights are in memory once.

use half::{bf16, f16};

use super::KernelError;
use super::lanes::LANES;
use super::linear::Linear;
use super::pack::{BLOCK, Packed};

impl Linear {
    /// Whether [`Linear::row`] can be asked.
    pub fn has_rows(&self) -> bool {
        matches!(
            self.packed(),
            Packed::F32(_) | Packed::F16(_) | Packed::Bf16(_) | Packed::Q80(_)
        )
    }

    /// The weights of output feature `row` as f32, exactly as [`super::dequantise`] reads them from the file.
    ///
    /// # Errors
    /// If there is no such row, `out` is not as long as a row, or the type of the weights is not one of
    /// [`Linear::has_rows`].
    pub fn row(&self, row: usize, out: &mut [f32]) -> Result<(), KernelError> {
        KernelError::check("length of a weight row", self.k(), out.len())?;
        if row >= self.n() || !self.has_rows() {
            let (what, rule) = (
                "a weight row that is read",
                "below their number, of a type that gives rows",
            );
            return Err(KernelError::Dimension { what, rule, found: row });
        }
        let (tile, column) = (row / LANES, row % LANES);
        let lines = tile * self.k()..(tile + 1) * self.k();
        match self.packed() {
            Packed::F32(all) => {
                for (out, line) in out.iter_mut().zip(&all[lines]) {
                    *out = line.0[column];
                }
            }
            Packed::F16(all) => {
                for (out, line) in out.iter_mut().zip(&all[lines]) {
                    *out = f16::from_bits(line.0[column]).to_f32();
                }
            }
            Packed::Bf16(all) => {
                for (out, line) in out.iter_mut().zip(&all[lines]) {
                    *out = bf16::from_bits(line.0[column]).to_f32();
                }
            }
            Packed::Q80(all) => {
                // A tile holds two blocks of 32.
                let tiles = (self.k() / BLOCK).div_ceil(2);
                for (i, out) in out.chunks_exact_mut(BLOCK).enumerate() {
                    let (tile, block) = (&all[tile * tiles + i / 2], i % 2);
                    let d = f16::from_bits(tile.d[block][column]).to_f32();
                    for (g, out) in out.chunks_exact_mut(4).enumerate() {
                        let four = &tile.qs[block][(g * LANES + column) * 4..][..4];
                        for (out, &q) in out.iter_mut().zip(four) {
                            *out = d * f32::from((q ^ 128).cast_signed());
                        }
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{GgmlType, LinearMode, dequantise};
    use super::*;

    #[test]
    fn rows_are_those_of_the_file() {
        let (n, k) = (37, 96);
        for ggml_type in [
            GgmlType::F32,
            GgmlType::F16,
            GgmlType::Bf16,
            GgmlType::Q8_0,
            GgmlType::Q4_0,
        ] {
            let size = ggml_type.row_bytes(k).unwrap();
            // Small finite numbers in every type: the high byte of each scale and float is 0x3c or less.
            let data: Vec<u8> = (0..n * size)
                .map(|i| if i % 2 == 1 { (i % 61) as u8 } else { (i * 7) as u8 })
                .collect();
            let linear = Linear::from_ggml(ggml_type, n, k, &data, LinearMode::Precise).unwrap();
            assert_eq!(linear.has_rows(), ggml_type != GgmlType::Q4_0);
            let mut expected = vec![0.0; n * k];
            dequantise(ggml_type, &data, &mut expected).unwrap();
            let mut out = vec![f32::NAN; k];
            for (row, expected) in expected.chunks_exact(k).enumerate().filter(|_| linear.has_rows()) {
                linear.row(row, &mut out).unwrap();
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&out), bits(expected), "{ggml_type:?} row {row}");
            }
            assert!(linear.row(n, &mut out).is_err() && linear.row(0, &mut out[1..]).is_err());
        }
    }
}
