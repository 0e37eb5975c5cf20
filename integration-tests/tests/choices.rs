//! Several choices of one prompt, by real processes: each is what one engine in one process makes of it, also where a decode
//! node is killed in the middle; the KV of the prompt travels once, however many choices follow.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use config::KvDtypeConfig;
use integration_tests::ask::{Door, MODEL_NAME};
use integration_tests::client::{json_events, post_events, post_ok};
use integration_tests::cluster::{Cluster, ClusterSpec, metric, metric_sum};
use integration_tests::exact::query::{Draw, Query};
use integration_tests::exact::reference::Reference;
use integration_tests::files::tiny_model;
use integration_tests::scene::stretched_tiny_model;
use integration_tests::trial::{IDLE_WITHIN, pause, spec};
use integration_tests::vitals::idle_within;
use reqwest::Client;
use serde_json::{Value, json};
use tokio::sync::Mutex;

/// Clusters run one after the other: nodes that starve each other lose their links.
static ONE_CLUSTER: Mutex<()> = Mutex::const_new(());

fn sampled(seed: u64, max_tokens: u32) -> Query {
    Query {
        draw: Draw {
            sample: true,
            temperature: Some(1.0),
            repetition_penalty: Some(1.1),
            seed,
            ..Draw::default()
        },
        ignore_eos: true,
        ..Query::greedy("the quick brown fox jumps over the lazy dog", max_tokens)
    }
}

fn body(query: &Query, n: usize, stream: bool) -> Value {
    let door = if stream {
        Door::CompletionsStream
    } else {
        Door::Completions
    };
    let mut body = query.body(door);
    body["n"] = json!(n);
    body
}

/// Token ids of every choice of a whole answer.
fn ids(answer: &Value) -> Result<Vec<Vec<u32>>> {
    let choices = answer["choices"].as_array().context("choices")?;
    let of = |choice: &Value| Ok(serde_json::from_value(choice["token_ids"].clone())?);
    choices.iter().map(of).collect()
}

/// Token ids of every choice of a stream.
fn streamed_ids(chunks: &[Value], n: usize) -> Result<Vec<Vec<u32>>> {
    let mut all = vec![Vec::new(); n];
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].as_array()).flatten() {
        let index = choice["index"].as_u64().context("an index")? as usize;
        let more: Vec<u32> = serde_json::from_value(choice["token_ids"].clone())?;
        all.get_mut(index).with_context(|| choice.to_string())?.extend(more);
    }
    Ok(all)
}

/// What one engine makes of each choice.
fn expected(reference: &mut Reference, query: &Query, n: u32) -> Result<Vec<Vec<u32>>> {
    let most = query.max_tokens.context("a limit")?;
    let choices = (0..n).map(|choice| Ok(reference.choice(query, choice, most)?.ids()));
    choices.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_choices_equal_three_runs_of_one_engine() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let mut reference = Reference::open(&tiny_model(), KvDtypeConfig::F16)?;
    let cluster = Cluster::start(spec(1, 1)).await?;
    let (client, url) = (Client::new(), format!("{}/v1/completions", cluster.url()));
    for seed in [42, 7, u64::MAX - 5_000] {
        let mut query = sampled(seed, 40);
        // With the model's end tokens the choices end apart.
        query.ignore_eos = seed == 42;
        let expected = expected(&mut reference, &query, 3)?;
        ensure!(expected[0] != expected[1] && expected[1] != expected[2], "{expected:?}");
        let whole = post_ok(&client, &url, &body(&query, 3, false)).await?;
        ensure!(ids(&whole)? == expected, "seed {seed}: {whole}");
        let tokens: usize = expected.iter().map(Vec::len).sum();
        ensure!(whole["usage"]["completion_tokens"] == tokens, "{whole}");
        let mut events = post_events(&client, &url, &body(&query, 3, true)).await?;
        ensure!(events.pop().as_deref() == Some("[DONE]"));
        let chunks = json_events(&events)?;
        ensure!(streamed_ids(&chunks, 3)? == expected, "seed {seed}, streamed");
        let single = post_ok(&client, &url, &body(&query, 1, false)).await?;
        ensure!(
            ids(&single)?[0] == expected[0],
            "the first choice is the only one of one"
        );
    }
    idle_within(&cluster, 2, IDLE_WITHIN).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_ends_its_choice_and_leaves_nothing_behind() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let cluster = Cluster::start(spec(1, 1)).await?;
    let (client, url) = (Client::new(), format!("{}/v1/completions", cluster.url()));
    let query = sampled(42, 60);
    let free = post_ok(&client, &url, &body(&query, 4, false)).await?;
    // A piece of the second choice, from its middle.
    let text = free["choices"][1]["text"].as_str().context("a text")?;
    let stop: String = text.chars().skip(20).take(3).collect();
    let mut stopped = body(&query, 4, false);
    stopped["stop"] = json!(stop);
    let answer = post_ok(&client, &url, &stopped).await?;
    for index in 0..4 {
        let text = free["choices"][index]["text"].as_str().context("a text")?;
        let cut = text.find(&stop).map_or(text, |at| &text[..at]);
        ensure!(answer["choices"][index]["text"] == *cut, "{stop:?}: {answer}");
    }
    ensure!(answer["choices"][1]["finish_reason"] == "stop", "{answer}");
    idle_within(&cluster, 2, IDLE_WITHIN).await?;
    Ok(())
}

/// Waits until the only request is being decoded; which decode node it is on.
async fn decoding_on(cluster: &Cluster) -> Result<usize> {
    for _ in 0..2_000 {
        let page = reqwest::get(format!("{}/metrics", cluster.url())).await?.text().await?;
        let booked = |i: usize| {
            let node = format!("node=\"decode-{i}\"");
            metric(&page, "baton_node_blocks", &[&node, "kind=\"booked\""]).unwrap_or(0.0) > 0.0
        };
        let decoding = metric(&page, "baton_requests_in_state", &["state=\"decoding\""]).unwrap_or(0.0) > 0.0;
        if let Some(node) = (0..2).find(|i| decoding && booked(*i)) {
            return Ok(node);
        }
        pause(2).await;
    }
    bail!("nothing is being decoded")
}

/// Sends `body` to `path`, kills the decode node that works on it, and returns the answer.
async fn answered_by_another(cluster: &mut Cluster, path: &str, body: Value) -> Result<Value> {
    let (client, url) = (Client::new(), format!("{}{path}", cluster.url()));
    // The gauges that tell where a request is must have forgotten the last one.
    idle_within(cluster, 3, IDLE_WITHIN).await?;
    pause(300).await;
    let answer = tokio::spawn(async move { post_ok(&client, &url, &body).await });
    let node = decoding_on(cluster).await?;
    pause(30).await;
    ensure!(!answer.is_finished(), "the answer was there before the node was killed");
    cluster.kill(&format!("decode-{node}"))?;
    let answer = answer.await??;
    cluster.start_node("decode", node)?;
    cluster.ready().await?;
    Ok(answer)
}

/// A model that can answer at length: the answers of these tests take a while.
fn long_spec(model: &std::path::Path) -> ClusterSpec {
    let mut long = spec(1, 2);
    long.model = model.to_path_buf();
    long.set("limits.max_iter_times=4096")
        .set("engine.kv_pool_tokens=32768")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choices_and_beams_survive_a_killed_decode_node_to_the_token() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let model = stretched_tiny_model(8_192)?;
    let mut cluster = Cluster::start(long_spec(model.path())).await?;
    let (client, url) = (Client::new(), format!("{}/v1/completions", cluster.url()));
    let query = sampled(42, 3_000);
    // The end token would end it soon.
    let mut beams = body(&Query::greedy("one two three", 2_000), 4, false);
    beams["ignore_eos"] = json!(true);
    beams["use_beam_search"] = json!(true);
    for body in [body(&query, 4, false), beams] {
        let undisturbed = post_ok(&client, &url, &body).await?;
        ensure!(ids(&undisturbed)?.len() == 4, "{undisturbed}");
        let moved = answered_by_another(&mut cluster, "/v1/completions", body).await?;
        ensure!(ids(&moved)? == ids(&undisturbed)?);
        ensure!(moved["usage"]["completion_tokens"] == undisturbed["usage"]["completion_tokens"]);
    }
    let best_of = generate_body("one two three", 4, 3_000);
    let moved = answered_by_another(&mut cluster, "/generate", best_of).await?;
    replayed(&client, &cluster, "one two three", &sequences(&moved, 4)?).await?;
    let page = reqwest::get(format!("{}/metrics", cluster.url())).await?.text().await?;
    let moved = metric_sum(&page, "baton_request_migrations_total");
    ensure!(moved >= 3.0, "{moved} requests were moved");
    ensure!(metric(&page, "baton_token_disagreements_total", &[]).unwrap_or(0.0) == 0.0);
    idle_within(&cluster, 3, IDLE_WITHIN + Duration::from_secs(3)).await?;
    Ok(())
}

/// A body of `/generate` that wants the best of so many sequences, sampled.
fn generate_body(prompt: &str, best_of: usize, tokens: usize) -> Value {
    json!({ "inputs": prompt, "parameters": {
        "best_of": best_of, "do_sample": true, "temperature": 1.2, "max_new_tokens": tokens, "details": true, "top_p": 0.95,
    }})
}

/// All sequences of an answer of `/generate`, each with text, seed, tokens and their log-probabilities, the best first.
fn sequences(answer: &Value, best_of: usize) -> Result<Vec<Value>> {
    let details = &answer["details"];
    let mut best = details.clone();
    best["generated_text"] = answer["generated_text"].clone();
    let others = details["best_of_sequences"].as_array().context("no others")?;
    let all: Vec<Value> = std::iter::once(&best).chain(others).cloned().collect();
    ensure!(all.len() == best_of, "{answer}");
    Ok(all)
}

/// Each sequence is the answer to a request with the seed that is told of it, bit for bit.
async fn replayed(client: &Client, cluster: &Cluster, prompt: &str, sequences: &[Value]) -> Result<()> {
    let url = format!("{}/generate", cluster.url());
    let mean = |of: &Value| {
        let tokens = of["tokens"].as_array().into_iter().flatten();
        let logprobs: Vec<f64> = tokens.filter_map(|token| token["logprob"].as_f64()).collect();
        logprobs.iter().sum::<f64>() / logprobs.len() as f64
    };
    for sequence in sequences {
        let mut body = generate_body(prompt, 1, 3_000);
        body["parameters"]["seed"] = sequence["seed"].clone();
        body["parameters"]["max_new_tokens"] = sequence["generated_tokens"].clone();
        let alone = post_ok(client, &url, &body).await?;
        ensure!(
            alone["generated_text"] == sequence["generated_text"],
            "{alone}\n{sequence}"
        );
        ensure!(alone["details"]["tokens"] == sequence["tokens"], "{alone}\n{sequence}");
        ensure!(mean(sequence) <= mean(&sequences[0]), "the first is not the best");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_best_of_eight_costs_one_transfer_and_each_seed_brings_its_sequence_back() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    // Room for eight of them: two such requests are in each other's way.
    let narrow = spec(1, 1)
        .set("engine.kv_pool_tokens=4096")
        .set("limits.max_seq_len=512");
    let cluster = Cluster::start(narrow.set("engine.prefix_cache=false")).await?;
    let (client, url) = (Client::new(), format!("{}/generate", cluster.url()));
    let prompt = "the quick brown fox jumps over the lazy dog ".repeat(4);
    let bytes =
        || async { anyhow::Ok(metric(&cluster.metrics().await?, "baton_handoff_bytes_total", &[]).unwrap_or(0.0)) };
    let mut moved = Vec::new();
    for best_of in [1, 8] {
        let before = bytes().await?;
        let body = generate_body(&prompt, best_of, 300);
        let (one, other) = tokio::join!(post_ok(&client, &url, &body), post_ok(&client, &url, &body));
        // The receipt may come a moment behind the last token.
        pause(300).await;
        moved.push(bytes().await? - before);
        if best_of == 8 {
            let all = [sequences(&one?, 8)?, sequences(&other?, 8)?];
            let seeds: BTreeSet<u64> = all.iter().flatten().filter_map(|one| one["seed"].as_u64()).collect();
            ensure!(seeds.len() == 16, "{seeds:?}");
            for sequences in &all {
                replayed(&client, &cluster, &prompt, sequences).await?;
            }
        }
    }
    ensure!(moved[0] > 0.0 && moved[0] == moved[1], "{moved:?}");
    idle_within(&cluster, 2, IDLE_WITHIN).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_choices_move_the_kv_of_one_prompt() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let model = stretched_tiny_model(4_096)?;
    let mut wide = spec(1, 1);
    wide.model = model.path().to_path_buf();
    let cluster = Cluster::start(wide).await?;
    let (client, url) = (Client::new(), format!("{}/v1/completions", cluster.url()));
    let bytes = || async {
        let page = reqwest::get(format!("{}/metrics", cluster.url())).await?.text().await?;
        anyhow::Ok(metric(&page, "baton_handoff_bytes_total", &[]).unwrap_or(0.0))
    };
    let mut moved = Vec::new();
    for n in [1, 8] {
        let before = bytes().await?;
        let prompt: Vec<u32> = (0..1_000).map(|i| 10 + (i * 7 + n) % 400).collect();
        let body = json!({
            "model": MODEL_NAME, "prompt": prompt, "n": n, "seed": 42, "temperature": 1, "max_tokens": 300, "ignore_eos": true, "return_token_ids": true,
        });
        let answer = post_ok(&client, &url, &body).await?;
        ensure!(ids(&answer)?.len() == n as usize, "{answer}");
        // The receipt may come a moment behind the last token.
        pause(300).await;
        moved.push(bytes().await? - before);
    }
    ensure!(moved[0] > 0.0 && moved[0] == moved[1], "{moved:?}");
    idle_within(&cluster, 2, IDLE_WITHIN).await?;
    Ok(())
}
