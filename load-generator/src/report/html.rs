//! One page that needs nothing else: tables, and plots as SVG inside.

use std::fmt::Write;

use serde_json::{Map, Value};

use super::table::{named, warnings};
use super::{Drawing, WriteError};
use crate::core::record::{Outcome, Record};
use crate::core::summary::{Distribution, Report, Summary};
use crate::core::timing::{FIRST, TOTAL};

const STYLE: &str = "body{font:15px/1.45 system-ui,sans-serif;color:#222;background:#fff;max-width:1200px;margin:2em auto;padding:0 1em}\
    h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em;border-bottom:1px solid #ccc}\
    table{border-collapse:collapse;margin:.6em 0}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #e5e5e5}\
    td:first-child,th:first-child{text-align:left}.plots{display:flex;flex-wrap:wrap;gap:1em}\
    figure{margin:0;flex:1 1 480px;max-width:590px}figure svg{width:100%;height:auto}figcaption{font-size:.9em;color:#555}\
    .note{background:#fff7e0;padding:.4em .8em;margin:.3em 0}.failed{background:#fde8e8}";
/// Parts into which the time of a run is cut for time lines.
const BINS: usize = 120;
/// Stacks of phases.
const STACKS: usize = 40;
/// A part is at least so long, in seconds: shorter ones show noise.
const MIN_BIN_S: f64 = 0.25;

/// A page that is being written.
#[derive(Debug)]
pub struct Page {
    body: String,
    in_plots: bool,
}

fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            other => safe.push(other),
        }
    }
    safe
}

impl Page {
    pub(super) fn new(title: &str) -> Self {
        let mut page = Self {
            body: String::new(),
            in_plots: false,
        };
        page.put(&format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title><style>{STYLE}</style></head>\n\
             <body><h1>{title}</h1>",
            title = escaped(title)
        ));
        page
    }

    fn put(&mut self, html: &str) {
        // Writing to memory cannot fail.
        let _written = writeln!(self.body, "{html}");
    }

    fn end_plots(&mut self) {
        if self.in_plots {
            self.put("</div>");
            self.in_plots = false;
        }
    }

    pub(super) fn heading(&mut self, text: &str) {
        self.end_plots();
        self.put(&format!("<h2>{}</h2>", escaped(text)));
    }

    pub(super) fn note(&mut self, class: &str, text: &str) {
        self.end_plots();
        self.put(&format!("<div class=\"note {class}\">{}</div>", escaped(text)));
    }

    pub(super) fn table(&mut self, head: &[&str], rows: &[Vec<String>]) {
        self.end_plots();
        let cells = |tag: &str, row: &mut dyn Iterator<Item = String>| {
            let cells: String = row.map(|cell| format!("<{tag}>{cell}</{tag}>")).collect();
            format!("<tr>{cells}</tr>")
        };
        let head = cells("th", &mut head.iter().map(|cell| escaped(cell)));
        let rows: String = rows
            .iter()
            .map(|row| cells("td", &mut row.iter().map(|cell| escaped(cell))))
            .collect();
        self.put(&format!("<table>{head}{rows}</table>"));
    }

    pub(super) fn plot(&mut self, caption: &str, drawing: &Drawing) -> Result<(), WriteError> {
        if let Some(svg) = drawing.svg()? {
            if !self.in_plots {
                self.put("<div class=\"plots\">");
                self.in_plots = true;
            }
            self.put(&format!(
                "<figure>{svg}<figcaption>{}</figcaption></figure>",
                escaped(caption)
            ));
        }
        Ok(())
    }

    pub(super) fn settings(&mut self, settings: &Map<String, Value>) {
        self.heading("Settings");
        let shown = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let rows: Vec<_> = settings
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, value)| vec![name.clone(), shown(value)])
            .collect();
        self.table(&["setting", "value"], &rows);
    }

    /// The page.
    #[must_use]
    pub fn finish(mut self) -> String {
        self.end_plots();
        self.put("</body></html>");
        self.body
    }
}

/// The page of a run.
pub fn run_page(report: &Report, records: &[Record]) -> Result<String, WriteError> {
    let summary = &report.summary;
    let mut page = Page::new("Load report");
    if report.interrupted {
        page.note(
            "failed",
            "The run was interrupted: these are the requests that had ended.",
        );
    }
    figures(&mut page, summary);
    let cpu = report
        .generator_cpu
        .map(|cpu| format!("The generator used {:.1} % of a core.", cpu * 100.0));
    for note in report.notes.iter().cloned().chain(cpu).chain(warnings(summary)) {
        page.note("", &note);
    }
    for message in &summary.messages {
        page.note("failed", message);
    }
    page.heading("Distributions");
    let named = named(&summary.latencies);
    let streamed = named[0].1.is_some();
    for (name, distribution) in &named[..4] {
        if let Some(d) = distribution {
            let caption = format!("{name}: share of {} values that are at most so long", d.count);
            let drawing = Drawing::new(&format!("{name}, ms"), "share").logarithmic();
            page.plot(&caption, &drawing.line(name, d.cdf.clone()))?;
        }
    }
    phase_stack(&mut page, records)?;
    page.heading("In the course of the run");
    timelines(&mut page, records, summary, streamed)?;
    page.settings(&report.settings);
    Ok(page.finish())
}

/// Where the server says the time of the requests went: those that took about as long side by side, in boxes of their mean
/// phases.
fn phase_stack(page: &mut Page, records: &[Record]) -> Result<(), WriteError> {
    let mut told: Vec<&Record> = records
        .iter()
        .filter(|record| record.is_done() && !record.phases.is_empty())
        .collect();
    let Some(first) = told.first() else {
        return Ok(());
    };
    let names: Vec<String> = first
        .phases
        .iter()
        .map(|(name, _)| name.clone())
        .filter(|name| name != TOTAL && name != FIRST)
        .collect();
    told.sort_by(|a, b| a.e2e_s.total_cmp(&b.e2e_s));
    let groups: Vec<&[&Record]> = told.chunks(told.len().div_ceil(STACKS)).collect();
    let width = 100.0 / groups.len() as f64;
    let mut tops = vec![0.0; groups.len()];
    let mut drawing = Drawing::new("requests by their time to the end, %", "ms");
    for name in &names {
        let mut boxes = Vec::with_capacity(groups.len());
        for ((i, group), top) in groups.iter().enumerate().zip(&mut tops) {
            let of_name = |record: &&Record| {
                record
                    .phases
                    .iter()
                    .find(|(known, _)| known == name)
                    .map_or(0.0, |(_, ms)| *ms)
            };
            let mean = group.iter().map(of_name).sum::<f64>() / group.len() as f64;
            boxes.push(((i as f64 * width, *top), ((i + 1) as f64 * width, *top + mean)));
            *top += mean;
        }
        drawing = drawing.boxes(name, &boxes);
    }
    page.heading("Phases, as the server tells");
    page.plot("Mean phases of requests that took about as long", &drawing)
}

fn figures(page: &mut Page, summary: &Summary) {
    let (counts, throughput) = (&summary.counts, &summary.throughput);
    let mut rows = vec![
        vec!["requests".to_owned(), counts.requests.to_string()],
        vec!["failed".to_owned(), counts.failed.to_string()],
    ];
    rows.extend(
        counts
            .failures
            .iter()
            .map(|(kind, count)| vec![format!("failed: {kind}"), count.to_string()]),
    );
    let mut number = |name: &str, value: Option<f64>| {
        if let Some(value) = value {
            rows.push(vec![name.to_owned(), format!("{value:.3}")]);
        }
    };
    number("duration, s", Some(summary.duration_s));
    number("offered requests/s", summary.offered_per_s);
    number("requests/s", Some(throughput.requests_per_s));
    number("input tokens/s", Some(throughput.input_tokens_per_s));
    number("output tokens/s", Some(throughput.output_tokens_per_s));
    number("goodput, requests/s", throughput.goodput_per_s);
    if let Some(slo) = &summary.slo {
        for (name, limit) in [
            ("TTFT", slo.ttft_ms),
            ("TPOT", slo.tpot_ms),
            ("gap", slo.gap_ms),
            ("E2E", slo.e2e_ms),
        ] {
            number(&format!("SLO: {name}, ms"), limit);
        }
        number("within SLO, %", Some(slo.attained * 100.0));
    }
    rows.push(vec!["tokens of prompts".to_owned(), summary.tokens.prompt.to_string()]);
    if let Some(cached) = summary.tokens.cached {
        rows.push(vec!["of those from a prefix cache".to_owned(), cached.to_string()]);
    }
    rows.push(vec!["tokens generated".to_owned(), summary.tokens.output.to_string()]);
    page.heading("Figures");
    page.table(&["", ""], &rows);
    let mut rows: Vec<_> = named(&summary.latencies)
        .iter()
        .filter_map(|(name, d)| d.as_ref().map(|d| times(name, d)))
        .collect();
    rows.extend(
        summary
            .phases
            .iter()
            .map(|phase| times(&format!("phase: {}", phase.name), &phase.ms)),
    );
    page.table(&["ms", "mean", "p50", "p90", "p99", "max", "count"], &rows);
}

fn times(name: &str, d: &Distribution) -> Vec<String> {
    let numbers = [d.mean, d.p50, d.p90, d.p99, d.max].map(|value| format!("{value:.2}"));
    [name.to_owned()]
        .into_iter()
        .chain(numbers)
        .chain([d.count.to_string()])
        .collect()
}

fn timelines(page: &mut Page, records: &[Record], summary: &Summary, streamed: bool) -> Result<(), WriteError> {
    let counted = || records.iter().filter(|record| record.outcome != Outcome::Aborted);
    let (name, first): (_, fn(&Record) -> Option<f64>) = if streamed {
        ("TTFT", |record| record.ttft_s)
    } else {
        ("E2E", |record| Some(record.e2e_s))
    };
    let of = |done: bool| -> Vec<(f64, f64)> {
        let chosen = counted().filter(|record| record.is_done() == done);
        chosen
            .filter_map(|record| {
                let value = if done { first(record)? } else { record.e2e_s };
                Some((record.intended_s, value * 1e3))
            })
            .collect()
    };
    let requests = Drawing::new("sent after, s", "ms")
        .points(name, of(true))
        .points("time to failure", of(false));
    page.plot(
        &format!("Each request: its {name} by when it was meant to be sent"),
        &requests,
    )?;

    let width = (summary.duration_s / BINS as f64).max(MIN_BIN_S);
    let bins = (summary.duration_s / width).ceil() as usize + 1;
    let bin = |at: f64| ((at / width) as usize).min(bins - 1);
    let (mut tokens, mut open) = (vec![0.0; bins], vec![0.0; bins]);
    for record in counted() {
        record.text_times().for_each(|at| tokens[bin(at)] += 1.0 / width);
        let (from, to) = (bin(record.intended_s), bin(record.intended_s + record.e2e_s));
        open[from..=to].iter_mut().for_each(|count| *count += 1.0);
    }
    let line = |values: Vec<f64>| {
        values
            .into_iter()
            .enumerate()
            .map(|(i, value)| (i as f64 * width, value))
            .collect()
    };
    let drawing = Drawing::new("s", "events/s").line("events with text", line(tokens));
    page.plot(
        &format!("Events with text a second, in steps of {width:.2} s"),
        &drawing,
    )?;
    let drawing = Drawing::new("s", "requests").line("open requests", line(open));
    page.plot("Requests that were open in each step", &drawing)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::core::record::tests::{done, failed};
    use crate::core::record::{Failure, Slo};
    use crate::core::summary::{SCHEMA, VERSION, summarise};

    #[test]
    fn a_page_asks_nobody_and_believes_nobody() {
        let mut bad = failed(3, Failure::Status(500));
        bad.outcome = Outcome::Failed(Failure::Status(500), "<script>alert(1)</script>".to_owned());
        let records = [done(0, 100, 10), done(1, 120, 20), done(2, 90, 9), bad];
        let slo = Slo {
            ttft_ms: Some(110.0),
            ..Slo::default()
        };
        let report = Report {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            kind: "load".to_owned(),
            started_unix_s: 0,
            settings: json!({"url": "http://x/<b>"}).as_object().expect("an object").clone(),
            interrupted: false,
            generator_cpu: Some(0.1),
            notes: vec!["a & b".to_owned()],
            summary: summarise(&records, &slo, true),
        };
        let page = run_page(&report, &records).expect("written");
        assert_eq!(
            page.matches("<svg").count(),
            8,
            "four distributions, phases, three time lines"
        );
        assert!(page.contains("http://x/&lt;b&gt;") && page.contains("a &amp; b"));
        assert!(page.contains("&lt;script&gt;") && !page.contains("<script"));
        for needle in ["src=", "href=", "@import", "url("] {
            assert!(!page.contains(needle), "{needle}");
        }
        for (open, close) in [("<div", "</div>"), ("<table", "</table>"), ("<figure", "</figure>")] {
            assert_eq!(page.matches(open).count(), page.matches(close).count(), "{open}");
        }
    }
}
