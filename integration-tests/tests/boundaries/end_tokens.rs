//! The model's end tokens, forced to come first, second and third; stop tokens; and requests that ignore ends.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use config::KvDtypeConfig;
use integration_tests::cluster::ClusterSpec;
use integration_tests::exact::query::Query;
use integration_tests::exact::reference::{Continuation, Reference};
use integration_tests::files::tiny_model;
use integration_tests::vitals::idle_within;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{MODEL_NAME, ONE_CLUSTER, queries, reference, start, tiny};

/// A copy of the tiny model with other end tokens, as its config.json says, or as a generation_config.json says against it.
fn model_that_ends_at(eos: &[u32], in_generation_config: bool) -> Result<TempDir> {
    let dir = TempDir::new()?;
    for file in std::fs::read_dir(tiny_model())? {
        let path = file?.path();
        std::fs::copy(
            &path,
            dir.path().join(path.file_name().context("a file without a name")?),
        )?;
    }
    if in_generation_config {
        std::fs::write(
            dir.path().join("generation_config.json"),
            json!({ "eos_token_id": eos }).to_string(),
        )?;
    } else {
        let path = dir.path().join("config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
        config["eos_token_id"] = json!(eos[0]);
        std::fs::write(path, config.to_string())?;
    }
    Ok(dir)
}

/// Asks under limits around the end, at every door; with `ignore_eos` where there is such a field.
async fn ask_around(model: &Path, place: usize, queries: &[(Query, Continuation)]) -> Result<()> {
    let reference = Reference::open(model, KvDtypeConfig::F16)?;
    let spec = ClusterSpec::pair(model).set(format!("model.model_name={MODEL_NAME}"));
    let (cluster, judge) = start(spec, &reference).await?;
    let (mut asked, mut ended) = (0, 0);
    for (query, endless) in queries {
        let end = endless
            .ids()
            .iter()
            .position(|id| reference.text.eos_token_ids.contains(id))
            .map(|at| at + 1);
        for most in [1, place as u32, place as u32 + 1, 12] {
            let mut query = Query {
                max_tokens: Some(most),
                ..query.clone()
            };
            let rights = judge.ask_everywhere(&query, most, endless).await?;
            let expected = end.map_or(most as usize, |end| end.min(most as usize));
            for right in &rights {
                ensure!(
                    right.answer.tokens.len() == expected,
                    "{} tokens",
                    right.answer.tokens.len()
                );
                ended += usize::from(end.is_some_and(|end| end <= most as usize));
                asked += 1;
            }
            query.ignore_eos = true;
            let right = judge.ask_family(&query, most, endless, false).await?;
            ensure!(
                right.answer.tokens.len() == most as usize && right.answer.finish == "length",
                "{right:?}"
            );
        }
    }
    ensure!(ended > 0, "no answer met an end token");
    idle_within(&cluster, 2, Duration::from_secs(5)).await?;
    let eos = &reference.text.eos_token_ids;
    eprintln!("end tokens {eos:?} at place {place}: {asked} pairs of answers, {ended} ended by one");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_token_ends_the_answer_at_the_first_places() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let queries = queries(&mut reference()?, 16, 12)?;
    for place in 1..=3 {
        // A prompt whose answer has its token there for the first time.
        let found = queries
            .iter()
            .map(|(_, endless)| endless.ids())
            .find(|ids| !ids[..place - 1].contains(&ids[place - 1]));
        let eos = found.context("every answer repeats itself")?[place - 1];
        let list = [eos, 1];
        let dir = match place {
            1 => model_that_ends_at(&list[..1], false)?,
            2 => model_that_ends_at(&list[..1], true)?,
            _ => model_that_ends_at(&list, true)?,
        };
        ask_around(dir.path(), place, &queries).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_token_ends_the_answer_wherever_it_comes() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let mut reference = reference()?;
    let queries = queries(&mut reference, 12, 8)?;
    let (_cluster, judge) = start(tiny(), &reference).await?;
    let mut asked = 0;
    for (i, (query, endless)) in queries.iter().enumerate() {
        let ids = endless.ids();
        for (place, &id) in ids.iter().enumerate() {
            let absent = (2..)
                .find(|id| !ids.contains(id))
                .context("a token that does not come")?;
            let query = Query {
                max_tokens: Some(if place % 2 == 0 { 8 } else { place as u32 + 1 }),
                stop_token_ids: vec![absent, id],
                ignore_eos: (i + place) % 2 == 0,
                keep_stop: (i + place) % 3 == 0,
                ..query.clone()
            };
            judge
                .ask_family(&query, query.max_tokens.unwrap_or(8), endless, false)
                .await?;
            asked += 1;
        }
    }
    eprintln!("{asked} pairs of answers ended by a stop token");
    Ok(())
}
