//! `strict_mindie`, and the other switches of the API's decisions: each changes what it says and nothing else.

mod http_support;

use coordinator::core::types::ServeErrorKind;
use http_support::backend::Script;
use http_support::client::{Response, get, post};
use http_support::{Front, start, start_chat_with, start_with};
use serde_json::{Value, json};

fn strict() -> Front {
    start_with(|config| config.coordinator.strict_mindie = true)
}

fn generate(front: &Front, parameters: &str) -> Response {
    post(
        front.address,
        "/generate",
        format!("{{\"inputs\":\"a\",\"parameters\":{{{parameters}}}}}"),
    )
}

fn complete(front: &Front, fields: &str) -> Response {
    post(
        front.address,
        "/v1/completions",
        format!("{{\"model\":\"tiny\",\"prompt\":\"a\"{fields}}}"),
    )
}

fn refused(answer: &Response, field: &str) {
    assert_eq!(answer.status, 422, "{field}: {}", answer.text());
    let body = answer.json();
    assert_eq!(body["error_type"], "Input Validation Error", "{field}");
    let message = body["error"].as_str().expect("a message");
    assert!(
        message.contains(field) && message.contains("PD disaggregation"),
        "{message}"
    );
}

#[test]
fn what_the_mode_cannot_do_is_refused() {
    let front = strict();
    for (field, value) in [
        ("stop", "\"x\""),
        ("stop", "[\"x\"]"),
        ("stop_sequences", "[\"x\"]"),
        ("adapter_id", "\"a\""),
    ] {
        refused(&generate(&front, &format!("\"{field}\":{value}")), field);
    }
    for (field, value) in [
        ("logprobs", "0"),
        ("logprobs", "2"),
        ("n", "2"),
        ("best_of", "2"),
        ("use_beam_search", "true"),
    ] {
        refused(&complete(&front, &format!(",\"{field}\":{value}")), field);
    }
    assert_eq!(front.backend.count(), 0);
    for fine in ["\"stop\":null", "\"stop\":[]", "\"adapter_id\":\"None\"", "\"seed\":1"] {
        assert_eq!(generate(&front, fine).status, 200, "{fine}");
    }
    for fine in [
        ",\"n\":1,\"best_of\":1,\"use_beam_search\":false,\"logprobs\":null",
        ",\"stop\":\"x\",\"stop_token_ids\":[5],\"include_stop_str_in_output\":true",
    ] {
        assert_eq!(complete(&front, fine).status, 200, "{fine}");
    }
    let lenient = start();
    assert_eq!(generate(&lenient, "\"stop\":\"x\"").status, 200);
    assert_eq!(complete(&lenient, ",\"logprobs\":2").status, 200);
}

#[test]
fn chats_are_refused_the_same() {
    let front = start_chat_with("{{ messages[0].content }}", |config| {
        config.coordinator.strict_mindie = true
    });
    let chat = |fields: &str| {
        let messages = r#"[{"role":"user","content":"a"}]"#;
        let body = format!("{{\"model\":\"tiny\",\"messages\":{messages}{fields}}}");
        post(front.address, "/v1/chat/completions", body)
    };
    refused(&chat(",\"logprobs\":true"), "logprobs");
    refused(&chat(",\"n\":2"), "n");
    assert_eq!(
        chat(",\"logprobs\":false,\"top_logprobs\":0,\"n\":1,\"stop\":\"x\"").status,
        200
    );
}

#[test]
fn parameters_without_effect_there_have_none() {
    let front = strict();
    assert_eq!(generate(&front, "\"typical_p\":0.5").status, 200);
    let sampling = front.backend.last().sampling;
    assert!(sampling.greedy && sampling.typical_p == 1.0);
    assert_eq!(generate(&front, "\"watermark\":true").status, 200);
    assert_eq!(
        generate(&front, "\"typical_p\":1.5").status,
        422,
        "the range is still the range"
    );
    assert_eq!(generate(&start(), "\"typical_p\":0.5").status, 200);
}

#[test]
fn details_are_null_where_the_seed_says_null() {
    let parameters = "\"decoder_input_details\":true";
    let details = generate(&strict(), parameters).json()["details"].clone();
    for list in ["prefill", "tokens"] {
        let token = &details[list][0];
        assert!(token["id"].is_number(), "{token}");
        let nulls = [&token["logprob"], &token["special"], &token["text"]];
        assert_eq!(nulls, [&Value::Null; 3], "{token}");
    }
    let details = generate(&start(), parameters).json()["details"].clone();
    assert!(details["tokens"][0]["logprob"].is_number() && details["prefill"][1]["text"].is_string());
}

#[test]
fn errors_have_the_words_and_statuses_of_the_seed() {
    let front = strict();
    let words = |answer: &Response| (answer.status, answer.json()["error_type"].as_str().map(str::to_owned));
    let validation = Some("Input Validation Error".to_owned());
    let generation = Some("Generation Error".to_owned());
    assert_eq!(
        words(&post(front.address, "/v1/completions", "{")),
        (422, validation.clone())
    );
    let unknown = post(front.address, "/v1/completions", "{\"model\":\"x\",\"prompt\":\"a\"}");
    assert_eq!(words(&unknown), (422, validation.clone()));
    assert_eq!(
        words(&post(front.address, "/generate", "{}")),
        (422, validation.clone())
    );
    assert_eq!(words(&get(front.address, "/v1/nothing")), (404, validation));
    for (kind, status) in [
        (ServeErrorKind::Overloaded { retry_after_s: 1 }, 424),
        (ServeErrorKind::Unavailable, 503),
        (ServeErrorKind::Timeout, 500),
    ] {
        front.backend.play(Script::Refuse(kind));
        assert_eq!(words(&generate(&front, "")), (status, generation.clone()));
        assert_eq!(words(&complete(&front, "")), (status, generation.clone()));
    }
}

#[test]
fn any_model_name_takes_any_model_name() {
    let front = start_with(|config| config.coordinator.any_model_name = true);
    let with = |model: &str| {
        let body = format!("{{\"model\":{model},\"prompt\":\"a\"}}");
        post(front.address, "/v1/completions", body)
    };
    for name in ["\"tgi\"", "\"http://127.0.0.1:1\""] {
        let answer = with(name);
        assert_eq!(answer.status, 200, "{name}");
        assert_eq!(answer.json()["model"].to_string(), name);
    }
    for wrong in ["\"\"", "5", "null"] {
        assert_eq!(with(wrong).status, 400, "{wrong}");
    }
    assert_eq!(
        get(front.address, "/v1/models/other").status,
        404,
        "the list says what there is"
    );
    assert_eq!(complete(&start(), ",\"model\":\"x\"").status, 400, "twice");
}

#[test]
fn timings_can_be_left_out_of_the_usage() {
    let front = start_with(|config| config.coordinator.usage_timings = false);
    let usage = complete(&front, "").json()["usage"].clone();
    assert_eq!(usage["completion_tokens"], 6);
    assert!(
        usage.get("batch_size").is_none() && usage.get("queue_wait_time").is_none(),
        "{usage}"
    );
    let streamed = complete(&front, ",\"stream\":true").json_events();
    let usage = &streamed.last().expect("a chunk")["usage"];
    assert!(
        usage["prompt_tokens"].is_number() && usage.get("batch_size").is_none(),
        "{usage}"
    );
    let usage = complete(&start(), "").json()["usage"].clone();
    assert_eq!(usage["batch_size"], json!([1, 2, 3, 4, 5, 6]));
}

#[test]
fn seed_zero_and_the_extra_iteration_have_switches() {
    assert_eq!(generate(&start(), "\"seed\":0").status, 422);
    let allowed = start_with(|config| config.coordinator.allow_seed_zero = true);
    assert_eq!(generate(&allowed, "\"seed\":0").status, 200);
    assert_eq!(allowed.backend.last().sampling.seed, 0);
    for (extra, limit) in [(true, 65), (false, 64)] {
        let front = start_with(|config| config.limits.extra_decode_iteration = extra);
        assert_eq!(complete(&front, "").status, 200);
        assert_eq!(front.backend.last().stop.max_tokens, limit);
    }
}
