//! What answers say they used adds up to what the counters say, exactly: whole, streamed, several choices, cancelled, and moved from a
//! node that died.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures_util::StreamExt;
use futures_util::future::try_join_all;
use integration_tests::client::{json_events, post_events, post_ok};
use integration_tests::cluster::ClusterSpec;
use integration_tests::scene::stretched_tiny_model;
use integration_tests::trial::spec;
use reqwest::Client;
use runtime::clock::Clock;
use serde_json::{Value, json};

use super::watched::Watched;

const PROMPT_TOKENS: [&str; 2] = ["baton_prompt_tokens_total", "prompt_tokens_total"];
const GENERATION_TOKENS: [&str; 2] = ["baton_generation_tokens_total", "generation_tokens_total"];
/// What must come true comes true within this time.
const PATIENCE: Duration = Duration::from_secs(30);

/// Tokens of prompts and of answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Used {
    prompt: u64,
    generated: u64,
}

impl Used {
    fn add(&mut self, other: Self) {
        self.prompt += other.prompt;
        self.generated += other.generated;
    }

    /// Of OpenAI's usage.
    fn of_usage(usage: &Value) -> Result<Self> {
        let number = |name: &str| usage[name].as_u64().with_context(|| format!("no {name} in {usage}"));
        Ok(Self {
            prompt: number("prompt_tokens")?,
            generated: number("completion_tokens")?,
        })
    }

    /// Of TGI's details, with those of the other sequences.
    fn of_details(details: &Value) -> Result<Self> {
        let number = |of: &Value, name: &str| of[name].as_u64().with_context(|| format!("no {name} in {of}"));
        let others = details["best_of_sequences"].as_array().cloned().unwrap_or_default();
        let mut generated = number(details, "generated_tokens")?;
        for other in &others {
            generated += number(other, "generated_tokens")?;
        }
        Ok(Self {
            prompt: number(details, "prompt_tokens")?,
            generated,
        })
    }
}

/// What the counters say, by all of their names.
async fn counted(watched: &Watched) -> Result<Used> {
    let mut used = Vec::new();
    for (prompt, generated) in PROMPT_TOKENS.iter().zip(GENERATION_TOKENS) {
        used.push(Used {
            prompt: watched.sum(prompt).await?,
            generated: watched.sum(generated).await?,
        });
    }
    ensure!(
        used.windows(2).all(|pair| pair[0] == pair[1]),
        "the names do not agree: {used:?}"
    );
    used.pop().context("no counter")
}

/// Asks through one of the doors; what its answer says.
async fn ask(client: &Client, url: &str, kind: usize, number: usize) -> Result<Used> {
    let prompt = "the baton is handed over ".repeat(1 + number % 7);
    let (tokens, seed) = (5 + number % 30, 1 + number);
    let completion = json!({
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0.9, "seed": seed, "ignore_eos": true,
    });
    let generate = json!({
        "inputs": prompt,
        "parameters": { "max_new_tokens": tokens, "details": true, "do_sample": true, "seed": seed, "temperature": 0.9 },
    });
    let with = |mut body: Value, changes: Value| {
        for (name, value) in changes.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        body
    };
    match kind {
        0 => {
            let body = with(completion, json!({ "n": 3 }));
            Used::of_usage(&post_ok(client, &format!("{url}/v1/completions"), &body).await?["usage"])
        }
        1 => {
            let changes = json!({ "n": 2, "stream": true, "stream_options": { "include_usage": true } });
            let events = post_events(client, &format!("{url}/v1/completions"), &with(completion, changes)).await?;
            let chunks = json_events(&events[..events.len().saturating_sub(1)])?;
            Used::of_usage(&chunks.last().context("no chunk")?["usage"])
        }
        2 => {
            let body = with(completion, json!({ "prompt": [prompt, "another one"] }));
            Used::of_usage(&post_ok(client, &format!("{url}/v1/completions"), &body).await?["usage"])
        }
        3 => Used::of_details(&post_ok(client, &format!("{url}/generate"), &generate).await?["details"]),
        4 => {
            let mut body = generate;
            // Each of the sequences has a seed of its own.
            body["parameters"]["best_of"] = json!(2);
            body["parameters"]["seed"] = Value::Null;
            Used::of_details(&post_ok(client, &format!("{url}/generate"), &body).await?["details"])
        }
        _ => {
            let events = post_events(client, &format!("{url}/generate_stream"), &generate).await?;
            let last = json_events(&events)?;
            Used::of_details(&last.last().context("no event")?["details"])
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_of_all_answers_is_what_the_counters_and_the_nodes_count() -> Result<()> {
    let watched = Watched::start(spec(1, 1)).await?;
    let url = watched.cluster.url();
    let asks = (0..48).map(|number| ask(&watched.client, &url, number % 6, number));
    let mut used = Used::default();
    for one in try_join_all(asks).await? {
        used.add(one);
    }
    ensure!(used.prompt > 500 && used.generated > 500, "{used:?}");
    ensure!(
        counted(&watched).await? == used,
        "{:?} counted, {used:?} used",
        counted(&watched).await?
    );
    // Each token was sampled once, on the prefill or on the decode node.
    watched
        .nodes_reach("baton_engine_sampled_tokens_total", used.generated)
        .await
}

/// A stream that tells with every chunk what it has used.
async fn long_stream(watched: &Watched, tokens: usize) -> Result<reqwest::Response> {
    let body = json!({
        "model": "tiny", "prompt": "on a long track", "max_tokens": tokens, "temperature": 0, "stream": true,
        "stream_options": { "include_usage": true, "continuous_usage_stats": true },
    });
    let request = watched.client.post(format!("{}/v1/completions", watched.cluster.url()));
    Ok(request.json(&body).send().await?.error_for_status()?)
}

/// The last usage in what has come of a stream.
fn last_usage(text: &str) -> Result<Used> {
    let complete = text.rsplit_once("\n\n").map_or("", |(complete, _)| complete);
    let data = complete.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let usages = data.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let last = usages.filter(|chunk| chunk["usage"].is_object()).last();
    last.map_or(Ok(Used::default()), |chunk| Used::of_usage(&chunk["usage"]))
}

/// Model without an end token, for answers as long as this wants them.
fn endless() -> Result<(tempfile::TempDir, ClusterSpec)> {
    let model = stretched_tiny_model(8_192)?;
    let spec = ClusterSpec {
        model: model.path().to_owned(),
        ..spec(1, 2)
    };
    let spec = spec.set("limits.max_seq_len=8192").set("limits.max_iter_times=8000");
    Ok((model, spec.set("engine.kv_pool_tokens=65536")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_has_seen_every_token_that_is_counted() -> Result<()> {
    let (_model, spec) = endless()?;
    let mut watched = Watched::start(spec).await?;
    let mut body = long_stream(&watched, 8_000).await?.bytes_stream();
    let mut text = String::new();
    while last_usage(&text)?.generated < 3 {
        text.push_str(std::str::from_utf8(&body.next().await.context("it ended")??)?);
    }
    // Nothing more is generated, and what was on its way arrives.
    for node in ["decode-0", "decode-1"] {
        watched.cluster.process(node)?.signal(libc::SIGSTOP);
    }
    let deadline = Clock.now() + PATIENCE;
    let mut same = 0;
    while same < 5 {
        while let Ok(next) = tokio::time::timeout(Duration::from_millis(50), body.next()).await {
            text.push_str(std::str::from_utf8(&next.context("the answer ended")??)?);
            same = 0;
        }
        same = if counted(&watched).await? == last_usage(&text)? {
            same + 1
        } else {
            0
        };
        ensure!(
            Clock.now() < deadline,
            "{:?} counted, {:?} seen",
            counted(&watched).await?,
            last_usage(&text)?
        );
    }
    let seen = last_usage(&text)?;
    drop(body);
    // What is generated before the coordinator knows that the client is gone would still be handed to its answer.
    while watched.sum("baton_request_failure_total").await? == 0 {
        ensure!(Clock.now() < deadline, "nobody notices that the client is gone");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for node in ["decode-0", "decode-1"] {
        watched.cluster.process(node)?.signal(libc::SIGCONT);
    }
    while watched.sum("baton_num_requests_running").await? > 0 || watched.sum("baton_node_running_sequences").await? > 0
    {
        ensure!(Clock.now() < deadline + PATIENCE, "still running");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    ensure!(
        counted(&watched).await? == seen,
        "{:?} counted, {seen:?} seen",
        counted(&watched).await?
    );
    let page = watched.page("coordinator").await?;
    let cancelled = integration_tests::cluster::metric(&page, "baton_request_failure_total", &["err=\"cancelled\""]);
    ensure!(cancelled == Some(1.0), "{cancelled:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_of_requests_that_moved_count_once() -> Result<()> {
    let (_model, spec) = endless()?;
    let mut watched = Watched::start(spec).await?;
    let mut used = Used::default();
    for _ in 0..5 {
        let bodies = try_join_all((0..8).map(|_| long_stream(&watched, 1_500))).await?;
        let streams: Vec<_> = bodies
            .into_iter()
            .map(|answer| tokio::spawn(async move { anyhow::Ok(answer.text().await?) }))
            .collect();
        watched.cluster.kill("decode-0")?;
        for stream in streams {
            used.add(last_usage(&stream.await??)?);
        }
        if watched.sum("baton_request_migrations_total").await? > 0 {
            ensure!(used.generated % 1_500 == 0, "an answer was cut off: {used:?}");
            ensure!(
                counted(&watched).await? == used,
                "{:?} counted, {used:?} used",
                counted(&watched).await?
            );
            return Ok(());
        }
        // All was over before the node died: again.
        watched.start_node("decode-0")?;
        let deadline = Clock.now() + PATIENCE;
        while watched.sum("baton_nodes").await? < 3 {
            ensure!(Clock.now() < deadline, "the node did not come back");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    bail!("no request was moved in five rounds")
}
