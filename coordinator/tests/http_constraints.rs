//! What clients ask of single tokens and of the text's form: what the nodes are told, and what is refused.

mod http_support;

use config::LogprobsConfig;
use http_support::backend::Script;
use http_support::client::{Response, post};
use http_support::model::{EOS, bytes};
use http_support::{Front, start, start_with};
use protocol::sampling::{Grammar, SamplingParams};
use serde_json::{Value, json};

fn complete(front: &Front, fields: &Value) -> Response {
    let mut body = json!({ "model": "tiny", "prompt": "ab" });
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    post(front.address, "/v1/completions", body.to_string())
}

/// What the nodes are told.
fn told(front: &Front, fields: &Value) -> SamplingParams {
    let answer = complete(front, fields);
    assert_eq!(answer.status, 200, "{fields}: {}", answer.text());
    front.backend.last().sampling
}

fn error(front: &Front, fields: &Value) -> (String, String) {
    let answer = complete(front, fields);
    assert_eq!(answer.status, 400, "{fields}: {}", answer.text());
    let error = &answer.json()["error"];
    let word = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
    (word("param"), word("message"))
}

#[test]
fn single_tokens_are_favoured_forbidden_and_held_back() {
    let front = start();
    for temperature in [0, 1] {
        let sampling = told(
            &front,
            &json!({
                "temperature": temperature, "logit_bias": { "7": 1000, "3": -0.5, "258": -101 },
                "allowed_token_ids": [9, 7, 9, 258], "bad_words": ["no", " yes"], "min_tokens": 3, "max_tokens": 3,
                "stop_token_ids": [65],
            }),
        );
        assert_eq!(sampling.greedy, temperature == 0);
        assert_eq!(sampling.logit_bias, [(3, -0.5), (7, 100.0), (258, -100.0)]);
        assert_eq!(sampling.allowed_token_ids, [7, 9, 258]);
        // With a space in front the words have one token more, so they are no other spelling.
        assert_eq!(sampling.bad_words, [bytes("no"), bytes("yes")]);
        assert_eq!((sampling.min_tokens, sampling.end_token_ids), (3, vec![65, EOS]));
    }
    let plain = told(&front, &json!({ "logit_bias": {}, "min_tokens": 0, "bad_words": [] }));
    assert!(plain.logit_bias.is_empty() && plain.bad_words.is_empty() && plain.end_token_ids.is_empty());
    let (param, message) = error(&front, &json!({ "logit_bias": { "77777": 1 } }));
    assert_eq!(param, "logit_bias");
    assert!(message.contains("\"77777\""), "{message}");
    let (param, _) = error(&front, &json!({ "min_tokens": 4, "max_tokens": 3 }));
    assert_eq!(param, "min_tokens");
}

#[test]
fn a_prompt_is_cut_to_its_end() {
    let front = start();
    let prompt = |keep: i64| {
        told(&front, &json!({ "prompt": "abcdef", "truncate_prompt_tokens": keep }));
        front.backend.last().token_ids.to_vec()
    };
    assert_eq!(prompt(2), bytes("ef"));
    assert_eq!(prompt(-1).len(), 7, "begin of text and all of it");
    assert_eq!(prompt(100).len(), 7);
}

#[test]
fn formats_are_told_to_the_nodes() {
    let front = start();
    let schema = r#"{"type":"object","properties":{"b":{"type":"integer"},"a":true}}"#;
    let value: Value = serde_json::from_str(schema).expect("JSON");
    let any = || Grammar::JsonSchema(r#"{"type":"object"}"#.to_owned());
    // `json!` sorts names; the order of properties is the client's.
    let ordered = |fields: &str| {
        let body = format!("{{\"model\":\"tiny\",\"prompt\":\"a\",{fields}}}");
        let answer = post(front.address, "/v1/completions", body);
        assert_eq!(answer.status, 200, "{fields}: {}", answer.text());
        front.backend.last().sampling.grammar
    };
    let exact = Some(Grammar::JsonSchema(schema.to_owned()));
    for fields in [
        format!(
            "\"response_format\":{{\"type\":\"json_schema\",\"json_schema\":{{\"name\":\"x\",\"strict\":true,\"schema\":{schema}}}}}"
        ),
        format!("\"response_format\":{{\"type\":\"json_object\",\"schema\":{schema}}}"),
        format!("\"structured_outputs\":{{\"json\":{schema}}}"),
        format!("\"guided_json\":{schema}"),
        format!("\"guided_json\":{}", Value::from(schema)),
    ] {
        assert_eq!(ordered(&fields), exact, "{fields}");
    }
    let regex = Some(Grammar::Regex("a+".to_owned()));
    let choice = Some(Grammar::Choice(vec!["x".to_owned(), "yz".to_owned()]));
    let lark = "start: \"a\" | \"b\"";
    let cases = [
        (json!({ "response_format": { "type": "text" } }), None),
        (json!({ "response_format": { "type": "json_object" } }), Some(any())),
        (
            json!({ "response_format": { "type": "regex", "value": "a+" } }),
            regex.clone(),
        ),
        (json!({ "structured_outputs": { "json_object": true } }), Some(any())),
        (json!({ "structured_outputs": { "regex": "a+" } }), regex.clone()),
        (json!({ "guided_regex": "a+" }), regex),
        (
            json!({ "structured_outputs": { "choice": ["x", "yz"] } }),
            choice.clone(),
        ),
        (json!({ "guided_choice": ["x", "yz"] }), choice),
        (
            json!({ "structured_outputs": { "grammar": lark } }),
            Some(Grammar::Lark(lark.to_owned())),
        ),
        (
            json!({ "guided_grammar": lark, "temperature": 0 }),
            Some(Grammar::Lark(lark.to_owned())),
        ),
    ];
    for (fields, grammar) in cases {
        assert_eq!(told(&front, &fields).grammar, grammar, "{fields}");
    }
    let dense = told(
        &front,
        &json!({ "structured_outputs": { "json": value, "disable_any_whitespace": true } }),
    );
    assert!(matches!(dense.grammar, Some(Grammar::JsonSchema(text)) if text.contains("\"whitespace_flexible\":false")));
}

#[test]
fn an_answer_has_one_format_that_it_can_be_held_to() {
    let front = start_with(|config| config.limits.max_grammar_bytes = 100);
    for (fields, field) in [
        (
            json!({ "guided_regex": "a", "response_format": { "type": "json_object" } }),
            "guided_regex",
        ),
        (
            json!({ "structured_outputs": { "regex": "a", "choice": ["b"] } }),
            "structured_outputs.choice",
        ),
        (
            json!({ "structured_outputs": { "regex": "a", "json_object": true } }),
            "structured_outputs.json_object",
        ),
        (
            json!({ "structured_outputs": { "structural_tag": "x" } }),
            "structured_outputs.structural_tag",
        ),
        (json!({ "guided_regex": "a".repeat(101) }), "guided_regex"),
        (json!({ "guided_regex": "(" }), "guided_regex"),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": { "type": "x" } } } }),
            "response_format.json_schema.schema",
        ),
        (
            json!({ "structured_outputs": { "grammar": "no grammar" } }),
            "structured_outputs.grammar",
        ),
    ] {
        for stream in [false, true] {
            let mut fields = fields.clone();
            fields["stream"] = json!(stream);
            assert_eq!(error(&front, &fields).0, field, "{fields}");
        }
    }
    assert_eq!(front.backend.count(), 0, "nothing was worked on");
    assert_eq!(complete(&front, &json!({})).status, 200);
}

#[test]
fn generate_has_a_watermark_and_later_versions_grammars() {
    let front = start();
    let generate = |parameters: Value| {
        let body = json!({ "inputs": "a", "parameters": parameters });
        post(front.address, "/generate", body.to_string())
    };
    for do_sample in [false, true] {
        assert_eq!(
            generate(json!({ "watermark": true, "do_sample": do_sample })).status,
            200
        );
        let sampling = front.backend.last().sampling;
        assert_eq!((sampling.watermark, sampling.greedy), (true, !do_sample));
    }
    assert_eq!(
        generate(json!({ "grammar": { "type": "regex", "value": "a+" } })).status,
        200
    );
    let grammar = front.backend.last().sampling.grammar;
    assert_eq!(grammar, Some(Grammar::Regex("a+".to_owned())));
    assert_eq!(
        generate(json!({ "grammar": { "type": "json", "value": { "type": "object" } } })).status,
        200
    );
    for foreign in [json!("x"), json!({}), json!({ "type": "x", "value": "a" })] {
        assert_eq!(generate(json!({ "grammar": foreign })).status, 200);
        assert_eq!(front.backend.last().sampling.grammar, None);
    }
    for wrong in [
        json!({ "type": "regex" }),
        json!({ "type": "regex", "value": "(" }),
        json!({ "type": "json", "value": 1 }),
    ] {
        let answer = generate(json!({ "grammar": wrong }));
        assert_eq!(answer.status, 422, "{wrong}");
        let told = answer.json()["error"].as_str().unwrap_or_default().to_owned();
        assert!(told.contains("parameters.grammar"), "{told}");
    }
}

#[test]
fn no_stop_string_ends_an_answer_before_its_least_length() {
    let front = start();
    front.backend.play(Script::Tokens(bytes("abab ab")));
    for stream in [false, true] {
        let ask = |least: u32, keep: bool| {
            let fields = json!({
                "stop": "ab", "min_tokens": least, "max_tokens": 7, "include_stop_str_in_output": keep, "stream": stream,
            });
            let answer = complete(&front, &fields);
            assert_eq!(answer.status, 200);
            let answers = if stream {
                answer.json_events()
            } else {
                vec![answer.json()]
            };
            let texts = answers.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str());
            let ends = answers
                .iter()
                .filter(|chunk| !chunk["choices"][0]["finish_reason"].is_null());
            let reasons: Vec<&str> = ends
                .filter_map(|chunk| chunk["choices"][0]["finish_reason"].as_str())
                .collect();
            (texts.collect::<String>(), reasons.join(","))
        };
        let right = |text: &str, reason: &str| (text.to_owned(), reason.to_owned());
        assert_eq!(ask(0, false), right("", "stop"));
        assert_eq!(ask(1, false), right("", "stop"));
        assert_eq!(ask(2, false), right("ab", "stop"));
        assert_eq!(ask(2, true), right("abab", "stop"));
        assert_eq!(ask(4, false), right("abab ", "stop"));
        assert_eq!(ask(4, true), right("abab ab", "stop"));
        assert_eq!(ask(7, false), right("abab ab", "length"));
    }
}

#[test]
fn which_log_probabilities_are_told_is_configured() {
    let told = |kind| {
        let front = start_with(|config| {
            config.coordinator.generate_logprobs = kind;
            config.coordinator.completions_logprobs = kind;
        });
        front.backend.play(Script::Tokens(bytes("a")));
        let whole = complete(&front, &json!({ "logprobs": 0, "max_tokens": 1 })).json();
        let processed = front.backend.last().sampling.processed_logprobs;
        assert_eq!(processed, kind == LogprobsConfig::Processed);
        let body = json!({ "inputs": "a", "parameters": { "details": true, "max_new_tokens": 1 } });
        let generated = post(front.address, "/generate", body.to_string()).json();
        let number = |value: &Value| value.as_f64().expect("a number");
        let openai = number(&whole["choices"][0]["logprobs"]["token_logprobs"][0]);
        assert_eq!(number(&generated["details"]["tokens"][0]["logprob"]), openai);
        openai
    };
    assert_ne!(told(LogprobsConfig::Raw), told(LogprobsConfig::Processed));
}
