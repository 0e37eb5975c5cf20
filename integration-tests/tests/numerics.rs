//! The served models against outputs of Hugging Face transformers in float32, through a prefill and a decode node.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use integration_tests::ask::MODEL_NAME;
use integration_tests::client::post_ok;
use integration_tests::cluster::{Cluster, ClusterSpec};
use integration_tests::files::{default_model, root, tiny_model};
use model_files::{ModelFiles, TextTokenizer};
use reqwest::Client;
use serde_json::{Value, json};
use tokio::sync::Mutex;

/// Clusters run one after the other: nodes that starve each other lose their links.
static ONE_CLUSTER: Mutex<()> = Mutex::const_new(());

fn golden(path: &Path) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let golden: Value = serde_json::from_str(&text)?;
    Ok(golden["prompts"].as_array().context("no prompts")?.clone())
}

fn ids(value: &Value) -> Vec<u64> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_u64)
        .collect()
}

fn floats(value: &Value) -> Vec<f64> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_f64)
        .collect()
}

/// Distances from the reference.
#[derive(Debug, Default)]
struct Distances(Vec<f64>);

impl Distances {
    fn add(&mut self, own: &[f64], reference: &[f64]) {
        self.0.extend(own.iter().zip(reference).map(|(a, b)| (a - b).abs()));
    }

    fn worst(&self) -> f64 {
        self.0
            .iter()
            .copied()
            .fold(0.0, |a, d| if d > a || d.is_nan() { d } else { a })
    }

    fn mean(&self) -> f64 {
        self.0.iter().sum::<f64>() / self.0.len().max(1) as f64
    }
}

/// A cluster that is asked.
struct Judge {
    client: Client,
    url: String,
    tokenizer: TextTokenizer,
    /// Where the reference's two best tokens are closer than this, another one may come first.
    margin: f64,
}

/// How far a served model is from the reference.
#[derive(Debug, Default)]
struct Report {
    prompt: Distances,
    /// Best tokens behind the prompt.
    top: Distances,
    /// Greedy tokens as long as they agree.
    greedy: Distances,
    agreed: usize,
    greedy_tokens: usize,
}

impl Report {
    fn print(&self, what: &str) {
        eprintln!(
            "{what}: |difference| mean (worst) of {} prompt log-probabilities {:.6} ({:.6}), {} alternatives {:.6} \
             ({:.6}), {} greedy tokens {:.6} ({:.6}); {} of {} greedy tokens before the first difference",
            self.prompt.0.len(),
            self.prompt.mean(),
            self.prompt.worst(),
            self.top.0.len(),
            self.top.mean(),
            self.top.worst(),
            self.greedy.0.len(),
            self.greedy.mean(),
            self.greedy.worst(),
            self.agreed,
            self.greedy_tokens
        );
    }
}

/// The greedy answer to a prompt, which is a text or a list of token ids.
async fn complete(client: &Client, url: &str, prompt: &Value, tokens: usize) -> Result<Value> {
    let body = json!({
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "logprobs": 5,
        "return_token_ids": true, "skip_special_tokens": false,
    });
    let mut answer = post_ok(client, &format!("{url}/v1/completions"), &body).await?;
    Ok(answer["choices"][0].take())
}

/// Greedy tokens must agree up to the first place where the reference's best two are closer than `margin`.
fn compare_greedy(choice: &Value, prompt: &Value, margin: f64, report: &mut Report) -> Result<()> {
    let (own, reference) = (ids(&choice["token_ids"]), ids(&prompt["greedy"]));
    ensure!(
        own.len() == reference.len(),
        "{} tokens, not {}",
        own.len(),
        reference.len()
    );
    let same = own.iter().zip(&reference).take_while(|(a, b)| a == b).count();
    let margins = floats(&prompt["margins"]);
    let sure = margins.iter().take_while(|&&m| m >= margin).count();
    ensure!(
        same >= sure.min(own.len()),
        "left the reference at token {same}: {own:?}, not {reference:?}"
    );
    let logprobs = &choice["logprobs"];
    report.greedy.add(
        &floats(&logprobs["token_logprobs"])[..same],
        &floats(&prompt["greedy_logprobs"])[..same],
    );
    (report.agreed, report.greedy_tokens) = (report.agreed + same, report.greedy_tokens + own.len());
    Ok(())
}

/// The best tokens behind the prompt. The API names them by text, and of two with the same text the more probable one.
fn compare_top(choice: &Value, prompt: &Value, tokenizer: &TextTokenizer, report: &mut Report) -> Result<()> {
    let mut reference: BTreeMap<String, f64> = BTreeMap::new();
    for pair in prompt["top20"].as_array().context("no top20")? {
        let (id, logprob) = (
            pair[0].as_u64().context("no id")?,
            pair[1].as_f64().context("no number")?,
        );
        // Best first.
        reference
            .entry(tokenizer.token_text(u32::try_from(id)?))
            .or_insert(logprob);
    }
    let first = choice["logprobs"]["top_logprobs"][0]
        .as_object()
        .context("no alternatives")?;
    for (text, logprob) in first {
        let expected = reference
            .get(text)
            .with_context(|| format!("{text:?} is not among the reference's 20"))?;
        report.top.add(&[logprob.as_f64().context("no number")?], &[*expected]);
    }
    Ok(())
}

async fn compare(judge: &Judge, prompt: &Value) -> Result<Report> {
    let Judge {
        client,
        url,
        tokenizer,
        margin,
    } = judge;
    let mut report = Report::default();
    let expected = ids(&prompt["ids"]);
    let details = json!({
        "inputs": prompt["prompt"],
        "parameters": { "max_new_tokens": 1, "decoder_input_details": true, "do_sample": false },
    });
    let answer = post_ok(client, &format!("{url}/generate"), &details).await?;
    let prefill = answer["details"]["prefill"].as_array().context("no prefill")?;
    let own: Vec<u64> = prefill.iter().filter_map(|token| token["id"].as_u64()).collect();
    ensure!(own == expected, "the prompt's tokens are {own:?}, not {expected:?}");
    let own: Vec<f64> = prefill.iter().filter_map(|token| token["logprob"].as_f64()).collect();
    let reference = floats(&prompt["prompt_logprobs"]);
    ensure!(
        own.len() == expected.len() - 1 && own.len() == reference.len(),
        "{} log-probabilities",
        own.len()
    );
    report.prompt.add(&own, &reference);

    let choice = complete(client, url, &prompt["prompt"], ids(&prompt["greedy"]).len()).await?;
    ensure!(
        ids(&choice["prompt_token_ids"]) == expected,
        "the prompt's tokens at /v1: {choice}"
    );
    compare_top(&choice, prompt, tokenizer, &mut report)?;
    compare_greedy(&choice, prompt, *margin, &mut report)?;
    if ids(&choice["token_ids"]) == ids(&prompt["greedy"]) {
        ensure!(
            choice["text"] == prompt["text"],
            "text {}, not {}",
            choice["text"],
            prompt["text"]
        );
    }
    Ok(report)
}

/// All golden prompts of the default model, at once.
async fn default_model_report(compute: &str, kv_dtype: &str, margin: f64) -> Result<Report> {
    let prompts = golden(&root().join("model/tests/fixtures/smollm2-135m-instruct-q4_1.golden.json"))?;
    ensure!(prompts.len() == 10, "{} golden prompts", prompts.len());
    let spec = ClusterSpec::pair(default_model()?)
        .set(format!("model.compute={compute}"))
        .set(format!("model.kv_dtype={kv_dtype}"))
        .set(format!("model.model_name={MODEL_NAME}"));
    let cluster = Cluster::start(spec).await?;
    let tokenizer = ModelFiles::open(default_model()?)?.text()?.tokenizer;
    let judge = Judge {
        client: Client::new(),
        url: cluster.url(),
        tokenizer,
        margin,
    };
    let reports = try_join_all(prompts.iter().map(|prompt| compare(&judge, prompt))).await;
    let mut sum = Report::default();
    for report in reports.with_context(|| cluster.logs())? {
        sum.prompt.0.extend(report.prompt.0);
        sum.top.0.extend(report.top.0);
        sum.greedy.0.extend(report.greedy.0);
        sum.agreed += report.agreed;
        sum.greedy_tokens += report.greedy_tokens;
    }
    sum.print(&format!("compute {compute}, KV {kv_dtype}"));
    Ok(sum)
}

#[tokio::test]
async fn the_default_model_in_float_is_the_reference() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let report = default_model_report("float32", "f32", 0.01).await?;
    ensure!(report.prompt.0.len() > 400 && report.top.0.len() >= 40 && report.greedy.0.len() > 200);
    ensure!(report.prompt.worst() < 2e-3 && report.top.worst() < 2e-3 && report.greedy.worst() < 2e-3);
    Ok(())
}

#[tokio::test]
async fn the_default_model_as_served_is_close_to_the_reference() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let report = default_model_report("quantised", "f16", 0.7).await?;
    // What llama.cpp shows on this file.
    ensure!(
        report.top.mean() <= 0.085,
        "alternatives are off by {} on average",
        report.top.mean()
    );
    Ok(())
}

#[tokio::test]
async fn a_checkpoint_directory_is_the_reference() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let prompts = golden(&tiny_model().join("golden.json"))?;
    let spec = ClusterSpec::pair(tiny_model())
        .set("model.kv_dtype=f32")
        .set(format!("model.model_name={MODEL_NAME}"));
    let cluster = Cluster::start(spec).await?;
    let client = Client::new();
    let mut report = Report::default();
    for prompt in &prompts {
        let choice = complete(&client, &cluster.url(), &prompt["ids"], ids(&prompt["greedy"]).len()).await?;
        ensure!(choice["prompt_token_ids"] == prompt["ids"], "{choice}");
        ensure!(
            choice["token_ids"] == prompt["greedy"],
            "{}, not {}",
            choice["token_ids"],
            prompt["greedy"]
        );
        compare_greedy(&choice, prompt, 0.0, &mut report)?;
    }
    report.print("tiny checkpoint");
    ensure!(!report.greedy.0.is_empty() && report.greedy.worst() < 1e-3);
    Ok(())
}
