//! Checksums of files, by which a cache names them.

use std::fmt;

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// What a file's bytes must add up to.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Checksum {
    /// Files in large file storage: SHA-256 of the bytes.
    Sha256(String),
    /// Files in Git itself: SHA-1 of the bytes behind Git's header.
    Git(String),
}

impl Checksum {
    /// From a list or an `ETag`: 64 or 40 hexadecimal digits, in quotation marks and marked as weak or not.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let digits = text.strip_prefix("W/").unwrap_or(text).trim_matches('"');
        let lower = digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        match digits.len() {
            64 if lower => Some(Self::Sha256(digits.to_owned())),
            40 if lower => Some(Self::Git(digits.to_owned())),
            _ => None,
        }
    }

    /// The digits.
    pub(crate) fn digits(&self) -> &str {
        match self {
            Self::Sha256(digits) | Self::Git(digits) => digits,
        }
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.digits())
    }
}

/// The sum so far.
pub(crate) struct Digest(Context);

impl Digest {
    /// Of a file that will have `size` bytes.
    pub(crate) fn new(kind: &Checksum, size: u64) -> Self {
        match kind {
            Checksum::Sha256(_) => Self(Context::new(&SHA256)),
            Checksum::Git(_) => {
                let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
                context.update(format!("blob {size}\0").as_bytes());
                Self(context)
            }
        }
    }

    /// Adds bytes.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digits of all bytes.
    pub(crate) fn digits(&self) -> String {
        let digest = self.0.clone().finish();
        digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kind: &Checksum, bytes: &[u8]) -> String {
        let mut digest = Digest::new(kind, bytes.len() as u64);
        for piece in bytes.chunks(3) {
            digest.update(piece);
        }
        digest.digits()
    }

    /// `printf 'hello\n' | git hash-object --stdin` and `| sha256sum`.
    #[test]
    fn sums_are_those_of_git_and_sha256sum() {
        let git = Checksum::parse("\"ce013625030ba8dba906f756967f9e9ca394464a\"").unwrap();
        assert_eq!(of(&git, b"hello\n"), git.digits());
        let sha = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        let sha = Checksum::parse(&format!("W/\"{sha}\"")).unwrap();
        assert!(matches!(sha, Checksum::Sha256(_)));
        assert_eq!(of(&sha, b"hello\n"), sha.digits());
    }

    #[test]
    fn what_is_no_checksum_names_no_file() {
        for wrong in [
            "",
            "../../x",
            &"g".repeat(64),
            &"A".repeat(40),
            &"a".repeat(32),
            &"/".repeat(40),
        ] {
            assert_eq!(Checksum::parse(wrong), None, "{wrong}");
        }
    }
}
