//! Where answers end: limits, end tokens, stop tokens and stop strings, at every door, whole and streamed. Counts, text
//! and reasons equal a plain search of what one engine generates; the numbers equal its numbers.

#[path = "boundaries/end_tokens.rs"]
mod end_tokens;
#[path = "boundaries/limits.rs"]
mod limits;
#[path = "boundaries/mix.rs"]
mod mix;
#[path = "boundaries/stops.rs"]
mod stops;

use anyhow::Result;
use config::KvDtypeConfig;
use integration_tests::ask::MODEL_NAME;
use integration_tests::cluster::{Cluster, ClusterSpec};
use integration_tests::exact::judge::Judge;
use integration_tests::exact::prompts::{mixed_lengths, prompts};
use integration_tests::exact::query::{Draw, Query};
use integration_tests::exact::reference::{Continuation, Reference};
use integration_tests::files::tiny_model;
use tokio::sync::Mutex;

/// Clusters run one after the other: nodes that starve each other lose their links.
static ONE_CLUSTER: Mutex<()> = Mutex::const_new(());

/// A pair of nodes with the tiny model.
fn tiny() -> ClusterSpec {
    ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"))
}

/// Starts a cluster and whoever judges its answers.
async fn start(spec: ClusterSpec, reference: &Reference) -> Result<(Cluster, Judge)> {
    let cluster = Cluster::start(spec).await?;
    let judge = Judge::new(cluster.url(), reference.text.clone());
    Ok((cluster, judge))
}

/// The engine with the tiny model.
fn reference() -> Result<Reference> {
    Reference::open(&tiny_model(), KvDtypeConfig::F16)
}

/// Queries with different prompts, every third of them sampled, and what the engine generates for them without an end.
fn queries(reference: &mut Reference, count: usize, tokens: u32) -> Result<Vec<(Query, Continuation)>> {
    let texts = prompts(&reference.text.tokenizer, &mixed_lengths(count, 60))?;
    let mut out = Vec::with_capacity(count);
    for (i, text) in texts.into_iter().enumerate() {
        let mut query = Query::greedy(text, tokens);
        if i % 3 == 2 {
            query.draw = Draw {
                sample: true,
                temperature: Some(0.9),
                seed: 77 + i as u64,
                ..Draw::default()
            };
        }
        let endless = reference.endless(&query, tokens)?;
        out.push((query, endless));
    }
    Ok(out)
}
