//! Every field of both APIs with every wrong type and with values outside its range.

use anyhow::{Context, Result, ensure};
use integration_tests::scene::{MODEL, Scene};
use integration_tests::wire::Answer;
use serde_json::{Value, json};

use crate::support::{invalid, without_work};

/// What a field takes. Every other JSON type is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Takes {
    Bool,
    Int,
    Number,
    Text,
    Texts,
    List,
    Object,
}

impl Takes {
    /// Literals that it does not take.
    fn wrong(self) -> Vec<&'static str> {
        let all = [
            ("true", &[Self::Bool][..]),
            ("5", &[Self::Int, Self::Number]),
            ("0.5", &[Self::Number]),
            ("5.0", &[Self::Number]),
            ("5e0", &[Self::Number]),
            ("\"x\"", &[Self::Text, Self::Texts]),
            ("\"5\"", &[Self::Text, Self::Texts]),
            ("\"true\"", &[Self::Text, Self::Texts]),
            ("[]", &[Self::List, Self::Texts]),
            ("[5]", &[Self::List]),
            ("[null]", &[Self::List]),
            ("[[\"x\"]]", &[Self::List]),
            ("{}", &[Self::Object]),
            ("{\"x\":1}", &[Self::Object]),
        ];
        all.iter()
            .filter(|(_, fits)| !fits.contains(&self))
            .map(|(literal, _)| *literal)
            .collect()
    }
}

const HUGE: &str = "99999999999999999999999999";

/// Fields of `parameters`: name, type, literals out of range.
const TGI: &[(&str, Takes, &[&str])] = &[
    ("adapter_id", Takes::Text, &["\"\"", "\"a b\"", "\"ä\"", "\"a\\u0000\""]),
    ("best_of", Takes::Int, &["0", "-1", HUGE]),
    ("decoder_input_details", Takes::Bool, &[]),
    ("details", Takes::Bool, &[]),
    ("do_sample", Takes::Bool, &[]),
    ("max_new_tokens", Takes::Int, &["0", "-1", "2147483648", HUGE]),
    (
        "repetition_penalty",
        Takes::Number,
        &["0", "-0.0", "-1", "1e999", "-1e999"],
    ),
    ("return_full_text", Takes::Bool, &[]),
    ("seed", Takes::Int, &["0", "-1", "18446744073709551616", HUGE]),
    ("stop", Takes::Texts, &["\"\"", "[\"\"]", "[\"a\",\"\"]", "[\"a\",1]"]),
    ("stop_sequences", Takes::Texts, &["\"\"", "[\"\"]"]),
    ("temperature", Takes::Number, &["0", "1e-6", "-1", "1e999"]),
    ("top_k", Takes::Int, &["0", "-1", "2147483648", HUGE]),
    (
        "top_p",
        Takes::Number,
        &["0", "1e-6", "1", "1.0", "1.5", "-0.1", "1e999"],
    ),
    ("truncate", Takes::Int, &["0", "-1", "2147483648", HUGE]),
    ("typical_p", Takes::Number, &["0", "1.0001", "-0.1", "1e999"]),
    ("watermark", Takes::Bool, &[]),
];

/// Fields of a completion.
const OPENAI: &[(&str, Takes, &[&str])] = &[
    ("allowed_token_ids", Takes::List, &["[]", "[512]", "[-1]", "[\"5\"]"]),
    ("bad_words", Takes::List, &[]),
    ("best_of", Takes::Int, &["0", "-1", "129", HUGE]),
    ("echo", Takes::Bool, &[]),
    ("frequency_penalty", Takes::Number, &["-2.1", "2.1", "1e999"]),
    ("ignore_eos", Takes::Bool, &[]),
    ("include_stop_str_in_output", Takes::Bool, &[]),
    (
        "logit_bias",
        Takes::Object,
        &["{\"5\":null}", "{\"512\":1}", "{\"x\":1}", "{\"5\":\"x\"}"],
    ),
    ("logprobs", Takes::Int, &["-1", "6", HUGE]),
    ("max_tokens", Takes::Int, &["0", "-1", "2147483648", HUGE]),
    ("min_p", Takes::Number, &["-0.1", "1.1", "1e999"]),
    ("min_tokens", Takes::Int, &["-1", HUGE]),
    ("model", Takes::Text, &["\"\"", "null"]),
    ("n", Takes::Int, &["0", "-1", "8193", HUGE]),
    ("presence_penalty", Takes::Number, &["-2.1", "2.1", "1e999"]),
    (
        "prompt",
        Takes::Texts,
        &[
            "\"\"",
            "null",
            "[]",
            "[\"\"]",
            "[\"a\",5]",
            "[5,\"a\"]",
            "[-1]",
            "[512]",
            "[[5,-1]]",
            "[5.0]",
        ],
    ),
    ("repetition_penalty", Takes::Number, &["0", "-1", "2.1", "1e999"]),
    (
        "response_format",
        Takes::Object,
        &["{}", "{\"type\":null}", "{\"type\":\"x\"}", "{\"type\":5}"],
    ),
    ("return_token_ids", Takes::Bool, &[]),
    ("seed", Takes::Int, &["0", "-1", "18446744073709551616", HUGE]),
    ("skip_special_tokens", Takes::Bool, &[]),
    ("stop", Takes::Texts, &["\"\"", "[\"\"]", "[\"a\",1]"]),
    ("stop_token_ids", Takes::List, &[]),
    ("stream", Takes::Bool, &[]),
    (
        "stream_options",
        Takes::Object,
        &[
            "{\"include_usage\":1}",
            "{\"include_usage\":\"true\"}",
            "{\"continuous_usage_stats\":[]}",
        ],
    ),
    ("suffix", Takes::Text, &[]),
    ("temperature", Takes::Number, &["-0.1", "-1e-300", "1e999"]),
    ("top_k", Takes::Int, &["0", "-2", "2147483648", HUGE]),
    ("top_p", Takes::Number, &["0", "1e-6", "1.01", "-0.1", "1e999"]),
    ("use_beam_search", Takes::Bool, &[]),
];

fn literals(takes: Takes, more: &[&'static str]) -> Vec<&'static str> {
    takes.wrong().into_iter().chain(more.iter().copied()).collect()
}

/// The message names the field and says what would be right, or that the field is not built yet.
fn says_what_is_right(field: &str, literal: &str, message: &str) -> Result<()> {
    let name = field.rsplit('.').next().unwrap_or(field);
    ensure!(
        message.contains(name),
        "{field} = {literal}: the message does not name it: {message}"
    );
    let right = ["must be", "must have", "not supported yet"]
        .iter()
        .any(|words| message.contains(words));
    ensure!(
        right,
        "{field} = {literal}: the message does not say what is right: {message}"
    );
    Ok(())
}

#[test]
fn every_wrong_parameter_of_generate_is_422() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let refused = scene.metric("tgi_request_failure", &["err=\"validation\""])?;
    let mut sent = 0;
    without_work(&scene, || {
        for (name, takes, more) in TGI {
            for literal in literals(*takes, more) {
                for path in ["/generate", "/generate_stream", "/"] {
                    let body = format!("{{\"inputs\":\"a\",\"stream\":true,\"parameters\":{{\"{name}\":{literal}}}}}");
                    let answer = scene.post_raw(path, body)?;
                    let message = invalid(path, &answer).with_context(|| format!("{name} = {literal}"))?;
                    says_what_is_right(&format!("parameters.{name}"), literal, &message)?;
                    sent += 1;
                }
            }
        }
        for (field, takes) in [
            ("inputs", Takes::Text),
            ("parameters", Takes::Object),
            ("stream", Takes::Bool),
        ] {
            for literal in takes.wrong() {
                let mut members = vec![format!("\"{field}\":{literal}")];
                if field != "inputs" {
                    members.push("\"inputs\":\"a\"".to_owned());
                }
                let answer = scene.post_raw("/", format!("{{{}}}", members.join(",")))?;
                let message = invalid("/", &answer).with_context(|| format!("{field} = {literal}"))?;
                says_what_is_right(field, literal, &message)?;
                sent += 1;
            }
        }
        Ok(())
    })?;
    let counted = scene.metric("tgi_request_failure", &["err=\"validation\""])? - refused;
    ensure!(counted == f64::from(sent), "{sent} wrong requests, {counted} counted");
    scene.close()
}

#[test]
fn every_wrong_item_of_inputs_is_422() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let item = |kind: &str, rest: &str| format!("[{{\"type\":\"{kind}\"{rest}}}]");
    let mut wrong: Vec<String> = [
        "null", "\"\"", "5", "true", "{}", "[]", "[5]", "[\"a\"]", "[{}]", "[null]",
    ]
    .map(str::to_owned)
    .into();
    wrong.extend([
        item("text", ""),
        item("text", ",\"text\":\"\""),
        item("text", ",\"text\":5"),
        item("x", ",\"text\":\"a\""),
    ]);
    for kind in ["image_url", "video_url", "audio_url"] {
        wrong.push(item(
            kind,
            &format!(",\"{kind}\":\"http://127.0.0.1:{}/health\"", scene.cluster.http_port()),
        ));
    }
    without_work(&scene, || {
        for literal in &wrong {
            let message = invalid(
                "/generate",
                &scene.post_raw("/generate", format!("{{\"inputs\":{literal}}}"))?,
            )?;
            says_what_is_right("inputs", literal, &message)?;
        }
        says_what_is_right(
            "inputs",
            "absent",
            &invalid("/generate", &scene.post_raw("/generate", "{}")?)?,
        )
    })?;
    let parts = json!([{ "type": "text", "text": "as " }, { "type": "text", "text": "before" }]);
    let whole = scene.post("/generate", &json!({ "inputs": "as before" }))?.ok()?;
    ensure!(scene.post("/generate", &json!({ "inputs": parts }))?.ok()? == whole);
    scene.close()
}

fn complete(scene: &Scene, name: &str, literal: &str, stream: bool) -> Result<Answer> {
    let mut members = vec![format!("\"{name}\":{literal}")];
    let usual = [
        ("model", format!("\"{MODEL}\"")),
        ("prompt", "\"a\"".to_owned()),
        ("stream", stream.to_string()),
    ];
    members.extend(
        usual
            .iter()
            .filter(|(field, _)| *field != name)
            .map(|(field, value)| format!("\"{field}\":{value}")),
    );
    scene.post_raw("/v1/completions", format!("{{{}}}", members.join(",")))
}

#[test]
fn every_wrong_field_of_a_completion_is_400() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    without_work(&scene, || {
        for (name, takes, more) in OPENAI {
            for literal in literals(*takes, more) {
                // Prompts are also lists of token ids.
                if *name == "prompt" && literal == "[5]" {
                    continue;
                }
                for stream in [false, true] {
                    let answer = complete(&scene, name, literal, stream)?;
                    let message = invalid("/v1/completions", &answer).with_context(|| format!("{name} = {literal}"))?;
                    says_what_is_right(name, literal, &message)?;
                    let param = answer.json()?["error"]["param"].clone();
                    let named = param.as_str().is_some_and(|param| param.starts_with(name));
                    ensure!(named, "{name} = {literal}: param is {param}");
                }
            }
        }
        Ok(())
    })?;
    scene.close()
}

#[test]
fn neutral_values_change_nothing() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let neutral = json!({
        "prompt": "a", "max_tokens": 3, "temperature": 0, "n": 1, "best_of": 1, "use_beam_search": false, "echo": false,
        "suffix": "", "logit_bias": {}, "min_tokens": 0, "bad_words": [],
        "response_format": { "type": "text" },
    });
    let plain = json!({ "prompt": "a", "max_tokens": 3, "temperature": 0 });
    ensure!(scene.complete(neutral)?.ok()?["choices"] == scene.complete(plain)?.ok()?["choices"]);
    scene.close()
}

#[test]
fn nulls_and_unknown_fields_are_as_if_they_were_absent() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let unknown = |body: &mut Value| {
        for (name, value) in [
            ("user", json!(5)),
            ("metadata", json!({ "a": [null] })),
            ("x", json!([[1], "y"])),
        ] {
            body[name] = value;
        }
    };
    let mut parameters = json!({});
    for (name, _, _) in TGI {
        parameters[*name] = Value::Null;
    }
    for name in ["top_n_tokens", "grammar", "frequency_penalty"] {
        parameters[name] = json!("ignored");
    }
    let mut body = json!({ "inputs": "a", "stream": null, "parameters": parameters });
    unknown(&mut body);
    let plain = scene.post("/generate", &json!({ "inputs": "a" }))?.ok()?;
    ensure!(scene.post("/generate", &body)?.ok()? == plain);
    ensure!(scene.post("/", &body)?.ok()? == json!([plain]));
    ensure!(
        scene
            .post("/generate", &json!({ "inputs": "a", "parameters": null }))?
            .ok()?
            == plain
    );

    // Sampled by default: the seed and the limit are given, so that two answers can be compared.
    let mut body = json!({});
    for (name, _, _) in OPENAI {
        body[*name] = Value::Null;
    }
    for name in [
        "truncate_prompt_tokens",
        "prompt_logprobs",
        "structured_outputs",
        "guided_json",
        "service_tier",
        "store",
    ] {
        body[name] = Value::Null;
    }
    unknown(&mut body);
    let prompt = json!("a");
    body["prompt"] = prompt.clone();
    let only_nulls = scene.complete(body.clone())?.ok()?;
    ensure!(only_nulls["choices"][0]["finish_reason"].is_string(), "{only_nulls}");
    body["seed"] = json!(9);
    body["max_tokens"] = json!(5);
    let plain = json!({ "prompt": prompt, "seed": 9, "max_tokens": 5 });
    ensure!(scene.complete(body)?.ok()?["choices"] == scene.complete(plain)?.ok()?["choices"]);
    scene.close()
}
