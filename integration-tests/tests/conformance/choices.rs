//! Several answers to a prompt.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::scene;

/// The texts of an answer's choices, which must come in order.
fn texts(answer: &Value) -> Result<Vec<String>> {
    let choices = answer["choices"].as_array().context("choices")?;
    for (index, choice) in choices.iter().enumerate() {
        ensure!(choice["index"] == index, "{answer}");
    }
    let text = |choice: &Value| Ok(choice["text"].as_str().context("a text")?.to_owned());
    choices.iter().map(text).collect()
}

fn three(stream: bool) -> Value {
    json!({ "prompt": "a", "max_tokens": 8, "n": 3, "seed": 42, "temperature": 1, "ignore_eos": true, "stream": stream })
}

#[test]
fn case_07_three_choices() -> Result<()> {
    let answer = scene()?.complete(three(false))?.ok()?;
    let texts = texts(&answer)?;
    ensure!(texts.len() == 3, "{answer}");
    ensure!(
        texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2],
        "{answer}"
    );
    ensure!(answer["usage"]["completion_tokens"] == 24, "{answer}");
    Ok(())
}

#[test]
fn case_08_three_choices_streamed() -> Result<()> {
    let scene = scene()?;
    let whole = texts(&scene.complete(three(false))?.ok()?)?;
    let (mut streamed, mut ends, mut chunks) = (vec![String::new(); 3], [0; 3], [0; 3]);
    for chunk in scene.complete(three(true))?.json_events()? {
        let choice = &chunk["choices"][0];
        let index = choice["index"].as_u64().context("an index")? as usize;
        streamed[index].push_str(choice["text"].as_str().context("a text")?);
        ends[index] += usize::from(!choice["finish_reason"].is_null());
        chunks[index] += 1;
    }
    ensure!(streamed == whole, "{streamed:?}, whole {whole:?}");
    ensure!(ends == [1; 3], "{ends:?} ends");
    ensure!(chunks.iter().all(|chunks| *chunks <= 8), "{chunks:?} chunks");
    Ok(())
}

#[test]
fn case_13_two_equal_prompts_greedy_and_with_beam_search() -> Result<()> {
    let scene = scene()?;
    let body = json!({ "prompt": ["hello you", "hello you"], "max_tokens": 5, "temperature": 0 });
    let greedy = texts(&scene.complete(body.clone())?.ok()?)?;
    ensure!(greedy.len() == 2 && greedy[0] == greedy[1], "{greedy:?}");
    for stream in [false, true] {
        let mut beams = body.clone();
        beams["use_beam_search"] = json!(true);
        beams["n"] = json!(2);
        beams["stream"] = json!(stream);
        let answer = scene.complete(beams)?;
        let found = if stream {
            let mut events = answer.json_events()?;
            ensure!(events.len() == 1, "{} events", events.len());
            texts(&events.remove(0))?
        } else {
            texts(&answer.ok()?)?
        };
        ensure!(found.len() == 4, "{found:?}");
        ensure!(
            found[0] != found[1] && found[0] == found[2] && found[1] == found[3],
            "{found:?}"
        );
    }
    Ok(())
}

#[test]
fn case_38_best_of_on_the_tgi_paths() -> Result<()> {
    let scene = scene()?;
    let ask = |path: &str, parameters: Value| scene.post(path, &json!({ "inputs": "hello", "parameters": parameters }));
    for (path, parameters) in [
        ("/generate", json!({ "best_of": 2 })),
        ("/generate", json!({ "best_of": 2, "do_sample": true, "seed": 1 })),
        ("/generate_stream", json!({ "best_of": 2, "do_sample": true })),
    ] {
        let answer = ask(path, parameters.clone())?;
        ensure!(
            answer.status == 422 && answer.text().contains("best_of"),
            "{parameters}: {}",
            answer.text()
        );
    }
    let sampled = json!({ "best_of": 2, "do_sample": true, "details": true, "max_new_tokens": 8 });
    let answer = ask("/generate", sampled)?.ok()?;
    let details = &answer["details"];
    let others = details["best_of_sequences"].as_array().context("best_of_sequences")?;
    ensure!(others.len() == 1 && others[0]["seed"] != details["seed"], "{answer}");
    let mean = |of: &Value| -> Result<f64> {
        let tokens = of["tokens"].as_array().context("tokens")?;
        let sum: f64 = tokens.iter().filter_map(|token| token["logprob"].as_f64()).sum();
        Ok(sum / tokens.len() as f64)
    };
    ensure!(mean(details)? >= mean(&others[0])?, "{answer}");
    // Each of them is what its seed alone leads to.
    for (seed, text) in [
        (&details["seed"], &answer["generated_text"]),
        (&others[0]["seed"], &others[0]["generated_text"]),
    ] {
        let alone = ask(
            "/generate",
            json!({ "do_sample": true, "seed": seed, "max_new_tokens": 8 }),
        )?
        .ok()?;
        ensure!(alone["generated_text"] == *text, "seed {seed}: {alone}, {answer}");
    }
    Ok(())
}
