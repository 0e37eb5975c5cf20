//! Bodies that are not JSON, not UTF-8, not objects, too large, or oddly sent.

use anyhow::{Context, Result, ensure};
use integration_tests::scene::{MODEL, Scene};
use integration_tests::wire::{post_bytes, request_bytes};
use serde_json::json;

use crate::support::{error_message, generating, invalid, without_work};

/// Bodies that no endpoint can read.
fn unreadable() -> Vec<(&'static str, Vec<u8>)> {
    let object = |prompt: &[u8]| {
        let head = format!("{{\"model\":\"{MODEL}\",\"inputs\":\"a\",\"prompt\":\"a\",\"x\":");
        [head.as_bytes(), prompt, b"}"].concat()
    };
    let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    vec![
        ("nothing", vec![]),
        ("blanks", b" \r\n\t ".to_vec()),
        ("a word", b"hello".to_vec()),
        ("a form", b"inputs=a&model=x".to_vec()),
        ("null", b"null".to_vec()),
        ("a number", b"42".to_vec()),
        ("a bool", b"true".to_vec()),
        ("a string", b"\"hello\"".to_vec()),
        ("a list", b"[{\"inputs\":\"a\"}]".to_vec()),
        ("no end", b"{\"inputs\":\"a\"".to_vec()),
        ("no end of a string", b"{\"inputs\":\"a".to_vec()),
        ("two objects", b"{\"inputs\":\"a\"}{\"inputs\":\"a\"}".to_vec()),
        ("a comma at the end", b"{\"inputs\":\"a\",}".to_vec()),
        ("single quotes", b"{'inputs':'a'}".to_vec()),
        ("a comment", b"{\"inputs\":\"a\"}//".to_vec()),
        ("NaN", object(b"NaN")),
        ("Infinity", object(b"-Infinity")),
        ("a plus sign", object(b"+1")),
        ("a leading zero", object(b"01")),
        ("an unknown escape", object(b"\"\\q\"")),
        ("half an escape", object(b"\"\\u12\"")),
        ("a NUL byte in a string", object(b"\"\0\"")),
        ("a line break in a string", object(b"\"a\nb\"")),
        ("a NUL byte at the end", b"{\"inputs\":\"a\"}\0".to_vec()),
        ("a byte that is not UTF-8", object(b"\"\xff\"")),
        ("an overlong form", object(b"\"\xc0\x80\"")),
        ("half a character", object(b"\"\xe4\xbd\"")),
        ("GBK", object(b"\"\xc4\xe3\xba\xc3\"")),
        ("an encoded surrogate", object(b"\"\xed\xa0\x80\"")),
        ("a lone high surrogate", object(b"\"\\ud83d\"")),
        ("a lone low surrogate", object(b"\"\\udc00 \"")),
        ("UTF-16", utf16("{\"inputs\":\"a\"}")),
        ("deep lists", object("[".repeat(3_000).as_bytes())),
        (
            "deep and closed lists",
            object(format!("{}{}", "[".repeat(2_000), "]".repeat(2_000)).as_bytes()),
        ),
        ("deep objects", "{\"a\":".repeat(2_000).into_bytes()),
        (
            "a field twice",
            b"{\"inputs\":\"a\",\"inputs\":\"b\",\"model\":\"x\",\"prompt\":\"a\",\"prompt\":\"a\"}".to_vec(),
        ),
    ]
}

#[test]
fn unreadable_bodies_are_refused_in_the_family_shape() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    without_work(&scene, || {
        for (what, body) in unreadable() {
            for path in ["/generate", "/generate_stream", "/", "/invocations", "/v1/completions"] {
                invalid(path, &scene.post_raw(path, &body)?).with_context(|| what.to_owned())?;
            }
        }
        Ok(())
    })?;
    scene.close()
}

#[test]
fn odd_but_legal_text_is_answered() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let texts = [
        "\\u0000",
        "a\\u0000b",
        "\\ud83d\\ude00",
        "\u{feff}x",
        "\u{202e}\u{200b}",
        "\\\"\\\\\\/\\b\\f\\n\\r\\t",
        "\u{fffd}",
        "\u{10ffff}",
    ];
    for text in texts {
        let body = format!("{{\"inputs\":\"{text}\",\"parameters\":{{\"details\":true,\"max_new_tokens\":3}}}}");
        let answer = scene
            .post_raw("/generate", body)?
            .ok()
            .with_context(|| text.to_owned())?;
        ensure!(
            answer["details"]["generated_tokens"] == 3 || answer["details"]["finish_reason"] == "eos_token",
            "{answer}"
        );
        let body = format!(
            "{{\"model\":\"{MODEL}\",\"prompt\":\"{text}\",\"stop\":[\"{text}\"],\"max_tokens\":3,\"stream\":true}}"
        );
        let events = scene
            .post_raw("/v1/completions", body)?
            .events()
            .with_context(|| text.to_owned())?;
        ensure!(
            events.last().is_some_and(|event| event == "[DONE]"),
            "{text}: {events:?}"
        );
    }
    // A blank before and after the object is JSON.
    let blanks = b"\r\n\t {\"inputs\" : \"a\"} \n".to_vec();
    ensure!(scene.post_raw("/generate", blanks)?.ok()? == scene.post("/generate", &json!({ "inputs": "a" }))?.ok()?);
    // What a client sends back to itself is escaped.
    let answer = scene.complete(json!({ "prompt": "a" }))?;
    ensure!(answer.status == 200);
    let hostile = "{\"model\":\"a\\u0000\\n\\\"<script>\\u001b[31m\",\"prompt\":\"a\"}";
    error_message(
        "/v1/completions",
        &scene.post_raw("/v1/completions", hostile)?,
        404,
        "NotFoundError",
    )?;
    scene.close()
}

/// `limits.max_body_bytes` of the test.
const MOST: usize = 8_192;

#[test]
fn bodies_over_the_limit_are_413_however_they_are_sent() -> Result<()> {
    let scene = Scene::tiny(&[&format!("limits.max_body_bytes={MOST}")])?;
    let body_of = |length: usize| {
        let (open, close) = ("{\"inputs\":\"a\",\"parameters\":{\"truncate\":5},\"x\":\"", "\"}");
        format!("{open}{}{close}", "y".repeat(length - open.len() - close.len()))
    };
    let too_large = |path: &str, answer| {
        let word = if path.starts_with("/v1/") {
            "BadRequestError"
        } else {
            "validation"
        };
        let message = error_message(path, &answer, 413, word)?;
        ensure!(message.contains("8192"), "{message}");
        ensure!(
            answer
                .header("connection")
                .is_some_and(|value| value.eq_ignore_ascii_case("close")),
            "{:?}",
            answer.headers
        );
        anyhow::Ok(())
    };
    without_work(&scene, || {
        for path in ["/generate", "/v1/completions"] {
            too_large(path, scene.post_raw(path, body_of(MOST + 1))?)?;
            // Far larger than every buffer on the way: the answer comes although nobody reads it all.
            let mut wire = scene.wire()?;
            let _sent = wire.send_if_open(post_bytes(path, vec![b'x'; 4 << 20]));
            too_large(path, wire.answer()?)?;
            // Announced only.
            let head = format!("POST {path} HTTP/1.1\r\nhost: t\r\ncontent-length: 99999999999\r\n\r\n");
            too_large(path, scene.exchange(head)?)?;
            // Not announced.
            let mut wire = scene.wire()?;
            let _sent = wire.send_if_open(chunked(path, body_of(MOST + 1).as_bytes(), 1_000));
            too_large(path, wire.answer()?)?;
        }
        Ok(())
    })?;
    ensure!(scene.post_raw("/generate", body_of(MOST))?.status == 200);
    ensure!(
        scene
            .exchange(chunked("/generate", body_of(MOST).as_bytes(), 1_000))?
            .status
            == 200
    );
    scene.close()
}

/// A chunked request with chunks of `size` bytes.
fn chunked(path: &str, body: &[u8], size: usize) -> Vec<u8> {
    let mut bytes = format!("POST {path} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n").into_bytes();
    for chunk in body.chunks(size) {
        bytes.extend(format!("{:x}\r\n", chunk.len()).as_bytes());
        bytes.extend(chunk);
        bytes.extend(b"\r\n");
    }
    bytes.extend(b"0\r\n\r\n");
    bytes
}

#[test]
fn chunked_bodies_are_read_whatever_their_chunks() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    for (path, body) in generating() {
        if path == "/v1/completions" {
            continue; // Its answers carry ids and times.
        }
        let body = body.to_string();
        let whole = scene.post_raw(path, &body)?;
        for size in [1, 3, 1_000] {
            let answer = scene.exchange(chunked(path, body.as_bytes(), size))?;
            ensure!(
                (answer.status, &answer.body) == (200, &whole.body),
                "{path}: {}",
                answer.text()
            );
        }
    }
    for wrong in [
        "zz\r\n{}\r\n0\r\n\r\n",
        "-1\r\n{}\r\n0\r\n\r\n",
        "fffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        "2;{}\n0\n\n",
    ] {
        let mut wire = scene.wire()?;
        wire.send(format!(
            "POST /generate HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n{wrong}"
        ))?;
        wire.close_sending()?;
        let answer = String::from_utf8_lossy(&wire.rest()?).into_owned();
        ensure!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 4"),
            "{wrong:?}: {answer}"
        );
    }
    scene.close()
}

#[test]
fn only_json_is_taken_as_a_body() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    for (path, body) in generating() {
        let send = |headers: &str| scene.exchange(request_bytes("POST", path, headers, body.to_string()));
        for fine in [
            "",
            "content-type: application/json\r\n",
            "content-type: Application/JSON; charset=utf-8; a=b\r\n",
        ] {
            ensure!(send(fine)?.status == 200, "{path} {fine}");
        }
        let word = if path.starts_with("/v1/") {
            "BadRequestError"
        } else {
            "validation"
        };
        for wrong in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "application/xml",
            "json",
            "application/jsonl",
        ] {
            let message = error_message(path, &send(&format!("content-type: {wrong}\r\n"))?, 415, word)?;
            ensure!(message.contains("application/json"), "{message}");
        }
        error_message(path, &send("content-encoding: gzip\r\n")?, 415, word)?;
    }
    scene.close()
}
