//! Public bug reports about text: stop strings, spaces, characters.

use anyhow::{Context, Result, bail, ensure};
use integration_tests::scene::Scene;
use serde_json::{Value, json};

use crate::{joined, real, scene, text};

/// An answer and what each of its tokens adds to it.
struct Told {
    body: Value,
    text: String,
    tokens: Vec<String>,
}

/// Sampled answers, until one is of whole characters and has what `wanted` asks for.
fn sampled<T>(scene: &Scene, wanted: impl Fn(&Told) -> Option<T>) -> Result<(Told, T)> {
    for seed in 1..200 {
        let body = json!({
            "prompt": "Once upon a time", "max_tokens": 40, "temperature": 1, "seed": seed, "ignore_eos": true, "logprobs": 0,
        });
        let answer = scene.complete(body.clone())?.ok()?;
        let tokens = answer["choices"][0]["logprobs"]["tokens"]
            .as_array()
            .context("tokens")?;
        let tokens = tokens
            .iter()
            .filter_map(|token| token.as_str().map(str::to_owned))
            .collect();
        let told = Told {
            body,
            text: text(&answer)?,
            tokens,
        };
        if told.text.contains('\u{fffd}') || told.tokens.concat() != told.text {
            continue;
        }
        if let Some(found) = wanted(&told) {
            return Ok((told, found));
        }
    }
    bail!("no answer is fit for the test")
}

/// The text of `count` tokens from the middle, without the first and last letter, if it comes there first.
fn across(told: &Told, count: usize) -> Option<String> {
    let from = told.tokens.len() / 2;
    let middle: Vec<char> = told.tokens[from..from + count].concat().chars().collect();
    let stop: String = middle.get(1..middle.len().checked_sub(1)?)?.iter().collect();
    let at = told.text.find(&stop)?;
    (stop.chars().count() > 4 && at >= told.tokens[..from].concat().len()).then_some(stop)
}

/// Whole and streamed answer with this stop; each must be the text up to it.
fn stops(scene: &Scene, told: &Told, stop: &Value, text_before: &str) -> Result<()> {
    let mut body = told.body.clone();
    body["stop"] = stop.clone();
    let whole = scene.complete(body.clone())?.ok()?;
    ensure!(text(&whole)? == text_before, "{stop}: {whole}");
    ensure!(whole["choices"][0]["finish_reason"] == "stop", "{whole}");
    body["stream"] = json!(true);
    let chunks = scene.complete(body)?.json_events()?;
    ensure!(joined(&chunks) == text_before, "{stop}: {chunks:?}");
    Ok(())
}

#[test]
fn report_01_nothing_of_a_stop_of_many_tokens_is_emitted() -> Result<()> {
    let scene = real()?;
    let (told, stop) = sampled(&scene, |told| across(told, 6))?;
    let before = told.text.split(&stop).next().unwrap_or_default();
    stops(&scene, &told, &json!(stop), before)
}

#[test]
fn report_02_a_long_list_of_stops() -> Result<()> {
    let scene = real()?;
    let (told, stop) = sampled(&scene, |told| across(told, 4))?;
    let mut list: Vec<String> = (0..400).map(|i| format!("never {i} in this text")).collect();
    list.insert(200, stop.clone());
    let before = told.text.split(&stop).next().unwrap_or_default();
    stops(&scene, &told, &json!(list), before)
}

#[test]
fn report_03_a_stop_inside_of_a_token() -> Result<()> {
    let scene = real()?;
    let body = |stop: Value| json!({ "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0, "stop": stop, "logprobs": 0 });
    let whole = scene.complete(body(Value::Null))?.ok()?;
    let tokens = &whole["choices"][0]["logprobs"]["tokens"];
    ensure!(
        tokens
            .as_array()
            .is_some_and(|list| list.iter().any(|token| token == " Paris")),
        "{whole}"
    );
    let stopped = scene.complete(body(json!("Pari")))?.ok()?;
    let before = text(&whole)?;
    let before = before.split("Pari").next().unwrap_or_default();
    ensure!(text(&stopped)? == before, "{stopped}");
    let choice = &stopped["choices"][0];
    ensure!(
        choice["finish_reason"] == "stop" && choice["stop_reason"] == "Pari",
        "{stopped}"
    );
    Ok(())
}

#[test]
fn report_04_a_router_before_nodes_that_know_tokens_only() -> Result<()> {
    let scene = real()?;
    let (told, stop) = sampled(&scene, |told| across(told, 3))?;
    let before = told.text.split(&stop).next().unwrap_or_default();
    stops(&scene, &told, &json!(stop), before)?;
    let mut body = told.body;
    body["stop"] = json!(stop);
    body["include_stop_str_in_output"] = json!(true);
    ensure!(text(&scene.complete(body.clone())?.ok()?)? == format!("{before}{stop}"));
    body["stream"] = json!(true);
    ensure!(joined(&scene.complete(body)?.json_events()?) == format!("{before}{stop}"));
    Ok(())
}

#[test]
fn report_05_leading_spaces_stay() -> Result<()> {
    let scene = real()?;
    for (inputs, spaces) in [("The capital of France is", " "), ("for i in range(10):", "\n    ")] {
        let parameters = json!({ "max_new_tokens": 12, "details": true });
        let body = json!({ "inputs": inputs, "parameters": parameters });
        let whole = scene.post("/generate", &body)?.ok()?;
        let generated = whole["generated_text"].as_str().context("generated_text")?;
        ensure!(generated.starts_with(spaces), "{whole}");
        let events = scene.post("/generate_stream", &body)?.json_events()?;
        let last = events.last().context("no event")?;
        ensure!(last["generated_text"] == generated, "{last}");
        let texts = events.iter().filter_map(|event| event["token"]["text"].as_str());
        let streamed: String = texts.collect();
        ensure!(streamed == generated, "{streamed:?} {generated:?}");
    }
    Ok(())
}

#[test]
fn report_16_bytes_that_are_no_character() -> Result<()> {
    let scene = scene()?;
    let mut found = 0;
    for seed in 1..40 {
        let mut body = json!({
            "prompt": "a", "max_tokens": 40, "temperature": 2, "seed": seed, "ignore_eos": true, "logprobs": 5,
        });
        let whole = scene.complete(body.clone())?.ok()?;
        let generated = text(&whole)?;
        found += u32::from(generated.contains('\u{fffd}'));
        let tops = whole["choices"][0]["logprobs"]["top_logprobs"]
            .as_array()
            .context("top_logprobs")?;
        ensure!(tops.len() == 40, "{whole}");
        body["stream"] = json!(true);
        ensure!(
            joined(&scene.complete(body)?.json_events()?) == generated,
            "seed {seed}"
        );
    }
    ensure!(found > 0, "no answer had a broken character");
    scene.is_well()
}

#[test]
fn report_28_a_very_low_temperature_is_greedy() -> Result<()> {
    for scene in [scene()?, real()?] {
        let body =
            |temperature: f64| json!({ "prompt": "The sky", "max_tokens": 12, "temperature": temperature, "seed": 3 });
        let greedy = text(&scene.complete(body(0.0))?.ok()?)?;
        let cold = text(&scene.complete(body(1e-4))?.ok()?)?;
        ensure!(!cold.is_empty() && cold == greedy, "{cold:?} {greedy:?}");
    }
    Ok(())
}

#[test]
fn case_30_offsets_where_a_stop_is_held_back() -> Result<()> {
    let scene = real()?;
    // A stop of two characters whose first one comes before: it is held back, and let go again.
    let (told, stop) = sampled(&scene, |told| {
        let letters: Vec<char> = told.text.chars().collect();
        (letters.len() / 2..letters.len() - 1).find_map(|at| {
            let stop: String = letters[at..at + 2].iter().collect();
            let before: String = letters[..at].iter().collect();
            (before.contains(letters[at]) && told.text.find(&stop) == Some(before.len())).then_some(stop)
        })
    })?;
    let mut body = told.body;
    body["stop"] = json!(stop);
    let whole = scene.complete(body.clone())?.ok()?;
    body["stream"] = json!(true);
    let chunks = scene.complete(body)?.json_events()?;
    for name in ["text_offset", "tokens", "token_logprobs"] {
        let streamed: Vec<Value> = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["logprobs"][name].as_array().cloned())
            .flatten()
            .collect();
        ensure!(
            Value::Array(streamed.clone()) == whole["choices"][0]["logprobs"][name],
            "{name}: {streamed:?} {whole}"
        );
    }
    ensure!(joined(&chunks) == text(&whole)?);
    Ok(())
}
