//! `/generate` and `/generate_stream`.

use anyhow::{Result, ensure};
use integration_tests::wire::Answer;
use serde_json::{Value, json};

use crate::scene;

fn generate(path: &str, inputs: &Value, parameters: &Value) -> Result<Answer> {
    scene()?.post(path, &json!({ "inputs": inputs, "parameters": parameters }))
}

fn invalid(answer: &Answer, field: &str) -> Result<()> {
    ensure!(answer.status == 422, "{field}: {} {}", answer.status, answer.text());
    let body = answer.json()?;
    ensure!(body["error_type"] == "validation", "{field}: {body}");
    let told = body["error"].as_str().unwrap_or_default();
    ensure!(
        told.starts_with("Input validation error: ") && told.contains(field),
        "{field}: {body}"
    );
    Ok(())
}

#[test]
fn case_37_ranges_of_the_sampling_parameters() -> Result<()> {
    let wrong = [
        ("top_p", json!(1.0)),
        ("top_p", json!(0.0)),
        ("typical_p", json!(0.0)),
        ("typical_p", json!(1.01)),
        ("temperature", json!(0.0)),
        ("temperature", json!(-1)),
        ("top_k", json!(0)),
        ("truncate", json!(0)),
        ("repetition_penalty", json!(0.0)),
        ("max_new_tokens", json!(0)),
    ];
    for (field, value) in wrong {
        for path in ["/generate", "/generate_stream"] {
            let mut parameters = json!({ "max_new_tokens": 5 });
            parameters[field] = value.clone();
            invalid(&generate(path, &json!("Hello"), &parameters)?, field)?;
        }
    }
    for parameters in [
        json!({ "top_p": 0.99 }),
        json!({ "top_p": null }),
        json!({ "typical_p": 1.0 }),
        json!({ "temperature": 1e-5 }),
    ] {
        let mut parameters = parameters;
        parameters["max_new_tokens"] = json!(5);
        generate("/generate", &json!("Hello"), &parameters)?.ok()?;
    }
    // Absent, top_p is off: the answer is the same as without one.
    let body = |top_p: Value| json!({ "do_sample": true, "seed": 4, "max_new_tokens": 5, "top_p": top_p });
    let absent = generate("/generate", &json!("Hello"), &body(Value::Null))?.ok()?;
    let wide = generate("/generate", &json!("Hello"), &body(json!(0.999_999)))?.ok()?;
    ensure!(absent == wide, "{absent} {wide}");
    Ok(())
}

#[test]
fn case_41_details_of_the_prompt_inputs_adapters_and_truncation() -> Result<()> {
    let details = json!({ "decoder_input_details": true, "max_new_tokens": 2 });
    invalid(
        &generate("/generate_stream", &json!("Hello"), &details)?,
        "decoder_input_details",
    )?;
    let answer = generate("/generate", &json!("Hello"), &details)?.ok()?;
    ensure!(answer["details"]["prefill"][0]["logprob"].is_null(), "{answer}");

    for inputs in [json!([]), json!(5), json!(null), json!(""), json!({})] {
        invalid(&generate("/generate", &inputs, &json!({}))?, "inputs")?;
    }
    invalid(&scene()?.post("/generate", &json!({ "parameters": {} }))?, "inputs")?;
    for adapter in ["bad adapter", "bad:adapter", "", "bad\\adapter", "../?"] {
        invalid(
            &generate("/generate", &json!("Hello"), &json!({ "adapter_id": adapter }))?,
            "adapter_id",
        )?;
    }

    // The last two tokens of three, whatever those are.
    let prefill = |truncate: Value| -> Result<Vec<Value>> {
        let parameters = json!({ "decoder_input_details": true, "max_new_tokens": 1, "truncate": truncate });
        let answer = generate("/generate", &json!("abc def"), &parameters)?.ok()?;
        ensure!(
            answer["details"]["prompt_tokens"] == answer["details"]["prefill"].as_array().map_or(0, Vec::len),
            "{answer}"
        );
        Ok(answer["details"]["prefill"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|token| token["id"].clone())
            .collect())
    };
    let all = prefill(Value::Null)?;
    ensure!(all.len() >= 3, "{all:?}");
    ensure!(prefill(json!(2))? == all[all.len() - 2..], "{all:?}");
    ensure!(prefill(json!(100))? == all, "{all:?}");
    Ok(())
}
