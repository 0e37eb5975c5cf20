//! Every field of `/v1/completions` against every kind of wrong value: 400, naming the field, before anything is worked on.

mod http_support;

use http_support::client::{Response, post};
use http_support::{Front, start};

/// Field, values that are wrong.
const WRONG: &[(&str, &[&str])] = &[
    (
        "prompt",
        &[
            "null",
            "\"\"",
            "1",
            "true",
            "{}",
            "[]",
            "[\"\"]",
            "[[]]",
            "[-1]",
            "[259]",
            "[1.0]",
            "[true]",
            "[1,\"a\"]",
        ],
    ),
    (
        "max_tokens",
        &[
            "0",
            "-1",
            "2147483648",
            "1.0",
            "true",
            "\"5\"",
            "[]",
            "99999999999999999999",
        ],
    ),
    ("temperature", &["-0.1", "1e999", "true", "\"1\"", "[]"]),
    ("top_p", &["0", "1e-6", "1.01", "-1", "1e999", "true", "\"1\""]),
    ("top_k", &["0", "-2", "2147483648", "1.0", "true", "\"5\""]),
    ("min_p", &["-0.1", "1.1", "1e999", "true", "\"0\""]),
    ("seed", &["0", "-1", "18446744073709551616", "1.5", "true", "\"1\""]),
    ("repetition_penalty", &["0", "2.1", "-1", "1e999", "true", "\"1\""]),
    ("presence_penalty", &["-2.1", "2.1", "1e999", "true", "\"1\""]),
    ("frequency_penalty", &["-2.1", "2.1", "-1e999", "false", "[]"]),
    ("stop", &["\"\"", "[\"\"]", "[1]", "1", "true", "{}", "[null]"]),
    ("stop_token_ids", &["1", "\"1\"", "true", "{}"]),
    ("include_stop_str_in_output", &["1", "\"true\"", "[]"]),
    ("stream", &["1", "\"true\"", "[]", "{}"]),
    (
        "stream_options",
        &["1", "\"x\"", "true", "[]", "{}", "{\"include_usage\":true}"],
    ),
    ("ignore_eos", &["1", "\"true\"", "{}"]),
    ("skip_special_tokens", &["0", "\"true\"", "[]"]),
    ("logprobs", &["-1", "6", "true", "false", "\"1\"", "1.0", "[]"]),
    ("return_token_ids", &["1", "\"true\""]),
    (
        "n",
        &["0", "-1", "8193", "1.0", "true", "\"1\"", "99999999999999999999"],
    ),
    ("best_of", &["0", "-1", "129", "1.0", "true"]),
    ("use_beam_search", &["1", "\"true\""]),
    ("echo", &["1", "\"true\""]),
    ("prompt_logprobs", &["-1", "21", "true", "1.0", "\"1\""]),
    ("suffix", &["1", "true", "[]", "\"x\""]),
    (
        "logit_bias",
        &[
            "1",
            "\"a\"",
            "[]",
            "true",
            "{\"x\":1}",
            "{\"-1\":1}",
            "{\"1.0\":1}",
            "{\"+1\":1}",
            "{\"259\":1}",
            "{\"5\":\"1\"}",
            "{\"5\":null}",
            "{\"5\":1e999}",
            "{\"5\":1,\"05\":2}",
        ],
    ),
    ("min_tokens", &["-1", "1.0", "true", "\"1\"", "2147483648"]),
    ("bad_words", &["1", "\"a\"", "{}", "[\"\"]", "[1]"]),
    (
        "allowed_token_ids",
        &["1", "\"a\"", "{}", "[]", "[\"1\"]", "[259]", "[-1]", "[1.0]"],
    ),
    (
        "truncate_prompt_tokens",
        &["0", "-2", "1.0", "true", "\"5\"", "2147483648"],
    ),
    (
        "structured_outputs",
        &["1", "[]", "{}", "{\"regex\":1}", "{\"regex\":\"\"}", "{\"choice\":[]}"],
    ),
    ("guided_json", &["1", "[]", "\"{\"", "{\"type\":\"unknown\"}"]),
    ("guided_regex", &["1", "\"(\"", "\"\""]),
    ("guided_choice", &["1", "\"a\"", "[\"\"]", "[1]"]),
    ("guided_grammar", &["1", "\"start: missing\""]),
    (
        "response_format",
        &[
            "1",
            "\"text\"",
            "[]",
            "{}",
            "{\"type\":null}",
            "{\"type\":\"xml\"}",
            "{\"type\":1}",
            "{\"type\":\"json_schema\"}",
            "{\"type\":\"json_schema\",\"json_schema\":{}}",
            "{\"type\":\"json_schema\",\"json_schema\":{\"schema\":[1]}}",
            "{\"type\":\"json_schema\",\"json_schema\":{\"schema\":{\"type\":5}}}",
        ],
    ),
];

fn with(front: &Front, fields: &str) -> Response {
    post(
        front.address,
        "/v1/completions",
        format!("{{\"model\":\"tiny\",{fields}}}"),
    )
}

fn message(answer: &Response) -> String {
    answer.json()["error"]["message"]
        .as_str()
        .expect("a message")
        .to_owned()
}

#[test]
fn every_wrong_field_is_refused_by_name() {
    let front = start();
    for (field, values) in WRONG {
        for value in *values {
            let prompt = if *field == "prompt" { "" } else { "\"prompt\":\"a\"," };
            let answer = with(&front, &format!("{prompt}\"{field}\":{value}"));
            assert_eq!(answer.status, 400, "{field} {value}: {}", answer.text());
            let error = &answer.json()["error"];
            assert_eq!(error["type"], "BadRequestError");
            assert_eq!(error["code"], 400);
            let param = error["param"].as_str().expect("a field").to_owned();
            assert!(param.starts_with(field), "{field} {value}: {param}");
            let text = message(&answer);
            assert!(text.contains(&format!("`{field}")), "{field} {value}: {text}");
            assert!(
                text.contains("must be") || text.contains("must have"),
                "{field} {value}: {text}"
            );
        }
    }
    assert_eq!(front.backend.count(), 0, "nothing was worked on");
}

#[test]
fn the_model_must_be_the_one_that_is_served() {
    let front = start();
    let with = |model: &str| post(front.address, "/v1/completions", format!("{{\"prompt\":\"a\"{model}}}"));
    for wrong in [
        "",
        ",\"model\":null",
        ",\"model\":\"\"",
        ",\"model\":1",
        ",\"model\":[\"tiny\"]",
    ] {
        let answer = with(wrong);
        assert_eq!(answer.status, 400, "{wrong}");
        assert_eq!(answer.json()["error"]["param"], "model");
    }
    for unknown in ["dummy", "Tiny", "http://127.0.0.1/"] {
        let answer = with(&format!(",\"model\":\"{unknown}\""));
        assert_eq!(answer.status, 404, "{unknown}");
        assert_eq!(answer.json()["error"]["type"], "NotFoundError");
        assert!(message(&answer).contains(&format!("\"{unknown}\"")));
    }
    for known in ["tiny", "org/tiny-alias"] {
        let answer = with(&format!(",\"model\":\"{known}\""));
        assert_eq!(answer.status, 200);
        assert_eq!(answer.json()["model"], known, "the name as it was asked for");
    }
}

#[test]
fn neutral_values_are_no_wishes() {
    let front = start();
    let neutral = "\"prompt\":\"a\",\"n\":1,\"best_of\":1,\"use_beam_search\":false,\"echo\":false,\"suffix\":\"\",\
        \"logit_bias\":{},\"min_tokens\":0,\"bad_words\":[],\"response_format\":{\"type\":\"text\"}";
    assert_eq!(with(&front, neutral).status, 200);
}

#[test]
fn combinations_that_contradict_each_other_are_refused() {
    let front = start();
    for (fields, field) in [
        ("\"temperature\":0,\"n\":2", "n"),
        ("\"temperature\":0,\"best_of\":2", "best_of"),
        ("\"n\":3,\"best_of\":2", "best_of"),
        ("\"best_of\":2,\"stream\":true", "best_of"),
        ("\"n\":2,\"best_of\":3,\"stream\":true", "best_of"),
        ("\"max_tokens\":0", "max_tokens"),
        ("\"echo\":false,\"max_tokens\":0", "max_tokens"),
        ("\"prompt_logprobs\":1,\"stream\":true", "prompt_logprobs"),
        ("\"suffix\":\"x\"", "suffix"),
        ("\"suffix\":\"x\",\"echo\":true", "suffix"),
        ("\"use_beam_search\":true,\"stop\":\"a\"", "use_beam_search"),
        ("\"stream\":false,\"stream_options\":{}", "stream_options"),
        (
            "\"stream\":true,\"stream_options\":{\"include_usage\":1}",
            "stream_options.include_usage",
        ),
    ] {
        let answer = with(&front, &format!("\"prompt\":\"a\",{fields}"));
        assert_eq!(answer.status, 400, "{fields}");
        assert_eq!(answer.json()["error"]["param"], field, "{fields}");
    }
}

#[test]
fn nulls_and_unknown_fields_are_as_if_they_were_absent() {
    let front = start();
    let fields: Vec<String> = WRONG
        .iter()
        .filter(|(field, _)| *field != "prompt")
        .map(|(field, _)| format!("\"{field}\":null"))
        .collect();
    let unknown = "\"user\":5,\"metadata\":{},\"service_tier\":[],\"store\":\"x\",\"x\":1e999";
    let answer = with(&front, &format!("\"prompt\":\"a\",{},{unknown}", fields.join(",")));
    assert_eq!(answer.status, 200, "{}", answer.text());
    let request = front.backend.last();
    assert!(!request.sampling.greedy);
    assert_eq!(
        (
            request.sampling.temperature,
            request.sampling.top_p,
            request.sampling.min_p
        ),
        (1.0, 1.0, 0.0)
    );
    assert_eq!(request.stop.max_tokens, 65, "the iteration limit and one more");
}

#[test]
fn bodies_that_are_no_json_object_are_400() {
    let front = start();
    let deep = "{\"a\":".repeat(100_000);
    let bodies: [&[u8]; 9] = [
        b"",
        b"nonsense",
        b"null",
        b"[]",
        b"\"text\"",
        b"{\"model\":\"tiny\",\"prompt\":\"\xff\"}",
        b"{\"model\":\"tiny\",\"prompt\":\"\\udc00\"}",
        b"{\"model\":\"tiny\",\"prompt\":\"a\"}}",
        deep.as_bytes(),
    ];
    for body in bodies {
        let answer = post(front.address, "/v1/completions", body);
        assert_eq!(
            answer.status,
            400,
            "{}",
            String::from_utf8_lossy(&body[..body.len().min(80)])
        );
        assert_eq!(answer.json()["error"]["type"], "BadRequestError");
    }
    assert_eq!(with(&front, "\"prompt\":\"after all that\"").status, 200);
}

#[test]
fn stop_token_ids_skips_what_can_be_no_token() {
    let front = start();
    let ids = "[5, \"6\", 7.0, 2147483648, -1, null, true, [8], 5, 258, 259, 1e1]";
    assert_eq!(
        with(&front, &format!("\"prompt\":\"a\",\"stop_token_ids\":{ids}")).status,
        200
    );
    assert_eq!(front.backend.last().stop.stop_token_ids, [5, 258]);
}

#[test]
fn stop_strings_are_bounded_together_only() {
    let front = start();
    let stop = |length: usize| with(&front, &format!("\"prompt\":\"a\",\"stop\":\"{}\"", "x".repeat(length))).status;
    assert_eq!(stop(32_768), 200);
    assert_eq!(stop(32_769), 400);
    let many = vec!["\"y\""; 2_000].join(",");
    assert_eq!(with(&front, &format!("\"prompt\":\"a\",\"stop\":[{many}]")).status, 200);
    assert_eq!(front.backend.last().stop_strings.len(), 2_000);
}
