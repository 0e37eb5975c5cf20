//! One answer: tokens and log-probabilities of a prefill and a decode node equal those of one engine in one process, to
//! the last bit, through HTTP, however prompts are cut and requests are mixed.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use config::KvDtypeConfig;
use futures_util::{StreamExt, TryStreamExt, stream};
use integration_tests::ask::{Door, MODEL_NAME};
use integration_tests::client::post_ok;
use integration_tests::cluster::{Cluster, ClusterSpec, metric};
use integration_tests::exact::judge::Judge;
use integration_tests::exact::prompts::{mixed_lengths, prompts};
use integration_tests::exact::query::{Draw, Query};
use integration_tests::exact::reference::{Continuation, Reference};
use integration_tests::exact::watched::Watched;
use integration_tests::files::{default_model, tiny_model};
use model_files::TextModel;
use reqwest::Client;
use tokio::sync::Mutex;

/// Clusters run one after the other: nodes that starve each other lose their links.
static ONE_CLUSTER: Mutex<()> = Mutex::const_new(());

/// A request and what it must be answered.
struct Case {
    query: Query,
    reference: Continuation,
}

/// What was compared.
#[derive(Debug, Default)]
struct Sum {
    answers: usize,
    tokens: usize,
    numbers: usize,
    /// Answers of more than one token: each is one handoff.
    handoffs: usize,
}

impl Sum {
    fn add(mut self, other: &Self) -> Self {
        self.answers += other.answers;
        self.tokens += other.tokens;
        self.numbers += other.numbers;
        self.handoffs += other.handoffs;
        self
    }
}

/// Every way of drawing tokens, one after the other.
fn draw(i: usize) -> Draw {
    // Seeds use all 64 bits.
    let seed = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let sampled = Draw {
        sample: true,
        temperature: Some(1.0),
        seed,
        ..Draw::default()
    };
    match i % 12 {
        0 | 6 => Draw { seed, ..Draw::greedy() },
        1 => sampled,
        2 => Draw {
            temperature: Some(0.7),
            top_p: Some(0.9),
            ..sampled
        },
        3 => Draw {
            temperature: Some(1.3),
            top_k: Some(40),
            ..sampled
        },
        4 => Draw {
            temperature: Some(0.8),
            repetition_penalty: Some(1.2),
            ..sampled
        },
        5 => Draw {
            temperature: Some(0.9),
            top_k: Some(50),
            top_p: Some(0.95),
            repetition_penalty: Some(1.1),
            ..sampled
        },
        7 => Draw {
            typical_p: Some(0.6),
            ..sampled
        },
        8 => Draw {
            presence_penalty: Some(0.6),
            frequency_penalty: Some(0.4),
            ..sampled
        },
        9 => Draw {
            temperature: Some(1.1),
            min_p: Some(0.05),
            frequency_penalty: Some(-0.3),
            ..sampled
        },
        10 => Draw {
            repetition_penalty: Some(1.3),
            seed,
            ..Draw::greedy()
        },
        _ => Draw {
            temperature: Some(0.3),
            top_p: Some(0.5),
            ..sampled
        },
    }
}

/// A case for each length of a prompt; at most `tokens` to generate for each.
fn cases(reference: &mut Reference, lengths: &[usize], tokens: u32) -> Result<Vec<Case>> {
    let tokenizer = reference.text.tokenizer.clone();
    let count = lengths.len();
    let texts = prompts(&tokenizer, lengths)?;
    let mut cases = Vec::with_capacity(count);
    for (i, text) in texts.into_iter().enumerate() {
        let mut query = Query {
            draw: draw(i),
            ..Query::greedy(text, tokens)
        };
        // What a door tells beside the tokens does not change them.
        match i % 12 {
            2 | 6 => query.prompt_logprobs = true,
            1 | 8 | 9 | 11 => query.top = (i % 5 + 1) as u8,
            _ => {}
        }
        let reference = reference.answer(&query, tokens)?;
        cases.push(Case { query, reference });
    }
    let answers: BTreeSet<Vec<u32>> = cases.iter().map(|case| case.reference.ids()).collect();
    // One-token prompts of one passage may lead to the same words, but a test of equal answers would show nothing.
    ensure!(
        answers.len() * 10 >= count * 9,
        "only {} different answers to {count} prompts",
        answers.len()
    );
    let lengths: Vec<usize> = cases.iter().map(|case| case.reference.prompt.len()).collect();
    let (shortest, longest) = (
        lengths.iter().min().context("no case")?,
        lengths.iter().max().context("no case")?,
    );
    eprintln!(
        "{count} prompts of {shortest} to {longest} tokens, {} together; {} different answers, {} tokens",
        lengths.iter().sum::<usize>(),
        answers.len(),
        cases.iter().map(|case| case.reference.tokens.len()).sum::<usize>()
    );
    Ok(cases)
}

/// The door of case `i` in round `round`: every case meets every door of its own, round by round.
fn door(query: &Query, i: usize, round: usize, doors: &[Door]) -> Result<Door> {
    let mine: Vec<Door> = doors.iter().copied().filter(|door| query.belongs_to(*door)).collect();
    ensure!(!mine.is_empty(), "no door for {query:?}");
    Ok(mine[(i + i / 12 + round) % mine.len()])
}

async fn check(judge: &Judge, case: &Case, door: Door) -> Result<Sum> {
    let most = case.query.max_tokens.context("every case has a limit")?;
    let right = judge.ask(&case.query, most, &case.reference, door).await?;
    let tokens = right.answer.tokens.len();
    Ok(Sum {
        answers: 1,
        tokens,
        numbers: right.numbers,
        handoffs: usize::from(tokens > 1),
    })
}

/// Sends all cases, `concurrency` at a time, each through one of its doors.
async fn round(judge: &Judge, cases: &[Case], concurrency: usize, doors: &[Door], turn: usize) -> Result<Sum> {
    let checks = cases
        .iter()
        .enumerate()
        .map(|(i, case)| async move { check(judge, case, door(&case.query, i, turn, doors)?).await });
    let sums: Vec<Sum> = stream::iter(checks).buffer_unordered(concurrency).try_collect().await?;
    Ok(sums.iter().fold(Sum::default(), Sum::add))
}

/// Rounds of one cluster: concurrency 1 and 16, the doors turned by one in between. The KV caches must really have moved,
/// without a second attempt.
async fn rounds(spec: ClusterSpec, cases: &[Case], model: &TextModel, doors: &[Door]) -> Result<()> {
    let settings = spec.settings.join(" ");
    let watched = Watched::start(spec.set(format!("model.model_name={MODEL_NAME}"))).await?;
    let judge = Judge::new(watched.cluster.url(), model.clone());
    let mut total = Sum::default();
    for (turn, concurrency) in [1, 16].into_iter().enumerate() {
        let sum = round(&judge, cases, concurrency, doors, turn).await;
        let sum = sum.with_context(|| format!("{settings}, {concurrency} at a time\n{}", watched.cluster.logs()))?;
        eprintln!("{settings}, {concurrency:>2} at a time: {sum:?} equal");
        total = total.add(&sum);
    }
    let handoffs = watched
        .decode_count("baton_kv_handoffs_total", &["result=\"committed\""])
        .await?;
    ensure!(
        handoffs as usize == total.handoffs,
        "{handoffs} handoffs, {} expected",
        total.handoffs
    );
    let page = watched.cluster.metrics().await?;
    for name in [
        "baton_request_restarts_total",
        "baton_request_migrations_total",
        "baton_token_disagreements_total",
    ] {
        ensure!(metric(&page, name, &[]).unwrap_or(0.0) == 0.0, "{name}: {page}");
    }
    let bytes = watched.decode_count("baton_kv_received_bytes_total", &[]).await?;
    eprintln!("{settings}: {handoffs} handoffs, {bytes} KV bytes");
    Ok(())
}

fn chunked(model: &Path, chunk: usize, whole: usize) -> ClusterSpec {
    let batch = chunk.max(512).max(if chunk == whole { whole } else { 0 });
    ClusterSpec::pair(model)
        .set(format!("engine.prefill_chunk_tokens={chunk}"))
        .set(format!("engine.max_batch_tokens={batch}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_model_answers_as_one_engine() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let model = default_model()?;
    let mut reference = Reference::open(&model, KvDtypeConfig::F16)?;
    let mut lengths = mixed_lengths(97, 200);
    lengths.extend([300, 450, 600]);
    let cases = cases(&mut reference, &lengths, 16)?;
    let text = reference.text.clone();
    drop(reference);
    for chunk in [16, 64, 1_024] {
        rounds(
            chunked(&model, chunk, 1_024),
            &cases,
            &text,
            &[Door::Generate, Door::Completions],
        )
        .await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_model_answers_as_one_engine_whatever_the_cache_looks_like() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let model = tiny_model();
    let mut numbers = Vec::new();
    for (dtype, name) in [
        (KvDtypeConfig::F16, "f16"),
        (KvDtypeConfig::Bf16, "bf16"),
        (KvDtypeConfig::Int8, "int8"),
        (KvDtypeConfig::F32, "f32"),
    ] {
        let mut reference = Reference::open(&model, dtype)?;
        let cases = cases(&mut reference, &mixed_lengths(100, 240), 48)?;
        let second = cases.iter().filter_map(|case| case.reference.tokens.get(1));
        numbers.push(second.map(|token| token.logprob).collect::<Vec<_>>());
        for (block, chunk) in [(16, 16), (16, 64), (32, 16), (32, 512), (16, 512), (32, 64)] {
            let spec = chunked(&model, chunk, 512)
                .set(format!("engine.kv_block_tokens={block}"))
                .set(format!("model.kv_dtype={name}"));
            // The number of threads changes nothing either.
            let spec = spec.set(format!("engine.threads={}", if chunk == 64 { 2 } else { 1 }));
            rounds(spec, &cases, &reference.text, &Door::ALL).await?;
        }
    }
    // The first number that comes from a cache: were it the same whatever the cache holds, the test would show nothing.
    let equal = numbers[0].iter().zip(&numbers[1]).filter(|(a, b)| a == b).count();
    ensure!(
        equal * 10 < numbers[0].len(),
        "{equal} numbers do not depend on the cache's precision"
    );
    Ok(())
}

/// Two nodes of each role whose pools hold two or three sequences each: requests wait, are refused by nodes, lose their
/// blocks, meet others at every step.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_nodes_with_tight_pools_answer_as_one_engine() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let model = tiny_model();
    let mut reference = Reference::open(&model, KvDtypeConfig::F16)?;
    let cases = cases(&mut reference, &mixed_lengths(100, 240), 48)?;
    let spec = ClusterSpec {
        prefill: 2,
        decode: 2,
        ..chunked(&model, 64, 512)
    }
    .set("engine.kv_pool_tokens=512")
    .set("limits.max_seq_len=512")
    .set(format!("model.model_name={MODEL_NAME}"));
    let cluster = Cluster::start(spec).await?;
    let judge = Judge::new(cluster.url(), reference.text.clone());
    for turn in 0..Door::ALL.len() {
        let sum = round(&judge, &cases, 32, &Door::ALL, turn)
            .await
            .with_context(|| cluster.logs())?;
        eprintln!("2 + 2 nodes with 512 tokens of KV each, 32 at a time: {sum:?} equal");
    }
    let page = cluster.metrics().await?;
    ensure!(
        metric(&page, "baton_token_disagreements_total", &[]).unwrap_or(0.0) == 0.0,
        "{page}"
    );
    Ok(())
}

/// The decode node admits sequences by how far they grow in the near future; these grow further, and the pool runs dry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_that_lose_their_blocks_answer_as_one_engine() -> Result<()> {
    const TOKENS: u32 = 400;
    let _alone = ONE_CLUSTER.lock().await;
    let model = tiny_model();
    let mut reference = Reference::open(&model, KvDtypeConfig::F16)?;
    let mut cases = Vec::new();
    for (i, text) in prompts(&reference.text.tokenizer, &[90; 12])?.into_iter().enumerate() {
        // Those of the draws that completions have.
        let draw = draw(i * 2 % 10);
        let query = Query {
            draw,
            ignore_eos: true,
            ..Query::greedy(text, TOKENS)
        };
        let reference = reference.answer(&query, TOKENS)?;
        cases.push(Case { query, reference });
    }
    let spec = ClusterSpec::pair(&model)
        .set("engine.kv_pool_tokens=768")
        .set("limits.max_seq_len=512")
        .set(format!("model.model_name={MODEL_NAME}"));
    let watched = Watched::start(spec).await?;
    let judge = Judge::new(watched.cluster.url(), reference.text.clone());
    let sum = round(
        &judge,
        &cases,
        cases.len(),
        &[Door::Completions, Door::CompletionsStream],
        0,
    )
    .await;
    let sum = sum.with_context(|| watched.cluster.logs())?;
    let preempted = watched.decode_count("baton_num_preemptions_total", &[]).await?;
    eprintln!(
        "{} requests of {TOKENS} tokens, {preempted} preemptions: {sum:?} equal",
        cases.len()
    );
    ensure!(preempted > 0, "no sequence lost its blocks");
    Ok(())
}

/// A longer answer of the default model, alone and among others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_streams_of_the_default_model_get_their_solo_answers() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let model = default_model()?;
    let mut reference = Reference::open(&model, KvDtypeConfig::F16)?;
    let cases = cases(&mut reference, &mixed_lengths(16, 120), 64)?;
    let spec = ClusterSpec::pair(&model)
        .set("engine.threads=2")
        .set(format!("model.model_name={MODEL_NAME}"));
    let cluster = Cluster::start(spec).await?;
    let judge = Judge::new(cluster.url(), reference.text.clone());
    for turn in 0..2 {
        let sum = round(
            &judge,
            &cases,
            16,
            &[Door::GenerateStream, Door::CompletionsStream],
            turn,
        )
        .await;
        eprintln!("16 streams at once: {:?} equal", sum.with_context(|| cluster.logs())?);
    }
    Ok(())
}

/// A request without a seed is told the one that was drawn for it: asked again with it, the answer is the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drawn_seed_leads_to_the_same_answer_again() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let model = tiny_model();
    let mut reference = Reference::open(&model, KvDtypeConfig::F16)?;
    let cluster = Cluster::start(ClusterSpec::pair(&model).set(format!("model.model_name={MODEL_NAME}"))).await?;
    let judge = Judge::new(cluster.url(), reference.text.clone());
    let mut seeds = BTreeSet::new();
    for prompt in prompts(&reference.text.tokenizer, &mixed_lengths(20, 40))? {
        let sampled = Draw {
            sample: true,
            temperature: Some(1.5),
            seed: 1,
            ..Draw::default()
        };
        let mut query = Query {
            draw: sampled,
            ..Query::greedy(prompt, 24)
        };
        let mut body = query.body(Door::Generate);
        body["parameters"].as_object_mut().context("parameters")?.remove("seed");
        let unseeded = post_ok(&Client::new(), &format!("{}/generate", cluster.url()), &body).await?;
        query.draw.seed = unseeded["details"]["seed"].as_u64().context("no seed")?;
        seeds.insert(query.draw.seed);
        let tokens = reference.answer(&query, 24)?;
        for right in judge.ask_everywhere(&query, 24, &tokens).await? {
            ensure!(
                right.answer.text == unseeded["generated_text"],
                "{unseeded}, then {right:?}"
            );
        }
    }
    ensure!(seeds.len() == 20, "only {} different seeds", seeds.len());
    Ok(())
}
