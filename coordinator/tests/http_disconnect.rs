//! Clients that go away, stop reading, or never finish what they began: the request must leave the cluster, and the
//! connection must end.

mod http_support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use http_support::backend::Script;
use http_support::client::{connect, post, post_bytes, read_all};
use http_support::model::bytes;
use http_support::{start, start_impatient, start_with};

/// Requests of every kind, and where they hang.
fn requests() -> Vec<(&'static str, Script, Vec<u8>)> {
    let silent = || Script::Tokens(vec![]);
    let begun = || Script::Tokens(bytes("abc"));
    let completion = |stream: bool| format!("{{\"model\":\"tiny\",\"prompt\":\"a\",\"stream\":{stream}}}").into_bytes();
    let generate = b"{\"inputs\":\"a\"}";
    vec![
        (
            "whole, before the first token",
            silent(),
            post_bytes("/generate", generate),
        ),
        ("whole, after some tokens", begun(), post_bytes("/generate", generate)),
        ("list", begun(), post_bytes("/", generate)),
        (
            "stream, before the first token",
            silent(),
            post_bytes("/generate_stream", generate),
        ),
        (
            "stream, after some tokens",
            begun(),
            post_bytes("/generate_stream", generate),
        ),
        (
            "completion, before the first token",
            silent(),
            post_bytes("/v1/completions", &completion(false)),
        ),
        (
            "completion, after some tokens",
            begun(),
            post_bytes("/v1/completions", &completion(false)),
        ),
        (
            "completion stream",
            begun(),
            post_bytes("/v1/completions", &completion(true)),
        ),
    ]
}

/// What a client does, and how.
type Goodbye = (&'static str, fn(TcpStream));

/// How clients leave.
const GOODBYES: [Goodbye; 2] = [
    ("closes", drop),
    ("closes its side only", |stream| {
        stream.shutdown(Shutdown::Write).expect("shut down");
        // Keeps the other side open until the server has noticed.
        std::mem::forget(stream);
    }),
];

#[test]
fn a_client_that_leaves_frees_its_request() {
    let front = start();
    for (goodbye, leave) in GOODBYES {
        for (what, script, request) in requests() {
            front.backend.play(script);
            let mut stream = connect(front.address);
            stream.write_all(&request).expect("sent");
            front.backend.wait_for_live(1);
            leave(stream);
            front.backend.wait_for_live(0);
            assert!(front.backend.count() > 0, "{what}: {goodbye}");
        }
    }
    front.backend.play(Script::Tokens(vec![97, 257]));
    assert_eq!(post(front.address, "/generate", "{\"inputs\":\"a\"}").status, 200);
}

#[test]
fn a_client_that_leaves_amid_pipelined_requests_frees_the_running_one() {
    let front = start();
    front.backend.play(Script::Tokens(vec![]));
    let one = String::from_utf8(post_bytes("/generate", b"{\"inputs\":\"a\"}")).expect("text");
    let mut stream = connect(front.address);
    stream
        .write_all(one.replace("connection: close\r\n", "").repeat(5).as_bytes())
        .expect("sent");
    front.backend.wait_for_live(1);
    drop(stream);
    front.backend.wait_for_live(0);
    assert_eq!(front.backend.count(), 1, "the others never began");
}

#[test]
fn many_clients_that_leave_at_once_free_everything() {
    let front = start();
    front.backend.play(Script::Endless(97));
    let streams: Vec<TcpStream> = (0..100)
        .map(|index| {
            let path = if index % 2 == 0 {
                "/generate_stream"
            } else {
                "/generate"
            };
            let mut stream = connect(front.address);
            let body = b"{\"inputs\":\"a\",\"parameters\":{\"max_new_tokens\":1000000}}";
            stream.write_all(&post_bytes(path, body)).expect("sent");
            stream
        })
        .collect();
    drop(streams);
    front.backend.wait_for_live(0);
}

#[test]
fn a_client_that_stops_reading_is_given_up() {
    let front = start_impatient();
    front.backend.play(Script::Flood(97));
    let mut stream = connect(front.address);
    let body = b"{\"inputs\":\"a\",\"parameters\":{\"max_new_tokens\":1000000}}";
    stream.write_all(&post_bytes("/generate_stream", body)).expect("sent");
    front.backend.wait_for_live(1);
    front.backend.wait_for_live(0);
    // What was on its way arrives, and then the end: far less than a million events.
    let mut rest = Vec::new();
    let _read = stream.read_to_end(&mut rest).is_ok();
    assert!(rest.starts_with(b"HTTP/1.1 200 OK"));
    assert!(!rest.ends_with(b"0\r\n\r\n"), "the stream must not look complete");
}

#[test]
fn a_client_that_waits_for_a_slow_model_is_not_given_up() {
    let front = start_impatient();
    front.backend.play(Script::Tokens(bytes("abc")));
    let mut stream = connect(front.address);
    stream
        .write_all(&post_bytes("/generate_stream", b"{\"inputs\":\"a\"}"))
        .expect("sent");
    front.backend.wait_for_live(1);
    #[allow(clippy::disallowed_methods, reason = "several stall timeouts must pass")]
    std::thread::sleep(Duration::from_millis(1_500));
    front.backend.wait_for_live(1);
    drop(stream);
    front.backend.wait_for_live(0);
}

#[test]
fn a_client_that_piles_up_requests_is_given_up() {
    let front = start_impatient();
    let one = String::from_utf8(post_bytes("/generate", b"{\"inputs\":\"a\"}")).expect("text");
    let pile = one.replace("connection: close\r\n", "").repeat(4_000);
    let stream = b"{\"model\":\"tiny\",\"prompt\":\"a\",\"stream\":true}";
    for (script, first) in [
        (Script::Tokens(vec![]), post_bytes("/generate", b"{\"inputs\":\"a\"}")),
        (Script::Tokens(bytes("abc")), post_bytes("/v1/completions", stream)),
    ] {
        front.backend.play(script);
        let mut stream = connect(front.address);
        let first = String::from_utf8(first)
            .expect("text")
            .replace("connection: close\r\n", "");
        stream.write_all(first.as_bytes()).expect("sent");
        front.backend.wait_for_live(1);
        // The server may close before everything is sent.
        let _sent = stream.write_all(pile.as_bytes()).is_ok();
        front.backend.wait_for_live(0);
    }
}

#[test]
fn a_later_head_that_never_ends_is_ended() {
    let front = start_impatient();
    let mut stream = connect(front.address);
    let one = String::from_utf8(post_bytes("/generate", b"{\"inputs\":\"a\"}")).expect("text");
    stream
        .write_all(one.replace("connection: close\r\n", "").as_bytes())
        .expect("sent");
    let mut all = String::new();
    let mut piece = [0; 256];
    while !all.ends_with("}") {
        let read = stream.read(&mut piece).expect("the first answer");
        all.push_str(&String::from_utf8_lossy(&piece[..read]));
    }
    stream
        .write_all(b"POST /generate HTTP/1.1\r\nhost: t\r\nx: ")
        .expect("sent");
    stream.read_to_string(&mut all).expect("the server closes");
    assert!(all.starts_with("HTTP/1.1 200 OK"), "{all}");
    assert_eq!(front.backend.count(), 1);
}

#[test]
fn a_body_that_never_ends_is_408() {
    let front = start_impatient();
    let mut stream = connect(front.address);
    stream
        .write_all(b"POST /generate HTTP/1.1\r\nhost: t\r\ncontent-length: 100\r\n\r\n{\"inputs\"")
        .expect("sent");
    let answer = read_all(&mut stream);
    assert_eq!(answer.status, 408);
    assert_eq!(answer.json()["error_type"], "validation");
    assert_eq!(front.backend.count(), 0);
}

#[test]
fn a_first_head_that_never_ends_is_ended() {
    let front = start_impatient();
    let mut stream = connect(front.address);
    stream
        .write_all(b"POST /generate HTTP/1.1\r\nhost: t\r\nx: ")
        .expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("the server closes");
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
}

#[test]
fn silence_in_a_stream_is_filled_with_comments() {
    let front = start_with(|config| config.coordinator.stream_keep_alive_ms = 20);
    front.backend.play(Script::Tokens(bytes("a")));
    let mut stream = connect(front.address);
    stream
        .write_all(&post_bytes("/generate_stream", b"{\"inputs\":\"a\"}"))
        .expect("sent");
    let mut seen = String::new();
    let mut piece = [0; 256];
    while seen.matches("\r\n:\n\n\r\n").count() < 3 {
        let read = stream.read(&mut piece).expect("more");
        assert!(read > 0, "{seen}");
        seen.push_str(&String::from_utf8_lossy(&piece[..read]));
    }
    assert!(
        seen.find("data: ")
            .is_some_and(|event| Some(event) < seen.find(":\n\n\r\n")),
        "{seen}"
    );
}
