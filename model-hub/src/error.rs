//! What can go wrong with a fetch. No message contains a token, nor the URL that a hub leads to, which may be as good as one.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why a model is not here.
#[derive(Debug, Error)]
pub enum HubError {
    /// No reference to a hub.
    #[error("{0}")]
    Reference(String),
    /// A setting of `[model]` cannot be used.
    #[error("model.{field}: {reason}")]
    Setting {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The hub wants to know who asks.
    #[error("{hub} lets nobody read {repository} without {}", if *.token { "another token: it does not accept the one that is set" } else { "a token: set model.hub_token_file or HF_TOKEN" })]
    Unauthorized {
        /// The hub.
        hub: String,
        /// The repository.
        repository: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// Only who has been let in may read it.
    #[error("{hub} lets only those read {repository} who have been given access: ask for it on {hub}/{repository}, and {}", if *.token { "use the token of an account that has it" } else { "set model.hub_token_file or HF_TOKEN" })]
    Gated {
        /// The hub.
        hub: String,
        /// The repository.
        repository: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// No such repository, as far as the hub tells.
    #[error("{hub} has no repository {repository}{}", if *.token { " that the token may read" } else { " that can be read without a token" })]
    NoRepository {
        /// The hub.
        hub: String,
        /// The repository.
        repository: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// No such branch, tag or commit.
    #[error("{repository} has no revision {revision:?}; a branch, a tag or a commit would be right")]
    NoRevision {
        /// The repository.
        repository: String,
        /// What was asked for.
        revision: String,
    },
    /// A file is not there.
    #[error("{repository} has no file {file} in {revision}{}", listed(.there))]
    NoFile {
        /// The repository.
        repository: String,
        /// The file.
        file: String,
        /// Where it was looked for.
        revision: String,
        /// Files that could have been meant.
        there: Vec<String>,
    },
    /// The repository is there, and is no model that can be served.
    #[error("{repository} {reason}")]
    NoModel {
        /// The repository.
        repository: String,
        /// What is missing or wrong.
        reason: String,
    },
    /// The server's answer makes no sense.
    #[error("{hub} answers {what} with {reason}")]
    Answer {
        /// The hub.
        hub: String,
        /// What was asked for.
        what: String,
        /// What is wrong.
        reason: String,
    },
    /// Tried often enough.
    #[error("{what}: {last} (failed tries in a row: {tries})")]
    GaveUp {
        /// What was tried.
        what: String,
        /// How often.
        tries: u32,
        /// What went wrong at last.
        last: String,
    },
    /// Other bytes than the hub's list says.
    #[error("{file} has the checksum {found}, must have {expected}; what was fetched of it has been deleted")]
    Checksum {
        /// The file.
        file: String,
        /// By the list.
        expected: String,
        /// Of the bytes.
        found: String,
    },
    /// The system refused to read or write.
    #[error("{}: {source}", .path.display())]
    Disk {
        /// The file or folder.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Too little room.
    #[error("{}: {needed} more bytes are needed, {free} are free", .path.display())]
    NoRoom {
        /// The folder.
        path: PathBuf,
        /// Bytes that are missing.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// Another process has the file and gets nowhere.
    #[error("{}: process {owner} is fetching this file and has got no further for {seconds} s", .path.display())]
    Busy {
        /// The lock.
        path: PathBuf,
        /// Who holds it, by the lock's text.
        owner: String,
        /// For how long.
        seconds: u64,
    },
    /// Only the cache may be used, and it lacks something.
    #[error("{what} is not whole in {}: it lacks {missing}, and model.offline is set", .path.display())]
    Offline {
        /// The reference.
        what: String,
        /// The repository's folder in the cache.
        path: PathBuf,
        /// What is missing.
        missing: String,
    },
    /// No runtime, or one of its tasks is gone.
    #[error("the async runtime: {0}")]
    Runtime(io::Error),
}

impl HubError {
    /// For `map_err` of what was done to `path`.
    pub(crate) fn disk(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Disk { path, source }
    }

    /// Whether the hub could not be asked, so that what it said last may do.
    pub(crate) fn is_outage(&self) -> bool {
        matches!(self, Self::GaveUp { .. })
    }
}

/// The end of a sentence: a few names.
fn listed(names: &[String]) -> String {
    const MOST: usize = 8;
    match names {
        [] => String::new(),
        few if few.len() <= MOST => format!("; there are {}", few.join(", ")),
        many => format!(
            "; there are {}, and {} more",
            many[..MOST].join(", "),
            many.len() - MOST
        ),
    }
}
