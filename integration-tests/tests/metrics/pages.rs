//! The pages of real processes after real traffic, by their own descriptions, by promtool and in a real Prometheus.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use coordinator::core::request::State;
use integration_tests::ask::Ask;
use integration_tests::client::post;
use integration_tests::files::root;
use integration_tests::measures::{differences, of_coordinator, of_decode, of_prefill, reference, series};
use integration_tests::prometheus::{Programs, Prometheus};
use integration_tests::random::Random;
use integration_tests::trial::spec;
use runtime::measure::{Kind, Measure};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::watched::Watched;

const PROCESSES: [&str; 3] = ["coordinator", "prefill-0", "decode-0"];
/// The row of the dashboard behind which panels may be empty: nothing of what they show has happened.
const FAULTS: &str = "Faults";

/// There is no etcd here, and not every system tells what is resident.
const ABSENT: [&str; 4] = [
    "baton_discovery_registered",
    "baton_memory_bytes",
    "baton_memory_huge_pages_bytes",
    "baton_kv_pool_bytes",
];
/// Ratios of tokens that were looked for: there are none before the first.
const RATIOS: [&str; 2] = ["baton_node_prefix_cache_hit_ratio", "baton_pool_prefix_cache_hit_ratio"];

#[test]
fn the_reference_is_up_to_date() -> Result<()> {
    let path = root().join("docs/metrics.md");
    let found = fs::read_to_string(&path).context("docs/metrics.md")?;
    ensure!(
        found == reference(),
        "docs/metrics.md is out of date: write it with the example metrics_reference"
    );
    Ok(())
}

#[test]
fn no_metric_is_described_twice_and_each_has_a_help_line_and_a_unit() -> Result<()> {
    for measures in [of_coordinator(), of_prefill(), of_decode()] {
        for (index, one) in measures.iter().enumerate() {
            let Measure {
                name, kind, unit, help, ..
            } = one;
            ensure!(
                !measures[..index].iter().any(|other| other.name == *name),
                "{name} twice"
            );
            ensure!(
                help.len() > 15 && help.ends_with('.') && !unit.is_empty(),
                "{name}: {help}"
            );
            ensure!(
                name.ends_with("_total") == (*kind == Kind::Counter),
                "{name} is a {}",
                kind.as_str()
            );
        }
    }
    Ok(())
}

/// Requests of all kinds, and one that is refused.
async fn traffic(watched: &Watched, count: usize) -> Result<()> {
    let mut random = Random::new(6);
    let url = watched.cluster.url();
    // Some twice: there is something in the prefix caches then.
    for ask in Ask::mixed(&mut random, count, 60, (20, 60)) {
        for _ in 0..2 {
            let answer = watched.client.post(format!("{url}{}", ask.door.path())).json(&ask.body);
            let answer = answer.send().await?.error_for_status()?;
            answer.bytes().await?;
        }
    }
    let wrong = json!({ "model": "tiny", "prompt": "x", "max_tokens": -1 });
    let (status, answer) = post(&watched.client, &format!("{url}/v1/completions"), &wrong).await?;
    ensure!(status == 400, "{answer}");
    Ok(())
}

/// Waits until the coordinator knows from both nodes' reports, which come at intervals, what they have done.
async fn reported(watched: &Watched) -> Result<()> {
    let known = async {
        loop {
            let page = watched.page("coordinator").await?;
            let is_told = |node: &str| page.contains(&format!("baton_node_prefix_cache_hit_ratio{{node=\"{node}\""));
            if ["prefill-0", "decode-0"].into_iter().all(is_told) {
                return anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let in_time = tokio::time::timeout(Duration::from_secs(30), known).await;
    in_time.context("the coordinator does not hear what its nodes have done")?
}

/// The example configuration with this cluster's addresses, and shorter intervals.
fn configuration(watched: &Watched, folder: &Path) -> Result<()> {
    let example = root().join("deploy/observability");
    let mut text = fs::read_to_string(example.join("prometheus.yml"))?;
    let changes = [
        ("coordinator:8080", watched.target("coordinator")?),
        ("prefill-0:9100", watched.target("prefill-0")?),
        ("decode-0:9100", watched.target("decode-0")?),
        ("scrape_interval: 5s", "scrape_interval: 500ms".to_owned()),
        ("scrape_timeout: 4s", "scrape_timeout: 500ms".to_owned()),
    ];
    for (from, to) in changes {
        ensure!(text.matches(from).count() == 1, "{from} is not in the example once");
        text = text.replace(from, &to);
    }
    fs::copy(example.join("alerts.yml"), folder.join("alerts.yml"))?;
    Ok(fs::write(folder.join("prometheus.yml"), text)?)
}

/// What is there from the start can be watched for a first time, and no look at it depends on what has happened before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_is_shown_before_anything_has_happened() -> Result<()> {
    let watched = Watched::start(spec(1, 1)).await?;
    let later = [ABSENT.as_slice(), RATIOS.as_slice()].concat();
    let mut fresh = Vec::new();
    for (process, measures) in PROCESSES.iter().zip([of_coordinator(), of_prefill(), of_decode()]) {
        let page = watched.page(process).await?;
        let found = differences(&page, &measures, &later)?;
        ensure!(found.is_empty(), "{process}:\n{}\n{page}", found.join("\n"));
        fresh.push(series(&page, &later));
    }
    for state in State::WORDS {
        for name in ["baton_requests_in_state", "baton_oldest_request_in_state_seconds"] {
            let shown = fresh[0].contains(&format!("{name}{{state=\"{state}\"}}"));
            ensure!(shown, "{name} of {state} is not shown");
        }
    }
    traffic(&watched, 8).await?;
    reported(&watched).await?;
    for (process, fresh) in PROCESSES.iter().zip(fresh) {
        let now = series(&watched.page(process).await?, &later);
        let came: Vec<&String> = now.difference(&fresh).collect();
        ensure!(
            came.is_empty() && fresh.len() > 20,
            "{process} showed first with traffic: {came:?}"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_measures_where_metrics_are_switched_off() -> Result<()> {
    let watched = Watched::start(spec(1, 1).set("telemetry.metrics=false")).await?;
    let asked = json!({ "model": "tiny", "prompt": "x", "max_tokens": 4 });
    let (status, answer) = post(
        &watched.client,
        &format!("{}/v1/completions", watched.cluster.url()),
        &asked,
    )
    .await?;
    ensure!(status == 200, "{answer}");
    for process in PROCESSES {
        let answer = watched
            .client
            .get(format!("http://{}/metrics", watched.target(process)?))
            .send()
            .await?;
        let (status, said) = (answer.status(), answer.text().await?);
        ensure!(
            status == 404 && said.contains("telemetry.metrics = false"),
            "{process}: {status} {said}"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_hold_for_promtool_and_prometheus_and_the_dashboard_has_data() -> Result<()> {
    let watched = Watched::start(spec(1, 1)).await?;
    let folder = TempDir::new()?;
    let programs = Programs::find();
    let mut prometheus = None;
    if let Some(programs) = &programs {
        configuration(&watched, folder.path())?;
        let started = Prometheus::start(programs, &folder.path().join("prometheus.yml")).await?;
        // Rates need a sample from before.
        started
            .until("up{job=~\"baton-.*\"}", |up| {
                up.len() == 3 && up.iter().all(|(_, up)| *up == 1.0)
            })
            .await?;
        prometheus = Some(started);
    }
    traffic(&watched, 12).await?;
    reported(&watched).await?;
    for (process, measures) in PROCESSES.iter().zip([of_coordinator(), of_prefill(), of_decode()]) {
        let file = folder.path().join(process);
        let page = watched.save(process, &file).await?;
        let found = differences(&page, &measures, &ABSENT)?;
        ensure!(found.is_empty(), "{process}:\n{}\n{page}", found.join("\n"));
        if let Some(programs) = &programs {
            let said = programs.promtool(folder.path(), &["check", "metrics"], Some(&file))?;
            ensure!(said.trim().is_empty(), "{process}: {said}");
        }
    }
    let Some(prometheus) = prometheus else { return Ok(()) };
    let calls = watched.sum("baton_requests_total").await? as f64;
    prometheus
        .until("sum(baton_requests_total)", |sum| {
            sum.first().is_some_and(|(_, sum)| *sum == calls)
        })
        .await?;
    dashboard(&prometheus).await
}

/// Every expression of the dashboard says something.
async fn dashboard(prometheus: &Prometheus) -> Result<()> {
    let file = root().join("deploy/observability/grafana.json");
    let dashboard: Value = serde_json::from_slice(&fs::read(file)?)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    let (mut asked, mut faults) = (0, false);
    for panel in panels {
        if panel["type"] == "row" {
            faults = panel["title"] == FAULTS;
            continue;
        }
        let targets = panel["targets"].as_array().context("no targets")?;
        for target in targets {
            let expression = target["expr"].as_str().context("no expression")?;
            let expression = expression.replace("$__rate_interval", "2m");
            ensure!(
                !expression.contains('$'),
                "{expression} has variables that nobody sets here"
            );
            asked += 1;
            if faults {
                // That it is understood is enough.
                prometheus.query(&expression).await?;
            } else {
                let says = |values: &[(Value, f64)]| values.iter().any(|(_, value)| !value.is_nan());
                prometheus.until(&expression, says).await?;
            }
        }
    }
    ensure!(
        asked > 40 && faults,
        "{asked} expressions, and the last row is no row of faults"
    );
    Ok(())
}
