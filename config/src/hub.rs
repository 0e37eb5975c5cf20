//! Models on a hub: `hf://ORG/NAME`, `hf://ORG/NAME/FILE.gguf`, either followed by `@REVISION`.

use std::fmt;

/// How a reference to a hub begins.
const SCHEME: &str = "hf://";
/// Longest name of an organisation or a repository, in bytes.
const MAX_NAME: usize = 96;
/// Longest revision, and longest path of a file, in bytes.
const MAX_PATH: usize = 255;
/// The revision that is meant where none is given.
const MAIN: &str = "main";

/// A model on a hub. Every part is safe as a part of a URL and of a path: letters, digits and `. _ - +`, no empty part, none
/// that begins with a dot; slashes only in `revision` and `file`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HubReference {
    /// `ORG/NAME`.
    pub repository: String,
    /// Path of a GGUF file in the repository; `None`: the repository is a model directory.
    pub file: Option<String>,
    /// A branch, a tag, or a commit.
    pub revision: String,
}

impl HubReference {
    /// Whether `path` is meant as a reference, right or wrong, and not as a path of this machine.
    pub fn is_meant(path: &str) -> bool {
        path.starts_with(SCHEME)
    }

    /// Reads a reference.
    ///
    /// # Errors
    /// What is wrong with it, and what would be right, in one line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| {
            format!(
                "{text:?} {what}; hf://ORG/NAME or hf://ORG/NAME/FILE.gguf would be right, followed by @REVISION or not"
            )
        };
        let rest = text
            .strip_prefix(SCHEME)
            .ok_or_else(|| wrong("does not begin with hf://"))?;
        let (path, revision) = match rest.split_once('@') {
            Some((path, revision)) => (path, revision),
            None => (rest, MAIN),
        };
        if !is_clean(revision) {
            return Err(wrong("has a revision that is no branch, tag or commit"));
        }
        let mut parts = path.splitn(3, '/');
        let (Some(organisation), Some(name)) = (parts.next(), parts.next()) else {
            return Err(wrong("names no repository"));
        };
        for part in [organisation, name] {
            if !is_clean(part) || part.len() > MAX_NAME || part.contains('+') {
                return Err(wrong(
                    "has a name of something else than 1 to 96 letters, digits and . _ -",
                ));
            }
        }
        let file = parts.next();
        if let Some(file) = file
            && !(is_clean(file) && file.ends_with(".gguf"))
        {
            return Err(wrong("names a file that is no GGUF file"));
        }
        Ok(Self {
            repository: format!("{organisation}/{name}"),
            file: file.map(str::to_owned),
            revision: revision.to_owned(),
        })
    }

    /// The commit, where the revision is one: then it means the same bytes for ever.
    pub fn commit(&self) -> Option<&str> {
        is_commit(&self.revision).then_some(self.revision.as_str())
    }
}

impl fmt::Display for HubReference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.repository)?;
        if let Some(file) = &self.file {
            write!(f, "/{file}")?;
        }
        write!(f, "@{}", self.revision)
    }
}

/// Whether `text` is the full name of a commit.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether a value of `model.path` can be one: empty, a path, or a right reference.
pub(crate) fn is_model_path(text: &str) -> bool {
    !HubReference::is_meant(text) || HubReference::parse(text).is_ok()
}

/// Whether `text` is `http://HOST` or `https://HOST`, with a port and a path or without.
pub(crate) fn is_url(text: &str) -> bool {
    let Some(rest) = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")) else {
        return false;
    };
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let with_port = if host.ends_with(']') || !host.contains(':') {
        format!("{host}:443")
    } else {
        host.to_owned()
    };
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-/".contains(&b);
    crate::is_dial_address(&with_port) && path.bytes().all(plain)
}

/// One or more parts with slashes between them.
fn is_clean(path: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || b"._-+".contains(&b);
    let part = |part: &str| !part.is_empty() && !part.starts_with('.') && part.bytes().all(legal);
    path.len() <= MAX_PATH && path.split('/').all(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_have_a_repository_a_file_and_a_revision() {
        let read = |text: &str| HubReference::parse(text).map(|r| (r.repository, r.file, r.revision));
        let is = |repository: &str, file: Option<&str>, revision: &str| {
            Ok((repository.to_owned(), file.map(str::to_owned), revision.to_owned()))
        };
        assert_eq!(read("hf://a/b"), is("a/b", None, "main"));
        assert_eq!(read("hf://a.b/c_d-1.5B@v1.0"), is("a.b/c_d-1.5B", None, "v1.0"));
        assert_eq!(read("hf://a/b@refs/pr/2"), is("a/b", None, "refs/pr/2"));
        assert_eq!(read("hf://a/b/c.gguf"), is("a/b", Some("c.gguf"), "main"));
        assert_eq!(read("hf://a/b/Q4/c+d.gguf@x"), is("a/b", Some("Q4/c+d.gguf"), "x"));
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let pinned = HubReference::parse(&format!("hf://a/b@{commit}")).unwrap();
        assert_eq!(pinned.commit(), Some(commit));
        assert_eq!(HubReference::parse("hf://a/b").unwrap().commit(), None);
        assert_eq!(
            HubReference::parse("hf://a/b/c.gguf@x").unwrap().to_string(),
            "hf://a/b/c.gguf@x"
        );
    }

    #[test]
    fn wrong_references_are_refused_with_what_would_be_right() {
        let long = format!("hf://{}/b", "a".repeat(97));
        for (wrong, why) in [
            ("a/b", "hf://"),
            ("hf://", "repository"),
            ("hf://a", "repository"),
            ("hf://a/", "letters"),
            ("hf:///b", "letters"),
            ("hf://a/..", "letters"),
            ("hf://a/b c", "letters"),
            ("hf://ä/b", "letters"),
            (&long, "letters"),
            ("hf://a/b/", "GGUF"),
            ("hf://a/b/c.bin", "GGUF"),
            ("hf://a/b/../c.gguf", "GGUF"),
            ("hf://a/b//c.gguf", "GGUF"),
            ("hf://a/b@", "revision"),
            ("hf://a/b@../x", "revision"),
            ("hf://a/b@x y", "revision"),
            ("hf://a/b@x?y", "revision"),
        ] {
            let error = HubReference::parse(wrong).unwrap_err();
            assert!(
                error.contains(why) && error.contains("hf://ORG/NAME"),
                "{wrong}: {error}"
            );
            assert_eq!(is_model_path(wrong), !wrong.starts_with("hf://"), "{wrong}");
        }
        assert!(is_model_path("") && is_model_path("/models/x.gguf") && is_model_path("hf://a/b"));
    }

    #[test]
    fn hubs_are_urls() {
        for right in [
            "https://hub.example",
            "http://127.0.0.1:9",
            "https://hub.example:8443/a/b",
            "http://[::1]",
        ] {
            assert!(is_url(right), "{right}");
        }
        for wrong in [
            "",
            "hub.example",
            "ftp://a",
            "https://",
            "https://a:0",
            "https://u:p@a",
            "https://a?b",
            "https://a b",
        ] {
            assert!(!is_url(wrong), "{wrong}");
        }
    }
}
