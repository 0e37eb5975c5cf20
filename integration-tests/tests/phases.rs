//! Where the time of requests went, as real processes tell it: in metrics, in headers and on the admin plane.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use integration_tests::cluster::{Cluster, metric, metric_sum};
use integration_tests::trial::{begin, spec};
use reqwest::Client;
use serde_json::{Value, json};

const NAMES: [&str; 7] = [
    "queue",
    "prefill_queue",
    "prefill",
    "exposed_transfer",
    "decode_queue",
    "decode",
    "client_write",
];

/// The entries of a `Server-Timing` value, in milliseconds.
fn entries(value: &str) -> Result<BTreeMap<String, f64>> {
    let entry = |part: &str| -> Result<(String, f64)> {
        let (name, time) = part.trim().split_once(";dur=").with_context(|| format!("{part:?}"))?;
        Ok((name.to_owned(), time.parse()?))
    };
    value.split(',').map(entry).collect()
}

/// What each request is asked for, so that every phase is there: a prompt of some chunks, and some tokens.
fn body(stream: bool) -> Value {
    json!({ "model": "tiny", "prompt": "once upon a time ".repeat(12), "max_tokens": 40, "temperature": 0, "stream": stream })
}

async fn ask(client: &Client, cluster: &Cluster, stream: bool) -> Result<(Option<String>, String, String)> {
    let request = client
        .post(format!("{}/v1/completions", cluster.url()))
        .header("x-baton-phases", "1")
        .json(&body(stream));
    let answer = request.send().await?.error_for_status()?;
    let header = |name: &str| Some(answer.headers().get(name)?.to_str().ok()?.to_owned());
    let (timing, id) = (header("server-timing"), header("x-request-id").context("no id")?);
    Ok((timing, id, answer.text().await?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn phases_add_up_to_the_time_of_every_request() -> Result<()> {
    let (cluster, client, known) = begin(spec(1, 1), 71).await?;
    known.burst(&client, &cluster.url(), 40).await?.all_exact()?;
    let (timing, id, _) = ask(&client, &cluster, false).await?;
    let told = entries(&timing.context("no server-timing")?)?;
    let sum: f64 = NAMES.iter().filter_map(|name| told.get(*name)).sum();
    // What comes behind the last token is not known yet when the header is written.
    ensure!(told.len() == 8 && !told.contains_key("client_write"), "{told:?}");
    ensure!(
        (told["total"] - sum).abs() < 20.0 && sum <= told["total"] + 0.01,
        "{told:?}"
    );
    for name in ["queue", "prefill", "exposed_transfer", "decode"] {
        ensure!(told[name] > 0.0, "nothing for {name}: {told:?}");
    }
    let (none, _, text) = ask(&client, &cluster, true).await?;
    ensure!(
        none.is_none(),
        "a stream's header is written before the time has passed"
    );
    let comment = text.lines().find_map(|line| line.strip_prefix(": server-timing: "));
    ensure!(entries(comment.context("no comment")?)?.len() == 8, "{text}");

    let page = cluster.metrics().await?;
    let phase = |name: &str, what: &str| {
        let series = format!("baton_request_phase_seconds_{what}");
        metric(&page, &series, &[&format!("phase=\"{name}\"")]).with_context(|| format!("no {series} of {name}"))
    };
    let count = metric_sum(&page, "baton_e2e_request_latency_seconds_count");
    let mut sum = 0.0;
    for name in NAMES {
        ensure!(
            phase(name, "count")? == count,
            "{name}: {} of {count}",
            phase(name, "count")?
        );
        sum += phase(name, "sum")?;
    }
    let whole = metric_sum(&page, "baton_e2e_request_latency_seconds_sum");
    ensure!(
        count >= 42.0 && (sum - whole).abs() < 0.001 * count,
        "{sum} of {whole} s in {count} requests"
    );

    let (status, shown) = cluster.admin(0, "GET", &format!("/debug/decisions/{id}"), "").await?;
    ensure!(status == 200 && shown["request"]["outcome"] == "done", "{shown}");
    ensure!(
        shown["request"]["generated_tokens"] == 40 && shown["request"]["attempts"] == 1,
        "{shown}"
    );
    ensure!(shown["request"]["phases"]["decode_us"].as_u64() > Some(0), "{shown}");
    let (status, shown) = cluster.admin(0, "GET", "/debug/requests?most=5", "").await?;
    let of = |list: &str| shown[list].as_array().map(Vec::len);
    ensure!(
        status == 200 && (of("running"), of("ended")) == (Some(0), Some(5)),
        "{shown}"
    );
    ensure!(shown["ended"][1]["request"] == json!(id), "the last but one: {shown}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn phases_are_told_only_where_the_header_says_so() -> Result<()> {
    let (cluster, client, _known) = begin(spec(1, 1), 72).await?;
    for (value, status, told) in [("0", 200, false), ("true", 200, true), ("maybe", 400, false)] {
        let url = format!("{}/v1/completions", cluster.url());
        let request = client.post(url).header("x-baton-phases", value).json(&body(false));
        let answer = request.send().await?;
        ensure!(answer.status().as_u16() == status, "{value}: {}", answer.status());
        ensure!(answer.headers().contains_key("server-timing") == told, "{value}");
    }
    Ok(())
}
