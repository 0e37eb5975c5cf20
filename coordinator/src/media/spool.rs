//! Where media are downloaded to: files without a name, which are gone with whoever holds them; and the room that must be
//! left on that disk before anything is downloaded.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use config::MediaConfig;
use thiserror::Error;

/// Why nothing can be downloaded now.
#[derive(Debug, Error)]
pub enum SpoolError {
    /// Too little room is left. Requests that are sent later may find more.
    #[error("media cannot be downloaded now: {needed} bytes of disk must be free for them, {free} are")]
    Full {
        /// Bytes that must be free.
        needed: u64,
        /// Bytes that are.
        free: u64,
    },
    /// The folder cannot be used.
    #[error("media cannot be downloaded now: the disk fails")]
    Disk(#[from] io::Error),
}

/// A folder for downloads.
#[derive(Clone, Debug)]
pub struct Spool {
    folder: PathBuf,
    reserve: u64,
}

impl Spool {
    /// Keeps room for the largest medium of each of `requests` requests at a time, and half as much again (the rule of
    /// MindIE).
    pub fn new(config: &MediaConfig, requests: usize) -> Self {
        let largest = config.max_image_bytes.max(config.max_video_bytes);
        let largest = largest.max(config.max_audio_bytes);
        let all = largest.saturating_mul(requests as u64);
        Self {
            folder: PathBuf::from(&config.download_dir),
            reserve: all.saturating_add(all / 2),
        }
    }

    /// Looks whether there is room. Blocks as long as the file system takes.
    ///
    /// # Errors
    /// There is too little, or nobody knows.
    pub fn check(&self) -> Result<(), SpoolError> {
        let disk = rustix::fs::statvfs(&self.folder).map_err(io::Error::from)?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free < self.reserve {
            return Err(SpoolError::Full {
                needed: self.reserve,
                free,
            });
        }
        Ok(())
    }

    /// A new file, empty and without a name. Blocks.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn file(&self) -> Result<File, SpoolError> {
        Ok(tempfile::tempfile_in(&self.folder)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spool(folder: &str, video: u64, requests: usize) -> Spool {
        let config = MediaConfig {
            download_dir: folder.to_owned(),
            max_image_bytes: 4,
            max_audio_bytes: 6,
            max_video_bytes: video,
            ..MediaConfig::default()
        };
        Spool::new(&config, requests)
    }

    #[test]
    fn the_reserve_is_that_of_the_largest_medium() {
        assert_eq!(
            spool("/", 536_870_912, 1_000).reserve,
            805_306_368_000,
            "512 MiB a thousand times, and half"
        );
        assert_eq!(spool("/", 5, 3).reserve, 27, "audio is the largest here");
        assert_eq!(spool("/", u64::MAX, 7).reserve, u64::MAX);
    }

    #[test]
    fn a_disk_must_have_the_room() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().to_str().expect("UTF-8");
        spool(path, 1, 1).check().expect("a few bytes are free");
        let full = spool(path, 1 << 60, 8).check().expect_err("no disk is that large");
        assert!(
            matches!(full, SpoolError::Full { needed, free } if free < needed),
            "{full}"
        );
        let nowhere = spool("/nowhere/at/all", 1, 1);
        assert!(matches!(nowhere.check(), Err(SpoolError::Disk(_))));
        assert!(matches!(nowhere.file(), Err(SpoolError::Disk(_))));
    }

    #[test]
    fn files_leave_nothing_behind() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = spool(folder.path().to_str().expect("UTF-8"), 1, 1)
            .file()
            .expect("made");
        assert_eq!(std::fs::read_dir(folder.path()).expect("readable").count(), 0);
        drop(file);
    }
}
