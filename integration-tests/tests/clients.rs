//! Clients that others have written, against real processes: what they show their users must be what was generated.

use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use integration_tests::files::default_model;
use integration_tests::python::Script;
use integration_tests::scene::{MODEL, Scene, Shared, stretched_tiny_model};
use integration_tests::wire::{Answer, post_bytes};
use model_files::{ModelFiles, RenderInput};
use serde_json::{Value, json};

const PROMPT: &str = "The capital of France is";
const MAX_TOKENS: usize = 16;
/// The model's chat format; it answers this briefly and ends by itself.
const CHAT_QUESTION: &str = "Name the capital of France.";

/// The real model, for all tests of this file that do not break anything.
static REAL: Shared = Shared::new();

fn real() -> Result<Arc<Scene>> {
    // The clients of Hugging Face know no name but this one.
    REAL.get(|| Scene::start(&default_model()?, &["model.model_aliases=[\"dummy\"]"]))
}

/// What a plain `POST /generate` answers: the measure of all clients.
fn reference(scene: &Scene) -> Result<Value> {
    let ask = |inputs: &str, tokens: usize, more: Value| {
        let mut parameters = json!({ "max_new_tokens": tokens, "decoder_input_details": true });
        for (name, value) in more.as_object().into_iter().flatten() {
            parameters[name] = value.clone();
        }
        scene
            .post("/generate", &json!({ "inputs": inputs, "parameters": parameters }))?
            .ok()
    };
    let whole = ask(PROMPT, MAX_TOKENS, json!({}))?;
    let tokens = whole["details"]["tokens"].as_array().context("no tokens")?;
    let texts: Vec<&str> = tokens.iter().filter_map(|token| token["text"].as_str()).collect();
    ensure!(texts.len() == MAX_TOKENS, "{whole}");
    let text = texts.concat();
    ensure!(whole["generated_text"] == text.as_str(), "{whole}");
    ensure!(text.contains("Paris"), "the model is another one: {text}");
    // A stop string that begins within one token and ends within another.
    let stop = across_tokens(&texts).with_context(|| format!("no token border in {text:?}"))?;
    let stopped = text.split(stop.as_str()).next().unwrap_or_default().to_owned();
    let chat_prompt = chat_prompt()?;
    let chat = ask(&chat_prompt, 64, json!({}))?;
    ensure!(chat["details"]["finish_reason"] == "eos_token", "{chat}");
    let of_tokens = |list: &Value, name: &str| -> Vec<Value> {
        list.as_array()
            .into_iter()
            .flatten()
            .map(|token| token[name].clone())
            .collect()
    };
    Ok(json!({
        "url": scene.cluster.url(),
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "text": text,
        "ids": of_tokens(&whole["details"]["tokens"], "id"),
        "logprobs": of_tokens(&whole["details"]["tokens"], "logprob"),
        "prompt_ids": of_tokens(&whole["details"]["prefill"], "id"),
        "stop": stop,
        "stopped_text": stopped,
        "chat_prompt": chat_prompt,
        "chat_question": CHAT_QUESTION,
        "chat_text": chat["generated_text"],
    }))
}

/// The last letter of a token in the middle and the first letters of the next.
fn across_tokens(texts: &[&str]) -> Option<String> {
    let text = texts.concat();
    (4..texts.len() - 1).find_map(|index| {
        let last = texts[index].chars().next_back()?;
        let first: String = texts[index + 1].chars().take(2).collect();
        let stop = format!("{last}{first}");
        let before: usize = texts[..=index].iter().map(|text| text.len()).sum();
        let inside = first.len() < texts[index + 1].len() && texts[index].len() > last.len_utf8();
        (inside && text.find(&stop) == Some(before - last.len_utf8())).then_some(stop)
    })
}

/// The question in the model's own format: what its chat template makes of it, the system's usual words included.
fn chat_prompt() -> Result<String> {
    let text = ModelFiles::open(&default_model()?)?.text()?;
    let template = text.chat_template.context("the model has no chat template")?;
    let messages = json!([{ "role": "user", "content": CHAT_QUESTION }]);
    Ok(template.render(&RenderInput::new(&messages))?)
}

fn run_script(environment: &str, name: &str, cases: u32) -> Result<()> {
    let scene = real()?;
    let passed = Script::start(environment, name, scene.cluster.dir(), &reference(&scene)?)?.finish()?;
    ensure!(passed >= cases, "{name}: only {passed} cases ran");
    scene.is_well()
}

#[test]
fn the_official_text_generation_client() -> Result<()> {
    run_script("openai", "text_generation_client.py", 9)
}

#[test]
fn the_openai_client() -> Result<()> {
    run_script("openai", "openai_client.py", 17)
}

#[test]
fn the_client_of_the_hub() -> Result<()> {
    run_script("hub", "hub_client.py", 10)
}

#[test]
fn the_openai_classes_of_langchain() -> Result<()> {
    run_script("langchain", "langchain_client.py", 9)
}

#[test]
fn the_openai_client_for_node() -> Result<()> {
    run_script("node", "openai_client.mjs", 8)
}

#[test]
fn clients_know_that_the_cluster_is_full() -> Result<()> {
    let model = stretched_tiny_model(131_072)?;
    let settings = [
        "limits.max_seq_len=131072",
        "limits.max_iter_times=131072",
        "engine.kv_pool_tokens=131072",
        "limits.max_concurrent_requests=1",
    ];
    let scene = Scene::start(model.path(), &settings)?;
    let body = json!({ "model": MODEL, "prompt": "a", "max_tokens": 131_000, "ignore_eos": true, "stream": true });
    let mut wire = scene.wire()?;
    wire.send(post_bytes("/v1/completions", body.to_string()))?;
    ensure!(wire.head()?.status == 200);
    let reference = json!({ "url": scene.cluster.url(), "model": MODEL });
    ensure!(Script::start("openai", "overloaded.py", scene.cluster.dir(), &reference)?.finish()? == 2);
    drop(wire);
    scene.wait_idle()?;
    scene.close()
}

#[test]
fn clients_learn_that_a_stream_has_failed() -> Result<()> {
    let model = stretched_tiny_model(131_072)?;
    let settings = [
        "limits.max_seq_len=131072",
        "limits.max_iter_times=131072",
        "engine.kv_pool_tokens=262144",
        "coordinator.inter_token_timeout_ms=3000",
    ];
    let mut scene = Scene::start(model.path(), &settings)?;
    let reference = json!({ "url": scene.cluster.url(), "model": MODEL, "prompt": "a" });
    let mut script = Script::start("openai", "interrupted.py", scene.cluster.dir(), &reference)?;
    script.wait_for("begun")?;
    scene.cluster.kill("decode-0")?;
    ensure!(script.finish()? == 1);
    scene.start_decode()?;
    scene.until("the cluster serves again", || Ok(scene.get("/health")?.status == 200))?;
    scene.close()
}

/// Runs curl, as its users do. Returns the status, the content type and the body.
fn curl(arguments: &[&str]) -> Result<Answer> {
    let output = Command::new("curl")
        .args(["--silent", "--show-error", "--max-time", "60", "--noproxy", "*"])
        .args(["--write-out", "\n%{http_code} %{content_type}"])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .context("curl cannot be started: install it (scripts/test does)")?;
    ensure!(
        output.status.success(),
        "curl {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout)?;
    let (body, told) = text.rsplit_once('\n').context("curl tells no status")?;
    let (status, kind) = told.split_once(' ').context("curl tells no content type")?;
    let headers = vec![("content-type".to_owned(), kind.to_owned())];
    Ok(Answer {
        status: status.parse()?,
        headers,
        body: body.as_bytes().to_vec(),
    })
}

#[test]
fn curl_whole_and_streamed() -> Result<()> {
    let scene = real()?;
    let reference = reference(&scene)?;
    let json_header = ["-H", "Content-Type: application/json"];
    let post = |path: &str, body: &Value, more: &[&str]| {
        let (url, body) = (format!("{}{path}", scene.cluster.url()), body.to_string());
        curl(&[&json_header[..], more, &["--data", &body, &url]].concat())
    };
    let generate = json!({ "inputs": PROMPT, "parameters": { "max_new_tokens": MAX_TOKENS } });
    let completion = json!({ "model": MODEL, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0 });
    let text = &reference["text"];
    let mut streamed = completion.clone();
    streamed["stream"] = json!(true);
    let paths = [
        ("/", &generate, "/0/generated_text"),
        ("/v1/completions", &completion, "/choices/0/text"),
        ("/generate", &generate, "/generated_text"),
        ("/generate_stream", &generate, "/token/text"),
        ("/v1/completions", &streamed, "/choices/0/text"),
    ];
    // All paths once, and then a whole answer and a stream in every other way that curl has.
    let ways = [
        &["--http1.0"][..],
        &["-H", "Expect: 100-continue"],
        &["-H", "Transfer-Encoding: chunked"],
        &["--http2"],
    ];
    let plain = paths.iter().map(|path| (path, &["--no-buffer"][..]));
    let others = ways
        .iter()
        .flat_map(|way| paths[2..4].iter().map(move |path| (path, *way)));
    for ((path, body, pointer), way) in plain.chain(others) {
        let answer = post(path, body, way)?;
        let events = match answer.header("content-type") {
            Some("application/json") => vec![answer.ok()?],
            _ => answer.json_events()?,
        };
        let texts: Vec<&str> = events
            .iter()
            .filter_map(|event| event.pointer(pointer)?.as_str())
            .collect();
        ensure!(matches!(texts.len(), 1 | MAX_TOKENS), "{path} {way:?}: {events:?}");
        ensure!(&json!(texts.concat()) == text, "{path} {way:?}: {events:?}");
    }
    // Without the header curl declares a form.
    let url = format!("{}/generate", scene.cluster.url());
    ensure!(curl(&["--data", &generate.to_string(), &url])?.status == 415);
    // Larger than a megabyte: curl asks first.
    let large = scene.cluster.dir().join("large.json");
    let body = json!({ "inputs": format!("{} {PROMPT}", "word ".repeat(300_000)), "parameters": { "truncate": 5 } });
    std::fs::write(&large, body.to_string())?;
    let answer = curl(
        &[
            &json_header[..],
            &["--data-binary", &format!("@{}", large.display()), &url],
        ]
        .concat(),
    )?;
    ensure!(answer.ok()?["generated_text"].is_string());
    ensure!(curl(&["--head", &format!("{}/health", scene.cluster.url())])?.status == 200);
    ensure!(curl(&[&format!("{}/v1/models", scene.cluster.url())])?.ok()?["data"][0]["id"] == MODEL);
    scene.is_well()
}

#[test]
fn a_client_that_gives_up_early_leaves_nothing_behind() -> Result<()> {
    let scene = Scene::start(&default_model()?, &["limits.max_iter_times=8000"])?;
    let body = json!({ "model": MODEL, "prompt": PROMPT, "max_tokens": 8_000, "ignore_eos": true });
    for stream in [false, true] {
        let mut body = body.clone();
        body["stream"] = json!(stream);
        let url = format!("{}/v1/completions", scene.cluster.url());
        let arguments = [
            "--silent",
            "--max-time",
            "0.5",
            "-H",
            "Content-Type: application/json",
            "--data",
        ];
        let output = Command::new("curl")
            .args(arguments)
            .arg(body.to_string())
            .arg(&url)
            .output()?;
        ensure!(output.status.code() == Some(28), "curl gives up: {output:?}");
        scene.wait_quiet("the answer of a client that gave up")?;
    }
    scene.close()
}
