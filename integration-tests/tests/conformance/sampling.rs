//! Seeds: what repeats, and what does not.

use std::collections::BTreeSet;
use std::thread;

use anyhow::{Result, ensure};
use integration_tests::scene::Scene;
use serde_json::json;

use crate::text;

fn sampled(scene: &Scene, seed: u64) -> Result<String> {
    text(&scene.complete(json!({ "prompt": "I believe the meaning of life is", "max_tokens": 32, "temperature": 1, "seed": seed, "ignore_eos": true }))?.ok()?)
}

#[test]
fn case_35_seeds_repeat_with_one_place_and_with_two() -> Result<()> {
    let mut found = BTreeSet::new();
    for places in ["engine.max_num_seqs=1", "engine.max_num_seqs=2"] {
        let scene = Scene::tiny(&[places, "coordinator.allow_seed_zero=true"])?;
        for _ in 0..4 {
            found.insert(sampled(&scene, 42)?);
        }
        let together: Vec<Result<String>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| sampled(&scene, 42))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| anyhow::bail!("a client panicked")))
                .collect()
        });
        for text in together {
            found.insert(text?);
        }
        ensure!(found.len() == 1, "one seed, several answers: {found:?}");
        let different: BTreeSet<String> = (0..4).map(|seed| sampled(&scene, seed)).collect::<Result<_>>()?;
        ensure!(different.len() == 4, "several seeds, one answer: {different:?}");
        scene.close()?;
    }
    Ok(())
}

#[test]
fn case_39_equal_requests_in_parallel() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let ask = || {
        let parameters = json!({ "max_new_tokens": 20, "details": true, "seed": 3 });
        scene
            .post(
                "/generate",
                &json!({ "inputs": "What is Deep Learning?", "parameters": parameters }),
            )?
            .ok()
    };
    let alone = ask()?;
    let together: Vec<Result<serde_json::Value>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| anyhow::bail!("a client panicked")))
            .collect()
    });
    for answer in together {
        ensure!(answer? == alone, "{alone}");
    }
    scene.close()
}
