//! What this program itself costs, and how exact it is, against the null server in a process of its own.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use runtime::clock::Clock;
use serde::Serialize;
use tokio::sync::watch;

use crate::args::OwnArgs;
use load_generator::client::{Client, Target};
use load_generator::core::arrivals::Process;
use load_generator::core::dialect::{Dialect, Form};
use load_generator::core::prompts::Lexicon;
use load_generator::core::record::Slo;
use load_generator::core::summary::{Summary, summarise};
use load_generator::cpu::time_of;
use load_generator::run::{Means, Progress, run};
use load_generator::workload::{Lengths, Pace, Source, Workload};

/// The null server, ended when this is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // An error means that it has ended already.
        if self.0.kill().is_ok() {
            let _status = self.0.wait();
        }
    }
}

/// Figures of one measurement.
#[derive(Debug, Serialize)]
pub(crate) struct Cost {
    /// CPU time of this program over the time of the measurement: 1 is a whole core.
    pub(crate) generator_cpu: f64,
    /// And of the server.
    pub(crate) server_cpu: f64,
    /// What was seen.
    pub(crate) summary: Summary,
}

/// Both measurements.
#[derive(Debug, Serialize)]
pub(crate) struct OwnCost {
    /// Whole answers as fast as they come.
    pub(crate) most_requests: Cost,
    /// Streams that begin at a rate.
    pub(crate) streams: Cost,
}

fn start_server(gap_ms: u64) -> Result<(Server, String)> {
    let program = std::env::current_exe().context("the running program has no path")?;
    let child = Command::new(program)
        .args(["null-server", "--gap-ms", &gap_ms.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("the null server does not start")?;
    let mut server = Server(child);
    let output = server.0.stdout.take().context("the null server has no output")?;
    let mut address = String::new();
    BufReader::new(output).read_line(&mut address)?;
    ensure!(!address.trim().is_empty(), "the null server ended at once");
    Ok((server, address.trim().to_owned()))
}

async fn measure(server: &Server, url: &str, form: Form, workload: &Workload) -> Result<Cost> {
    let client = Client::new(&Target {
        url: url.to_owned(),
        api_key: None,
        headers: Vec::new(),
        ca_cert: None,
        timeout: Duration::from_secs(60),
    })?;
    let means = Means {
        client,
        form,
        lexicon: Lexicon::unknown(),
        max_open: 16_384,
    };
    let (_keep, stop) = watch::channel(false);
    let books = || -> Result<(Duration, Duration)> {
        let unknown = "the system keeps no books of CPU time";
        Ok((
            time_of(None).context(unknown)?,
            time_of(Some(server.0.id())).context(unknown)?,
        ))
    };
    let (from, before) = (Clock.now(), books()?);
    let outcomes = run(&means, workload, &Arc::new(Progress::default()), stop).await?;
    let (seconds, after) = ((Clock.now() - from).as_secs_f64(), books()?);
    let share = |after: Duration, before: Duration| after.saturating_sub(before).as_secs_f64() / seconds;
    let summary = summarise(
        &outcomes.records,
        &Slo::default(),
        matches!(workload.pace, Pace::Process(..)),
    );
    if let Some(message) = summary.messages.first() {
        bail!(
            "{} of {} requests failed: {message}",
            summary.counts.failed,
            summary.counts.requests
        );
    }
    Ok(Cost {
        generator_cpu: share(after.0, before.0),
        server_cpu: share(after.1, before.1),
        summary,
    })
}

fn form(dialect: Dialect) -> Form {
    Form {
        dialect,
        streamed: dialect != Dialect::Generate,
        model: "null".to_owned(),
        ignore_eos: false,
        extra: serde_json::Map::new(),
    }
}

/// Measures both.
pub(crate) async fn own_cost(args: &OwnArgs) -> Result<OwnCost> {
    let workload = |pace: Pace, tokens: u32| Workload {
        source: Source::Synthetic {
            input: Lengths { from: 100, to: 100 },
            output: Lengths {
                from: tokens,
                to: tokens,
            },
        },
        pace,
        requests: None,
        duration: Some(Duration::from_secs_f64(args.seconds)),
        seed: 1,
        round: 0,
    };
    let most_requests = {
        let (server, url) = start_server(0)?;
        let closed = workload(Pace::Users(args.users as usize), 16);
        measure(&server, &url, form(Dialect::Generate), &closed).await?
    };
    let (server, url) = start_server(args.gap_ms)?;
    let open = workload(Pace::Process(Process::Constant, args.streams_per_s), args.tokens);
    let streams = measure(&server, &url, form(Dialect::Completions), &open).await?;
    Ok(OwnCost { most_requests, streams })
}

impl OwnCost {
    /// For people.
    pub(crate) fn text(&self, args: &OwnArgs) -> String {
        let (most, streams) = (&self.most_requests, &self.streams);
        let point = |d: &Option<load_generator::core::summary::Distribution>| {
            d.as_ref().map_or_else(
                || "-".to_owned(),
                |d| format!("p50 {:.2} ms, p99 {:.2} ms", d.p50, d.p99),
            )
        };
        format!(
            "whole answers, {} users: {:.0} requests/s; CPU: generator {:.1} % of a core, server {:.1} %; E2E {}\n\
             {:.0} streams/s of {} tokens, {} ms apart: {} in {:.1} s, {:.0} tokens/s; CPU: generator {:.1} % of a core, server \
             {:.1} %\n  sent late by {}; TTFT {}; ITL {}\n",
            args.users,
            most.summary.throughput.requests_per_s,
            most.generator_cpu * 100.0,
            most.server_cpu * 100.0,
            point(&most.summary.latencies.e2e_ms),
            args.streams_per_s,
            args.tokens,
            args.gap_ms,
            streams.summary.counts.succeeded,
            streams.summary.duration_s,
            streams.summary.throughput.output_tokens_per_s,
            streams.generator_cpu * 100.0,
            streams.server_cpu * 100.0,
            point(&streams.summary.latencies.late_ms),
            point(&streams.summary.latencies.ttft_ms),
            point(&streams.summary.latencies.itl_ms),
        )
    }
}
