//! Clients that go away: whatever their request was doing, it leaves both nodes, and all blocks come back.

use std::net::Shutdown;
use std::time::Duration;

use anyhow::{Result, ensure};
use integration_tests::scene::{MODEL, Scene, pause, stretched_tiny_model};
use integration_tests::wire::{Wire, post_bytes};
use serde_json::{Value, json};

/// Positions of the model: an answer of this length takes far longer than any wait of these tests.
const POSITIONS: usize = 131_072;

fn scene(more: &[&str]) -> Result<Scene> {
    let model = stretched_tiny_model(POSITIONS)?;
    let mut settings = vec![
        "limits.max_seq_len=131072",
        "limits.max_input_token_len=131072",
        "limits.max_iter_times=131072",
        "engine.kv_pool_tokens=262144",
    ];
    settings.extend(more);
    Scene::start(model.path(), &settings)
}

fn long_answer(stream: bool) -> Value {
    json!({ "model": MODEL, "prompt": "a", "max_tokens": 131_000, "ignore_eos": true, "stream": stream })
}

/// How a client leaves.
#[derive(Clone, Copy, Debug)]
enum Goodbye {
    Close,
    CloseOneSide,
    Reset,
}

/// Leaves. The rest of the connection is returned where it is still there.
fn leave(wire: Wire, goodbye: Goodbye) -> Result<Option<Wire>> {
    match goodbye {
        Goodbye::Close => Ok(None),
        Goodbye::CloseOneSide => {
            wire.stream().shutdown(Shutdown::Write)?;
            Ok(Some(wire))
        }
        Goodbye::Reset => {
            socket2::SockRef::from(wire.stream()).set_linger(Some(Duration::ZERO))?;
            Ok(None)
        }
    }
}

#[test]
fn a_client_that_leaves_during_the_answer_frees_it() -> Result<()> {
    let scene = scene(&[])?;
    for goodbye in [Goodbye::Close, Goodbye::CloseOneSide, Goodbye::Reset] {
        for stream in [false, true] {
            let cancelled = scene.metric("tgi_request_failure", &["err=\"cancelled\""])?;
            let [_, before] = scene.rows()?;
            let mut wire = scene.wire()?;
            wire.send(post_bytes("/v1/completions", long_answer(stream).to_string()))?;
            scene.until("the decode node works", || Ok(scene.rows()?[1] > before + 20.0))?;
            let rest = leave(wire, goodbye)?;
            scene.wait_quiet(&format!("{goodbye:?}, stream {stream}"))?;
            let [_, after] = scene.rows()?;
            ensure!(
                after - before < 100_000.0,
                "{goodbye:?}, stream {stream}: {} rows were computed",
                after - before
            );
            let counted = scene.metric("tgi_request_failure", &["err=\"cancelled\""])? - cancelled;
            ensure!(
                counted == 1.0,
                "{goodbye:?}, stream {stream}: {counted} cancelled requests counted"
            );
            drop(rest);
        }
    }
    scene.close()
}

#[test]
fn a_client_that_leaves_during_the_prefill_frees_it() -> Result<()> {
    let scene = scene(&["engine.prefill_chunk_tokens=16"])?;
    let prompt = vec![5; 100_000];
    for stream in [false, true] {
        let [before, decoded] = scene.rows()?;
        let mut wire = scene.wire()?;
        let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": 1_000, "stream": stream });
        wire.send(post_bytes("/v1/completions", body.to_string()))?;
        scene.until("the prefill node works", || Ok(scene.rows()?[0] > before + 100.0))?;
        drop(wire);
        scene.wait_quiet("prefill")?;
        let [after, decoded_after] = scene.rows()?;
        ensure!(
            after - before < 90_000.0,
            "{} rows were computed for nobody",
            after - before
        );
        ensure!(decoded_after == decoded, "the decode node has worked");
    }
    scene.close()
}

#[test]
fn a_client_that_leaves_the_queue_is_forgotten() -> Result<()> {
    // One sequence is all that a node takes, so the next one waits.
    let scene = scene(&["engine.max_num_seqs=1"])?;
    let mut running = scene.wire()?;
    running.send(post_bytes("/v1/completions", long_answer(true).to_string()))?;
    ensure!(running.head()?.status == 200);
    let waiting = |count: f64| {
        scene.until("the queue", || {
            Ok(scene.metric("baton_num_requests_waiting", &[])? == count)
        })
    };
    for stream in [false, true] {
        let mut wires = Vec::new();
        for _ in 0..3 {
            let mut wire = scene.wire()?;
            wire.send(post_bytes("/v1/completions", long_answer(stream).to_string()))?;
            wires.push(wire);
        }
        waiting(3.0)?;
        let [prefilled, _] = scene.rows()?;
        wires.pop();
        waiting(2.0)?;
        drop(wires);
        waiting(0.0)?;
        ensure!(scene.rows()?[0] == prefilled, "a waiting request was worked on");
        ensure!(scene.metric("baton_num_requests_running", &[])? == 1.0);
    }
    ensure!(!running.some(1_000)?.is_empty(), "the running request goes on");
    drop(running);
    scene.wait_quiet("running")?;
    scene.close()
}

#[test]
fn clients_that_leave_at_once_and_at_any_moment_free_everything() -> Result<()> {
    let scene = scene(&["engine.kv_pool_tokens=1048576", "engine.max_num_seqs=16"])?;
    let paths = ["/generate", "/generate_stream", "/", "/v1/completions"];
    for round in 0..4_u64 {
        let mut wires = Vec::new();
        for index in 0..24 {
            let mut wire = scene.wire()?;
            let mut body = long_answer(index % 2 == 0);
            body["inputs"] = json!("a");
            body["max_tokens"] = json!(40_000);
            body["parameters"] = json!({ "max_new_tokens": 40_000 });
            wire.send(post_bytes(paths[index % paths.len()], body.to_string()))?;
            wires.push(wire);
            pause(Duration::from_millis(round));
        }
        drop(wires);
        scene.wait_quiet("storm")?;
    }
    scene.close()
}

#[test]
fn a_client_that_leaves_amid_pipelined_requests_frees_the_running_one() -> Result<()> {
    let scene = scene(&[])?;
    let [before, _] = scene.rows()?;
    let mut wire = scene.wire()?;
    wire.send(post_bytes("/v1/completions", long_answer(false).to_string()).repeat(4))?;
    scene.until("the first request runs", || Ok(scene.held()? == 1.0))?;
    scene.until("the decode node works", || Ok(scene.rows()?[1] > 100.0))?;
    drop(wire);
    scene.wait_quiet("pipeline")?;
    ensure!(
        scene.rows()?[0] - before == 1.0,
        "the requests behind it were never begun"
    );
    scene.close()
}
