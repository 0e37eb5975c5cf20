//! Rows of figures: as a table and as JSON.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::roofline::{Bound, Peaks};
use crate::unit::Taken;

/// Runs a measurement of processes on a runtime of its own, and writes its figures to a file if one is named. That is opened
/// first, so that nothing is measured in vain.
pub(crate) fn measured(json: Option<&Path>, measure: impl Future<Output = Result<Value>>) -> Result<()> {
    let named = |path: &Path| File::create(path).with_context(|| format!("--json {}", path.display()));
    let mut json = json.map(named).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let found = runtime.block_on(measure)?;
    if let Some(file) = &mut json {
        writeln!(file, "{found:#}")?;
    }
    Ok(())
}

/// Kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Work {
    Prefill,
    Decode,
}

impl Work {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// What a row is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) threads: usize,
    pub(crate) work: Work,
    pub(crate) batch: usize,
    /// Of the prompt; with decoding, of each sequence at the end.
    pub(crate) tokens: usize,
}

impl Key {
    pub(crate) fn new(work: Work, tokens: usize, batch: usize, threads: usize) -> Self {
        Self {
            threads,
            work,
            batch,
            tokens,
        }
    }
}

/// What was measured for a row, round by round.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) key: Key,
    /// Steps of one measurement; a prompt is one.
    pub(crate) steps: usize,
    pub(crate) rounds: Vec<Taken>,
    /// Tokens a second of what it is compared with: as many as rounds, or one, or none.
    pub(crate) yardstick: Vec<f64>,
    /// The shortest time of a step that the machine allows.
    pub(crate) bound: Option<Bound>,
}

impl Row {
    /// Tokens of one measurement.
    fn tokens(&self) -> f64 {
        match self.key.work {
            Work::Prefill => self.key.tokens as f64,
            Work::Decode => (self.key.batch * self.steps) as f64,
        }
    }

    fn speeds(&self) -> Vec<f64> {
        self.rounds
            .iter()
            .map(|taken| self.tokens() / taken.wall.as_secs_f64())
            .collect()
    }

    fn tokens_per_s(&self) -> f64 {
        median(self.speeds())
    }

    /// Median of the ratios of the rounds.
    fn ratio(&self) -> Option<f64> {
        let last = *self.yardstick.last()?;
        let theirs = self.yardstick.iter().copied().chain(std::iter::repeat(last));
        Some(median(
            self.speeds()
                .iter()
                .zip(theirs)
                .map(|(ours, theirs)| ours / theirs)
                .collect(),
        ))
    }

    /// Milliseconds of a step, by the clock and by the CPU time of the computing thread.
    fn milliseconds(&self) -> (f64, f64) {
        let each = 1e3 / self.steps as f64;
        (
            each * median(self.rounds.iter().map(|taken| taken.wall.as_secs_f64()).collect()),
            each * median(self.rounds.iter().map(|taken| taken.cpu.as_secs_f64()).collect()),
        )
    }

    fn to_json(&self) -> Value {
        let (ms, cpu_ms) = self.milliseconds();
        let roofline_ms = self.bound.map(|bound| 1e3 * bound.seconds);
        json!({
            "work": self.key.work.as_str(),
            "tokens": self.key.tokens,
            "batch": self.key.batch,
            "threads": self.key.threads,
            "tokens_per_s": self.tokens_per_s(),
            "ms": ms,
            "cpu_ms": cpu_ms,
            "rounds": self.speeds(),
            "roofline_ms": roofline_ms,
            "roofline_bound": self.bound.map(|bound| bound.by),
            "roofline_fraction": roofline_ms.map(|bound| bound / ms),
            "yardstick_tokens_per_s": (!self.yardstick.is_empty()).then(|| median(self.yardstick.clone())),
            "yardstick_rounds": self.yardstick,
            "ratio": self.ratio(),
        })
    }

    fn to_line(&self) -> String {
        let (ms, cpu_ms) = self.milliseconds();
        let key = self.key;
        let mut line = format!(
            "{:<8}{:>7}{:>6}{:>8}{:>12.1}{ms:>10.2}{cpu_ms:>10.2}",
            key.work.as_str(),
            key.tokens,
            key.batch,
            key.threads,
            self.tokens_per_s()
        );
        line += &match self.bound {
            Some(bound) => {
                let least = 1e3 * bound.seconds;
                format!("{least:>13.2}{:>9.0} % {:<11}", 100.0 * least / ms, bound.by)
            }
            None => " not measured".to_owned(),
        };
        if let Some(ratio) = self.ratio() {
            line += &format!("{:>12.1}{ratio:>8.2}", median(self.yardstick.clone()));
        }
        line
    }
}

/// Everything that one run found.
pub(crate) struct Report {
    /// The model, the settings, the machine.
    pub(crate) facts: BTreeMap<&'static str, Value>,
    pub(crate) peaks: Vec<Peaks>,
    pub(crate) rows: Vec<Row>,
    pub(crate) num_rounds: usize,
    /// What the ratios are against.
    pub(crate) yardstick: Option<String>,
}

impl Report {
    pub(crate) fn to_json(&self) -> Value {
        let mut whole = json!({
            "rows": self.rows.iter().map(Row::to_json).collect::<Vec<_>>(),
            "roofline": {
                "peaks": self.peaks.iter().map(Peaks::to_json).collect::<Vec<_>>(),
                "rule": "max(products at the int8 peak + attention at the f32 peak, weights and KV at the DRAM read bandwidth)",
            },
            "num_rounds": self.num_rounds,
            "yardstick": self.yardstick,
        });
        for (name, value) in &self.facts {
            whole[*name] = value.clone();
        }
        whole
    }

    /// The tables.
    pub(crate) fn to_text(&self) -> String {
        let mut lines = vec![
            format!("roofline, the best of {} rounds:", self.num_rounds),
            Peaks::HEAD.to_owned(),
        ];
        lines.extend(self.peaks.iter().map(Peaks::to_line));
        lines.push(String::new());
        lines.push(format!(
            "medians of {} rounds; ms: of a prompt or a decoding step; reached: roofline ms / ms",
            self.num_rounds
        ));
        let mut head =
            "work     tokens batch threads    tokens/s        ms    cpu ms  roofline ms  reached   limit      "
                .to_owned();
        if let Some(yardstick) = &self.yardstick {
            head += &format!("  {yardstick}   ratio");
        }
        lines.push(head);
        lines.extend(self.rows.iter().map(Row::to_line));
        lines.push(String::new());
        lines.join("\n")
    }
}

/// The middle value; the mean of the two in the middle where there is none.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}
