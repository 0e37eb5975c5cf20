//! What `/generate`, `/generate_stream` and `/` answer, and what they hand to the cluster.

mod http_support;

use coordinator::core::types::ServeErrorKind;
use http_support::backend::Script;
use http_support::client::{Response, post};
use http_support::model::{BOS, EOS, SPECIAL, bytes};
use http_support::{Front, start, start_with};
use serde_json::{Value, json};

fn generate(front: &Front, parameters: &str) -> Value {
    let answer = post(
        front.address,
        "/generate",
        format!("{{\"inputs\":\"hi\",\"parameters\":{{{parameters}}}}}"),
    );
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn stream(front: &Front, parameters: &str) -> Response {
    post(
        front.address,
        "/generate_stream",
        format!("{{\"inputs\":\"hi\",\"parameters\":{{{parameters}}}}}"),
    )
}

#[test]
fn a_whole_answer_with_everything() {
    let front = start();
    front.backend.play(Script::Tokens(vec![104, SPECIAL, 0xc3, 0xa9, EOS]));
    let answer = generate(&front, "\"decoder_input_details\":true,\"seed\":18446744073709551615");
    let token = |id: u32, text: &str, logprob: f64, special: bool| json!({ "id": id, "text": text, "logprob": logprob, "special": special });
    let expected = json!({
        "generated_text": "hé",
        "details": {
            "finish_reason": "eos_token",
            "generated_tokens": 5,
            "prompt_tokens": 3,
            "input_length": 3,
            "seed": 18_446_744_073_709_551_615_u64,
            "prefill": [
                { "id": BOS, "text": "<s>", "logprob": null, "special": true },
                token(104, "h", -1.0, false),
                token(105, "i", -2.0, false),
            ],
            "tokens": [
                token(104, "h", -0.5, false),
                token(SPECIAL, "<x>", -1.5, true),
                token(0xc3, "", -2.5, false),
                token(0xa9, "é", -3.5, false),
                token(EOS, "</s>", -4.5, true),
            ],
        },
    });
    assert_eq!(answer, expected);
    assert_eq!(front.backend.last().prompt_logprobs, Some(0));
}

#[test]
fn details_only_if_asked_for() {
    let front = start();
    assert_eq!(generate(&front, ""), json!({ "generated_text": "hello" }));
    let details = generate(&front, "\"details\":true");
    assert_eq!(details["details"]["prefill"], json!([]));
    assert_eq!(front.backend.last().prompt_logprobs, None);
    assert_eq!(
        generate(&front, "\"return_full_text\":true"),
        json!({ "generated_text": "hihello" })
    );
}

#[test]
fn a_stream_has_one_event_for_every_token() {
    let front = start();
    front.backend.play(Script::Tokens(vec![104, 0xc3, 0xa9, EOS]));
    let answer = stream(&front, "\"details\":true,\"seed\":7,\"return_full_text\":true");
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!(answer.header("x-accel-buffering"), Some("no"));
    assert!(!answer.text().contains("[DONE]"));
    let events = answer.json_events();
    assert_eq!(events.len(), 4);
    assert_eq!(
        events[1],
        json!({ "token": { "id": 0xc3, "text": "", "logprob": -1.5, "special": false },
            "generated_text": null, "details": null })
    );
    assert_eq!(
        events[3],
        json!({ "token": { "id": EOS, "text": "</s>", "logprob": -3.5, "special": true }, "generated_text": "hihé",
            "details": { "finish_reason": "eos_token", "generated_tokens": 4, "seed": 7, "prompt_tokens": 3, "input_length": 3 } })
    );
    let plain = stream(&front, "").json_events();
    assert_eq!(plain[3]["details"], Value::Null);
    assert_eq!(plain[3]["generated_text"], "hé");
}

#[test]
fn the_root_path_answers_a_list_or_a_stream() {
    let front = start();
    for path in ["/", "/invocations"] {
        assert_eq!(
            post(front.address, path, "{\"inputs\":\"a\"}").json(),
            json!([{ "generated_text": "hello" }])
        );
        let answer = post(front.address, path, "{\"inputs\":\"a\",\"stream\":true}");
        assert_eq!(answer.json_events().len(), 6);
    }
}

#[test]
fn stop_text_is_hidden_and_its_tokens_are_counted() {
    let front = start();
    front.backend.play(Script::Tokens(bytes("one two three")));
    let parameters = "\"details\":true,\"stop\":[\"xyz\",\"o t\"]";
    let whole = generate(&front, parameters);
    assert_eq!(whole["generated_text"], "one tw");
    assert_eq!(whole["details"]["finish_reason"], "stop_sequence");
    assert_eq!(whole["details"]["generated_tokens"], 9);
    let tokens = whole["details"]["tokens"].as_array().expect("a list");
    let texts: Vec<&str> = tokens
        .iter()
        .map(|token| token["text"].as_str().expect("a text"))
        .collect();
    assert_eq!(texts, ["o", "n", "e", " ", "t", "w", "", "", ""]);

    let streamed: Vec<Value> = stream(&front, parameters).json_events();
    let streamed: Vec<&Value> = streamed.iter().map(|event| &event["token"]).collect();
    assert_eq!(streamed, tokens.iter().collect::<Vec<_>>());
}

#[test]
fn the_limit_wins_over_a_stop_on_the_last_permitted_token() {
    let front = start();
    for (tokens, parameters, text) in [
        (vec![104, EOS], "\"max_new_tokens\":2", "h"),
        (bytes("hi"), "\"max_new_tokens\":2,\"stop\":\"i\"", "h"),
        (bytes("hi"), "\"max_new_tokens\":2", "hi"),
        (vec![104, 0xc3], "\"max_new_tokens\":2", "h\u{fffd}"),
        (bytes("x"), "\"max_new_tokens\":1", "x"),
    ] {
        front.backend.play(Script::Tokens(tokens));
        let whole = generate(&front, &format!("\"details\":true,{parameters}"));
        assert_eq!(whole["details"]["finish_reason"], "length", "{parameters}");
        assert_eq!(whole["generated_text"], text, "{parameters}");
        let events = stream(&front, &format!("\"details\":true,{parameters}")).json_events();
        let last = events.last().expect("an event");
        assert_eq!(last["generated_text"], text);
        assert_eq!(last["details"]["finish_reason"], "length");
        assert_eq!(Value::from(events.len()), last["details"]["generated_tokens"]);
    }
}

#[test]
fn truncate_keeps_the_end_and_long_prompts_are_refused() {
    let front = start();
    generate(&front, "\"truncate\":2");
    assert_eq!(*front.backend.last().token_ids, [104, 105]);
    generate(&front, "\"truncate\":3");
    assert_eq!(*front.backend.last().token_ids, [BOS, 104, 105]);
    let long = "a".repeat(5_000);
    let answer = post(front.address, "/generate", format!("{{\"inputs\":\"{long}\"}}"));
    assert_eq!(answer.status, 422);
    assert_eq!(
        answer.json()["error"],
        "Input validation error: `inputs` has 5001 tokens, but must have 1 to 200 tokens"
    );
    let body = format!("{{\"inputs\":\"{long}\",\"parameters\":{{\"truncate\":200,\"details\":true}}}}");
    let cut = post(front.address, "/generate", body);
    assert_eq!(cut.json()["details"]["prompt_tokens"], 200);
    let full = format!("{{\"inputs\":\"{long}\",\"parameters\":{{\"truncate\":1,\"return_full_text\":true}}}}");
    assert_eq!(
        post(front.address, "/generate", full).json()["generated_text"],
        format!("{long}hello")
    );
}

#[test]
fn text_items_are_put_together() {
    let front = start();
    let body = "{\"inputs\":[{\"type\":\"text\",\"text\":\"h\"},{\"type\":\"text\",\"text\":\"i\"}]}";
    assert_eq!(post(front.address, "/generate", body).status, 200);
    assert_eq!(*front.backend.last().token_ids, [BOS, 104, 105]);
}

#[test]
fn when_sampling_is_asked_for() {
    let front = start_with(|config| config.coordinator.default_top_k = 50);
    for (parameters, samples) in [
        ("", false),
        ("\"temperature\":1", false),
        ("\"temperature\":1.0,\"typical_p\":1.0", false),
        ("\"repetition_penalty\":1.2", false),
        ("\"seed\":5", false),
        ("\"temperature\":0.7", true),
        ("\"top_k\":5", true),
        ("\"top_p\":0.9", true),
        ("\"typical_p\":0.9", true),
        ("\"do_sample\":true", true),
        ("\"do_sample\":false,\"temperature\":0.7,\"top_k\":5", false),
    ] {
        generate(&front, parameters);
        assert_eq!(!front.backend.last().sampling.greedy, samples, "{parameters}");
    }
    generate(
        &front,
        "\"do_sample\":true,\"temperature\":0.5,\"repetition_penalty\":1.25",
    );
    let sampling = front.backend.last().sampling;
    assert_eq!(
        (sampling.temperature, sampling.top_k, sampling.top_p, sampling.typical_p),
        (0.5, 50, 1.0, 1.0)
    );
    assert_eq!(sampling.repetition_penalty, 1.25);
    assert_ne!(sampling.seed, 0);
    generate(&front, "\"top_k\":259");
    assert_eq!(
        front.backend.last().sampling.top_k,
        0,
        "the whole vocabulary is no limit"
    );
    generate(&front, "\"repetition_penalty\":1.5");
    assert_eq!(
        front.backend.last().sampling.repetition_penalty,
        1.5,
        "penalties apply to greedy decoding too"
    );
}

#[test]
fn the_answer_is_cut_to_the_limits() {
    let front = start_with(|config| config.limits.max_iter_times = 8);
    for (parameters, limit) in [
        ("", 9),
        ("\"max_new_tokens\":20", 9),
        ("\"max_new_tokens\":8", 8),
        ("\"max_new_tokens\":3", 3),
    ] {
        generate(&front, parameters);
        assert_eq!(front.backend.last().stop.max_tokens, limit, "{parameters}");
    }
}

#[test]
fn a_drawn_seed_is_told() {
    let front = start();
    let seed = |front: &Front| {
        generate(front, "\"details\":true")["details"]["seed"]
            .as_u64()
            .expect("a seed")
    };
    let first = seed(&front);
    assert_eq!(first, front.backend.last().sampling.seed);
    assert_ne!(first, seed(&front));
    let zero = start_with(|config| config.coordinator.allow_seed_zero = true);
    assert_eq!(generate(&zero, "\"details\":true,\"seed\":0")["details"]["seed"], 0);
}

#[test]
fn failures_before_the_first_token_have_a_status() {
    let front = start();
    let cases = [
        (ServeErrorKind::Overloaded { retry_after_s: 7 }, 429, "overloaded"),
        (ServeErrorKind::Unavailable, 503, "unavailable"),
        (ServeErrorKind::Timeout, 424, "generation"),
        (ServeErrorKind::NodeLost, 424, "generation"),
        (ServeErrorKind::TooLong, 422, "validation"),
    ];
    for (kind, status, word) in cases {
        for script in [Script::Refuse(kind), Script::Fail(vec![], kind)] {
            front.backend.play(script);
            for path in ["/generate", "/generate_stream"] {
                let answer = post(front.address, path, "{\"inputs\":\"a\"}");
                assert_eq!(
                    (answer.status, answer.json()["error_type"].as_str()),
                    (status, Some(word)),
                    "{path}"
                );
                assert_eq!(answer.header("retry-after").is_some(), matches!(status, 429 | 503));
            }
        }
    }
    front.backend.play(Script::Cut(vec![]));
    let answer = post(front.address, "/generate", "{\"inputs\":\"a\"}");
    assert_eq!(
        (answer.status, answer.json()["error_type"].as_str()),
        (500, Some("incomplete_generation"))
    );
}

#[test]
fn failures_after_the_first_token_end_the_stream_with_one_event() {
    let front = start();
    let cut = Script::Cut(bytes("abc"));
    let failed = Script::Fail(bytes("abc"), ServeErrorKind::NodeLost);
    // A stream has one word for everything that fails in it: its clients know no other.
    let unavailable = Script::Fail(bytes("abc"), ServeErrorKind::Unavailable);
    front.backend.play(unavailable);
    let events = stream(&front, "").json_events();
    assert_eq!(events[3]["error_type"], "generation");
    assert_eq!(
        events[3]["error"],
        "Request failed during generation: scripted\nfailure"
    );
    for (script, word, status) in [(cut, "incomplete_generation", 500), (failed, "generation", 424)] {
        front.backend.play(script);
        let events = stream(&front, "").json_events();
        assert_eq!(events.len(), 4);
        assert_eq!(events[3]["error_type"], word);
        assert!(events[3]["error"].is_string());
        let whole = post(front.address, "/generate", "{\"inputs\":\"a\"}");
        assert_eq!(
            (whole.status, whole.json()["error_type"].as_str()),
            (status, Some(word))
        );
    }
}

#[test]
fn timing_headers_are_whole_milliseconds() {
    let front = start();
    let answer = post(front.address, "/generate", "{\"inputs\":\"hié\"}");
    for name in [
        "x-compute-time",
        "x-total-time",
        "x-validation-time",
        "x-queue-time",
        "x-inference-time",
        "x-time-per-token",
    ] {
        assert!(
            answer.header(name).is_some_and(|value| value.parse::<u64>().is_ok()),
            "{name}"
        );
    }
    assert_eq!(
        answer.header("x-queue-time"),
        Some("1"),
        "the scripted cluster queues for 1.5 ms"
    );
    assert_eq!(answer.header("x-compute-type"), Some("cpu"));
    assert_eq!(answer.header("x-compute-characters"), Some("3"));
}
