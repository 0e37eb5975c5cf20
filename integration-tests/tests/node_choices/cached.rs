//! What the decode node has of a prompt is not sent to it, and nothing else about the answer depends on that.

use std::collections::HashSet;
use std::sync::PoisonError;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use protocol::control::{Beam, DecodeJob, JobEvent, PrefillJob};
use protocol::prefix::block_hashes;
use protocol::sampling::StopRules;
use tokio::time::timeout;

use crate::scene::{LAYOUT, Names, PATIENCE, Scene};
use crate::{decode_job, prefill_job, prompt, stop};

const BLOCK: usize = LAYOUT.block_tokens as usize;

/// A prompt, how many choices it is asked for, and how many of its blocks the decode node has by then.
struct Case {
    prompt: Vec<u32>,
    choices: u32,
    have: usize,
}

fn jobs(case: &Case, rules: &StopRules) -> (PrefillJob, DecodeJob) {
    let prefill = PrefillJob {
        token_ids: case.prompt.clone(),
        ..prefill_job(case.choices, rules)
    };
    let decode = DecodeJob {
        token_ids: case.prompt.clone(),
        ..decode_job(case.choices, rules)
    };
    (prefill, decode)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_blocks_that_the_decode_node_lacks_are_moved() -> Result<()> {
    let (warm, cold) = (Scene::open().await?, Scene::with_cache(false).await?);
    let rules = stop(20);
    let case = |prompt: &[u32], choices, have| Case {
        prompt: prompt.to_vec(),
        choices,
        have,
    };
    let whole = prompt(3);
    let parted = [&whole[..70], &prompt(4)[..60]].concat();
    // Of 150 tokens nine blocks are full. 144 end with a block: nothing is left to move.
    let cases = [
        case(&whole, 1, 0),
        case(&whole, 1, 9),
        case(&whole, 5, 9),
        case(&parted, 2, 4),
        case(&parted, 1, 8),
        case(&whole[..9 * BLOCK], 1, 9),
        case(&whole[..9 * BLOCK], 4, 9),
        case(&whole[..BLOCK], 1, 1),
        case(&whole[..BLOCK - 1], 1, 0),
    ];
    for (number, case) in cases.iter().enumerate() {
        let (prefill, decode) = jobs(case, &rules);
        let (have, first, stats, mut decoding) = warm.push(prefill.clone(), decode.clone()).await?;
        let rest = decoding.tokens().await?;
        let moved = case.prompt.len().div_ceil(BLOCK) - case.have;
        ensure!(have as usize == case.have, "case {number}: {have} blocks are there");
        ensure!(
            stats.bytes == (moved * LAYOUT.block_bytes()) as u64,
            "case {number}: {} bytes, {moved} blocks are missing",
            stats.bytes
        );
        let (have, expected, _, mut decoding) = cold.push(prefill, decode).await?;
        ensure!(have == 0, "without a cache nothing is there");
        ensure!(first.tokens == expected.tokens, "case {number}: first tokens");
        ensure!(rest == decoding.tokens().await?, "case {number}: tokens");
    }
    warm.close().await?;
    cold.close().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_is_moved_from_where_the_last_answer_ended() -> Result<()> {
    let (warm, cold) = (Scene::open().await?, Scene::with_cache(false).await?);
    let rules = stop(30);
    let mut prompt = prompt(5)[..50].to_vec();
    for turn in 0..4 {
        let case = Case {
            prompt: prompt.clone(),
            choices: 1,
            have: 0,
        };
        let (prefill, decode) = jobs(&case, &rules);
        let (have, first, stats, mut decoding) = warm.push(prefill.clone(), decode.clone()).await?;
        let rest = decoding.tokens().await?.remove(&0).context("a choice")?;
        // All of the last turn had KV but its last token, and 10 tokens are new.
        let known = if turn == 0 { 0 } else { (prompt.len() - 11) / BLOCK };
        ensure!(have as usize == known, "turn {turn}: {have} of {} tokens", prompt.len());
        let missing = prompt.len().div_ceil(BLOCK) - known;
        ensure!(
            stats.bytes == (missing * LAYOUT.block_bytes()) as u64,
            "turn {turn}: {}",
            stats.bytes
        );
        let (_, expected, _, mut decoding) = cold.push(prefill, decode).await?;
        let expected_rest = decoding.tokens().await?.remove(&0).context("a choice")?;
        ensure!(first.tokens == expected.tokens && rest == expected_rest, "turn {turn}");
        prompt.extend(first.tokens.iter().chain(&rest).map(|token| token.token));
        prompt.extend((0..10).map(|i| 100 + turn * 10 + i));
    }
    warm.close().await?;
    cold.close().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_beam_search_of_a_cached_prompt_is_the_same() -> Result<()> {
    let (warm, cold) = (Scene::open().await?, Scene::with_cache(false).await?);
    let rules = stop(10);
    let (mut answers, lengths) = (Vec::new(), [150, 150, 9 * BLOCK]);
    // The last position is computed again, in a block that nobody else has.
    for (scene, expected) in [(&warm, [0, 9, 8]), (&cold, [0; 3])] {
        for (length, expected) in lengths.into_iter().zip(expected) {
            let case = Case {
                prompt: prompt(6)[..length].to_vec(),
                choices: 0,
                have: expected,
            };
            let (prefill, decode) = jobs(&case, &rules);
            let search = DecodeJob {
                beam_width: Some(3),
                ..decode
            };
            let (have, _, stats, mut decoding) = scene.push(prefill, search).await?;
            let missing = length.div_ceil(BLOCK) - expected;
            ensure!(have as usize == expected && stats.bytes == (missing * LAYOUT.block_bytes()) as u64);
            let JobEvent::Beams(beams) = decoding.next().await? else {
                bail!("no beams");
            };
            answers.push(beams.iter().map(bare).collect::<Vec<_>>());
        }
    }
    ensure!(answers[..3] == answers[3..], "{answers:?}");
    ensure!(answers[0] == answers[1]);
    warm.close().await?;
    cold.close().await
}

fn bare(beam: &Beam) -> (Vec<u32>, u32) {
    let tokens = beam.tokens.iter().map(|(token, _)| token.token);
    (tokens.collect(), beam.score.to_bits())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_tell_which_blocks_they_have() -> Result<()> {
    let scene = Scene::open().await?;
    let case = Case {
        prompt: prompt(8),
        choices: 1,
        have: 0,
    };
    let (prefill, decode) = jobs(&case, &stop(40));
    let (_, first, _, mut decoding) = scene.push(prefill, decode).await?;
    let rest = decoding.tokens().await?.remove(&0).context("a choice")?;
    told(&scene.caches[0], block_hashes(&case.prompt, BLOCK, 0))
        .await
        .context("prefill")?;
    let mut all = case.prompt.clone();
    all.extend(first.tokens.iter().chain(&rest).map(|token| token.token));
    // The last token has no KV.
    all.pop();
    told(&scene.caches[1], block_hashes(&all, BLOCK, 0))
        .await
        .context("decode")?;
    scene.close().await
}

/// Waits until a node has told exactly these names.
async fn told(names: &Names, expected: Vec<u64>) -> Result<()> {
    let expected: HashSet<u64> = expected.into_iter().collect();
    let heard = || names.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let waits = async {
        while heard() != expected {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = timeout(PATIENCE, waits).await;
    waited.with_context(|| format!("{} names were told, {} expected", heard().len(), expected.len()))
}
