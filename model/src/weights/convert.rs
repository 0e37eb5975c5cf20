//! Turns rows of a tensor into another element type, by several threads: 8-bit floats with scales into floats, and floats into
//! ggml's quantised types. Each row is made for itself, so threads change no bit; beside the result a thread holds a few rows.

use std::thread;

use super::WeightError;
use super::fp8::{self, RowScales};
use crate::kernels::{GgmlType, dequantise, quantise};

/// Rows that are turned at a time.
const ROWS: usize = 16;
/// A thread is worth so many bytes of output.
const SHARE_BYTES: usize = 500_000;

/// What rows are made from.
#[derive(Clone, Copy)]
pub(super) enum From<'a> {
    /// Numbers of F32, F16 or BF16.
    Floats(GgmlType),
    /// 8-bit floats.
    Fp8(&'a RowScales),
}

/// A tensor's rows, or some of them.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// The tensor's name, for errors.
    pub(super) name: &'a str,
    pub(super) from: From<'a>,
    /// Number of the first row in the tensor.
    pub(super) first: usize,
    /// Numbers of a row.
    pub(super) k: usize,
    /// All rows' bytes.
    pub(super) bytes: &'a [u8],
}

impl Rows<'_> {
    /// The rows' bytes in the type `to`, for which `k` must fit.
    ///
    /// # Errors
    /// [`WeightError`] names the tensor; a number that is not finite is one.
    pub(super) fn convert(self, to: GgmlType, threads: usize) -> Result<Vec<u8>, WeightError> {
        let kernel = |source| self.kernel(source);
        let size = match self.from {
            From::Floats(kind) => kind.row_bytes(self.k).map_err(kernel)?,
            From::Fp8(_) => self.k,
        };
        let to_size = to.row_bytes(self.k).map_err(kernel)?;
        let rows = self.bytes.len() / size.max(1);
        let mut out = vec![0; rows * to_size];
        let threads = threads.min(rows).min(1 + out.len() / SHARE_BYTES);
        let share = rows.div_ceil(threads.max(1)).next_multiple_of(ROWS);
        let run = |index: usize, out: &mut [u8]| -> Result<(), WeightError> {
            let mut values = vec![0.0; ROWS.min(rows) * self.k];
            let from = index * share;
            for (i, out) in out.chunks_mut(ROWS * to_size).enumerate() {
                let count = out.len() / to_size;
                let row = from + i * ROWS;
                let bytes = &self.bytes[row * size..(row + count) * size];
                self.some(row, bytes, &mut values[..count * self.k], (to, out))?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let shares = out.chunks_mut((share * to_size).max(1)).enumerate();
            let run = &run;
            let running: Vec<_> = shares
                .map(|(index, out)| scope.spawn(move || run(index, out)))
                .collect();
            // A panic of a thread goes on here. All are joined, and the first rows' error is told.
            let ended = running
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            ended.fold(Ok(()), Result::and)
        })?;
        Ok(out)
    }

    /// Turns the rows from `row` on that have these bytes.
    fn some(
        &self,
        row: usize,
        bytes: &[u8],
        values: &mut [f32],
        (to, out): (GgmlType, &mut [u8]),
    ) -> Result<(), WeightError> {
        match self.from {
            From::Floats(kind) => dequantise(kind, bytes, values).map_err(|source| self.kernel(source))?,
            From::Fp8(scales) => fp8::widen(bytes, self.first + row, self.k, scales, values),
        }
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(WeightError::Value {
                name: self.name.to_owned(),
                row: self.first + row + at / self.k,
                column: at % self.k,
                value: values[at],
            });
        }
        quantise(to, values, out).map_err(|source| self.kernel(source))
    }

    fn kernel(&self, source: crate::kernels::KernelError) -> WeightError {
        let name = self.name.to_owned();
        WeightError::Kernel { name, source }
    }
}
