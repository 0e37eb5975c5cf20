//! For people who look at a terminal.

use std::fmt::Write;

use serde_json::Value;

use crate::core::compare::{Row, differences, rows};
use crate::core::summary::{Distribution, Latencies, Report, Summary};
use crate::interfere::Interference;
use crate::sweep::SweepReport;

/// A later send than this is worth a warning, in milliseconds.
const LATE_MS: f64 = 10.0;

/// The times of a run, by name.
pub(super) fn named(latencies: &Latencies) -> [(&'static str, &Option<Distribution>); 5] {
    [
        ("TTFT", &latencies.ttft_ms),
        ("ITL", &latencies.itl_ms),
        ("TPOT", &latencies.tpot_ms),
        ("E2E", &latencies.e2e_ms),
        ("sent late by", &latencies.late_ms),
    ]
}

/// What the figures of a run rest on, and what they cannot show.
pub(super) fn warnings(summary: &Summary) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(late) = summary.latencies.late_ms.as_ref().filter(|late| late.p99 > LATE_MS) {
        found.push(format!(
            "requests were sent late (p99 {:.1} ms): this machine, or --max-open, did not keep up; latencies count from when they \
             were meant to be sent",
            late.p99
        ));
    }
    let (tokens, counts) = (&summary.tokens, &summary.counts);
    if tokens.prompts_counted < counts.succeeded {
        found.push(format!(
            "the server counted the prompts of {} of {} requests; of the others the length that was aimed at is added up",
            tokens.prompts_counted, counts.succeeded
        ));
    }
    if tokens.text_events > 0 && tokens.text_events < tokens.output * 9 / 10 {
        found.push(format!(
            "{} events carried {} tokens: gaps between events (ITL) are longer than those between tokens; TPOT is not touched",
            tokens.text_events, tokens.output
        ));
    }
    if counts.aborted > 0 {
        found.push(format!(
            "{} requests were open when the run was interrupted, and count nowhere",
            counts.aborted
        ));
    }
    found
}

/// A run.
pub fn run(report: &Report) -> String {
    let summary = &report.summary;
    let mut text = String::new();
    figures(&mut text, summary);
    let cpu = report
        .generator_cpu
        .map(|cpu| format!("this program used {:.1} % of a core", cpu * 100.0));
    for note in report.notes.iter().cloned().chain(cpu).chain(warnings(summary)) {
        line(&mut text, &format!("note: {note}"));
    }
    for message in &summary.messages {
        line(&mut text, &format!("failed: {message}"));
    }
    text
}

fn figures(text: &mut String, summary: &Summary) {
    let counts = &summary.counts;
    let kinds: Vec<String> = counts
        .failures
        .iter()
        .map(|(kind, count)| format!("{count} {kind}"))
        .collect();
    let of_failures = if kinds.is_empty() {
        String::new()
    } else {
        format!(" ({})", kinds.join(", "))
    };
    line(
        text,
        &format!(
            "{} requests in {:.1} s: {} succeeded, {} failed{of_failures}",
            counts.requests, summary.duration_s, counts.succeeded, counts.failed
        ),
    );
    let throughput = &summary.throughput;
    let offered = summary
        .offered_per_s
        .map_or_else(String::new, |rate| format!(" (offered {rate:.3})"));
    line(
        text,
        &format!(
            "requests/s {:.3}{offered}   input tokens/s {:.1}   output tokens/s {:.1}",
            throughput.requests_per_s, throughput.input_tokens_per_s, throughput.output_tokens_per_s
        ),
    );
    let cached = summary
        .tokens
        .cached
        .map_or_else(String::new, |cached| format!(" ({cached} from a prefix cache)"));
    line(
        text,
        &format!(
            "tokens: {} of prompts{cached}, {} generated",
            summary.tokens.prompt, summary.tokens.output
        ),
    );
    if let (Some(slo), Some(goodput)) = (&summary.slo, throughput.goodput_per_s) {
        let limits = [
            ("TTFT", slo.ttft_ms),
            ("TPOT", slo.tpot_ms),
            ("gaps", slo.gap_ms),
            ("E2E", slo.e2e_ms),
        ];
        let limits: Vec<String> = limits
            .iter()
            .filter_map(|(name, limit)| limit.map(|limit| format!("{name} <= {limit} ms")))
            .collect();
        line(
            text,
            &format!(
                "goodput {goodput:.3} requests/s: {:.1} % met {}",
                slo.attained * 100.0,
                limits.join(", ")
            ),
        );
    }
    times(text, summary);
}

fn times(text: &mut String, summary: &Summary) {
    line(
        text,
        &format!(
            "\n{:<18}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}",
            "ms", "mean", "p50", "p90", "p99", "max", "count"
        ),
    );
    let latencies = named(&summary.latencies)
        .into_iter()
        .filter_map(|(name, d)| Some((name.to_owned(), d.as_ref()?)));
    let phases = summary
        .phases
        .iter()
        .map(|phase| (format!("  {}", phase.name), &phase.ms));
    for (name, d) in latencies.chain(phases) {
        let numbers: String = [d.mean, d.p50, d.p90, d.p99, d.max]
            .iter()
            .map(|n| format!("{n:>10.2}"))
            .collect();
        line(text, &format!("{name:<18}{numbers}{:>10}", d.count));
    }
}

/// Two runs beside each other.
pub fn comparison(a: &Report, b: &Report) -> String {
    let mut text = String::new();
    for (name, a, b) in differences(a, b) {
        line(
            &mut text,
            &format!("settings differ: {name}: {} / {}", shown(&a), shown(&b)),
        );
    }
    line(&mut text, &format!("{:<24}{:>14}{:>14}{:>9}", "", "A", "B", "B/A"));
    for row in rows(&a.summary, &b.summary) {
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
        let ratio = number(row.ratio());
        let verdict = verdict(&row);
        line(
            &mut text,
            format!(
                "{:<24}{:>14}{:>14}{ratio:>9}  {verdict}",
                row.name,
                number(row.a),
                number(row.b)
            )
            .trim_end(),
        );
    }
    text
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "not given".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Differences of less than a twentieth are noise in most runs, and are not called anything.
fn verdict(row: &Row) -> &'static str {
    match (row.ratio(), row.more_is_better) {
        (Some(ratio), Some(more)) if (ratio - 1.0).abs() >= 0.05 => {
            if (ratio > 1.0) == more {
                "better"
            } else {
                "worse"
            }
        }
        _ => "",
    }
}

/// A search for goodput.
pub fn sweep(report: &SweepReport) -> String {
    let mut text = String::new();
    let columns = [
        "rate",
        "within SLO",
        "requests/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "ITL p99",
        "failed",
    ];
    line(
        &mut text,
        &columns.iter().map(|name| format!("{name:>12}")).collect::<String>(),
    );
    let point = |d: &Option<Distribution>, of: fn(&Distribution) -> f64| {
        d.as_ref().map_or_else(|| "-".to_owned(), |d| format!("{:.1}", of(d)))
    };
    for run in &report.runs {
        let (summary, latencies) = (&run.summary, &run.summary.latencies);
        let cells = [
            format!("{:.3}", run.rate_per_s),
            format!("{:.1} %", run.attained * 100.0),
            format!("{:.3}", summary.throughput.requests_per_s),
            point(&latencies.ttft_ms, |d| d.p50),
            point(&latencies.ttft_ms, |d| d.p99),
            point(&latencies.tpot_ms, |d| d.p50),
            point(&latencies.itl_ms, |d| d.p99),
            summary.counts.failed.to_string(),
        ];
        line(
            &mut text,
            &cells.iter().map(|cell| format!("{cell:>12}")).collect::<String>(),
        );
    }
    line(&mut text, &report.verdict());
    for note in &report.notes {
        line(&mut text, &format!("note: {note}"));
    }
    text
}

/// What prompts did to running streams.
pub fn interference(report: &Interference) -> String {
    let mut text = String::new();
    let calm = &report.calm;
    line(
        &mut text,
        &format!(
            "{} streams, calm: gaps p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms; {:.1} tokens/s a stream",
            report.streams, calm.p50, calm.p99, calm.max, report.calm_tokens_per_s
        ),
    );
    let columns = [
        "prompt",
        "its TTFT p50",
        "worst gap p50",
        "worst gap max",
        "tokens/s a stream",
    ];
    line(
        &mut text,
        &columns.iter().map(|name| format!("{name:>18}")).collect::<String>(),
    );
    for row in &report.prompts {
        let cells = [
            row.prompt_tokens.to_string(),
            format!("{:.1} ms", row.ttft_p50_ms),
            format!("{:.1} ms", row.worst_gap_p50_ms),
            format!("{:.1} ms", row.worst_gap_max_ms),
            format!("{:.1}", row.tokens_per_s),
        ];
        line(
            &mut text,
            &cells.iter().map(|cell| format!("{cell:>18}")).collect::<String>(),
        );
    }
    for note in &report.notes {
        line(&mut text, &format!("note: {note}"));
    }
    text
}

fn line(text: &mut String, line: &str) {
    // Writing to memory cannot fail.
    let _written = writeln!(text, "{line}");
}
