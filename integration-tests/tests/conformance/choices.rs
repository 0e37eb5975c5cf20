//! Several prompts, several choices, beams and echoes.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{refused, scene};

fn choices(answer: &Value) -> Result<&Vec<Value>> {
    answer["choices"].as_array().with_context(|| answer.to_string())
}

fn texts(answer: &Value) -> Result<Vec<String>> {
    let choices = choices(answer)?;
    let indices: Vec<u64> = choices.iter().filter_map(|choice| choice["index"].as_u64()).collect();
    ensure!(indices == (0..choices.len() as u64).collect::<Vec<_>>(), "{answer}");
    let text = |choice: &Value| Ok(choice["text"].as_str().with_context(|| answer.to_string())?.to_owned());
    choices.iter().map(text).collect()
}

/// The choices of a stream: for each index its joined text, its finish reasons and how many chunks it had.
fn by_index(chunks: &[Value], count: usize) -> Result<Vec<(String, Vec<String>, usize)>> {
    let mut found = vec![(String::new(), Vec::new(), 0); count];
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].as_array()).flatten() {
        let index = choice["index"].as_u64().context("index")? as usize;
        let (text, reasons, parts) = found.get_mut(index).with_context(|| choice.to_string())?;
        text.push_str(choice["text"].as_str().context("text")?);
        reasons.extend(choice["finish_reason"].as_str().map(str::to_owned));
        *parts += 1;
    }
    Ok(found)
}

fn three(stream: bool) -> Value {
    json!({
        "prompt": "What is an LLM?", "max_tokens": 10, "n": 3, "seed": 42, "temperature": 1, "ignore_eos": true,
        "stream": stream,
    })
}

#[test]
fn case_07_three_choices_of_one_seed() -> Result<()> {
    let scene = scene()?;
    let answer = scene.complete(three(false))?.ok()?;
    let texts_of = texts(&answer)?;
    ensure!(texts_of.len() == 3, "{answer}");
    ensure!(texts_of.iter().collect::<BTreeSet<_>>().len() == 3, "{answer}");
    ensure!(answer["usage"]["completion_tokens"] == 30, "{answer}");
    ensure!(
        texts(&scene.complete(three(false))?.ok()?)? == texts_of,
        "the seed does not repeat"
    );
    Ok(())
}

#[test]
fn case_08_three_choices_streamed() -> Result<()> {
    let scene = scene()?;
    let whole = texts(&scene.complete(three(false))?.ok()?)?;
    let chunks = scene.complete(three(true))?.json_events()?;
    let found = by_index(&chunks, 3)?;
    for (index, (text, reasons, parts)) in found.iter().enumerate() {
        ensure!(*text == whole[index], "choice {index}: {text:?} {whole:?}");
        ensure!(*reasons == ["length"], "choice {index}: {reasons:?}");
        ensure!(*parts <= 10, "choice {index}: {parts} chunks");
    }
    Ok(())
}

#[test]
fn case_13_equal_prompts_have_equal_answers_and_equal_beams() -> Result<()> {
    let scene = scene()?;
    let prompts = json!(["Hello, my name is", "Hello, my name is"]);
    let body = json!({ "prompt": prompts, "max_tokens": 5, "temperature": 0 });
    let found = texts(&scene.complete(body)?.ok()?)?;
    ensure!(found.len() == 2 && found[0] == found[1], "{found:?}");
    let body = json!({ "prompt": prompts, "max_tokens": 5, "n": 2, "use_beam_search": true, "ignore_eos": true });
    let found = texts(&scene.complete(body)?.ok()?)?;
    ensure!(found.len() == 4, "{found:?}");
    ensure!(
        found[0] != found[1] && found[0] == found[2] && found[1] == found[3],
        "{found:?}"
    );
    Ok(())
}

const FOUR: [&str; 4] = ["Say", "hello to", "the four", "runners of the relay"];

#[test]
fn case_14_four_prompts_streamed() -> Result<()> {
    let scene = scene()?;
    let mut body = json!({ "prompt": FOUR, "max_tokens": 8, "temperature": 0 });
    let whole = texts(&scene.complete(body.clone())?.ok()?)?;
    body["stream"] = json!(true);
    let found = by_index(&scene.complete(body)?.json_events()?, 4)?;
    let streamed: Vec<&String> = found.iter().map(|(text, _, _)| text).collect();
    ensure!(streamed == whole.iter().collect::<Vec<_>>(), "{streamed:?} {whole:?}");
    ensure!(found.iter().all(|(_, reasons, _)| reasons.len() == 1), "{found:?}");
    Ok(())
}

#[test]
fn case_15_four_prompts_have_four_indices() -> Result<()> {
    let scene = scene()?;
    let body = json!({ "prompt": FOUR, "max_tokens": 3, "temperature": 0 });
    let together = texts(&scene.complete(body)?.ok()?)?;
    ensure!(together.len() == 4, "{together:?}");
    for (prompt, text) in FOUR.iter().zip(&together) {
        let alone = scene
            .complete(json!({ "prompt": prompt, "max_tokens": 3, "temperature": 0 }))?
            .ok()?;
        ensure!(texts(&alone)? == [text.clone()], "{prompt}: {alone} {text}");
    }
    Ok(())
}

/// Token ids of a text, and the text that they stand for.
fn ids_of(text: &str) -> Result<Value> {
    let body = json!({ "prompt": text, "max_tokens": 1, "return_token_ids": true });
    Ok(scene()?.complete(body)?.ok()?["choices"][0]["prompt_token_ids"].clone())
}

#[test]
fn case_16_echo_with_log_probabilities() -> Result<()> {
    let scene = scene()?;
    let text = "Hello, my name is";
    for prompt in [json!(text), ids_of(text)?] {
        let body = json!({ "prompt": prompt, "max_tokens": 5, "temperature": 0, "echo": true, "logprobs": 1 });
        let answer = scene.complete(body)?.ok()?;
        let choice = &answer["choices"][0];
        ensure!(
            choice["text"].as_str().is_some_and(|found| found.starts_with(text)),
            "{answer}"
        );
        let told = &choice["logprobs"];
        ensure!(
            told["token_logprobs"][0].is_null() && told["top_logprobs"][0].is_null(),
            "{told}"
        );
        let tops = told["top_logprobs"].as_array().context("top_logprobs")?;
        let entries = tops[1..]
            .iter()
            .map(|top| top.as_object().map_or(0, serde_json::Map::len));
        ensure!(entries.clone().all(|count| count == 1 || count == 2), "{told}");
        let usage = &answer["usage"];
        let all = usage["total_tokens"].as_u64().context("total_tokens")? as usize;
        ensure!(tops.len() == all, "{told} {usage}");
    }
    Ok(())
}

#[test]
fn case_17_echo_lists_choices_and_ids_in_all_combinations() -> Result<()> {
    let scene = scene()?;
    let text = "The relay";
    let ids = ids_of(text)?;
    let one = scene.complete(json!({ "prompt": text, "max_tokens": 1 }))?.ok()?["usage"]["prompt_tokens"]
        .as_u64()
        .context("prompt_tokens")?;
    for combination in 0..32_u32 {
        let has = |bit: u32| combination >> bit & 1 == 1;
        let single = if has(0) { ids.clone() } else { json!(text) };
        let (prompts, prompt) = if has(1) {
            (2, json!([single, single]))
        } else {
            (1, single)
        };
        let n = if has(2) { 2 } else { 1 };
        let mut body =
            json!({ "prompt": prompt, "max_tokens": 4, "temperature": 1, "seed": 5, "n": n, "ignore_eos": true });
        if has(3) {
            body["echo"] = json!(true);
        }
        if has(4) {
            body["logprobs"] = json!(2);
        }
        let answer = scene.complete(body.clone())?.ok()?;
        let found = texts(&answer)?;
        ensure!(found.len() == prompts * n, "{body}: {answer}");
        ensure!(
            found.iter().all(|of| !has(3) || of.starts_with(text)),
            "{body}: {answer}"
        );
        ensure!(
            answer["usage"]["prompt_tokens"] == one * prompts as u64,
            "{body}: {answer}"
        );
        ensure!(
            answer["usage"]["completion_tokens"] == 4 * found.len(),
            "{body}: {answer}"
        );
        ensure!(
            choices(&answer)?
                .iter()
                .all(|choice| choice["logprobs"].is_null() != has(4)),
            "{body}: {answer}"
        );
    }
    Ok(())
}

#[test]
fn case_18_every_streamed_choice_starts_with_its_prompt() -> Result<()> {
    let scene = scene()?;
    let body = json!({
        "prompt": FOUR, "max_tokens": 4, "temperature": 1, "seed": 9, "n": 2, "echo": true, "stream": true,
    });
    let chunks = scene.complete(body)?.json_events()?;
    let mut seen = BTreeSet::new();
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].as_array()).flatten() {
        let index = choice["index"].as_u64().context("index")? as usize;
        if seen.insert(index) {
            let text = choice["text"].as_str().context("text")?;
            ensure!(text.starts_with(FOUR[index / 2]), "{index}: {choice}");
        }
    }
    ensure!(seen.len() == 8, "{seen:?}");
    Ok(())
}

#[test]
fn case_22_too_many_prompts_are_refused_before_any_work() -> Result<()> {
    let scene = integration_tests::scene::Scene::tiny(&[])?;
    let before = scene.rows()?;
    for stream in [false, true] {
        refused(
            &scene,
            &json!({ "prompt": vec!["a"; 100_000], "stream": stream }),
            "prompt",
        )?;
    }
    ensure!(scene.rows()? == before, "the nodes have worked");
    scene.close()
}

#[test]
fn case_38_best_of_at_the_door_of_tgi() -> Result<()> {
    let scene = scene()?;
    let ask = |path: &str, parameters: Value| scene.post(path, &json!({ "inputs": "Hello", "parameters": parameters }));
    for (path, parameters) in [
        ("/generate", json!({ "best_of": 2, "do_sample": false })),
        ("/generate", json!({ "best_of": 2, "do_sample": true, "seed": 3 })),
        ("/generate_stream", json!({ "best_of": 2, "do_sample": true })),
    ] {
        let answer = ask(path, parameters.clone())?;
        ensure!(answer.status == 422, "{path} {parameters}: {}", answer.text());
        let body = answer.json()?;
        ensure!(
            body["error"].as_str().is_some_and(|told| told.contains("best_of")),
            "{body}"
        );
        ensure!(body["error_type"] == "validation", "{body}");
    }
    let answer = ask(
        "/generate",
        json!({ "best_of": 2, "do_sample": true, "max_new_tokens": 6, "details": true }),
    )?
    .ok()?;
    let others = answer["details"]["best_of_sequences"]
        .as_array()
        .context("best_of_sequences")?;
    ensure!(others.len() == 1, "{answer}");
    let mean = |of: &Value| -> Result<f64> {
        let tokens = of["tokens"].as_array().context("tokens")?;
        let sum: f64 = tokens.iter().filter_map(|token| token["logprob"].as_f64()).sum();
        Ok(sum / tokens.len() as f64)
    };
    ensure!(mean(&answer["details"])? >= mean(&others[0])?, "{answer}");
    ensure!(answer["details"]["seed"] != others[0]["seed"], "{answer}");
    // Either sequence can be had again by its seed alone.
    for (of, text) in [
        (&answer["details"], &answer["generated_text"]),
        (&others[0], &others[0]["generated_text"]),
    ] {
        let again = ask(
            "/generate",
            json!({ "do_sample": true, "max_new_tokens": 6, "seed": of["seed"] }),
        )?
        .ok()?;
        ensure!(again["generated_text"] == *text, "{again} {of}");
    }
    Ok(())
}
