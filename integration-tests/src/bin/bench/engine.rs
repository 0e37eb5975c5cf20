//! `scripts/bench engine`: prefill and decode through the engine and the model's runner.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use config::{Config, ConfigArgs};
use integration_tests::cpu_time;
use serde_json::json;

use crate::machine::{Usage, describe};
use crate::report::{Key, Report, Row, Work};
use crate::roofline::{Demand, Peaks, Roofline};
use crate::unit::{Shapes, Taken, Unit};
use crate::yardstick::{Figures, LlamaBench, from_file};

/// Arguments of `scripts/bench engine`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// GGUF file or model directory; scripts/bench names the default model.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Numbers of threads.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,2", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Vec<u16>,
    /// Lengths of prompts to prefill [default: 128,512,2048; with --quick 16,64].
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prefill: Vec<u32>,
    /// Numbers of sequences that decode together [default: 1,4,16,32; with --quick 1,4].
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: Vec<u32>,
    /// Tokens of a decoding sequence at the end; it starts 32 (with --quick 8) tokens before [default: 512; with --quick 64].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(64..=1_000_000))]
    context: Option<u32>,
    /// Rounds, of which medians are taken [default: 3; with --quick 1].
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: Option<u16>,
    /// Element type of the KV cache (model.kv_dtype).
    #[arg(long, value_name = "TYPE")]
    kv_dtype: Option<String>,
    /// Another setting of a node, SECTION.FIELD=VALUE; may be repeated.
    #[arg(long, value_name = "SETTING")]
    set: Vec<String>,
    /// Measure a program on the PATH on the same file in the same rounds and print ratios.
    #[arg(long, value_name = "PROGRAM")]
    vs: Option<Peer>,
    /// Print ratios against the figures in a file of --json's form.
    #[arg(long, value_name = "FILE", conflicts_with = "vs")]
    yardstick: Option<PathBuf>,
    /// Write all figures to a file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// A few seconds' work: shows that it runs, measures nothing reliably.
    #[arg(long)]
    quick: bool,
}

/// Programs to compare with.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Peer {
    /// llama.cpp's llama-bench, and llama-batched-bench beside it.
    LlamaBench,
}

impl Args {
    fn shapes(&self) -> Shapes {
        let chosen = |given: &[u32], whole: &[usize], quick: &[usize]| -> Vec<usize> {
            let mut list = match (given.is_empty(), self.quick) {
                (false, _) => given.iter().map(|&n| n as usize).collect(),
                (true, false) => whole.to_vec(),
                (true, true) => quick.to_vec(),
            };
            list.sort_unstable();
            list.dedup();
            list
        };
        Shapes {
            prompts: chosen(&self.prefill, &[128, 512, 2048], &[16, 64]),
            batches: chosen(&self.batch, &[1, 4, 16, 32], &[1, 4]),
            context: self.context.unwrap_or(if self.quick { 64 } else { 512 }) as usize,
            steps: if self.quick { 8 } else { 32 },
        }
    }

    fn threads(&self) -> Vec<usize> {
        let mut threads: Vec<usize> = self.threads.iter().map(|&n| usize::from(n)).collect();
        threads.sort_unstable();
        threads.dedup();
        threads
    }

    fn config(&self) -> Result<Config> {
        let mut set = self.set.clone();
        set.push(format!("model.path={}", self.model.display()));
        if let Some(dtype) = &self.kv_dtype {
            set.push(format!("model.kv_dtype={dtype}"));
        }
        Ok(config::load(&ConfigArgs {
            config: None,
            set,
            print_config: false,
            check: false,
        })?)
    }
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<()> {
    let (shapes, threads) = (args.shapes(), args.threads());
    let rounds = usize::from(args.rounds.unwrap_or(if args.quick { 1 } else { 3 }));
    let config = args.config()?;
    // What can be wrong is found out before minutes of measuring.
    let mut json = args.json.as_ref().map(create).transpose()?;
    let file = args.yardstick.as_deref().map(from_file).transpose()?;
    let peer = args.vs.map(|_| LlamaBench::find(&args.model)).transpose()?;
    if peer.as_ref().is_some_and(|peer| !peer.has_batches()) {
        println!("no llama-batched-bench beside llama-bench: batches have no ratio");
    }
    let most = threads.last().copied().context("--threads is empty")?;
    let sample = Duration::from_millis(if args.quick { 5 } else { 60 });
    let roofline = Roofline::new(most, sample, args.quick)?;
    let mut units = Vec::new();
    for &threads in &threads {
        units.push(Unit::load(&config, threads, &shapes)?);
    }
    let usage = Usage::now()?;
    let mut bench = Bench {
        shapes,
        rows: Vec::new(),
        peaks: Vec::new(),
    };
    for unit in &mut units {
        bench.warm_up(unit)?;
    }
    for round in 0..rounds {
        eprint_progress(&format!("round {} of {rounds}", round + 1));
        for unit in &mut units {
            bench.round(unit, &roofline)?;
            if let Some(peer) = &peer {
                bench.compare(&peer.round(unit.threads, &bench.shapes)?);
            }
        }
    }
    if let Some(figures) = &file {
        bench.compare(figures);
    }
    bench.find_bounds(&units);
    let others = usage.others_since(cpu_time::of_children())?;
    let report = Report {
        facts: [
            ("model", json!(args.model.display().to_string())),
            ("kv_dtype", json!(config.model.kv_dtype)),
            ("prefill_chunk_tokens", json!(units.first().map(Unit::chunk))),
            ("machine", describe(others)),
        ]
        .into(),
        peaks: bench.peaks,
        rows: bench.rows,
        num_rounds: rounds,
        yardstick: yardstick_name(args),
    };
    print!("{}", report.to_text());
    println!(
        "other processes took {:.1} % of this machine's CPU meanwhile",
        100.0 * others
    );
    if let (Some((file, path)), value) = (&mut json, report.to_json()) {
        writeln!(file, "{value:#}").with_context(|| format!("--json {}", path.display()))?;
    }
    Ok(())
}

fn create(path: &PathBuf) -> Result<(std::fs::File, PathBuf)> {
    let file = std::fs::File::create(path).with_context(|| format!("--json {}", path.display()))?;
    Ok((file, path.clone()))
}

fn yardstick_name(args: &Args) -> Option<String> {
    match (&args.vs, &args.yardstick) {
        (Some(Peer::LlamaBench), _) => Some("llama-bench".to_owned()),
        (None, Some(path)) => Some(path.file_stem().unwrap_or_default().to_string_lossy().into_owned()),
        (None, None) => None,
    }
}

#[allow(clippy::print_stderr, reason = "progress is not the result")]
fn eprint_progress(text: &str) {
    eprintln!("{text}");
}

/// What is measured so far.
struct Bench {
    shapes: Shapes,
    rows: Vec<Row>,
    peaks: Vec<Peaks>,
}

impl Bench {
    /// Touches all memory that the rounds use.
    fn warm_up(&self, unit: &mut Unit) -> Result<()> {
        let most = self.shapes.batches.last().copied().unwrap_or(1);
        unit.decode(most, self.shapes.context, 1)?;
        let longest = self.shapes.prompts.last().copied().unwrap_or(1);
        unit.prefill(longest.min(unit.chunk()))?;
        Ok(())
    }

    /// One measurement of every row of a unit, and of its roofline.
    fn round(&mut self, unit: &mut Unit, roofline: &Roofline) -> Result<()> {
        let peaks = roofline.measure(unit.threads)?;
        match self.peaks.iter_mut().find(|known| known.threads == unit.threads) {
            Some(known) => *known = peaks.or_better(known),
            None => self.peaks.push(peaks),
        }
        for tokens in self.shapes.prompts.clone() {
            let taken = unit.prefill(tokens)?;
            self.record(Key::new(Work::Prefill, tokens, 1, unit.threads), 1, taken);
        }
        let (context, steps) = (self.shapes.context, self.shapes.steps);
        for batch in self.shapes.batches.clone() {
            let taken = unit.decode(batch, context, steps)?;
            self.record(Key::new(Work::Decode, context, batch, unit.threads), steps, taken);
        }
        Ok(())
    }

    fn record(&mut self, key: Key, steps: usize, taken: Taken) {
        match self.rows.iter_mut().find(|row| row.key == key) {
            Some(row) => row.rounds.push(taken),
            None => self.rows.push(Row {
                key,
                steps,
                rounds: vec![taken],
                yardstick: Vec::new(),
                bound: None,
            }),
        }
    }

    fn compare(&mut self, figures: &Figures) {
        for row in &mut self.rows {
            row.yardstick.extend(figures.get(&row.key));
        }
    }

    fn find_bounds(&mut self, units: &[Unit]) {
        for row in &mut self.rows {
            let threads = row.key.threads;
            let unit = units.iter().find(|unit| unit.threads == threads);
            let peaks = self.peaks.iter().find(|peaks| peaks.threads == threads);
            let (Some(unit), Some(peaks)) = (unit, peaks) else {
                continue;
            };
            let demand = match row.key.work {
                Work::Prefill => Demand::prefill(&unit.cost, row.key.tokens, unit.chunk()),
                Work::Decode => {
                    // Positions that a row sees in the middle of the measured steps.
                    let middle = row.key.tokens as f64 - (row.steps as f64 - 1.0) / 2.0;
                    Demand::decode(&unit.cost, row.key.batch, middle)
                }
            };
            row.bound = peaks.bound(demand);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::median;

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0]), 2.5);
    }

    #[test]
    fn ratios_are_medians_of_the_rounds_ratios() {
        let taken = |ms| Taken {
            wall: Duration::from_millis(ms),
            cpu: Duration::ZERO,
        };
        let row = Row {
            key: Key::new(Work::Prefill, 100, 1, 1),
            steps: 1,
            rounds: vec![taken(100), taken(200), taken(50)],
            yardstick: vec![500.0, 500.0, 100.0],
            bound: None,
        };
        let mut report = Report {
            facts: [].into(),
            peaks: Vec::new(),
            rows: vec![row],
            num_rounds: 3,
            yardstick: None,
        };
        // 2, 1 and 20.
        assert_eq!(report.to_json()["rows"][0]["ratio"], json!(2.0));
        report.rows[0].yardstick = vec![1000.0];
        assert_eq!(report.to_json()["rows"][0]["ratio"], json!(1.0));
        report.rows[0].yardstick.clear();
        assert!(report.to_json()["rows"][0]["ratio"].is_null());
    }
}
