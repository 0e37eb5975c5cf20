//! `/v1/chat/completions`: what a conversation becomes, what is answered, and what is refused.

mod http_support;

use coordinator::core::types::ServeErrorKind;
use http_support::backend::Script;
use http_support::client::{Response, post};
use http_support::model::{BOS, EOS, SPECIAL, bytes, text};
use http_support::{Front, start, start_chat};
use serde_json::{Value, json};

/// Shows all that a template is given.
const TEMPLATE: &str = "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}\
    {% for call in message.tool_calls %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}\
    {% endfor %}{% if loud %}!{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}";

fn chat(front: &Front, fields: &str) -> Response {
    let messages = r#"[{"role":"user","content":"hi"}]"#;
    post(
        front.address,
        "/v1/chat/completions",
        format!("{{\"model\":\"tiny\",\"messages\":{messages}{fields}}}"),
    )
}

fn with_messages(front: &Front, messages: &str, fields: &str) -> Response {
    post(
        front.address,
        "/v1/chat/completions",
        format!("{{\"model\":\"tiny\",\"messages\":{messages}{fields}}}"),
    )
}

fn whole(front: &Front, fields: &str) -> Value {
    let answer = chat(front, fields);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

fn chunks(front: &Front, fields: &str) -> Vec<Value> {
    let answer = chat(front, &format!(",\"stream\":true{fields}"));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.events().last(), Some(&"[DONE]"));
    answer.json_events()
}

fn content(chunks: &[Value]) -> String {
    chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
        .collect()
}

fn prompt(front: &Front) -> String {
    text().tokenizer.decode(&front.backend.last().token_ids, false)
}

#[test]
fn a_conversation_becomes_the_templates_prompt() {
    let front = start_chat(TEMPLATE);
    let messages = r#"[{"role":"developer","content":"be kind"},{"role":"user","content":[{"type":"text","text":"a"},
        {"type":"text","text":"b"}]},{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function",
        "function":{"name":"f","arguments":"{\"z\":1,\"a\":[true]}"}}]},{"role":"tool","tool_call_id":"1","content":"é"}]"#;
    assert_eq!(with_messages(&front, messages, "").status, 200);
    let expected = "<s>[system]be kind[user]ab[assistant]<f {\"z\": 1, \"a\": [true]}>[tool]é[assistant]";
    assert_eq!(prompt(&front), expected);
    let begins = front.backend.last().token_ids.iter().filter(|id| **id == BOS).count();
    assert_eq!(begins, 1, "the template brings its own beginning");

    let options = ",\"add_generation_prompt\":false,\"chat_template_kwargs\":{\"loud\":true,\"messages\":[]}";
    assert_eq!(chat(&front, options).status, 200);
    assert_eq!(prompt(&front), "<s>[user]hi!");

    let long = "x".repeat(3_000);
    let answer = with_messages(&front, &format!("[{{\"role\":\"user\",\"content\":\"{long}\"}}]"), "");
    assert_eq!(answer.status, 400, "tokens are limited after rendering");
    assert!(
        answer.text().contains("`messages` has 3018 tokens"),
        "{}",
        answer.text()
    );
}

#[test]
fn the_last_message_is_continued_where_that_is_asked_for() {
    let front = start_chat(TEMPLATE);
    let messages = r#"[{"role":"user","content":"hi"},{"role":"assistant","content":[{"type":"text","text":"I s"},
        {"type":"text","text":"ay "}]}]"#;
    for more in [
        "",
        ",\"add_generation_prompt\":false",
        ",\"add_generation_prompt\":null",
    ] {
        let options = format!(",\"continue_final_message\":true,\"chat_template_kwargs\":{{\"loud\":true}}{more}");
        let answer = with_messages(&front, messages, &options);
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(prompt(&front), "<s>[user]hi[assistant]I say ");
        let content = &answer.json()["choices"][0]["message"]["content"];
        assert_eq!(content, "hello", "what was there is not repeated");
    }
    let tokens = post(
        front.address,
        "/tokenize",
        format!("{{\"messages\":{messages},\"continue_final_message\":true}}"),
    );
    assert_eq!(tokens.json()["tokens"], json!(front.backend.last().token_ids));

    let count = front.backend.count();
    let called = r#"[{"role":"assistant","content":"a","tool_calls":[{"function":{"name":"f"}}]}]"#;
    for (messages, options, param) in [
        (messages, ",\"add_generation_prompt\":true", "continue_final_message"),
        (called, "", "messages[0].tool_calls"),
    ] {
        let answer = with_messages(&front, messages, &format!(",\"continue_final_message\":true{options}"));
        assert_eq!(
            (answer.status, answer.json()["error"]["param"].as_str()),
            (400, Some(param))
        );
    }
    let unshown = start_chat("{{ messages[0].role }}");
    let answer = with_messages(&unshown, messages, ",\"continue_final_message\":true");
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("cannot be continued"), "{}", answer.text());
    assert_eq!(front.backend.count(), count);
}

#[test]
fn a_template_that_knows_developers_meets_them() {
    let front = start_chat("{% if messages[0].role == 'developer' %}D{% endif %}{{ messages[0].content }}");
    let answer = with_messages(&front, r#"[{"role":"developer","content":"x"}]"#, "");
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(prompt(&front), "Dx");
}

#[test]
fn a_whole_answer() {
    let front = start_chat(TEMPLATE);
    let answer = whole(&front, "");
    assert!(answer["id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-")));
    assert_eq!(
        (&answer["object"], &answer["model"]),
        (&json!("chat.completion"), &json!("tiny"))
    );
    let choice = json!({
        "index": 0, "message": { "role": "assistant", "content": "hello" }, "logprobs": null, "finish_reason": "stop",
        "stop_reason": null,
    });
    assert_eq!(answer["choices"], json!([choice]));
    assert_eq!(answer["usage"]["completion_tokens"], 6);
    assert_eq!(answer["usage"]["prompt_tokens"], bytes("[user]hi[assistant]").len() + 1);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
}

#[test]
fn a_stream_begins_with_the_role_and_ends_with_an_empty_delta() {
    let front = start_chat(TEMPLATE);
    let chunks = chunks(&front, "");
    assert_eq!(content(&chunks), "hello");
    assert_eq!(
        chunks[0]["choices"][0]["delta"],
        json!({ "role": "assistant", "content": "" })
    );
    for later in &chunks[1..] {
        assert!(later["choices"][0]["delta"].get("role").is_none(), "{later}");
    }
    let (last, before) = chunks.split_last().expect("chunks");
    assert_eq!(last["choices"][0]["delta"], json!({}));
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    for chunk in before {
        assert!(chunk["choices"][0]["finish_reason"].is_null());
    }
    for chunk in &chunks {
        assert_eq!(chunk["id"], chunks[0]["id"]);
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert!(chunk.get("usage").is_none(), "nothing was said about usage");
    }
}

#[test]
fn usage_in_a_stream_comes_where_it_is_asked_for() {
    let front = start_chat(TEMPLATE);
    for never in ["{}", "{\"include_usage\":false}"] {
        let chunks = chunks(&front, &format!(",\"stream_options\":{never}"));
        assert!(chunks.iter().all(|chunk| chunk["usage"].is_null()));
    }
    let extra = chunks(&front, ",\"stream_options\":{\"include_usage\":true}");
    let (last, before) = extra.split_last().expect("chunks");
    assert!(before.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)));
    assert_eq!(
        (&last["choices"], &last["usage"]["completion_tokens"]),
        (&json!([]), &json!(6))
    );
    let every = chunks(
        &front,
        ",\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true}",
    );
    let counts: Vec<u64> = every
        .iter()
        .map(|chunk| chunk["usage"]["completion_tokens"].as_u64().expect("a count"))
        .collect();
    assert!(counts.is_sorted(), "{counts:?}");
    assert_eq!(counts.last(), Some(&6));
}

#[test]
fn why_an_answer_ended() {
    let front = start_chat(TEMPLATE);
    let cases: [(Vec<u32>, &str, &str, &str, Value); 6] = [
        (bytes("abcdef"), ",\"max_tokens\":3", "abc", "length", json!(null)),
        (
            bytes("abcdef"),
            ",\"max_tokens\":2,\"max_completion_tokens\":4",
            "abcd",
            "length",
            json!(null),
        ),
        (bytes("abcdef"), ",\"stop\":[\"x\",\"de\"]", "abc", "stop", json!("de")),
        (bytes("abcdef"), ",\"stop_token_ids\":[99]", "ab", "stop", json!(99)),
        (vec![97, EOS], ",\"max_tokens\":2", "a", "stop", json!(null)),
        (
            vec![97, SPECIAL, 0xf0],
            ",\"max_tokens\":3",
            "a\u{fffd}",
            "length",
            json!(null),
        ),
    ];
    for (tokens, fields, expected, finish, reason) in cases {
        front.backend.play(Script::Tokens(tokens));
        let answer = whole(&front, fields);
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["content"], expected, "{fields}");
        assert_eq!(
            (&choice["finish_reason"], &choice["stop_reason"]),
            (&json!(finish), &reason)
        );
        let chunks = chunks(&front, fields);
        assert_eq!(content(&chunks), expected, "{fields}");
        let last = &chunks.last().expect("a chunk")["choices"][0];
        assert_eq!(
            (&last["finish_reason"], &last["stop_reason"]),
            (&json!(finish), &reason)
        );
        assert_eq!(last["delta"], json!({}));
    }
    assert_eq!(front.backend.last().sampling.top_logprobs, None);
}

#[test]
fn log_probabilities_are_lists() {
    let front = start_chat(TEMPLATE);
    front.backend.play(Script::Tokens([bytes("é"), vec![EOS]].concat()));
    let answer = whole(&front, ",\"logprobs\":true,\"top_logprobs\":2");
    assert_eq!(front.backend.last().sampling.top_logprobs, Some(2));
    let list = &answer["choices"][0]["logprobs"]["content"];
    let first = json!({
        "token": "\u{fffd}", "logprob": -0.25, "bytes": [0xc3], "top_logprobs": [
            { "token": "\u{fffd}", "logprob": -0.25, "bytes": [0xc3] },
            { "token": "?", "logprob": -7.5, "bytes": [63] },
        ],
    });
    assert_eq!(list[0], first);
    assert_eq!(list.as_array().map(Vec::len), Some(3));
    assert_eq!(
        (&list[2]["token"], &list[2]["bytes"]),
        (&json!("</s>"), &json!([60, 47, 115, 62]))
    );

    let streamed: Vec<Value> = chunks(&front, ",\"logprobs\":true,\"top_logprobs\":2")
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(json!(streamed), *list, "each token once, in a stream too");
    assert!(streamed.iter().all(|entry| entry["logprob"].is_number()));

    let bare = whole(&front, ",\"logprobs\":true");
    assert_eq!(bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
    assert_eq!(front.backend.last().sampling.top_logprobs, Some(0));
    for none in [
        ",\"logprobs\":false,\"top_logprobs\":0",
        ",\"logprobs\":null,\"top_logprobs\":null",
        "",
    ] {
        assert_eq!(whole(&front, none)["choices"][0]["logprobs"], Value::Null, "{none}");
    }
    let most = whole(&front, ",\"logprobs\":true,\"top_logprobs\":20");
    let listed = most["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        .as_array()
        .cloned();
    let impossible = listed.and_then(|list| list.last().cloned()).expect("an entry");
    assert_eq!(impossible["logprob"], -9999.0, "JSON has no infinity");
}

#[test]
fn token_ids_are_told_where_they_are_asked_for() {
    let front = start_chat(TEMPLATE);
    let answer = whole(&front, ",\"return_token_ids\":true");
    let ids = [bytes("hello"), vec![EOS]].concat();
    assert_eq!(answer["choices"][0]["token_ids"], json!(ids));
    assert_eq!(answer["prompt_token_ids"][0], BOS);
    let chunks = chunks(&front, ",\"return_token_ids\":true");
    let streamed: Vec<Value> = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(json!(streamed), json!(ids));
    assert_eq!(chunks[0]["prompt_token_ids"], answer["prompt_token_ids"]);
    assert!(chunks[1].get("prompt_token_ids").is_none());
}

#[test]
fn failures_have_a_status_before_the_first_token_and_an_event_after_it() {
    let front = start_chat(TEMPLATE);
    for stream in ["false", "true"] {
        for (kind, status) in [
            (ServeErrorKind::Overloaded { retry_after_s: 2 }, 429),
            (ServeErrorKind::Unavailable, 503),
        ] {
            front.backend.play(Script::Refuse(kind));
            assert_eq!(chat(&front, &format!(",\"stream\":{stream}")).status, status);
        }
        front.backend.play(Script::Fail(vec![], ServeErrorKind::NodeLost));
        assert_eq!(chat(&front, &format!(",\"stream\":{stream}")).status, 500);
    }
    front.backend.play(Script::Fail(bytes("ab"), ServeErrorKind::NodeLost));
    assert_eq!(chat(&front, "").status, 500);
    let failed = chunks(&front, "");
    assert_eq!(content(&failed), "ab");
    assert_eq!(failed.last().expect("an event")["error"]["type"], "InternalServerError");
}

/// Field, values that are wrong.
const WRONG: &[(&str, &[&str])] = &[
    ("max_tokens", &["0", "-1", "1.0", "2147483648", "\"5\"", "true"]),
    (
        "max_completion_tokens",
        &["0", "-1", "1.0", "2147483648", "\"5\"", "true"],
    ),
    ("logprobs", &["1", "0", "\"true\"", "[]"]),
    ("top_logprobs", &["-1", "21", "5", "true", "1.0", "\"1\""]),
    ("temperature", &["-0.1", "1e999", "\"1\""]),
    ("top_p", &["0", "1.1"]),
    ("seed", &["0", "18446744073709551616"]),
    ("stop", &["\"\"", "[\"\"]", "1"]),
    ("stream_options", &["{}", "1"]),
    ("n", &["0", "-1", "1.0"]),
    ("modalities", &["\"text\"", "[\"audio\"]", "[\"text\",1]"]),
    ("add_generation_prompt", &["1"]),
    ("chat_template_kwargs", &["1", "[]", "{\"a\":1e999}"]),
    ("functions", &["[]", "1"]),
    ("function_call", &["\"auto\""]),
    ("parallel_tool_calls", &["1"]),
    ("tool_choice", &["\"required\"", "1", "{}", "\"x\""]),
    ("tools", &["1", "{}", "[1]"]),
    ("response_format", &["1", "{}", "{\"type\":\"xml\"}"]),
];

#[test]
fn every_wrong_field_is_refused_by_name() {
    let front = start_chat(TEMPLATE);
    for (field, values) in WRONG {
        for value in *values {
            let answer = chat(&front, &format!(",\"{field}\":{value}"));
            assert_eq!(answer.status, 400, "{field} {value}: {}", answer.text());
            let error = &answer.json()["error"];
            assert!(
                error["param"].as_str().is_some_and(|param| param.starts_with(field)),
                "{field} {value}: {error}"
            );
        }
    }
    for (messages, param) in [
        ("null", "messages"),
        ("[]", "messages"),
        (r#"[{"role":"user"}]"#, "messages[0].content"),
        (
            r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://127.0.0.1:1/"}}]}]"#,
            "messages[0].content[0].type",
        ),
    ] {
        let answer = with_messages(&front, messages, "");
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(param)));
    }
    assert_eq!(front.backend.count(), 0, "nothing was worked on");
    let nulls: String = WRONG.iter().map(|(field, _)| format!(",\"{field}\":null")).collect();
    assert_eq!(chat(&front, &format!("{nulls},\"user\":5,\"metadata\":[]")).status, 200);
}

#[test]
fn a_tool_must_be_described_in_full() {
    let front = start_chat(TEMPLATE);
    let tools = |tools: &str, more: &str| chat(&front, &format!(",\"tools\":{tools}{more}"));
    for (list, param) in [
        ("[{}]", "tools[0].type"),
        ("[{\"type\":\"x\"}]", "tools[0].type"),
        ("[{\"type\":\"function\"}]", "tools[0].function"),
        ("[{\"type\":\"function\",\"function\":{}}]", "tools[0].function.name"),
        (
            "[{\"type\":\"function\",\"function\":{\"name\":\"a b\"}}]",
            "tools[0].function.name",
        ),
        (
            "[{\"type\":\"function\",\"function\":{\"name\":\"a\",\"parameters\":5}}]",
            "tools[0].function.parameters",
        ),
        (
            "[{\"type\":\"function\",\"function\":{\"name\":\"a\"}},{\"type\":\"function\",\"function\":{\"name\":\"a\"}}]",
            "tools[1].function.name",
        ),
    ] {
        let answer = tools(list, "");
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (400, &json!(param)),
            "{list}"
        );
    }
    let one = "[{\"type\":\"function\",\"function\":{\"name\":\"a\"}}]";
    let other = ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"b\"}}";
    assert_eq!(tools(one, other).json()["error"]["param"], "tool_choice.function.name");
    assert_eq!(tools(one, ",\"tool_choice\":\"none\"").status, 200);
    assert_eq!(
        tools("[]", ",\"tool_choice\":\"auto\"").status,
        200,
        "an empty list is none"
    );
}

#[test]
fn a_model_without_a_template_cannot_chat() {
    let front = start();
    let answer = chat(&front, "");
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (400, &json!("messages"))
    );
    assert!(
        answer.text().contains("this model has no chat template"),
        "{}",
        answer.text()
    );
    let broken = start_chat("{% if %}");
    let answer = chat(&broken, "");
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("does not work"), "{}", answer.text());
    let strict = start_chat("{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}x");
    let answer = with_messages(
        &strict,
        r#"[{"role":"user","content":"a"},{"role":"user","content":"b"}]"#,
        "",
    );
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("one at a time"), "{}", answer.text());
    assert_eq!(chat(&strict, "").status, 200);
}

#[test]
fn an_unknown_model_is_404() {
    let front = start_chat(TEMPLATE);
    let answer = post(
        front.address,
        "/v1/chat/completions",
        r#"{"model":"dummy","messages":[{"role":"user","content":"a"}]}"#,
    );
    assert_eq!(
        (answer.status, &answer.json()["error"]["type"]),
        (404, &json!("NotFoundError"))
    );
}
