//! Nodes that are killed while answers are held to grammars, call tools, or belong to chats: whoever goes on with an answer
//! knows what it is held to and where it is in it, and the tokens, their log-probabilities and the calls are those of a run
//! that nobody disturbs, and, where one engine can be asked directly, its own.

use anyhow::{Context, Result, bail, ensure};
use config::KvDtypeConfig;
use futures_util::future::try_join_all;
use integration_tests::ask::Door;
use integration_tests::changed::{changed_model, replace};
use integration_tests::client::{post_events, post_ok};
use integration_tests::cluster::{Cluster, ClusterSpec, metric, metric_sum};
use integration_tests::exact::query::{Draw, Query};
use integration_tests::exact::reference::Reference;
use integration_tests::random::Random;
use integration_tests::trial::{IDLE_WITHIN, pause, spec};
use integration_tests::vitals::{Vitals, idle_within};
use model_files::{ModelFiles, RenderInput};
use protocol::sampling::Grammar;
use reqwest::Client;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::Mutex;

/// Clusters run one after the other: nodes that starve each other lose their links.
static ONE_CLUSTER: Mutex<()> = Mutex::const_new(());

const MIGRATIONS: &str = "baton_request_migrations_total";
const RESTARTS: &str = "baton_request_restarts_total";
/// Most tokens of an answer; what answers are held to ends long before.
const MOST: u32 = 400;
/// A kill may come when little runs there: so often at most.
const ROUNDS: usize = 12;

/// The tiny checkpoint with room for descriptions of tools; it keeps its end token.
fn roomy_model() -> Result<TempDir> {
    changed_model(|dir| {
        let positions = "\"max_position_embeddings\": ";
        replace(
            dir,
            "config.json",
            &format!("{positions}512"),
            &format!("{positions}4096"),
        )
    })
}

/// A sort of answers.
struct Kind {
    name: &'static str,
    grammar: Option<Grammar>,
    /// Asked as a conversation, with these further fields.
    chat: Option<Value>,
    /// Functions must be called by every answer.
    calls: bool,
}

/// An object whose words are of fixed length: long enough to be met, and sure to end.
fn schema() -> Value {
    json!({
        "type": "object", "required": ["kind", "words", "text"], "additionalProperties": false,
        "properties": {
            "kind": { "enum": ["relay", "sprint", "hurdles"] },
            "words": { "type": "array", "minItems": 6, "maxItems": 8, "items": { "enum": ["baton", "runner", "track"] } },
            "text": { "type": "string", "pattern": "^[a-z]{50}$" },
        },
    })
}

fn tools() -> Value {
    let function = |name: &str, parameters: Value| json!({ "type": "function", "function": { "name": name, "parameters": parameters } });
    let city = json!({
        "type": "object", "required": ["city"], "additionalProperties": false,
        "properties": { "city": { "type": "string", "pattern": "^[a-z]{70}$" } },
    });
    json!([function("weather", city), function("race", schema())])
}

fn kinds() -> Vec<Kind> {
    let lengthy = |word: &str| [word; 16].join(" ");
    let held = |name, grammar| Kind {
        name,
        grammar: Some(grammar),
        chat: None,
        calls: false,
    };
    let chat = |name, grammar, fields| Kind {
        name,
        grammar,
        chat: Some(fields),
        calls: false,
    };
    let calling = |name, grammar, choice: Value| Kind {
        calls: true,
        ..chat(name, grammar, json!({ "tools": tools(), "tool_choice": choice }))
    };
    // The tiny model calls nothing by itself; it is free to write a call, and made to by an expression.
    let call = "<tool_call>\n\\{\"name\": \"weather\", \"arguments\": \\{\"city\": \"[a-z]{60}\"\\}\\}\n</tool_call>";
    vec![
        held("a schema", Grammar::JsonSchema(schema().to_string())),
        held("an expression", Grammar::Regex("[a-z]{60,90}-[0-9]{30}".to_owned())),
        held(
            "choices",
            Grammar::Choice(["baton", "baker", "relay"].map(lengthy).to_vec()),
        ),
        Kind {
            name: "penalties",
            grammar: None,
            chat: None,
            calls: false,
        },
        chat("a chat", None, json!({})),
        chat(
            "a chat with a schema",
            Some(Grammar::JsonSchema(schema().to_string())),
            json!({}),
        ),
        calling(
            "a named tool",
            None,
            json!({ "type": "function", "function": { "name": "race" } }),
        ),
        calling("a tool that is required", None, json!("required")),
        calling(
            "a tool as it likes",
            Some(Grammar::Regex(call.to_owned())),
            json!("auto"),
        ),
    ]
}

/// What one choice says, whole or in pieces.
#[derive(Clone, Debug, Default, PartialEq)]
struct Said {
    text: String,
    ids: Vec<u32>,
    logprobs: Vec<Value>,
    alternatives: Vec<Value>,
    calls: Vec<Value>,
    finish: String,
}

impl Said {
    /// Adds a choice of a whole answer, or of a chunk.
    fn add(&mut self, choice: &Value) -> Result<()> {
        let said = [&choice["message"], &choice["delta"]];
        let said = said.into_iter().find(|said| said.is_object()).unwrap_or(choice);
        for text in [&said["text"], &said["content"]] {
            self.text.push_str(text.as_str().unwrap_or_default());
        }
        if choice["token_ids"].is_array() {
            self.ids
                .extend(serde_json::from_value::<Vec<u32>>(choice["token_ids"].clone())?);
        }
        let logprobs = |name: &str| choice["logprobs"][name].as_array().into_iter().flatten().cloned();
        self.logprobs.extend(logprobs("token_logprobs"));
        self.alternatives.extend(logprobs("top_logprobs"));
        // A chat's have both in one.
        self.logprobs.extend(logprobs("content"));
        // Their ids are drawn anew for every answer.
        let calls = said["tool_calls"].as_array().into_iter().flatten();
        self.calls.extend(calls.map(|call| call["function"].clone()));
        if let Some(finish) = choice["finish_reason"].as_str() {
            ensure!(self.finish.is_empty(), "two ends: {choice}");
            finish.clone_into(&mut self.finish);
        }
        Ok(())
    }
}

/// A request and what it is answered.
struct Case {
    path: &'static str,
    body: Value,
    known: Vec<Said>,
}

/// Asks, whole or streamed; what each choice says.
async fn ask(client: &Client, url: &str, path: &str, body: &Value, stream: bool) -> Result<Vec<Said>> {
    let (url, mut body) = (format!("{url}{path}"), body.clone());
    let mut all = vec![Said::default(); body["n"].as_u64().unwrap_or(1) as usize];
    let parts = if stream {
        body["stream"] = json!(true);
        let mut events = post_events(client, &url, &body).await?;
        ensure!(events.pop().as_deref() == Some("[DONE]"), "a stream without its end");
        let parsed: serde_json::Result<Vec<Value>> = events.iter().map(|event| serde_json::from_str(event)).collect();
        parsed?
    } else {
        vec![post_ok(client, &url, &body).await?]
    };
    for part in &parts {
        let choices = part["choices"]
            .as_array()
            .with_context(|| format!("no choices in {part}"))?;
        for choice in choices {
            let index = choice["index"].as_u64().context("an index")? as usize;
            all.get_mut(index).with_context(|| choice.to_string())?.add(choice)?;
        }
    }
    ensure!(all.iter().all(|said| !said.finish.is_empty()), "no end: {all:?}");
    Ok(all)
}

/// Requests of one kind: one and two choices, different seeds.
fn queries(kind: &Kind, bias: &[(u32, f32)]) -> Vec<(Query, u32)> {
    let mut queries = Vec::new();
    for (i, n) in [1, 2, 1, 2, 1, 2].into_iter().enumerate() {
        let free = kind.grammar.is_none() && !kind.calls;
        let draw = Draw {
            sample: true,
            temperature: Some(1.2),
            presence_penalty: free.then_some(0.4),
            frequency_penalty: free.then_some(0.3),
            repetition_penalty: free.then_some(1.1),
            seed: 500 + i as u64,
            logit_bias: if free { Vec::new() } else { bias.to_vec() },
            grammar: kind.grammar.clone(),
            ..Draw::default()
        };
        let prompt = format!("Write it down, for the {i}th time, and as long as it has to be:");
        let mut query = Query {
            draw,
            top: 2,
            ..Query::greedy(prompt, MOST)
        };
        if free {
            query.max_tokens = Some(120);
            query.min_tokens = 100;
        }
        queries.push((query, n));
    }
    queries
}

/// The body at the door of this kind.
fn body(kind: &Kind, query: &Query, n: u32) -> Result<(&'static str, Value)> {
    let mut body = query.body(Door::Completions);
    body["n"] = json!(n);
    let Some(fields) = &kind.chat else {
        return Ok(("/v1/completions", body));
    };
    let object = body.as_object_mut().context("an object")?;
    object.remove("prompt");
    object.insert("messages".to_owned(), messages(query));
    object.insert("logprobs".to_owned(), json!(true));
    object.insert("top_logprobs".to_owned(), json!(2));
    object.extend(fields.as_object().context("fields")?.clone());
    Ok(("/v1/chat/completions", body))
}

fn messages(query: &Query) -> Value {
    json!([{ "role": "system", "content": "Be brief." }, { "role": "user", "content": query.prompt }])
}

/// Every token of an undisturbed answer is one engine's. Not asked for tools, whose prompts only the coordinator makes.
fn check_engine(reference: &mut Reference, kind: &Kind, query: &Query, known: &[Said]) -> Result<()> {
    let mut query = query.clone();
    match &kind.chat {
        Some(_) if kind.calls => return Ok(()),
        Some(_) => {
            let template = reference.text.chat_template.as_ref().context("a chat template")?;
            query.prompt = template.render(&RenderInput::new(&messages(&query)))?;
            query.rendered = true;
        }
        None => {}
    }
    for (choice, said) in (0..).zip(known) {
        let right = reference.choice(&query, choice, query.max_tokens.context("a limit")?)?;
        ensure!(said.ids == right.ids(), "choice {choice}: {said:?}, must be {right:?}");
    }
    Ok(())
}

/// Learns what requests of this kind are answered while nothing happens, whole and streamed.
async fn learn(cluster: &Cluster, reference: &mut Reference, kind: &Kind, bias: &[(u32, f32)]) -> Result<Vec<Case>> {
    let (client, url) = (Client::new(), cluster.url());
    let (mut cases, mut ended) = (Vec::new(), 0);
    for (query, n) in queries(kind, bias) {
        let (path, body) = body(kind, &query, n)?;
        let known = ask(&client, &url, path, &body, false).await?;
        let streamed = ask(&client, &url, path, &body, true).await?;
        ensure!(known == streamed, "whole {known:?}\nstreamed {streamed:?}");
        ensure!(n == 1 || known[0].ids != known[1].ids, "equal choices: {known:?}");
        check_engine(reference, kind, &query, &known)?;
        for said in &known {
            let whole = said.finish != "length";
            ensure!(!kind.calls || said.calls.is_empty() != whole, "{said:?}");
            ended += usize::from(whole);
        }
        cases.push(Case { path, body, known });
    }
    let free = kind.grammar.is_none() && !kind.calls;
    ensure!(free || ended >= 7, "only {ended} of 9 answers come to their end");
    Ok(cases)
}

/// All cases at once, whole and streamed, four times each.
async fn ask_all(url: &str, cases: &[Case]) -> Result<()> {
    let client = Client::new();
    let asks = cases.iter().flat_map(|case| {
        let client = &client;
        [false, true, false, true, false, true, false, true].map(|stream| async move {
            let said = ask(client, url, case.path, &case.body, stream).await?;
            ensure!(said == case.known, "{}: {said:?}\nmust be {:?}", case.body, case.known);
            anyhow::Ok(())
        })
    });
    try_join_all(asks).await.map(drop)
}

async fn counted(cluster: &Cluster, name: &str) -> Result<f64> {
    Ok(metric_sum(&cluster.metrics().await?, name))
}

/// Nodes that can take four sequences each: some answers are always on each of them, and the rest waits for its turn, so a
/// round lasts long enough for a kill to meet answers, however fast the machine is.
fn narrow(model: &TempDir, prefill: usize, decode: usize) -> ClusterSpec {
    let mut spec = spec(prefill, decode);
    spec.model = model.path().to_path_buf();
    spec.set("engine.max_num_seqs=4")
        .set("coordinator.queue_timeout_ms=25000")
        .set("coordinator.routing=round_robin")
        .set("coordinator.breaker_failures=1000")
}

/// What makes documents short: the tiny model babbles, and one that is cut shows little.
fn closers(model: &TempDir) -> Result<Vec<(u32, f32)>> {
    let text = ModelFiles::open(model.path())?.text()?;
    let entries = [("\"", 6.0), (",", 4.0), ("}", 6.0), ("]", 6.0), (":", 4.0)];
    let found = entries.map(|(entry, amount)| Some((text.tokenizer.token_id(entry)?, amount)));
    let mut bias = found.into_iter().collect::<Option<Vec<_>>>().context("no such token")?;
    bias.sort_unstable_by_key(|(id, _)| *id);
    Ok(bias)
}

/// Waits until `node` has something to do and requests are in `state`, or for so long that the next round may be luckier.
async fn until_busy(cluster: &Cluster, node: &str, state: &str) -> Result<()> {
    for _ in 0..400 {
        let page = cluster.metrics().await?;
        let node = format!("node=\"{node}\"");
        let booked = metric(&page, "baton_node_blocks", &[&node, "kind=\"booked\""]).unwrap_or(0.0);
        let state = format!("state=\"{state}\"");
        let there = metric(&page, "baton_requests_in_state", &[&state]).unwrap_or(0.0);
        if booked > 0.0 && there >= 2.0 {
            break;
        }
        pause(2).await;
    }
    Ok(())
}

/// Waits until so many nodes have joined.
async fn all_there(cluster: &Cluster, nodes: usize) -> Result<()> {
    let mut there = 0;
    for _ in 0..1_000 {
        there = Vitals::of(cluster).await?.nodes.len();
        if there == nodes {
            return Ok(());
        }
        pause(20).await;
    }
    bail!("{there} of {nodes} nodes are there")
}

/// For every kind of answers: asks them all and kills `victim` amid them, until that has met some by `counter`.
async fn kill_amid(mut cluster: Cluster, model: &TempDir, victim: (&str, usize), counter: &str) -> Result<()> {
    let nodes = cluster.node_names().len();
    let name = format!("{}-{}", victim.0, victim.1);
    let mut reference = Reference::open(model.path(), KvDtypeConfig::F16)?;
    let (bias, mut random) = (closers(model)?, Random::new(5));
    for kind in kinds() {
        let learnt = learn(&cluster, &mut reference, &kind, &bias).await;
        let cases = learnt.with_context(|| kind.name)?;
        let before = counted(&cluster, counter).await?;
        let (mut met, mut rounds) = (0.0, 0);
        while met < 3.0 && rounds < ROUNDS {
            rounds += 1;
            let url = cluster.url();
            let asking = ask_all(&url, &cases);
            let killing = async {
                if victim.0 == "prefill" {
                    // A prompt takes no time worth mentioning: the node stands still before it dies.
                    pause(random.between(0, 30)).await;
                    cluster.process(&name)?.signal(libc::SIGSTOP);
                    until_busy(&cluster, &name, "prefilling").await?;
                } else {
                    until_busy(&cluster, &name, "decoding").await?;
                }
                cluster.kill(&name)
            };
            let (asked, killed) = tokio::join!(asking, killing);
            asked.with_context(|| format!("{}, round {rounds}\n{}", kind.name, cluster.logs()))?;
            killed.with_context(|| kind.name)?;
            met = counted(&cluster, counter).await? - before;
            cluster.start_node(victim.0, victim.1)?;
            all_there(&cluster, nodes).await?;
        }
        eprintln!("{}: {met} answers met in {rounds} rounds", kind.name);
        ensure!(met >= 3.0, "{}: the kills have met {met} answers", kind.name);
    }
    let page = cluster.metrics().await?;
    let disagreements = metric(&page, "baton_token_disagreements_total", &[]).unwrap_or(0.0);
    ensure!(disagreements == 0.0, "{disagreements} tokens differ between nodes");
    idle_within(&cluster, nodes, 2 * IDLE_WITHIN).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grammars_tools_and_chats_go_on_on_another_decode_node_to_the_token() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let model = roomy_model()?;
    let cluster = Cluster::start(narrow(&model, 1, 2)).await?;
    kill_amid(cluster, &model, ("decode", 0), MIGRATIONS).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grammars_tools_and_chats_begin_again_on_another_prefill_node_to_the_token() -> Result<()> {
    let _one = ONE_CLUSTER.lock().await;
    let model = roomy_model()?;
    let cluster = Cluster::start(narrow(&model, 2, 1)).await?;
    kill_amid(cluster, &model, ("prefill", 0), RESTARTS).await
}
