//! Calls with an `Idempotency-Key`: a client that comes back gets its answer, and nothing is computed twice.

mod http_support;

use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use http_support::backend::Script;
use http_support::client::{Response, connect, exchange};
use http_support::model::bytes;
use http_support::{start, start_with};
use serde_json::Value;

fn keyed(path: &str, key: &str, body: &str) -> Vec<u8> {
    format!(
        "POST {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-type: application/json\r\n\
         idempotency-key: {key}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn ask(address: SocketAddr, path: &str, key: &str, body: &str) -> Response {
    exchange(address, &keyed(path, key, body))
}

const WHOLE: &str = r#"{"inputs":"a","parameters":{"details":true,"do_sample":true}}"#;

fn seed(answer: &Response) -> Value {
    answer.json()["details"]["seed"].clone()
}

#[test]
fn the_same_call_again_is_answered_from_the_first_one() {
    let front = start();
    let first = ask(front.address, "/generate", "k-1", WHOLE);
    let again = ask(front.address, "/generate", "k-1", WHOLE);
    assert_eq!((first.status, again.status), (200, 200));
    assert_eq!(first.json(), again.json());
    assert_eq!(front.backend.calls(), 1, "nothing is computed again");
    let other = ask(front.address, "/generate", "k-2", WHOLE);
    assert_eq!(front.backend.calls(), 2);
    assert_ne!(seed(&first), seed(&other));
}

#[test]
fn a_call_that_runs_is_taken_up_again_from_its_beginning() {
    let front = start();
    let body = r#"{"inputs":"a"}"#;
    front.backend.play(Script::Endless(bytes("x")[0]));
    let mut gone = connect(front.address);
    gone.write_all(&keyed("/generate_stream", "k", body)).expect("sent");
    front.backend.wait_for_live(1);
    drop(gone);
    let again = ask(front.address, "/generate_stream", "k", body);
    assert_eq!(again.status, 200, "{}", again.text());
    let events = again.json_events();
    assert_eq!(front.backend.calls(), 1);
    assert_eq!(events.len(), 20, "TGI's default, from the first token on");
    assert_eq!(events[0]["token"]["text"], "x");
}

#[test]
fn a_client_that_stays_away_is_given_up_after_a_while() {
    let front = start_with(|config| config.coordinator.reattach_ms = 50);
    front.backend.play(Script::Tokens(bytes("abc")));
    let mut gone = connect(front.address);
    gone.write_all(&keyed("/generate", "k", WHOLE)).expect("sent");
    front.backend.wait_for_live(1);
    drop(gone);
    front.backend.wait_for_live(0);
    assert_eq!(front.backend.calls(), 1);
}

#[test]
fn another_front_door_serves_the_call_with_the_same_seed() {
    let (first, second) = (start(), start());
    let answers = [first.address, second.address].map(|address| ask(address, "/generate", "k-1", WHOLE));
    assert_eq!(seed(&answers[0]), seed(&answers[1]));
    assert_eq!((first.backend.calls(), second.backend.calls()), (1, 1));
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let body = match path {
            "/v1/completions" => r#"{"model":"tiny","prompt":"a","temperature":1}"#,
            _ => r#"{"model":"tiny","messages":[{"role":"user","content":"a"}],"temperature":1}"#,
        };
        let both = [&first, &second].map(|front| {
            let answer = ask(front.address, path, "k-9", body);
            (answer.status == 200).then(|| front.backend.last().sampling.seed)
        });
        assert_eq!(both[0], both[1], "{path}");
    }
    // A seed that the client gives is its own.
    let own = ask(
        first.address,
        "/generate",
        "k-3",
        r#"{"inputs":"a","parameters":{"details":true,"do_sample":true,"seed":5}}"#,
    );
    assert_eq!(seed(&own), 5);
}

#[test]
fn a_key_names_one_request_only() {
    let front = start();
    assert_eq!(ask(front.address, "/generate", "k", WHOLE).status, 200);
    for (path, body) in [("/generate", r#"{"inputs":"b"}"#), ("/generate_stream", WHOLE)] {
        let other = ask(front.address, path, "k", body);
        assert_eq!(other.status, 422, "{path}: {}", other.text());
        assert!(other.text().contains("idempotency-key"), "{}", other.text());
    }
    let long = ask(front.address, "/generate", &"k".repeat(256), WHOLE);
    assert!(
        long.status == 422 && long.text().contains("idempotency-key"),
        "{}",
        long.text()
    );
    assert_eq!(front.backend.calls(), 1);
}

#[test]
fn a_call_that_was_refused_or_failed_is_tried_again() {
    use coordinator::core::types::ServeErrorKind;
    let front = start();
    front
        .backend
        .play(Script::Refuse(ServeErrorKind::Overloaded { retry_after_s: 2 }));
    assert_eq!(ask(front.address, "/generate", "k", WHOLE).status, 429);
    front.backend.play(Script::Fail(bytes("ab"), ServeErrorKind::NodeLost));
    assert!(ask(front.address, "/generate", "k", WHOLE).status >= 400);
    front
        .backend
        .play(Script::Tokens([bytes("ab"), vec![http_support::model::EOS]].concat()));
    // The failed call is forgotten a moment after its client has heard of it.
    let mut answer = ask(front.address, "/generate", "k", WHOLE);
    for _ in 0..100 {
        if answer.status == 200 {
            break;
        }
        #[allow(clippy::disallowed_methods, reason = "a test that waits for the server")]
        std::thread::sleep(Duration::from_millis(10));
        answer = ask(front.address, "/generate", "k", WHOLE);
    }
    assert_eq!(answer.status, 200, "{}", answer.text());
}
