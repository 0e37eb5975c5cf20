//! Looks at models: what one is and needs, whether it computes what a reference says; and fetches them from a hub.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use config::{ConfigArgs, HubReference, KvDtypeConfig, ModelConfig, Quantize};
use model::{inspect, verify};
use model_hub::Need;

/// Looks at models, and fetches them. A path may be one on a hub: hf://ORG/NAME or hf://ORG/NAME/FILE.gguf, then @REVISION or
/// not.
#[derive(Parser)]
#[command(name = "model", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Prints the architecture, its sizes, and the memory that it needs.
    Inspect {
        /// A GGUF file or a model directory.
        path: PathBuf,
        /// Tokens of the KV pool; the longest sequence of the model if not given.
        #[arg(long, default_value_t = 0)]
        tokens: usize,
        /// Tokens of a KV block.
        #[arg(long, default_value_t = 16, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=65_536))]
        block_tokens: usize,
        /// Element type of the KV cache.
        #[arg(long, value_enum, default_value_t = Dtype::F16)]
        kv_dtype: Dtype,
        /// With the rotary embeddings for long texts, as the setting model.long_texts.
        #[arg(long)]
        long_texts: bool,
        /// What matrices of floats become at loading, as model.quantize says it.
        #[arg(long, default_value = "none", value_parser = parse_quantize)]
        quantize: Quantize,
    },
    /// Fetches a model from a hub, as far as it is not in the cache, and prints where it is. By the settings of the servers
    /// (model.hub_cache_dir, model.hub_token_file, ...).
    Fetch {
        /// hf://ORG/NAME or hf://ORG/NAME/FILE.gguf, then @REVISION or not.
        reference: String,
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Runs a model in float32 against the outputs of a reference; fails if they differ.
    Verify {
        /// A GGUF file or a model directory.
        path: PathBuf,
        /// The reference's outputs; `golden.json` in the model directory if not given.
        #[arg(long)]
        golden: Option<PathBuf>,
        /// Largest difference of a logit or log-probability.
        #[arg(long, default_value_t = 1e-3)]
        tolerance: f64,
        /// Threads that compute.
        #[arg(long, default_value_t = 1)]
        threads: usize,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Dtype {
    F16,
    Bf16,
    F32,
    Int8,
}

impl From<Dtype> for KvDtypeConfig {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F16 => Self::F16,
            Dtype::Bf16 => Self::Bf16,
            Dtype::F32 => Self::F32,
            Dtype::Int8 => Self::Int8,
        }
    }
}

/// The path of a model that may be on a hub.
fn local(path: PathBuf) -> anyhow::Result<PathBuf> {
    match path.to_str() {
        Some(reference) if HubReference::is_meant(reference) => {
            fetch(reference, &config::load(&ConfigArgs::default())?)
        }
        _ => Ok(path),
    }
}

fn fetch(reference: &str, config: &config::Config) -> anyhow::Result<PathBuf> {
    let reference = HubReference::parse(reference).map_err(anyhow::Error::msg)?;
    Ok(model_hub::fetch_blocking(&reference, &config.model, Need::Whole)?.path)
}

fn parse_quantize(word: &str) -> Result<Quantize, String> {
    let found = Quantize::ALL.into_iter().find(|kind| kind.as_str() == word);
    found.ok_or_else(|| {
        format!(
            "one of {} would be right",
            Quantize::ALL.map(Quantize::as_str).join(", ")
        )
    })
}

#[allow(clippy::print_stdout, reason = "what is printed is the result")]
fn run(cli: Cli) -> anyhow::Result<bool> {
    match cli.command {
        Command::Inspect {
            path,
            tokens,
            block_tokens,
            kv_dtype,
            long_texts,
            quantize,
        } => {
            let path = local(path)?;
            let model = ModelConfig {
                kv_dtype: kv_dtype.into(),
                quantize,
                long_texts,
                ..ModelConfig::default()
            };
            print!("{}", inspect::inspect(&path, &model, block_tokens, tokens)?);
            Ok(true)
        }
        Command::Fetch { reference, config } => {
            let settings = config::load(&config)?;
            match config.answer(&settings)? {
                Some(answer) => print!("{answer}"),
                None => println!("{}", fetch(&reference, &settings)?.display()),
            }
            Ok(true)
        }
        Command::Verify {
            path,
            golden,
            tolerance,
            threads,
        } => {
            let path = local(path)?;
            let golden = golden.unwrap_or_else(|| path.join("golden.json"));
            let checks = verify::verify(&path, &golden, threads)?;
            for check in &checks {
                println!(
                    "{} tokens: largest differences {:.6} at the last position, {:.6} in the prompt, {:.6} in the answer; \
                     {} tokens of the answer agree, {} must: {}",
                    check.tokens,
                    check.last,
                    check.prompt,
                    check.answer,
                    check.agreed,
                    check.sure,
                    if check.passes(tolerance) { "ok" } else { "DIFFERENT" }
                );
            }
            Ok(checks.iter().all(|check| check.passes(tolerance)))
        }
    }
}

#[allow(clippy::print_stderr, reason = "the program's own words")]
fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    match run(cli) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("model: {error:#}");
            ExitCode::from(2)
        }
    }
}
