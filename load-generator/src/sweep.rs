//! Goodput: runs at one rate after the other, each judged by the share of requests that met their objectives.

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Map, Value};
use tokio::sync::watch;

use crate::core::Invalid;
use crate::core::record::Slo;
use crate::core::summary::{Summary, summarise};
use crate::core::sweep::{Goodput, Search};
use crate::core::trace::Scaling;
use crate::run::{Means, Progress, run};
use crate::workload::{Pace, Source, Workload};

/// One run of a sweep.
#[derive(Clone, Debug, Serialize)]
pub struct SweepRun {
    /// The rate that was asked for.
    pub rate_per_s: f64,
    /// Share of requests that met all objectives.
    pub attained: f64,
    /// The figures.
    pub summary: Summary,
}

/// The file of a sweep.
#[derive(Clone, Debug, Serialize)]
pub struct SweepReport {
    /// As of a run.
    pub schema: &'static str,
    /// As of a run.
    pub version: u32,
    /// `sweep`.
    pub kind: &'static str,
    /// When it began, in seconds since 1970-01-01 UTC.
    pub started_unix_s: u64,
    /// What was asked for.
    pub settings: Map<String, Value>,
    /// Whether it was ended early.
    pub interrupted: bool,
    /// Share of requests that must meet their objectives.
    pub attain: f64,
    /// The rates between which the goodput lies.
    pub goodput: Goodput,
    /// In the order in which they were made.
    pub runs: Vec<SweepRun>,
    /// What is worth knowing.
    pub notes: Vec<String>,
}

impl SweepReport {
    /// What was found, in words.
    pub fn verdict(&self) -> String {
        let share = self.attain * 100.0;
        match (self.goodput.good_per_s, self.goodput.bad_per_s) {
            (Some(good), Some(bad)) => {
                format!("goodput: {good:.3} requests/s with at least {share:.0} % within SLO; {bad:.3} is too many")
            }
            (Some(good), None) => {
                format!("goodput: at least {good:.3} requests/s with {share:.0} % within SLO; no rate was too high")
            }
            (None, Some(bad)) => format!("goodput: below {bad:.3} requests/s: no rate had {share:.0} % within SLO"),
            (None, None) => "goodput: unknown, no run was finished".to_owned(),
        }
    }
}

/// Runs until the search has ended or `stop` becomes true. `tell` hears of each run.
pub async fn sweep(
    means: &Means,
    workload: &Workload,
    (slo, attain): (&Slo, f64),
    mut search: Search,
    stop: watch::Receiver<bool>,
    mut tell: impl FnMut(&SweepRun),
) -> Result<(Vec<SweepRun>, Goodput), Invalid> {
    let mut runs = Vec::new();
    while let Some(rate) = search.next() {
        let mut at_rate = paced(workload, rate)?;
        at_rate.round = runs.len() as u64;
        let progress = Arc::new(Progress::default());
        let outcomes = run(means, &at_rate, &progress, stop.clone()).await?;
        if outcomes.interrupted {
            // Half a run says nothing of its rate.
            break;
        }
        let summary = summarise(&outcomes.records, slo, true);
        let attained = summary.slo.as_ref().map_or(0.0, |slo| slo.attained);
        search.tried(attained >= attain);
        let run = SweepRun {
            rate_per_s: rate,
            attained,
            summary,
        };
        tell(&run);
        runs.push(run);
    }
    Ok((runs, search.found()))
}

/// The workload at another rate.
fn paced(workload: &Workload, rate: f64) -> Result<Workload, Invalid> {
    let mut paced = workload.clone();
    match (workload.pace, &workload.source) {
        (Pace::Process(process, _), _) => paced.pace = Pace::Process(process, rate),
        (Pace::Trace, Source::Trace(trace)) => {
            let natural = trace
                .rate()
                .ok_or_else(|| Invalid::new("--trace", "a single moment", "requests at different times"))?;
            let scaling = Scaling {
                time: natural / rate,
                length: 1.0,
                max_input: u32::MAX,
                max_output: u32::MAX,
            };
            paced.source = Source::Trace(Arc::new(trace.as_ref().clone().scaled(&scaling)?.0));
        }
        (Pace::Users(_) | Pace::Trace, _) => {
            return Err(Invalid::new("the pace of a sweep", "not a rate", "one that has a rate"));
        }
    }
    Ok(paced)
}
