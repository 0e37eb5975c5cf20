//! A repository in the cache, laid out as the tools of the Hugging Face hub do it:
//!
//! ```text
//! models--ORG--NAME/blobs/CHECKSUM                 a file
//! models--ORG--NAME/blobs/CHECKSUM.incomplete      what there is of one
//! models--ORG--NAME/snapshots/COMMIT/PATH          a link to a blob
//! models--ORG--NAME/refs/REVISION                  the commit that a branch or tag was
//! models--ORG--NAME/listings/COMMIT.json           what a commit consists of (only Baton has it)
//! .locks/models--ORG--NAME/CHECKSUM.lock           held while a file is fetched
//! ```

use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use config::is_commit;

use crate::digest::Checksum;
use crate::error::HubError;
use crate::listing::Listing;

/// Largest small file of the cache that is read, in bytes.
const MAX_READ: u64 = 64 << 20;

/// The folder of a repository.
#[derive(Clone, Debug)]
pub(crate) struct Repository {
    root: PathBuf,
    locks: PathBuf,
}

impl Repository {
    /// `name`: `ORG/NAME`.
    pub(crate) fn new(cache: &Path, name: &str) -> Self {
        let folder = format!("models--{}", name.replace('/', "--"));
        Self {
            root: cache.join(&folder),
            locks: cache.join(".locks").join(folder),
        }
    }

    /// The folder itself.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Makes the folders.
    pub(crate) fn create(&self) -> Result<(), HubError> {
        for folder in [&self.root.join("blobs"), &self.locks] {
            fs::create_dir_all(folder).map_err(HubError::disk(folder))?;
        }
        Ok(())
    }

    pub(crate) fn blob(&self, checksum: &Checksum) -> PathBuf {
        self.root.join("blobs").join(checksum.digits())
    }

    pub(crate) fn unfinished(&self, checksum: &Checksum) -> PathBuf {
        self.root.join("blobs").join(format!("{checksum}.incomplete"))
    }

    pub(crate) fn lock(&self, checksum: &Checksum) -> PathBuf {
        self.locks.join(format!("{checksum}.lock"))
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// Whether the blob is whole. (It got its name when its checksum was right.)
    pub(crate) fn has(&self, checksum: &Checksum, size: u64) -> bool {
        file_size(&self.blob(checksum)) == Some(size)
    }

    /// Puts a blob into a commit's folder.
    pub(crate) fn link(&self, commit: &str, path: &str, checksum: &Checksum) -> Result<(), HubError> {
        let link = self.snapshot(commit).join(path);
        let ups = "../".repeat(2 + path.matches('/').count());
        let target = PathBuf::from(format!("{ups}blobs/{checksum}"));
        if fs::read_link(&link).is_ok_and(|old| old == target) {
            return Ok(());
        }
        let failed = HubError::disk(&link);
        replace(&link, |new| {
            std::os::unix::fs::symlink(&target, new)
                // Some file systems have no such links.
                .or_else(|_| fs::hard_link(self.blob(checksum), new))
        })
        .map_err(failed)
    }

    /// Remembers what a branch or tag was.
    pub(crate) fn write_ref(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if is_commit(revision) {
            return Ok(());
        }
        self.write(&self.root.join("refs").join(revision), commit.as_bytes())
    }

    /// What a revision is, or was when the hub was asked last.
    pub(crate) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let text = read(&self.root.join("refs").join(revision)).ok()?;
        let commit = String::from_utf8(text).ok()?.trim().to_owned();
        is_commit(&commit).then_some(commit)
    }

    /// Remembers what a commit consists of.
    pub(crate) fn write_listing(&self, listing: &Listing) -> Result<(), HubError> {
        let path = self.listing_path(&listing.commit);
        let text = serde_json::to_vec(listing).map_err(|error| HubError::disk(&path)(error.into()))?;
        self.write(&path, &text)
    }

    /// What a commit consists of, if that is known here.
    pub(crate) fn listing(&self, commit: &str) -> Option<Listing> {
        let text = read(&self.listing_path(commit)).ok()?;
        let listing: Listing = serde_json::from_slice(&text).ok()?;
        (listing.commit == commit).then_some(listing)
    }

    fn listing_path(&self, commit: &str) -> PathBuf {
        self.root.join("listings").join(format!("{commit}.json"))
    }

    fn write(&self, path: &Path, text: &[u8]) -> Result<(), HubError> {
        if read(path).is_ok_and(|old| old == text) {
            return Ok(());
        }
        replace(path, |new| fs::File::create_new(new)?.write_all(text)).map_err(HubError::disk(path))
    }
}

/// Size of a file, links followed; `None` if there is none.
pub(crate) fn file_size(path: &Path) -> Option<u64> {
    fs::metadata(path)
        .ok()
        .filter(fs::Metadata::is_file)
        .map(|found| found.len())
}

/// Reads a small file.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    if fs::metadata(path)?.len() > MAX_READ {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the file is too large"));
    }
    fs::read(path)
}

/// Makes a file under another name and then gives it its own, so that nobody sees half of it.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut name = path.as_os_str().to_owned();
    // The number of a process alone may be another machine's, too.
    let random = RandomState::new().build_hasher().finish();
    name.push(format!(".{}.{random:016x}.new", std::process::id()));
    let new = PathBuf::from(name);
    let made = make(&new).and_then(|()| fs::rename(&new, path));
    if made.is_err() {
        // It may not be there; what has gone wrong is told.
        drop(fs::remove_file(&new));
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_that_of_the_hubs_tools() {
        let folder = tempfile::tempdir().unwrap();
        let repository = Repository::new(folder.path(), "org/name");
        let root = folder.path().join("models--org--name");
        assert_eq!(repository.root(), root);
        repository.create().unwrap();
        let sum = Checksum::parse(&"a".repeat(64)).unwrap();
        fs::write(repository.blob(&sum), "weights").unwrap();
        assert!(repository.has(&sum, 7) && !repository.has(&sum, 8));
        let commit = "1".repeat(40);
        for _ in 0..2 {
            repository.link(&commit, "q4/m.gguf", &sum).unwrap();
            repository.write_ref("refs/pr/1", &commit).unwrap();
        }
        let link = root.join("snapshots").join(&commit).join("q4/m.gguf");
        assert_eq!(
            fs::read_link(&link).unwrap(),
            PathBuf::from(format!("../../../blobs/{sum}"))
        );
        assert_eq!(fs::read_to_string(link).unwrap(), "weights");
        assert_eq!(fs::read_to_string(root.join("refs/refs/pr/1")).unwrap(), commit);
        assert_eq!(repository.commit("refs/pr/1"), Some(commit.clone()));
        assert_eq!(repository.commit(&commit), Some(commit));
        assert_eq!(repository.commit("main"), None);
        let lock = folder
            .path()
            .join(".locks/models--org--name")
            .join(format!("{sum}.lock"));
        assert_eq!(repository.lock(&sum), lock);
    }
}
