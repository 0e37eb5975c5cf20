//! Bodies that nobody would send: no panic, and every refusal is a JSON error that says something.

use config::BestOf;
use coordinator::http::error::{ApiError, Family};
use coordinator::http::json::fields::StopLimits;
use coordinator::http::openai::choices::ChoiceRules;
use coordinator::http::openai::prompt::PromptLimits;
use coordinator::http::{openai, tgi};
use coordinator::media::policy::Policy;
use proptest::prelude::*;
use serde_json::{Value, json};

const STOPS: StopLimits = StopLimits {
    strings: 8,
    chars: 16,
    total_chars: 64,
};

fn media() -> Policy {
    Policy::new(&config::MediaConfig::default())
}

fn tgi_rules() -> tgi::request::Rules {
    tgi::request::Rules {
        max_best_of: 128,
        max_input_chars: 100,
        stops: STOPS,
        least_seed: 1,
        fresh_seed: 5,
        default_top_k: 10,
        vocab_size: 300,
        strict: false,
        max_grammar_bytes: 1_000,
        processed_logprobs: true,
    }
}

fn openai_rules() -> openai::request::Rules {
    openai::request::Rules {
        choices: ChoiceRules {
            most: 8_192,
            most_best_of: 128,
            best_of: BestOf::All,
        },
        prompt: PromptLimits {
            prompts: 64,
            chars: 100,
            tokens: 50,
            vocab_size: 300,
        },
        shared: openai::shared::SharedRules {
            vocab_size: 300,
            stops: STOPS,
            least_seed: 1,
            fresh_seed: 5,
            default_temperature: 1.0,
            default_top_k: 10,
            max_grammar_bytes: 1_000,
            processed_logprobs: false,
        },
        strict: false,
    }
}

/// A value of any kind, near the borders of the fields' ranges more often than elsewhere.
fn value() -> impl Strategy<Value = Value> {
    let numbers = prop_oneof![
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        proptest::sample::select(vec![-2, -1, 0, 1, 2, 5, 6, 128, 129, 8192, 8193]).prop_map(Value::from),
        proptest::sample::select(vec![1e-6, 1.0, 2.0, 0.5, -0.0, 1e300, 5e-324]).prop_map(Value::from),
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        numbers,
        "\\PC{0,20}".prop_map(Value::from),
        proptest::sample::select(vec!["text", "None", "json_object"]).prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        let names = proptest::sample::select(vec!["type", "text", "include_usage", "regex", "5", "x"]);
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::vec((names, inner), 0..4).prop_map(|members| members
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect()),
        ]
    })
}

/// Members that a reader knows by these names, and now and then one that nobody knows.
fn members(names: &'static [&'static str]) -> impl Strategy<Value = Value> {
    let name = prop_oneof![20 => proptest::sample::select(names), 1 => Just("unknown")];
    proptest::collection::vec((name, value()), 0..6).prop_map(|members| {
        members
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    })
}

fn check_error(error: &ApiError, family: Family) {
    let json: Value = serde_json::from_str(&error.json(family)).expect("JSON");
    let message = json
        .pointer("/error/message")
        .or(json.get("error"))
        .and_then(Value::as_str)
        .expect("a message");
    assert!(message.len() < 500, "{message}");
    assert!(!error.message.contains('\n'), "{message}");
    assert!(error.status(family).is_client_error());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn generate_bodies(inputs in value(), parameters in members(tgi::request::PARAMETER_FIELDS), valid_inputs: bool) {
        let inputs = if valid_inputs { json!("hi") } else { inputs };
        let body = json!({ "inputs": inputs, "parameters": parameters }).to_string();
        match tgi::request::parse(body.as_bytes(), &tgi_rules(), &media()) {
            Ok(request) => {
                let sampling = &request.sampling;
                prop_assert!(!request.inputs.is_empty() && request.max_new_tokens >= 1 && sampling.seed >= 1);
                for number in [sampling.temperature, sampling.top_p, sampling.typical_p, sampling.repetition_penalty] {
                    prop_assert!(number.is_finite() && number > 0.0, "{body}: {sampling:?}");
                }
            }
            Err(error) => {
                prop_assert!(error.param.is_some(), "{body}: {error:?}");
                check_error(&error, Family::Tgi);
            }
        }
    }

    #[test]
    fn completion_bodies(fields in members(openai::request::FIELDS), valid_prompt: bool) {
        let mut body = fields;
        body["model"] = json!("m");
        if valid_prompt {
            body["prompt"] = json!([1, 2]);
        }
        match openai::request::parse(body.to_string().as_bytes(), &openai_rules()) {
            Ok(request) => {
                let sampling = &request.shared.sampling;
                prop_assert!(sampling.temperature.is_finite() && sampling.temperature > 0.0);
                prop_assert!(sampling.top_p > 0.0 && sampling.top_p <= 1.0 && (0.0..=1.0).contains(&sampling.min_p));
                prop_assert!(request.shared.stop.iter().all(|stop| !stop.is_empty()));
            }
            Err(error) => {
                prop_assert!(error.param.is_some(), "{body}: {error:?}");
                check_error(&error, Family::OpenAi);
            }
        }
    }

    #[test]
    fn damaged_bodies(at in 0..90_usize, byte: u8, cut in 0..90_usize) {
        let whole = r#"{"inputs":"h\u00e9\ud83d\ude00","model":"m","prompt":[1,22],"parameters":{"stop":["a","b"],"seed":7}}"#;
        let mut body = whole.as_bytes().to_vec();
        body[at] = byte;
        body.truncate(body.len() - cut % 3);
        if let Err(error) = tgi::request::parse(&body, &tgi_rules(), &media()) {
            check_error(&error, Family::Tgi);
        }
        if let Err(error) = openai::request::parse(&body, &openai_rules()) {
            check_error(&error, Family::OpenAi);
        }
    }

    #[test]
    fn arbitrary_bytes(body in proptest::collection::vec(any::<u8>(), 0..64)) {
        let error = tgi::request::parse(&body, &tgi_rules(), &media()).expect_err("no prompt in there");
        check_error(&error, Family::Tgi);
        let error = openai::request::parse(&body, &openai_rules()).expect_err("no prompt in there");
        check_error(&error, Family::OpenAi);
    }
}
