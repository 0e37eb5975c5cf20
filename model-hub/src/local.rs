//! What the cache has, without asking anybody.

use config::HubReference;

use crate::cache::{Repository, file_size, read};
use crate::download::Wanted;
use crate::error::HubError;
use crate::listing::{INDEX, Listing, gguf_parts};
use crate::{Fetched, Need};

/// The model, if all that is needed of it is there.
///
/// # Errors
/// [`HubError::Offline`], which names the first thing that is missing; or a listing that is no model's.
pub(crate) fn find(repository: &Repository, reference: &HubReference, need: Need) -> Result<Fetched, HubError> {
    let lacks = |missing: &str| HubError::Offline {
        what: reference.to_string(),
        path: repository.root().to_path_buf(),
        missing: missing.to_owned(),
    };
    let commit = repository.commit(&reference.revision);
    let commit = commit.ok_or_else(|| lacks(&format!("the commit of {:?}", reference.revision)))?;
    let folder = repository.snapshot(&commit);
    let (files, sizes) = match repository.listing(&commit) {
        Some(listing) => (known(repository, &listing, reference, need)?, Some(listing)),
        // Other tools have fetched it.
        None => (likely(repository, &commit, reference, need), None),
    };
    for file in files {
        let found = file_size(&folder.join(&file)).ok_or_else(|| lacks(&file))?;
        let size = sizes.as_ref().and_then(|listing| listing.files.get(&file)?.size);
        if size.is_some_and(|size| size != found) {
            return Err(lacks(&format!("a part of {file}")));
        }
    }
    Ok(fetched(repository, reference, commit))
}

/// Where a model of a commit is.
pub(crate) fn fetched(repository: &Repository, reference: &HubReference, commit: String) -> Fetched {
    let folder = repository.snapshot(&commit);
    Fetched {
        path: reference
            .file
            .as_ref()
            .map_or_else(|| folder.clone(), |file| folder.join(file)),
        commit,
    }
}

/// The text of the index of weights in a commit's folder, if `listing` has one.
pub(crate) fn index(repository: &Repository, listing: &Listing) -> Result<Option<Vec<u8>>, HubError> {
    if !listing.files.contains_key(INDEX) {
        return Ok(None);
    }
    let path = repository.snapshot(&listing.commit).join(INDEX);
    read(&path).map(Some).map_err(HubError::disk(&path))
}

/// What is needed of a commit whose list is here.
fn known(
    repository: &Repository,
    listing: &Listing,
    reference: &HubReference,
    need: Need,
) -> Result<Vec<String>, HubError> {
    let weights = need == Need::Whole;
    let mut files = listing.text(reference, weights)?;
    if weights && reference.file.is_none() {
        // One that cannot be read is one of the files, and found missing with them.
        if let Ok(index) = index(repository, listing) {
            files.extend(listing.weights(reference, index.as_deref())?);
        }
    }
    Ok(files)
}

/// What a model must have, where nobody says what belongs to it.
fn likely(repository: &Repository, commit: &str, reference: &HubReference, need: Need) -> Vec<String> {
    if let Some(file) = &reference.file {
        return gguf_parts(file);
    }
    let mut files = vec!["config.json".to_owned(), "tokenizer.json".to_owned()];
    if need == Need::Whole {
        let index = read(&repository.snapshot(commit).join(INDEX)).ok();
        let value = index.and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok());
        let map = value.as_ref().and_then(|index| index["weight_map"].as_object());
        match map {
            Some(map) => files.extend(map.values().filter_map(|file| Some(file.as_str()?.to_owned()))),
            None => files.push("model.safetensors".to_owned()),
        }
    }
    files
}

/// Bytes of a list of files that are not in the cache, neither whole nor in part.
pub(crate) fn missing_bytes(repository: &Repository, files: &[Wanted]) -> u64 {
    let missing = files.iter().filter(|file| !repository.has(&file.checksum, file.size));
    missing
        .map(|file| {
            let there = file_size(&repository.unfinished(&file.checksum)).unwrap_or_default();
            file.size.saturating_sub(there)
        })
        .fold(0, u64::saturating_add)
}
