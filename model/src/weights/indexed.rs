//! Tensors of one or several safetensors files by name.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;

use model_files::{FileMap, ModelDirectory};
use safetensors::Dtype;

use super::WeightError;
use super::header;
use super::store::{Stored, View};
use crate::kernels::GgmlType;

struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Range<usize>,
}

/// The mapped weight files of a model directory or an adapter.
pub(super) struct SafeTensorFiles {
    maps: Vec<FileMap>,
    entries: HashMap<String, Entry>,
}

impl SafeTensorFiles {
    /// Opens files and checks their headers.
    pub(super) fn open(paths: &[PathBuf]) -> Result<Self, WeightError> {
        let mut files = Self {
            maps: Vec::new(),
            entries: HashMap::new(),
        };
        for path in paths {
            let map = FileMap::open(path)?;
            let broken = |reason: String| WeightError::Safetensors {
                path: path.clone(),
                reason,
            };
            for (name, header::Entry { dtype, shape, bytes }) in header::read(&map).map_err(broken)? {
                let file = files.maps.len();
                if let Some(other) = files.entries.get(&name) {
                    let other = files.maps[other.file].path().display();
                    return Err(broken(format!("tensor {name} is also in {other}")));
                }
                let entry = Entry {
                    file,
                    dtype,
                    shape,
                    bytes,
                };
                files.entries.insert(name, entry);
            }
            files.maps.push(map);
        }
        Ok(files)
    }

    /// Opens a model's files; its index must tell the truth.
    pub(super) fn open_directory(directory: &ModelDirectory) -> Result<Self, WeightError> {
        let files = Self::open(directory.weight_files())?;
        for (name, path) in directory.weight_map() {
            let found = files.entries.get(name).map(|entry| files.maps[entry.file].path());
            if found != Some(path.as_path()) {
                let place = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
                return Err(WeightError::Safetensors {
                    path: directory.path().join("model.safetensors.index.json"),
                    reason: format!("weight_map.{name} is {place:?}, but that file has no such tensor"),
                });
            }
        }
        Ok(files)
    }

    pub(super) fn find(&self, name: &str) -> Result<Option<View<'_>>, WeightError> {
        let Some(entry) = self.entries.get(name) else {
            return Ok(None);
        };
        let map = &self.maps[entry.file];
        let bytes = map.get(entry.bytes.clone()).ok_or_else(|| WeightError::Safetensors {
            path: map.path().to_path_buf(),
            reason: format!("tensor {name} lies beyond the end of the file"),
        })?;
        let stored = match entry.dtype {
            Dtype::F32 => Stored::Ggml(GgmlType::F32),
            Dtype::F16 => Stored::Ggml(GgmlType::F16),
            Dtype::BF16 => Stored::Ggml(GgmlType::Bf16),
            Dtype::F8_E4M3 => Stored::Fp8,
            other => {
                return Err(WeightError::Type {
                    name: name.to_owned(),
                    found: format!("{other:?}"),
                    supported: "F32, F16 and BF16, and F8_E4M3 with scales",
                });
            }
        };
        Ok(Some(View {
            stored,
            shape: entry.shape.clone(),
            bytes,
        }))
    }

    /// The names of all tensors, sorted.
    pub(super) fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.entries.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }
}
