//! `scripts/bench adapters`: what low-rank adapters cost: steps of a model without any, of one that has some and is asked
//! without them, and of sequences that have one each.

use std::path::PathBuf;

use anyhow::Result;
use integration_tests::peft::Adapters;
use model_files::ModelFiles;

use crate::report::median;
use crate::steps::{Unit, load};

const MODULES: &[&str] = &[
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

/// Arguments of `scripts/bench adapters`.
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
    /// Steps of a round that are measured.
    #[arg(long, value_name = "N", default_value_t = 48, value_parser = clap::value_parser!(u32).range(8..=400))]
    steps: u32,
    /// Rounds; each measures all, one after the other.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,
    /// Adapters, of random numbers, on every matrix.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=32))]
    adapters: u32,
    /// Their rank.
    #[arg(long, value_name = "R", default_value_t = 16)]
    rank: usize,
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<()> {
    let names: Vec<String> = (0..args.adapters).map(|i| format!("a{i}")).collect();
    let wanted: Vec<(&str, usize, &[&str])> = names.iter().map(|name| (name.as_str(), args.rank, MODULES)).collect();
    let adapters = Adapters::of_model(&args.model, 0.01, &wanted)?;
    let text = ModelFiles::open(&args.model)?.text()?;
    let prompt = text.tokenizer.encode("Once upon a time there was a")?;
    let unit = |adapters: &[String]| {
        let (loaded, settings) = load(&args.model, args.threads, adapters)?;
        Unit::new(loaded, &settings, prompt.clone())
    };
    let (mut bare, mut fitted) = (unit(&[])?, unit(&adapters.listed())?);
    let each: Vec<Option<u32>> = (0..args.adapters).map(Some).collect();
    for &batch in &args.batches {
        let steps = args.steps as usize;
        let mut times: [Vec<f64>; 4] = Default::default();
        let mut cpu: [Vec<f64>; 4] = Default::default();
        for _ in 0..args.rounds {
            let measured = [
                bare.decode(batch, steps, None, &[None])?,
                fitted.decode(batch, steps, None, &[None])?,
                fitted.decode(batch, steps, None, &each[..1])?,
                fitted.decode(batch, steps, None, &each)?,
            ];
            for (i, (of_steps, of_cpu, _)) in measured.into_iter().enumerate() {
                times[i].extend(of_steps);
                cpu[i].push(of_cpu / steps as f64);
            }
        }
        let times = times.map(median);
        let cpu = cpu.map(median);
        let more = |of: [f64; 4], i: usize| 100.0 * (of[i] / of[0] - 1.0);
        println!(
            "batch {batch}: a step takes {:.3} ms ({:.3} ms of CPU time)",
            times[0], cpu[0]
        );
        let what = [
            "",
            "adapters are there and nobody has one",
            "all sequences have the same",
            "sequences have them in turns",
        ];
        for i in 1..4 {
            println!(
                "  {}: {:.3} ms ({:+.1} %), CPU time {:+.1} %",
                what[i],
                times[i],
                more(times, i),
                more(cpu, i)
            );
        }
    }
    Ok(())
}
