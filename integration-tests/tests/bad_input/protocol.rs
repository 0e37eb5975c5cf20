//! HTTP itself: methods, paths, versions, headers, pipelines, what is not HTTP at all.

use anyhow::{Context, Result, ensure};
use integration_tests::scene::Scene;
use integration_tests::wire::{Wire, post_bytes, request_bytes};
use serde_json::json;

use crate::support::{error_message, generating, without_work};

#[test]
fn wrong_methods_are_405_and_unknown_paths_404() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let posts = ["/generate", "/generate_stream", "/invocations", "/v1/completions"];
    let gets = [
        "/health",
        "/ping",
        "/info",
        "/metrics",
        "/v1/models",
        "/v1/models/tested",
    ];
    let wrong = [
        (&posts[..], ["GET", "PUT", "DELETE", "PATCH"], "POST, OPTIONS"),
        (&gets[..], ["POST", "PUT", "DELETE", "PATCH"], "GET, HEAD, OPTIONS"),
    ];
    without_work(&scene, || {
        for (paths, methods, allow) in wrong {
            for (path, method) in paths.iter().flat_map(|path| methods.map(|method| (path, method))) {
                let word = if path.starts_with("/v1/") {
                    "BadRequestError"
                } else {
                    "validation"
                };
                let answer = scene.exchange(request_bytes(method, path, "", "{\"inputs\":\"a\"}"))?;
                error_message(path, &answer, 405, word).with_context(|| method.to_owned())?;
                ensure!(
                    answer.header("allow") == Some(allow),
                    "{method} {path}: {:?}",
                    answer.headers
                );
            }
        }
        for path in [
            "/generate/",
            "/Generate",
            "/nothing",
            "//generate",
            "/generate%00",
            "/../etc/passwd",
            "/generate_stream/x",
            "/v2/x",
        ] {
            error_message(path, &scene.post(path, &json!({ "inputs": "a" }))?, 404, "validation")?;
        }
        for path in [
            "/v1",
            "/v1/",
            "/v1/nothing",
            "/v1/completions/",
            "/v1/embeddings",
            "/v1/models/other",
        ] {
            error_message(path, &scene.get(path)?, 404, "NotFoundError")?;
        }
        let path = "/v1/embeddings";
        let message = error_message(path, &scene.post(path, &json!({}))?, 404, "NotFoundError")?;
        ensure!(message == format!("not supported yet: {path}"), "{message}");
        Ok(())
    })?;
    scene.close()
}

#[test]
fn request_ids_come_back_and_any_origin_may_ask() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    for (path, body) in generating() {
        let headers = "x-request-id: mine-7\r\norigin: http://elsewhere\r\n";
        let answer = scene.exchange(request_bytes("POST", path, headers, body.to_string()))?;
        ensure!(
            answer.status == 200 && answer.header("x-request-id") == Some("mine-7"),
            "{path}: {:?}",
            answer.headers
        );
        ensure!(
            answer.header("access-control-allow-origin") == Some("*"),
            "{path}: {:?}",
            answer.headers
        );
        let headers = "origin: http://elsewhere\r\naccess-control-request-method: POST\r\naccess-control-request-headers: content-type\r\n";
        let preflight = scene.exchange(format!("OPTIONS {path} HTTP/1.1\r\nhost: t\r\n{headers}\r\n"))?;
        ensure!(
            preflight.status == 204 && preflight.body.is_empty(),
            "{path}: {}",
            preflight.status
        );
        for (name, part) in [
            ("access-control-allow-origin", "*"),
            ("access-control-allow-methods", "POST"),
            ("access-control-allow-headers", "content-type"),
        ] {
            ensure!(
                preflight.header(name).is_some_and(|value| value.contains(part)),
                "{path} {name}: {:?}",
                preflight.headers
            );
        }
    }
    let echoed = |id: &str| {
        let answer = scene.exchange(request_bytes(
            "POST",
            "/generate",
            &format!("x-request-id: {id}\r\n"),
            "{}",
        ))?;
        anyhow::Ok(answer.header("x-request-id").unwrap_or_default().to_owned())
    };
    ensure!(echoed("wrong requests too")? == "wrong requests too");
    let made = [echoed("")?, echoed("")?, echoed(&"x".repeat(5_000))?];
    ensure!(made.iter().all(|id| id.len() == 32) && made[0] != made[1], "{made:?}");
    scene.close()
}

#[test]
fn pipelined_requests_are_answered_in_order() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let body = |text: &str| json!({ "inputs": text, "parameters": { "max_new_tokens": 5, "details": true } });
    let texts = ["one", "", "two", "three", "one"];
    let alone: Vec<_> = texts
        .iter()
        .map(|text| scene.post("/generate", &body(text)))
        .collect::<Result<_>>()?;
    let mut wire = scene.wire()?;
    let all: Vec<u8> = texts
        .iter()
        .flat_map(|text| post_bytes("/generate", body(text).to_string()))
        .collect();
    wire.send(&all)?;
    for (text, alone) in texts.iter().zip(&alone) {
        let answer = wire.answer()?;
        ensure!(
            (answer.status, without_seed(&answer.text())) == (alone.status, without_seed(&alone.text())),
            "{text}: {}",
            answer.text()
        );
    }
    // Streams too, and the connection goes on.
    let stream = post_bytes("/generate_stream", body("one").to_string());
    wire.send([stream.clone(), request_bytes("GET", "/health", "", ""), stream].concat())?;
    let (first, health, second) = (wire.answer()?, wire.answer()?, wire.answer()?);
    ensure!(health.status == 200 && first.events()?.len() == 5 && second.events()?.len() == 5);
    // Byte by byte, as the slowest of networks would bring it.
    for byte in post_bytes("/generate", body("one").to_string()) {
        wire.send([byte])?;
    }
    ensure!(without_seed(&wire.answer()?.text()) == without_seed(&alone[0].text()));
    scene.close()
}

/// An answer without its drawn seed, which differs between equal requests.
fn without_seed(text: &str) -> String {
    match (text.find("\"seed\":"), text) {
        (Some(at), text) => {
            let rest = text[at + 7..].trim_start_matches(|c: char| c.is_ascii_digit());
            format!("{}{rest}", &text[..at])
        }
        (None, text) => text.to_owned(),
    }
}

#[test]
fn http_1_0_gets_bodies_that_end_with_the_connection() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    for (path, body) in generating() {
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        let mut wire = scene.wire()?;
        wire.send([head.as_bytes(), body.as_bytes()].concat())?;
        let mut answer = wire.head()?;
        ensure!(answer.status == 200, "{path}: {}", answer.status);
        ensure!(
            answer.header("transfer-encoding").is_none(),
            "{path}: HTTP/1.0 has no chunks: {:?}",
            answer.headers
        );
        answer.body = wire.rest()?;
        if answer
            .header("content-type")
            .is_some_and(|kind| kind.starts_with("text/event-stream"))
        {
            ensure!(answer.events()?.len() > 1, "{path}: {}", answer.text());
        } else {
            answer.ok()?;
        }
    }
    // Without a host, and with the version's way to keep a connection.
    let mut wire = scene.wire()?;
    for _ in 0..2 {
        wire.send("GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")?;
        ensure!(wire.answer()?.status == 200);
    }
    scene.close()
}

#[test]
fn a_client_that_asks_first_is_told_to_go_on() -> Result<()> {
    let scene = Scene::tiny(&["limits.max_body_bytes=8192"])?;
    let body = json!({ "inputs": "a" }).to_string();
    let head = |length: usize| {
        format!("POST /generate HTTP/1.1\r\nhost: t\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n")
    };
    let mut wire = scene.wire()?;
    wire.send(head(body.len()))?;
    ensure!(wire.answer()?.status == 100);
    wire.send(&body)?;
    ensure!(wire.answer()?.ok()? == scene.post_raw("/generate", &body)?.ok()?);
    let mut wire = scene.wire()?;
    wire.send(head(1 << 40))?;
    let first = wire.answer()?;
    let answer = if first.status == 100 { wire.answer()? } else { first };
    error_message("/generate", &answer, 413, "validation")?;
    scene.close()
}

/// Sends bytes, says that nothing follows, and returns what comes back.
fn last_words(mut wire: Wire, bytes: &[u8]) -> Result<String> {
    // The server may close before everything is sent.
    if wire.send_if_open(bytes) {
        let _closed = wire.close_sending().is_ok();
    }
    Ok(String::from_utf8_lossy(&wire.rest()?).into_owned())
}

#[test]
fn heads_that_are_too_long_or_no_heads_are_refused() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let with = |line: &str| format!("POST /generate HTTP/1.1\r\nhost: t\r\n{line}\r\n").into_bytes();
    let garbage: Vec<(&str, Vec<u8>)> = vec![
        ("a very long header", with(&format!("x: {}\r\n", "y".repeat(1 << 20)))),
        ("a very long name", with(&format!("{}: y\r\n", "x".repeat(1 << 20)))),
        ("very many headers", with(&"x: y\r\n".repeat(20_000))),
        (
            "a very long path",
            format!("GET /{} HTTP/1.1\r\nhost: t\r\n\r\n", "x".repeat(1 << 20)).into_bytes(),
        ),
        (
            "a very long method",
            format!("{} / HTTP/1.1\r\nhost: t\r\n\r\n", "X".repeat(1 << 20)).into_bytes(),
        ),
        ("no line ends", vec![b'x'; 1 << 20]),
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec()),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec()),
        ("HTTP/9.9", b"GET / HTTP/9.9\r\nhost: t\r\n\r\n".to_vec()),
        ("no version", b"GET /\r\n\r\n".to_vec()),
        ("half a request line", b"POST /gen".to_vec()),
        ("zeroes", vec![0; 1_000]),
        ("a length that is no number", with("content-length: abc\r\n")),
        ("a negative length", with("content-length: -5\r\n")),
        ("two lengths", with("content-length: 5\r\ncontent-length: 6\r\n")),
        (
            "a length and chunks",
            with("content-length: 5\r\ntransfer-encoding: chunked\r\n"),
        ),
        ("an unknown encoding", with("transfer-encoding: gzip\r\n")),
        ("a name with a blank", with("x y: z\r\n")),
        ("a NUL in a header", with("x: \0\r\n")),
        ("a folded header", with("x: y\r\n z\r\n")),
    ];
    without_work(&scene, || {
        for (what, bytes) in &garbage {
            let answer = last_words(scene.wire()?, bytes)?;
            ensure!(
                answer.is_empty() || answer.starts_with("HTTP/1.1 4"),
                "{what}: {answer}"
            );
            ensure!(answer.matches("HTTP/1.1 ").count() <= 1, "{what}: {answer}");
            ensure!(scene.get("/health")?.status == 200, "{what}");
        }
        Ok(())
    })?;
    // What docs/api.md says of answers that are the HTTP library's own.
    let answer = last_words(scene.wire()?, b"GARBAGE\r\n\r\n")?;
    let library = "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n";
    ensure!(answer.starts_with(library), "{answer}");
    // A long head within the server's bounds is fine.
    let headers = format!("x-long: {}\r\n", "y".repeat(30_000));
    ensure!(
        scene
            .exchange(request_bytes("POST", "/generate", &headers, "{\"inputs\":\"a\"}"))?
            .status
            == 200
    );
    scene.close()
}

#[test]
fn keys_open_everything_but_probes() -> Result<()> {
    let key = "0123456789abcdef0123";
    let scene = Scene::tiny(&[])?;
    ensure!(
        scene
            .exchange(request_bytes("GET", "/info", "authorization: Bearer\r\n", ""))?
            .status
            == 200
    );
    scene.close()?;
    // A scene asks without a key, so this one is looked at from outside only.
    let scene = Scene::unwatched(&[&format!("coordinator.api_keys=[\"{key}\"]")])?;
    for headers in [
        "",
        "authorization: Bearer\r\n",
        "authorization: Bearer wrong\r\n",
        &format!("authorization: Basic {key}\r\n"),
    ] {
        for (path, body) in generating() {
            let answer = scene.exchange(request_bytes("POST", path, headers, body.to_string()))?;
            // OpenAI's shape on every path.
            let message = error_message("/v1/x", &answer, 401, "AuthenticationError")?;
            ensure!(!message.contains(key), "{message}");
        }
    }
    ensure!(scene.rows()? == [0.0, 0.0]);
    for (path, body) in generating() {
        let headers = format!("authorization: Bearer {key}\r\n");
        ensure!(
            scene
                .exchange(request_bytes("POST", path, &headers, body.to_string()))?
                .status
                == 200,
            "{path}"
        );
    }
    for path in ["/health", "/ping", "/metrics"] {
        ensure!(scene.get(path)?.status == 200, "{path}");
    }
    ensure!(!scene.cluster.logs().contains(key), "a key is logged");
    scene.no_complaints()
}
