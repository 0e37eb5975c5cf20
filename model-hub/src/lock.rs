//! One process fetches a file, the others wait for it.
//!
//! The lock is the system's (`flock`), on a file that says who holds it; it ends with its owner, however that ends.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;
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
    _file: File,
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
    let name = |mut file: &File| {
        file.set_len(0)?;
        file.rewind()?;
        write!(file, "{}", std::process::id())
    };
    name(&file).map_err(HubError::disk(path))?;
    Ok(Lock { _file: file })
}

/// The process that the lock's text names.
fn owner(file: &mut File) -> String {
    let mut text = String::new();
    let read = file
        .rewind()
        .and_then(|()| file.take(MAX_OWNER).read_to_string(&mut text));
    let digits = text.trim();
    if read.is_ok() && !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) {
        digits.to_owned()
    } else {
        "(unknown)".to_owned()
    }
}
