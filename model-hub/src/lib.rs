//! Models from a hub: `hf://ORG/NAME[/FILE.gguf][@REVISION]` becomes a path of this machine.
//!
//! * A revision is looked up once and is a commit from then on: one model never mixes two of them.
//! * Only what the loader reads is fetched ([`Need`]), several files at a time, each into a file beside the finished ones. It
//!   gets its name when its checksum is right: SHA-256 of large files, Git's SHA-1 of small ones, as the hub's list says.
//! * What is there of a file, of this process or of one that was killed, is not fetched again; of several processes that
//!   want the same file one fetches it, under a lock that ends with its owner.
//! * Whatever may pass is tried again, a bounded number of times without progress. A fetch may be dropped at any time.
//! * The token goes to the hub's own address only, never to where the hub leads, and into no message.
//! * The cache is laid out as the tools of the Hugging Face hub do it (`models--ORG--NAME/{blobs,refs,snapshots}`), the same
//!   unfinished files and locks included, so it can be shared with them. `listings` is our own: what a commit consists of. With
//!   it a commit that is whole here is used without asking anybody.
//!
//! `hf-hub` 0.5 would be the library for this. It compares no checksums, has no deadlines, sends the token along when
//! it asks the host of a redirect for a file's size, waits five seconds for another process, and takes no part of
//! a chunk over into the next process. So this is written on `reqwest`.

mod cache;
mod client;
mod digest;
mod download;
mod error;
mod fetch;
mod listing;
mod local;
mod lock;
mod progress;
mod retry;

use std::path::PathBuf;

use config::{HubReference, ModelConfig};

pub use error::HubError;

/// What of a model is needed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    /// What describes it and makes text of tokens: all but the weights. (Of a GGUF file everything, it is one.)
    Text,
    /// The weights, too.
    Whole,
}

/// A model that is on this machine now.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fetched {
    /// The directory, or the GGUF file.
    pub path: PathBuf,
    /// The commit that the revision was.
    pub commit: String,
}

/// Fetches a model, as far as it is not in the cache. The future may be dropped at any time; what has been written by then is
/// not fetched again.
///
/// # Errors
/// [`HubError`]: one line that says what is wrong, and where something can be done about it, what.
pub async fn fetch(reference: &HubReference, model: &ModelConfig, need: Need) -> Result<Fetched, HubError> {
    fetch::fetch(reference, model, need).await
}

/// [`fetch()`] for programs without an async runtime.
///
/// # Errors
/// As [`fetch()`].
pub fn fetch_blocking(reference: &HubReference, model: &ModelConfig, need: Need) -> Result<Fetched, HubError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime
        .map_err(HubError::Runtime)?
        .block_on(fetch(reference, model, need))
}

/// Makes `model.path` a path of this machine: if it names a model on a hub, that is fetched. Clients then call it by the
/// repository's name, if the settings give none and it is no GGUF file, which has a name in it.
///
/// # Errors
/// As [`fetch()`].
pub async fn localise(model: &mut ModelConfig, need: Need) -> Result<(), HubError> {
    if !HubReference::is_meant(&model.path) {
        return Ok(());
    }
    let reference = HubReference::parse(&model.path).map_err(HubError::Reference)?;
    let fetched = fetch(&reference, model, need).await?;
    tracing::info!(model = %reference, commit = %fetched.commit, path = %fetched.path.display(), "the model is here");
    if model.model_name.is_empty() && reference.file.is_none() {
        model.model_name = reference.repository;
    }
    let path = fetched.path.into_os_string().into_string();
    model.path = path.map_err(|path| HubError::Setting {
        field: "hub_cache_dir",
        reason: format!("{} is not UTF-8", path.display()),
    })?;
    Ok(())
}
