//! What the program does, command by command.
#![allow(clippy::print_stdout, reason = "a measuring program prints its figures")]

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use runtime::clock::Clock;
use serde::Serialize;
use tokio::sync::watch;

use crate::args::{
    Cli, Command, CompareArgs, InterfereArgs, NullArgs, OutArgs, OwnArgs, RunArgs, SweepArgs, TargetArgs,
};
use crate::own_cost::own_cost;
use load_generator::calibrate::{How, calibrate, first_model};
use load_generator::client::Client;
use load_generator::core::dialect::Form;
use load_generator::core::prompts::Lexicon;
use load_generator::core::summary::{Report, SCHEMA, VERSION, summarise};
use load_generator::core::sweep::Search;
use load_generator::interfere::{Interference, Plan, interfere};
use load_generator::null_server::{self, Behaviour};
use load_generator::run::{Means, Progress, run, warm_up};
use load_generator::sweep::{SweepReport, sweep};
use load_generator::workload::{Source, Workload};
use load_generator::{cpu, report};

/// How often the progress bar is told.
const TICK: Duration = Duration::from_millis(200);
/// Most requests that are open at once, where nothing else is said.
const DEFAULT_OPEN: u64 = 4096;
/// Files that are open beside connections.
const OTHER_FILES: u64 = 64;

/// Does what the arguments say.
pub(crate) async fn execute(cli: Cli) -> Result<()> {
    match cli.command {
        Command::Run(args) => run_load(&args).await,
        Command::Sweep(args) => run_sweep(&args).await,
        Command::Interfere(args) => run_interfere(&args).await,
        Command::Compare(args) => compare(&args),
        Command::Own(args) => own(&args).await,
        Command::NullServer(args) => serve_null(&args).await,
    }
}

/// Files of results, opened before anything is measured: a path that cannot be written is known at once.
struct Outputs {
    json: Option<File>,
    page: Option<File>,
}

fn create(argument: &str, path: Option<&PathBuf>) -> Result<Option<File>> {
    path.map(|path| File::create(path).with_context(|| format!("{argument} {}", path.display())))
        .transpose()
}

impl Outputs {
    fn open(args: &OutArgs) -> Result<Self> {
        Ok(Self {
            json: create("--json", args.json.as_ref())?,
            page: create("--report", args.report.as_ref())?,
        })
    }

    fn write(
        &mut self,
        figures: &impl Serialize,
        page: impl FnOnce() -> Result<String, report::WriteError>,
    ) -> Result<()> {
        if let Some(file) = &mut self.json {
            serde_json::to_writer_pretty(&mut *file, figures).context("--json")?;
            file.write_all(b"\n").context("--json")?;
        }
        if let Some(file) = &mut self.page {
            file.write_all(page()?.as_bytes()).context("--report")?;
        }
        Ok(())
    }
}

/// Becomes true with Ctrl-C.
fn interruption() -> watch::Receiver<bool> {
    let (tell, heard) = watch::channel(false);
    tokio::spawn(async move {
        // Without the signal a run cannot be interrupted in order; it is all that is lost.
        if tokio::signal::ctrl_c().await.is_ok() {
            eprintln!("interrupted: what has been measured follows");
            tell.send_replace(true);
        }
        // As long as somebody listens, the answer stays.
        tell.closed().await;
    });
    heard
}

/// A client, and requests in a form that the server answers.
async fn prepare(args: &TargetArgs, streamed: bool, synthetic: bool, max_open: usize) -> Result<(Means, Vec<String>)> {
    let dialect = args.dialect.dialect();
    let client = Client::new(&args.target())?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None if dialect.is_openai() => first_model(&client).await.map_err(|why| {
            anyhow::anyhow!(
                "--url {}: /v1/models does not name a model: {why}; give one with --model",
                args.url
            )
        })?,
        None => String::new(),
    };
    let form = Form {
        dialect,
        streamed,
        model,
        ignore_eos: args.ignore_eos,
        extra: args.extra.clone().map(|object| object.0).unwrap_or_default(),
    };
    let mut notes = Vec::new();
    let lexicon = if synthetic {
        let found = calibrate(&client, &form, &args.url).await?;
        notes.push(format!(
            "lengths of prompts are {} ({:.3} tokens a word, {:.0} beside the words)",
            found.how.words(),
            found.lexicon.tokens_per_word(),
            found.lexicon.overhead()
        ));
        if found.how == How::Unknown {
            eprintln!("load: the server says nowhere how many tokens a prompt has; lengths are guesses");
        }
        found.lexicon
    } else {
        Lexicon::unknown()
    };
    let means = Means {
        client,
        form,
        lexicon,
        max_open,
    };
    Ok((means, notes))
}

/// How many requests may be open at once: each is an open file. Errors if the system allows fewer than were asked for by the
/// argument `name`.
fn most_open(name: &str, asked: Option<u32>) -> Result<usize> {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let allowed = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    let room = allowed.map_or(u64::MAX, |allowed| allowed.saturating_sub(OTHER_FILES));
    let Some(asked) = asked.map(u64::from) else {
        return Ok(usize::try_from(room.clamp(1, DEFAULT_OPEN))?);
    };
    ensure!(
        asked <= room,
        "{name} {asked} needs {} open files, and this shell allows {}: raise it with `ulimit -n {0}`, or give at most {room}",
        asked + OTHER_FILES,
        room + OTHER_FILES
    );
    Ok(usize::try_from(asked)?)
}

/// A bar on standard error, if that is a terminal.
fn bar(requests: Option<u64>) -> ProgressBar {
    let bar = requests.map_or_else(ProgressBar::no_length, ProgressBar::new);
    let template = if requests.is_some() {
        "{elapsed_precise} {wide_bar} {pos}/{len} {msg}"
    } else {
        "{elapsed_precise} {spinner} {pos} {msg}"
    };
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

async fn show(progress: Arc<Progress>, bar: ProgressBar) {
    let mut ticks = tokio::time::interval(TICK);
    let mut before = 0;
    loop {
        ticks.tick().await;
        let of = |count: &std::sync::atomic::AtomicU64| count.load(Ordering::Relaxed);
        let (sent, ended, tokens) = (of(&progress.sent), of(&progress.ended), of(&progress.tokens));
        bar.set_position(ended);
        let speed = (tokens - before) as f64 / TICK.as_secs_f64();
        before = tokens;
        bar.set_message(format!(
            "{} open, {} failed, {speed:.0} tokens/s",
            sent.saturating_sub(ended),
            of(&progress.failed)
        ));
    }
}

async fn warm(means: &Means, workload: &Workload, count: u64) -> Result<()> {
    if count > 0 {
        let warmed = warm_up(means, workload, count).await;
        warmed.map_err(|why| anyhow::anyhow!("a warm-up request failed: {why}"))?;
    }
    Ok(())
}

fn is_written(source: &Source) -> bool {
    !matches!(source, Source::Given { .. })
}

async fn run_load(args: &RunArgs) -> Result<()> {
    let streamed = args.target.streamed(args.whole)?;
    let slo = args.slo.slo(streamed)?;
    let (workload, mut notes) = args.work.workload(args.rate, args.users)?;
    let mut outputs = Outputs::open(&args.out)?;
    let csv = create("--csv", args.csv.as_ref())?;
    let open = match args.users {
        Some(users) => most_open("--users", Some(users))?,
        None => most_open("--max-open", args.work.max_open)?,
    };
    let (means, more) = prepare(&args.target, streamed, is_written(&workload.source), open).await?;
    notes.extend(more);
    warm(&means, &workload, args.work.warmup).await?;

    let progress = Arc::new(Progress::default());
    let bar = bar(workload.known_requests());
    let shown = tokio::spawn(show(Arc::clone(&progress), bar.clone()));
    let started_unix_s = Clock.unix_seconds();
    let (from, cpu_before) = (Clock.now(), cpu::time_of(None));
    let outcomes = run(&means, &workload, &progress, interruption()).await?;
    let seconds = (Clock.now() - from).as_secs_f64();
    let spent = cpu::time_of(None)
        .zip(cpu_before)
        .map(|(after, before)| after.saturating_sub(before));
    shown.abort();
    bar.finish_and_clear();

    let report = Report {
        schema: SCHEMA.to_owned(),
        version: VERSION,
        kind: "load".to_owned(),
        started_unix_s,
        settings: args.settings(),
        interrupted: outcomes.interrupted,
        generator_cpu: spent.map(|spent| spent.as_secs_f64() / seconds),
        notes,
        summary: summarise(&outcomes.records, &slo, args.users.is_none()),
    };
    print!("{}", report::run(&report));
    outputs.write(&report, || report::run_page(&report, &outcomes.records))?;
    if let Some(file) = csv {
        report::write_csv(file, &outcomes.records, &slo).context("--csv")?;
    }
    ensure!(
        report.summary.counts.succeeded > 0 || report.interrupted,
        "no request succeeded"
    );
    Ok(())
}

async fn run_sweep(args: &SweepArgs) -> Result<()> {
    let streamed = args.target.streamed(false)?;
    let slo = args.slo.slo(streamed)?;
    ensure!(
        slo.is_given(),
        "a sweep needs an objective: --slo-ttft-ms, --slo-tpot-ms, --slo-gap-ms or --slo-e2e-ms"
    );
    ensure!(
        args.work.time_scale.is_none(),
        "--time-scale has no meaning in a sweep: each run stretches the trace to its rate"
    );
    let search = Search::new(args.start_rate, args.precision, args.max_runs)?;
    let has_own_times = args.work.trace.is_some() && args.work.arrivals.is_none();
    let rate = (!has_own_times).then_some(args.start_rate);
    let (workload, mut notes) = args.work.workload(rate, None)?;
    let mut outputs = Outputs::open(&args.out)?;
    let open = most_open("--max-open", args.work.max_open)?;
    let (means, more) = prepare(&args.target, streamed, is_written(&workload.source), open).await?;
    notes.extend(more);
    warm(&means, &workload, args.work.warmup).await?;
    let started_unix_s = Clock.unix_seconds();
    let stop = interruption();
    let tell = |run: &load_generator::sweep::SweepRun| {
        eprintln!(
            "{:.3} requests/s: {:.1} % within SLO",
            run.rate_per_s,
            run.attained * 100.0
        );
    };
    let (runs, goodput) = sweep(&means, &workload, (&slo, args.attain), search, stop.clone(), tell).await?;
    let report = SweepReport {
        schema: SCHEMA,
        version: VERSION,
        kind: "sweep",
        started_unix_s,
        settings: args.settings(),
        interrupted: *stop.borrow(),
        attain: args.attain,
        goodput,
        runs,
        notes,
    };
    print!("{}", report::sweep(&report));
    outputs.write(&report, || report::sweep_page(&report))
}

async fn run_interfere(args: &InterfereArgs) -> Result<()> {
    let streamed = args.target.streamed(false)?;
    ensure!(
        streamed,
        "--dialect generate: whole answers show no gaps; it must be generate_stream, completions or chat"
    );
    let mut outputs = Outputs::open(&args.out)?;
    let streams = args.streams as usize;
    most_open("--streams", Some(args.streams))?;
    let (means, mut notes) = prepare(&args.target, true, true, streams + 1).await?;
    let plan = Plan {
        streams,
        stream_input: args.stream_input,
        stream_output: args.stream_tokens,
        prompts: args.prompt_tokens.clone(),
        prompt_output: args.prompt_output,
        repeats: args.repeats,
        calm: Duration::from_millis(args.calm_ms),
        patience: Duration::from_secs_f64(args.target.timeout_s),
        seed: args.seed,
    };
    let started_unix_s = Clock.unix_seconds();
    let tell = |tokens, worst_s: f64| eprintln!("a prompt of {tokens} tokens: worst gap {:.1} ms", worst_s * 1e3);
    let measured = interfere(&means, &plan, interruption(), tell).await?;
    if measured.interrupted {
        notes.push("interrupted: not all repeats were made".to_owned());
    }
    let report = Interference {
        schema: SCHEMA,
        version: VERSION,
        kind: "interfere",
        started_unix_s,
        settings: args.settings(),
        streams,
        calm: measured.calm,
        calm_tokens_per_s: measured.calm_tokens_per_s,
        prompts: measured.prompts,
        notes,
    };
    print!("{}", report::interference(&report));
    outputs.write(&report, || report::interference_page(&report))
}

fn read_report(path: &Path) -> Result<Report> {
    let mut text = String::new();
    let read = File::open(path).and_then(|mut file| file.read_to_string(&mut text));
    read.with_context(|| path.display().to_string())?;
    load_generator::core::compare::read(&text).with_context(|| path.display().to_string())
}

fn compare(args: &CompareArgs) -> Result<()> {
    print!("{}", report::comparison(&read_report(&args.a)?, &read_report(&args.b)?));
    Ok(())
}

async fn own(args: &OwnArgs) -> Result<()> {
    let file = create("--json", args.json.as_ref())?;
    let cost = own_cost(args).await?;
    print!("{}", cost.text(args));
    if let Some(file) = file {
        serde_json::to_writer_pretty(file, &cost).context("--json")?;
    }
    Ok(())
}

async fn serve_null(args: &NullArgs) -> Result<()> {
    let behaviour = Behaviour {
        first: Duration::from_millis(args.first_ms),
        gap: Duration::from_millis(args.gap_ms),
        ..Behaviour::default()
    };
    let serving = null_server::start(args.port, behaviour).await;
    println!(
        "http://{}",
        serving.with_context(|| format!("--port {}", args.port))?.address
    );
    Ok(tokio::signal::ctrl_c().await?)
}
