//! A model all of whose layers have a window, through real processes: pools that hold no whole sequence, handoffs of what the
//! next token sees and no more, and the answers of an engine that keeps everything.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, TryStreamExt, stream};
use integration_tests::ask::{Door, MODEL_NAME};
use integration_tests::cluster::ClusterSpec;
use integration_tests::exact::judge::Judge;
use integration_tests::exact::prompts::prompts;
use integration_tests::exact::query::{Draw, Query};
use integration_tests::exact::reference::{Continuation, Reference};
use integration_tests::exact::watched::Watched;
use integration_tests::files::root;
use integration_tests::vitals::idle_within;
use protocol::window::GroupKept;

const TOKENS: u32 = 60;
const BLOCK: usize = 16;
/// The model's.
const WINDOW: usize = 32;
/// 3 layers, key and value of 2 heads of 24 dimensions in 2 bytes.
const BLOCK_BYTES: usize = 3 * 2 * 2 * 24 * 2 * BLOCK;

fn mistral() -> PathBuf {
    root().join("model/tests/fixtures/mistral-swa")
}

/// A request and what the engine alone makes of it, keeping all blocks.
struct Case {
    query: Query,
    reference: Continuation,
}

fn cases(reference: &mut Reference) -> Result<Vec<Case>> {
    let tokenizer = reference.text.tokenizer.clone();
    let mut cases = Vec::new();
    for (i, text) in prompts(&tokenizer, &[3, 40, 150, 222, 300, 400])?
        .into_iter()
        .enumerate()
    {
        let draw = if i % 2 == 0 {
            Draw::greedy()
        } else {
            Draw {
                sample: true,
                temperature: Some(0.9),
                repetition_penalty: Some(1.1),
                seed: 7 + i as u64,
                ..Draw::default()
            }
        };
        let query = Query {
            draw,
            top: 2,
            ignore_eos: true,
            ..Query::greedy(text, TOKENS)
        };
        let reference = reference.answer(&query, TOKENS)?;
        cases.push(Case { query, reference });
    }
    Ok(cases)
}

/// Pools of ten blocks: the longest sequence of the test would need 29. Prompts come in chunks of four blocks.
fn spec(settings: &[&str]) -> ClusterSpec {
    let spec = ClusterSpec::pair(mistral())
        .set(format!("model.model_name={MODEL_NAME}"))
        .set("engine.kv_pool_tokens=160")
        .set("engine.prefill_chunk_tokens=64")
        .set("transfer.frame_bytes=4096");
    settings.iter().fold(spec, |spec, setting| spec.set(*setting))
}

/// Bytes that the handoffs of the cases send, if the decode node has nothing.
fn sent_bytes(cases: &[Case]) -> usize {
    let kept = GroupKept::new(Some(WINDOW), BLOCK);
    let blocks = cases.iter().map(|case| {
        let tokens = case.reference.prompt.len();
        tokens.div_ceil(BLOCK) - kept.first_block(tokens)
    });
    blocks.sum::<usize>() * BLOCK_BYTES
}

/// Asks all cases one after the other, and then all at once.
async fn serve(cases: &[Case], reference: &Reference, settings: &[&str]) -> Result<Watched> {
    let watched = Watched::start(spec(settings)).await?;
    let judge = Judge::new(watched.cluster.url(), reference.text.clone());
    for (i, case) in cases.iter().enumerate() {
        let door = [Door::Completions, Door::CompletionsStream][i % 2];
        let right = judge.ask(&case.query, TOKENS, &case.reference, door).await;
        right.with_context(|| watched.cluster.logs())?;
    }
    let at_once = cases.iter().map(|case| async {
        let door = Door::CompletionsStream;
        judge.ask(&case.query, TOKENS, &case.reference, door).await?;
        anyhow::Ok(())
    });
    let all: Result<Vec<()>> = stream::iter(at_once).buffer_unordered(cases.len()).try_collect().await;
    all.with_context(|| watched.cluster.logs())?;
    idle_within(&watched.cluster, 2, Duration::from_secs(5)).await?;
    Ok(watched)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_that_no_pool_could_hold_are_answered_and_only_windows_are_sent() -> Result<()> {
    let mut reference = Reference::open(&mistral(), config::KvDtypeConfig::F16)?;
    let cases = cases(&mut reference)?;
    let longest = cases.iter().map(|case| case.reference.prompt.len() + TOKENS as usize);
    ensure!(longest.max() > Some(400), "sequences are longer than the pool");
    let apart = ["coordinator.local_prefill=never"];
    let cold = serve(&cases, &reference, &[apart[0], "engine.prefix_cache=false"]).await?;
    let sent = cold.prefill_count("baton_kv_sent_bytes_total", &[]).await? as usize;
    ensure!(
        sent == 2 * sent_bytes(&cases),
        "sent {sent} bytes, {} twice are the windows",
        sent_bytes(&cases)
    );
    drop(cold);
    // With caches, and room for them, there is less to send; what is found has been let go of before.
    let warm = serve(&cases, &reference, &[apart[0], "engine.kv_pool_tokens=1600"]).await?;
    let hits = warm.prefill_count("baton_prefix_cache_hits_total", &[]).await?;
    let sent_warm = warm.prefill_count("baton_kv_sent_bytes_total", &[]).await? as usize;
    ensure!(
        hits > 0 && sent_warm <= sent,
        "{hits} tokens were cached, {sent_warm} bytes sent"
    );
    drop(warm);
    // And where a decode node computes the prompts itself.
    serve(&cases, &reference, &["coordinator.local_prefill=always"]).await?;
    Ok(())
}
