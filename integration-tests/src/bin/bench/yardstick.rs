//! Figures to compare with: llama.cpp measured in the same run, or a file of figures.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::report::{Key, Work};
use crate::unit::Shapes;

/// Rows of a table: tokens a second.
pub(crate) type Figures = BTreeMap<Key, f64>;

/// llama.cpp's programs.
pub(crate) struct LlamaBench {
    bench: PathBuf,
    /// Beside it, for batches; may be missing.
    batched: Option<PathBuf>,
    model: PathBuf,
}

impl LlamaBench {
    /// Finds the programs on the PATH.
    pub(crate) fn find(model: &Path) -> Result<Self> {
        ensure!(
            model.is_file(),
            "--vs llama-bench: {} is no GGUF file, and llama.cpp reads nothing else",
            model.display()
        );
        let bench = on_path("llama-bench").context(
            "--vs llama-bench: no llama-bench on the PATH; build it from llama.cpp (target llama-bench, and \
             llama-batched-bench for the batches) and put its folder on the PATH",
        )?;
        let batched = Some(bench.with_file_name("llama-batched-bench")).filter(|path| path.is_file());
        Ok(Self {
            bench,
            batched: batched.or_else(|| on_path("llama-batched-bench")),
            model: model.to_owned(),
        })
    }

    /// Whether batches can be measured.
    pub(crate) fn has_batches(&self) -> bool {
        self.batched.is_some()
    }

    /// One round of all rows with `threads` threads. Same file, same lengths; K and V in f16, as is its default.
    pub(crate) fn round(&self, threads: usize, shapes: &Shapes) -> Result<Figures> {
        let mut figures = Figures::new();
        // The first, short prompt warms up.
        let prompts: Vec<String> = [32].iter().chain(&shapes.prompts).map(ToString::to_string).collect();
        let prefill = self.bench(threads, &["-n", "0", "-p", &prompts.join(",")])?;
        for entry in &prefill {
            let tokens = field(entry, "n_prompt")? as usize;
            if shapes.prompts.contains(&tokens) {
                figures.insert(Key::new(Work::Prefill, tokens, 1, threads), field(entry, "avg_ts")?);
            }
        }
        let start = shapes.context - shapes.steps;
        if shapes.batches.contains(&1) {
            let (steps, depth) = (shapes.steps.to_string(), start.to_string());
            let decode = self.bench(threads, &["-p", "0", "-n", &steps, "-d", &depth])?;
            let entry = decode.first().context("llama-bench measured nothing")?;
            figures.insert(
                Key::new(Work::Decode, shapes.context, 1, threads),
                field(entry, "avg_ts")?,
            );
        }
        let batches: Vec<usize> = shapes.batches.iter().copied().filter(|&batch| batch > 1).collect();
        if let Some(program) = self.batched.as_ref().filter(|_| !batches.is_empty()) {
            for entry in self.batches(program, threads, shapes, &batches)? {
                let batch = field(&entry, "pl")? as usize;
                figures.insert(
                    Key::new(Work::Decode, shapes.context, batch, threads),
                    field(&entry, "speed_tg")?,
                );
            }
        }
        Ok(figures)
    }

    fn bench(&self, threads: usize, more: &[&str]) -> Result<Vec<Value>> {
        let mut command = Command::new(&self.bench);
        command.arg("-m").arg(&self.model);
        command.args(["-t", &threads.to_string(), "-r", "1", "--no-warmup", "-o", "json"]);
        let output = run(command.args(more))?;
        serde_json::from_str(&output).with_context(|| format!("llama-bench's answer is no list: {output:?}"))
    }

    /// Each sequence has a KV cache of its own, filled with a copy of one prompt's, as ours.
    fn batches(&self, program: &Path, threads: usize, shapes: &Shapes, batches: &[usize]) -> Result<Vec<Value>> {
        let most = batches.iter().max().copied().unwrap_or(1);
        let list: Vec<String> = batches.iter().map(ToString::to_string).collect();
        // llama.cpp gives each sequence an even share, in whole hundreds.
        let room = most * (shapes.context + 1).next_multiple_of(256);
        let mut command = Command::new(program);
        command.arg("-m").arg(&self.model);
        let numbers = [
            ("-c", room),
            ("-npp", shapes.context - shapes.steps),
            ("-ntg", shapes.steps),
            ("-t", threads),
            ("-tb", threads),
        ];
        for (name, number) in numbers {
            command.args([name, &number.to_string()]);
        }
        command.args(["-npl", &list.join(","), "-pps", "-no-kvu", "--output-format", "jsonl"]);
        let output = run(&mut command)?;
        let found: Vec<Value> = output
            .lines()
            .filter(|line| line.starts_with('{'))
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()
            .with_context(|| format!("llama-batched-bench's answer is no JSON: {output:?}"))?;
        ensure!(
            found.len() == batches.len(),
            "llama-batched-bench measured {} of {} batches",
            found.len(),
            batches.len()
        );
        Ok(found)
    }
}

fn field(entry: &Value, name: &str) -> Result<f64> {
    entry[name]
        .as_f64()
        .with_context(|| format!("{name} is missing in {entry}"))
}

#[allow(clippy::disallowed_methods, reason = "a program is searched for as a shell does")]
fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

fn run(command: &mut Command) -> Result<String> {
    let shown = format!("{command:?}");
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {shown}"))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        let tail: Vec<&str> = why.lines().rev().take(5).collect();
        bail!("{shown} ended with {}: {tail:?}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Reads figures from a file that `--json` of any run wrote, or of the same form.
pub(crate) fn from_file(path: &Path) -> Result<Figures> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("--yardstick {shown}"))?;
    let value: Value = serde_json::from_str(&text).with_context(|| format!("--yardstick {shown}: no JSON"))?;
    let rows = value["rows"]
        .as_array()
        .with_context(|| format!("--yardstick {shown}: no list \"rows\""))?;
    let mut figures = Figures::new();
    for (i, row) in rows.iter().enumerate() {
        let read = || -> Result<(Key, f64)> {
            let work = match row["work"].as_str() {
                Some("prefill") => Work::Prefill,
                Some("decode") => Work::Decode,
                _ => bail!("work is {}; \"prefill\" or \"decode\" would be right", row["work"]),
            };
            let number = |name: &str| {
                let value = row[name].as_u64().filter(|&n| n > 0);
                value.with_context(|| format!("{name} is {}; a whole number above 0 would be right", row[name]))
            };
            let (tokens, batch, threads) = (number("tokens")?, number("batch")?, number("threads")?);
            let speed = row["tokens_per_s"].as_f64().filter(|speed| *speed > 0.0);
            let speed = speed.with_context(|| {
                format!(
                    "tokens_per_s is {}; a number above 0 would be right",
                    row["tokens_per_s"]
                )
            })?;
            Ok((Key::new(work, tokens as usize, batch as usize, threads as usize), speed))
        };
        let (key, speed) = read().with_context(|| format!("--yardstick {shown}: rows[{i}]"))?;
        figures.insert(key, speed);
    }
    Ok(figures)
}
