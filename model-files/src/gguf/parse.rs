//! The header of a GGUF file: metadata, tensor table, start of the data. Pure: bytes in, checked tables out.
//!
//! Source of the format: the GGUF specification of ggml (`docs/gguf.md`), versions 2 and 3.

use std::collections::HashMap;
use std::ops::Range;

use super::ggml_type::GgmlType;
use super::problem::GgufProblem;
use super::reader::Reader;
use super::value::{Value, ValueType};

/// Alignment of tensor data when the file does not say.
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;
/// Largest number of dimensions ggml knows.
const MAX_DIMENSIONS: u32 = 4;
/// The specification's limit of a key.
const MAX_KEY_BYTES: u64 = 65535;
const MAX_TENSOR_NAME_BYTES: u64 = 1024;
const MAX_METADATA: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 20;
/// Key (length), value type, smallest value.
const LEAST_METADATA_BYTES: u64 = 8 + 4 + 1;
/// Name (length), dimension count, type, offset.
const LEAST_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;

/// One tensor of the file. Its byte range was checked against the file's length and all other tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, as `blk.0.attn_q.weight`.
    pub name: String,
    /// Row-major shape, outermost dimension first: a linear layer's weight is `[outputs, inputs]`.
    pub shape: Vec<u64>,
    /// Element type.
    pub kind: GgmlType,
    /// Absolute bytes in the file.
    pub bytes: Range<u64>,
    /// Which of the files of a split model: 0 for the first or only one.
    pub part: usize,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// What the header of a GGUF file says. Values stay in the file's bytes: positions, not copies.
#[derive(Debug, Clone)]
pub struct Header {
    version: u32,
    alignment: u64,
    data_start: u64,
    keys: Vec<String>,
    positions: HashMap<String, (ValueType, usize)>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
}

impl Header {
    /// Reads and checks a header. `bytes` is the whole file (tensor ranges are checked against its length). Of a split model
    /// it is that of one part.
    ///
    /// # Errors
    /// The first [`GgufProblem`] found. Never panics, and allocates in proportion to what it has really read.
    pub fn parse(bytes: &[u8]) -> Result<Self, GgufProblem> {
        let mut reader = Reader::new(bytes, 0);
        let version = read_version(&mut reader)?;
        let tensor_count = reader.u64(&|| "the tensor count".into())?;
        let metadata_count = reader.u64(&|| "the metadata count".into())?;
        check_count(
            "the metadata count",
            metadata_count,
            MAX_METADATA,
            LEAST_METADATA_BYTES,
            reader.left(),
        )?;
        check_count(
            "the tensor count",
            tensor_count,
            MAX_TENSORS,
            LEAST_TENSOR_BYTES,
            reader.left(),
        )?;

        let mut header = Self {
            version,
            alignment: DEFAULT_ALIGNMENT,
            data_start: 0,
            keys: Vec::new(),
            positions: HashMap::new(),
            tensors: Vec::new(),
            by_name: HashMap::new(),
        };
        for _ in 0..metadata_count {
            header.read_metadata(&mut reader)?;
        }
        header.alignment = header.read_alignment(bytes)?;
        let mut raw = Vec::new();
        for _ in 0..tensor_count {
            raw.push(RawTensor::read(&mut reader)?);
        }
        header.data_start = (reader.at() as u64).next_multiple_of(header.alignment);
        for tensor in raw {
            header.add_tensor(tensor, bytes.len() as u64)?;
        }
        header.check_overlaps()?;
        Ok(header)
    }

    fn read_metadata(&mut self, reader: &mut Reader<'_>) -> Result<(), GgufProblem> {
        let index = self.keys.len();
        let key = reader.string(&|| format!("the name of metadata key number {index}"))?;
        if key.len() as u64 > MAX_KEY_BYTES {
            let what = format!("the length of the name of metadata key number {index}");
            return Err(GgufProblem::Limit {
                what,
                value: key.len() as u64,
                limit: MAX_KEY_BYTES,
            });
        }
        let kind = ValueType::from_id(reader.u32(&|| format!("the type of key `{key}`"))?, key)?;
        let at = reader.at();
        Value::read(reader, kind, key)?;
        if self.positions.insert(key.to_string(), (kind, at)).is_some() {
            return Err(GgufProblem::DuplicateKey(key.to_string()));
        }
        self.keys.push(key.to_string());
        Ok(())
    }

    fn read_alignment(&self, bytes: &[u8]) -> Result<u64, GgufProblem> {
        let Some(value) = self.get(bytes, "general.alignment") else {
            return Ok(DEFAULT_ALIGNMENT);
        };
        let alignment = value.as_u64().ok_or_else(|| GgufProblem::Kind {
            key: "general.alignment".into(),
            found: value.describe(),
            wanted: "a u32".into(),
        })?;
        if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT {
            Ok(alignment)
        } else {
            Err(GgufProblem::Alignment(alignment))
        }
    }

    fn add_tensor(&mut self, raw: RawTensor, file_bytes: u64) -> Result<(), GgufProblem> {
        let length = raw.checked_bytes()?;
        if !raw.offset.is_multiple_of(self.alignment) {
            return Err(GgufProblem::Unaligned {
                tensor: raw.name,
                offset: raw.offset,
                alignment: self.alignment,
            });
        }
        let start = self.data_start.saturating_add(raw.offset);
        let end = match start.checked_add(length) {
            Some(end) if end <= file_bytes => end,
            _ => {
                return Err(GgufProblem::OutOfFile {
                    tensor: raw.name,
                    start,
                    bytes: length,
                    file_bytes,
                });
            }
        };
        if self.by_name.insert(raw.name.clone(), self.tensors.len()).is_some() {
            return Err(GgufProblem::DuplicateTensor(raw.name));
        }
        self.tensors.push(TensorInfo {
            name: raw.name,
            shape: raw.shape,
            kind: raw.kind,
            bytes: start..end,
            part: 0,
        });
        Ok(())
    }

    /// Takes over the tensors of another file of the model, its part number `part`.
    ///
    /// # Errors
    /// The name of a tensor that both have.
    pub(super) fn absorb(&mut self, other: Self, part: usize) -> Result<(), String> {
        for tensor in other.tensors {
            if self.by_name.contains_key(&tensor.name) {
                return Err(tensor.name);
            }
            self.by_name.insert(tensor.name.clone(), self.tensors.len());
            self.tensors.push(TensorInfo { part, ..tensor });
        }
        Ok(())
    }

    fn check_overlaps(&self) -> Result<(), GgufProblem> {
        let mut sorted: Vec<&TensorInfo> = self.tensors.iter().collect();
        sorted.sort_by_key(|tensor| (tensor.bytes.start, tensor.bytes.end));
        for pair in sorted.windows(2) {
            if pair[1].bytes.start < pair[0].bytes.end {
                return Err(GgufProblem::Overlap {
                    first: pair[0].name.clone(),
                    first_start: pair[0].bytes.start,
                    first_end: pair[0].bytes.end,
                    second: pair[1].name.clone(),
                    second_start: pair[1].bytes.start,
                });
            }
        }
        Ok(())
    }

    /// Format version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of tensor data in bytes.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// First byte of the data section.
    pub fn data_start(&self) -> u64 {
        self.data_start
    }

    /// Metadata keys in the order of the file.
    pub fn keys(&self) -> &[String] {
        &self.keys
    }

    /// The value of `key`; `bytes` must be what was parsed.
    pub fn get<'a>(&self, bytes: &'a [u8], key: &str) -> Option<Value<'a>> {
        let (kind, at) = *self.positions.get(key)?;
        Value::read(&mut Reader::new(bytes, at), kind, key).ok()
    }

    /// Tensors in the order of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&index| &self.tensors[index])
    }
}

fn read_version(reader: &mut Reader<'_>) -> Result<u32, GgufProblem> {
    let magic: [u8; 4] = reader.array(&|| "the magic number".into())?;
    if magic != *b"GGUF" {
        return Err(GgufProblem::Magic(magic));
    }
    match reader.u32(&|| "the version".into())? {
        version @ (2 | 3) => Ok(version),
        swapped if (1..=0xff).contains(&swapped.swap_bytes()) => Err(GgufProblem::BigEndian(swapped)),
        version => Err(GgufProblem::Version(version)),
    }
}

fn check_count(what: &str, count: u64, limit: u64, least_bytes: u64, left: usize) -> Result<(), GgufProblem> {
    let most = left as u64 / least_bytes;
    if count > most {
        return Err(GgufProblem::Count {
            what: what.into(),
            count,
            left,
            most,
        });
    }
    if count > limit {
        return Err(GgufProblem::Limit {
            what: what.into(),
            value: count,
            limit,
        });
    }
    Ok(())
}

/// A tensor table entry before its place in the file is known.
struct RawTensor {
    name: String,
    shape: Vec<u64>,
    kind: GgmlType,
    offset: u64,
}

impl RawTensor {
    fn read(reader: &mut Reader<'_>) -> Result<Self, GgufProblem> {
        let at = reader.at();
        let name = reader.string(&|| format!("the tensor name at byte {at}"))?;
        if name.len() as u64 > MAX_TENSOR_NAME_BYTES {
            let what = format!("the length of the tensor name at byte {at}");
            return Err(GgufProblem::Limit {
                what,
                value: name.len() as u64,
                limit: MAX_TENSOR_NAME_BYTES,
            });
        }
        let dimensions = reader.u32(&|| format!("the dimension count of tensor `{name}`"))?;
        if dimensions > MAX_DIMENSIONS {
            let what = format!("the dimension count of tensor `{name}`");
            return Err(GgufProblem::Limit {
                what,
                value: dimensions.into(),
                limit: MAX_DIMENSIONS.into(),
            });
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(reader.u64(&|| format!("the dimensions of tensor `{name}`"))?);
        }
        // The file lists the fastest dimension first.
        shape.reverse();
        let id = reader.u32(&|| format!("the type of tensor `{name}`"))?;
        let kind = GgmlType::from_id(id).ok_or_else(|| GgufProblem::TensorType {
            tensor: name.into(),
            id,
        })?;
        let offset = reader.u64(&|| format!("the offset of tensor `{name}`"))?;
        Ok(Self {
            name: name.into(),
            shape,
            kind,
            offset,
        })
    }

    /// Bytes of the data, from shape and type.
    fn checked_bytes(&self) -> Result<u64, GgufProblem> {
        let wrong = |why: String| GgufProblem::Shape {
            tensor: self.name.clone(),
            shape: self.shape.clone(),
            why,
        };
        if self.shape.contains(&0) {
            return Err(wrong("every dimension must be at least 1".into()));
        }
        let block = self.kind.block_elements();
        let row = self.shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(block) {
            return Err(wrong(format!(
                "the last dimension must be a multiple of {block} for type {}",
                self.kind
            )));
        }
        let blocks = self
            .shape
            .iter()
            .try_fold(1_u64, |all, &dimension| all.checked_mul(dimension));
        let bytes = blocks.and_then(|elements| (elements / block).checked_mul(self.kind.block_bytes()));
        bytes.ok_or_else(|| wrong("its size does not fit in 64 bits".into()))
    }
}
