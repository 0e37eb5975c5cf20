//! The table that an operator chooses a split by.

use serde_json::{Value, json};

use super::watch::{Pool, Seen};
use crate::report::median;

/// A pool is what limits a split if it computes for so much of the time.
const BUSY: f64 = 0.85;

/// One run of the load generator against one contender.
pub(super) struct Run {
    /// What the generator reports: the `summary` of its JSON.
    pub(super) summary: Value,
    pub(super) seen: Seen,
}

/// The rounds of one contender at one rate, as medians.
pub(super) struct Row {
    name: String,
    figures: Vec<(&'static str, Option<f64>)>,
    limit: String,
}

type Column = (&'static str, fn(&Run) -> Option<f64>);

/// Columns of figures: what they are called, and where they come from. Times are milliseconds.
const COLUMNS: &[Column] = &[
    ("offered/s", |run| at(run, "/offered_per_s")),
    ("done/s", |run| at(run, "/throughput/requests_per_s")),
    ("failed", |run| at(run, "/counts/failed")),
    ("goodput/s", |run| at(run, "/throughput/goodput_per_s")),
    ("in SLO %", |run| at(run, "/slo/attained").map(|share| 100.0 * share)),
    ("TTFT p50", |run| at(run, "/latencies/ttft_ms/p50")),
    ("TTFT p99", |run| at(run, "/latencies/ttft_ms/p99")),
    ("ITL p50", |run| at(run, "/latencies/itl_ms/p50")),
    ("ITL p99", |run| at(run, "/latencies/itl_ms/p99")),
    ("ITL max", |run| at(run, "/latencies/itl_ms/max")),
    ("TPOT p50", |run| at(run, "/latencies/tpot_ms/p50")),
    ("P busy %", |run| pool(run, "prefill").map(|pool| 100.0 * pool.busy)),
    ("D busy %", |run| decode(run).map(|pool| 100.0 * pool.busy)),
    ("D rows", |run| decode(run).map(|pool| pool.rows)),
    ("D KV %", |run| decode(run).map(|pool| 100.0 * pool.kv_peak)),
    ("queued", |run| {
        (!run.seen.pools.is_empty()).then_some(run.seen.queue_peak)
    }),
    ("exposed", |run| phase(run, "exposed_transfer", "p50")),
];

fn at(run: &Run, pointer: &str) -> Option<f64> {
    run.summary.pointer(pointer)?.as_f64()
}

/// A percentile of the time that requests were in a phase, as the server says.
fn phase(run: &Run, name: &str, percentile: &str) -> Option<f64> {
    let phases = run.summary["phases"].as_array()?;
    phases.iter().find(|phase| phase["name"] == name)?["ms"][percentile].as_f64()
}

fn pool(run: &Run, role: &str) -> Option<Pool> {
    run.seen.pools.get(role).copied()
}

/// The nodes that decode.
fn decode(run: &Run) -> Option<Pool> {
    pool(run, "decode").or_else(|| pool(run, "both"))
}

impl Row {
    /// Medians of the rounds of one contender.
    pub(super) fn new(name: String, runs: &[Run]) -> Self {
        let figure = |(title, pick): &Column| {
            let all: Vec<f64> = runs.iter().filter_map(pick).collect();
            (*title, (!all.is_empty()).then(|| median(all)))
        };
        let figures: Vec<_> = COLUMNS.iter().map(figure).collect();
        let busy = |title: &str| find(&figures, title).map(|percent| percent / 100.0);
        Self {
            limit: limit(busy("P busy %"), busy("D busy %")).to_owned(),
            name,
            figures,
        }
    }

    fn get(&self, title: &str) -> Option<f64> {
        find(&self.figures, title)
    }

    /// As an object, by the columns' names.
    pub(super) fn json(&self) -> Value {
        let mut row = json!({ "split": self.name, "limit": self.limit });
        for (title, figure) in &self.figures {
            row[*title] = json!(figure);
        }
        row
    }
}

fn find(figures: &[(&'static str, Option<f64>)], title: &str) -> Option<f64> {
    figures.iter().find(|(name, _)| *name == title)?.1
}

/// Which pool has no time left.
fn limit(prefill: Option<f64>, decode: Option<f64>) -> &'static str {
    let full = |share: Option<f64>| share.is_some_and(|share| share >= BUSY);
    match (full(prefill), full(decode)) {
        (true, true) => "both",
        (true, false) => "prefill",
        (false, true) => "decode",
        (false, false) => "",
    }
}

/// Writes the rows of one rate, and which of them is best: most goodput, then the lower median TTFT.
pub(super) fn print(rate: f64, rounds: usize, rows: &[Row]) {
    println!("\n{rate} requests/s, times in ms, medians of {rounds} round(s)");
    let width = rows.iter().map(|row| row.name.len()).chain([5]).max().unwrap_or(5);
    let titles: Vec<String> = COLUMNS.iter().map(|(title, _)| format!("{title:>9}")).collect();
    println!("{:width$} {}  limit", "split", titles.join(" "));
    for row in rows {
        let cells: Vec<String> = row.figures.iter().map(|(_, figure)| cell(*figure)).collect();
        println!("{:width$} {}  {}", row.name, cells.join(" "), row.limit);
    }
    if let Some(best) = best(rows) {
        println!("best: {}", best.name);
    }
}

fn cell(figure: Option<f64>) -> String {
    match figure {
        None => format!("{:>9}", "-"),
        Some(figure) if figure.abs() >= 100.0 => format!("{figure:>9.0}"),
        Some(figure) if figure.abs() >= 10.0 => format!("{figure:>9.1}"),
        Some(figure) => format!("{figure:>9.2}"),
    }
}

/// The row with the most goodput, or without objectives the most requests done; of equals the one with the lower median TTFT.
fn best(rows: &[Row]) -> Option<&Row> {
    let worth = |row: &Row| row.get("goodput/s").or_else(|| row.get("done/s")).unwrap_or(0.0);
    let wait = |row: &Row| row.get("TTFT p50").unwrap_or(f64::INFINITY);
    // Goodputs that differ by less than a hundredth are equal: the time of the last answer is in them.
    let most = rows.iter().map(worth).fold(0.0, f64::max);
    rows.iter()
        .filter(|row| worth(row) > 0.0 && worth(row) >= 0.99 * most)
        .min_by(|a, b| wait(a).total_cmp(&wait(b)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(goodput: f64, ttft: f64, prefill: f64, decode: f64) -> Run {
        let pools = [("prefill", prefill), ("decode", decode)].map(|(role, busy)| {
            let pool = Pool {
                busy,
                rows: 2.0,
                kv_peak: 0.5,
            };
            (role, pool)
        });
        let seen = Seen {
            pools: pools.into(),
            queue_peak: 3.0,
        };
        let summary = json!({
            "phases": [{"name": "total", "ms": {"p50": 9.0}}, {"name": "exposed_transfer", "ms": {"p50": 1.5}}],
            "throughput": {"goodput_per_s": goodput, "requests_per_s": 1.0}, "latencies": {"ttft_ms": {"p50": ttft}},
        });
        Run { summary, seen }
    }

    #[test]
    fn a_row_has_the_medians_of_its_rounds() {
        let runs = [
            run(1.0, 10.0, 0.9, 0.2),
            run(3.0, 30.0, 0.95, 0.3),
            run(2.0, 20.0, 0.99, 0.4),
        ];
        let row = Row::new("1:1".to_owned(), &runs);
        assert_eq!(row.get("goodput/s"), Some(2.0));
        assert_eq!(row.get("TTFT p50"), Some(20.0));
        assert_eq!(row.get("ITL p50"), None);
        assert_eq!(row.get("D KV %"), Some(50.0));
        assert_eq!(row.limit, "prefill");
        assert_eq!(row.json()["exposed"], 1.5);
    }

    #[test]
    fn the_best_has_most_goodput_and_of_equals_the_shorter_wait() {
        let rows = [
            Row::new("1:2".to_owned(), &[run(1.0, 5.0, 0.1, 0.1)]),
            Row::new("2:1".to_owned(), &[run(2.0, 50.0, 0.1, 0.9)]),
            Row::new("both:3".to_owned(), &[run(1.99, 40.0, 0.9, 0.9)]),
        ];
        assert_eq!(best(&rows).map(|row| row.name.as_str()), Some("both:3"));
        assert_eq!(rows.each_ref().map(|row| row.limit.as_str()), ["", "decode", "both"]);
        assert!(best(&[]).is_none());
    }
}
