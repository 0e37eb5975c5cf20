//! Models from a hub, against a stand-in that speaks its protocol.

mod faults;
mod layout;
#[allow(dead_code, unreachable_pub, reason = "the tests with processes use it, too")]
#[path = "../standin/mod.rs"]
mod standin;

use std::path::{Path, PathBuf};

use anyhow::Result;
use config::{HubReference, ModelConfig, Secret};
use model_hub::{Fetched, HubError, Need};
use tempfile::TempDir;

use crate::standin::{Hub, SIGNATURE, checksum};

const REPOSITORY: &str = "tiny/model";
const TOKEN: &str = "hf_a_token_of_a_test";

/// A hub, and a cache of its own.
struct Scene {
    hub: Hub,
    cache: TempDir,
    model: ModelConfig,
}

impl Scene {
    async fn new() -> Result<Self> {
        let (hub, cache) = (Hub::start().await?, TempDir::new()?);
        let model = ModelConfig {
            hub_endpoint: hub.url.clone(),
            hub_cache_dir: cache.path().display().to_string(),
            hub_tries: 3,
            ..ModelConfig::default()
        };
        Ok(Self { hub, cache, model })
    }

    fn with_token(mut self, token: &str) -> Self {
        self.model.hub_token = Secret::new(token);
        self
    }

    async fn fetch(&self, reference: &str) -> Result<Fetched, HubError> {
        self.fetch_as(reference, Need::Whole).await
    }

    async fn fetch_as(&self, reference: &str, need: Need) -> Result<Fetched, HubError> {
        let reference = HubReference::parse(reference).map_err(HubError::Reference)?;
        model_hub::fetch(&reference, &self.model, need).await
    }

    async fn error(&self, reference: &str) -> String {
        let error = self.fetch(reference).await.expect_err("must fail");
        let (shown, debug) = (error.to_string(), format!("{error:?}"));
        assert!(!shown.contains('\n'), "{shown}");
        for text in [&shown, &debug] {
            let secret = text.contains(TOKEN) || text.contains(SIGNATURE);
            assert!(!secret, "{text}");
        }
        shown
    }

    fn root(&self) -> PathBuf {
        root(self.cache.path())
    }

    /// Where an unfinished file of these bytes is.
    fn unfinished(&self, bytes: &[u8]) -> PathBuf {
        unfinished(self.cache.path(), bytes)
    }
}

/// The repository's folder in a cache.
fn root(cache: &Path) -> PathBuf {
    cache.join("models--tiny--model")
}

fn unfinished(cache: &Path, bytes: &[u8]) -> PathBuf {
    root(cache)
        .join("blobs")
        .join(format!("{}.incomplete", checksum(bytes)))
}

/// Bytes that are nowhere alike.
fn weights(size: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..size).map(next).collect()
}

/// Publishes a small model directory with these weights.
fn publish(hub: &Hub, weights: &[u8]) -> String {
    let files: [(&str, &[u8]); 3] = [
        ("config.json", b"{}"),
        ("tokenizer.json", b"{\"model\": {}}"),
        ("model.safetensors", weights),
    ];
    hub.publish(REPOSITORY, 'a', &files)
}
