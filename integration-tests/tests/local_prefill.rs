//! Prompts that decode nodes compute themselves, by real processes: answers are those of one engine, and of a pair of nodes that
//! hands over; which way a request goes is decided by what it is predicted to cost, and by who is there.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use config::KvDtypeConfig;
use futures_util::{StreamExt, TryStreamExt, stream};
use integration_tests::ask::MODEL_NAME;
use integration_tests::client::{events, json_events, post_ok};
use integration_tests::cluster::{Cluster, ClusterSpec, metric, metric_sum};
use integration_tests::exact::judge::Judge;
use integration_tests::exact::prompts::{mixed_lengths, prompts};
use integration_tests::exact::query::{Draw, Query};
use integration_tests::exact::reference::{Continuation, Reference};
use integration_tests::exact::watched::Watched;
use integration_tests::files::tiny_model;
use integration_tests::scene::stretched_tiny_model;
use integration_tests::trial::{IDLE_WITHIN, pause, spec};
use integration_tests::vitals::{idle_within, states};
use reqwest::{Client, Response};
use runtime::clock::Clock;
use serde_json::{Value, json};
use tokio::sync::Mutex;

/// Clusters run one after the other: nodes that starve each other lose their links.
static ONE_CLUSTER: Mutex<()> = Mutex::const_new(());

/// What must come true comes true within this time.
const PATIENCE: Duration = Duration::from_secs(20);

fn local(how: &str, prefill: usize, decode: usize) -> ClusterSpec {
    spec(prefill, decode).set(format!("coordinator.local_prefill={how}"))
}

struct Case {
    query: Query,
    reference: Continuation,
}

/// Requests of all kinds with what one engine makes of them.
fn cases(count: usize) -> Result<(Vec<Case>, Reference)> {
    let mut reference = Reference::open(&tiny_model(), KvDtypeConfig::F16)?;
    let tokenizer = reference.text.tokenizer.clone();
    let mut cases = Vec::new();
    for (i, text) in prompts(&tokenizer, &mixed_lengths(count, 240))?.into_iter().enumerate() {
        let sampled = Draw {
            sample: true,
            temperature: Some(0.9),
            top_p: (i % 3 == 0).then_some(0.95),
            repetition_penalty: (i % 4 == 1).then_some(1.2),
            seed: 70 + i as u64,
            ..Draw::default()
        };
        let mut query = Query {
            draw: if i % 2 == 0 { sampled } else { Draw::greedy() },
            ..Query::greedy(text, 32)
        };
        match i % 4 {
            0 => query.prompt_logprobs = true,
            1 => query.top = 3,
            2 => query.stop = vec!["e".to_owned(), "th".to_owned()],
            _ => {}
        }
        let reference = reference.answer(&query, 32)?;
        cases.push(Case { query, reference });
    }
    Ok((cases, reference))
}

/// Asks every case at all its doors.
async fn all_exact(judge: &Judge, cases: &[Case], concurrency: usize) -> Result<()> {
    let asks = cases
        .iter()
        .map(|case| async move { judge.ask_everywhere(&case.query, 32, &case.reference).await });
    let rights: Vec<_> = stream::iter(asks).buffer_unordered(concurrency).try_collect().await?;
    ensure!(rights.iter().all(|doors| !doors.is_empty()));
    Ok(())
}

/// What the doors offer beside single choices: path and body, each with one answer only.
fn bodies() -> Vec<(&'static str, Value)> {
    let prompt = "the quick brown fox jumps over the lazy dog, again and again";
    let completion = |more: Value| {
        let mut body = json!({
            "model": MODEL_NAME, "prompt": prompt, "max_tokens": 24, "seed": 42, "temperature": 0.9, "ignore_eos": true,
            "return_token_ids": true,
        });
        if let (Some(body), Some(more)) = (body.as_object_mut(), more.as_object()) {
            body.extend(more.clone());
        }
        ("/v1/completions", body)
    };
    let chat = json!({
        "model": MODEL_NAME, "messages": [{ "role": "user", "content": prompt }], "max_tokens": 20, "seed": 7, "n": 2,
        "temperature": 1.1, "logprobs": true, "top_logprobs": 4,
    });
    let generate = json!({ "inputs": prompt, "parameters": {
        "max_new_tokens": 20, "details": true, "decoder_input_details": true, "do_sample": true, "seed": 9, "stop": ["qu"],
    }});
    let words = json!({ "choice": ["yes, of course", "no, never"] });
    vec![
        completion(json!({ "n": 3, "logprobs": 2 })),
        completion(json!({ "n": 3, "stop": ["a", "ed"] })),
        completion(json!({ "n": 2, "best_of": 4, "logprobs": 1 })),
        completion(json!({ "prompt": [prompt, "another one", "and a third"], "n": 2, "logprobs": 0 })),
        completion(json!({ "echo": true, "logprobs": 3, "n": 2 })),
        completion(json!({ "prompt_logprobs": 2 })),
        completion(json!({ "echo": true, "logprobs": 1, "max_tokens": 0 })),
        completion(json!({ "echo": true, "max_tokens": 0 })),
        completion(json!({ "max_tokens": 1, "n": 3, "logprobs": 1 })),
        completion(json!({ "max_tokens": 1, "prompt_logprobs": 1 })),
        completion(json!({ "use_beam_search": true, "n": 3, "temperature": 0 })),
        completion(json!({ "use_beam_search": true, "n": 2, "temperature": 0, "prompt_logprobs": 1 })),
        completion(json!({ "use_beam_search": true, "n": 2, "temperature": 0, "max_tokens": 1 })),
        completion(json!({ "n": 2, "logprobs": 1, "ignore_eos": false, "structured_outputs": words })),
        ("/v1/chat/completions", chat),
        ("/generate", generate),
    ]
}

/// An answer without what differs from call to call.
fn lasting(mut answer: Value) -> Value {
    if let Some(answer) = answer.as_object_mut() {
        for field in ["id", "created"] {
            answer.remove(field);
        }
        if let Some(usage) = answer.get_mut("usage").and_then(Value::as_object_mut) {
            for field in ["batch_size", "queue_wait_time"] {
                usage.remove(field);
            }
        }
    }
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decode_nodes_alone_answer_as_one_engine_and_as_nodes_that_hand_over() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let (cases, reference) = cases(24)?;
    let watched = Watched::start(local("always", 1, 1)).await?;
    let judge = Judge::new(watched.cluster.url(), reference.text.clone());
    for concurrency in [1, 12] {
        let asked = all_exact(&judge, &cases, concurrency).await;
        asked.with_context(|| format!("{concurrency} at a time\n{}", watched.cluster.logs()))?;
    }
    let client = Client::new();
    let mut answers = Vec::new();
    for (path, body) in bodies() {
        let answer = post_ok(&client, &format!("{}{path}", watched.cluster.url()), &body).await;
        answers.push(lasting(answer.with_context(|| format!("{path} {body}"))?));
    }
    let handoffs = watched.decode_count("baton_kv_handoffs_total", &[]).await?;
    let elsewhere = watched.prefill_count("baton_engine_rows_total", &[]).await?;
    ensure!((handoffs, elsewhere) == (0, 0), "{handoffs} handoffs, {elsewhere} rows");
    idle_within(&watched.cluster, 2, IDLE_WITHIN).await?;
    drop(watched);

    let watched = Watched::start(local("never", 1, 1)).await?;
    for ((path, body), answer) in bodies().into_iter().zip(answers) {
        let handed_over = post_ok(&client, &format!("{}{path}", watched.cluster.url()), &body).await?;
        let handed_over = lasting(handed_over);
        ensure!(handed_over == answer, "{path} {body}:\n{handed_over}\n{answer}");
    }
    let committed = ["result=\"committed\""];
    let handoffs = watched.decode_count("baton_kv_handoffs_total", &committed).await?;
    ensure!(handoffs >= 10, "{handoffs} handoffs");
    idle_within(&watched.cluster, 2, IDLE_WITHIN).await.map(drop)
}

/// The only node of a cluster serves both roles: there is nobody to hand over to, and nothing waits for itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_node_of_both_roles_serves_everything_whatever_the_settings() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let client = Client::new();
    let mut first: Option<Vec<Value>> = None;
    for (how, policy) in [
        ("never", "prefix_affinity"),
        ("auto", "least_loaded"),
        ("always", "round_robin"),
    ] {
        let alone = ClusterSpec {
            both: 1,
            ..local(how, 0, 0)
        };
        // Room for one of them: it could not be there twice.
        let alone = alone.set("engine.kv_pool_tokens=256").set("limits.max_seq_len=256");
        let cluster = Cluster::start(alone.set(format!("coordinator.routing={policy}"))).await?;
        let mut answers = Vec::new();
        for (path, body) in bodies() {
            let answer = post_ok(&client, &format!("{}{path}", cluster.url()), &body).await;
            answers.push(lasting(answer.with_context(|| format!("{how}: {path} {body}"))?));
        }
        let expected = first.get_or_insert_with(|| answers.clone());
        ensure!(*expected == answers, "{how} leads to other answers");
        idle_within(&cluster, 1, IDLE_WITHIN).await?;
    }
    Ok(())
}

/// The id under which the coordinator keeps its decisions about a request.
fn id_of(answer: &Response) -> Result<String> {
    let id = answer.headers().get("x-request-id").context("no x-request-id")?;
    Ok(id.to_str()?.to_owned())
}

/// Sends a completion; its id, and the answer as it comes.
async fn send(client: &Client, cluster: &Cluster, body: &Value) -> Result<(String, Response)> {
    let url = format!("{}/v1/completions", cluster.url());
    let answer = client.post(url).json(body).send().await?;
    if answer.status() != 200 {
        bail!("{}: {}", answer.status(), answer.text().await?);
    }
    Ok((id_of(&answer)?, answer))
}

/// What was decided about a request, by attempt.
async fn decisions(cluster: &Cluster, id: &str) -> Result<Vec<Value>> {
    let (status, told) = cluster.admin(0, "GET", &format!("/debug/decisions/{id}"), "").await?;
    ensure!(status == 200, "{status}: {told}");
    Ok(told["decisions"].as_array().context("decisions")?.clone())
}

/// The only decision about a request.
async fn decision(cluster: &Cluster, id: &str) -> Result<Value> {
    let mut all = decisions(cluster, id).await?;
    ensure!(all.len() == 1, "{all:?}");
    all.pop().context("one")
}

/// A completion of `tokens` tokens behind `prompt` tokens, which begin as no other number's do.
fn completion(number: usize, prompt: usize, tokens: usize) -> Value {
    let prompt: Vec<usize> = (0..prompt).map(|i| 10 + (i * 7 + number * (i % 3 + 1)) % 400).collect();
    json!({
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "seed": number + 1, "temperature": 0.9, "ignore_eos": true,
        "return_token_ids": true,
    })
}

/// One token; where its prompt was computed, and how that was called.
async fn one_token(client: &Client, cluster: &Cluster, number: usize) -> Result<(String, String)> {
    let (id, answer) = send(client, cluster, &completion(number, 12, 1)).await?;
    let answer: Value = answer.json().await?;
    ensure!(answer["usage"]["completion_tokens"] == 1, "{answer}");
    let told = decision(cluster, &id).await?;
    let node = if told["prefill"].is_string() {
        &told["prefill"]
    } else {
        &told["decode"]
    };
    Ok((told["way"].to_string(), node.to_string()))
}

/// Waits until as many nodes are known.
async fn until_known(cluster: &Cluster, nodes: usize) -> Result<()> {
    let deadline = Clock.now() + PATIENCE;
    loop {
        let (_, shown) = cluster.admin(0, "GET", "/nodes", "").await?;
        if shown["nodes"].as_array().map(Vec::len) == Some(nodes) {
            return Ok(());
        }
        ensure!(Clock.now() < deadline, "{shown}");
        pause(10).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_prefill_node_decode_nodes_answer_and_one_that_comes_is_used() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let (cases, reference) = cases(12)?;
    let mut cluster = Cluster::without_nodes(local("auto", 1, 1))?;
    cluster.start_coordinator()?;
    cluster.start_node("decode", 0)?;
    cluster.ready().await?;
    let (client, judge) = (Client::new(), Judge::new(cluster.url(), reference.text.clone()));
    let here = ("\"local\"".to_owned(), "\"decode-0\"".to_owned());
    let there = ("\"prompt_only\"".to_owned(), "\"prefill-0\"".to_owned());
    for round in 0..3 {
        // Never there, or gone.
        all_exact(&judge, &cases, 6).await?;
        let (id, answer) = send(&client, &cluster, &completion(round, 20, 5)).await?;
        answer.json::<Value>().await?;
        let told = decision(&cluster, &id).await?;
        ensure!(told["way"] == "local" && told["remote_us"].is_null(), "{told}");
        ensure!(told["local_us"].is_u64() && told["local_prefill"] == "auto", "{told}");
        ensure!(one_token(&client, &cluster, 10 * round).await? == here);
        cluster.start_node("prefill", 0)?;
        until_known(&cluster, 2).await?;
        // What needs no decode node goes to a prefill node whenever there is one.
        ensure!(one_token(&client, &cluster, 10 * round + 1).await? == there);
        all_exact(&judge, &cases, 6).await?;
        cluster.kill("prefill-0")?;
        until_known(&cluster, 1).await?;
    }
    idle_within(&cluster, 1, IDLE_WITHIN).await.map(drop)
}

/// Waits until so many requests are in a state.
async fn until_in(cluster: &Cluster, state: &str, requests: u32) -> Result<()> {
    let deadline = Clock.now() + PATIENCE;
    loop {
        let states = states(cluster).await?;
        if states.get(state) == Some(&f64::from(requests)) {
            return Ok(());
        }
        ensure!(Clock.now() < deadline, "{requests} {state}: {states:?}");
        pause(5).await;
    }
}

/// Long answers, so that nodes are busy for a while.
fn long(model: &Path, how: &str, prefill: usize, decode: usize) -> ClusterSpec {
    let mut long = local(how, prefill, decode);
    long.model = model.to_path_buf();
    long.set("limits.max_iter_times=8192")
        .set("limits.max_input_token_len=8000")
        .set("engine.kv_pool_tokens=65536")
        .set("coordinator.prefill_timeout_ms=60000")
        // What is decided is what this is about, not what was cached before.
        .set("engine.prefix_cache=false")
}

/// The way with the lower cost was taken; the other one than before only where it was a tenth cheaper.
fn is_by_cost(told: &Value) -> Result<()> {
    let us = |field: &str| told[field].as_u64().with_context(|| format!("no {field}: {told}"));
    let (remote, here) = (us("remote_us")?, us("local_us")?);
    let right = match told["way"].as_str() {
        Some("local") => here * 10 <= remote * 11,
        Some("handoff") => here * 11 >= remote * 10,
        _ => false,
    };
    ensure!(right, "{told}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_goes_where_it_is_predicted_to_cost_less() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let model = stretched_tiny_model(8_192)?;
    let mut cluster = Cluster::start(long(model.path(), "auto", 1, 1)).await?;
    until_known(&cluster, 2).await?;
    let client = Client::new();
    // What the way is to change nothing of.
    let mut undisturbed = Vec::new();
    for body in [completion(100, 3_000, 8), completion(101, 8, 4)] {
        let (id, answer) = send(&client, &cluster, &body).await?;
        undisturbed.push(ids(&answer.json().await?)?);
        is_by_cost(&decision(&cluster, &id).await?)?;
    }
    // The prefill node has much to compute, and cannot get on with it: a handful of rows is computed sooner elsewhere.
    cluster.process("prefill-0")?.signal(libc::SIGSTOP);
    let (ahead, url) = (completion(102, 8_000, 1), format!("{}/v1/completions", cluster.url()));
    let ahead = tokio::spawn({
        let (client, url) = (client.clone(), url.clone());
        async move { post_ok(&client, &url, &ahead).await }
    });
    until_in(&cluster, "prefilling", 1).await?;
    let (id, answer) = send(&client, &cluster, &completion(101, 8, 4)).await?;
    let told = decision(&cluster, &id).await;
    ensure!(ids(&answer.json().await?)? == undisturbed[1]);
    cluster.process("prefill-0")?.signal(libc::SIGCONT);
    let told = told?;
    is_by_cost(&told)?;
    ensure!(told["way"] == "local" && told["decode"] == "decode-0", "{told}");
    ahead.await??;
    // Many wait for every row there: that is dear.
    let busy: Vec<_> = (0..16)
        .map(|number| {
            let (client, url, body) = (client.clone(), url.clone(), completion(number, 20, 5_000));
            tokio::spawn(async move { post_ok(&client, &url, &body).await })
        })
        .collect();
    until_in(&cluster, "decoding", 16).await?;
    let (id, answer) = send(&client, &cluster, &completion(100, 3_000, 8)).await?;
    ensure!(ids(&answer.json().await?)? == undisturbed[0]);
    let told = decision(&cluster, &id).await?;
    is_by_cost(&told)?;
    ensure!(told["way"] == "handoff" && told["prefill"] == "prefill-0", "{told}");
    for busy in busy {
        ensure!(!busy.is_finished(), "the decode node was not busy");
        busy.abort();
    }
    idle_within(&cluster, 2, IDLE_WITHIN).await.map(drop)
}

/// Token ids of the only choice of a whole answer.
fn ids(answer: &Value) -> Result<Vec<u64>> {
    let ids = answer["choices"][0]["token_ids"].as_array().context("token_ids")?;
    Ok(ids.iter().filter_map(Value::as_u64).collect())
}

/// The same of the events of a stream.
fn streamed_ids(chunks: &[Value]) -> Vec<u64> {
    let of = |chunk: &Value| chunk["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default();
    chunks.iter().flat_map(of).filter_map(|id| id.as_u64()).collect()
}

/// Sends a completion that is streamed; its id, and the tokens.
async fn streamed(client: &Client, url: &str, body: &Value) -> Result<(String, Vec<u64>)> {
    let answer = client.post(url).json(body).send().await?.error_for_status()?;
    let id = id_of(&answer)?;
    let mut events = events(answer).await?;
    ensure!(events.pop().as_deref() == Some("[DONE]"), "{:?}", events.last());
    Ok((id, streamed_ids(&json_events(&events)?)))
}

fn signal(cluster: &mut Cluster, nodes: &[&str], signal: i32) -> Result<()> {
    for node in nodes {
        cluster.process(node)?.signal(signal);
    }
    Ok(())
}

/// Whether a node has a job.
async fn works(cluster: &Cluster, node: &str) -> Result<bool> {
    let labels = [format!("node=\"{node}\""), "kind=\"booked\"".to_owned()];
    let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
    Ok(metric(&cluster.metrics().await?, "baton_node_blocks", &labels).unwrap_or(0.0) > 0.0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_node_that_is_killed_over_a_prompt_or_an_answer_costs_a_pause() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let model = stretched_tiny_model(8_192)?;
    // A row a step: a long prompt takes long anywhere.
    let slow = long(model.path(), "always", 0, 2)
        .set("engine.prefill_chunk_tokens=1")
        .set("cluster.idle_timeout_ms=5000");
    let mut cluster = Cluster::start(slow).await?;
    until_known(&cluster, 2).await?;
    let client = Client::new();
    for (state, prompt, tokens) in [("local", 8_000, 12), ("decoding", 16, 8_000)] {
        let mut body = completion(prompt, prompt, tokens);
        let (_, answer) = send(&client, &cluster, &body).await?;
        let undisturbed = ids(&answer.json().await?)?;
        ensure!(undisturbed.len() == tokens);
        // The gauges that tell where a request is must have forgotten the last one.
        idle_within(&cluster, 2, IDLE_WITHIN).await?;
        pause(300).await;
        body["stream"] = json!(true);
        let nodes = ["decode-0", "decode-1"];
        let over_a_prompt = state == "local";
        if over_a_prompt {
            // Nobody can have computed it before that is noticed.
            signal(&mut cluster, &nodes, libc::SIGSTOP)?;
        }
        let (client, url) = (client.clone(), format!("{}/v1/completions", cluster.url()));
        let answer = tokio::spawn(async move { streamed(&client, &url, &body).await });
        until_in(&cluster, state, 1).await?;
        let [node, other] = if works(&cluster, nodes[0]).await? {
            nodes
        } else {
            [nodes[1], nodes[0]]
        };
        ensure!(works(&cluster, node).await? && !works(&cluster, other).await?);
        if over_a_prompt {
            signal(&mut cluster, &[node], libc::SIGCONT)?;
            pause(50).await;
        }
        signal(&mut cluster, &[node], libc::SIGSTOP)?;
        // Gauges are set every 100 ms: it was not over when the node stopped.
        pause(300).await;
        until_in(&cluster, state, 1).await?;
        signal(&mut cluster, &[other], libc::SIGCONT)?;
        cluster.kill(node)?;
        let (id, tokens) = answer.await??;
        ensure!(tokens == undisturbed, "{state}");
        let ways: Vec<_> = decisions(&cluster, &id).await?;
        let ways: Vec<_> = ways.iter().filter_map(|told| told["way"].as_str()).collect();
        let again = if state == "local" { "local" } else { "resume" };
        ensure!(ways == ["local", again], "{ways:?}");
        cluster.start_node("decode", usize::from(node.ends_with('1')))?;
        until_known(&cluster, 2).await?;
    }
    let page = cluster.metrics().await?;
    let moved = metric_sum(&page, "baton_request_migrations_total");
    let restarted = metric_sum(&page, "baton_request_restarts_total");
    ensure!((moved, restarted) == (1.0, 1.0), "{moved} moved, {restarted} restarted");
    ensure!(metric(&page, "baton_token_disagreements_total", &[]).unwrap_or(0.0) == 0.0);
    idle_within(&cluster, 2, IDLE_WITHIN).await.map(drop)
}
