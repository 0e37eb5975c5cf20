//! The load generator: what it sends, what it counts, what it refuses. Its figures are nobody's test.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use integration_tests::cluster::{Cluster, ClusterSpec, metric_sum};
use integration_tests::files::{binary, root};
use integration_tests::scene::{MODEL, stretched_tiny_model};
use load_generator::null_server::{self, Behaviour, Serving};
use serde_json::{Value, json};
use tempfile::TempDir;

const DIALECTS: [&str; 4] = ["generate", "generate_stream", "completions", "chat"];
/// No run of these tests takes longer on any machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Starts the program, with the results as files in `dir`.
fn start(dir: &Path, arguments: &[&str]) -> Result<Child> {
    let child = Command::new(binary("load")?)
        .args(arguments)
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    Ok(child)
}

async fn output(child: Child) -> Result<Output> {
    let ended = tokio::task::spawn_blocking(|| child.wait_with_output());
    Ok(tokio::time::timeout(PATIENCE, ended)
        .await
        .context("load does not end")???)
}

/// Runs to the end, which must be a good one; standard output.
async fn load(dir: &Path, arguments: &[&str]) -> Result<String> {
    let output = output(start(dir, arguments)?).await?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{arguments:?}: {text}{complaint}");
    Ok(text)
}

/// Runs a wrong call; its complaint.
async fn refused(arguments: &[&str]) -> Result<String> {
    let output = output(start(&std::env::temp_dir(), arguments)?).await?;
    ensure!(!output.status.success(), "{arguments:?} was accepted");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

fn json(dir: &Path, name: &str) -> Result<Value> {
    Ok(serde_json::from_str(&std::fs::read_to_string(dir.join(name))?)?)
}

fn number(value: &Value, path: &str) -> Result<u64> {
    value
        .pointer(path)
        .and_then(Value::as_u64)
        .with_context(|| format!("no {path} in {value}"))
}

async fn null(behaviour: Behaviour) -> Result<(Serving, String)> {
    let serving = null_server::start(0, behaviour).await?;
    let url = format!("http://{}", serving.address);
    Ok((serving, url))
}

/// Prompts of 3, 4 and 5 words, so that nothing is asked beside what the test counts.
fn prompts(dir: &Path) -> Result<()> {
    std::fs::write(
        dir.join("prompts.txt"),
        "one two three\none two three four\n\none two three four five\n",
    )?;
    Ok(())
}

#[tokio::test]
async fn failures_inside_a_stream_that_began_as_a_200_are_failures() -> Result<()> {
    let dir = TempDir::new()?;
    prompts(dir.path())?;
    for (failing, kind) in [(true, "error event"), (false, "cut off")] {
        for dialect in ["generate_stream", "completions", "chat"] {
            let every = 5;
            let behaviour = Behaviour {
                fail_every: if failing { every } else { 0 },
                cut_every: if failing { 0 } else { every },
                ..Behaviour::default()
            };
            let (serving, url) = null(behaviour).await?;
            let rest = "--model null --prompts prompts.txt --output-tokens 6 --warmup 0 --requests 20 --rate 200 --slo-e2e-ms 1000000 \
                        --json run.json --csv run.csv";
            let arguments = [
                &["--url", &url, "--dialect", dialect][..],
                &rest.split_whitespace().collect::<Vec<_>>(),
            ]
            .concat();
            let text = load(dir.path(), &arguments).await?;
            let found = json(dir.path(), "run.json")?;
            let counts = &found["summary"]["counts"];
            let expected = json!({"requests": 20, "succeeded": 16, "failed": 4, "failures": {kind: 4}, "aborted": 0, "met_slo": 16});
            assert_eq!((counts, serving.requests()), (&expected, 20), "{dialect}: {text}");
            assert_eq!(number(&found, "/summary/tokens/output")?, 16 * 6, "{dialect}");
            assert_eq!(found["summary"]["slo"]["attained"], json!(0.8));
            assert!(text.contains(&format!("4 {kind}")), "{text}");
            let rows = std::fs::read_to_string(dir.path().join("run.csv"))?;
            assert_eq!(
                (rows.lines().count(), rows.matches(kind).count() >= 4),
                (21, true),
                "{rows}"
            );
        }
    }
    Ok(())
}

#[tokio::test]
async fn all_dialects_and_paces_count_exactly() -> Result<()> {
    let dir = TempDir::new()?;
    let (_serving, url) = null(Behaviour::default()).await?;
    let paces = [
        "--rate 300",
        "--rate 300 --arrivals gamma --burstiness 0.3",
        "--rate 300 --arrivals constant",
        "--users 3",
    ];
    for (dialect, pace) in DIALECTS.into_iter().zip(paces) {
        let rest = format!(
            "--dialect {dialect} {pace} --requests 30 --input-tokens 40 --output-tokens 7 --json run.json --report run.html"
        );
        let arguments: Vec<_> = ["--url", &url].into_iter().chain(rest.split_whitespace()).collect();
        load(dir.path(), &arguments).await?;
        let found = json(dir.path(), "run.json")?;
        assert_eq!(number(&found, "/summary/counts/succeeded")?, 30, "{dialect}");
        // The null server takes a word for a token, and says so: prompts have the length that was asked for.
        assert_eq!(number(&found, "/summary/tokens/prompt")?, 30 * 40, "{dialect}");
        assert_eq!(number(&found, "/summary/tokens/output")?, 30 * 7, "{dialect}");
        assert_eq!(number(&found, "/summary/latencies/e2e_ms/count")?, 30, "{dialect}");
        let gaps = found["summary"]["latencies"]["itl_ms"]["count"].as_u64();
        assert_eq!(gaps, (dialect != "generate").then_some(30 * 6), "{dialect}");
        assert_eq!(found["summary"]["offered_per_s"].is_null(), pace == "--users 3");
        described(&found)?;
        let page = std::fs::read_to_string(dir.path().join("run.html"))?;
        assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
        assert!(!page.contains("src=") && !page.contains("href="), "a page asks nobody");
    }
    Ok(())
}

/// Errors unless a report is as its description says.
fn described(report: &Value) -> Result<()> {
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(root().join("docs/load-report.schema.json"))?)?;
    let validator = jsonschema::validator_for(&schema)?;
    let problems: Vec<String> = validator.iter_errors(report).map(|error| error.to_string()).collect();
    ensure!(problems.is_empty(), "{problems:#?}");
    Ok(())
}

#[tokio::test]
async fn an_interrupted_run_says_what_it_has() -> Result<()> {
    let dir = TempDir::new()?;
    prompts(dir.path())?;
    let (serving, url) = null(Behaviour::default()).await?;
    let rest = "--dialect completions --model null --prompts prompts.txt --warmup 0 --rate 100 --requests 100000000 --json run.json";
    let arguments: Vec<_> = ["--url", &url].into_iter().chain(rest.split_whitespace()).collect();
    let child = start(dir.path(), &arguments)?;
    // Those before the last have been answered, or as good as.
    while serving.requests() < 20 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let id = child.id();
    #[allow(unsafe_code, reason = "kill(2) has no safe wrapper in std")]
    // SAFETY: plain system call; the child has not been waited for, so the id is still its own.
    let sent = unsafe { libc::kill(libc::pid_t::try_from(id)?, libc::SIGINT) };
    assert_eq!(sent, 0);
    let output = output(child).await?;
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("TTFT"), "{text}");
    let found = json(dir.path(), "run.json")?;
    assert_eq!(found["interrupted"], true);
    let (succeeded, failed) = (
        number(&found, "/summary/counts/succeeded")?,
        number(&found, "/summary/counts/failed")?,
    );
    assert!(succeeded > 0 && failed == 0, "{found}");
    described(&found)
}

#[tokio::test]
async fn a_sweep_ends_above_and_below() -> Result<()> {
    let dir = TempDir::new()?;
    let gap = Duration::from_millis(20);
    let (_serving, url) = null(Behaviour {
        gap,
        ..Behaviour::default()
    })
    .await?;
    // Four gaps of 20 ms take 80 ms at least: one objective is met by all, the other by none.
    for (limit, good, bad) in [("1000000", json!(400.0), Value::Null), ("40", Value::Null, json!(25.0))] {
        let rest = format!(
            "--dialect generate_stream --requests 12 --output-tokens 5 --start-rate 100 --max-runs 3 --slo-e2e-ms {limit} --json \
             sweep.json --report sweep.html"
        );
        let arguments: Vec<_> = ["sweep", "--url", &url]
            .into_iter()
            .chain(rest.split_whitespace())
            .collect();
        load(dir.path(), &arguments).await?;
        let found = json(dir.path(), "sweep.json")?;
        assert_eq!(found["goodput"], json!({"good_per_s": good, "bad_per_s": bad}));
        assert_eq!(found["runs"].as_array().map(Vec::len), Some(3));
        assert!(std::fs::read_to_string(dir.path().join("sweep.html"))?.contains("<svg"));
    }
    Ok(())
}

#[tokio::test]
async fn two_runs_are_compared() -> Result<()> {
    let dir = TempDir::new()?;
    let (_serving, url) = null(Behaviour::default()).await?;
    for (tokens, file) in [("3", "a.json"), ("9", "b.json")] {
        let rest = format!("--dialect chat --users 1 --requests 5 --output-tokens {tokens} --json {file}");
        let arguments: Vec<_> = ["--url", &url].into_iter().chain(rest.split_whitespace()).collect();
        load(dir.path(), &arguments).await?;
    }
    let text = load(dir.path(), &["compare", "a.json", "b.json"]).await?;
    assert!(
        text.contains("settings differ: output_tokens: 3 / 9") && text.contains("TTFT p99 ms"),
        "{text}"
    );
    std::fs::write(
        dir.path().join("c.json"),
        "{\"schema\": \"baton-load\", \"version\": 99, \"kind\": \"load\"}",
    )?;
    let wrong = dir.path().join("c.json");
    let wrong = wrong.to_str().context("not UTF-8")?;
    let complaint = refused(&["compare", wrong, wrong]).await?;
    assert!(
        complaint.contains("c.json") && complaint.contains("version 99"),
        "{complaint}"
    );
    Ok(())
}

#[tokio::test]
async fn a_cluster_counts_what_the_generator_counts() -> Result<()> {
    let model = stretched_tiny_model(512)?;
    let spec = ClusterSpec::pair(model.path()).set(format!("model.model_name={MODEL}"));
    let cluster = Cluster::start(spec).await?;
    let (dir, url) = (TempDir::new()?, cluster.url());
    prompts(dir.path())?;
    let counters = async || -> Result<[f64; 2]> {
        let page = cluster.metrics().await?;
        Ok(["baton_prompt_tokens_total", "baton_generation_tokens_total"].map(|name| metric_sum(&page, name)))
    };
    for dialect in DIALECTS {
        let before = counters().await?;
        let rest = format!(
            "--dialect {dialect} --phases --prompts prompts.txt --output-tokens 11 --warmup 0 --requests 12 --rate 50 --json run.json"
        );
        let arguments: Vec<_> = ["--url", &url].into_iter().chain(rest.split_whitespace()).collect();
        load(dir.path(), &arguments).await?;
        let after = counters().await?;
        let found = json(dir.path(), "run.json")?;
        assert_eq!(number(&found, "/summary/counts/succeeded")?, 12, "{dialect}: {found}");
        assert_eq!(number(&found, "/summary/tokens/output")?, 12 * 11, "{dialect}");
        assert_eq!(number(&found, "/summary/tokens/prompts_counted")?, 12, "{dialect}");
        let sums = [
            number(&found, "/summary/tokens/prompt")?,
            number(&found, "/summary/tokens/output")?,
        ];
        phases_add_up(&found)?;
        for i in 0..2 {
            assert_eq!(after[i] - before[i], sums[i] as f64, "{dialect}: counter {i}");
        }
    }
    shared_prefixes_are_found(&cluster, dir.path()).await?;
    prompts_beside_streams(&url, dir.path()).await
}

/// The phases that the server tells are all of its time.
fn phases_add_up(report: &Value) -> Result<()> {
    let phases = report["summary"]["phases"].as_array().context("no phases")?;
    let mean = |phase: &Value| phase["ms"]["mean"].as_f64().unwrap_or(f64::NAN);
    // The time to the first token is told beside them, and is no part.
    let told = phases.iter().filter(|phase| phase["name"] != "ttft");
    let (total, parts): (Vec<&Value>, Vec<&Value>) = told.partition(|phase| phase["name"] == "total");
    let sum: f64 = parts.iter().map(|phase| mean(phase)).sum();
    ensure!(
        total.len() == 1 && parts.len() >= 6 && (mean(total[0]) - sum).abs() < 1.0,
        "{phases:#?}"
    );
    Ok(())
}

/// Prompts of a trace begin alike where the trace says so: the server's prefix cache knows.
async fn shared_prefixes_are_found(cluster: &Cluster, dir: &Path) -> Result<()> {
    let line = |ids: &str| {
        format!("{{\"timestamp\": 0, \"input_length\": 1024, \"output_length\": 40, \"hash_ids\": {ids}}}\n")
    };
    std::fs::write(
        dir.join("trace.jsonl"),
        line("[1, 2]") + &line("[1, 3]") + &line("[1, 4]"),
    )?;
    std::fs::write(
        dir.join("strangers.jsonl"),
        line("[5, 2]") + &line("[6, 3]") + &line("[7, 4]"),
    )?;
    let mut hits = Vec::new();
    for file in ["strangers.jsonl", "trace.jsonl"] {
        let rest =
            format!("--dialect completions --trace {file} --length-scale 0.25 --users 1 --warmup 0 --json run.json");
        let url = cluster.url();
        let arguments: Vec<_> = ["--url", &url].into_iter().chain(rest.split_whitespace()).collect();
        load(dir, &arguments).await?;
        let found = json(dir, "run.json")?;
        hits.push(number(&found, "/summary/tokens/cached")?);
        assert_eq!(number(&found, "/summary/tokens/output")?, 30);
        let mean = number(&found, "/summary/tokens/prompt")? / 3;
        assert!(
            (205..=307).contains(&mean),
            "a quarter of 1,024 tokens, by average words: {mean}"
        );
    }
    // Of three prompts two find their first half.
    assert!(hits[1] >= hits[0] + 2 * 64, "{hits:?}");
    Ok(())
}

async fn prompts_beside_streams(url: &str, dir: &Path) -> Result<()> {
    let rest = "--dialect chat --ignore-eos --streams 2 --stream-input 8 --stream-tokens 300 --prompt-tokens 32,96 --repeats 2 \
                --calm-ms 50 --json interfere.json --report interfere.html";
    let arguments: Vec<_> = ["interfere", "--url", url]
        .into_iter()
        .chain(rest.split_whitespace())
        .collect();
    let text = load(dir, &arguments).await?;
    let found = json(dir, "interfere.json")?;
    let rows = found["prompts"].as_array().context("no prompts")?;
    assert_eq!(rows.len(), 2, "{text}");
    for (row, asked) in rows.iter().zip([32, 96]) {
        assert_eq!(
            (&row["asked_tokens"], &row["repeats"]),
            (&json!(asked), &json!(2)),
            "{row}"
        );
        let positive = |name: &str| row[name].as_f64().is_some_and(|value| value > 0.0);
        assert!(
            positive("ttft_p50_ms") && positive("worst_gap_p50_ms") && positive("worst_gap_max_ms"),
            "{row}"
        );
    }
    assert!(found["calm"]["count"].as_u64().is_some_and(|count| count > 0));
    Ok(())
}

/// Errors unless each call is refused with all of its words.
async fn all_refused(calls: &[(String, &[&str])]) -> Result<()> {
    for (call, words) in calls {
        let complaint = refused(&call.split_whitespace().collect::<Vec<_>>()).await?;
        ensure!(words.iter().all(|word| complaint.contains(word)), "{call}: {complaint}");
    }
    Ok(())
}

#[tokio::test]
async fn wrong_arguments_of_a_load_are_refused_by_name() -> Result<()> {
    let (_serving, url) = null(Behaviour::default()).await?;
    let to = format!("--url {url} --dialect");
    all_refused(&[
        (format!("{to} chat --rate 0"), &["--rate", "0", "above 0"]),
        (format!("{to} talk --rate 1"), &["--dialect", "talk", "generate_stream"]),
        (format!("{to} chat"), &["--rate R", "--users K", "--trace FILE"]),
        (format!("{to} chat --rate 1 --users 2"), &["--rate", "--users"]),
        (
            format!("{to} chat --rate 1 --input-tokens 9-1"),
            &["--input-tokens", "9-1", "ends before"],
        ),
        (
            format!("{to} chat --rate 1 --arrivals gamma"),
            &["--burstiness", "1 is Poisson"],
        ),
        (
            format!("{to} chat --rate 1 --burstiness 2"),
            &["--burstiness 2", "--arrivals gamma"],
        ),
        (
            format!("{to} generate --rate 1 --slo-ttft-ms 5"),
            &["--slo-ttft-ms 5", "--slo-e2e-ms"],
        ),
        (
            format!("{to} generate --rate 1 --ignore-eos"),
            &["--ignore-eos", "generate", "completions or chat"],
        ),
        (
            format!("{to} generate_stream --rate 1 --whole"),
            &["--whole", "completions and chat"],
        ),
        (format!("{to} chat --rate 1 --extra [1]"), &["--extra", "JSON object"]),
        (
            format!("{to} chat --rate 1 --max-open 1000000"),
            &["--max-open 1000000", "ulimit -n"],
        ),
        (format!("sweep {to} chat"), &["--slo-ttft-ms"]),
        (
            format!("sweep {to} chat --slo-e2e-ms 5 --attain 90"),
            &["--attain", "90", "0.9"],
        ),
        (
            format!("interfere {to} generate"),
            &["--dialect generate", "generate_stream"],
        ),
        ("run --dialect chat".to_owned(), &["--url"]),
        ("measure".to_owned(), &["measure"]),
    ])
    .await
}

#[tokio::test]
async fn files_and_servers_that_cannot_be_used_are_named() -> Result<()> {
    let (_serving, url) = null(Behaviour::default()).await?;
    let dir = TempDir::new()?;
    let file = |name: &str, text: &str| -> Result<String> {
        let path = dir.path().join(name);
        std::fs::write(&path, text)?;
        Ok(path.to_str().context("not UTF-8")?.to_owned())
    };
    let trace = file(
        "bad.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 00:00:00,5,none\n",
    )?;
    let lines = file("bad.jsonl", "{\"prompt\": 3}\n")?;
    let to = format!("--url {url} --dialect");
    all_refused(&[
        (
            format!("{to} chat --trace {trace}"),
            &["--trace", "bad.csv", "line 2", "GeneratedTokens", "none"],
        ),
        (
            format!("{to} chat --rate 1 --prompts {lines}"),
            &["--prompts", "line 1", "max_tokens"],
        ),
        (
            format!("{to} chat --rate 1 --json /nowhere/x.json"),
            &["--json /nowhere/x.json"],
        ),
        (
            "--url localhost --dialect chat --rate 1".to_owned(),
            &["--url \"localhost\"", "http://127.0.0.1:8080"],
        ),
        (
            "--url http://127.0.0.1:1 --dialect generate --rate 1".to_owned(),
            &["127.0.0.1:1", "connection"],
        ),
        (
            "compare /nowhere/a.json /nowhere/b.json".to_owned(),
            &["/nowhere/a.json"],
        ),
    ])
    .await
}
