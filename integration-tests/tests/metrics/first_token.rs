//! The time to first token means the same in the histogram, in the answer and to the client.

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use integration_tests::cluster::metric_sum;
use integration_tests::trial::spec;
use runtime::clock::Clock;
use serde_json::json;

use super::watched::Watched;

/// Requests, one after the other.
const REQUESTS: usize = 30;

/// What the server says of a stream, and what the client saw, in milliseconds.
struct Told {
    ttft: f64,
    /// The phases that are over when the first token comes.
    before: f64,
    total: f64,
    seen: f64,
}

async fn ask(watched: &Watched, number: usize) -> Result<Told> {
    let body = json!({
        "model": "tiny", "prompt": "once upon a time ".repeat(1 + number % 12), "max_tokens": 12, "temperature": 0, "stream": true,
    });
    let sent = Clock.now();
    let request = watched.client.post(format!("{}/v1/completions", watched.cluster.url()));
    let answer = request.header("x-baton-phases", "1").json(&body).send().await?;
    let (mut body, mut text, mut seen) = (answer.error_for_status()?.bytes_stream(), String::new(), None);
    while let Some(bytes) = body.next().await {
        text.push_str(std::str::from_utf8(&bytes?)?);
        if text.contains("data:") {
            seen.get_or_insert_with(|| (Clock.now() - sent).as_secs_f64() * 1e3);
        }
    }
    let line = text.lines().find_map(|line| line.strip_prefix(": server-timing: "));
    let told = load_generator::core::timing::parse(line.with_context(|| format!("nothing told: {text}"))?);
    let of = |name: &str| told.iter().find(|(other, _)| other == name).map(|(_, ms)| *ms);
    let get = |name: &str| of(name).with_context(|| format!("no {name}: {told:?}"));
    Ok(Told {
        ttft: get("ttft")?,
        before: get("queue")? + get("prefill_queue")? + get("prefill")?,
        total: get("total")?,
        seen: seen.context("no event")?,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_histogram_is_what_answers_tell_and_no_client_sees_a_token_earlier() -> Result<()> {
    let watched = Watched::start(spec(1, 1)).await?;
    let mut sum = 0.0;
    for number in 0..REQUESTS {
        let told = ask(&watched, number).await?;
        // Numbers are told with three digits behind the point; first tokens leave when the prefill is over.
        ensure!(
            told.before <= told.ttft + 0.01,
            "a first token before its prefill: {} of {}",
            told.ttft,
            told.before
        );
        ensure!(
            told.ttft <= told.total + 0.01 && told.ttft <= told.seen + 0.01,
            "{} of {}, {} seen",
            told.ttft,
            told.total,
            told.seen
        );
        sum += told.ttft / 1e3;
    }
    let page = watched.page("coordinator").await?;
    for name in ["baton_time_to_first_token_seconds", "time_to_first_token_seconds"] {
        ensure!(metric_sum(&page, &format!("{name}_count")) == REQUESTS as f64);
        let shown = metric_sum(&page, &format!("{name}_sum"));
        ensure!(
            (shown - sum).abs() < 1e-6 * REQUESTS as f64,
            "{name}: {shown} s shown, {sum} s told"
        );
    }
    Ok(())
}
