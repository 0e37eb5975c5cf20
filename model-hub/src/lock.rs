//! One process fetches a file, the others wait for it.
//!
//! The lock is the system's (`flock`), on a file that says who holds it; it ends with its owner, however that ends.

use std::collections::hash_map::RandomState;
use std::fs::{File, TryLockError};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cache::file_size;
use crate::error::HubError;
use crate::progress::Share;

/// A lock is looked at this often.
const INTERVAL: Duration = Duration::from_millis(50);
/// Longest text of a lock that is read, in bytes.
const MAX_OWNER: u64 = 64;

/// Held until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    text: String,
    _file: File,
}

impl Lock {
    /// Whether nobody else has got it meanwhile. On some network file systems everybody gets every lock.
    pub(crate) fn holds(&self) -> io::Result<bool> {
        let text = std::fs::read_to_string(&self.path)?;
        // Some of the hub's tools empty the file while they wait for the lock; whoever gets it writes its own name.
        Ok(text.is_empty() || text == self.text)
    }
}

/// Waits for a lock. `unfinished`: what its owner writes to; while that grows, and for `patience` afterwards, is waited.
pub(crate) async fn acquire(
    path: &Path,
    unfinished: &Path,
    patience: Duration,
    share: &mut Share,
) -> Result<Lock, HubError> {
    let mut open = File::options();
    let open = open.read(true).write(true).create(true).truncate(false);
    let mut file = open.open(path).map_err(HubError::disk(path))?;
    let (mut seen, mut idle, mut told) = (None, Duration::ZERO, false);
    loop {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(HubError::disk(path)(error)),
        }
        if !told {
            told = true;
            tracing::info!(owner = owner(&mut file), lock = %path.display(), "another process is fetching this file");
        }
        let now = file_size(unfinished);
        idle = if now == seen { idle + INTERVAL } else { Duration::ZERO };
        if idle > patience {
            return Err(HubError::Busy {
                path: path.to_path_buf(),
                owner: owner(&mut file),
                seconds: idle.as_secs(),
            });
        }
        seen = now;
        share.set(now.unwrap_or_default());
        tokio::time::sleep(INTERVAL).await;
    }
    // A number alone may be that of a process of another machine, too.
    let text = format!(
        "{} {:016x}",
        std::process::id(),
        RandomState::new().build_hasher().finish()
    );
    let name = |mut file: &File| {
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(text.as_bytes())
    };
    name(&file).map_err(HubError::disk(path))?;
    Ok(Lock {
        path: path.to_path_buf(),
        text,
        _file: file,
    })
}

/// The process that the lock's text names.
fn owner(file: &mut File) -> String {
    let mut text = String::new();
    let read = file
        .rewind()
        .and_then(|()| file.take(MAX_OWNER).read_to_string(&mut text));
    let digits = text.split(' ').next().unwrap_or_default();
    if read.is_ok() && !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) {
        digits.to_owned()
    } else {
        "(unknown)".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::progress::Progress;

    #[tokio::test]
    async fn a_lock_has_one_owner_and_knows_if_somebody_else_got_it() {
        let folder = tempfile::tempdir().unwrap();
        let (path, part) = (folder.path().join("lock"), folder.path().join("part"));
        let mut share = Share::of(&Arc::new(Progress::default()));
        let lock = acquire(&path, &part, Duration::ZERO, &mut share).await.unwrap();
        assert!(lock.holds().unwrap());
        let busy = acquire(&path, &part, Duration::ZERO, &mut share).await.unwrap_err();
        assert!(
            busy.to_string()
                .contains(&format!("process {} is fetching", std::process::id()))
        );
        std::fs::write(&path, "1 0123456789abcdef").unwrap();
        assert!(!lock.holds().unwrap());
        drop(lock);
        acquire(&path, &part, Duration::ZERO, &mut share).await.unwrap();
    }
}
