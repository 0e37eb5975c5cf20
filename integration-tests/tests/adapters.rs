//! Low-rank adapters, through real processes: both nodes apply the one that a request names, and what one adapter has
//! computed is never taken for another's.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use config::KvDtypeConfig;
use futures_util::{StreamExt, TryStreamExt, stream};
use integration_tests::ask::{Door, MODEL_NAME};
use integration_tests::client::{post, post_ok};
use integration_tests::cluster::{Cluster, ClusterSpec, metric_sum};
use integration_tests::exact::judge::Judge;
use integration_tests::exact::prompts::{mixed_lengths, prompts};
use integration_tests::exact::query::{Draw, Query};
use integration_tests::exact::reference::{Continuation, Reference};
use integration_tests::exact::several::check_choices;
use integration_tests::files::tiny_model;
use integration_tests::peft::Adapters;
use integration_tests::trial::{pause, spec};
use integration_tests::vitals::{idle_within, logged, states};
use model_files::RenderInput;
use protocol::sampling::SampledToken;
use reqwest::Client;
use serde_json::{Value, json};
use tokio::sync::Mutex;

/// Clusters run one after the other: nodes that starve each other lose their links.
static ONE_CLUSTER: Mutex<()> = Mutex::const_new(());

const NAMES: [Option<&str>; 3] = [None, Some("poet"), Some("org/clerk-v1.2")];
const BLOCK: usize = 16;

fn adapters() -> Result<Adapters> {
    let all = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ];
    Adapters::random(&[("poet", 4, &all), ("org/clerk-v1.2", 9, &["q_proj", "v_proj"])])
}

struct Case {
    query: Query,
    reference: Continuation,
}

/// A third of the cases without an adapter, a third with each of the two; `tokens` to generate.
fn cases(reference: &mut Reference, count: usize, tokens: u32) -> Result<Vec<Case>> {
    let texts = prompts(&reference.text.tokenizer.clone(), &mixed_lengths(count, 250))?;
    let mut cases = Vec::new();
    for (i, text) in texts.into_iter().enumerate() {
        let sampled = Draw {
            sample: true,
            temperature: Some(0.9),
            repetition_penalty: (i % 4 == 1).then_some(1.2),
            seed: 11 + i as u64,
            ..Draw::default()
        };
        let query = Query {
            draw: if i % 2 == 0 { Draw::greedy() } else { sampled },
            top: (i % 3) as u8,
            adapter: NAMES[i % 3].map(str::to_owned),
            ..Query::greedy(text, tokens)
        };
        let reference = reference.answer(&query, tokens)?;
        cases.push(Case { query, reference });
    }
    let different: BTreeSet<Vec<u32>> = cases.iter().map(|case| case.reference.ids()).collect();
    ensure!(
        different.len() * 10 >= count * 9,
        "{} different answers",
        different.len()
    );
    Ok(cases)
}

fn reference(adapters: &Adapters) -> Result<Reference> {
    Reference::with_adapters(&tiny_model(), KvDtypeConfig::F16, &adapters.listed())
}

/// Every case once, `concurrency` at a time.
async fn ask_all(judge: &Judge, cases: &[Case], concurrency: usize, turn: usize) -> Result<()> {
    let asks = cases.iter().enumerate().map(|(i, case)| async move {
        let doors: Vec<Door> = Door::ALL.into_iter().filter(|d| case.query.belongs_to(*d)).collect();
        let door = doors[(i / 3 + turn) % doors.len()];
        let most = case.query.max_tokens.context("every case has a limit")?;
        judge.ask(&case.query, most, &case.reference, door).await
    });
    let answers: Vec<_> = stream::iter(asks).buffer_unordered(concurrency).try_collect().await?;
    ensure!(answers.len() == cases.len());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adapters_mixed_in_one_batch_answer_as_one_process_does() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let adapters = adapters()?;
    let mut reference = reference(&adapters)?;
    let cases = cases(&mut reference, 36, 24)?;
    let pair = ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"));
    for setting in ["engine.prefill_chunk_tokens=256", "engine.prefill_chunk_tokens=16"] {
        let cluster = Cluster::start(pair.clone().set(adapters.setting()).set(setting)).await?;
        let judge = Judge::new(cluster.url(), reference.text.clone());
        for (turn, concurrency) in [(0, 1), (1, 18), (2, 36)] {
            let asked = ask_all(&judge, &cases, concurrency, turn).await;
            asked.with_context(|| format!("{setting}, {concurrency} at a time\n{}", cluster.logs()))?;
        }
        idle_within(&cluster, 2, Duration::from_secs(5)).await?;
    }
    Ok(())
}

/// A conversation, and the query whose answer is the engine's to it.
fn conversation(reference: &Reference, of: &Query) -> Result<(Value, Query)> {
    let messages = json!([{ "role": "user", "content": of.prompt }]);
    let template = reference.text.chat_template.as_ref().context("a chat template")?;
    let rendered = Query {
        prompt: template.render(&RenderInput::new(&messages))?,
        rendered: true,
        ..of.clone()
    };
    Ok((messages, rendered))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choices_beams_and_chats_with_an_adapter_answer_as_one_process_does() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let adapters = adapters()?;
    let mut reference = reference(&adapters)?;
    let pair = ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"));
    let cluster = Cluster::start(pair.set(adapters.setting())).await?;
    let (client, url) = (Client::new(), cluster.url());
    let post = |path: &str, body: Value| {
        let (client, url) = (client.clone(), format!("{url}{path}"));
        async move { post_ok(&client, &url, &body).await }
    };
    let (mut numbers, mut different) = (0, BTreeSet::new());
    for (i, text) in prompts(&reference.text.tokenizer.clone(), &[5, 16, 40, 90])?
        .iter()
        .enumerate()
    {
        for name in NAMES {
            let mut query = Query::greedy(text.clone(), 30);
            query.adapter = name.map(str::to_owned);
            let beams = reference.beams(&query, 3, 30)?;
            let mut body = query.body(Door::Completions);
            body["n"] = json!(3);
            body["use_beam_search"] = json!(true);
            let expected: Vec<&[SampledToken]> = beams.iter().map(|beam| beam.tokens.as_slice()).collect();
            let checked = check_choices(&post("/v1/completions", body).await?, &expected);
            numbers += checked.with_context(|| format!("beams, {query:?}"))?;

            query.draw = Draw {
                sample: true,
                temperature: Some(1.1),
                top_p: (i % 2 == 0).then_some(0.9),
                seed: 40 + i as u64,
                ..Draw::default()
            };
            let drawn = choices(&mut reference, &query, 3)?;
            let mut body = query.body(Door::Completions);
            body["n"] = json!(3);
            let checked = check_choices(&post("/v1/completions", body).await?, &tokens(&drawn));
            numbers += checked.with_context(|| format!("choices, {query:?}"))?;
            different.extend(drawn.iter().map(Continuation::ids));

            let (messages, rendered) = conversation(&reference, &query)?;
            let drawn = choices(&mut reference, &rendered, 2)?;
            let mut body = query.body(Door::Completions);
            body["n"] = json!(2);
            body["messages"] = messages;
            body["logprobs"] = json!(true);
            body.as_object_mut().context("an object")?.remove("prompt");
            let answer = post("/v1/chat/completions", body).await?;
            ensure!(answer["prompt_token_ids"] == json!(drawn[0].prompt), "{answer}");
            let checked = check_choices(&answer, &tokens(&drawn));
            numbers += checked.with_context(|| format!("chat, {query:?}"))?;
            different.extend(drawn.iter().map(Continuation::ids));
        }
    }
    eprintln!("{numbers} numbers equal, {} different answers", different.len());
    let asked = 4 * NAMES.len() * 5;
    ensure!(
        different.len() * 10 >= asked * 9,
        "{} different answers of {asked}",
        different.len()
    );
    idle_within(&cluster, 2, Duration::from_secs(5)).await?;
    Ok(())
}

/// The engine's choices.
fn choices(reference: &mut Reference, query: &Query, n: u32) -> Result<Vec<Continuation>> {
    let most = query.max_tokens.context("every query has a limit")?;
    (0..n).map(|choice| reference.choice(query, choice, most)).collect()
}

fn tokens(of: &[Continuation]) -> Vec<&[SampledToken]> {
    of.iter().map(|one| one.tokens.as_slice()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cached_prefixes_belong_to_one_adapter() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let adapters = adapters()?;
    let mut reference = reference(&adapters)?;
    let pair = ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"));
    let cluster = Cluster::start(pair.set(adapters.setting())).await?;
    let judge = Judge::new(cluster.url(), reference.text.clone());
    let prompt = prompts(&reference.text.tokenizer.clone(), &[200])?
        .pop()
        .context("a prompt")?;
    let mut answers = BTreeSet::new();
    for again in [false, true] {
        for name in NAMES {
            let query = Query {
                adapter: name.map(str::to_owned),
                ..Query::greedy(prompt.clone(), 12)
            };
            let tokens = reference.answer(&query, 12)?;
            let right = judge.ask(&query, 12, &tokens, Door::Completions).await?;
            let expected = if again {
                (tokens.prompt.len() - 1) / BLOCK * BLOCK
            } else {
                0
            };
            ensure!(
                right.answer.cached_tokens == Some(expected),
                "{name:?}: {:?} tokens are cached, must be {expected}",
                right.answer.cached_tokens
            );
            answers.insert(tokens.ids());
        }
    }
    ensure!(answers.len() == NAMES.len(), "the adapters answer alike");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_move_to_another_node_keep_their_adapter() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let adapters = adapters()?;
    let mut reference = reference(&adapters)?;
    let cases = cases(&mut reference, 36, 200)?;
    // Both decode nodes always have some of the answers, and the rest waits for its turn: a round lasts long enough for the
    // kill to meet answers, however fast the machine is.
    let spec = spec(1, 2)
        .set(adapters.setting())
        .set("engine.max_num_seqs=4")
        .set("coordinator.routing=round_robin")
        .set("coordinator.breaker_failures=1000");
    let mut cluster = Cluster::start(spec).await?;
    let judge = Judge::new(cluster.url(), reference.text.clone());
    let mut moved = 0.0;
    // A kill may come when little runs there: some rounds.
    for round in 0..12 {
        let asking = ask_all(&judge, &cases, 36, round);
        let killing = async {
            for _ in 0..500 {
                let decoding = states(&cluster).await?.get("decoding").copied().unwrap_or_default();
                if decoding >= 4.0 {
                    break;
                }
                pause(2).await;
            }
            cluster.kill("decode-0")
        };
        let (asked, killed) = tokio::join!(asking, killing);
        killed?;
        asked.with_context(|| format!("round {round}\n{}", cluster.logs()))?;
        let page = cluster.metrics().await?;
        moved = metric_sum(&page, "baton_request_migrations_total");
        if moved > 2.0 {
            break;
        }
        cluster.start_node("decode", 0)?;
        logged(&mut cluster, "decode-0", &["joined"]).await?;
    }
    eprintln!("{moved} answers have moved");
    ensure!(moved > 2.0, "only {moved} answers have moved");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adapters_are_models_and_unknown_ones_are_refused() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let adapters = adapters()?;
    let pair = ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"));
    let cluster = Cluster::start(pair.set(adapters.setting())).await?;
    let (client, url) = (Client::new(), cluster.url());
    let list: Value = client.get(format!("{url}/v1/models")).send().await?.json().await?;
    let described: Vec<Value> = list["data"].as_array().context("a list")?.clone();
    let found: Vec<(&Value, &Value, &Value)> = described
        .iter()
        .map(|model| (&model["id"], &model["root"], &model["parent"]))
        .collect();
    let (base, none) = (json!(MODEL_NAME), Value::Null);
    let (poet, clerk) = (json!("poet"), json!("org/clerk-v1.2"));
    ensure!(
        found == [(&base, &base, &none), (&poet, &base, &base), (&clerk, &base, &base)],
        "{list}"
    );
    let one: Value = client.get(format!("{url}/v1/models/poet")).send().await?.json().await?;
    ensure!(one["parent"] == base, "{one}");

    let generate = |adapter: Value| {
        let body = json!({"inputs": "Once", "parameters": {"max_new_tokens": 8, "adapter_id": adapter}});
        let (client, url) = (client.clone(), format!("{url}/generate"));
        async move { post(&client, &url, &body).await }
    };
    let plain = generate(Value::Null).await?;
    ensure!(plain.0 == 200 && plain == generate(json!("None")).await?, "{plain:?}");
    let (status, answer) = generate(json!("poet")).await?;
    ensure!(status == 200 && answer != plain.1, "{answer}");
    for name in ["nobody", MODEL_NAME, "poet/"] {
        let (status, answer) = generate(json!(name)).await?;
        let message = answer["error"].as_str().context("an error")?;
        ensure!(
            status == 422 && answer["error_type"] == "validation",
            "{name}: {answer}"
        );
        ensure!(message.contains("adapter_id") && message.contains(name), "{message}");
    }
    let body = json!({"model": "nobody", "prompt": "Once"});
    let (status, answer) = post(&client, &format!("{url}/v1/completions"), &body).await?;
    ensure!(status == 404 && answer["error"]["param"] == "model", "{answer}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_without_the_clusters_adapters_are_refused() -> Result<()> {
    let _alone = ONE_CLUSTER.lock().await;
    let (adapters, others) = (adapters()?, Adapters::random(&[("poet", 2, &["q_proj"])])?);
    let pair = ClusterSpec::pair(tiny_model()).set(format!("model.model_name={MODEL_NAME}"));
    let spec = ClusterSpec { decode: 4, ..pair }.set(adapters.setting());
    let mut cluster = Cluster::without_nodes(spec)?;
    cluster.start_coordinator()?;
    // Alone with the coordinator, which knows names only.
    cluster.start_process("decode-1", "decode-node", &[&others.setting()])?;
    let line = logged(
        &mut cluster,
        "decode-1",
        &["refuses this node", "adapters: coordinator has"],
    )
    .await?;
    ensure!(line.contains("org/clerk-v1.2, node has not"), "{line}");
    cluster.start_node("prefill", 0)?;
    cluster.start_node("decode", 0)?;
    cluster.ready().await?;
    // The same names, other numbers.
    let mixed = [
        format!("poet={}", others.path(0).display()),
        adapters.listed()[1].clone(),
    ];
    let setting = format!("model.adapters={}", json!(mixed));
    cluster.start_process("decode-2", "decode-node", &[&setting])?;
    let line = logged(
        &mut cluster,
        "decode-2",
        &["refuses this node", "adapters: cluster has poet"],
    )
    .await?;
    ensure!(line.contains("node has poet"), "{line}");
    // One that cannot be loaded.
    std::fs::remove_file(others.path(0).join("adapter_model.safetensors"))?;
    cluster.start_process("decode-3", "decode-node", &[&setting])?;
    let status = cluster.process("decode-3")?.wait(Duration::from_secs(10))?;
    let log = cluster.process("decode-3")?.log();
    let path = others.path(0).display().to_string();
    ensure!(
        status.code() == Some(1) && log.contains("adapter poet") && log.contains(&path),
        "{log}"
    );
    Ok(())
}
