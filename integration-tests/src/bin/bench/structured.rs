//! `scripts/bench structured`: what a JSON schema costs per token: the mask alone, and steps of sequences with it beside
//! steps of sequences without.

use std::path::PathBuf;

use anyhow::Result;
use grammar::{Grammars, Vocabulary};
use model_files::ModelFiles;
use protocol::sampling::Grammar;
use runtime::clock::Clock;

use crate::report::median;
use crate::steps::{Unit, load, millis};

/// A list that never has enough entries, of records with members of all kinds.
const SCHEMA: &str = r#"{"type":"array","minItems":5000,"items":{"type":"object","properties":{
    "name":{"type":"string","maxLength":40},"count":{"type":"integer","minimum":0,"maximum":9999},"ratio":{"type":"number"},
    "kind":{"enum":["small","medium","large"]},"tags":{"type":"array","items":{"type":"string","maxLength":12},"maxItems":4},
    "note":{"anyOf":[{"type":"string","maxLength":60},{"type":"null"}]}},
    "required":["name","count","ratio","kind","tags","note"],"additionalProperties":false}}"#;

/// Arguments of `scripts/bench structured`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// GGUF file or model directory; scripts/bench names the default model.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Compute threads.
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,
    /// Sequences of a step.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "1,8")]
    batches: Vec<usize>,
    /// Steps that are measured, each with and without the schema.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(8..=400))]
    steps: u32,
    /// Rounds; each measures both, one after the other.
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<()> {
    let (loaded, settings) = load(&args.model, args.threads, &[])?;
    let text = ModelFiles::open(&args.model)?.text()?;
    let prompt = text.tokenizer.encode("A list of things in the shed, as JSON:\n")?;
    let grammar = Grammar::JsonSchema(SCHEMA.to_owned());
    let compiled = Clock.now();
    loaded.grammars.prepare(&grammar)?;
    println!("vocabulary and schema: {:.1} ms, once", millis(compiled.elapsed()));
    let fresh = Grammars::new(Vocabulary::Text(Box::new(text)));
    fresh.prepare(&Grammar::Regex("a".to_owned()))?;
    let compiled = Clock.now();
    fresh.prepare(&grammar)?;
    println!("the schema alone: {:.1} ms", millis(compiled.elapsed()));
    let mut unit = Unit::new(loaded, &settings, prompt)?;
    for &batch in &args.batches {
        compare(&mut unit, batch, args, &grammar, &fresh)?;
    }
    Ok(())
}

fn compare(unit: &mut Unit, batch: usize, args: &Args, grammar: &Grammar, fresh: &Grammars) -> Result<()> {
    let steps = args.steps as usize;
    let (mut free, mut held, mut cpu_free, mut cpu_held) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut output = Vec::new();
    for _ in 0..args.rounds {
        let (times, cpu, _) = unit.decode(batch, steps, None, &[None])?;
        free.extend(times);
        cpu_free.push(cpu);
        let (times, cpu, tokens) = unit.decode(batch, steps, Some(grammar), &[None])?;
        held.extend(times);
        cpu_held.push(cpu);
        output = tokens;
    }
    let (free, held) = (median(free), median(held));
    let cpu = (median(cpu_held) - median(cpu_free)) / (batch * steps) as f64;
    println!(
        "batch {batch}: a step takes {free:.3} ms, with the schema {held:.3} ms ({:+.1} %): {:+.1} us a token; CPU time of \
         all threads {:+.1} us a token",
        100.0 * (held / free - 1.0),
        1e3 * (held - free) / batch as f64,
        1e3 * cpu
    );
    let mut state = fresh.start(grammar)?;
    let mut masks = Vec::new();
    for at in 0..output.len() {
        let start = Clock.now();
        state.mask(&output[..at])?;
        masks.push(1e3 * millis(start.elapsed()));
    }
    let largest = masks.iter().copied().fold(0.0, f64::max);
    println!(
        "  the mask alone: median {:.1} us, largest {largest:.1} us, mean {:.1} us of {} tokens",
        median(masks.clone()),
        masks.iter().sum::<f64>() / masks.len() as f64,
        masks.len()
    );
    Ok(())
}
