//! A whole model: list, plan, files.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use config::{HubReference, ModelConfig};
use tokio::task::JoinSet;

use crate::cache::Repository;
use crate::client::Client;
use crate::download::{self, Source, Wanted};
use crate::error::HubError;
use crate::listing::Listing;
use crate::progress::{self, Progress};
use crate::{Fetched, Need, local};

/// Files that are fetched at the same time.
const AT_ONCE: usize = 4;

/// See [`crate::fetch()`].
pub(crate) async fn fetch(reference: &HubReference, model: &ModelConfig, need: Need) -> Result<Fetched, HubError> {
    if model.hub_cache_dir.is_empty() {
        return Err(HubError::Setting {
            field: "hub_cache_dir",
            reason: "is empty, and there is no HOME: name a folder for what is fetched".to_owned(),
        });
    }
    let repository = Repository::new(Path::new(&model.hub_cache_dir), &reference.repository);
    if model.offline {
        return local::find(&repository, reference, need);
    }
    // A commit never changes. Of one that others have fetched nobody here knows whether it is whole.
    let stored = reference.commit().and_then(|commit| repository.listing(commit));
    if stored.is_some()
        && let Ok(found) = local::find(&repository, reference, need)
    {
        return Ok(found);
    }
    let client = Client::new(model)?;
    let listing = match stored {
        Some(listing) => listing,
        None => match client.listing(reference).await {
            Ok(listing) => listing,
            Err(error) => return instead(error, &repository, reference, need),
        },
    };
    if reference.commit().is_none() {
        tracing::info!(model = %reference, commit = listing.commit, "the revision is this commit; with @COMMIT it stays so");
    }
    let source = Arc::new(Source {
        client,
        reference: reference.clone(),
        commit: listing.commit.clone(),
        repository,
    });
    let progress = Arc::new(Progress::default());
    tokio::select! {
        fetched = files(&source, &listing, need, &progress) => fetched?,
        never = progress::show(&progress, reference.to_string()) => match never {},
    }
    source.repository.write_ref(&reference.revision, &listing.commit)?;
    Ok(local::fetched(&source.repository, reference, listing.commit))
}

/// What is done where the hub cannot be asked: a model that was served yesterday is served today.
fn instead(
    error: HubError,
    repository: &Repository,
    reference: &HubReference,
    need: Need,
) -> Result<Fetched, HubError> {
    if !error.is_outage() {
        return Err(error);
    }
    let Ok(found) = local::find(repository, reference, need) else {
        return Err(error);
    };
    tracing::warn!(%error, commit = found.commit, "the hub cannot be asked: what it said last is used");
    Ok(found)
}

async fn files(source: &Arc<Source>, listing: &Listing, need: Need, progress: &Arc<Progress>) -> Result<(), HubError> {
    let (repository, reference) = (&source.repository, &source.reference);
    let weights = need == Need::Whole;
    let text = listing.text(reference, weights)?;
    repository.create()?;
    repository.write_listing(listing)?;
    all(source, listing, text, progress).await?;
    if weights && reference.file.is_none() {
        let index = local::index(repository, listing)?;
        let weights = listing.weights(reference, index.as_deref())?;
        all(source, listing, weights, progress).await?;
    }
    Ok(())
}

/// Fetches files.
async fn all(
    source: &Arc<Source>,
    listing: &Listing,
    names: Vec<String>,
    progress: &Arc<Progress>,
) -> Result<(), HubError> {
    let mut wanted = Vec::with_capacity(names.len());
    for path in names {
        let known = listing.entry(&source.reference, &path)?.whole();
        let (size, checksum) = match known {
            Some(known) => known,
            None => source.client.describe(&source.reference, &source.commit, &path).await?,
        };
        wanted.push(Wanted { path, size, checksum });
    }
    check_room(&source.repository, &wanted)?;
    progress.expect(wanted.iter().map(|file| file.size).fold(0, u64::saturating_add));
    // Of files with equal bytes one is fetched; the others find it here.
    let mut sums = HashSet::new();
    let (first, equal): (Vec<_>, Vec<_>) = wanted.into_iter().partition(|file| sums.insert(file.checksum.clone()));
    some(source, first, progress).await?;
    some(source, equal, progress).await
}

/// Fetches files of different bytes, a few at a time.
async fn some(source: &Arc<Source>, wanted: Vec<Wanted>, progress: &Arc<Progress>) -> Result<(), HubError> {
    let mut waiting = wanted.into_iter();
    // Dropped, it ends its tasks.
    let mut running = JoinSet::new();
    loop {
        while running.len() < AT_ONCE
            && let Some(next) = waiting.next()
        {
            running.spawn(download::fetch(Arc::clone(source), next, Arc::clone(progress)));
        }
        match running.join_next().await {
            Some(ended) => ended.map_err(|error| HubError::Runtime(std::io::Error::other(error)))??,
            None => return Ok(()),
        }
    }
}

/// Refuses what cannot fit before anything is fetched.
fn check_room(repository: &Repository, wanted: &[Wanted]) -> Result<(), HubError> {
    let root = repository.root();
    let needed = local::missing_bytes(repository, wanted);
    let disk = rustix::fs::statvfs(root).map_err(|error| HubError::disk(root)(error.into()))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if needed > free {
        return Err(HubError::NoRoom {
            path: root.to_path_buf(),
            needed,
            free,
        });
    }
    Ok(())
}
