//! Every field of `/generate` against every kind of wrong value: 422, naming the field, before anything is worked on.

mod http_support;

use http_support::client::post;
use http_support::{start, start_with};

/// Field of `parameters`, values that are wrong.
const WRONG: &[(&str, &[&str])] = &[
    ("decoder_input_details", &["1", "0", "\"true\"", "[]", "{}", "1.5"]),
    ("details", &["1", "\"false\"", "[true]", "{}"]),
    ("do_sample", &["1", "0.5", "\"yes\"", "[]"]),
    ("return_full_text", &["1", "\"\"", "[]", "{}"]),
    ("watermark", &["1", "\"true\"", "[]"]),
    (
        "max_new_tokens",
        &[
            "0",
            "-1",
            "2147483648",
            "1.0",
            "1e2",
            "true",
            "\"5\"",
            "[5]",
            "{}",
            "99999999999999999999",
        ],
    ),
    ("truncate", &["0", "-1", "2147483648", "2.5", "false", "\"5\"", "[]"]),
    ("top_k", &["0", "-1", "2147483648", "1.0", "true", "\"5\"", "{}"]),
    (
        "seed",
        &[
            "0",
            "-1",
            "18446744073709551616",
            "1.0",
            "1e3",
            "true",
            "\"1\"",
            "[1]",
            "340282366920938463463374607431768211456",
        ],
    ),
    (
        "temperature",
        &[
            "0", "0.0", "-1", "0.000001", "1e-6", "1e-7", "1e999", "-1e999", "true", "\"1\"", "[1]",
        ],
    ),
    ("repetition_penalty", &["0", "-0.5", "1e999", "true", "\"1.2\"", "{}"]),
    (
        "top_p",
        &["0", "1", "1.0", "1e-6", "1.5", "-0.1", "1e999", "false", "\"0.5\""],
    ),
    ("typical_p", &["0", "1.0001", "-1", "1e999", "true", "\"0.5\"", "[]"]),
    (
        "stop",
        &[
            "\"\"",
            "[\"\"]",
            "[1]",
            "[null]",
            "[[\"a\"]]",
            "1",
            "true",
            "{}",
            "[\"a\",2]",
        ],
    ),
    ("stop_sequences", &["\"\"", "[\"\"]", "[1]", "1", "{}"]),
    (
        "adapter_id",
        &["\"\"", "\"a b\"", "\"a;b\"", "\"ä\"", "1", "true", "[\"a\"]"],
    ),
    ("best_of", &["0", "-1", "2", "129", "1.0", "true", "\"2\"", "[]"]),
];

#[test]
fn every_wrong_parameter_is_refused_by_name() {
    let front = start();
    for (field, values) in WRONG {
        for value in *values {
            for path in ["/generate", "/generate_stream", "/"] {
                let body = format!("{{\"inputs\":\"hi\",\"parameters\":{{\"{field}\":{value}}}}}");
                let answer = post(front.address, path, &body);
                assert_eq!(answer.status, 422, "{path} {body}");
                let json = answer.json();
                assert_eq!(json["error_type"], "validation", "{path} {body}");
                let error = json["error"].as_str().expect("a message");
                assert!(error.starts_with("Input validation error: "), "{error}");
                assert!(
                    error.contains(&format!("`parameters.{field}`")),
                    "{path} {body}: {error}"
                );
                assert!(error.contains("must be"), "{path} {body}: {error}");
            }
        }
    }
    assert_eq!(front.backend.count(), 0, "nothing was worked on");
}

#[test]
fn wrong_inputs_are_refused_by_name() {
    let front = start();
    let item = |item: &str| format!("[{{\"type\":\"text\",\"text\":\"a\"}},{item}]");
    let cases = [
        ("null".to_owned(), "`inputs` is missing"),
        ("\"\"".to_owned(), "`inputs` is \"\""),
        ("1".to_owned(), "`inputs` is 1"),
        ("true".to_owned(), "`inputs` is true"),
        ("{}".to_owned(), "`inputs` is an object"),
        ("[]".to_owned(), "`inputs` is an empty list"),
        ("[\"a\"]".to_owned(), "`inputs[0]` is \"a\""),
        (item("7"), "`inputs[1]` is 7"),
        (item("{}"), "`inputs[1].type` is missing"),
        (item("{\"type\":5}"), "`inputs[1].type` is missing or not a string"),
        (item("{\"type\":\"audio\"}"), "`inputs[1].type` is \"audio\""),
        (item("{\"type\":\"text\"}"), "`inputs[1].text` is missing or empty"),
        (
            item("{\"type\":\"text\",\"text\":\"\"}"),
            "`inputs[1].text` is missing or empty",
        ),
        (
            item("{\"type\":\"text\",\"text\":3}"),
            "`inputs[1].text` is missing or empty",
        ),
        (
            item("{\"type\":\"text\",\"type\":\"text\",\"text\":\"a\"}"),
            "`inputs[1].type` is given twice",
        ),
        (
            item("{\"type\":\"image_url\",\"image_url\":\"http://127.0.0.1:1/x\"}"),
            "`inputs[1].type` is \"image_url\"",
        ),
        (
            item("{\"type\":\"video_url\",\"video_url\":{\"url\":\"/etc/x\"}}"),
            "`inputs[1].type` is \"video_url\"",
        ),
        (
            item("{\"type\":\"audio_url\",\"audio_url\":\"data:,\"}"),
            "`inputs[1].type` is \"audio_url\"",
        ),
    ];
    for (inputs, start) in cases {
        let answer = post(front.address, "/generate", format!("{{\"inputs\":{inputs}}}"));
        assert_eq!(answer.status, 422, "{inputs}");
        let error = answer.json()["error"].as_str().expect("a message").to_owned();
        assert!(
            error.starts_with(&format!("Input validation error: {start}")),
            "{inputs}: {error}"
        );
    }
    let missing = post(front.address, "/generate", "{}");
    assert!(missing.text().contains("`inputs` is missing"), "{}", missing.text());
    assert_eq!(front.backend.count(), 0);
}

#[test]
fn bodies_that_are_no_json_object_are_422() {
    let front = start();
    let deep = "[".repeat(100_000);
    let bodies: [&[u8]; 14] = [
        b"",
        b"nonsense",
        b"null",
        b"[]",
        b"\"text\"",
        b"12",
        b"{\"inputs\":\"a\"} x",
        b"{\"inputs\":\"a\",}",
        b"{\"inputs\":\"\xc4\xe3\xba\xc3\"}",
        b"{\"inputs\":\"\\ud800\"}",
        b"{\"inputs\":\"a\",\"parameters\":{\"temperature\":NaN}}",
        b"{\"inputs\":\"a\",\"inputs\":\"b\"}",
        b"{\"inputs\":\"a\",\"parameters\":[]}",
        deep.as_bytes(),
    ];
    for body in bodies {
        let answer = post(front.address, "/generate", body);
        let shown = String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned();
        assert_eq!(answer.status, 422, "{shown}");
        assert_eq!(answer.json()["error_type"], "validation", "{shown}");
    }
    assert_eq!(
        post(front.address, "/generate", "{\"inputs\":\"a\\u0000b\"}").status,
        200,
        "an escaped NUL is text"
    );
}

#[test]
fn neutral_values_are_no_wishes() {
    let front = start();
    let neutral = "{\"inputs\":\"a\",\"parameters\":{\"watermark\":false,\"best_of\":1,\"adapter_id\":\"None\"}}";
    assert_eq!(post(front.address, "/generate", neutral).status, 200);
}

#[test]
fn an_adapter_is_none_or_one_of_those_that_are_served() {
    let front = start_with(|config| config.model.adapters = vec!["a/b-1.0_x=/nowhere".to_owned()]);
    let ask = |adapter: &str| {
        let body = format!("{{\"inputs\":\"a\",\"parameters\":{{\"adapter_id\":{adapter}}}}}");
        post(front.address, "/generate", body)
    };
    for (adapter, right) in [("\"a/b-1.0_x\"", Some("a/b-1.0_x")), ("\"None\"", None), ("null", None)] {
        assert_eq!(ask(adapter).status, 200, "{adapter}");
        assert_eq!(front.backend.last().adapter.as_deref(), right);
    }
    for name in ["a/b", "tiny", "none"] {
        let answer = ask(&format!("\"{name}\""));
        assert_eq!(answer.status, 422);
        let message = answer.json()["error"].to_string();
        assert!(
            message.contains("parameters.adapter_id") && message.contains(name),
            "{message}"
        );
        assert!(!message.contains("nowhere"), "{message}");
    }
}

#[test]
fn nulls_and_unknown_fields_are_as_if_they_were_absent() {
    let front = start();
    let fields: Vec<String> = WRONG.iter().map(|(field, _)| format!("\"{field}\":null")).collect();
    let unknown = "\"top_n_tokens\":5,\"grammar\":{\"type\":\"x\"},\"frequency_penalty\":\"?\"";
    let body = format!(
        "{{\"inputs\":\"a\",\"stream\":null,\"x\":[1],\"parameters\":{{{},{unknown}}}}}",
        fields.join(",")
    );
    let answer = post(front.address, "/generate", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let request = front.backend.last();
    assert!(request.sampling.greedy);
    assert_eq!(request.stop.max_tokens, 20);
    assert!(request.stop_strings.is_empty());
    assert_eq!(
        post(front.address, "/generate", "{\"inputs\":\"a\",\"parameters\":null}").status,
        200
    );
}

#[test]
fn stop_limits_are_those_of_the_api() {
    let front = start();
    let with = |stop: String| {
        let body = format!("{{\"inputs\":\"a\",\"parameters\":{{\"stop\":{stop}}}}}");
        post(front.address, "/generate", body).status
    };
    let list =
        |count: usize, length: usize| format!("[{}]", vec![format!("\"{}\"", "é".repeat(length)); count].join(","));
    assert_eq!(with(format!("\"{}\"", "é".repeat(1_024))), 200);
    assert_eq!(with(format!("\"{}\"", "é".repeat(1_025))), 422);
    assert_eq!(with(list(1_024, 32)), 200);
    assert_eq!(with(list(1_025, 1)), 422);
    assert_eq!(with(list(33, 1_000)), 422);
    assert_eq!(with("[]".to_owned()), 200);
}

#[test]
fn prompt_details_and_streams_exclude_each_other() {
    let front = start();
    let body = "{\"inputs\":\"a\",\"stream\":true,\"parameters\":{\"decoder_input_details\":true}}";
    for path in ["/generate_stream", "/"] {
        let answer = post(front.address, path, body);
        assert_eq!(answer.status, 422, "{path}");
        assert!(
            answer.text().contains("`parameters.decoder_input_details`"),
            "{}",
            answer.text()
        );
    }
    assert_eq!(
        post(front.address, "/generate", body).status,
        200,
        "`stream` is no field of /generate"
    );
    let wrong = post(front.address, "/", "{\"inputs\":\"a\",\"stream\":\"yes\"}");
    assert_eq!(wrong.status, 422);
    assert!(wrong.text().contains("`stream` is"), "{}", wrong.text());
}
