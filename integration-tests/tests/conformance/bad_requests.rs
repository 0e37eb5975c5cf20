//! Completions that are refused. The server lives on, and works on nothing.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::{refused, scene};

#[test]
fn case_19_prompts_without_text() -> Result<()> {
    let scene = scene()?;
    for prompt in [
        json!(""),
        json!(null),
        json!([]),
        json!([""]),
        json!([[]]),
        json!(["a", ""]),
        json!([null]),
    ] {
        for stream in [false, true] {
            refused(&scene, &json!({ "prompt": prompt, "stream": stream }), "prompt")?;
        }
    }
    refused(&scene, &json!({}), "prompt")?;
    scene.is_well()
}

#[test]
fn case_20_token_ids_beyond_the_vocabulary() -> Result<()> {
    let scene = scene()?;
    for prompt in [
        json!([512]),
        json!([1, 2, 512]),
        json!([[1, 512]]),
        json!([4_294_967_296_u64]),
        json!([u64::MAX]),
    ] {
        refused(&scene, &json!({ "prompt": prompt }), "prompt")?;
    }
    scene.complete(json!({ "prompt": [511], "max_tokens": 1 }))?.ok()?;
    scene.is_well()
}

#[test]
fn case_21_negative_token_ids() -> Result<()> {
    let scene = scene()?;
    for prompt in [
        json!([-1]),
        json!([1, -5]),
        json!([[-1]]),
        json!([[1, 2], [-1]]),
        json!([i64::MIN]),
    ] {
        refused(&scene, &json!({ "prompt": prompt }), "prompt")?;
    }
    scene.is_well()
}

#[test]
fn case_23_logit_bias_that_cannot_be_meant() -> Result<()> {
    let scene = scene()?;
    for bias in [
        json!({ "512": 1 }),
        json!({ "x": 1 }),
        json!({ "1.5": 1 }),
        json!({ "5": "x" }),
        json!({ "5": null }),
        json!([1]),
        json!("x"),
    ] {
        refused(&scene, &json!({ "prompt": "a", "logit_bias": bias }), "logit_bias")?;
    }
    scene.is_well()
}

#[test]
fn case_24_logprobs_as_a_string() -> Result<()> {
    let scene = scene()?;
    for value in [json!("5"), json!("x"), json!(true), json!([5]), json!(1.5)] {
        refused(&scene, &json!({ "prompt": "a", "logprobs": value }), "logprobs")?;
    }
    scene.is_well()
}

#[test]
fn case_25_bodies_that_are_no_object() -> Result<()> {
    let scene = scene()?;
    for body in [
        json!("a"),
        json!([{ "prompt": "a" }]),
        json!(5),
        Value::Null,
        json!(true),
    ] {
        for path in ["/v1/completions", "/generate", "/generate_stream", "/"] {
            let answer = scene.post(path, &body)?;
            let status = if path.starts_with("/v1/") { 400 } else { 422 };
            ensure!(
                answer.status == status,
                "{path} {body}: {} {}",
                answer.status,
                answer.text()
            );
            ensure!(
                answer.json()?.get("error").is_some(),
                "{path} {body}: {}",
                answer.text()
            );
        }
    }
    scene.is_well()
}

#[test]
fn case_26_formats_that_cannot_be_meant() -> Result<()> {
    let scene = scene()?;
    let schema = |schema: Value| json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    for format in [
        json!({ "type": "json_schema" }),
        json!({ "type": "json_schema", "json_schema": { "name": "x" } }),
        schema(json!("{")),
        schema(json!({ "type": "strnig" })),
        schema(json!({ "$ref": "#/nowhere" })),
        schema(json!({ "type": "string", "pattern": "(" })),
    ] {
        for stream in [false, true] {
            let body = json!({ "prompt": "a", "stream": stream, "response_format": format });
            refused(&scene, &body, "response_format")?;
        }
    }
    for outputs in [
        json!({ "regex": "[" }),
        json!({ "grammar": "no grammar" }),
        json!({ "choice": [] }),
        json!({ "json": { "minimum": "x" } }),
    ] {
        refused(
            &scene,
            &json!({ "prompt": "a", "structured_outputs": outputs }),
            "structured_outputs",
        )?;
    }
    let right = json!({ "prompt": "a", "max_tokens": 9, "structured_outputs": { "choice": ["yes", "no"] } });
    let text = crate::text(&scene.complete(right)?.ok()?)?;
    ensure!(text == "yes" || text == "no", "{text:?}");
    scene.is_well()
}

#[test]
fn case_27_formats_of_unknown_types() -> Result<()> {
    let scene = scene()?;
    for kind in [json!("yaml"), json!(1), json!(null)] {
        refused(
            &scene,
            &json!({ "prompt": "a", "response_format": { "type": kind } }),
            "response_format",
        )?;
    }
    scene.is_well()
}

#[test]
fn case_28_seeds_beyond_64_bits() -> Result<()> {
    let scene = scene()?;
    for seed in [
        "18446744073709551616",
        "99999999999999999999999999",
        "1e30",
        "-1",
        "1.5",
        "\"5\"",
    ] {
        let body = format!(
            "{{\"model\":\"{}\",\"prompt\":\"a\",\"seed\":{seed}}}",
            integration_tests::scene::MODEL
        );
        let answer = scene.post_raw("/v1/completions", body)?;
        let param = answer.json()?["error"]["param"].clone();
        ensure!(
            (answer.status, &param) == (400, &json!("seed")),
            "{seed}: {}",
            answer.text()
        );
    }
    scene
        .complete(json!({ "prompt": "a", "max_tokens": 1, "seed": u64::MAX }))?
        .ok()?;
    scene.is_well()
}

#[test]
fn case_33_prompts_longer_than_the_context() -> Result<()> {
    let scene = scene()?;
    let long: String = ('a'..='z').cycle().take(2_000).collect();
    for prompt in [json!(long), json!(vec![5; 513])] {
        for stream in [false, true] {
            refused(
                &scene,
                &json!({ "prompt": prompt, "stream": stream, "max_tokens": 1 }),
                "512",
            )?;
        }
    }
    scene.is_well()
}
