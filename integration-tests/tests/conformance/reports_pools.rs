//! Public bug reports about servers with two pools: the first token, counters, faults, clients that leave.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use integration_tests::ask::{Ask, Door, Outcome};
use integration_tests::exact::query::{Draw, Query};
use integration_tests::exact::reference::Reference;
use integration_tests::files::tiny_model;
use integration_tests::scene::{MODEL, Scene, pause, stretched_tiny_model};
use integration_tests::wire::{Answer, post_bytes};
use serde_json::{Value, json};

use crate::{scene, text};

/// The tiny checkpoint for very long answers, behind short deadlines.
fn long_answers() -> Result<(tempfile::TempDir, Scene)> {
    let model = stretched_tiny_model(131_072)?;
    let settings = [
        "limits.max_seq_len=131072",
        "limits.max_iter_times=131072",
        "engine.kv_pool_tokens=262144",
        "coordinator.inter_token_timeout_ms=2000",
        "coordinator.queue_timeout_ms=5000",
    ];
    let scene = Scene::start(model.path(), &settings)?;
    Ok((model, scene))
}

#[test]
fn report_21_chunks_of_a_prompt_are_no_output() -> Result<()> {
    let scene = Scene::tiny(&["engine.prefill_chunk_tokens=16"])?;
    let prompt: String = ('a'..='z').cycle().take(300).collect();
    let body = json!({
        "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": true, "stream": true,
        "stream_options": { "include_usage": true, "continuous_usage_stats": true },
    });
    let chunks = scene.complete(body)?.json_events()?;
    let prompt_tokens = chunks[0]["usage"]["prompt_tokens"].as_u64().context("prompt_tokens")?;
    ensure!(prompt_tokens > 64, "{chunks:?}");
    for (index, chunk) in chunks.iter().enumerate() {
        ensure!(chunk["usage"]["prompt_tokens"] == prompt_tokens, "{chunk}");
        ensure!(chunk["usage"]["completion_tokens"] == (index + 1).min(6), "{chunk}");
    }
    scene.close()
}

#[test]
fn report_22_usage_of_a_stream_is_the_sum_of_its_choices() -> Result<()> {
    let scene = scene()?;
    for options in [Value::Null, json!({ "include_usage": true })] {
        let body = json!({
            "prompt": "a", "max_tokens": 7, "temperature": 1, "seed": 1, "n": 2, "ignore_eos": true, "stream": true,
            "stream_options": options,
        });
        let chunks = scene.complete(body)?.json_events()?;
        let usages: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["usage"])
            .filter(|usage| !usage.is_null())
            .collect();
        ensure!(
            usages.len() == 1 && usages[0]["completion_tokens"] == 14,
            "{options}: {usages:?}"
        );
    }
    Ok(())
}

#[test]
fn report_23_as_many_tokens_as_were_asked_for() -> Result<()> {
    let scene = scene()?;
    for tokens in [1, 2, 3, 64] {
        let body = json!({ "prompt": "a", "max_tokens": tokens, "ignore_eos": true, "temperature": 0, "return_token_ids": true });
        let answer = scene.complete(body)?.ok()?;
        ensure!(answer["usage"]["completion_tokens"] == tokens, "{answer}");
        let ids = answer["choices"][0]["token_ids"].as_array().context("token_ids")?;
        ensure!(ids.len() == tokens, "{answer}");
    }
    Ok(())
}

#[test]
fn report_24_the_first_token_is_in_every_count_once() -> Result<()> {
    let scene = Scene::tiny(&[])?;
    let counters = || -> Result<Vec<f64>> {
        [
            "baton_generation_tokens_total",
            "generation_tokens_total",
            "tgi_request_generated_tokens_sum",
        ]
        .iter()
        .map(|name| scene.metric(name, &[]))
        .collect()
    };
    let before = counters()?;
    let mut sum = 0;
    for tokens in [1, 2, 5] {
        let parameters = json!({ "max_new_tokens": tokens, "details": true });
        let body = json!({ "inputs": "Hello", "parameters": parameters });
        let whole = scene.post("/generate", &body)?.ok()?;
        let generated = whole["details"]["generated_tokens"]
            .as_u64()
            .context("generated_tokens")?;
        ensure!(
            whole["details"]["tokens"].as_array().map(Vec::len) == Some(generated as usize),
            "{whole}"
        );
        let events = scene.post("/generate_stream", &body)?.json_events()?;
        ensure!(events.len() as u64 == generated, "{events:?}");
        sum += 2 * generated;
    }
    scene.until("the counters follow", || {
        let now = counters()?;
        Ok(now.iter().zip(&before).all(|(now, before)| now - before == sum as f64))
    })?;
    scene.close()
}

fn sampled(prompt: &str, seed: u64) -> Query {
    let mut query = Query::greedy(prompt, 12);
    query.draw = Draw {
        sample: true,
        temperature: Some(1.0),
        seed,
        ..Draw::greedy()
    };
    query.prompt_logprobs = true;
    query
}

#[test]
fn report_25_the_first_token_is_sampled_once_and_as_in_one_process() -> Result<()> {
    let scene = scene()?;
    let mut one_process = Reference::open(&tiny_model(), config::KvDtypeConfig::default())?;
    for seed in 1..9 {
        let query = sampled("The baton is handed over", seed);
        let expected = one_process.endless(&query, 12)?.ids();
        let answer = scene
            .complete(json!({
                "prompt": query.prompt, "max_tokens": 12, "temperature": 1, "seed": seed, "ignore_eos": true,
                "return_token_ids": true,
            }))?
            .ok()?;
        ensure!(
            answer["choices"][0]["token_ids"] == json!(expected),
            "{answer} {expected:?}"
        );
        let first = scene
            .complete(json!({
                "prompt": query.prompt, "max_tokens": 1, "temperature": 1, "seed": seed, "return_token_ids": true,
            }))?
            .ok()?;
        ensure!(
            first["choices"][0]["token_ids"] == json!(expected[..1]),
            "{first} {expected:?}"
        );
    }
    Ok(())
}

#[test]
fn report_26_log_probabilities_of_the_prompt_as_in_one_process() -> Result<()> {
    let scene = scene()?;
    let mut one_process = Reference::open(&tiny_model(), config::KvDtypeConfig::default())?;
    let query = sampled("Nothing is lost while runners change places", 4);
    let expected = one_process.endless(&query, 3)?.prompt_logprobs.context("asked for")?;
    let parameters = json!({ "decoder_input_details": true, "max_new_tokens": 3 });
    let answer = scene
        .post(
            "/generate",
            &json!({ "inputs": query.prompt, "parameters": parameters }),
        )?
        .ok()?;
    let told = answer["details"]["prefill"].as_array().context("prefill")?;
    ensure!(
        told.len() == expected.len() + 1 && told[0]["logprob"].is_null(),
        "{answer}"
    );
    for (token, expected) in told[1..].iter().zip(&expected) {
        ensure!(
            token["logprob"].as_f64().map(|value| value as f32) == Some(*expected),
            "{token} {expected}"
        );
    }
    Ok(())
}

#[test]
fn report_27_which_penalty_sees_the_prompt() -> Result<()> {
    let scene = scene()?;
    let plain = scene
        .complete(json!({ "prompt": "a b c d e", "max_tokens": 1, "temperature": 0, "return_token_ids": true }))?
        .ok()?["choices"][0]
        .clone();
    let first = plain["token_ids"][0].as_u64().context("token_ids")?;
    let ids = plain["prompt_token_ids"].as_array().context("prompt_token_ids")?;
    // The most probable token becomes a part of the prompt.
    let prompt: Vec<Value> = ids.iter().cloned().chain(vec![json!(first); 3]).collect();
    let ask = |penalty: &str, value: f64, tokens: u32| -> Result<Vec<u64>> {
        let mut body = json!({
            "prompt": prompt, "max_tokens": tokens, "temperature": 1e-4, "seed": 1, "return_token_ids": true, "ignore_eos": true,
        });
        body[penalty] = json!(value);
        let answer = scene.complete(body)?.ok()?;
        let ids = answer["choices"][0]["token_ids"].as_array().context("token_ids")?;
        Ok(ids.iter().filter_map(Value::as_u64).collect())
    };
    let unpunished = ask("presence_penalty", 0.0, 8)?;
    for penalty in ["presence_penalty", "frequency_penalty"] {
        ensure!(
            ask(penalty, 2.0, 1)? == unpunished[..1],
            "{penalty} changes the first token"
        );
    }
    // Not seen by the others, the prompt is punished by this one: no token of it is drawn first, whichever was best.
    let in_prompt = |token: u64| prompt.contains(&json!(token));
    let greedy = json!({ "max_new_tokens": 1, "details": true, "repetition_penalty": 1e6 });
    let inputs = "a b c d e a b c d e";
    let told = scene
        .post("/generate", &json!({ "inputs": inputs, "parameters": greedy }))?
        .ok()?;
    let token = told["details"]["tokens"][0]["id"].as_u64().context("id")?;
    let of_prompt = scene
        .complete(json!({ "prompt": inputs, "max_tokens": 1, "return_token_ids": true }))?
        .ok()?["choices"][0]["prompt_token_ids"]
        .clone();
    ensure!(
        !of_prompt.as_array().context("ids")?.contains(&json!(token)),
        "{token} is in {of_prompt}"
    );
    ensure!(in_prompt(first), "the prompt has it");
    Ok(())
}

#[test]
fn report_29_a_client_leaves_while_its_kv_is_on_the_way() -> Result<()> {
    let (_model, scene) = long_answers()?;
    let prompt: String = ('a'..='z').cycle().take(60_000).collect();
    for wait_ms in [1, 5, 20, 50, 100, 200] {
        let body =
            json!({ "model": MODEL, "prompt": prompt, "max_tokens": 100_000, "ignore_eos": true, "stream": true });
        let mut wire = scene.wire()?;
        wire.send(post_bytes("/v1/completions", body.to_string()))?;
        pause(Duration::from_millis(wait_ms));
        drop(wire);
    }
    scene.wait_quiet("everything is given back")?;
    scene.close()
}

#[test]
fn report_30_a_client_leaves_a_whole_answer() -> Result<()> {
    let (_model, scene) = long_answers()?;
    let body = json!({ "model": MODEL, "prompt": "a", "max_tokens": 100_000, "ignore_eos": true });
    let mut wire = scene.wire()?;
    wire.send(post_bytes("/v1/completions", body.to_string()))?;
    scene.until("the request runs", || {
        Ok(scene.metric("baton_num_requests_running", &[])? == 1.0)
    })?;
    drop(wire);
    scene.until("nothing runs", || {
        Ok(scene.metric("baton_num_requests_running", &[])? == 0.0)
    })?;
    scene.close()
}

/// A stream whose decode node is killed after it has begun.
fn interrupted(scene: &mut Scene) -> Result<Answer> {
    let body = json!({ "model": MODEL, "prompt": "a", "max_tokens": 100_000, "ignore_eos": true, "stream": true });
    let mut wire = scene.wire()?;
    let client = std::thread::spawn(move || -> Result<Answer> {
        wire.send(post_bytes("/v1/completions", body.to_string()))?;
        wire.answer()
    });
    scene.until("the request runs", || {
        Ok(scene.metric("baton_num_requests_running", &[])? == 1.0)
    })?;
    pause(Duration::from_millis(200));
    scene.cluster.kill("decode-0")?;
    client.join().map_err(|_| anyhow::anyhow!("the client panicked"))?
}

#[test]
fn report_31_and_case_29_a_failure_in_mid_stream_is_one_event() -> Result<()> {
    let (_model, mut scene) = long_answers()?;
    let answer = interrupted(&mut scene)?;
    let events = answer.events()?;
    ensure!(
        events.last().is_some_and(|event| event == "[DONE]"),
        "{:?}",
        events.last()
    );
    let told = answer.json_events()?;
    let errors: Vec<&Value> = told.iter().filter(|event| event.get("error").is_some()).collect();
    ensure!(
        errors.len() == 1 && told.last() == errors.first().copied(),
        "{errors:?}"
    );
    // Before the first token there is still a status to tell it by.
    let body = json!({ "prompt": "a", "max_tokens": 5, "stream": true });
    let refused = scene.complete(body)?;
    ensure!(refused.status == 503, "{} {}", refused.status, refused.text());
    scene.start_decode()?;
    scene.until("the cluster serves again", || Ok(scene.get("/health")?.status == 200))?;
    scene.close()
}

#[test]
fn report_34_an_error_inside_of_a_stream_is_no_success() -> Result<()> {
    let (_model, mut scene) = long_answers()?;
    let body = json!({
        "model": MODEL, "prompt": "a", "max_tokens": 100_000, "ignore_eos": true, "stream": true, "return_token_ids": true,
    });
    let ask = Ask {
        door: Door::CompletionsStream,
        body,
    };
    let url = scene.cluster.url();
    let sent = std::thread::spawn(move || -> Result<Outcome> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(runtime.block_on(ask.send(&reqwest::Client::new(), &url)))
    });
    scene.until("the request runs", || {
        Ok(scene.metric("baton_num_requests_running", &[])? == 1.0)
    })?;
    pause(Duration::from_millis(200));
    scene.cluster.kill("decode-0")?;
    let outcome = sent.join().map_err(|_| anyhow::anyhow!("the client panicked"))??;
    ensure!(
        matches!(&outcome, Outcome::Failed { ids, .. } if !ids.is_empty()),
        "{outcome:?}"
    );
    scene.start_decode()?;
    scene.until("the cluster serves again", || Ok(scene.get("/health")?.status == 200))?;
    ensure!(!text(&scene.complete(json!({ "prompt": "a", "max_tokens": 3 }))?.ok()?)?.is_empty());
    scene.close()
}
