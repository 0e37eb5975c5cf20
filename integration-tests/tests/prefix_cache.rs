//! The prefix cache, through real processes: what it reports is true, and nothing else about an answer depends on it.

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, TryStreamExt, stream};
use integration_tests::ask::{Door, MODEL_NAME};
use integration_tests::cluster::ClusterSpec;
use integration_tests::exact::answer::Answer;
use integration_tests::exact::judge::Judge;
use integration_tests::exact::prompts::prompts;
use integration_tests::exact::query::{Draw, Query};
use integration_tests::exact::reference::{Continuation, Reference};
use integration_tests::exact::watched::Watched;
use integration_tests::files::tiny_model;
use integration_tests::vitals::idle_within;
use std::time::Duration;
use tokio::sync::Mutex;

const TOKENS: u32 = 24;
const BLOCK: usize = 16;

/// Clusters run one after the other: nodes that starve each other lose their links.
static ONE_CLUSTER: Mutex<()> = Mutex::const_new(());

/// A request and what the engine alone makes of it, without a cache.
struct Case {
    query: Query,
    reference: Continuation,
}

/// Two prompts of several hundred tokens; each is asked twice, and goes on in several ways, each of which is asked, too.
fn cases(reference: &mut Reference) -> Result<Vec<Case>> {
    let tokenizer = reference.text.tokenizer.clone();
    let beginnings = prompts(&tokenizer, &[200, 333])?;
    let ends = prompts(&tokenizer, &[3, 20, 70])?;
    let mut cases = Vec::new();
    for (i, beginning) in beginnings.iter().enumerate() {
        let mut texts = vec![beginning.clone(), beginning.clone()];
        texts.extend(ends.iter().map(|end| format!("{beginning} {end}")));
        texts.push(format!("{beginning} {} {}", ends[2], ends[1]));
        for (j, text) in texts.into_iter().enumerate() {
            let draw = if (i + j) % 2 == 0 {
                Draw::greedy()
            } else {
                Draw {
                    sample: true,
                    temperature: Some(0.9),
                    repetition_penalty: Some(1.1),
                    seed: 7 + j as u64,
                    ..Draw::default()
                }
            };
            let query = Query {
                draw,
                top: 3,
                ignore_eos: true,
                ..Query::greedy(text, TOKENS)
            };
            let reference = reference.answer(&query, TOKENS)?;
            cases.push(Case { query, reference });
        }
    }
    Ok(cases)
}

/// Tokens in full blocks with which `prompt` and one of `before` begin. The last token is always computed.
fn cached(before: &[Vec<u32>], prompt: &[u32]) -> usize {
    let common = |other: &Vec<u32>| {
        let equal = other.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        equal.min(prompt.len() - 1) / BLOCK * BLOCK
    };
    before.iter().map(common).max().unwrap_or(0)
}

/// Asks all cases one after the other, whole and streamed, and then all at once; the first answers. Tokens and numbers are
/// compared with the engine's; what was cached, with what must have been. `decode_cache`: whether the decode node has one.
async fn serve(cases: &[Case], reference: &Reference, settings: &[&str], decode_cache: bool) -> Result<Vec<Answer>> {
    let mut spec = ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"));
    for setting in settings {
        spec = spec.set(*setting);
    }
    spec = spec.set_for("decode", format!("engine.prefix_cache={decode_cache}"));
    let watched = Watched::start(spec).await?;
    let judge = Judge::new(watched.cluster.url(), reference.text.clone());
    let on = !settings.contains(&"engine.prefix_cache=false");
    let (mut answers, mut before) = (Vec::new(), Vec::new());
    let (mut hits, mut queries) = (0, 0);
    for case in cases {
        let prompt = &case.reference.prompt;
        for door in [Door::Completions, Door::CompletionsStream] {
            let right = judge.ask(&case.query, TOKENS, &case.reference, door).await;
            let answer = right.with_context(|| watched.cluster.logs())?.answer;
            let expected = if on { cached(&before, prompt) } else { 0 };
            ensure!(
                answer.cached_tokens == Some(expected),
                "{} of {} tokens are cached, reported are {:?}: {settings:?}",
                expected,
                prompt.len(),
                answer.cached_tokens
            );
            hits += expected;
            queries += if on { prompt.len() } else { 0 };
            before.push(prompt.clone());
            answers.push(answer.plain());
        }
    }
    ensure!(!on || hits > queries / 2, "{hits} of {queries} tokens were cached");
    let at_once = cases.iter().map(|case| async {
        let right = judge
            .ask(&case.query, TOKENS, &case.reference, Door::Completions)
            .await?;
        Ok::<_, anyhow::Error>((right.answer.cached_tokens.unwrap_or(0), case.reference.prompt.len()))
    });
    let at_once: Vec<(usize, usize)> = stream::iter(at_once)
        .buffer_unordered(cases.len())
        .try_collect()
        .await?;
    hits += at_once.iter().map(|(hit, _)| hit).sum::<usize>();
    queries += if on {
        at_once.iter().map(|(_, tokens)| tokens).sum()
    } else {
        0
    };
    let counted = [
        watched.prefill_count("baton_prefix_cache_hits_total", &[]).await? as usize,
        watched.prefill_count("baton_prefix_cache_queries_total", &[]).await? as usize,
    ];
    ensure!(
        counted == [hits, queries],
        "counted {counted:?}, answered [{hits}, {queries}]"
    );
    let not_sent = watched.decode_count("baton_prefix_cache_hits_total", &[]).await? as usize;
    // The decode node has computed the answers, too, so it may have more of a prompt than the prefill node.
    ensure!(
        if decode_cache { not_sent >= hits } else { not_sent == 0 },
        "{not_sent} tokens were not sent, {hits} not computed"
    );
    idle_within(&watched.cluster, 2, Duration::from_secs(5)).await?;
    eprintln!("{settings:?}: {hits} of {queries} tokens were cached");
    Ok(answers)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cached_prefix_changes_nothing_but_the_work() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let mut reference = Reference::open(&tiny_model(), config::KvDtypeConfig::F16)?;
    let cases = cases(&mut reference)?;
    let cold = serve(&cases, &reference, &["engine.prefix_cache=false"], false).await?;
    let settings: [(&[&str], bool); 3] = [
        (&[], true),
        (&["engine.prefill_chunk_tokens=16"], true),
        // Pieces of a few blocks, of which few have room at once: the network is always behind.
        (
            &[
                "engine.prefill_chunk_tokens=32",
                "transfer.frame_bytes=4096",
                "transfer.staging_bytes=16384",
            ],
            false,
        ),
    ];
    for (settings, decode_cache) in settings {
        let warm = serve(&cases, &reference, settings, decode_cache).await?;
        for (cold, warm) in cold.iter().zip(&warm) {
            ensure!(cold == warm, "without a cache {cold:?}, with one {warm:?}");
        }
    }
    Ok(())
}

/// The log-probabilities of a prompt need all of it to be computed, whatever is cached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_whose_log_probabilities_are_told_are_computed() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let mut reference = Reference::open(&tiny_model(), config::KvDtypeConfig::F16)?;
    let watched = Watched::start(ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"))).await?;
    let judge = Judge::new(watched.cluster.url(), reference.text.clone());
    let prompt = prompts(&reference.text.tokenizer, &[150])?.pop().context("a prompt")?;
    let query = Query {
        prompt_logprobs: true,
        ..Query::greedy(prompt, TOKENS)
    };
    let tokens = reference.answer(&query, TOKENS)?;
    for _ in 0..3 {
        judge.ask(&query, TOKENS, &tokens, Door::Generate).await?;
    }
    ensure!(watched.prefill_count("baton_prefix_cache_queries_total", &[]).await? == 0);
    // The same prompt without them finds what the others left.
    let right = judge.ask(&query, TOKENS, &tokens, Door::Completions).await?;
    ensure!(right.answer.cached_tokens == Some((tokens.prompt.len() - 1) / BLOCK * BLOCK));
    Ok(())
}
