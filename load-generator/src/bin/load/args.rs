//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde_json::{Map, Value};

use load_generator::workload::Lengths;

/// Sends load to a server that speaks TGI's or OpenAI's dialects, ours or another, and says what its clients see.
///
/// Without the name of a command, `run` is meant: scripts/bench load --url URL --dialect chat --rate 2 --requests 100
#[derive(Parser, Debug)]
#[command(name = "scripts/bench load")]
pub(crate) struct Cli {
    /// What is done.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What can be done.
#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Sends requests and says what became of them. This is what is meant where no command is named.
    Run(Box<RunArgs>),
    /// Finds goodput: the highest rate at which enough requests meet their objectives.
    Sweep(Box<SweepArgs>),
    /// Sends prompts beside running streams of a running server and reports the worst gap. (`scripts/bench interfere` starts
    /// nodes of its own, pins them to cores and measures them from within.)
    Interfere(Box<InterfereArgs>),
    /// Two runs beside each other, from their --json files.
    Compare(CompareArgs),
    /// Measures this program against a server that costs next to nothing: requests a second, CPU share, lateness.
    #[command(name = "self")]
    Own(OwnArgs),
    /// The server that `self` is measured against.
    #[command(hide = true)]
    NullServer(NullArgs),
}

impl Cli {
    /// Reads a command line: the program's name, then arguments. Without a command it is a run.
    pub(crate) fn read(arguments: impl Iterator<Item = OsString>) -> Result<Self, clap::Error> {
        let mut arguments: Vec<OsString> = arguments.collect();
        let first = arguments.get(1).and_then(|first| first.to_str()).unwrap_or("--help");
        // A word is a command, right or wrong; an option, other than those of the program itself, is one of a run.
        if first.starts_with('-') && !["-h", "--help"].contains(&first) {
            arguments.insert(1, "run".into());
        }
        Self::try_parse_from(arguments)
    }
}

/// Ways to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DialectArg {
    /// POST /generate (TGI): whole answers.
    Generate,
    /// POST /generate_stream (TGI).
    #[value(name = "generate_stream")]
    GenerateStream,
    /// POST /v1/completions (OpenAI), streamed.
    Completions,
    /// POST /v1/chat/completions (OpenAI), streamed.
    Chat,
}

/// Processes of arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ArrivalsArg {
    /// Independent of each other.
    Poisson,
    /// In bursts, or more evenly: see --burstiness.
    Gamma,
    /// Evenly.
    Constant,
}

/// Where requests go.
#[derive(Args, Debug, Clone)]
pub(crate) struct TargetArgs {
    /// The server, like http://127.0.0.1:8080; a path in it comes before the dialect's own.
    #[arg(long, value_name = "URL")]
    pub(crate) url: String,
    /// How it is asked.
    #[arg(long, value_name = "DIALECT", value_enum)]
    pub(crate) dialect: DialectArg,
    /// Name of the model, for OpenAI's dialects; without it the first that the server lists.
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// Sent as `Authorization: Bearer KEY`.
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    /// A further header; may be repeated.
    #[arg(long = "header", value_name = "NAME:VALUE", value_parser = header)]
    pub(crate) headers: Vec<(String, String)>,
    /// PEM file of authorities to trust for https, instead of the system's.
    #[arg(long, value_name = "FILE")]
    pub(crate) ca_cert: Option<PathBuf>,
    /// Further members of each body, a JSON object: '{"temperature": 0}'. Objects in it are merged with those that are there.
    #[arg(long, value_name = "JSON", value_parser = object)]
    pub(crate) extra: Option<Object>,
    /// Asks the server where the time of each answer went (`X-Baton-Phases: 1`). Times of a `Server-Timing` header are read without
    /// it, too.
    #[arg(long)]
    pub(crate) phases: bool,
    /// Generation goes on behind an end token, so that answers have the length that was asked for (completions, chat; a
    /// parameter of servers of open models).
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Longest time of a request, from when it was meant to be sent, in seconds.
    #[arg(long, value_name = "S", default_value = "600", value_parser = positive)]
    pub(crate) timeout_s: f64,
}

/// What is asked.
#[derive(Args, Debug, Clone)]
pub(crate) struct WorkArgs {
    /// Tokens of prompts: a number, or a range like 200-1500, evenly distributed [default: 256]
    #[arg(long, value_name = "N|A-B", conflicts_with_all = ["trace", "prompts"])]
    pub(crate) input_tokens: Option<Lengths>,
    /// Tokens to ask for [default: 64]
    #[arg(long, value_name = "N|A-B", conflicts_with = "trace")]
    pub(crate) output_tokens: Option<Lengths>,
    /// Prompts from a file: one a line, or of FILE.jsonl {"prompt": .., "max_tokens": ..}; taken in order, again and again.
    #[arg(long, value_name = "FILE", conflicts_with = "trace")]
    pub(crate) prompts: Option<PathBuf>,
    /// Lengths, times and shared prefixes of a trace: Azure's CSV or Mooncake's JSON lines.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Multiplies the trace's times: 2 is half the rate. (--rate R stretches them to a mean rate instead.) [default: 1]
    #[arg(long, value_name = "F", requires = "trace", value_parser = positive)]
    pub(crate) time_scale: Option<f64>,
    /// Multiplies the trace's lengths, blocks of shared prefixes with them.
    #[arg(long, value_name = "F", requires = "trace", default_value = "1", value_parser = positive)]
    pub(crate) length_scale: f64,
    /// Longest prompt of a trace, after scaling; longer ones are cut.
    #[arg(long, value_name = "N", requires = "trace", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_input_tokens: Option<u32>,
    /// Longest answer of a trace, after scaling; longer ones are cut.
    #[arg(long, value_name = "N", requires = "trace", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_output_tokens: Option<u32>,
    /// Keeps a trace's times on their grid of 3 s (Mooncake) instead of spreading them.
    #[arg(long, requires = "trace")]
    pub(crate) bursts: bool,
    /// The process of arrivals [default: poisson, or the trace's times]
    #[arg(long, value_name = "PROCESS", value_enum)]
    pub(crate) arrivals: Option<ArrivalsArg>,
    /// Shape of gamma arrivals: 1 is Poisson, less is more bursty.
    #[arg(long, value_name = "B", value_parser = positive)]
    pub(crate) burstiness: Option<f64>,
    /// Number of requests [default: 100, or all of a trace; with --duration-s: as many as come]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub(crate) requests: Option<u64>,
    /// Sends no request after so many seconds.
    #[arg(long, value_name = "S", value_parser = positive)]
    pub(crate) duration_s: Option<f64>,
    /// Decides arrivals, lengths and words.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Requests sent before, and not counted.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u64).range(0..=100_000))]
    pub(crate) warmup: u64,
    /// Most requests that are open at once; more wait, and count as sent late [default: 4096, or as many files as may be open]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_open: Option<u32>,
}

/// What a request must keep to.
#[derive(Args, Debug, Clone, Copy)]
pub(crate) struct SloArgs {
    /// Objective of a request: its time to the first token.
    #[arg(long, value_name = "MS", value_parser = positive)]
    pub(crate) slo_ttft_ms: Option<f64>,
    /// Objective of a request: its mean time for each token after the first.
    #[arg(long, value_name = "MS", value_parser = positive)]
    pub(crate) slo_tpot_ms: Option<f64>,
    /// Objective of a request: its longest time between two tokens.
    #[arg(long, value_name = "MS", value_parser = positive)]
    pub(crate) slo_gap_ms: Option<f64>,
    /// Objective of a request: its time to the end.
    #[arg(long, value_name = "MS", value_parser = positive)]
    pub slo_e2e_ms: Option<f64>,
}

/// Where results go.
#[derive(Args, Debug, Clone)]
pub(crate) struct OutArgs {
    /// Writes all figures as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Writes a page with figures and plots that needs nothing else.
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
}

/// A run.
#[derive(Args, Debug, Clone)]
pub(crate) struct RunArgs {
    /// Where.
    #[command(flatten)]
    pub(crate) target: TargetArgs,
    /// What.
    #[command(flatten)]
    pub(crate) work: WorkArgs,
    /// Requests a second, sent whether or not answers come (open loop).
    #[arg(long, value_name = "R", value_parser = positive, conflicts_with = "time_scale")]
    pub(crate) rate: Option<f64>,
    /// Users who each wait for their answer before they ask again (closed loop), instead of a rate.
    #[arg(long, value_name = "K", conflicts_with_all = ["rate", "arrivals", "time_scale"], value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) users: Option<u32>,
    /// Whole answers instead of streamed ones (completions, chat).
    #[arg(long)]
    pub(crate) whole: bool,
    /// Objectives.
    #[command(flatten)]
    pub(crate) slo: SloArgs,
    /// Results.
    #[command(flatten)]
    pub(crate) out: OutArgs,
    /// Writes a line for each request.
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
}

/// A sweep.
#[derive(Args, Debug, Clone)]
pub(crate) struct SweepArgs {
    /// Where.
    #[command(flatten)]
    pub(crate) target: TargetArgs,
    /// What each run asks.
    #[command(flatten)]
    pub(crate) work: WorkArgs,
    /// Objectives; at least one.
    #[command(flatten)]
    pub(crate) slo: SloArgs,
    /// Results.
    #[command(flatten)]
    pub(crate) out: OutArgs,
    /// The first rate, in requests a second; it is doubled or halved until the goodput lies between two.
    #[arg(long, value_name = "R", default_value = "1", value_parser = positive)]
    pub(crate) start_rate: f64,
    /// Share of requests that must meet their objectives.
    #[arg(long, value_name = "SHARE", default_value = "0.9", value_parser = share)]
    pub(crate) attain: f64,
    /// Ends when the lowest rate that is too high is so near the highest that is not: 0.1 is a tenth above it.
    #[arg(long, value_name = "P", default_value = "0.1", value_parser = positive)]
    pub(crate) precision: f64,
    /// Runs at most.
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) max_runs: u32,
}

/// Prompts beside streams.
#[derive(Args, Debug, Clone)]
pub(crate) struct InterfereArgs {
    /// Where.
    #[command(flatten)]
    pub(crate) target: TargetArgs,
    /// Results.
    #[command(flatten)]
    pub(crate) out: OutArgs,
    /// Streams that run.
    #[arg(long, value_name = "K", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) streams: u32,
    /// Tokens of the streams' prompts.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) stream_input: u32,
    /// Tokens after which a stream ends and is begun again.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..=10_000_000))]
    pub(crate) stream_tokens: u32,
    /// Lengths of the prompts that are sent beside them, in tokens.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "256,512,1024", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) prompt_tokens: Vec<u32>,
    /// Tokens that those ask for.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub(crate) prompt_output: u32,
    /// Times that each length is sent.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) repeats: u32,
    /// Time without a prompt before each, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub(crate) calm_ms: u64,
    /// Decides the words.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
}

/// Two files.
#[derive(Args, Debug, Clone)]
pub(crate) struct CompareArgs {
    /// The first run's --json file.
    #[arg(value_name = "A.json")]
    pub(crate) a: PathBuf,
    /// The second run's.
    #[arg(value_name = "B.json")]
    pub(crate) b: PathBuf,
}

/// This program itself.
#[derive(Args, Debug, Clone)]
pub(crate) struct OwnArgs {
    /// Users that ask at once, for the most requests a second.
    #[arg(long, value_name = "K", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) users: u32,
    /// Streams that begin in a second, for the CPU share.
    #[arg(long, value_name = "R", default_value = "1000", value_parser = positive)]
    pub(crate) streams_per_s: f64,
    /// Tokens of each stream.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) tokens: u32,
    /// Time between the tokens of a stream, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=60_000))]
    pub(crate) gap_ms: u64,
    /// Length of each measurement, in seconds.
    #[arg(long, value_name = "S", default_value = "5", value_parser = positive)]
    pub(crate) seconds: f64,
    /// Writes the figures as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// The null server.
#[derive(Args, Debug, Clone)]
pub(crate) struct NullArgs {
    /// Port on loopback; 0 for a free one.
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    /// Time to the first token, in milliseconds.
    #[arg(long, default_value_t = 0)]
    pub(crate) first_ms: u64,
    /// Time between tokens, in milliseconds.
    #[arg(long, default_value_t = 0)]
    pub(crate) gap_ms: u64,
}

/// A JSON object on the command line.
#[derive(Clone, Debug)]
pub(crate) struct Object(pub(crate) Map<String, Value>);

fn object(text: &str) -> Result<Object, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(Object(object)),
        Ok(_) => Err("it must be a JSON object, like '{\"temperature\": 0}'".to_owned()),
        Err(error) => Err(format!(
            "{error}; it must be a JSON object, like '{{\"temperature\": 0}}'"
        )),
    }
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("it must be NAME:VALUE")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text
        .parse::<f64>()
        .ok()
        .filter(|number| number.is_finite() && *number > 0.0 && *number <= 1e9);
    number.ok_or_else(|| "it must be a number above 0, at most 1e9".to_owned())
}

fn share(text: &str) -> Result<f64, String> {
    let number = text
        .parse::<f64>()
        .ok()
        .filter(|number| *number > 0.0 && *number <= 1.0);
    number.ok_or_else(|| "it must be a share above 0, at most 1: 0.9 for 90 %".to_owned())
}
