//! What the processes say that they measure, as a page for operators, and as something to hold their `/metrics` against.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use coordinator::metrics::nodes::{OF_NODES, OF_POOLS};
use decode_node::role::DecodeRole;
use prefill_node::role::PrefillRole;
use runtime::measure::{Kind, Measure};

/// What a coordinator shows.
pub fn of_coordinator() -> Vec<Measure> {
    let nodes = OF_NODES.iter().map(|family| family.measure);
    let pools = OF_POOLS.iter().map(|family| family.measure);
    coordinator::metrics::measures()
        .into_iter()
        .chain(nodes)
        .chain(pools)
        .collect()
}

/// What a prefill node shows.
pub fn of_prefill() -> Vec<Measure> {
    node_shell::stats::measures::<PrefillRole>()
}

/// What a decode node shows.
pub fn of_decode() -> Vec<Measure> {
    node_shell::stats::measures::<DecodeRole>()
}

const HEAD: &str = "\
# Metrics

<!-- Written by `cargo run --release -p integration-tests --example metrics_reference`; a test compares it with what the
processes show. -->

Every process serves `GET /metrics` in the Prometheus text format: the coordinator beside its API, nodes on `node.metrics_listen`
(empty by default: then they collect nothing). `telemetry.metrics = false` switches them off: nothing is measured, and the path
answers 404. [deploy/observability](../deploy/observability) has an example configuration of
Prometheus, alert rules with their tests, and a Grafana dashboard.

Counters begin at 0 when a process starts, and all whose labels are known then are shown from then on. Histograms have `_bucket`, `_sum` and `_count`. Where several names have the same meaning,
the further ones are other servers': `tgi_*` are those of text-generation-inference, names without a prefix those of MindIE, and
dashboards made for them go on working. `untyped` are counters whose names Prometheus keeps for other kinds; `rate()` works on
them. Of TGI's names the ones about what does not exist here are missing: `tgi_batch_next_size`, `tgi_batch_concat*`,
`tgi_batch_filter_duration`, `tgi_batch_forward_duration`, `tgi_batch_decode_duration`, `tgi_batch_inference_success`,
`tgi_batch_inference_duration`, `tgi_request_skipped_tokens`.

Labels: `model_name` is `model.model_name`; `node` and `role` are those of a node. There are as many series as nodes that are
connected now, times the words that a label can have; nothing grows with requests or clients. A node that is gone is told no more.
Rates over the last 10 seconds (`*_per_second`, step time, batch size) are for people who look; for graphs take `rate()` of the
counters.
";

/// The page: docs/metrics.md.
pub fn reference() -> String {
    let mut page = HEAD.to_owned();
    let (prefill, decode) = (of_prefill(), of_decode());
    let both: Vec<Measure> = prefill.iter().copied().filter(|one| decode.contains(one)).collect();
    let only = |of: &[Measure]| of.iter().copied().filter(|one| !both.contains(one)).collect::<Vec<_>>();
    for (title, measures) in [
        ("Coordinator", of_coordinator()),
        ("Every node", both.clone()),
        ("Nodes that compute prompts", only(&prefill)),
        ("Nodes that generate", only(&decode)),
    ] {
        page.push_str(&format!(
            "\n## {title}\n\n| name | type | labels | unit | meaning |\n|---|---|---|---|---|\n"
        ));
        for one in measures {
            let labels = one.labels.iter().map(|label| format!("`{label}`"));
            let labels = labels.collect::<Vec<_>>().join(", ");
            let (name, kind, unit, help) = (one.name, one.kind.as_str(), one.unit, one.help);
            page.push_str(&format!("| `{name}` | {kind} | {labels} | {unit} | {help} |\n"));
        }
    }
    page
}

/// A metric as a page shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// The word of its TYPE line.
    pub kind: String,
    /// Its HELP line.
    pub help: String,
    /// Names of the labels of its samples, without the bounds of buckets.
    pub labels: BTreeSet<String>,
    /// Samples.
    pub samples: usize,
}

/// Reads a page.
///
/// # Errors
/// A line that belongs to no metric.
pub fn read(page: &str) -> Result<BTreeMap<String, Shown>> {
    let mut all: BTreeMap<String, Shown> = BTreeMap::new();
    for line in page.lines().filter(|line| !line.is_empty()) {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            all.entry(name.to_owned()).or_default().help = help.to_owned();
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            all.entry(name.to_owned()).or_default().kind = kind.to_owned();
        } else {
            let series = line.rsplit_once(' ').context("no value")?.0;
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let base = ["_bucket", "_sum", "_count"]
                .iter()
                .filter_map(|suffix| name.strip_suffix(suffix))
                .find(|base| all.get(*base).is_some_and(|shown| shown.kind == "histogram"));
            let shown = all.get_mut(base.unwrap_or(name));
            let shown = shown.with_context(|| format!("no TYPE line before {line}"))?;
            shown.samples += 1;
            let pairs = labels
                .trim_end_matches('}')
                .split("\",")
                .filter(|pair| !pair.is_empty());
            let names = pairs.filter_map(|pair| pair.split_once("=\"")).map(|(name, _)| name);
            shown
                .labels
                .extend(names.filter(|name| *name != "le").map(str::to_owned));
        }
    }
    Ok(all)
}

/// The series of a page, by name and labels, but for those of the metrics `without`.
pub fn series(page: &str, without: &[&str]) -> BTreeSet<String> {
    let samples = page.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let all = samples
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(series, _)| series);
    let is_left_out = |series: &&str| without.contains(&series.split('{').next().unwrap_or_default());
    all.filter(|series| !is_left_out(series)).map(str::to_owned).collect()
}

/// What a page shows otherwise than `measures` say, `absent` of which need not be there.
///
/// # Errors
/// The page cannot be read.
pub fn differences(page: &str, measures: &[Measure], absent: &[&str]) -> Result<Vec<String>> {
    let shown = read(page)?;
    let mut found = Vec::new();
    for name in shown
        .keys()
        .filter(|name| !measures.iter().any(|one| one.name == *name))
    {
        found.push(format!("{name} is shown and not described"));
    }
    for one in measures {
        let name = one.name;
        let Some(shown) = shown.get(name) else {
            if !absent.contains(&name) {
                found.push(format!("{name} is described and not shown"));
            }
            continue;
        };
        let labels: BTreeSet<String> = one.labels.iter().map(|label| (*label).to_owned()).collect();
        if shown.kind != one.kind.as_str() || shown.help != one.help {
            found.push(format!("{name} is described as {one:?} and shown as {shown:?}"));
        }
        if shown.samples > 0 && shown.labels != labels {
            found.push(format!(
                "{name} is described with labels {labels:?} and shown with {:?}",
                shown.labels
            ));
        }
        if shown.samples == 0 && !absent.contains(&name) {
            found.push(format!("{name} has no sample"));
        }
        if let Kind::Histogram(buckets) = one.kind {
            let series = shown.samples / (buckets.len() + 3);
            if series * (buckets.len() + 3) != shown.samples {
                found.push(format!(
                    "{name} has {} samples, with {} buckets",
                    shown.samples,
                    buckets.len()
                ));
            }
        }
    }
    Ok(found)
}
