//! `/tokenize`, `/detokenize`, `/tokenizer_info`.

mod http_support;

use http_support::client::{get, post, request};
use http_support::model::{BOS, SPECIAL, bytes};
use http_support::{start, start_chat};
use serde_json::json;

#[test]
fn texts_become_tokens_and_tokens_texts() {
    let front = start();
    let tokenize = |body: &str| post(front.address, "/tokenize", body);
    let answer = tokenize(r#"{"prompt":"hé"}"#);
    assert_eq!(answer.status, 200, "{}", answer.text());
    let expected = [vec![BOS], bytes("hé")].concat();
    assert_eq!(
        answer.json(),
        json!({ "count": 4, "max_model_len": 256, "tokens": expected, "token_strs": null })
    );
    let plain = tokenize(r#"{"model":"tiny","prompt":"a<x>","add_special_tokens":false,"return_token_strs":true}"#);
    assert_eq!(plain.json()["tokens"], json!([97, SPECIAL]));
    assert_eq!(plain.json()["token_strs"], json!(["a", "<x>"]));
    // What changes nothing is taken, as by vLLM.
    let without = r#"{"prompt":"hé","tools":[],"chat_template_kwargs":{},"add_generation_prompt":false,
        "continue_final_message":false}"#;
    assert_eq!(tokenize(without).json()["tokens"], json!(expected));
    assert_eq!(
        tokenize(r#"{"prompt":"","add_special_tokens":false}"#).json()["count"],
        0
    );

    let long = "x".repeat(5_000);
    assert_eq!(
        tokenize(&format!("{{\"prompt\":\"{long}\"}}")).json()["count"],
        5_001,
        "counting has no limit"
    );

    let detokenize = |body: &str| post(front.address, "/detokenize", body);
    let answer = detokenize(&json!({ "model": "tiny", "tokens": expected }).to_string());
    assert_eq!(answer.json(), json!({ "prompt": "<s>hé" }));
    assert_eq!(detokenize(r#"{"tokens":[]}"#).json(), json!({ "prompt": "" }));
}

#[test]
fn conversations_become_tokens_as_in_chats() {
    let front = start_chat(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}",
    );
    let messages = r#"[{"role":"user","content":[{"type":"text","text":"a"}]}]"#;
    let answer = post(front.address, "/tokenize", format!("{{\"messages\":{messages}}}"));
    assert_eq!(answer.json()["tokens"], json!([vec![BOS], bytes("[user]a!")].concat()));
    let open = post(
        front.address,
        "/tokenize",
        format!("{{\"messages\":{messages},\"add_generation_prompt\":false}}"),
    );
    assert_eq!(open.json()["tokens"], json!([vec![BOS], bytes("[user]a")].concat()));
}

#[allow(clippy::too_many_lines, reason = "a table of cases")]
#[test]
fn what_is_wrong_is_named() {
    let front = start();
    for (path, body, status, param) in [
        ("/tokenize", "{}", 400, json!("prompt")),
        ("/tokenize", "[]", 400, json!(null)),
        ("/tokenize", "{", 400, json!(null)),
        ("/tokenize", r#"{"prompt":1}"#, 400, json!("prompt")),
        ("/tokenize", r#"{"prompt":"a","messages":[]}"#, 400, json!("prompt")),
        ("/tokenize", r#"{"messages":[]}"#, 400, json!("messages")),
        (
            "/tokenize",
            r#"{"messages":[{"role":"user","content":"a"}]}"#,
            400,
            json!("messages"),
        ),
        (
            "/tokenize",
            r#"{"prompt":"a","add_special_tokens":1}"#,
            400,
            json!("add_special_tokens"),
        ),
        (
            "/tokenize",
            r#"{"prompt":"a","return_token_strs":1}"#,
            400,
            json!("return_token_strs"),
        ),
        (
            "/tokenize",
            r#"{"prompt":"a","tools":[{}]}"#,
            400,
            json!("tools[0].type"),
        ),
        (
            "/tokenize",
            r#"{"prompt":"a","tools":[{"type":"function","function":{"name":"f"}}]}"#,
            400,
            json!("tools"),
        ),
        (
            "/tokenize",
            r#"{"prompt":"a","chat_template_kwargs":{"a":1}}"#,
            400,
            json!("chat_template_kwargs"),
        ),
        (
            "/tokenize",
            r#"{"prompt":"a","continue_final_message":true}"#,
            400,
            json!("continue_final_message"),
        ),
        (
            "/tokenize",
            r#"{"prompt":"a","add_generation_prompt":1}"#,
            400,
            json!("add_generation_prompt"),
        ),
        (
            "/tokenize",
            r#"{"prompt":"a","chat_template":"x"}"#,
            400,
            json!("chat_template"),
        ),
        ("/tokenize", r#"{"prompt":"a","model":"x"}"#, 404, json!("model")),
        ("/detokenize", "{}", 400, json!("tokens")),
        ("/detokenize", r#"{"tokens":"a"}"#, 400, json!("tokens")),
        ("/detokenize", r#"{"tokens":[1,-1]}"#, 400, json!("tokens[1]")),
        ("/detokenize", r#"{"tokens":[259]}"#, 400, json!("tokens[0]")),
        ("/detokenize", r#"{"tokens":[1.0]}"#, 400, json!("tokens[0]")),
        ("/detokenize", r#"{"tokens":["1"]}"#, 400, json!("tokens[0]")),
        ("/detokenize", r#"{"tokens":[1],"model":"x"}"#, 404, json!("model")),
    ] {
        let answer = post(front.address, path, body);
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (status, &param),
            "{path} {body}"
        );
    }
    assert_eq!(request(front.address, "GET", "/tokenize", "").status, 405);
    assert_eq!(front.backend.count(), 0);
}

#[test]
fn the_tokenizer_describes_itself() {
    let front = start_chat("TEMPLATE");
    let info = get(front.address, "/tokenizer_info").json();
    assert_eq!(
        (&info["bos_token"], &info["eos_token"]),
        (&json!("<s>"), &json!("</s>"))
    );
    assert_eq!(
        (&info["chat_template"], &info["model_max_length"]),
        (&json!("TEMPLATE"), &json!(4_096))
    );
    assert_eq!(
        get(start().address, "/tokenizer_info").json()["chat_template"],
        json!(null)
    );
}
