//! Tools in chats: what the model is told, and how its calls come back.

mod http_support;

use http_support::backend::Script;
use http_support::client::{Response, post};
use http_support::model::{EOS, bytes, text};
use http_support::{Front, start_chat};
use protocol::sampling::Grammar;
use serde_json::{Value, json};

/// Knows tools, as Qwen's does.
const NATIVE: &str = "{% for tool in tools %}{{ tool | tojson }}<tool_call>{% endfor %}\
    {% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}";
/// Knows none.
const PLAIN: &str = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}";
const TOOLS: &str = r#"[{"type":"function","function":{"name":"weather","parameters":{"type":"object","properties":
    {"city":{"type":"string"}}}}}]"#;

fn ask(front: &Front, fields: &str) -> Response {
    let messages = r#"[{"role":"user","content":"hi"}]"#;
    let body = format!("{{\"model\":\"tiny\",\"messages\":{messages},\"tools\":{TOOLS},\"max_tokens\":200{fields}}}");
    let answer = post(front.address, "/v1/chat/completions", body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

fn says(front: &Front, words: &str) {
    front.backend.play(Script::Tokens([bytes(words), vec![EOS]].concat()));
}

fn prompt(front: &Front) -> String {
    text().tokenizer.decode(&front.backend.last().token_ids, false)
}

#[test]
fn a_template_that_knows_tools_gets_them_as_they_were_written() {
    let front = start_chat(NATIVE);
    ask(&front, "");
    let tool = "{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"parameters\": {\"type\": \"object\", \
        \"properties\": {\"city\": {\"type\": \"string\"}}}}}";
    assert_eq!(prompt(&front), format!("{tool}<tool_call>[user]hi"));
    ask(&front, ",\"tool_choice\":\"none\"");
    assert_eq!(prompt(&front), "[user]hi", "what is not to be called is not shown");
}

#[test]
fn a_template_that_knows_none_is_given_a_description() {
    let front = start_chat(PLAIN);
    ask(&front, "");
    let prompt = prompt(&front);
    assert!(prompt.starts_with("[system]# Tools\n\n"), "{prompt}");
    assert!(
        prompt.contains("\"name\":\"weather\"") && prompt.ends_with("[user]hi"),
        "{prompt}"
    );
}

#[test]
fn calls_come_back_as_calls() {
    let front = start_chat(NATIVE);
    says(
        &front,
        "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>\n",
    );
    let answer = ask(&front, "").json();
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &json!("I look."))
    );
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["type"], "function");
    assert_eq!(
        call["function"],
        json!({ "name": "weather", "arguments": "{\"city\": \"Bern\"}" })
    );
    let id = call["id"].as_str().expect("an id").to_owned();
    assert!(id.starts_with("call_"), "{id}");

    let chunks = ask(&front, ",\"stream\":true").json_events();
    let deltas: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
    let content: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    assert_eq!(content, "I look.");
    let calls: Vec<&Value> = deltas
        .iter()
        .filter_map(|delta| delta["tool_calls"].as_array())
        .flatten()
        .collect();
    assert_eq!(calls.len(), 1);
    assert_eq!(
        (&calls[0]["index"], &calls[0]["function"]),
        (&json!(0), &call["function"])
    );
    let last = &chunks.last().expect("chunks")["choices"][0];
    assert_eq!(
        (&last["finish_reason"], &last["delta"]),
        (&json!("tool_calls"), &json!({}))
    );
}

#[test]
fn a_call_alone_has_no_content_and_one_that_is_cut_off_is_text() {
    let front = start_chat(NATIVE);
    let call = "<tool_call>{\"name\":\"weather\",\"arguments\":{}}</tool_call>";
    says(&front, &[call, call].concat());
    let message = ask(&front, "").json()["choices"][0]["message"].clone();
    assert_eq!(message["content"], Value::Null);
    assert_eq!(message["tool_calls"].as_array().map(Vec::len), Some(2));
    assert_ne!(message["tool_calls"][0]["id"], message["tool_calls"][1]["id"]);

    front.backend.play(Script::Tokens(bytes(call)));
    let cut = ask(&front, ",\"max_completion_tokens\":20").json()["choices"][0].clone();
    assert_eq!(
        (&cut["finish_reason"], &cut["message"]["content"]),
        (&json!("length"), &json!(call[..20]))
    );
    assert!(cut["message"].get("tool_calls").is_none());

    says(&front, "no call");
    let plain = ask(&front, "").json()["choices"][0].clone();
    assert_eq!(
        (&plain["finish_reason"], &plain["message"]["content"]),
        (&json!("stop"), &json!("no call"))
    );
    says(&front, call);
    let unasked = ask(&front, ",\"tool_choice\":\"none\"").json()["choices"][0]["message"].clone();
    assert_eq!(
        unasked["content"], call,
        "nothing is looked for where nothing may be called"
    );
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    let unreadable = start_chat("{% if tools %}<|unknown|>{% endif %}x");
    let native = start_chat(NATIVE);
    let named = "{\"type\":\"function\",\"function\":{\"name\":\"weather\"}}";
    let and_a_format = [named, ",\"response_format\":{\"type\":\"json_object\"}"].concat();
    for (front, choice) in [(&unreadable, "\"auto\""), (&native, and_a_format.as_str())] {
        let messages = r#"[{"role":"user","content":"hi"}]"#;
        let body = format!("{{\"model\":\"tiny\",\"messages\":{messages},\"tools\":{TOOLS},\"tool_choice\":{choice}}}");
        let answer = post(front.address, "/v1/chat/completions", body);
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (400, &json!("tool_choice")),
            "{choice}"
        );
    }
}

#[test]
fn required_calls_are_held_to_a_schema_and_read_back() {
    let front = start_chat(NATIVE);
    says(&front, "[{\"name\":\"weather\",\"arguments\":{\"city\":\"Bern\"}}]");
    let answer = ask(&front, ",\"tool_choice\":\"required\"").json()["choices"][0].clone();
    assert_eq!(answer["finish_reason"], "tool_calls");
    let call = json!({ "name": "weather", "arguments": "{\"city\":\"Bern\"}" });
    assert_eq!(answer["message"]["tool_calls"][0]["function"], call);
    assert_eq!(answer["message"]["content"], Value::Null);
    let grammar = front.backend.last().sampling.grammar;
    let Some(Grammar::JsonSchema(schema)) = grammar else {
        panic!("{grammar:?}")
    };
    let schema: Value = serde_json::from_str(&schema).expect("JSON");
    assert_eq!((&schema["type"], &schema["minItems"]), (&json!("array"), &json!(1)));
    let properties = &schema["items"]["anyOf"][0]["properties"];
    assert_eq!(properties["name"], json!({ "const": "weather" }));
    assert_eq!(properties["arguments"]["properties"]["city"]["type"], "string");

    let chunks = ask(&front, ",\"tool_choice\":\"required\",\"stream\":true").json_events();
    let calls = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array());
    let calls: Vec<&Value> = calls.flatten().collect();
    assert_eq!((calls.len(), &calls[0]["function"]), (1, &call));
    let last = chunks.last().expect("chunks");
    assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
}

#[test]
fn a_named_function_is_called_with_what_the_model_writes() {
    let front = start_chat(PLAIN);
    says(&front, "{\"city\":\"Bern\"}");
    let named = ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"weather\"}}";
    let answer = ask(&front, named).json()["choices"][0].clone();
    assert_eq!(
        answer["finish_reason"], "stop",
        "as OpenAI says where the function is named"
    );
    let call = json!({ "name": "weather", "arguments": "{\"city\":\"Bern\"}" });
    assert_eq!(answer["message"]["tool_calls"][0]["function"], call);
    let cut = ask(&front, &[named, ",\"max_completion_tokens\":5"].concat()).json()["choices"][0].clone();
    assert_eq!(
        (&cut["finish_reason"], &cut["message"]["content"]),
        (&json!("length"), &json!("{\"cit"))
    );
}
