//! A bounded little-endian reader: every read is checked against the bytes that are really there.

use super::problem::GgufProblem;

/// Reads forward through `bytes`.
#[derive(Debug, Clone)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Starts at byte `at`; a start beyond the end leaves nothing to read.
    pub(crate) fn new(bytes: &'a [u8], at: usize) -> Self {
        Self {
            bytes,
            at: at.min(bytes.len()),
        }
    }

    /// Offset of the next byte.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Bytes left.
    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `count` bytes. `what` names them in the error.
    pub(crate) fn take(&mut self, count: u64, what: &dyn Fn() -> String) -> Result<&'a [u8], GgufProblem> {
        let left = self.left();
        match usize::try_from(count) {
            Ok(count) if count <= left => {
                let slice = &self.bytes[self.at..self.at + count];
                self.at += count;
                Ok(slice)
            }
            _ => Err(GgufProblem::Cut {
                what: what(),
                at: self.at,
                needed: count,
                left,
            }),
        }
    }

    pub(crate) fn array<const N: usize>(&mut self, what: &dyn Fn() -> String) -> Result<[u8; N], GgufProblem> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub(crate) fn u32(&mut self, what: &dyn Fn() -> String) -> Result<u32, GgufProblem> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &dyn Fn() -> String) -> Result<u64, GgufProblem> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A string: 64 bit length, then that many bytes of UTF-8. Borrowed, so an absurd length allocates nothing.
    pub(crate) fn string(&mut self, what: &dyn Fn() -> String) -> Result<&'a str, GgufProblem> {
        let length = self.u64(&|| format!("the length of {}", what()))?;
        let at = self.at;
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes).map_err(|error| GgufProblem::NotUtf8 {
            what: what(),
            at: at + error.valid_up_to(),
        })
    }
}
