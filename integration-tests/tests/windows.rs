//! Models whose layers have a window, all of them or all but some, through real processes: pools that would not hold a whole
//! sequence in all layers, handoffs of what the next token sees and no more, and the answers of an engine that keeps everything.

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
use protocol::window::{Groups, Kept};

const TOKENS: u32 = 60;
const BLOCK: usize = 16;

/// A model with windows.
struct Model {
    name: &'static str,
    groups: Groups,
    /// Bytes of a block.
    block_bytes: usize,
}

/// 3 layers in one group, key and value of 2 heads of 24 dimensions in 2 bytes.
const MISTRAL: Model = Model {
    name: "mistral-swa",
    groups: Groups::sliding(32),
    block_bytes: 3 * 2 * 2 * 24 * 2 * BLOCK,
};

/// One layer of 7 sees everything, so a block is of one layer; key and value of 2 heads of 32 dimensions in 2 bytes.
const GEMMA: Model = Model {
    name: "gemma3",
    groups: Groups::mixed(1, 6, 16),
    block_bytes: 2 * 2 * 32 * 2 * BLOCK,
};

impl Model {
    fn path(&self) -> PathBuf {
        root().join("model/tests/fixtures").join(self.name)
    }
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

/// Pools of ten blocks for each group of layers: the longest sequence of the test would need 29. Prompts come in chunks of four blocks.
fn spec(model: &Model, settings: &[&str]) -> ClusterSpec {
    let spec = ClusterSpec::pair(model.path())
        .set(format!("model.model_name={MODEL_NAME}"))
        .set("engine.kv_pool_tokens=160")
        .set("engine.prefill_chunk_tokens=64")
        .set("transfer.frame_bytes=4096");
    settings.iter().fold(spec, |spec, setting| spec.set(*setting))
}

/// Bytes that the handoffs of the cases send, if the decode node has nothing.
fn sent_bytes(model: &Model, cases: &[Case]) -> usize {
    let kept = Kept::new(model.groups, BLOCK);
    let blocks = cases.iter().map(|case| {
        let tokens = case.reference.prompt.len();
        kept.missing_blocks(tokens, 0, tokens)
    });
    blocks.sum::<usize>() * model.block_bytes
}

/// Asks all cases one after the other, and then all at once.
async fn serve(model: &Model, cases: &[Case], reference: &Reference, settings: &[&str]) -> Result<Watched> {
    let watched = Watched::start(spec(model, settings)).await?;
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
    check(&MISTRAL).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_with_a_window_keep_and_send_that_beside_layers_that_keep_everything() -> Result<()> {
    check(&GEMMA).await
}

/// So many handoffs were committed, as the receiver says, and none came to nothing. (A sender may be told to stop before it hears of the
/// commit: the answer is there.)
async fn committed(watched: &Watched, handoffs: usize) -> Result<()> {
    let received = "baton_kv_handoffs_total";
    for (result, expected) in [
        ("committed", handoffs),
        ("refused", 0),
        ("cancelled", 0),
        ("revoked", 0),
    ] {
        let label = format!("result=\"{result}\"");
        let found = watched.decode_count(received, &[&label]).await? as usize;
        ensure!(
            found == expected,
            "{found} handoffs were {result}, not {expected}\n{}",
            watched.cluster.logs()
        );
    }
    Ok(())
}

async fn check(model: &Model) -> Result<()> {
    let mut reference = Reference::open(&model.path(), config::KvDtypeConfig::F16)?;
    let cases = cases(&mut reference)?;
    let longest = cases.iter().map(|case| case.reference.prompt.len() + TOKENS as usize);
    ensure!(longest.max() > Some(400), "sequences are longer than the pool");
    let apart = ["coordinator.local_prefill=never"];
    let cold = serve(model, &cases, &reference, &[apart[0], "engine.prefix_cache=false"]).await?;
    let sent = cold.prefill_count("baton_kv_sent_bytes_total", &[]).await? as usize;
    let windows = sent_bytes(model, &cases);
    ensure!(
        sent == 2 * windows,
        "sent {sent} bytes, {windows} twice are the windows"
    );
    committed(&cold, 2 * cases.len()).await?;
    drop(cold);
    // With caches, and room for them, there is less to send; what is found has been let go of before.
    let roomy = [apart[0], "engine.kv_pool_tokens=1600"];
    let warm = serve(model, &cases, &reference, &roomy).await?;
    let hits = warm.prefill_count("baton_prefix_cache_hits_total", &[]).await?;
    let sent_warm = warm.prefill_count("baton_kv_sent_bytes_total", &[]).await? as usize;
    ensure!(
        hits > 0 && sent_warm < sent,
        "{hits} tokens were cached, {sent_warm} bytes sent"
    );
    committed(&warm, 2 * cases.len()).await?;
    drop(warm);
    // And where a decode node computes the prompts itself.
    serve(model, &cases, &reference, &["coordinator.local_prefill=always"]).await?;
    Ok(())
}
