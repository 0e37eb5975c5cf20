//! Tensors of one or several safetensors files by name.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;

use model_files::FileMap;
use safetensors::{Dtype, SafeTensors};

use super::{View, WeightError};
use crate::kernels::GgmlType;

/// The header of a safetensors file starts with its length as 8 bytes.
const LENGTH_BYTES: usize = 8;

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
            let read = SafeTensors::read_metadata(&map);
            let (header, metadata) = read.map_err(|e| broken(format!("{e}; the file is cut or damaged")))?;
            for (name, info) in metadata.tensors() {
                let start = LENGTH_BYTES + header;
                let bytes = start + info.data_offsets.0..start + info.data_offsets.1;
                let entry = Entry {
                    file: files.maps.len(),
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    bytes,
                };
                if files.entries.insert(name.clone(), entry).is_some() {
                    return Err(broken(format!("tensor {name} is also in another file of the model")));
                }
            }
            files.maps.push(map);
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
        let kind = match entry.dtype {
            Dtype::F32 => GgmlType::F32,
            Dtype::F16 => GgmlType::F16,
            Dtype::BF16 => GgmlType::Bf16,
            other => {
                return Err(WeightError::Type {
                    name: name.to_owned(),
                    found: format!("{other:?}"),
                    supported: "F32, F16 and BF16",
                });
            }
        };
        Ok(Some(View {
            kind,
            shape: entry.shape.clone(),
            bytes,
        }))
    }

    pub(super) fn names(&self) -> Vec<&str> {
        self.entries.keys().map(String::as_str).collect()
    }
}
