//! Clients that read or send slowly, or not at all.

use std::time::Duration;

use anyhow::{Result, ensure};
use integration_tests::scene::{MODEL, Scene, pause, stretched_tiny_model};
use integration_tests::wire::{Answer, Wire, post_bytes};
use serde_json::json;

use crate::support::error_message;

/// Normal requests are answered as always while others misbehave.
fn others_are_served(scene: &Scene) -> Result<()> {
    for _ in 0..3 {
        scene.is_well()?;
    }
    Ok(())
}

#[test]
fn a_client_that_reads_byte_by_byte_gets_its_answer_and_blocks_nobody() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let body = json!({ "inputs": "a", "parameters": { "max_new_tokens": 400, "details": true } }).to_string();
    let expected = scene.post_raw("/generate_stream", &body)?;
    let mut wire = scene.wire()?;
    wire.send(post_bytes("/generate_stream", &body))?;
    let mut bytes = Vec::new();
    for _ in 0..3 {
        bytes.extend(wire.some(1)?);
        others_are_served(&scene)?;
        pause(Duration::from_millis(300));
    }
    bytes.extend(wire.some(1)?);
    wire.put_back(&bytes);
    let answer = wire.answer()?;
    ensure!(texts(&answer)? == texts(&expected)?, "{}", answer.text());
    scene.close()
}

fn texts(answer: &Answer) -> Result<Vec<String>> {
    Ok(answer
        .json_events()?
        .iter()
        .map(|event| event["token"]["text"].to_string())
        .collect())
}

#[test]
fn a_client_that_stops_reading_is_given_up() -> Result<()> {
    let model = stretched_tiny_model(131_072)?;
    let settings = [
        "limits.max_seq_len=131072",
        "limits.max_iter_times=131072",
        "engine.kv_pool_tokens=131072",
        "coordinator.client_stall_timeout_ms=1000",
        // So that it is the silence that counts, and not how far the client is behind.
        "coordinator.stream_buffer_tokens=131072",
    ];
    let scene = Scene::start(model.path(), &settings)?;
    let [_, before] = scene.rows()?;
    let mut wire = scene.wire()?;
    // Small buffers on this side, so that the server notices soon.
    socket2::SockRef::from(wire.stream()).set_recv_buffer_size(16_384)?;
    let body = json!({ "model": MODEL, "prompt": "a", "max_tokens": 131_000, "ignore_eos": true, "logprobs": 5, "stream": true });
    wire.send(post_bytes("/v1/completions", body.to_string()))?;
    scene.until("the request runs", || Ok(scene.held()? == 1.0))?;
    others_are_served(&scene)?;
    scene.until("the request is given up", || Ok(scene.held()? == 0.0))?;
    scene.wait_idle()?;
    let [_, after] = scene.rows()?;
    ensure!(
        after - before < 100_000.0,
        "{} rows were computed for nobody",
        after - before
    );
    // What was on its way arrives, and then an end that does not look like one.
    socket2::SockRef::from(wire.stream()).set_recv_buffer_size(4 << 20)?;
    let rest = wire.rest()?;
    ensure!(rest.starts_with(b"HTTP/1.1 200 OK"));
    ensure!(!rest.ends_with(b"0\r\n\r\n"), "the stream must not look complete");
    scene.close()
}

#[test]
fn a_client_that_waits_long_for_its_answer_is_not_given_up() -> Result<()> {
    let model = stretched_tiny_model(16_384)?;
    let settings = [
        "limits.max_seq_len=16384",
        "limits.max_iter_times=16384",
        "coordinator.client_stall_timeout_ms=1000",
    ];
    let scene = Scene::start(model.path(), &settings)?;
    let body = json!({ "prompt": "a", "max_tokens": 8_000, "ignore_eos": true });
    let usage = scene.complete(body)?.ok()?["usage"].clone();
    ensure!(usage["completion_tokens"] == 8_000, "{usage}");
    scene.close()
}

/// A server that waits three seconds at most for what a client has begun.
fn impatient() -> Result<Scene> {
    Scene::tiny(&["coordinator.request_head_timeout_ms=3000"])
}

#[test]
fn bodies_that_do_not_arrive_are_408() -> Result<()> {
    let scene = impatient()?;
    let mut wires = Vec::new();
    for path in ["/generate", "/v1/completions"].repeat(20) {
        let mut wire = scene.wire()?;
        let head = format!("POST {path} HTTP/1.1\r\nhost: t\r\ncontent-length: 1000\r\n\r\n");
        wire.send(format!("{head}{{\"inputs\":"))?;
        wires.push((path, wire));
    }
    others_are_served(&scene)?;
    for (path, mut wire) in wires {
        let word = if path.starts_with("/v1/") {
            "BadRequestError"
        } else {
            "validation"
        };
        error_message(path, &wire.answer()?, 408, word)?;
        ensure!(wire.rest()?.is_empty(), "the connection ends");
    }
    // One byte at a time is not fast enough either.
    let mut wire = scene.wire()?;
    wire.send("POST /generate HTTP/1.1\r\nhost: t\r\ncontent-length: 1000\r\n\r\n")?;
    let mut sent = 0;
    while sent < 999 && !wire.has_answer()? && wire.send_if_open(b"x") {
        sent += 1;
        pause(Duration::from_millis(10));
    }
    ensure!(
        sent < 999,
        "a client that takes ten seconds for its body was waited for"
    );
    error_message("/generate", &wire.answer()?, 408, "validation")?;
    scene.close()
}

#[test]
fn connections_that_say_nothing_or_half_a_head_are_ended_and_block_nobody() -> Result<()> {
    let scene = impatient()?;
    let mut wires: Vec<Wire> = Vec::new();
    for index in 0..120 {
        let mut wire = scene.wire()?;
        match index % 3 {
            0 => {}
            1 => wire.send("POST /generate HTTP/1.1\r\nhost: t\r\nx-half: ")?,
            _ => wire.send("P")?,
        }
        wires.push(wire);
    }
    others_are_served(&scene)?;
    for mut wire in wires {
        let answer = String::from_utf8_lossy(&wire.rest()?).into_owned();
        ensure!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
    }
    scene.close()
}

#[test]
fn bodies_that_end_early_are_no_requests() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    scene.wait_idle()?;
    let rows = scene.rows()?;
    for _ in 0..20 {
        let mut wire = scene.wire()?;
        wire.send("POST /generate HTTP/1.1\r\nhost: t\r\ncontent-length: 15\r\n\r\n{\"inputs\":\"a\"}")?;
        wire.close_sending()?;
        let answer = String::from_utf8_lossy(&wire.rest()?).into_owned();
        ensure!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    ensure!(scene.rows()? == rows, "half a body was worked on");
    scene.close()
}
