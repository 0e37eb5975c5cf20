//! GGUF files: a bounded reader of the header, over a memory map.
//!
//! Nothing is allocated from a count the file merely claims: counts are compared with the bytes that are left, strings and
//! arrays are borrowed from the map, and every tensor's byte range is checked against the file and all other tensors.

mod ggml_type;
mod parse;
mod problem;
mod reader;
pub(crate) mod split;
mod value;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::path::Path;

pub use ggml_type::GgmlType;
pub use parse::{Header, TensorInfo};
pub use problem::GgufProblem;
pub use value::{Array, Value, ValueType};

use crate::error::ModelFilesError;
use crate::map::FileMap;

/// An open GGUF file: checked header and mapped data. A model that is split over several files is one here.
#[derive(Debug)]
pub struct GgufFile {
    /// The first has the metadata.
    maps: Vec<FileMap>,
    header: Header,
}

impl GgufFile {
    /// Maps the file and checks its header. Any part of a split model stands for all of them, which must lie beside it.
    ///
    /// # Errors
    /// [`ModelFilesError`], naming the file and what is wrong in it; of a split model also the parts that are missing, and
    /// keys and tensors that contradict each other.
    pub fn open(path: &Path) -> Result<Self, ModelFilesError> {
        split::open(path)
    }

    /// The path of the file with the metadata: the first part of a split model, whichever was opened.
    pub fn path(&self) -> &Path {
        self.maps[0].path()
    }

    /// The paths of all its files.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.maps.iter().map(FileMap::path)
    }

    /// Bytes of all its files.
    pub fn file_bytes(&self) -> u64 {
        self.maps.iter().map(|map| map.len() as u64).sum()
    }

    /// The checked header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The whole file with the metadata.
    pub fn bytes(&self) -> &[u8] {
        &self.maps[0]
    }

    /// The value of `key`, if the file has it.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        self.header.get(&self.maps[0], key)
    }

    /// Tensors in the order of the file, or of the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        self.header.tensors()
    }

    /// The tensor called `name`.
    ///
    /// # Errors
    /// [`GgufProblem::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo, ModelFilesError> {
        self.header
            .tensor(name)
            .ok_or_else(|| self.error(GgufProblem::MissingTensor(name.into())))
    }

    /// The bytes of a tensor of this file.
    ///
    /// # Panics
    /// If `info` is not of this file.
    pub fn tensor_bytes(&self, info: &TensorInfo) -> &[u8] {
        let index = |at: u64| usize::try_from(at).expect("a checked range lies within the mapped file");
        &self.maps[info.part][index(info.bytes.start)..index(info.bytes.end)]
    }

    /// This problem, with the file's name.
    pub fn error(&self, problem: GgufProblem) -> ModelFilesError {
        ModelFilesError::gguf(self.path(), problem)
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        read: impl Fn(&Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, ModelFilesError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(&value) {
            Some(found) => Ok(Some(found)),
            None => Err(self.error(GgufProblem::Kind {
                key: key.into(),
                found: value.describe(),
                wanted: wanted.into(),
            })),
        }
    }

    /// A non-negative integer of any width that fits `u32`, if the key is there.
    ///
    /// # Errors
    /// [`GgufProblem::Kind`] if the value is something else; so for the other readers below.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, ModelFilesError> {
        self.typed(key, "an integer from 0 to 4294967295", |value| {
            value.as_u64()?.try_into().ok()
        })
    }

    /// A float, if the key is there.
    ///
    /// # Errors
    /// See [`Self::u32`].
    pub fn f32(&self, key: &str) -> Result<Option<f32>, ModelFilesError> {
        self.typed(key, "a float", |value| value.as_f64().map(|number| number as f32))
    }

    /// A bool, if the key is there.
    ///
    /// # Errors
    /// See [`Self::u32`].
    pub fn bool(&self, key: &str) -> Result<Option<bool>, ModelFilesError> {
        self.typed(key, "a bool", Value::as_bool)
    }

    /// A string, if the key is there.
    ///
    /// # Errors
    /// See [`Self::u32`].
    pub fn string(&self, key: &str) -> Result<Option<&str>, ModelFilesError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// An array whose elements are all read by `element`, if the key is there. `wanted` says what the array should hold.
    ///
    /// # Errors
    /// See [`Self::u32`].
    pub fn array<'a, T>(
        &'a self,
        key: &str,
        wanted: &str,
        element: impl Fn(&Value<'a>) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelFilesError> {
        self.typed(key, wanted, |value| {
            let array = value.as_array()?;
            let read: Vec<T> = array.iter().map_while(|value| element(&value)).collect();
            (read.len() as u64 == array.len()).then_some(read)
        })
    }

    /// Like [`Self::u32`], but the key must be there.
    ///
    /// # Errors
    /// [`GgufProblem::MissingKey`] or [`GgufProblem::Kind`].
    pub fn require_u32(&self, key: &str) -> Result<u32, ModelFilesError> {
        self.u32(key)?
            .ok_or_else(|| self.error(GgufProblem::MissingKey(key.into())))
    }

    /// Like [`Self::f32`], but the key must be there.
    ///
    /// # Errors
    /// [`GgufProblem::MissingKey`] or [`GgufProblem::Kind`].
    pub fn require_f32(&self, key: &str) -> Result<f32, ModelFilesError> {
        self.f32(key)?
            .ok_or_else(|| self.error(GgufProblem::MissingKey(key.into())))
    }

    /// Like [`Self::string`], but the key must be there.
    ///
    /// # Errors
    /// [`GgufProblem::MissingKey`] or [`GgufProblem::Kind`].
    pub fn require_string(&self, key: &str) -> Result<&str, ModelFilesError> {
        self.string(key)?
            .ok_or_else(|| self.error(GgufProblem::MissingKey(key.into())))
    }
}
