//! What `/v1/completions` answers, and what it hands to the cluster.

mod http_support;

use coordinator::core::types::ServeErrorKind;
use http_support::backend::Script;
use http_support::client::{Response, post};
use http_support::model::{BOS, EOS, SPECIAL, bytes};
use http_support::{Front, start, start_with};
use serde_json::{Value, json};

fn complete(front: &Front, fields: &str) -> Response {
    post(
        front.address,
        "/v1/completions",
        format!("{{\"model\":\"tiny\",\"prompt\":\"hi\"{fields}}}"),
    )
}

fn whole(front: &Front, fields: &str) -> Value {
    let answer = complete(front, fields);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn chunks(front: &Front, fields: &str) -> Vec<Value> {
    let answer = complete(front, &format!(",\"stream\":true{fields}"));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.events().last(), Some(&"[DONE]"));
    answer.json_events()
}

fn text(chunks: &[Value]) -> String {
    chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["text"].as_str())
        .collect()
}

#[test]
fn a_whole_answer() {
    let front = start();
    let answer = whole(&front, "");
    assert!(
        answer["id"]
            .as_str()
            .is_some_and(|id| id.starts_with("endpoint_common_"))
    );
    assert!(
        answer["created"]
            .as_u64()
            .is_some_and(|created| created > 1_700_000_000)
    );
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["model"], "tiny");
    let choice = json!({ "index": 0, "text": "hello", "logprobs": null, "finish_reason": "stop", "stop_reason": null });
    assert_eq!(answer["choices"], json!([choice]));
    let usage = json!({
        "prompt_tokens": 3, "prompt_tokens_details": { "cached_tokens": 3 }, "completion_tokens": 6, "total_tokens": 9,
        "batch_size": [1, 2, 3, 4, 5, 6], "queue_wait_time": [7, 17, 27, 37, 47, 57],
    });
    assert_eq!(answer["usage"], usage);
    assert_ne!(answer["id"], whole(&front, "")["id"]);
}

/// Sampled tokens, further fields; the text, the finish reason, the stop reason.
type End = (Vec<u32>, &'static str, &'static str, &'static str, Value);

fn ends() -> Vec<End> {
    vec![
        (bytes("abcdef"), ",\"max_tokens\":3", "abc", "length", json!(null)),
        (bytes("abcdef"), ",\"stop\":[\"x\",\"de\"]", "abc", "stop", json!("de")),
        (
            bytes("abcdef"),
            ",\"stop\":\"de\",\"include_stop_str_in_output\":true",
            "abcde",
            "stop",
            json!("de"),
        ),
        (bytes("abcdef"), ",\"stop_token_ids\":[99]", "ab", "stop", json!(99)),
        (
            bytes("abcdef"),
            ",\"stop_token_ids\":[99],\"include_stop_str_in_output\":true",
            "abc",
            "stop",
            json!(99),
        ),
        (vec![97, EOS], "", "a", "stop", json!(null)),
        // The last permitted token stops: that is a stop here.
        (vec![97, EOS], ",\"max_tokens\":2", "a", "stop", json!(null)),
        (
            bytes("abc"),
            ",\"max_tokens\":3,\"stop\":\"c\"",
            "ab",
            "stop",
            json!("c"),
        ),
        (
            vec![97, EOS, 98],
            ",\"max_tokens\":3,\"ignore_eos\":true",
            "ab",
            "length",
            json!(null),
        ),
        (
            vec![97, SPECIAL, EOS],
            ",\"skip_special_tokens\":false",
            "a<x>",
            "stop",
            json!(null),
        ),
        (vec![97, SPECIAL, EOS], "", "a", "stop", json!(null)),
        (vec![97, 0xf0], ",\"max_tokens\":2", "a\u{fffd}", "length", json!(null)),
        (
            bytes("aXY"),
            ",\"max_tokens\":3,\"stop\":\"XYZ\"",
            "aXY",
            "length",
            json!(null),
        ),
        (bytes("\nb"), ",\"stop\":\"\\n\"", "", "stop", json!("\n")),
    ]
}

#[test]
fn why_an_answer_ended() {
    let front = start();
    for (tokens, fields, expected, finish, reason) in ends() {
        front.backend.play(Script::Tokens(tokens));
        let answer = whole(&front, fields);
        let choice = &answer["choices"][0];
        assert_eq!(
            (&choice["text"], &choice["finish_reason"]),
            (&json!(expected), &json!(finish)),
            "{fields}"
        );
        assert_eq!(choice["stop_reason"], reason, "{fields}");

        let chunks = chunks(&front, fields);
        assert_eq!(text(&chunks), expected, "{fields}");
        let last = &chunks.last().expect("a chunk")["choices"][0];
        assert_eq!(
            (&last["finish_reason"], &last["stop_reason"]),
            (&json!(finish), &reason),
            "{fields}"
        );
        let finishes = chunks
            .iter()
            .filter(|chunk| !chunk["choices"][0]["finish_reason"].is_null());
        assert_eq!(finishes.count(), 1, "{fields}");
        assert_eq!(
            json!(chunks.len()),
            answer["usage"]["completion_tokens"],
            "one chunk for every token: {fields}"
        );
    }
}

#[test]
fn include_stop_str_means_nothing_without_a_stop() {
    let front = start();
    front.backend.play(Script::Tokens(vec![97, EOS]));
    let fields = ",\"include_stop_str_in_output\":true,\"skip_special_tokens\":false";
    assert_eq!(whole(&front, fields)["choices"][0]["text"], "a");
}

#[test]
fn chunks_share_id_time_and_model() {
    let front = start();
    let chunks = chunks(&front, "");
    assert_eq!(chunks.len(), 6);
    for chunk in &chunks {
        assert_eq!(
            (&chunk["id"], &chunk["created"]),
            (&chunks[0]["id"], &chunks[0]["created"])
        );
        assert_eq!(
            (&chunk["object"], &chunk["model"]),
            (&json!("text_completion"), &json!("tiny"))
        );
        assert_eq!(chunk["choices"].as_array().map(Vec::len), Some(1));
    }
}

#[test]
fn usage_in_streams() {
    let front = start();
    let usages = |fields: &str| -> Vec<Option<Value>> {
        chunks(&front, fields)
            .iter()
            .map(|chunk| chunk.get("usage").cloned())
            .collect()
    };
    let total = whole(&front, "")["usage"].clone();

    let absent = usages("");
    assert_eq!(absent.len(), 6);
    assert!(absent[..5].iter().all(Option::is_none));
    assert_eq!(absent[5].as_ref(), Some(&total));

    for never in [
        ",\"stream_options\":{}",
        ",\"stream_options\":{\"include_usage\":false}",
    ] {
        assert!(usages(never).iter().all(|usage| *usage == Some(Value::Null)), "{never}");
    }

    let extra = chunks(&front, ",\"stream_options\":{\"include_usage\":true}");
    assert_eq!(extra.len(), 7);
    assert!(
        extra[..6]
            .iter()
            .all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some())
    );
    assert_eq!((&extra[6]["choices"], &extra[6]["usage"]), (&json!([]), &total));

    let every = chunks(
        &front,
        ",\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true}",
    );
    let counts: Vec<_> = every
        .iter()
        .map(|chunk| chunk["usage"]["completion_tokens"].as_u64())
        .collect();
    assert_eq!(counts, [Some(1), Some(2), Some(3), Some(4), Some(5), Some(6), Some(6)]);
    assert!(every.iter().all(|chunk| chunk["usage"]["prompt_tokens"] == 3));
    assert_eq!((&every[6]["choices"], &every[6]["usage"]), (&json!([]), &total));
}

#[test]
fn logprobs_have_one_entry_for_every_token() {
    let front = start();
    front.backend.play(Script::Tokens(vec![104, 0xc3, 0xa9, 33, EOS]));
    let entry = |fields: &str| whole(&front, fields)["choices"][0]["logprobs"].clone();
    assert_eq!(entry(",\"logprobs\":null"), json!(null));
    let none = entry(",\"logprobs\":0");
    assert_eq!(none["tokens"], json!(["h", "", "é", "!", "</s>"]));
    assert_eq!(none["text_offset"], json!([0, 1, 1, 2, 3]));
    assert_eq!(none["token_logprobs"], json!([-0.25, -1.25, -2.25, -3.25, -4.25]));
    assert_eq!(none["top_logprobs"][0], json!({ "h": -0.25 }));
    assert_eq!(front.backend.last().sampling.top_logprobs, Some(0));
    let three = entry(",\"logprobs\":3");
    assert_eq!(three["top_logprobs"][0], json!({ "h": -0.25, "?": -7.5, "!": -9999.0 }));
    assert_eq!(
        three["top_logprobs"][3],
        json!({ "!": -3.25, "?": -7.5 }),
        "the chosen token is there once"
    );
    assert_eq!(front.backend.last().sampling.top_logprobs, Some(3));
}

#[test]
fn streamed_logprobs_equal_the_whole_ones_also_where_a_stop_is_held_back() {
    let front = start();
    front.backend.play(Script::Tokens(bytes("ab-cd--ef")));
    let fields = ",\"logprobs\":2,\"stop\":\"--\"";
    let whole = whole(&front, fields)["choices"][0].clone();
    assert_eq!(whole["text"], "ab-cd");
    assert_eq!(whole["logprobs"]["text_offset"], json!([0, 1, 2, 3, 4, 5, 5]));
    let chunks = chunks(&front, fields);
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let joined: Vec<Value> = chunks
            .iter()
            .flat_map(|chunk| {
                chunk["choices"][0]["logprobs"][list]
                    .as_array()
                    .cloned()
                    .unwrap_or_default()
            })
            .collect();
        assert_eq!(json!(joined), whole["logprobs"][list], "{list}");
    }
}

#[test]
fn token_ids_if_asked_for() {
    let front = start();
    front.backend.play(Script::Tokens(vec![97, EOS]));
    let choice = whole(&front, ",\"return_token_ids\":true")["choices"][0].clone();
    assert_eq!(
        (&choice["token_ids"], &choice["prompt_token_ids"]),
        (&json!([97, EOS]), &json!([BOS, 104, 105]))
    );
    let chunks = chunks(&front, ",\"return_token_ids\":true");
    assert_eq!(chunks[0]["choices"][0]["prompt_token_ids"], json!([BOS, 104, 105]));
    assert_eq!(chunks[0]["choices"][0]["token_ids"], json!([97]));
    assert!(chunks[1]["choices"][0].get("prompt_token_ids").is_none());
    assert_eq!(chunks[1]["choices"][0]["token_ids"], json!([EOS]));
}

#[test]
fn prompts_of_every_shape() {
    let front = start();
    let with = |prompt: &str| {
        let answer = post(
            front.address,
            "/v1/completions",
            format!("{{\"model\":\"tiny\",\"prompt\":{prompt}}}"),
        );
        assert_eq!(answer.status, 200, "{}", answer.text());
        front.backend.last().token_ids.to_vec()
    };
    assert_eq!(with("\"hi\""), [BOS, 104, 105]);
    assert_eq!(with("[\"hi\"]"), [BOS, 104, 105]);
    assert_eq!(with("[0,0,0,0,0]"), [0; 5]);
    assert_eq!(with("[[1,258]]"), [1, 258]);
    let long = format!("[{}]", vec!["1"; 201].join(","));
    let answer = post(
        front.address,
        "/v1/completions",
        format!("{{\"model\":\"tiny\",\"prompt\":{long}}}"),
    );
    assert_eq!(answer.status, 400);
    assert!(
        answer.text().contains("`prompt` has more than 200 tokens"),
        "{}",
        answer.text()
    );
    let long = format!("\"{}\"", "a".repeat(300));
    let answer = post(
        front.address,
        "/v1/completions",
        format!("{{\"model\":\"tiny\",\"stream\":true,\"prompt\":{long}}}"),
    );
    assert_eq!(answer.status, 400, "also where a stream is asked for");
    assert!(answer.text().contains("`prompt` has 301 tokens"), "{}", answer.text());
}

#[test]
fn sampling_parameters_reach_the_cluster() {
    let front = start();
    let sampling = |fields: &str| {
        whole(&front, fields);
        front.backend.last().sampling
    };
    let all = ",\"top_p\":0.5,\"top_k\":7,\"min_p\":0.25,\"repetition_penalty\":1.5,\"presence_penalty\":-1,\
        \"frequency_penalty\":2,\"seed\":18446744073709551615";
    let sampled = sampling(&format!(",\"temperature\":0.5{all}"));
    assert!(!sampled.greedy);
    assert_eq!(
        (sampled.temperature, sampled.top_p, sampled.top_k, sampled.min_p),
        (0.5, 0.5, 7, 0.25)
    );
    assert_eq!(
        (
            sampled.repetition_penalty,
            sampled.presence_penalty,
            sampled.frequency_penalty
        ),
        (1.5, -1.0, 2.0)
    );
    assert_eq!(sampled.seed, u64::MAX);
    let greedy = sampling(&format!(",\"temperature\":0{all}"));
    assert!(greedy.greedy);
    assert!(!greedy.needs_history(), "at temperature 0 penalties are ignored");
    assert_eq!(greedy.seed, u64::MAX);
    assert_eq!(sampling(",\"temperature\":1e-30").temperature, 1e-6);
    assert_eq!(sampling(",\"temperature\":1e300").temperature, 1e6);
    assert_eq!(sampling(",\"top_k\":-1").top_k, 0);
    assert_eq!(sampling(",\"top_p\":1.0").top_p, 1.0);
}

#[test]
fn the_iteration_limit_shows_where_the_client_gives_none() {
    let front = start_with(|config| config.limits.max_iter_times = 8);
    for (fields, limit) in [
        ("", 9),
        (",\"max_tokens\":20", 9),
        (",\"max_tokens\":8", 8),
        (",\"max_tokens\":3", 3),
    ] {
        whole(&front, fields);
        assert_eq!(front.backend.last().stop.max_tokens, limit, "{fields}");
    }
}

#[test]
fn failures() {
    let front = start();
    for (kind, status, word) in [
        (
            ServeErrorKind::Overloaded { retry_after_s: 7 },
            429,
            "rate_limit_exceeded",
        ),
        (ServeErrorKind::Unavailable, 503, "ServiceUnavailableError"),
        (ServeErrorKind::TransferFailed, 500, "InternalServerError"),
    ] {
        for script in [Script::Refuse(kind), Script::Fail(vec![], kind)] {
            front.backend.play(script);
            for stream in ["", ",\"stream\":true"] {
                let answer = complete(&front, stream);
                assert_eq!(answer.status, status);
                assert_eq!(
                    (&answer.json()["error"]["type"], &answer.json()["error"]["code"]),
                    (&json!(word), &json!(status))
                );
            }
        }
    }
    front.backend.play(Script::Fail(bytes("ab"), ServeErrorKind::NodeLost));
    let answer = complete(&front, ",\"stream\":true");
    let events = answer.events();
    assert_eq!((events.len(), events[3]), (4, "[DONE]"));
    let error: Value = serde_json::from_str(events[2]).expect("an error event");
    assert_eq!(error["error"]["message"], "scripted\nfailure");
    assert!(!events[2].contains('\n'));
    front.backend.play(Script::Cut(bytes("ab")));
    assert_eq!(complete(&front, "").status, 500);
}
