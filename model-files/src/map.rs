//! Read-only memory maps: the one place of this crate that needs `unsafe`.
#![allow(
    unsafe_code,
    reason = "mapping a file has no safe form: see the SAFETY comment of `FileMap::open`"
)]

use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::ModelFilesError;

/// A whole file, mapped read-only. Dereferences to its bytes; pages are read on first touch.
#[derive(Debug)]
pub struct FileMap {
    path: PathBuf,
    map: Mmap,
}

impl FileMap {
    /// Maps `path`.
    ///
    /// # Errors
    /// [`ModelFilesError::Io`] if the file cannot be opened or mapped, [`ModelFilesError::Invalid`] if it is empty or not
    /// a regular file.
    pub fn open(path: &Path) -> Result<Self, ModelFilesError> {
        let io = |source| ModelFilesError::Io {
            path: path.to_path_buf(),
            source,
        };
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(ModelFilesError::invalid(
                path,
                "this is not a regular file; give the path of a model file",
            ));
        }
        if metadata.len() == 0 {
            return Err(ModelFilesError::invalid(
                path,
                "the file is empty (0 bytes); copy or download it again",
            ));
        }
        // SAFETY: the map is private to this value, read-only, and unmapped only when the value (and with it every slice
        // borrowed from it) is gone. What remains is the rule every mapped model file lives by: nobody may change or cut
        // the file while a process serves from it (the operating system would show the changed bytes, or end the process
        // with SIGBUS on a cut file). Model files are written once and then only read; the parsers of this crate check
        // every length against the length taken here and never trust bytes they have checked before to stay the same
        // for memory safety: all access goes through checked slices.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self {
            path: path.to_path_buf(),
            map,
        })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Deref for FileMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}
