//! Metadata values: borrowed views into the file.

use super::problem::GgufProblem;
use super::reader::Reader;

/// The type of a metadata value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    pub(crate) fn from_id(id: u32, key: &str) -> Result<Self, GgufProblem> {
        let found = usize::try_from(id).ok().and_then(|index| Self::ALL.get(index).copied());
        found.ok_or_else(|| GgufProblem::ValueType {
            key: key.to_string(),
            id,
        })
    }

    /// Bytes of one value; for strings and arrays the fewest possible.
    pub(crate) const fn least_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }
}

/// A metadata value.
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(&'a str),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// Arrays within arrays deeper than this are refused, so that a file cannot exhaust the stack.
const MAX_ARRAY_DEPTH: u32 = 4;

impl<'a> Value<'a> {
    /// Reads and checks one value of type `kind`.
    pub(crate) fn read(reader: &mut Reader<'a>, kind: ValueType, key: &str) -> Result<Self, GgufProblem> {
        Self::read_nested(reader, kind, key, 0)
    }

    fn read_nested(reader: &mut Reader<'a>, kind: ValueType, key: &str, depth: u32) -> Result<Self, GgufProblem> {
        let what = || format!("the value of key `{key}`");
        Ok(match kind {
            ValueType::U8 => Self::U8(u8::from_le_bytes(reader.array(&what)?)),
            ValueType::I8 => Self::I8(i8::from_le_bytes(reader.array(&what)?)),
            ValueType::U16 => Self::U16(u16::from_le_bytes(reader.array(&what)?)),
            ValueType::I16 => Self::I16(i16::from_le_bytes(reader.array(&what)?)),
            ValueType::U32 => Self::U32(reader.u32(&what)?),
            ValueType::I32 => Self::I32(i32::from_le_bytes(reader.array(&what)?)),
            ValueType::F32 => Self::F32(f32::from_le_bytes(reader.array(&what)?)),
            ValueType::Bool => match u8::from_le_bytes(reader.array(&what)?) {
                0 => Self::Bool(false),
                1 => Self::Bool(true),
                value => {
                    return Err(GgufProblem::Bool {
                        key: key.to_string(),
                        value,
                    });
                }
            },
            ValueType::String => Self::String(reader.string(&what)?),
            ValueType::Array => Self::Array(Array::read(reader, key, depth)?),
            ValueType::U64 => Self::U64(reader.u64(&what)?),
            ValueType::I64 => Self::I64(i64::from_le_bytes(reader.array(&what)?)),
            ValueType::F64 => Self::F64(f64::from_le_bytes(reader.array(&what)?)),
        })
    }

    /// Any non-negative integer as `u64`.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::U64(v) => Some(v),
            Self::I8(v) => v.try_into().ok(),
            Self::I16(v) => v.try_into().ok(),
            Self::I32(v) => v.try_into().ok(),
            Self::I64(v) => v.try_into().ok(),
            Self::F32(_) | Self::F64(_) | Self::Bool(_) | Self::String(_) | Self::Array(_) => None,
        }
    }

    /// A float (`f32` or `f64`) or an integer as `f64`.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(v) => Some(v.into()),
            Self::F64(v) => Some(v),
            Self::U8(v) => Some(v.into()),
            Self::I8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::I16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::I32(v) => Some(v.into()),
            Self::U64(_) | Self::I64(_) | Self::Bool(_) | Self::String(_) | Self::Array(_) => None,
        }
    }

    /// A bool.
    pub fn as_bool(&self) -> Option<bool> {
        if let Self::Bool(v) = *self { Some(v) } else { None }
    }

    /// A string, borrowed from the file.
    pub fn as_str(&self) -> Option<&'a str> {
        if let Self::String(v) = *self { Some(v) } else { None }
    }

    /// An array.
    pub fn as_array(&self) -> Option<Array<'a>> {
        if let Self::Array(v) = *self { Some(v) } else { None }
    }

    /// Kind and value in a few words, for error messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::U8(v) => format!("the u8 {v}"),
            Self::I8(v) => format!("the i8 {v}"),
            Self::U16(v) => format!("the u16 {v}"),
            Self::I16(v) => format!("the i16 {v}"),
            Self::U32(v) => format!("the u32 {v}"),
            Self::I32(v) => format!("the i32 {v}"),
            Self::F32(v) => format!("the f32 {v}"),
            Self::Bool(v) => format!("the bool {v}"),
            Self::String(v) => format!("the string {:?}", v.chars().take(60).collect::<String>()),
            Self::Array(v) => format!("an array of {} {}", v.len(), v.element_type().name()),
            Self::U64(v) => format!("the u64 {v}"),
            Self::I64(v) => format!("the i64 {v}"),
            Self::F64(v) => format!("the f64 {v}"),
        }
    }
}

/// An array value: its elements lie in the file and are read when iterated. All were checked when the file was opened.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    count: u64,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    fn read(reader: &mut Reader<'a>, key: &str, depth: u32) -> Result<Self, GgufProblem> {
        if depth >= MAX_ARRAY_DEPTH {
            let what = format!("the depth of arrays in key `{key}`");
            return Err(GgufProblem::Limit {
                what,
                value: u64::from(depth) + 1,
                limit: MAX_ARRAY_DEPTH.into(),
            });
        }
        let element = ValueType::from_id(reader.u32(&|| format!("the element type of key `{key}`"))?, key)?;
        let count = reader.u64(&|| format!("the array length of key `{key}`"))?;
        let most = reader.left() as u64 / element.least_bytes();
        if count > most {
            let what = format!("the array length of key `{key}`");
            return Err(GgufProblem::Count {
                what,
                count,
                left: reader.left(),
                most,
            });
        }
        let mut rest = reader.clone();
        for _ in 0..count {
            Value::read_nested(&mut rest, element, key, depth + 1)?;
        }
        let length = (rest.at() - reader.at()) as u64;
        let bytes = reader.take(length, &|| format!("the array of key `{key}`"))?;
        Ok(Self { element, count, bytes })
    }

    /// Number of elements.
    pub fn len(&self) -> u64 {
        self.count
    }

    /// True if there is no element.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Type of the elements.
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut reader = Reader::new(self.bytes, 0);
        let element = self.element;
        // Every element was read once when the file was opened. If somebody changed the mapped file since, the iteration
        // ends early; the users of arrays compare lengths.
        (0..self.count).map_while(move |_| Value::read(&mut reader, element, "array element").ok())
    }
}
