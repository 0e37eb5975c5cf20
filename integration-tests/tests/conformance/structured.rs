//! Answers of a given form, and fields that cannot be meant.

use std::io::ErrorKind;
use std::net::TcpListener;

use anyhow::{Result, ensure};
use integration_tests::scene::{MODEL, Scene};
use serde_json::{Value, json};

use crate::{documented, real, refused, scene};

#[test]
fn case_26_schemas_and_grammars_that_are_none() -> Result<()> {
    let scene = scene()?;
    for (body, word) in [
        (json!({ "response_format": { "type": "json_schema" } }), "json_schema"),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "x" } } }),
            "schema",
        ),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": { "type": "no-such-type" } } } }),
            "schema",
        ),
        (json!({ "structured_outputs": { "regex": "(" } }), "regex"),
        (
            json!({ "structured_outputs": { "grammar": "this is : no grammar (" } }),
            "grammar",
        ),
        (json!({ "structured_outputs": { "choice": [] } }), "choice"),
        (json!({ "structured_outputs": { "json": { "type": 5 } } }), "json"),
    ] {
        for stream in [false, true] {
            let mut body = body.clone();
            body["prompt"] = json!("a");
            body["stream"] = json!(stream);
            refused(&scene, &body, word)?;
        }
    }
    scene.is_well()
}

#[test]
fn case_27_unknown_response_formats() -> Result<()> {
    let scene = scene()?;
    for format in [
        json!({ "type": "xml" }),
        json!({ "type": 5 }),
        json!({}),
        json!("json_object"),
        json!([]),
    ] {
        refused(
            &scene,
            &json!({ "prompt": "a", "response_format": format }),
            "response_format",
        )?;
    }
    scene.is_well()
}

#[test]
fn case_31_suffixes_need_a_model_that_fills_in() -> Result<()> {
    let scene = scene()?;
    refused(&scene, &json!({ "prompt": "a", "suffix": "b" }), "suffix")?;
    refused(&scene, &json!({ "prompt": "a", "suffix": "b", "echo": true }), "suffix")?;
    scene
        .complete(json!({ "prompt": "a", "suffix": "", "max_tokens": 1 }))?
        .ok()?;
    Ok(())
}

#[test]
fn case_32_why_an_answer_ends() -> Result<()> {
    let scene = real()?;
    let stopped = scene
        .complete(
            json!({ "prompt": "A list:\n- one\n- two\n- three", "max_tokens": 200, "temperature": 0, "stop": "\n" }),
        )?
        .ok()?;
    let choice = &stopped["choices"][0];
    ensure!(
        choice["finish_reason"] == "stop" && choice["stop_reason"] == "\n",
        "{stopped}"
    );
    ensure!(
        choice["text"].as_str().is_some_and(|text| !text.contains('\n')),
        "{stopped}"
    );
    let prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n";
    let ended = scene
        .complete(json!({ "prompt": prompt, "max_tokens": 100, "temperature": 0 }))?
        .ok()?;
    let choice = &ended["choices"][0];
    ensure!(
        choice["finish_reason"] == "stop" && choice["stop_reason"].is_null(),
        "{ended}"
    );
    let cut = scene
        .complete(json!({ "prompt": "Once upon a time", "max_tokens": 5, "temperature": 0 }))?
        .ok()?;
    let choice = &cut["choices"][0];
    ensure!(
        choice["finish_reason"] == "length" && choice["stop_reason"].is_null(),
        "{cut}"
    );
    Ok(())
}

/// Asks for media from a port of this machine that must never hear from us.
fn canary(urls: impl Fn(u16) -> Vec<String>) -> Result<()> {
    let scene = scene()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    for url in urls(listener.local_addr()?.port()) {
        for kind in ["image_url", "video_url", "audio_url"] {
            let mut item = json!({ "type": kind });
            item[kind] = json!(url);
            let inputs = json!([{ "type": "text", "text": "What is this?" }, item]);
            for path in ["/generate", "/generate_stream"] {
                let answer = scene.post(
                    path,
                    &json!({ "inputs": inputs, "parameters": { "max_new_tokens": 2 } }),
                )?;
                ensure!(
                    answer.status == 422,
                    "{path} {url}: {} {}",
                    answer.status,
                    answer.text()
                );
            }
            let mut part = json!({ "type": kind });
            part[kind] = json!({ "url": url });
            let messages = json!([{ "role": "user", "content": [part] }]);
            let body = json!({ "model": MODEL, "messages": messages });
            let answer = scene.post("/v1/chat/completions", &body)?;
            ensure!(answer.status == 400, "{url}: {} {}", answer.status, answer.text());
        }
    }
    let heard = listener.accept();
    ensure!(
        matches!(&heard, Err(error) if error.kind() == ErrorKind::WouldBlock),
        "somebody connected: {heard:?}"
    );
    scene.is_well()
}

#[test]
fn case_40_media_urls_are_not_touched() -> Result<()> {
    canary(|port| {
        vec![
            format!("http://127.0.0.1:{port}/a.png"),
            format!("http://localhost:{port}/a.png"),
        ]
    })
}

#[test]
fn report_33_media_urls_into_this_machine_and_its_neighbours() -> Result<()> {
    canary(|port| {
        [
            "127.0.0.1",
            "localhost",
            "2130706433",
            "0x7f000001",
            "0177.0.0.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "127.0.0.1.nip.io",
            "0.0.0.0",
        ]
        .map(|host| format!("http://{host}:{port}/a.png"))
        .into_iter()
        .chain(
            [
                "http://169.254.169.254/latest/meta-data/a.png",
                "file:///etc/hostname",
                "http://10.0.0.1/a.png",
            ]
            .map(str::to_owned),
        )
        .collect()
    })
}

#[test]
fn report_12_a_biased_token_beyond_the_vocabulary() -> Result<()> {
    let scene = scene()?;
    for id in ["512", "100000", "4294967296", "-1"] {
        let mut bias = json!({});
        bias[id] = json!(5);
        for stream in [false, true] {
            refused(
                &scene,
                &json!({ "prompt": "a", "logit_bias": bias, "stream": stream }),
                id,
            )?;
        }
    }
    let biased = scene.complete(json!({
        "prompt": "a", "logit_bias": { "70": 100 }, "temperature": 0, "max_tokens": 3, "return_token_ids": true,
    }))?;
    let ids = biased.ok()?["choices"][0]["token_ids"].clone();
    ensure!(ids == json!([70, 70, 70]), "{ids}");
    scene.is_well()
}

#[test]
fn report_06_no_character_is_lost_where_clean_up_rules_would_eat_one() -> Result<()> {
    let scene = real()?;
    for text in ["I 'm here .", " 'm", "do n't , you 've ? no !"] {
        let mut body = json!({
            "prompt": "Say:", "structured_outputs": { "choice": [text] }, "temperature": 0, "max_tokens": 40,
        });
        let whole = scene.complete(body.clone())?.ok()?;
        ensure!(whole["choices"][0]["text"] == text, "{whole}");
        body["stream"] = json!(true);
        let chunks = scene.complete(body)?.json_events()?;
        ensure!(crate::joined(&chunks) == text, "{chunks:?}");
    }
    Ok(())
}

/// A body with every field that the document has of the schema and `base` has not, and some that nobody knows: all null.
fn nulls(scene: &Scene, base: Value, schema: &str) -> Result<Value> {
    let unknown = ["user", "top_n_tokens"].map(str::to_owned);
    let mut body = base.clone();
    for name in documented(scene, schema)?.into_iter().chain(unknown) {
        if base.get(&name).is_none() && name != "model" {
            body[name] = Value::Null;
        }
    }
    Ok(body)
}

#[test]
fn report_14_every_optional_field_null() -> Result<()> {
    let scene = scene()?;
    let completion = nulls(&scene, json!({ "prompt": "a" }), "CompletionRequest")?;
    let all = scene.complete(completion)?.ok()?;
    ensure!(
        all["choices"].as_array().is_some_and(|choices| choices.len() == 1),
        "{all}"
    );
    let parameters = nulls(&scene, json!({}), "GenerateParameters")?;
    for path in ["/generate", "/generate_stream", "/"] {
        let answer = scene.post(path, &json!({ "inputs": "a", "parameters": parameters }))?;
        ensure!(answer.status == 200, "{path}: {}", answer.text());
    }
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    let base = json!({ "model": MODEL, "messages": messages });
    let body = nulls(&scene, base, "ChatRequest")?;
    real()?.post("/v1/chat/completions", &body)?.ok()?;
    Ok(())
}
