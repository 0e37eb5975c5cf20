//! Requests and server-sent events.

use anyhow::{Context, Result, bail, ensure};
use futures_util::StreamExt;
use reqwest::{Client, Response};
use serde_json::Value;

/// Posts JSON and returns status and body.
pub async fn post(client: &Client, url: &str, body: &Value) -> Result<(u16, Value)> {
    let answer = client.post(url).json(body).send().await?;
    let status = answer.status().as_u16();
    let text = answer.text().await?;
    let value = serde_json::from_str(&text).with_context(|| format!("status {status}, not JSON: {text}"))?;
    Ok((status, value))
}

/// Posts JSON and returns the body of a 200.
pub async fn post_ok(client: &Client, url: &str, body: &Value) -> Result<Value> {
    let (status, value) = post(client, url, body).await?;
    ensure!(status == 200, "status {status}: {value}");
    Ok(value)
}

/// Posts JSON and returns the data of all server-sent events of a 200, in order. Comments are skipped.
pub async fn post_events(client: &Client, url: &str, body: &Value) -> Result<Vec<String>> {
    let answer = client.post(url).json(body).send().await?;
    let status = answer.status().as_u16();
    if status != 200 {
        bail!("status {status}: {}", answer.text().await?);
    }
    let kind = answer
        .headers()
        .get("content-type")
        .and_then(|v| v.to_str().ok())
        .unwrap_or_default()
        .to_owned();
    ensure!(kind.starts_with("text/event-stream"), "content type {kind}");
    events(answer).await
}

/// The data of all events until the stream ends.
pub async fn events(answer: Response) -> Result<Vec<String>> {
    let mut bytes = Vec::new();
    let mut body = answer.bytes_stream();
    while let Some(chunk) = body.next().await {
        bytes.extend_from_slice(&chunk?);
    }
    let text = String::from_utf8(bytes).context("the event stream is not UTF-8")?;
    ensure!(
        text.is_empty() || text.ends_with("\n\n"),
        "the last event is not complete: {text:?}"
    );
    let mut out = Vec::new();
    for block in text.split("\n\n").filter(|block| !block.is_empty()) {
        let mut data = Vec::new();
        for line in block.lines() {
            match line.strip_prefix("data:") {
                Some(rest) => data.push(rest.strip_prefix(' ').unwrap_or(rest)),
                None => ensure!(line.starts_with(':'), "unexpected line in an event: {line:?}"),
            }
        }
        if !data.is_empty() {
            out.push(data.join("\n"));
        }
    }
    Ok(out)
}

/// Parses every event as JSON.
pub fn json_events(events: &[String]) -> Result<Vec<Value>> {
    events
        .iter()
        .map(|event| serde_json::from_str(event).with_context(|| format!("not JSON: {event}")))
        .collect()
}
