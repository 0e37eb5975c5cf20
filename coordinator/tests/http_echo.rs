//! `echo` and `prompt_logprobs` of `/v1/completions`: what is told about the prompt.

mod http_support;

use http_support::backend::Script;
use http_support::completions::{chunks, whole};
use http_support::model::{BOS, bytes};
use http_support::{Front, start};
use serde_json::{Value, json};

#[test]
fn the_prompt_comes_first_with_its_log_probabilities() {
    let front = start();
    front.backend.play(Script::Tokens(bytes("xy")));
    let fields = "\"prompt\":\"hé\",\"max_tokens\":2,\"echo\":true,\"logprobs\":1";
    let choice = whole(&front, fields)["choices"][0].clone();
    assert_eq!(choice["text"], "héxy");
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["<s>", "h", "", "é", "x", "y"]));
    assert_eq!(
        logprobs["token_logprobs"],
        json!([null, -1.0, -2.0, -3.0, -0.25, -1.25])
    );
    assert_eq!(logprobs["text_offset"], json!([0, 0, 1, 1, 2, 3]));
    assert_eq!(logprobs["top_logprobs"][0], json!(null));
    assert_eq!(logprobs["top_logprobs"][1], json!({ "h": -1.0, "?": -0.5 }));
    assert_eq!(logprobs["top_logprobs"][4], json!({ "x": -0.25 }));
    assert_eq!(front.backend.last().prompt_logprobs, Some(1));

    whole(&front, "\"prompt\":\"hi\",\"max_tokens\":2,\"echo\":true");
    assert_eq!(front.backend.last().prompt_logprobs, None, "nobody asks for them");
}

#[test]
fn the_prompt_alone() {
    let front = start();
    let fields = "\"prompt\":[\"hi\",\"you\"],\"max_tokens\":0,\"echo\":true,\"logprobs\":1,\"n\":2";
    let answer = whole(&front, fields);
    let texts: Vec<_> = (0..4).map(|index| answer["choices"][index]["text"].clone()).collect();
    assert_eq!(json!(texts), json!(["hi", "hi", "you", "you"]));
    let choice = &answer["choices"][2];
    assert_eq!(
        (&choice["index"], &choice["finish_reason"]),
        (&json!(2), &json!("length"))
    );
    assert_eq!(choice["logprobs"]["tokens"], json!(["<s>", "y", "o", "u"]));
    assert_eq!(choice["logprobs"]["token_logprobs"], json!([null, -1.0, -2.0, -3.0]));
    let usage = &answer["usage"];
    assert_eq!(
        (
            &usage["prompt_tokens"],
            &usage["completion_tokens"],
            &usage["batch_size"]
        ),
        (&json!(7), &json!(0), &json!(null))
    );
    let request = front.backend.last();
    assert_eq!((request.choices, request.beam_width), (0, None));

    let chunks = chunks(&front, fields);
    assert_eq!(chunks.len(), 4);
    for chunk in &chunks {
        let index = chunk["choices"][0]["index"].as_u64().expect("an index") as usize;
        assert_eq!(chunk["choices"][0]["text"], texts[index]);
        assert_eq!(chunk["choices"][0]["finish_reason"], "length");
    }
    assert_eq!(chunks[3]["usage"], answer["usage"]);
}

/// All combinations of echo, log-probabilities, a list of prompts, several choices, and token ids.
#[test]
fn the_prompt_is_there_or_not_in_every_combination() {
    let front = start();
    front.backend.play(Script::Tokens(bytes("xy")));
    for case in 0..32_u32 {
        let on = |bit: u32| case & (1 << bit) != 0;
        let (echo, logprobs, many, several, ids) = (on(0), on(1), on(2), on(3), on(4));
        let prompt = match (many, ids) {
            (false, false) => "\"hi\"",
            (false, true) => "[104,105]",
            (true, false) => "[\"hi\",\"hi\"]",
            (true, true) => "[[104,105],[104,105]]",
        };
        let mut fields = format!("\"prompt\":{prompt},\"max_tokens\":2,\"echo\":{echo}");
        if logprobs {
            fields.push_str(",\"logprobs\":1");
        }
        if several {
            fields.push_str(",\"n\":2");
        }
        let answer = whole(&front, &fields);
        let (prompts, n) = (1 + usize::from(many), 1 + usize::from(several));
        let choices = answer["choices"].as_array().expect("choices");
        assert_eq!(choices.len(), prompts * n, "{fields}");
        let prompt_tokens = if ids { 2 } else { 3 };
        assert_eq!(answer["usage"]["prompt_tokens"], prompts * prompt_tokens, "{fields}");
        assert_eq!(answer["usage"]["completion_tokens"], prompts * n * 2, "{fields}");
        for choice in choices {
            assert_eq!(choice["text"], if echo { "hixy" } else { "xy" }, "{fields}");
            let entries = choice["logprobs"]["tokens"].as_array().map(Vec::len);
            let expected = logprobs.then_some(2 + if echo { prompt_tokens } else { 0 });
            assert_eq!(entries, expected, "{fields}");
        }
        check_stream(&front, &fields, choices);
    }
}

/// The stream of a request says what its whole answer says, and begins each choice with what that begins with.
fn check_stream(front: &Front, fields: &str, choices: &[Value]) {
    let chunks = chunks(front, fields);
    for (index, choice) in choices.iter().enumerate() {
        let of: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(of.len(), 2, "one chunk for every token: {fields}");
        let first = of[0]["text"].as_str().expect("a text");
        assert_eq!(first, if choice["text"] == "hixy" { "hix" } else { "x" }, "{fields}");
        let text: String = of.iter().filter_map(|choice| choice["text"].as_str()).collect();
        assert_eq!(json!(text), choice["text"], "{fields}");
        for entry in ["tokens", "token_logprobs", "top_logprobs"] {
            let joined: Vec<Value> = of
                .iter()
                .filter_map(|choice| choice["logprobs"][entry].as_array())
                .flatten()
                .cloned()
                .collect();
            let whole = choice["logprobs"][entry].as_array().cloned().unwrap_or_default();
            assert_eq!(joined, whole, "{fields}");
        }
    }
}

#[test]
fn token_prompts_are_given_back_as_text_without_special_tokens() {
    let front = start();
    front.backend.play(Script::Tokens(bytes("x")));
    let text = |fields: &str| {
        let fields = format!("\"prompt\":[{BOS},104,105],\"max_tokens\":1,\"echo\":true{fields}");
        whole(&front, &fields)["choices"][0]["text"].clone()
    };
    assert_eq!(text(""), "hix");
    assert_eq!(text(",\"skip_special_tokens\":false"), "<s>hix");
}

#[test]
fn the_log_probabilities_of_the_prompt_in_a_list_of_their_own() {
    let front = start();
    front.backend.play(Script::Tokens(bytes("x")));
    let answer = whole(&front, "\"prompt\":\"h?\",\"max_tokens\":1,\"prompt_logprobs\":1");
    let token = |logprob: f64, rank: Option<u32>, text: &str| json!({ "logprob": logprob, "rank": rank, "decoded_token": text });
    let expected = json!([
        null,
        { "104": token(-1.0, None, "h"), "63": token(-0.5, Some(1), "?") },
        { "63": token(-2.0, Some(1), "?") },
    ]);
    assert_eq!(answer["choices"][0]["prompt_logprobs"], expected);
    assert_eq!(answer["choices"][0]["text"], "x");
    let absent = whole(&front, "\"prompt\":\"h?\",\"max_tokens\":1");
    assert!(absent["choices"][0].get("prompt_logprobs").is_none());
}
