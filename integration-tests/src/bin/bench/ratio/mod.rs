//! `scripts/bench ratio`: how the cores of a machine are best shared out between prefill and decode nodes. Each split runs
//! with real processes, pinned to cores, under the same load; on wish another server runs on the same cores in turn.

mod contender;
mod split;
mod table;
mod watch;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use integration_tests::files::binary;
use integration_tests::{cpu_time, ports};
use runtime::clock::Clock;
use serde_json::{Value, json};

use crate::report::measured;
use contender::{Contender, Ground, Running};
use split::Split;
use table::{Row, Run};

/// What is sent if nothing is said: prompts and answers as long as those of chats, as fast as they are asked for.
const LOAD: &[&str] = &[
    "--dialect",
    "completions",
    "--input-tokens",
    "200-1500",
    "--output-tokens",
    "64-128",
    "--ignore-eos",
    "--requests",
    "40",
    "--slo-ttft-ms",
    "4000",
    "--slo-tpot-ms",
    "50",
];

/// Arguments of the load generator that are given by this program.
const OURS: &[&str] = &["--url", "--rate", "--json", "--seed", "--users", "--time-scale"];

/// Arguments of `scripts/bench ratio`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// GGUF file or model directory; scripts/bench names the default model.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// Splits: P:D (prefill nodes : decode nodes) or both:N [default: all that give each core to one node]
    #[arg(long, value_name = "SPLIT,..", value_delimiter = ',')]
    splits: Vec<Split>,
    /// Cores that are shared out, in this order, evenly, to the prefill nodes first [default: all]
    #[arg(long, value_name = "CORE,..", value_delimiter = ',')]
    cores: Vec<usize>,
    /// Requests a second; all splits are measured at each.
    #[arg(long, value_name = "R,..", value_delimiter = ',', default_value = "0.5,1,2", value_parser = rate)]
    rates: Vec<f64>,
    /// Rounds: each measures all splits at all rates, in turns.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Another server beside them, on all of the cores: llama-server, or a path that ends in it.
    #[arg(long, value_name = "PROGRAM")]
    vs: Option<PathBuf>,
    /// Arguments of the other server, separated by spaces.
    #[arg(
        long,
        value_name = "ARGS",
        default_value = "--parallel 8 -c 16384",
        requires = "vs",
        allow_hyphen_values = true
    )]
    vs_args: String,
    /// Another setting of all processes, SECTION.FIELD=VALUE; may be repeated.
    #[arg(long, value_name = "SETTING")]
    set: Vec<String>,
    /// Write all figures to a file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// What is sent: arguments of `scripts/bench load`, behind `--`. Default: chats of 200 to 1,500 tokens with answers of 64 to
    /// 128, 40 of them, objectives TTFT 4 s and TPOT 50 ms. A trace: `-- --dialect completions --trace FILE --length-scale 0.25 ..`
    #[arg(last = true, value_name = "LOAD ARGUMENTS")]
    load: Vec<String>,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && f64::is_finite(rate) => Ok(rate),
        _ => Err("must be a number above 0".to_owned()),
    }
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<()> {
    measured(args.json.as_deref(), measure(args))
}

async fn measure(args: &Args) -> Result<Value> {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = if args.cores.is_empty() {
        (0..all).collect()
    } else {
        args.cores.clone()
    };
    let load = load_arguments(&args.load)?;
    let contenders = contenders(args, &cores)?;
    let ground = Ground {
        model: args.model.clone(),
        cores,
        settings: args.set.clone(),
        peer_args: args.vs_args.split_whitespace().map(str::to_owned).collect(),
    };
    say_what(&ground, &contenders, &load);
    let (from, used) = (Clock.now(), cpu_time::of_the_machine()?);
    let mut runs: Vec<Vec<Vec<Run>>> = Vec::new();
    runs.resize_with(args.rates.len(), || contenders.iter().map(|_| Vec::new()).collect());
    for round in 0..u64::from(args.rounds) {
        for (i, contender) in contenders.iter().enumerate() {
            for (rate, of_rate) in args.rates.iter().zip(&mut runs) {
                // Started anew for each rate: nothing is cached, and nothing is left over.
                let running = Running::start(contender, &ground).await?;
                let run = one(&running, *rate, round + 1, &load).await;
                let place = || format!("{} at {rate} requests/s\n{}", contender.name(), running.last_words());
                of_rate[i].push(run.with_context(place)?);
            }
        }
    }
    let mut found = Vec::new();
    for (rate, of_rate) in args.rates.iter().zip(&runs) {
        let rows: Vec<Row> = contenders
            .iter()
            .zip(of_rate)
            .map(|(contender, runs)| Row::new(contender.name(), runs))
            .collect();
        table::print(*rate, usize::from(args.rounds), &rows);
        let rows: Vec<Value> = rows.iter().map(Row::json).collect();
        found.push(json!({ "rate": rate, "rows": rows }));
    }
    let machine = (cpu_time::of_the_machine()? - used) / (from.elapsed().as_secs_f64() * all as f64);
    println!(
        "\nbusy %: share of the time in which a node computes a step. exposed: what clients wait for a transfer. limit: the pool\n\
         that has no time left. The coordinator and the load generator run on any core. The machine was {:.0} % busy.",
        100.0 * machine
    );
    Ok(json!({ "load": load, "cores": ground.cores, "rounds": args.rounds, "rates": found }))
}

fn contenders(args: &Args, cores: &[usize]) -> Result<Vec<Contender>> {
    ensure!(!cores.is_empty(), "--cores names no core");
    let splits = if args.splits.is_empty() {
        Split::all_of(cores.len())
    } else {
        args.splits.clone()
    };
    let mut contenders: Vec<Contender> = splits.into_iter().map(Contender::Baton).collect();
    if let Some(program) = &args.vs {
        ensure!(
            program.file_name().is_some_and(|name| name == "llama-server"),
            "--vs {}: only llama-server can be started by this program",
            program.display()
        );
        ensure!(
            args.model.is_file(),
            "--vs llama-server needs a GGUF file as --model; {} is none",
            args.model.display()
        );
        contenders.push(Contender::LlamaServer(program.clone()));
    }
    Ok(contenders)
}

/// What the load generator is asked for, but for what this program decides.
fn load_arguments(given: &[String]) -> Result<Vec<String>> {
    for ours in OURS {
        let is_ours = |argument: &&String| {
            argument
                .strip_prefix(ours)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        };
        if let Some(argument) = given.iter().find(is_ours) {
            anyhow::bail!(
                "{argument} behind `--`: {ours} is chosen by scripts/bench ratio (--rates, --json, --rounds)"
            );
        }
    }
    Ok(match given {
        [] => LOAD.iter().map(|argument| (*argument).to_owned()).collect(),
        given => given.to_vec(),
    })
}

fn say_what(ground: &Ground, contenders: &[Contender], load: &[String]) {
    println!("load: {}", load.join(" "));
    for contender in contenders {
        let Contender::Baton(split) = contender else {
            println!("{}: all cores, {}", contender.name(), ground.peer_args.join(" "));
            continue;
        };
        let places = split.places(&ground.cores);
        let words: Vec<String> = places
            .iter()
            .map(|place| {
                let cores: Vec<String> = place.cores.iter().map(ToString::to_string).collect();
                format!("{}-{} on {}", place.role, place.index, cores.join("+"))
            })
            .collect();
        let crowded = if split.is_crowded(ground.cores.len()) {
            " (nodes share cores!)"
        } else {
            ""
        };
        println!("{split}: {}{crowded}", words.join(", "));
    }
}

/// One run of the load generator; the nodes are watched meanwhile.
async fn one(running: &Running, rate: f64, seed: u64, load: &[String]) -> Result<Run> {
    let report = std::env::temp_dir().join(format!(
        "baton-ratio-{}-{}.json",
        std::process::id(),
        ports::free_tcp()?
    ));
    let mut command = Command::new(binary("load")?);
    command
        .arg("run")
        .args([
            "--url",
            &running.url,
            "--rate",
            &rate.to_string(),
            "--seed",
            &seed.to_string(),
        ])
        .args(["--phases", "--json"])
        .arg(&report)
        .args(load.iter().filter(|argument| *argument != "--phases"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let (finish, end) = tokio::sync::watch::channel(false);
    let generate = async {
        let output = tokio::task::spawn_blocking(move || command.output()).await;
        // Nobody listens only if watching has failed, which is told below.
        finish.send_replace(true);
        output
    };
    let (output, seen) = tokio::join!(generate, watch::watch(running, end));
    let output = output?.context("cannot start the load generator")?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "the load generator has failed: {}",
        words.trim()
    );
    let summary = summary(&report)?;
    Ok(Run { summary, seen: seen? })
}

fn summary(report: &Path) -> Result<Value> {
    let text = std::fs::read(report).with_context(|| format!("no report at {}", report.display()))?;
    // A file of our own in the folder for temporary ones: if it stays there, nothing is lost.
    drop(std::fs::remove_file(report));
    let mut report: Value = serde_json::from_slice(&text)?;
    Ok(report["summary"].take())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_program_decides_cannot_be_given_behind_the_dashes() {
        let words = |given: &[&str]| given.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        for wrong in ["--rate", "--rate=3", "--url", "--json=x"] {
            let error = load_arguments(&words(&["--dialect", "chat", wrong])).expect_err("not to be given");
            assert!(error.to_string().contains(wrong), "{error}");
        }
        let given = words(&["--dialect", "chat", "--rated"]);
        assert_eq!(load_arguments(&given).expect("allowed"), given);
        assert!(!load_arguments(&[]).expect("defaults").is_empty());
    }
}
