//! Files below one folder.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::Medium;
use super::policy::{MediaKind, Policy, Refusal};

/// Opens a local medium. Links and `..` are resolved first: what counts is where the file
/// really lies and what it really is.
///
/// # Errors
/// It is not there, lies outside of the folder, is no plain file, has a wrong extension or too many bytes. That it is not
/// there and that it lies elsewhere sound the same: nobody learns what files there are.
pub fn open(policy: &Policy, kind: MediaKind, path: &Path) -> Result<Medium, Refusal> {
    let outside = |_| Refusal::Outside;
    let root = policy.root.canonicalize().map_err(outside)?;
    let real = path.canonicalize().map_err(outside)?;
    if !real.starts_with(&root) {
        return Err(Refusal::Outside);
    }
    Policy::extension(kind, &real)?;
    let named = fs::symlink_metadata(&real).map_err(outside)?;
    // Looked at before it is opened: opening a device or a pipe can already do something.
    if !named.is_file() {
        return Err(Refusal::NoFile);
    }
    let file = File::open(&real).map_err(outside)?;
    let opened = file.metadata().map_err(outside)?;
    // It has not been exchanged in between.
    if !opened.is_file() || (opened.dev(), opened.ino()) != (named.dev(), named.ino()) {
        return Err(Refusal::NoFile);
    }
    let most = policy.max_bytes(kind);
    if opened.len() > most {
        return Err(Refusal::TooLarge(most));
    }
    Ok(Medium {
        file,
        bytes: opened.len(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use config::MediaConfig;

    use super::*;

    #[test]
    fn only_plain_files_below_the_folder_are_opened() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path().join("root");
        fs::create_dir_all(root.join("sub")).expect("made");
        let policy = Policy::new(&MediaConfig {
            local_root: root.to_str().expect("UTF-8").to_owned(),
            max_image_bytes: 4,
            ..MediaConfig::default()
        });
        let write = |path: &Path, text: &str| fs::write(path, text).expect("written");
        write(&root.join("sub/a.png"), "abcd");
        write(&root.join("big.png"), "abcde");
        write(&root.join("text.txt"), "a");
        write(&folder.path().join("secret.png"), "a");
        symlink(folder.path().join("secret.png"), root.join("link.png")).expect("linked");
        symlink(root.join("sub/a.png"), root.join("inner.png")).expect("linked");
        symlink(root.join("text.txt"), root.join("kind.png")).expect("linked");
        fs::create_dir(root.join("folder.png")).expect("made");
        let _socket = UnixListener::bind(root.join("socket.png")).expect("bound");
        let open = |path: &str| open(&policy, MediaKind::Image, &root.join(path)).map(|medium| medium.bytes);
        assert_eq!(open("sub/a.png"), Ok(4));
        assert_eq!(open("inner.png"), Ok(4), "a link that stays inside");
        assert_eq!(open("big.png"), Err(Refusal::TooLarge(4)));
        for outside in ["link.png", "sub/../../secret.png", "none.png"] {
            assert_eq!(open(outside), Err(Refusal::Outside), "{outside}");
        }
        assert!(
            matches!(open("kind.png"), Err(Refusal::Format(_))),
            "the real name counts"
        );
        for special in ["folder.png", "socket.png"] {
            assert_eq!(open(special), Err(Refusal::NoFile), "{special}");
        }
    }
}
