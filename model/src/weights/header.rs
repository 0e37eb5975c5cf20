//! The header of a safetensors file, checked: every tensor's bytes are where it says, as many as its type and shape take, and
//! no byte belongs to two tensors or to none.
//!
//! Source: the format's description in the safetensors repository. (Its crate checks the same, but does not name the tensor,
//! and takes the last of two with the same name.)

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// The file begins with the header's length as 8 bytes.
const LENGTH_BYTES: usize = 8;
/// Longest header, in bytes: the format's own limit.
const MOST_BYTES: u64 = 100_000_000;
/// Most dimensions of a tensor.
const MOST_DIMENSIONS: usize = 8;

/// A tensor of a file.
pub(super) struct Entry {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// Its place in the file.
    pub(super) bytes: Range<usize>,
}

/// The tensors of a file that has these bytes, in their order there.
///
/// # Errors
/// What is wrong, in words that name the tensor.
pub(super) fn read(file: &[u8]) -> Result<Vec<(String, Entry)>, String> {
    let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
        let found = file.len();
        return Err(format!(
            "has {found} bytes; a safetensors file begins with the {LENGTH_BYTES} bytes of its header's length"
        ));
    };
    let (length, left) = (u64::from_le_bytes(*length), rest.len());
    if length > MOST_BYTES {
        return Err(format!(
            "the header's length is {length} bytes, and at most {MOST_BYTES} are read: the file is cut or damaged"
        ));
    }
    let header = usize::try_from(length)
        .ok()
        .and_then(|length| rest.split_at_checked(length));
    let Some((header, data)) = header else {
        return Err(format!(
            "the header's length is {length} bytes, but {left} are left in the file: it is cut or damaged"
        ));
    };
    let listed: Listed =
        serde_json::from_slice(header).map_err(|error| format!("the header cannot be read: {error}"))?;
    let mut entries = Vec::new();
    for (name, raw) in listed.0 {
        let entry = raw.checked(&name, data.len())?;
        entries.push((name, entry));
    }
    entries.sort_by_key(|entry| (entry.1.bytes.start, entry.1.bytes.end));
    check_cover(&entries, data.len())?;
    let first = file.len() - data.len();
    for (_, entry) in &mut entries {
        entry.bytes = first + entry.bytes.start..first + entry.bytes.end;
    }
    Ok(entries)
}

/// An error unless the tensors, which are in order, lie one behind the other from the first byte to the last.
fn check_cover(entries: &[(String, Entry)], data: usize) -> Result<(), String> {
    let mut end = 0;
    let mut before: Option<&str> = None;
    for (name, entry) in entries {
        let (start, other) = (entry.bytes.start, before.unwrap_or("none"));
        if start < end {
            return Err(format!(
                "tensor {name} begins at byte {start} of the data, but tensor {other} ends at byte {end}: they overlap"
            ));
        }
        if start > end {
            return Err(format!(
                "bytes {end} to {start} of the data, before tensor {name}, belong to no tensor"
            ));
        }
        (end, before) = (entry.bytes.end, Some(name.as_str()));
    }
    if end < data {
        return Err(format!(
            "bytes {end} to {data} of the data, the last ones of the file, belong to no tensor"
        ));
    }
    Ok(())
}

/// What the header says of a tensor.
struct Raw {
    dtype: String,
    shape: Vec<u64>,
    offsets: [u64; 2],
}

impl Raw {
    /// The same with its place in `data` bytes.
    fn checked(self, name: &str, data: usize) -> Result<Entry, String> {
        let Self { dtype, shape, offsets } = self;
        let known = serde_json::from_value::<Dtype>(Value::String(dtype.clone()));
        let known =
            known.map_err(|_| format!("tensor {name} is of the type {dtype:?}, which the format does not have"))?;
        let [start, end] = offsets;
        if start > end || end > data as u64 {
            return Err(format!(
                "tensor {name} has the data_offsets [{start}, {end}], which must lie one after the other within the {data} \
                 bytes of data: the file is cut or damaged"
            ));
        }
        let sizes: Option<Vec<usize>> = shape.iter().map(|&size| usize::try_from(size).ok()).collect();
        let bits = sizes.as_ref().and_then(|sizes| {
            let all = sizes
                .iter()
                .try_fold(known.bitsize(), |all, &size| all.checked_mul(size))?;
            all.is_multiple_of(8).then_some(all / 8)
        });
        let (Some(shape), Some(bytes)) = (sizes, bits) else {
            return Err(format!(
                "tensor {name} of type {dtype} has the shape {shape:?}, which no file can hold"
            ));
        };
        if bytes as u64 != end - start {
            return Err(format!(
                "tensor {name} of type {dtype} and shape {shape:?} takes {bytes} bytes, but its data_offsets [{start}, {end}] \
                 hold {}",
                end - start
            ));
        }
        Ok(Entry {
            dtype: known,
            shape,
            bytes: start as usize..end as usize,
        })
    }
}

/// All tensors of a header, each once.
struct Listed(Vec<(String, Raw)>);

impl<'de> Deserialize<'de> for Listed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Listed;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Listed, A::Error> {
                let (mut tensors, mut names) = (Vec::new(), HashSet::new());
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let raw = map.next_value::<Raw>();
                    let raw = raw.map_err(|error| A::Error::custom(format!("tensor {name}: {error}")))?;
                    if !names.insert(name.clone()) {
                        return Err(A::Error::custom(format!("tensor {name} appears twice")));
                    }
                    tensors.push((name, raw));
                }
                Ok(Listed(tensors))
            }
        }
        deserializer.deserialize_map(All)
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct One;
        impl<'de> Visitor<'de> for One {
            type Value = Raw;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with dtype, shape and data_offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
                let (mut dtype, mut shape, mut offsets) = (None, None, None);
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "dtype" => dtype = Some(map.next_value()?),
                        "shape" => shape = Some(map.next_value::<Shape>()?.0),
                        "data_offsets" => offsets = Some(map.next_value()?),
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(Raw {
                    dtype: dtype.ok_or_else(|| A::Error::missing_field("dtype"))?,
                    shape: shape.ok_or_else(|| A::Error::missing_field("shape"))?,
                    offsets: offsets.ok_or_else(|| A::Error::missing_field("data_offsets"))?,
                })
            }
        }
        deserializer.deserialize_map(One)
    }
}

/// A list that does not grow beyond the most dimensions.
struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sizes;
        impl<'de> Visitor<'de> for Sizes {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MOST_DIMENSIONS} sizes")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
                let mut sizes = Vec::new();
                while let Some(size) = list.next_element::<u64>()? {
                    if sizes.len() == MOST_DIMENSIONS {
                        return Err(A::Error::custom(format!(
                            "shape has more than {MOST_DIMENSIONS} dimensions"
                        )));
                    }
                    sizes.push(size);
                }
                Ok(Shape(sizes))
            }
        }
        deserializer.deserialize_seq(Sizes)
    }
}
