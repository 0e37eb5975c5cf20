//! Too many requests, and no node to work on them.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use integration_tests::scene::{MODEL, Scene, stretched_tiny_model};
use integration_tests::wire::post_bytes;
use serde_json::json;

use crate::support::{error_message, generating};

#[test]
fn too_many_requests_are_429_and_told_when_to_come_back() -> Result<()> {
    let model = stretched_tiny_model(131_072)?;
    let settings = [
        "limits.max_seq_len=131072",
        "limits.max_iter_times=131072",
        "engine.kv_pool_tokens=262144",
        "limits.max_concurrent_requests=2",
    ];
    let scene = Scene::start(model.path(), &settings)?;
    let body =
        json!({ "model": MODEL, "prompt": "a", "max_tokens": 100_000, "ignore_eos": true, "stream": true }).to_string();
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut wire = scene.wire()?;
        wire.send(post_bytes("/v1/completions", &body))?;
        ensure!(wire.head()?.status == 200);
        held.push(wire);
    }
    for (path, body) in generating() {
        let answer = scene.post(path, &body)?;
        let word = if path.starts_with("/v1/") {
            "rate_limit_exceeded"
        } else {
            "overloaded"
        };
        error_message(path, &answer, 429, word)?;
        let after = answer.header("retry-after").and_then(|value| value.parse::<u32>().ok());
        ensure!(
            after.is_some_and(|seconds| seconds >= 1),
            "{path}: {:?}",
            answer.headers
        );
    }
    ensure!(scene.metric("tgi_request_failure", &["err=\"overloaded\""])? == 6.0);
    // Wrong requests are still told what is wrong, and probes are answered.
    ensure!(scene.post("/generate", &json!({ "inputs": 5 }))?.status == 422);
    ensure!(scene.get("/health")?.status == 200);
    drop(held);
    scene.wait_idle()?;
    scene.close()
}

#[test]
fn without_a_node_it_is_503_until_one_is_back() -> Result<()> {
    // A node that was here a moment ago is waited for, as long as for any other place.
    let mut scene = Scene::tiny(&["coordinator.queue_timeout_ms=1000"])?;
    let status = scene.cluster.terminate("decode-0", Duration::from_secs(20))?;
    ensure!(status.success(), "{status}");
    scene.until("the coordinator knows", || Ok(scene.get("/health")?.status == 503))?;
    for path in ["/health", "/ping", "/"] {
        let message = error_message(path, &scene.get(path)?, 503, "healthcheck")?;
        ensure!(message == "unhealthy", "{message}");
    }
    for (path, body) in generating() {
        let answer = scene.post(path, &body)?;
        let word = if path.starts_with("/v1/") {
            "ServiceUnavailableError"
        } else {
            "unavailable"
        };
        error_message(path, &answer, 503, word)?;
        answer
            .header("retry-after")
            .with_context(|| format!("{path}: {:?}", answer.headers))?;
    }
    ensure!(
        scene.post("/generate", &json!({ "inputs": 5 }))?.status == 422,
        "wrong requests are still told what is wrong"
    );
    scene.start_decode()?;
    scene.until("the cluster serves again", || Ok(scene.get("/health")?.status == 200))?;
    scene.close()
}
