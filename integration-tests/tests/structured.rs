//! Structured output, by real processes: random JSON schemas lead to documents that fit them, on whichever node samples.

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt, TryStreamExt, stream};
use integration_tests::ask::MODEL_NAME;
use integration_tests::client::post_ok;
use integration_tests::cluster::{Cluster, ClusterSpec};
use integration_tests::files::tiny_model;
use integration_tests::random::Random;
use model_files::ModelFiles;
use reqwest::Client;
use serde_json::{Map, Value, json};

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
fn closers() -> Result<Value> {
    let text = ModelFiles::open(tiny_model())?.text()?;
    let mut bias = Map::new();
    for (entry, amount) in [("\"", 6.0), (",", 4.0), ("}", 6.0), ("]", 6.0), (":", 4.0)] {
        let id = text
            .tokenizer
            .token_id(entry)
            .with_context(|| format!("no token {entry}"))?;
        bias.insert(id.to_string(), json!(amount));
    }
    Ok(Value::Object(bias))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_schemas_lead_to_valid_documents() -> Result<()> {
    let cluster = Cluster::start(ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"))).await?;
    let (url, client) = (format!("{}/v1/completions", cluster.url()), Client::new());
    let bias = closers()?;
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
