//! Everything that can be wrong inside a GGUF file.

use super::ggml_type::GgmlType;

/// What is wrong in a GGUF file: the key or tensor, its value, and what would be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GgufProblem {
    /// The first four bytes are not `GGUF`.
    #[error("starts with bytes {0:02x?}, not with 47 47 55 46 (\"GGUF\"): this is not a GGUF file")]
    Magic([u8; 4]),
    /// Version not readable.
    #[error("GGUF version is {0}; versions 2 and 3 can be read")]
    Version(u32),
    /// Written on a big-endian machine.
    #[error("GGUF version reads {0:#010x}: this is a big-endian file; convert it to little-endian")]
    BigEndian(u32),
    /// The file ends inside something.
    #[error(
        "the file ends inside {what}: {needed} bytes are needed at byte {at}, {left} are left; the file is cut or its \
         counts are damaged"
    )]
    Cut {
        /// What was being read.
        what: String,
        /// Where.
        at: usize,
        /// Bytes needed there.
        needed: u64,
        /// Bytes left.
        left: usize,
    },
    /// A count that the rest of the file cannot hold.
    #[error(
        "{what} is {count}, but the {left} bytes left in the file can hold at most {most}; the file is cut or damaged"
    )]
    Count {
        /// Which count.
        what: String,
        /// Its value.
        count: u64,
        /// Bytes left.
        left: usize,
        /// The most that could be true.
        most: u64,
    },
    /// A count above the hard limit.
    #[error("{what} is {value}; at most {limit} is allowed")]
    Limit {
        /// Which number.
        what: String,
        /// Its value.
        value: u64,
        /// The limit.
        limit: u64,
    },
    /// Text that is not UTF-8.
    #[error("{what} is not valid UTF-8 at byte {at} of the file")]
    NotUtf8 {
        /// Which string.
        what: String,
        /// File offset of the first wrong byte.
        at: usize,
    },
    /// Unknown metadata value type.
    #[error("key `{key}` has value type {id}; types 0 to 12 exist")]
    ValueType {
        /// The key.
        key: String,
        /// The id read.
        id: u32,
    },
    /// A bool that is neither 0 nor 1.
    #[error("key `{key}` is a bool with byte {value}; 0 or 1 would be right")]
    Bool {
        /// The key.
        key: String,
        /// The byte.
        value: u8,
    },
    /// The same key twice.
    #[error("key `{0}` appears twice; every key may appear once")]
    DuplicateKey(String),
    /// The same tensor name twice.
    #[error("tensor `{0}` appears twice; every tensor may appear once")]
    DuplicateTensor(String),
    /// A key that must be there is not.
    #[error("key `{0}` is missing")]
    MissingKey(String),
    /// One of several files that make up a model, and its name does not say which.
    #[error(
        "key `split.count` is {0}: this is one part of a model, whose name must end in -NNNNN-of-{0:05}.gguf with the part's \
         number, so that the other parts can be found beside it"
    )]
    SplitName(u64),
    /// A key of a part that contradicts its name or the other parts.
    #[error("key `{key}` is {found}; {right} would be right")]
    SplitValue {
        /// The key.
        key: &'static str,
        /// Its value, or `missing`.
        found: String,
        /// What would be right, and why.
        right: String,
    },
    /// A tensor that must be there is not.
    #[error("tensor `{0}` is missing")]
    MissingTensor(String),
    /// A key with the wrong kind of value.
    #[error("key `{key}` is {found}; {wanted} would be right")]
    Kind {
        /// The key.
        key: String,
        /// What it holds.
        found: String,
        /// What it should hold.
        wanted: String,
    },
    /// Alignment not usable.
    #[error("key `general.alignment` is {0}; a power of two from 1 to 1048576 would be right")]
    Alignment(u64),
    /// A tensor type this product does not read.
    #[error(
        "tensor `{tensor}` has type id {id}, which cannot be read; convert the model to one of {}",
        GgmlType::names()
    )]
    TensorType {
        /// The tensor.
        tensor: String,
        /// The id.
        id: u32,
    },
    /// A tensor's shape is not possible.
    #[error("tensor `{tensor}` has shape {shape:?} (outermost first): {why}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape.
        shape: Vec<u64>,
        /// What is wrong with it.
        why: String,
    },
    /// A tensor begins at an unaligned offset.
    #[error(
        "tensor `{tensor}` begins at offset {offset} of the data, which is not a multiple of the alignment {alignment}"
    )]
    Unaligned {
        /// The tensor.
        tensor: String,
        /// Its offset.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor's bytes lie outside the file.
    #[error(
        "tensor `{tensor}` needs {bytes} bytes from byte {start} on, but the file has {file_bytes} bytes; the file is cut \
         or the offset is wrong"
    )]
    OutOfFile {
        /// The tensor.
        tensor: String,
        /// First byte in the file.
        start: u64,
        /// Bytes it needs.
        bytes: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors `{first}` (bytes {first_start}..{first_end}) and `{second}` (from byte {second_start}) overlap")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// Its first byte.
        first_start: u64,
        /// Its end.
        first_end: u64,
        /// The other.
        second: String,
        /// Where it begins.
        second_start: u64,
    },
}
