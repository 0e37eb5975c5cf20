//! What the arguments of the command line come to, and which do not go together.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueEnum;
use serde_json::{Map, Value, json};

use crate::args::{ArrivalsArg, DialectArg, InterfereArgs, RunArgs, SloArgs, SweepArgs, TargetArgs, WorkArgs};
use load_generator::client::Target;
use load_generator::core::arrivals::Process;
use load_generator::core::dialect::Dialect;
use load_generator::core::record::Slo;
use load_generator::core::trace::Scaling;
use load_generator::workload::{FileError, Lengths, Pace, Replay, Source, Workload, read_prompts, read_trace};

/// Requests of a run that names neither their number nor a duration.
const REQUESTS: u64 = 100;

/// Arguments that do not go together.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UsageError {
    /// In words.
    #[error("{0}")]
    Words(String),
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
}

fn usage(words: impl Into<String>) -> UsageError {
    UsageError::Words(words.into())
}

impl DialectArg {
    /// What it stands for.
    pub(crate) fn dialect(self) -> Dialect {
        match self {
            Self::Generate => Dialect::Generate,
            Self::GenerateStream => Dialect::GenerateStream,
            Self::Completions => Dialect::Completions,
            Self::Chat => Dialect::Chat,
        }
    }
}

impl TargetArgs {
    /// Where requests go.
    pub(crate) fn target(&self) -> Target {
        let asks = self.phases.then(|| ("X-Baton-Phases".to_owned(), "1".to_owned()));
        Target {
            url: self.url.clone(),
            api_key: self.api_key.clone(),
            headers: self.headers.iter().cloned().chain(asks).collect(),
            ca_cert: self.ca_cert.clone(),
            timeout: Duration::from_secs_f64(self.timeout_s),
        }
    }

    /// Whether answers come as events, unless they are asked for whole. Errors where an argument has no meaning.
    pub(crate) fn streamed(&self, whole: bool) -> Result<bool, UsageError> {
        let dialect = self.dialect.dialect();
        if self.ignore_eos && !dialect.is_openai() {
            return Err(usage(format!(
                "--ignore-eos: {} has no such parameter; it must be completions or chat",
                dialect.name()
            )));
        }
        if whole && !dialect.is_openai() {
            let right = "--dialect generate has whole answers, generate_stream streamed ones";
            return Err(usage(format!("--whole is for completions and chat; {right}")));
        }
        Ok(!whole && dialect != Dialect::Generate)
    }

    fn settings(&self, settings: &mut Map<String, Value>) {
        settings.insert("url".to_owned(), json!(self.url));
        settings.insert("dialect".to_owned(), json!(self.dialect.dialect().name()));
        settings.insert("ignore_eos".to_owned(), json!(self.ignore_eos));
        settings.insert("phases".to_owned(), json!(self.phases));
        settings.insert("extra".to_owned(), json!(self.extra.as_ref().map(|object| &object.0)));
        settings.insert("timeout_s".to_owned(), json!(self.timeout_s));
    }
}

impl SloArgs {
    /// The objectives. Errors where answers that are not streamed cannot be judged by them.
    pub(crate) fn slo(self, streamed: bool) -> Result<Slo, UsageError> {
        let of_tokens = [
            ("--slo-ttft-ms", self.slo_ttft_ms),
            ("--slo-tpot-ms", self.slo_tpot_ms),
            ("--slo-gap-ms", self.slo_gap_ms),
        ];
        if let Some((name, Some(value))) = of_tokens.into_iter().find(|(_, value)| !streamed && value.is_some()) {
            return Err(usage(format!(
                "{name} {value}: whole answers show no tokens; it must be --slo-e2e-ms, or a streamed dialect"
            )));
        }
        Ok(Slo {
            ttft_ms: self.slo_ttft_ms,
            tpot_ms: self.slo_tpot_ms,
            gap_ms: self.slo_gap_ms,
            e2e_ms: self.slo_e2e_ms,
        })
    }
}

impl WorkArgs {
    fn process(&self) -> Result<Option<Process>, UsageError> {
        match (self.arrivals, self.burstiness) {
            (Some(ArrivalsArg::Gamma), Some(shape)) => Ok(Some(Process::Gamma(shape))),
            (Some(ArrivalsArg::Gamma), None) => {
                Err(usage("--arrivals gamma needs --burstiness B, above 0; 1 is Poisson"))
            }
            (_, Some(shape)) => Err(usage(format!("--burstiness {shape} is for --arrivals gamma"))),
            (Some(ArrivalsArg::Poisson), None) => Ok(Some(Process::Poisson)),
            (Some(ArrivalsArg::Constant), None) => Ok(Some(Process::Constant)),
            (None, None) => Ok(None),
        }
    }

    /// The workload at a rate, with so many users, or at the trace's own times; also what is worth knowing of it.
    pub(crate) fn workload(
        &self,
        rate: Option<f64>,
        users: Option<u32>,
    ) -> Result<(Workload, Vec<String>), UsageError> {
        let process = self.process()?;
        let pace = match (users, rate, process) {
            (Some(users), _, None) => Pace::Users(users as usize),
            (Some(_), _, Some(_)) => return Err(usage("--burstiness is for a rate, not for --users")),
            (None, Some(rate), Some(process)) => Pace::Process(process, rate),
            (None, Some(rate), None) if self.trace.is_none() => Pace::Process(Process::Poisson, rate),
            (None, _, None) if self.trace.is_some() => Pace::Trace,
            (None, None, _) | (None, Some(_), None) => {
                return Err(usage(
                    "how often are requests sent? Give --rate R (requests a second), --users K, or --trace FILE",
                ));
            }
        };
        let output = self.output_tokens.unwrap_or(Lengths { from: 64, to: 64 });
        let mut notes = Vec::new();
        let source = if let Some(path) = &self.trace {
            let scaling = Scaling {
                time: self.time_scale.unwrap_or(1.0),
                length: self.length_scale,
                max_input: self.max_input_tokens.unwrap_or(u32::MAX),
                max_output: self.max_output_tokens.unwrap_or(u32::MAX),
            };
            let replay = Replay {
                scaling,
                rate: rate.filter(|_| pace == Pace::Trace),
                bursts: self.bursts,
                seed: self.seed,
            };
            let (trace, words) = read_trace(path, &replay)?;
            notes.extend(words);
            Source::Trace(Arc::new(trace))
        } else if let Some(path) = &self.prompts {
            Source::Given {
                prompts: read_prompts(path)?,
                output,
            }
        } else {
            let input = self.input_tokens.unwrap_or(Lengths { from: 256, to: 256 });
            Source::Synthetic { input, output }
        };
        let endless = self.trace.is_none() && self.duration_s.is_none();
        let workload = Workload {
            source,
            pace,
            requests: self.requests.or(endless.then_some(REQUESTS)),
            duration: self.duration_s.map(Duration::from_secs_f64),
            seed: self.seed,
            round: 0,
        };
        Ok((workload, notes))
    }

    fn settings(&self, settings: &mut Map<String, Value>) {
        let path = |path: &Option<PathBuf>| json!(path.as_ref().map(|path| path.display().to_string()));
        let synthetic = self.trace.is_none();
        let lengths = |given: &Option<Lengths>, default: u32| {
            let default = Lengths {
                from: default,
                to: default,
            };
            json!(synthetic.then(|| given.unwrap_or(default).to_string()))
        };
        let prompts = self.prompts.is_some();
        settings.insert(
            "input_tokens".to_owned(),
            if prompts {
                Value::Null
            } else {
                lengths(&self.input_tokens, 256)
            },
        );
        settings.insert("output_tokens".to_owned(), lengths(&self.output_tokens, 64));
        settings.insert("prompts".to_owned(), path(&self.prompts));
        settings.insert("trace".to_owned(), path(&self.trace));
        settings.insert("time_scale".to_owned(), json!(self.time_scale));
        settings.insert(
            "length_scale".to_owned(),
            json!((!synthetic).then_some(self.length_scale)),
        );
        settings.insert("max_input_tokens".to_owned(), json!(self.max_input_tokens));
        settings.insert("max_output_tokens".to_owned(), json!(self.max_output_tokens));
        settings.insert("bursts".to_owned(), json!(self.bursts));
        let arrivals = self.arrivals.and_then(|arrivals| arrivals.to_possible_value());
        settings.insert(
            "arrivals".to_owned(),
            json!(arrivals.map(|value| value.get_name().to_owned())),
        );
        settings.insert("burstiness".to_owned(), json!(self.burstiness));
        settings.insert("requests".to_owned(), json!(self.requests));
        settings.insert("duration_s".to_owned(), json!(self.duration_s));
        settings.insert("seed".to_owned(), json!(self.seed));
        settings.insert("warmup".to_owned(), json!(self.warmup));
        settings.insert("max_open".to_owned(), json!(self.max_open));
    }
}

impl RunArgs {
    /// What was asked for, by the names of the arguments. Keys and headers stay out: reports are passed on.
    pub(crate) fn settings(&self) -> Map<String, Value> {
        let mut settings = Map::new();
        self.target.settings(&mut settings);
        self.work.settings(&mut settings);
        settings.insert("rate".to_owned(), json!(self.rate));
        settings.insert("users".to_owned(), json!(self.users));
        settings.insert("whole".to_owned(), json!(self.whole));
        settings
    }
}

impl SweepArgs {
    /// What was asked for, by the names of the arguments.
    pub(crate) fn settings(&self) -> Map<String, Value> {
        let mut settings = Map::new();
        self.target.settings(&mut settings);
        self.work.settings(&mut settings);
        for (name, value) in [
            ("start_rate", json!(self.start_rate)),
            ("attain", json!(self.attain)),
            ("precision", json!(self.precision)),
            ("max_runs", json!(self.max_runs)),
            ("slo_ttft_ms", json!(self.slo.slo_ttft_ms)),
            ("slo_tpot_ms", json!(self.slo.slo_tpot_ms)),
            ("slo_gap_ms", json!(self.slo.slo_gap_ms)),
            ("slo_e2e_ms", json!(self.slo.slo_e2e_ms)),
        ] {
            settings.insert(name.to_owned(), value);
        }
        settings
    }
}

impl InterfereArgs {
    /// What was asked for, by the names of the arguments.
    pub(crate) fn settings(&self) -> Map<String, Value> {
        let mut settings = Map::new();
        self.target.settings(&mut settings);
        for (name, value) in [
            ("streams", json!(self.streams)),
            ("stream_input", json!(self.stream_input)),
            ("stream_tokens", json!(self.stream_tokens)),
            ("prompt_tokens", json!(self.prompt_tokens)),
            ("prompt_output", json!(self.prompt_output)),
            ("repeats", json!(self.repeats)),
            ("calm_ms", json!(self.calm_ms)),
            ("seed", json!(self.seed)),
        ] {
            settings.insert(name.to_owned(), value);
        }
        settings
    }
}
