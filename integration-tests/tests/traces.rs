//! Traces and logs of real processes: one trace through the three of them, whatever becomes of the request, and a collector
//! that is out of order harms nothing.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use integration_tests::client::{events, post_ok};
use integration_tests::cluster::{Cluster, metric};
use integration_tests::collector::{Behaviour, Collector, Seen, hex};
use integration_tests::ports;
use integration_tests::trial::{begin, spec};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use reqwest::{Client, Response};
use serde_json::{Value, json};

const PHASES: [&str; 7] = [
    "queue",
    "prefill_queue",
    "prefill",
    "exposed_transfer",
    "decode_queue",
    "decode",
    "client_write",
];

/// A call with the headers of a client that traces.
async fn ask(client: &Client, cluster: &Cluster, (trace, flags): (&str, &str), body: &Value) -> Result<Response> {
    let request = client
        .post(format!("{}/v1/completions", cluster.url()))
        .header("x-request-id", format!("client-{trace}"))
        .header("traceparent", format!("00-{trace}-00f067aa0ba902b7-{flags}"))
        .header("tracestate", "vendor=a")
        .header("tracestate", "other=b")
        .json(body);
    Ok(request.send().await?.error_for_status()?)
}

fn body(stream: bool, n: u32, tokens: u32) -> Value {
    json!({
        "model": "tiny", "prompt": "once upon a time ".repeat(12), "max_tokens": tokens, "n": n,
        "temperature": 1.0, "seed": 7, "stream": stream, "ignore_eos": true
    })
}

fn named<'a>(spans: &'a [Seen], name: &str) -> Vec<&'a Seen> {
    spans.iter().filter(|seen| seen.span.name == name).collect()
}

fn one<'a>(spans: &'a [Seen], name: &str) -> Result<&'a Seen> {
    match named(spans, name)[..] {
        [only] => Ok(only),
        ref several => anyhow::bail!("{} spans named {name}", several.len()),
    }
}

const ROOT: &str = "POST /v1/completions";

/// The call is over on all processes.
fn complete(spans: &[Seen], jobs: usize) -> bool {
    let count = |name| named(spans, name).len();
    count(ROOT) == 1 && count("client_write") == 1 && count("prefill_job") + count("decode_job") == jobs
}

/// The phases lie in the call's span, one behind the other, and add up to it.
fn check_phases(spans: &[Seen]) -> Result<()> {
    let root = one(spans, ROOT)?;
    let mut phases: Vec<&Seen> = spans
        .iter()
        .filter(|seen| PHASES.contains(&seen.span.name.as_str()) && seen.span.parent_span_id == root.span.span_id)
        .collect();
    phases.sort_by_key(|seen| seen.span.start_time_unix_nano);
    let mut at = root.span.start_time_unix_nano;
    for phase in &phases {
        ensure!(
            phase.span.start_time_unix_nano == at,
            "{} does not begin where the phase before it ended",
            phase.span.name
        );
        at = phase.span.end_time_unix_nano;
    }
    let sum: u64 = phases.iter().map(|phase| phase.nanos()).sum();
    ensure!(
        sum.abs_diff(root.nanos()) < 1_000_000,
        "{sum} ns of {} ns",
        root.nanos()
    );
    Ok(())
}

fn check_root(root: &Seen, trace: &str, n: u32, tokens: u32) -> Result<()> {
    ensure!(
        root.service == "baton-coordinator" && root.instance == "coordinator",
        "{root:?}"
    );
    ensure!(
        hex(&root.span.parent_span_id) == "00f067aa0ba902b7",
        "the client's span"
    );
    ensure!(root.span.trace_state == "vendor=a,other=b", "{}", root.span.trace_state);
    ensure!(root.span.kind == SpanKind::Server as i32, "{:?}", root.span.kind);
    ensure!(
        root.span.status.as_ref().is_none_or(|status| status.code == 0),
        "{root:?}"
    );
    let generated = (n * tokens).to_string();
    let finish = vec!["length"; n as usize].join(",");
    let client = format!("client-{trace}");
    let expected = [
        ("http.request.method", "POST"),
        ("http.route", "/v1/completions"),
        ("http.response.status_code", "200"),
        ("gen_ai.request.model", "tiny"),
        ("gen_ai.usage.output_tokens", &generated),
        ("gen_ai.response.finish_reasons", &finish),
        ("baton.nodes", "decode-0,prefill-0"),
        ("baton.attempt", "1"),
        ("baton.client_request_id", &client),
    ];
    for (key, value) in expected {
        let found = root.attribute(key);
        ensure!(found.as_deref() == Some(value), "{key} is {found:?}, not {value}");
    }
    let events: Vec<&str> = root.span.events.iter().map(|event| event.name.as_str()).collect();
    ensure!(events == ["first_token"], "{events:?}");
    Ok(())
}

/// The nodes' parts: each a child of the call, with its stages.
fn check_nodes(spans: &[Seen], n: u32, tokens: u32) -> Result<()> {
    let root = one(spans, ROOT)?;
    let jobs = [
        ("prefill_job", "baton-prefill", "prefill-0", ["compute", "push"]),
        ("decode_job", "baton-decode", "decode-0", ["wait_for_kv", "generation"]),
    ];
    for (name, service, instance, stages) in jobs {
        let job = one(spans, name)?;
        ensure!(
            (job.service.as_str(), job.instance.as_str()) == (service, instance),
            "{job:?}"
        );
        ensure!(
            job.span.parent_span_id == root.span.span_id,
            "{name} is a part of the call"
        );
        ensure!(
            job.attribute("baton.request_id") == root.attribute("baton.request_id"),
            "{job:?}"
        );
        for stage in stages {
            let stage = one(spans, stage)?;
            ensure!(stage.span.parent_span_id == job.span.span_id, "{stage:?}");
        }
    }
    let number = |name: &str, key: &str| -> Result<u32> {
        let value = one(spans, name)?.attribute(key);
        Ok(value.with_context(|| format!("no {key} of {name}"))?.parse()?)
    };
    ensure!(number("compute", "baton.chunks")? > 1, "the prompt has several chunks");
    // A job whose request is over by then is not told how its push went.
    if one(spans, "prefill_job")?.attribute("baton.outcome").as_deref() == Some("handed_off") {
        ensure!(number("push", "baton.kv_bytes")? > 0, "KV was pushed");
    }
    let generated = (
        number("generation", "baton.tokens")?,
        number("generation", "baton.steps")?,
    );
    ensure!(generated == (n * (tokens - 1), tokens - 1), "{generated:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_trace_goes_through_all_processes() -> Result<()> {
    let collector = Collector::start(Behaviour::Keeps).await?;
    let spec = spec(1, 1)
        .set(collector.setting())
        .set("engine.prefill_chunk_tokens=16")
        .set("engine.prefix_cache=false")
        // Without a parent nothing is traced.
        .set("telemetry.traces_per_million=0");
    let mut cluster = Cluster::start(spec).await?;
    let client = Client::new();
    let calls = [
        ("4bf92f3577b34da6a3ce929d0e0e4701", false, 1),
        ("4bf92f3577b34da6a3ce929d0e0e4702", true, 1),
        ("4bf92f3577b34da6a3ce929d0e0e4703", true, 2),
    ];
    let unsampled = "4bf92f3577b34da6a3ce929d0e0e4704";
    ask(&client, &cluster, (unsampled, "00"), &body(true, 1, 8))
        .await?
        .text()
        .await?;
    post_ok(
        &client,
        &format!("{}/v1/completions", cluster.url()),
        &body(false, 1, 8),
    )
    .await?;
    for (trace, stream, n) in calls {
        let answer = ask(&client, &cluster, (trace, "01"), &body(stream, n, 24)).await?;
        let id = answer.headers()["x-request-id"].to_str()?.to_owned();
        answer.text().await?;
        let spans = collector.wait_for(trace, |spans| complete(spans, 2)).await?;
        check_root(one(&spans, ROOT)?, trace, n, 24)?;
        check_phases(&spans)?;
        check_nodes(&spans, n, 24)?;
        by_either_name(&cluster, &id, one(&spans, ROOT)?).await?;
    }
    // What is wrong with a request is told by its span, and is no failure of the server.
    let wrong = "4bf92f3577b34da6a3ce929d0e0e4705";
    let refused = ask(&client, &cluster, (wrong, "01"), &body(true, 0, 8)).await;
    ensure!(refused.is_err(), "n = 0 is refused");
    let spans = collector.wait_for(wrong, |spans| !spans.is_empty()).await?;
    let root = one(&spans, ROOT)?;
    ensure!(
        root.attribute("http.response.status_code").as_deref() == Some("400"),
        "{root:?}"
    );
    ensure!(
        root.attribute("error.type").as_deref() == Some("validation"),
        "{root:?}"
    );
    ensure!(
        root.span.status.as_ref().is_none_or(|status| status.code == 0),
        "{root:?}"
    );
    // Processes that end send what they have; nothing else was traced.
    for name in ["decode-0", "prefill-0", "coordinator"] {
        cluster.terminate(name, Duration::from_secs(20))?;
    }
    let traced = calls
        .map(|(trace, ..)| trace.to_owned())
        .into_iter()
        .chain([wrong.to_owned()]);
    ensure!(
        collector.traces() == traced.collect::<Vec<_>>(),
        "{:?}",
        collector.traces()
    );
    Ok(())
}

/// The decision record is found by the client's name for the request, and by the coordinator's.
async fn by_either_name(cluster: &Cluster, client_id: &str, root: &Seen) -> Result<()> {
    let own = root.attribute("baton.request_id").context("no id")?;
    let trace = root.trace();
    for name in [client_id, &own] {
        let (status, told) = cluster.admin(0, "GET", &format!("/debug/decisions/{name}"), "").await?;
        ensure!(
            status == 200 && told["decisions"][0]["request"] == own,
            "{name}: {told}"
        );
        let request = &told["request"];
        ensure!(
            request["client_request_id"] == client_id && request["trace_id"] == trace,
            "{told}"
        );
    }
    let (_, shown) = cluster.admin(0, "GET", "/debug/requests?most=1", "").await?;
    let ended = &shown["ended"][0];
    ensure!(
        ended["request"] == own && ended["client_request_id"] == client_id,
        "{shown}"
    );
    ensure!(ended["nodes"] == json!(["prefill-0", "decode-0"]), "{shown}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_moved_request_shows_both_attempts() -> Result<()> {
    let collector = Collector::start(Behaviour::Keeps).await?;
    let mut cluster = Cluster::start(spec(1, 2).set(collector.setting())).await?;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4710";
    // Many long choices: they are not over when the first tokens are there.
    let asked = body(true, 16, 400);
    let mut answer = ask(&Client::new(), &cluster, (trace, "01"), &asked).await?;
    answer.chunk().await?.context("no first token")?;
    let (_, shown) = cluster.admin(0, "GET", "/debug/requests?most=1", "").await?;
    let running = &shown["running"][0]["nodes"];
    let lost = running[1]
        .as_str()
        .with_context(|| format!("no decode node: {shown}"))?
        .to_owned();
    let left = if lost == "decode-0" { "decode-1" } else { "decode-0" };
    cluster.kill(&lost)?;
    let rest = events(answer).await?;
    ensure!(rest.last().is_some_and(|last| last == "[DONE]"), "{:?}", rest.last());
    // The killed process tells nothing.
    let spans = collector.wait_for(trace, |spans| complete(spans, 2)).await?;
    check_phases(&spans)?;
    let root = one(&spans, ROOT)?;
    ensure!(
        root.attribute("baton.nodes").as_deref() == Some("decode-0,decode-1,prefill-0"),
        "{root:?}"
    );
    // Until its link is lost, the dead node may be chosen a second time.
    let last = root.attribute("baton.attempt").context("no attempts")?;
    ensure!(["2", "3"].contains(&last.as_str()), "{last} attempts");
    let mut events = root.span.events.iter().map(|event| event.name.as_str());
    ensure!(events.next() == Some("first_token"), "{root:?}");
    ensure!(
        events.clone().count() > 0 && events.all(|event| event == "migration"),
        "{root:?}"
    );
    // It may have been lost while its KV was under way, or behind that.
    let phases = spans.iter().filter(|seen| PHASES.contains(&seen.span.name.as_str()));
    let attempts: Vec<_> = phases
        .map(|phase| {
            let failed = phase.span.status.as_ref().is_some_and(|status| status.code == 2);
            (phase.attribute("baton.attempt"), phase.attribute("baton.node"), failed)
        })
        .collect();
    let attempt = |number: &str, node: &str, failed| (Some(number.to_owned()), Some(node.to_owned()), failed);
    ensure!(attempts.contains(&attempt("1", "prefill-0", false)), "{attempts:?}");
    ensure!(attempts.contains(&attempt("1", &lost, true)), "{attempts:?}");
    ensure!(attempts.contains(&attempt(&last, left, false)), "{attempts:?}");
    let job = one(&spans, "decode_job")?;
    ensure!(
        job.instance == left && job.attribute("baton.attempt") == Some(last),
        "{job:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_out_of_order_harms_nothing() -> Result<()> {
    let hangs = Collector::start(Behaviour::Hangs).await?;
    let fails = Collector::start(Behaviour::Fails).await?;
    let nobody = format!("telemetry.otlp_endpoint=http://127.0.0.1:{}", ports::free_tcp()?);
    // Each process has another one, and little room for spans.
    let spec = spec(1, 1)
        .set("telemetry.trace_queue_spans=64")
        .set("telemetry.trace_export_timeout_ms=300")
        .set_for("coordinator", hangs.setting())
        .set_for("prefill", fails.setting())
        .set_for("decode", nobody);
    let (mut cluster, client, known) = begin(spec, 73).await?;
    known.burst(&client, &cluster.url(), 200).await?.all_exact()?;
    let page = cluster.metrics().await?;
    let dropped = metric(&page, "baton_trace_spans_dropped_total", &["reason=\"queue\""]);
    ensure!(
        dropped.is_some_and(|spans| spans > 0.0),
        "{dropped:?} spans had no room"
    );
    ensure!(hangs.requests() > 0 && fails.requests() > 0, "they were asked");
    known.check(&client, &cluster.url(), 0).await?;
    for name in ["decode-0", "prefill-0", "coordinator"] {
        cluster.terminate(name, Duration::from_secs(20))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logs_name_requests_and_say_nothing_of_their_text() -> Result<()> {
    let collector = Collector::start(Behaviour::Keeps).await?;
    let spec = spec(1, 1)
        .set(collector.setting())
        .set("telemetry.log_level=debug")
        .set("telemetry.log_format=json")
        .set("telemetry.log_requests=info");
    let mut cluster = Cluster::start(spec).await?;
    let client = Client::new();
    let trace = "4bf92f3577b34da6a3ce929d0e0e4720";
    let mut asked = body(false, 1, 16);
    asked["prompt"] = json!("the canary sings zwitscherling ".repeat(4));
    asked["stop"] = json!(["zwitscherstop"]);
    let answer: Value = ask(&client, &cluster, (trace, "01"), &asked).await?.json().await?;
    let text = answer["choices"][0]["text"].as_str().context("no text")?.to_owned();
    let (_, shown) = cluster
        .admin(0, "GET", &format!("/debug/decisions/client-{trace}"), "")
        .await?;
    let id = shown["request"]["request"].as_str().context("no id")?.to_owned();
    for name in ["decode-0", "prefill-0", "coordinator"] {
        let log = |cluster: &mut Cluster| anyhow::Ok(cluster.process(name)?.log());
        // The last line about a job may come after the answer.
        let mut lines = log(&mut cluster)?;
        let ended = |lines: &str| {
            lines.contains(if name == "coordinator" {
                "request ended"
            } else {
                "job ended"
            })
        };
        for _ in 0..500 {
            if ended(&lines) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
            lines = log(&mut cluster)?;
        }
        ensure!(ended(&lines), "{name} tells nothing: {lines}");
        ensure!(!lines.contains("zwitscher"), "{name} tells of the prompt");
        ensure!(
            !lines.contains(text.trim()) || text.trim().len() < 8,
            "{name} tells of the answer"
        );
        check_lines(name, &lines, &id, trace)?;
    }
    Ok(())
}

/// Every line is JSON, and those about the request name it by all its names.
fn check_lines(name: &str, lines: &str, id: &str, trace: &str) -> Result<()> {
    let mut about = 0;
    for line in lines.lines() {
        let line: Value = serde_json::from_str(line).with_context(|| format!("{name}: not JSON: {line}"))?;
        if line["request"] != id {
            continue;
        }
        ensure!(line["client_request_id"] == format!("client-{trace}"), "{name}: {line}");
        // Whether it is traced is not known yet when a request comes in.
        let early = line["message"] == "request";
        ensure!(early || line["trace_id"] == trace, "{name}: {line}");
        about += 1;
        if line["message"] == "request ended" {
            ensure!(line["level"] == "INFO" && line["outcome"] == "done", "{line}");
            ensure!(
                line["generated_tokens"] == 16 && line["finish_reasons"] == "length",
                "{line}"
            );
            ensure!(
                line["nodes"] == "prefill-0,decode-0" && line["decode_ms"].is_f64(),
                "{line}"
            );
        }
    }
    ensure!(about > 0, "{name} has no line about the request");
    Ok(())
}
