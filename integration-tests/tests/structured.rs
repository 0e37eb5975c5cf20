//! Structured output, by real processes: random JSON schemas lead to documents that fit them, on whichever node samples;
//! every choice of a request is held to its grammar and is what one engine makes of it.

use anyhow::{Context, Result, ensure};
use config::KvDtypeConfig;
use futures_util::{StreamExt, TryStreamExt, stream};
use integration_tests::ask::{Door, MODEL_NAME};
use integration_tests::client::post_ok;
use integration_tests::cluster::{Cluster, ClusterSpec};
use integration_tests::exact::query::{Draw, Query, bias_object};
use integration_tests::exact::reference::{Continuation, Reference};
use integration_tests::exact::several::check_choices;
use integration_tests::files::tiny_model;
use integration_tests::random::Random;
use model_files::ModelFiles;
use protocol::sampling::{Grammar, SampledToken};
use reqwest::Client;
use serde_json::{Map, Value, json};
use tokio::sync::Mutex;

const SCHEMAS: u64 = 500;
const NAMES: &[&str] = &["a", "id", "näme", "is ok", "tags", "x_1", "value", "\"q\""];

/// A random schema: scalars with limits, enumerations, arrays, objects with and without optional properties, unions.
fn schema(random: &mut Random, depth: usize) -> Value {
    let kinds = if depth == 0 { 7 } else { 11 };
    match random.below(kinds) {
        0 => json!({ "type": "boolean" }),
        1 => json!({ "type": "null" }),
        2 => {
            let low = random.between(0, 2_000) as i64 - 1_000;
            json!({ "type": "integer", "minimum": low, "maximum": low + random.between(0, 500) as i64 })
        }
        3 => {
            json!({ "type": "number", "minimum": -(random.below(50) as f64) - 0.5, "exclusiveMaximum": random.between(1, 90) })
        }
        4 => {
            let least = random.below(4);
            json!({ "type": "string", "minLength": least, "maxLength": least + random.below(9) })
        }
        5 => {
            json!({ "type": "string", "pattern": *random.pick(&["^[a-f]{2,6}$", "^(yes|no)$", "^[0-9]{3}-[0-9]{2}$"]) })
        }
        6 => {
            let all = [
                json!("red"),
                json!("a \"b\" c"),
                json!(7),
                json!(null),
                json!(true),
                json!("ü"),
            ];
            let from = random.below(5) as usize;
            json!({ "enum": all[from..] })
        }
        7 | 8 => object(random, depth),
        9 => {
            let least = random.below(3);
            json!({
                "type": "array", "items": schema(random, depth - 1), "minItems": least, "maxItems": least + random.below(3),
            })
        }
        _ => json!({ "anyOf": [schema(random, depth - 1), schema(random, depth - 1)] }),
    }
}

fn object(random: &mut Random, depth: usize) -> Value {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for _ in 0..random.between(0, 4) {
        let name = *random.pick(NAMES);
        if properties.contains_key(name) {
            continue;
        }
        properties.insert(name.to_owned(), schema(random, depth - 1));
        if random.below(3) > 0 {
            required.push(name);
        }
    }
    json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
}

/// Favours what ends strings, numbers, lists and objects: the tiny model babbles, and a document that is cut shows nothing.
fn closers() -> Result<Vec<(u32, f32)>> {
    let text = ModelFiles::open(tiny_model())?.text()?;
    let mut bias = Vec::new();
    for (entry, amount) in [("\"", 6.0), (",", 4.0), ("}", 6.0), ("]", 6.0), (":", 4.0)] {
        let id = text
            .tokenizer
            .token_id(entry)
            .with_context(|| format!("no token {entry}"))?;
        bias.push((id, amount));
    }
    bias.sort_unstable_by_key(|(id, _)| *id);
    Ok(bias)
}

/// Clusters run one after the other: nodes that starve each other lose their links.
static ONE_CLUSTER: Mutex<()> = Mutex::const_new(());

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_schemas_lead_to_valid_documents() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let cluster = Cluster::start(ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"))).await?;
    let (url, client) = (format!("{}/v1/completions", cluster.url()), Client::new());
    let bias = bias_object(&closers()?);
    let mut random = Random::new(2_026);
    let schemas: Vec<Value> = (0..SCHEMAS)
        .map(|i| match i % 2 {
            0 => object(&mut random, 3),
            _ => schema(&mut random, 3),
        })
        .collect();
    let asks = schemas.iter().enumerate().map(|(i, schema)| {
        let (url, client, bias) = (&url, &client, &bias);
        async move {
            let format = json!({ "type": "json_schema", "json_schema": { "name": "it", "schema": schema } });
            let body = json!({
                "model": MODEL_NAME, "prompt": "Write it down:", "max_tokens": 400, "temperature": 1.5, "seed": i + 1,
                "logit_bias": bias, "response_format": format,
            });
            let answer = post_ok(client, url, &body)
                .await
                .with_context(|| format!("schema {schema}"))?;
            let choice = &answer["choices"][0];
            if choice["finish_reason"] == "length" {
                return Ok(0);
            }
            let text = choice["text"].as_str().context("no text")?;
            let document: Value =
                serde_json::from_str(text).with_context(|| format!("{text:?} is no JSON; schema {schema}"))?;
            let validator = jsonschema::validator_for(schema).map_err(|error| anyhow::anyhow!("{schema}: {error}"))?;
            ensure!(validator.is_valid(&document), "{document} does not fit {schema}");
            anyhow::Ok(1)
        }
    });
    let whole: Vec<usize> = stream::iter(asks)
        .buffer_unordered(12)
        .try_collect()
        .await
        .with_context(|| cluster.logs())?;
    let whole: usize = whole.iter().sum();
    eprintln!("{whole} whole documents of {SCHEMAS} schemas, all valid; the others were cut by the limit");
    ensure!(
        whole * 10 >= SCHEMAS as usize * 9,
        "only {whole} of {SCHEMAS} documents are whole"
    );
    Ok(())
}

/// A sampled query that is held to `grammar`.
fn held(grammar: Grammar, seed: u64, tokens: u32) -> Result<Query> {
    let draw = Draw {
        sample: true,
        temperature: Some(1.5),
        seed,
        logit_bias: closers()?,
        grammar: Some(grammar),
        ..Draw::default()
    };
    Ok(Query {
        draw,
        ..Query::greedy("Write it down:", tokens)
    })
}

/// The engine's choices.
fn choices(reference: &mut Reference, query: &Query, n: u32) -> Result<Vec<Continuation>> {
    let most = query.max_tokens.context("every query has a limit")?;
    (0..n).map(|choice| reference.choice(query, choice, most)).collect()
}

fn tokens(of: &[Continuation]) -> Vec<&[SampledToken]> {
    of.iter().map(|one| one.tokens.as_slice()).collect()
}

/// The text is what the grammar allows.
fn fits(text: &str, grammar: &Grammar) -> Result<bool> {
    Ok(match grammar {
        Grammar::JsonSchema(schema) => {
            let schema: Value = serde_json::from_str(schema)?;
            let document: Value = serde_json::from_str(text).with_context(|| text.to_owned())?;
            let validator = jsonschema::validator_for(&schema).map_err(|error| anyhow::anyhow!("{schema}: {error}"))?;
            validator.is_valid(&document)
        }
        // Of this file.
        Grammar::Regex(_) => {
            let letters = text.trim_start_matches(|c: char| c.is_ascii_lowercase());
            let digits = letters.strip_prefix('-').unwrap_or_default();
            (2..=9).contains(&(text.len() - letters.len())) && digits.len() == 3 && digits.parse::<u16>().is_ok()
        }
        Grammar::Choice(all) => all.iter().any(|one| one == text),
        Grammar::Lark(_) => text
            .split(", ")
            .all(|word| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase())),
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_choice_fits_the_grammar_and_is_what_one_engine_makes_of_it() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let mut reference = Reference::open(&tiny_model(), KvDtypeConfig::F16)?;
    let cluster = Cluster::start(ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"))).await?;
    let (url, client) = (format!("{}/v1/completions", cluster.url()), Client::new());
    let mut random = Random::new(77);
    let mut grammars: Vec<Grammar> = (0..12)
        .map(|_| Grammar::JsonSchema(object(&mut random, 2).to_string()))
        .collect();
    grammars.push(Grammar::Regex("[a-z]{2,9}-[0-9]{3}".into()));
    grammars.push(Grammar::Choice(
        ["yes", "no", "perhaps not"].map(str::to_owned).to_vec(),
    ));
    grammars.push(Grammar::Lark("start: word (\", \" word)*\nword: /[a-z]{1,6}/\n".into()));
    let (mut numbers, mut whole, mut apart) = (0, 0, 0);
    for (i, grammar) in grammars.into_iter().enumerate() {
        let query = held(grammar.clone(), 90 + i as u64, 120)?;
        let drawn = choices(&mut reference, &query, 3)?;
        apart += usize::from(drawn[0].ids() != drawn[1].ids());
        let mut body = query.body(Door::Completions);
        body["n"] = json!(3);
        let answer = post_ok(&client, &url, &body).await?;
        numbers += check_choices(&answer, &tokens(&drawn)).with_context(|| format!("{grammar:?}: {answer}"))?;
        for choice in answer["choices"].as_array().into_iter().flatten() {
            if choice["finish_reason"] == "stop" {
                let text = choice["text"].as_str().context("a text")?;
                ensure!(fits(text, &grammar)?, "{text:?} does not fit {grammar:?}");
                whole += 1;
            }
        }
    }
    eprintln!("{numbers} numbers equal, {whole} whole answers");
    ensure!(
        whole >= 30 && apart >= 10,
        "{whole} whole answers, {apart} with different choices"
    );
    Ok(())
}
