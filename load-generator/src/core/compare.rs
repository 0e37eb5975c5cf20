//! Two runs beside each other.

use serde_json::Value;

use super::summary::{Distribution, Report, SCHEMA, Summary, VERSION};

/// A file that cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum NoReport {
    /// Not a report of ours.
    #[error("it is no report of `load --json`: {0}")]
    Foreign(String),
    /// Of another version, or of another kind.
    #[error("it is a report of {found}; only those of schema {SCHEMA}, version {VERSION}, kind load can be compared")]
    Other {
        /// Schema, version and kind of the file.
        found: String,
    },
}

/// Reads a report of a run.
pub fn read(text: &str) -> Result<Report, NoReport> {
    let value: Value = serde_json::from_str(text).map_err(|error| NoReport::Foreign(error.to_string()))?;
    let (schema, version, kind) = (&value["schema"], &value["version"], &value["kind"]);
    if schema != SCHEMA {
        return Err(NoReport::Foreign(format!("its schema is {schema}, not \"{SCHEMA}\"")));
    }
    if version != VERSION || kind != "load" {
        return Err(NoReport::Other {
            found: format!("schema {SCHEMA}, version {version}, kind {kind}"),
        });
    }
    serde_json::from_value(value).map_err(|error| NoReport::Foreign(error.to_string()))
}

/// A figure of two runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// What it is, with its unit.
    pub name: String,
    /// In the first run.
    pub a: Option<f64>,
    /// In the second run.
    pub b: Option<f64>,
    /// Whether more is better; none where it is neither.
    pub more_is_better: Option<bool>,
}

impl Row {
    /// The second over the first.
    pub fn ratio(&self) -> Option<f64> {
        let (a, b) = (self.a?, self.b?);
        (a != 0.0).then(|| b / a)
    }
}

/// All figures of both.
pub fn rows(a: &Summary, b: &Summary) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut row = |name: &str, more_is_better: Option<bool>, of: &dyn Fn(&Summary) -> Option<f64>| {
        rows.push(Row {
            name: name.to_owned(),
            a: of(a),
            b: of(b),
            more_is_better,
        });
    };
    row("requests", None, &|s| Some(s.counts.requests as f64));
    row("failed", Some(false), &|s| Some(s.counts.failed as f64));
    row("offered requests/s", None, &|s| s.offered_per_s);
    row("requests/s", Some(true), &|s| Some(s.throughput.requests_per_s));
    row("input tokens/s", Some(true), &|s| Some(s.throughput.input_tokens_per_s));
    row("output tokens/s", Some(true), &|s| {
        Some(s.throughput.output_tokens_per_s)
    });
    row("goodput requests/s", Some(true), &|s| s.throughput.goodput_per_s);
    row("within SLO", Some(true), &|s| s.slo.as_ref().map(|slo| slo.attained));
    type Kind = fn(&Summary) -> &Option<Distribution>;
    let kinds: [(&str, Kind); 4] = [
        ("TTFT", |s| &s.latencies.ttft_ms),
        ("ITL", |s| &s.latencies.itl_ms),
        ("TPOT", |s| &s.latencies.tpot_ms),
        ("E2E", |s| &s.latencies.e2e_ms),
    ];
    type Point = fn(&Distribution) -> f64;
    let points: [(&str, Point); 4] = [
        ("p50", |d| d.p50),
        ("p90", |d| d.p90),
        ("p99", |d| d.p99),
        ("max", |d| d.max),
    ];
    for (kind, of) in kinds {
        for (point, value) in points {
            row(&format!("{kind} {point} ms"), Some(false), &|s| {
                of(s).as_ref().map(value)
            });
        }
    }
    rows.retain(|row| row.a.is_some() || row.b.is_some());
    rows
}

/// Settings in which the two differ: name, first, second. What a comparison is usually about is among them.
pub fn differences(a: &Report, b: &Report) -> Vec<(String, Value, Value)> {
    let mut names: Vec<&String> = a.settings.keys().chain(b.settings.keys()).collect();
    names.sort();
    names.dedup();
    let value = |report: &Report, name: &str| report.settings.get(name).cloned().unwrap_or(Value::Null);
    names
        .into_iter()
        .map(|name| (name.clone(), value(a, name), value(b, name)))
        .filter(|(_, a, b)| a != b)
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::record::tests::done;
    use super::super::record::{Record, Slo};
    use super::super::summary::summarise;
    use super::*;

    fn report(records: &[Record], settings: Value) -> Report {
        Report {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            kind: "load".to_owned(),
            started_unix_s: 1,
            settings: settings.as_object().expect("an object").clone(),
            interrupted: false,
            generator_cpu: None,
            notes: Vec::new(),
            summary: summarise(records, &Slo::default(), true),
        }
    }

    #[test]
    fn figures_and_their_ratios() {
        let (a, b) = (
            report(&[done(0, 100, 10)], json!({})),
            report(&[done(0, 200, 5)], json!({})),
        );
        let rows = rows(&a.summary, &b.summary);
        let of = |name: &str| rows.iter().find(|row| row.name == name).expect("a row");
        let ratio = |name: &str| of(name).ratio().expect("a ratio");
        assert!((ratio("TTFT p50 ms") - 2.0).abs() < 0.01);
        assert!((ratio("ITL max ms") - 0.5).abs() < 0.01);
        assert_eq!(ratio("requests"), 1.0);
        assert_eq!(of("failed").ratio(), None, "nothing over nothing");
        assert_eq!(of("TTFT p50 ms").more_is_better, Some(false));
        assert!(
            rows.iter().all(|row| row.name != "goodput requests/s"),
            "no objectives in either"
        );
    }

    #[test]
    fn a_report_comes_back_as_it_was_written() {
        let written = report(&[done(0, 100, 10)], json!({"rate": 2.0}));
        let text = serde_json::to_string(&written).expect("JSON");
        let read = read(&text).expect("ours");
        assert_eq!(
            (&read.settings, read.summary.counts),
            (&written.settings, written.summary.counts)
        );
    }

    #[test]
    fn settings_that_differ_are_named() {
        let a = report(&[], json!({"rate": 1, "dialect": "chat"}));
        let b = report(&[], json!({"rate": 2, "dialect": "chat", "users": 3}));
        let expected = [
            ("rate".to_owned(), json!(1), json!(2)),
            ("users".to_owned(), Value::Null, json!(3)),
        ];
        assert_eq!(differences(&a, &b), expected);
    }

    #[test]
    fn other_files_are_refused() {
        for (text, words) in [
            ("{", &["no report"][..]),
            ("{\"schema\": \"other\"}", &["no report", "other"]),
            (
                "{\"schema\": \"baton-load\", \"version\": 2, \"kind\": \"load\"}",
                &["version 2", "version 1"],
            ),
            (
                "{\"schema\": \"baton-load\", \"version\": 1, \"kind\": \"sweep\"}",
                &["sweep"],
            ),
            (
                "{\"schema\": \"baton-load\", \"version\": 1, \"kind\": \"load\"}",
                &["no report", "missing"],
            ),
        ] {
            let error = read(text).expect_err(text).to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{text}: {error}");
        }
    }
}
