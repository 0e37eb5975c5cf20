//! Every sampling parameter by itself: a prefill and a decode node answer as one engine does, to the last bit, whole and
//! streamed; an engine that takes an answer over at any position goes on as if it had made it all.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use config::KvDtypeConfig;
use futures_util::{StreamExt, TryStreamExt, stream};
use integration_tests::ask::{Door, MODEL_NAME};
use integration_tests::cluster::{Cluster, ClusterSpec, metric_sum};
use integration_tests::exact::judge::Judge;
use integration_tests::exact::prompts::{mixed_lengths, prompts};
use integration_tests::exact::query::{Draw, Query};
use integration_tests::exact::reference::{Continuation, Reference};
use integration_tests::files::{default_model, tiny_model};
use model_files::TextModel;
use protocol::sampling::Grammar;
use tokio::sync::Mutex;

const PROMPTS: usize = 50;
const TOKENS: u32 = 24;

/// A request that samples, and what one parameter makes of it.
type Change = fn(&mut Query, &TextModel, usize);

/// The parameters of the API that change which tokens come, or where they end. For each: what it is set to, and whether the
/// base it is compared with may end by itself.
const PARAMETERS: &[(&str, Change)] = &[
    ("temperature", |q, _, _| q.draw.temperature = Some(0.5)),
    ("top_k", |q, _, _| q.draw.top_k = Some(5)),
    ("top_p", |q, _, _| q.draw.top_p = Some(0.5)),
    ("typical_p", |q, _, _| q.draw.typical_p = Some(0.4)),
    ("min_p", |q, _, _| q.draw.min_p = Some(0.2)),
    ("repetition_penalty", |q, _, _| q.draw.repetition_penalty = Some(1.8)),
    ("presence_penalty", |q, _, _| q.draw.presence_penalty = Some(1.9)),
    ("frequency_penalty", |q, _, _| q.draw.frequency_penalty = Some(1.7)),
    ("seed", |q, _, i| q.draw.seed = u64::MAX - i as u64),
    ("do_sample", |q, _, _| q.draw = Draw::greedy()),
    ("watermark", |q, _, _| q.draw.watermark = true),
    ("logit_bias", |q, text, i| {
        let favoured = 30 + i as u32;
        let much = favour(text);
        q.draw.logit_bias = vec![(7, -100.0), (favoured, much), (200 + favoured, much / 1.5)];
    }),
    ("min_tokens", |q, text, _| {
        q.min_tokens = TOKENS - 4;
        q.stop_token_ids = early_ends(text);
        q.stop = vec!["e".into(), " ".into()];
    }),
    ("bad_words", |q, _, _| {
        q.bad_words = ["a", "e", "i", "o", "n", "t", "s", "r"].map(str::to_owned).to_vec();
    }),
    ("allowed_token_ids", |q, _, i| {
        q.draw.allowed_token_ids = (3..250).filter(|id| id % 3 == i as u32 % 3).collect();
    }),
    ("stop", |q, _, _| {
        q.stop = vec!["e".into(), " t".into(), "\u{fffd}".into()]
    }),
    ("stop_token_ids", |q, text, _| q.stop_token_ids = early_ends(text)),
    ("include_stop_str_in_output", |q, _, _| {
        q.keep_stop = true;
        q.stop = vec!["a".into(), "o".into()];
    }),
    ("ignore_eos", |q, text, _| {
        q.draw.logit_bias = text.eos_token_ids.iter().map(|&id| (id, favour(text))).collect();
        q.ignore_eos = true;
    }),
    ("skip_special_tokens", |q, text, _| {
        q.draw.logit_bias = vec![(0, favour(text)), (2, favour(text))];
        q.skip_special = false;
    }),
    ("max_tokens", |q, _, i| q.max_tokens = Some(1 + i as u32 % 7)),
    ("truncate_prompt_tokens", |q, _, _| q.truncate = Some(3)),
    ("json_schema", |q, _, _| {
        q.draw.grammar = Some(Grammar::JsonSchema(SCHEMA.into()))
    }),
    ("regex", |q, _, _| {
        q.draw.grammar = Some(Grammar::Regex("[a-m]{2,9}( [0-9]{1,3})*".into()))
    }),
    ("choice", |q, _, _| {
        q.draw.grammar = Some(Grammar::Choice(
            ["first", "second", "fifth one"].map(str::to_owned).to_vec(),
        ));
    }),
    ("grammar", |q, _, _| {
        q.draw.grammar = Some(Grammar::Lark("start: word (\", \" word)*\nword: /[a-z]{1,6}/\n".into()));
        q.min_tokens = 6;
    }),
];

const SCHEMA: &str = r#"{"type":"object","properties":{"n":{"type":"integer"},"s":{"type":"string","maxLength":5}},
    "required":["n","s"],"additionalProperties":false}"#;

/// A bias that makes a token come now and then: a large model that has been trained has fewer doubts.
fn favour(text: &TextModel) -> f32 {
    if text.vocab_size > 1_000 { 12.0 } else { 4.0 }
}

/// Tokens of single letters, so that some answers end early.
fn early_ends(text: &TextModel) -> Vec<u32> {
    let letter = |c: char| text.tokenizer.token_id(&c.to_string());
    let mut ids: Vec<u32> = "aeiounrt".chars().filter_map(letter).collect();
    ids.sort_unstable();
    ids
}

/// A request without the parameter: sampled, so that everything counts.
fn base(prompt: &str, i: usize) -> Query {
    let draw = Draw {
        sample: true,
        temperature: Some(1.4),
        seed: (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        ..Draw::default()
    };
    Query {
        draw,
        ..Query::greedy(prompt, TOKENS)
    }
}

struct Case {
    parameter: &'static str,
    query: Query,
    most: u32,
    tokens: Continuation,
}

/// So many cases for each parameter, answered by the engine some at a time. Of 50 a parameter must change many, or the test
/// would show nothing.
fn cases(reference: &mut Reference, count: usize) -> Result<Vec<Case>> {
    let text = reference.text.clone();
    let prompts = prompts(&text.tokenizer, &mixed_lengths(count, 40))?;
    let queries = || prompts.iter().enumerate().map(|(i, prompt)| base(prompt, i));
    let plain: Vec<(Query, u32)> = queries().map(|query| (query, TOKENS)).collect();
    let plain = answers(reference, &plain)?;
    let mut cases = Vec::new();
    for (parameter, change) in PARAMETERS {
        let mut changed = Vec::new();
        for (i, mut query) in queries().enumerate() {
            change(&mut query, &text, i);
            let most = query.max_tokens.context("every case has a limit")?;
            changed.push((query, most));
        }
        let mut differ = 0;
        let answered = answers(reference, &changed)?;
        for (((query, most), tokens), plain) in changed.into_iter().zip(answered).zip(&plain) {
            let visible = !query.stop.is_empty() || query.keep_stop || !query.skip_special;
            differ += usize::from(tokens.ids() != plain.ids() || visible);
            cases.push(Case {
                parameter,
                query,
                most,
                tokens,
            });
        }
        ensure!(
            differ * 3 >= count || count < PROMPTS,
            "{parameter} changes {differ} of {count} answers"
        );
    }
    Ok(cases)
}

fn answers(reference: &mut Reference, queries: &[(Query, u32)]) -> Result<Vec<Continuation>> {
    let queries: Vec<(&Query, u32)> = queries.iter().map(|(query, most)| (query, *most)).collect();
    reference.answers(&queries)
}

/// Clusters run one after the other: nodes that starve each other lose their links.
static ONE_CLUSTER: Mutex<()> = Mutex::const_new(());

/// Asks a cluster of this model for `count` answers with each parameter, whole and streamed, at every door or (`doors`) at
/// those of one family, in turns.
async fn each_parameter(model: &Path, count: usize, doors: Doors) -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let mut reference = Reference::open(model, KvDtypeConfig::F16)?;
    let cases = cases(&mut reference, count)?;
    let cluster = Cluster::start(ClusterSpec::pair(model).set(format!("model.model_name={MODEL_NAME}"))).await?;
    let judge = Judge::new(cluster.url(), reference.text.clone());
    let checks = cases.iter().enumerate().map(|(i, case)| {
        let judge = &judge;
        async move {
            let (query, tokens) = (&case.query, &case.tokens);
            let tgi = Door::ALL
                .into_iter()
                .any(|door| door.is_tgi() && query.belongs_to(door));
            let openai = Door::ALL
                .into_iter()
                .any(|door| !door.is_tgi() && query.belongs_to(door));
            let rights = match doors {
                Doors::All => judge.ask_everywhere(query, case.most, tokens).await,
                Doors::OneFamily => {
                    let family = tgi && (!openai || i % 2 == 0);
                    let right = judge.ask_family(query, case.most, tokens, family).await;
                    right.map(|right| vec![right])
                }
            };
            let rights = rights.with_context(|| case.parameter)?;
            anyhow::Ok(rights.iter().map(|right| right.numbers).sum::<usize>())
        }
    });
    let numbers: Vec<usize> = stream::iter(checks)
        .buffer_unordered(16)
        .try_collect()
        .await
        .with_context(|| cluster.logs())?;
    let page = cluster.metrics().await?;
    for name in ["baton_request_restarts_total", "baton_token_disagreements_total"] {
        ensure!(metric_sum(&page, name) == 0.0, "{name}: {page}");
    }
    eprintln!(
        "{} parameters, {} requests whole and streamed, {} numbers equal",
        PARAMETERS.len(),
        cases.len(),
        numbers.iter().sum::<usize>()
    );
    Ok(())
}

/// Where a request is sent, if it can be.
#[derive(Clone, Copy)]
enum Doors {
    All,
    OneFamily,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_parameter_answers_as_one_engine() -> Result<()> {
    each_parameter(&tiny_model(), PROMPTS, Doors::All).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_parameter_answers_as_one_engine_with_the_default_model() -> Result<()> {
    each_parameter(&default_model()?, 5, Doors::OneFamily).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes some minutes; the one before it does a tenth of this"]
async fn each_parameter_answers_as_one_engine_with_the_default_model_and_all_prompts() -> Result<()> {
    each_parameter(&default_model()?, PROMPTS, Doors::All).await
}

#[test]
fn an_answer_can_be_taken_over_at_any_position() -> Result<()> {
    let mut reference = Reference::open(&tiny_model(), KvDtypeConfig::F16)?;
    let mut resumed = 0;
    for case in cases(&mut reference, PROMPTS)?.iter().step_by(10) {
        for at in 1..case.tokens.tokens.len() {
            let before: Vec<u32> = case.tokens.ids()[..at].to_vec();
            let rest = reference.resumed(&case.query, case.most, &before)?;
            ensure!(
                rest.tokens == case.tokens.tokens[at..] && rest.finish == case.tokens.finish,
                "{} from token {at}: {:?} instead of {:?}",
                case.parameter,
                rest.tokens,
                &case.tokens.tokens[at..]
            );
            resumed += 1;
        }
    }
    eprintln!("{resumed} answers were taken over");
    ensure!(resumed > 1_000, "only {resumed}");
    Ok(())
}
