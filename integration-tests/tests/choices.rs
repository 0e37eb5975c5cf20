//! Several choices of one prompt, by real processes: each is what one engine in one process makes of it, also where a decode
//! node is killed in the middle; the KV of the prompt travels once, however many choices follow.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use config::KvDtypeConfig;
use integration_tests::ask::{Door, MODEL_NAME};
use integration_tests::client::{json_events, post_events, post_ok};
use integration_tests::cluster::{Cluster, ClusterSpec, metric};
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

/// Sends `body`, kills the decode node that works on it, and returns the answer.
async fn answered_by_another(cluster: &mut Cluster, body: Value) -> Result<Value> {
    let (client, url) = (Client::new(), format!("{}/v1/completions", cluster.url()));
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
        let moved = answered_by_another(&mut cluster, body).await?;
        ensure!(ids(&moved)? == ids(&undisturbed)?);
        ensure!(moved["usage"]["completion_tokens"] == undisturbed["usage"]["completion_tokens"]);
    }
    let page = reqwest::get(format!("{}/metrics", cluster.url())).await?.text().await?;
    let causes = ["node_lost", "stream_lost", "job_failed", "deadline", "protocol"];
    let moved = causes.iter().filter_map(|cause| {
        let cause = format!("cause=\"{cause}\"");
        metric(&page, "baton_request_migrations_total", &[&cause])
    });
    let moved: f64 = moved.sum();
    ensure!(moved >= 2.0, "{moved} requests were moved");
    ensure!(metric(&page, "baton_token_disagreements_total", &[]).unwrap_or(0.0) == 0.0);
    idle_within(&cluster, 3, IDLE_WITHIN + Duration::from_secs(3)).await?;
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
