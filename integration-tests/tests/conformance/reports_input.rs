//! Public bug reports about input: too long, empty, wrong, or of another alphabet.

use anyhow::{Context, Result, ensure};
use integration_tests::scene::MODEL;
use serde_json::{Value, json};

use crate::{documented, refused, scene, text};

#[test]
fn report_07_truncation_comes_before_the_limit() -> Result<()> {
    let scene = scene()?;
    let long: String = ('a'..='z').cycle().take(20_000).collect();
    for truncate in [100, 500] {
        let parameters = json!({ "truncate": truncate, "max_new_tokens": 2, "details": true });
        let answer = scene
            .post("/generate", &json!({ "inputs": long, "parameters": parameters }))?
            .ok()?;
        ensure!(answer["details"]["prompt_tokens"] == truncate, "{answer}");
        let body = json!({ "prompt": long, "truncate_prompt_tokens": truncate, "max_tokens": 2 });
        let answer = scene.complete(body)?.ok()?;
        ensure!(answer["usage"]["prompt_tokens"] == truncate, "{answer}");
    }
    Ok(())
}

#[test]
fn report_08_streams_are_refused_like_whole_answers() -> Result<()> {
    let scene = scene()?;
    for wrong in [
        json!({ "temperature": -1 }),
        json!({ "max_tokens": 0 }),
        json!({ "top_p": 2 }),
        json!({ "prompt": "" }),
        json!({ "stop": [""] }),
        json!({ "n": 0 }),
    ] {
        let mut body = json!({ "prompt": "a", "max_tokens": 1 });
        for (name, value) in wrong.as_object().into_iter().flatten() {
            body[name] = value.clone();
        }
        let whole = scene.complete(body.clone())?;
        body["stream"] = json!(true);
        let streamed = scene.complete(body)?;
        ensure!(
            whole.status == 400 && streamed.status == 400,
            "{wrong}: {} {}",
            whole.text(),
            streamed.text()
        );
        ensure!(
            whole.json()? == streamed.json()?,
            "{wrong}: {} {}",
            whole.text(),
            streamed.text()
        );
    }
    for wrong in [
        json!({ "temperature": 0 }),
        json!({ "max_new_tokens": 0 }),
        json!({ "seed": -1 }),
    ] {
        let body = json!({ "inputs": "a", "parameters": wrong });
        let (whole, streamed) = (scene.post("/generate", &body)?, scene.post("/generate_stream", &body)?);
        ensure!(
            whole.status == 422 && streamed.status == 422,
            "{wrong}: {} {}",
            whole.text(),
            streamed.text()
        );
        ensure!(
            whole.json()? == streamed.json()?,
            "{wrong}: {} {}",
            whole.text(),
            streamed.text()
        );
    }
    Ok(())
}

#[test]
fn report_09_empty_prompts() -> Result<()> {
    let scene = scene()?;
    for prompt in [
        json!(""),
        json!([]),
        json!([[]]),
        json!([""]),
        json!(["a", ""]),
        json!([[1], []]),
    ] {
        refused(&scene, &json!({ "prompt": prompt, "max_tokens": 1 }), "prompt")?;
        scene.complete(json!({ "prompt": "a", "max_tokens": 1 }))?.ok()?;
    }
    Ok(())
}

#[test]
fn report_13_a_limit_of_null_is_the_default() -> Result<()> {
    let scene = scene()?;
    let body = json!({ "prompt": "a", "temperature": 0, "ignore_eos": true });
    let absent = scene.complete(body.clone())?.ok()?;
    let mut null = body;
    null["max_tokens"] = Value::Null;
    let null = scene.complete(null)?.ok()?;
    ensure!(absent["choices"] == null["choices"], "{absent} {null}");
    ensure!(
        absent["usage"]["completion_tokens"]
            .as_u64()
            .is_some_and(|tokens| tokens > 100),
        "{absent}"
    );
    Ok(())
}

#[test]
fn report_17_a_body_in_another_encoding() -> Result<()> {
    let scene = scene()?;
    // GBK for two Chinese characters.
    let word = b"\xc4\xe3\xba\xc3";
    for (path, before, after, status) in [
        (
            "/v1/completions",
            format!("{{\"model\":\"{MODEL}\",\"prompt\":\""),
            "\"}",
            400,
        ),
        ("/generate", "{\"inputs\":\"".to_owned(), "\"}", 422),
        (
            "/v1/chat/completions",
            format!("{{\"model\":\"{MODEL}\",\"messages\":[{{\"role\":\"user\",\"content\":\""),
            "\"}]}",
            400,
        ),
    ] {
        let body = [before.as_bytes(), word, after.as_bytes()].concat();
        let answer = scene.post_raw(path, body)?;
        ensure!(answer.status == status, "{path}: {} {}", answer.status, answer.text());
        ensure!(answer.json()?.get("error").is_some(), "{path}: {}", answer.text());
    }
    scene.is_well()
}

#[test]
fn report_18_every_field_of_every_wrong_type() -> Result<()> {
    let scene = scene()?;
    let values = [
        json!(true),
        json!("x"),
        json!(1.5),
        json!(-7),
        json!([]),
        json!({}),
        json!([[]]),
        json!([null]),
        json!({ "x": [1] }),
        json!(1e300),
        json!(u64::MAX),
    ];
    let completions = documented(&scene, "CompletionRequest")?;
    let parameters_known = documented(&scene, "GenerateParameters")?;
    let chats = documented(&scene, "ChatRequest")?;
    let mut refused = 0;
    let mut ask = |path: &str, body: &Value| -> Result<()> {
        let answer = scene.post(path, body)?;
        ensure!(
            answer.status < 500,
            "{path} {body}: {} {}",
            answer.status,
            answer.text()
        );
        refused += u32::from(answer.status >= 400);
        ensure!(
            answer.status < 400 || answer.json()?.get("error").is_some(),
            "{path} {body}: {}",
            answer.text()
        );
        Ok(())
    };
    for value in &values {
        for name in &completions {
            let mut body = json!({ "model": MODEL, "prompt": "a", "max_tokens": 2 });
            body[name] = value.clone();
            if name == "n" || name == "best_of" {
                body["temperature"] = json!(0);
            }
            ask("/v1/completions", &body)?;
        }
        for name in &parameters_known {
            let mut parameters = json!({ "max_new_tokens": 2 });
            parameters[name] = value.clone();
            ask("/generate", &json!({ "inputs": "a", "parameters": parameters }))?;
        }
        ask("/generate", &json!({ "inputs": value }))?;
        ask("/generate", &json!({ "inputs": "a", "parameters": value }))?;
        for name in &chats {
            let mut body = json!({ "model": MODEL, "messages": [{ "role": "user", "content": "a" }], "max_tokens": 2 });
            body[name] = value.clone();
            ask("/v1/chat/completions", &body)?;
        }
    }
    ensure!(refused > 300, "only {refused} were refused");
    scene.is_well()
}

#[test]
fn report_19_a_prompt_too_long_for_a_stream() -> Result<()> {
    let scene = scene()?;
    let long: String = ('a'..='z').cycle().take(20_000).collect();
    let completions = scene.complete(json!({ "prompt": long, "stream": true }))?;
    ensure!(completions.status == 400, "{}", completions.status);
    let generate = scene.post("/generate_stream", &json!({ "inputs": long }))?;
    ensure!(generate.status == 422, "{}", generate.status);
    Ok(())
}

#[test]
fn report_20_log_probabilities_are_numbers_at_low_temperatures() -> Result<()> {
    let scene = scene()?;
    let body = json!({ "prompt": "a", "max_tokens": 10, "logprobs": 5, "temperature": 0.01, "top_p": 0.3, "seed": 1 });
    let answer = scene.complete(body)?.ok()?;
    let told = &answer["choices"][0]["logprobs"];
    let chosen = told["token_logprobs"].as_array().context("token_logprobs")?;
    let tops = told["top_logprobs"].as_array().context("top_logprobs")?;
    ensure!(
        chosen.iter().all(|value| value.as_f64().is_some_and(f64::is_finite)),
        "{told}"
    );
    let values = tops
        .iter()
        .filter_map(Value::as_object)
        .flat_map(serde_json::Map::values);
    ensure!(
        values.clone().count() >= 40 && values.clone().all(|value| value.as_f64().is_some_and(f64::is_finite)),
        "{told}"
    );
    let parameters =
        json!({ "max_new_tokens": 10, "details": true, "temperature": 0.01, "top_p": 0.3, "do_sample": true });
    let answer = scene
        .post("/generate", &json!({ "inputs": "a", "parameters": parameters }))?
        .ok()?;
    let tokens = answer["details"]["tokens"].as_array().context("tokens")?;
    ensure!(
        tokens
            .iter()
            .all(|token| token["logprob"].as_f64().is_some_and(f64::is_finite)),
        "{answer}"
    );
    Ok(())
}

#[test]
fn report_32_integers_beyond_64_bits() -> Result<()> {
    let scene = scene()?;
    for huge in [
        "18446744073709551616",
        "9223372036854775808000",
        "-9223372036854775809",
        "1e40",
    ] {
        for name in ["seed", "max_tokens", "n", "best_of", "top_k", "logprobs", "min_tokens"] {
            let body = format!(
                "{{\"model\":\"{MODEL}\",\"prompt\":\"a\",\"max_tokens\":1,\"temperature\":1,\"{name}\":{huge}}}"
            );
            let answer = scene.post_raw(
                "/v1/completions",
                body.replace("\"max_tokens\":1,\"temperature\":1,\"max_tokens\"", "\"max_tokens\""),
            )?;
            ensure!(
                answer.status == 400,
                "{name} {huge}: {} {}",
                answer.status,
                answer.text()
            );
        }
        for name in ["seed", "max_new_tokens", "top_k", "truncate"] {
            let body = format!("{{\"inputs\":\"a\",\"parameters\":{{\"{name}\":{huge}}}}}");
            let answer = scene.post_raw("/generate", body)?;
            ensure!(
                answer.status == 422,
                "{name} {huge}: {} {}",
                answer.status,
                answer.text()
            );
        }
        // Elements that can be no token are skipped.
        let body = format!("{{\"model\":\"{MODEL}\",\"prompt\":\"a\",\"max_tokens\":1,\"stop_token_ids\":[{huge}]}}");
        let answer = scene.post_raw("/v1/completions", body)?;
        ensure!(answer.status == 200, "{huge}: {} {}", answer.status, answer.text());
    }
    scene.is_well()
}

#[test]
fn report_10_an_echo_of_the_prompt_alone() -> Result<()> {
    let scene = scene()?;
    let body = json!({ "prompt": "Hello, my name is", "max_tokens": 0, "echo": true, "logprobs": 1 });
    let answer = scene.complete(body)?.ok()?;
    let choice = &answer["choices"][0];
    ensure!(text(&answer)? == "Hello, my name is", "{answer}");
    let prompt = answer["usage"]["prompt_tokens"].as_u64().context("prompt_tokens")? as usize;
    ensure!(answer["usage"]["completion_tokens"] == 0, "{answer}");
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        ensure!(
            choice["logprobs"][name]
                .as_array()
                .is_some_and(|list| list.len() == prompt),
            "{name}: {answer}"
        );
    }
    refused(&scene, &json!({ "prompt": "a", "max_tokens": 0 }), "max_tokens")?;
    scene.is_well()
}

#[test]
fn report_11_an_echo_of_token_ids() -> Result<()> {
    let scene = scene()?;
    let plain = scene
        .complete(json!({ "prompt": "Hello there", "max_tokens": 1, "return_token_ids": true }))?
        .ok()?;
    let ids = plain["choices"][0]["prompt_token_ids"].clone();
    for prompt in [ids.clone(), json!([ids])] {
        let body = json!({ "prompt": prompt, "max_tokens": 3, "temperature": 0, "echo": true });
        let answer = scene.complete(body)?.ok()?;
        ensure!(text(&answer)?.starts_with("Hello there"), "{answer}");
    }
    Ok(())
}

#[test]
fn report_15_an_echo_has_an_entry_for_every_token() -> Result<()> {
    let scene = scene()?;
    let body = json!({ "prompt": "Hello there", "max_tokens": 4, "temperature": 0, "echo": true, "logprobs": 1, "ignore_eos": true });
    let answer = scene.complete(body)?.ok()?;
    let told = &answer["choices"][0]["logprobs"];
    let all = answer["usage"]["total_tokens"].as_u64().context("total_tokens")? as usize;
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        ensure!(
            told[name].as_array().is_some_and(|list| list.len() == all),
            "{name}: {answer}"
        );
    }
    // The prompt's own probabilities: what one token makes likely depends on those before it alone.
    let longer = scene
        .complete(json!({ "prompt": "Hello there, runner", "max_tokens": 0, "echo": true, "logprobs": 1 }))?
        .ok()?;
    let (short, long) = (
        &told["token_logprobs"],
        &longer["choices"][0]["logprobs"]["token_logprobs"],
    );
    ensure!(short[1] == long[1] && short[1].is_number(), "{short} {long}");
    Ok(())
}
