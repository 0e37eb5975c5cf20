//! The pages of sweeps, and of prompts beside streams.

use super::html::Page;
use super::{Drawing, WriteError};
use crate::core::summary::{Distribution, Summary};
use crate::interfere::{Effect, Interference};
use crate::sweep::{SweepReport, SweepRun};

/// The page of a sweep.
pub fn sweep_page(report: &SweepReport) -> Result<String, WriteError> {
    let mut page = Page::new("Load sweep");
    page.note("", &report.verdict());
    for note in &report.notes {
        page.note("", note);
    }
    let mut runs: Vec<_> = report.runs.iter().collect();
    runs.sort_by(|a, b| a.rate_per_s.total_cmp(&b.rate_per_s));
    page.heading("Latency by rate");
    let curve = |of: &dyn Fn(&Summary) -> Option<f64>| -> Vec<(f64, f64)> {
        runs.iter()
            .filter_map(|run| Some((run.rate_per_s, of(&run.summary)?)))
            .collect()
    };
    let ttft = Drawing::new("offered requests/s", "ms")
        .marked_line("TTFT p50", curve(&|s| s.latencies.ttft_ms.as_ref().map(|d| d.p50)))
        .marked_line("TTFT p99", curve(&|s| s.latencies.ttft_ms.as_ref().map(|d| d.p99)));
    page.plot("Time to the first token", &ttft)?;
    let tokens = Drawing::new("offered requests/s", "ms")
        .marked_line("TPOT p50", curve(&|s| s.latencies.tpot_ms.as_ref().map(|d| d.p50)))
        .marked_line("TPOT p90", curve(&|s| s.latencies.tpot_ms.as_ref().map(|d| d.p90)))
        .marked_line("ITL p99", curve(&|s| s.latencies.itl_ms.as_ref().map(|d| d.p99)));
    page.plot("Time for each further token, and between two", &tokens)?;
    let mut by_output: Vec<(f64, f64)> = runs
        .iter()
        .filter_map(|run| {
            Some((
                run.summary.throughput.output_tokens_per_s,
                run.summary.latencies.ttft_ms.as_ref()?.p50,
            ))
        })
        .collect();
    by_output.sort_by(|a, b| a.0.total_cmp(&b.0));
    let throughput = Drawing::new("output tokens/s", "TTFT p50, ms").marked_line("TTFT p50", by_output);
    page.plot("Latency by throughput", &throughput)?;
    let attained: Vec<_> = runs.iter().map(|run| (run.rate_per_s, run.attained * 100.0)).collect();
    let share = Drawing::new("offered requests/s", "% of requests")
        .marked_line("within SLO", attained)
        .line(
            "needed",
            runs.iter().map(|run| (run.rate_per_s, report.attain * 100.0)).collect(),
        );
    page.plot("Requests within SLO", &share)?;
    sweep_table(&mut page, &runs);
    page.settings(&report.settings);
    Ok(page.finish())
}

fn sweep_table(page: &mut Page, runs: &[&SweepRun]) {
    page.heading("Runs");
    let point = |d: &Option<Distribution>, of: fn(&Distribution) -> f64| {
        d.as_ref().map_or_else(String::new, |d| format!("{:.1}", of(d)))
    };
    let rows: Vec<_> = runs
        .iter()
        .map(|run| {
            let latencies = &run.summary.latencies;
            vec![
                format!("{:.3}", run.rate_per_s),
                format!("{:.1} %", run.attained * 100.0),
                format!("{:.1}", run.summary.throughput.output_tokens_per_s),
                point(&latencies.ttft_ms, |d| d.p50),
                point(&latencies.ttft_ms, |d| d.p99),
                point(&latencies.tpot_ms, |d| d.p50),
                point(&latencies.itl_ms, |d| d.p99),
                run.summary.counts.failed.to_string(),
            ]
        })
        .collect();
    let head = [
        "rate",
        "within SLO",
        "tokens/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "ITL p99",
        "failed",
    ];
    page.table(&head, &rows);
}

/// The page of what prompts did to streams.
pub fn interference_page(report: &Interference) -> Result<String, WriteError> {
    let mut page = Page::new("Prompts beside running streams");
    for note in &report.notes {
        page.note("", note);
    }
    page.heading("Longest gap of any stream");
    let of = |value: fn(&Effect) -> f64| -> Vec<(f64, f64)> {
        let mut points: Vec<_> = report
            .prompts
            .iter()
            .map(|row| (f64::from(row.prompt_tokens), value(row)))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points
    };
    let gaps = Drawing::new("tokens of the prompt", "ms")
        .marked_line("worst gap, median", of(|row| row.worst_gap_p50_ms))
        .marked_line("worst gap, longest", of(|row| row.worst_gap_max_ms))
        .marked_line("TTFT of the prompt", of(|row| row.ttft_p50_ms));
    page.plot("By the length of the prompt", &gaps)?;
    let calm = Drawing::new("gap, ms", "share")
        .logarithmic()
        .line("calm", report.calm.cdf.clone());
    page.plot("Gaps while no prompt disturbs", &calm)?;
    let mut rows = vec![vec![
        "none".to_owned(),
        String::new(),
        format!("{:.1} (p99 {:.1})", report.calm.p50, report.calm.p99),
        format!("{:.1}", report.calm.max),
        format!("{:.1}", report.calm_tokens_per_s),
    ]];
    rows.extend(report.prompts.iter().map(|row| {
        vec![
            row.prompt_tokens.to_string(),
            format!("{:.1}", row.ttft_p50_ms),
            format!("{:.1}", row.worst_gap_p50_ms),
            format!("{:.1}", row.worst_gap_max_ms),
            format!("{:.1}", row.tokens_per_s),
        ]
    }));
    page.table(
        &[
            "prompt",
            "TTFT p50, ms",
            "worst gap p50, ms",
            "worst gap max, ms",
            "tokens/s a stream",
        ],
        &rows,
    );
    page.settings(&report.settings);
    Ok(page.finish())
}
