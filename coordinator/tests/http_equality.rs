//! Promises over random token sequences, stop strings and limits: a stream and a whole answer say the same, on both
//! families, and every token is told once.

mod http_support;

use http_support::backend::Script;
use http_support::client::post;
use http_support::model::{EOS, SPECIAL};
use http_support::{Front, start};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

#[derive(Clone, Debug)]
struct Case {
    tokens: Vec<u32>,
    stop: Vec<String>,
    limit: usize,
    keep_stop: bool,
    skip_special: bool,
}

/// Bytes of characters of one to four bytes, torn characters, special tokens.
fn cases() -> impl Strategy<Value = Case> {
    let whole = "[abé水🦀]{1,3}".prop_map(|text| text.bytes().map(u32::from).collect::<Vec<_>>());
    let torn = prop_oneof![
        Just(vec![0xf0]),
        Just(vec![0x9f, 0xa6]),
        Just(vec![0xff]),
        Just(vec![SPECIAL])
    ];
    let piece = prop_oneof![6 => whole, 1 => torn];
    let stop = proptest::collection::vec("[abé水🦀]{1,3}", 0..3);
    (
        proptest::collection::vec(piece, 0..6),
        stop,
        1..24_usize,
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(pieces, stop, limit, keep_stop, skip_special)| Case {
            tokens: pieces.concat().into_iter().chain([EOS]).collect(),
            stop,
            limit,
            keep_stop,
            skip_special,
        })
}

fn run(check: impl Fn(&Front, &Case)) {
    let front = start();
    let mut runner = TestRunner::new(Config {
        cases: 300,
        failure_persistence: None,
        ..Config::default()
    });
    let result = runner.run(&cases(), |case| {
        front.backend.play(Script::Tokens(case.tokens.clone()));
        check(&front, &case);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

fn texts<'a>(tokens: impl IntoIterator<Item = &'a Value>) -> String {
    tokens
        .into_iter()
        .map(|token| token["text"].as_str().expect("a text"))
        .collect()
}

#[test]
fn generate() {
    run(|front, case| {
        let parameters = json!({ "details": true, "stop": case.stop, "max_new_tokens": case.limit, "seed": 1 });
        let body = json!({ "inputs": "hi", "parameters": parameters }).to_string();
        let whole = post(front.address, "/generate", &body).json();
        let events = post(front.address, "/generate_stream", &body).json_events();

        let details = &whole["details"];
        let tokens: Vec<&Value> = events.iter().map(|event| &event["token"]).collect();
        assert_eq!(json!(tokens), details["tokens"]);
        assert_eq!(json!(tokens.len()), details["generated_tokens"]);
        let last = events.last().expect("a last event");
        assert_eq!(last["generated_text"], whole["generated_text"]);
        assert_eq!(last["details"]["finish_reason"], details["finish_reason"]);
        assert!(
            events[..events.len() - 1]
                .iter()
                .all(|event| event["generated_text"].is_null())
        );

        let visible = texts(tokens.iter().copied().filter(|token| token["special"] == false));
        let text = whole["generated_text"].as_str().expect("a text");
        // A character torn at the very end is told with the token that ends the answer, also where that one is special.
        assert_eq!(
            visible,
            text.strip_suffix('\u{fffd}')
                .filter(|_| visible != text)
                .unwrap_or(text)
        );
        for stop in &case.stop {
            assert!(!text.contains(stop.as_str()), "{text:?} contains {stop:?}");
        }
    });
}

#[test]
fn completions() {
    run(|front, case| {
        let mut body = json!({
            "model": "tiny", "prompt": "hi", "stop": case.stop, "max_tokens": case.limit, "seed": 1, "logprobs": 2,
            "include_stop_str_in_output": case.keep_stop, "skip_special_tokens": case.skip_special,
            "return_token_ids": true,
        });
        let whole = post(front.address, "/v1/completions", body.to_string()).json();
        body["stream"] = json!(true);
        let chunks = post(front.address, "/v1/completions", body.to_string()).json_events();

        let choice = &whole["choices"][0];
        let parts: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]).collect();
        assert_eq!(texts(parts.iter().copied()), choice["text"].as_str().expect("a text"));
        let last = parts.last().expect("a chunk");
        assert_eq!(
            (&last["finish_reason"], &last["stop_reason"]),
            (&choice["finish_reason"], &choice["stop_reason"])
        );
        assert_eq!(parts.iter().filter(|part| !part["finish_reason"].is_null()).count(), 1);
        assert_eq!(json!(chunks.len()), whole["usage"]["completion_tokens"]);
        assert_eq!(chunks.last().map(|chunk| &chunk["usage"]), Some(&whole["usage"]));
        let joined = |pick: &dyn Fn(&Value) -> Value| -> Value {
            parts
                .iter()
                .flat_map(|part| pick(part).as_array().cloned().unwrap_or_default())
                .collect()
        };
        assert_eq!(joined(&|part| part["token_ids"].clone()), choice["token_ids"]);
        for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(
                joined(&|part| part["logprobs"][list].clone()),
                choice["logprobs"][list],
                "{list}"
            );
        }
    });
}
