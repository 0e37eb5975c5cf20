//! `scripts/bench stops`: what stop strings cost while tokens are generated. The same answer with and without them, in
//! turns, so that both see the same machine.
//!
//! Two kinds of stop strings: some that have nothing to do with the answer, and some that begin as the answer goes on and
//! part from it at their last character, so that text is held back nearly all the time. What a request costs before its
//! first token (reading the strings, building the automaton) is told apart: every answer is asked for twice, with few
//! tokens and with many, and the difference is the time of decoding.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use integration_tests::client::post_ok;
use integration_tests::cluster::{Cluster, ClusterSpec};
use reqwest::Client;
use runtime::clock::Clock;
use serde_json::{Value, json};

const NAME: &str = "bench";
/// Tokens of the short answers.
const FEW: u32 = 8;
/// A character of a stop string that never comes up in an answer.
const STRANGE: char = '\u{e000}';

/// Arguments of `scripts/bench stops`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// GGUF file or model directory; scripts/bench names the default model.
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// How many stop strings.
    #[arg(long, default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(1..=1_024))]
    strings: u32,
    /// Characters of each.
    #[arg(long, default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(8..=1_024))]
    chars: u32,
    /// Tokens of an answer.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(16..=4_096))]
    tokens: u32,
    /// How often each kind of request is sent.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rounds: u32,
    /// Another setting of all processes, SECTION.FIELD=VALUE; may be repeated.
    #[arg(long, value_name = "SETTING")]
    set: Vec<String>,
}

/// Measures and prints.
pub(crate) fn run(args: &Args) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(measure(args))
}

async fn measure(args: &Args) -> Result<()> {
    let total = args.strings * args.chars;
    let mut spec = ClusterSpec::pair(args.model.clone())
        .set(format!("model.model_name={NAME}"))
        .set(format!("limits.max_stop_total_chars={total}"))
        .set(format!("limits.max_iter_times={}", args.tokens));
    spec.settings.extend(args.set.iter().cloned());
    let mut cluster = Cluster::without_nodes(spec)?;
    cluster.start_coordinator()?;
    cluster.start_node("prefill", 0)?;
    cluster.start_node("decode", 0)?;
    cluster.ready().await?;
    let asker = Asker {
        client: Client::new(),
        url: format!("{}/v1/completions", cluster.url()),
    };
    let (text, _) = asker.ask(args.tokens, &json!([])).await?;
    let kinds = [
        ("no stop strings", json!([])),
        ("strings of other text", strange(args)),
        ("strings of this text", alike(args, &text)),
    ];
    let mut times: [Vec<Times>; 3] = Default::default();
    for _ in 0..args.rounds {
        for ((name, stop), times) in kinds.iter().zip(&mut times) {
            let (_, few) = asker.ask(FEW, stop).await?;
            let (same, many) = asker.ask(args.tokens, stop).await?;
            ensure!(same == text, "{name}: another answer than without stop strings");
            times.push(Times { few, many });
        }
    }
    println!(
        "{} stop strings of {} characters, {} tokens, medians of {} answers in turns",
        args.strings, args.chars, args.tokens, args.rounds
    );
    let per_token = |times: &[Times]| median(times, |of| of.many - of.few) / f64::from(args.tokens - FEW);
    let without = per_token(&times[0]);
    for ((name, _), times) in kinds.iter().zip(&times) {
        println!(
            "{name:<24} {:>8.1} ms for {FEW} tokens, then {:>8.4} ms a token: {:>6.4} of that without",
            median(times, |of| of.few),
            per_token(times),
            per_token(times) / without
        );
    }
    Ok(())
}

/// Of two answers to one request, in milliseconds.
struct Times {
    few: f64,
    many: f64,
}

struct Asker {
    client: Client,
    url: String,
}

impl Asker {
    /// The text of the answer, and the time it took in milliseconds.
    async fn ask(&self, tokens: u32, stop: &Value) -> Result<(String, f64)> {
        let body = json!({
            "model": NAME, "prompt": "The old town lies between two rivers, and", "temperature": 0, "ignore_eos": true,
            "max_tokens": tokens, "stop": stop,
        });
        let start = Clock.now();
        let answer = post_ok(&self.client, &self.url, &body).await?;
        let time = (Clock.now() - start).as_secs_f64() * 1e3;
        let text = answer["choices"][0]["text"].as_str().context("a text")?.to_owned();
        Ok((text, time))
    }
}

/// Strings that begin like nothing in an answer.
fn strange(args: &Args) -> Value {
    let string = |index: u32| {
        let filler = args.chars as usize - 6;
        format!("{STRANGE}{index:05}{}", "x".repeat(filler))
    };
    json!((0..args.strings).map(string).collect::<Vec<_>>())
}

/// Strings that are pieces of the answer but for their last character.
fn alike(args: &Args, text: &str) -> Value {
    let chars: Vec<char> = text.chars().collect();
    let string = |index: u32| {
        let from = index as usize % chars.len().max(1);
        let piece = chars.iter().cycle().skip(from).take(args.chars as usize - 1);
        piece.chain(&[STRANGE]).collect::<String>()
    };
    json!((0..args.strings).map(string).collect::<Vec<_>>())
}

fn median(times: &[Times], of: impl Fn(&Times) -> f64) -> f64 {
    let mut all: Vec<f64> = times.iter().map(of).collect();
    all.sort_unstable_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or_default()
}
