//! One answer: tokens and log-probabilities of a prefill and a decode node equal those of one engine in one process, to
//! the last bit, through HTTP, however prompts are cut and requests are mixed.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use config::KvDtypeConfig;
use futures_util::{StreamExt, TryStreamExt, stream};
use integration_tests::ask::{Door, MODEL_NAME};
use integration_tests::cluster::{Cluster, ClusterSpec, metric};
use integration_tests::exact::answer::ask;
use integration_tests::exact::expected::{check_ending, check_numbers, ending};
use integration_tests::exact::prompts::prompts;
use integration_tests::exact::query::{Draw, Query};
use integration_tests::exact::reference::{Continuation, Reference};
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

/// `count` cases; `tokens` to generate for each.
fn cases(reference: &mut Reference, count: usize, longest: usize, tokens: u32) -> Result<Vec<Case>> {
    let tokenizer = reference.text.tokenizer.clone();
    let mut texts = prompts(&tokenizer, count, longest)?;
    texts.sort_by_key(|text| text.bytes().map(u32::from).sum::<u32>() % 101);
    let mut cases = Vec::with_capacity(count);
    for (i, text) in texts.into_iter().enumerate() {
        let mut query = Query {
            draw: draw(i),
            ..Query::greedy(text, tokens)
        };
        // Two of the draws belong to one family alone; of the others some ask for more than a token and its number.
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
    println!(
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
    Ok(mine[(i + round) % mine.len()])
}

async fn check(client: &Client, url: &str, case: &Case, door: Door, model: &TextModel) -> Result<Sum> {
    let most = case.query.max_tokens.context("every case has a limit")?;
    let answer = ask(client, url, &case.query, door).await?;
    let whole = ending(&case.query, most, &case.reference.ids(), model);
    let compared = check_ending(&answer, &whole, door)
        .and_then(|()| check_numbers(&answer, &case.reference, door, model))
        .with_context(|| format!("{door:?}: {:?}: {answer:?}", case.query))?;
    let tokens = answer.tokens.len();
    Ok(Sum {
        answers: 1,
        tokens,
        numbers: compared,
        handoffs: usize::from(tokens > 1),
    })
}

/// Sends all cases, `concurrency` at a time, each through one of its doors.
async fn round(
    cluster: &Cluster,
    cases: &[Case],
    model: &TextModel,
    concurrency: usize,
    doors: &[Door],
    round: usize,
) -> Result<Sum> {
    let client = Client::new();
    let url = cluster.url();
    let checks = cases.iter().enumerate().map(|(i, case)| {
        let (client, url) = (&client, &url);
        async move { check(client, url, case, door(&case.query, i, round, doors)?, model).await }
    });
    let sums: Vec<Sum> = stream::iter(checks).buffer_unordered(concurrency).try_collect().await?;
    Ok(sums.iter().fold(Sum::default(), Sum::add))
}

/// Rounds of one cluster: concurrency 1 and 16, the doors turned by one in between. The KV caches must really have moved,
/// without a second attempt.
async fn rounds(spec: ClusterSpec, cases: &[Case], model: &TextModel, doors: &[Door]) -> Result<()> {
    let settings = spec.settings.join(" ");
    let cluster = Cluster::start(spec.set(format!("model.model_name={MODEL_NAME}"))).await?;
    let mut total = Sum::default();
    for (turn, concurrency) in [1, 16].into_iter().enumerate() {
        let sum = round(&cluster, cases, model, concurrency, doors, turn).await;
        let sum = sum.with_context(|| format!("{settings}, {concurrency} at a time\n{}", cluster.logs()))?;
        println!("{settings}, {concurrency:>2} at a time: {sum:?} equal");
        total = total.add(&sum);
    }
    let page = cluster.metrics().await?;
    let count = |name| metric(&page, name, &[]).unwrap_or(0.0);
    ensure!(
        count("baton_handoff_exposed_seconds_count") as usize == total.handoffs,
        "handoffs: {page}"
    );
    for name in [
        "baton_request_restarts_total",
        "baton_request_migrations_total",
        "baton_token_disagreements_total",
    ] {
        ensure!(count(name) == 0.0, "{name}: {page}");
    }
    println!(
        "{} handoffs, {} KV bytes",
        total.handoffs,
        count("baton_handoff_bytes_total")
    );
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
    let mut cases_ = cases(&mut reference, 97, 200, 12)?;
    cases_.extend(cases(&mut reference, 3, 600, 12)?);
    let text = reference.text.clone();
    drop(reference);
    for chunk in [16, 64, 1_024] {
        rounds(
            chunked(&model, chunk, 1_024),
            &cases_,
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
    for (dtype, name) in [(KvDtypeConfig::F16, "f16"), (KvDtypeConfig::F32, "f32")] {
        let mut reference = Reference::open(&model, dtype)?;
        let cases = cases(&mut reference, 100, 240, 48)?;
        for (block, chunk) in [(16, 16), (16, 64), (32, 16), (32, 512), (16, 512), (32, 64)] {
            let spec = chunked(&model, chunk, 512)
                .set(format!("engine.kv_block_tokens={block}"))
                .set(format!("model.kv_dtype={name}"));
            rounds(spec, &cases, &reference.text, &Door::ALL).await?;
        }
    }
    Ok(())
}
