//! What traces cost: the same requests with and without, in turns, to coordinators that differ in nothing else. First with
//! nodes that answer at once, so that the coordinator's own work is all there is; then with real nodes and the default model.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use integration_tests::cluster::{Cluster, ClusterSpec, metric_sum};
use integration_tests::collector::{Behaviour, Collector};
use model_files::TextModel;
use serde_json::{Value, json};

use super::client::{Connection, request};
use super::{ANSWER, Args, Bench, prompt_of, throughput};
use crate::report::median;

/// Tokens of an answer of the real model.
const REAL_ANSWER: u32 = 32;
/// Connections to the real model.
const REAL_CONNECTIONS: u16 = 8;

/// Measures both.
pub(super) async fn measure(args: &Args, model: &Path, text: &TextModel) -> Result<Value> {
    let collector = Collector::start(Behaviour::Forgets).await?;
    let length = args.prompts.first().copied().unwrap_or(100);
    let (prompt, tokens) = prompt_of(text, length)?;
    let mut without = Bench::start(args, model, text, (false, None)).await?;
    let mut with = Bench::start(args, model, text, (false, Some(collector.setting()))).await?;
    let alone = compare(
        args,
        (&mut without.cluster, &mut with.cluster),
        (&request(&prompt, ANSWER), args.connections),
    )
    .await?;
    drop((without, with));
    let real = ClusterSpec::pair(&args.model);
    let mut without = Cluster::start(real.clone()).await?;
    let mut with = Cluster::start(real.set(collector.setting())).await?;
    let whole = compare(
        args,
        (&mut without, &mut with),
        (&request(&prompt, REAL_ANSWER), REAL_CONNECTIONS),
    )
    .await?;
    let told = |what: &str, rounds: &Rounds| {
        let [(rate_off, cpu_off), (rate_on, cpu_on)] = rounds.medians();
        println!(
            "{what}, prompts of {tokens} tokens: without traces {rate_off:.1} requests/s and {cpu_off:.1} us of the \
             coordinator's CPU each; all traced {rate_on:.1} and {cpu_on:.1}: {:.2} % fewer requests/s ({:.1} spans each)",
            100.0 * (1.0 - rounds.ratio()),
            rounds.spans
        );
        json!({
            "requests_per_s_without": rate_off, "requests_per_s_with": rate_on, "ratio": rounds.ratio(),
            "cpu_us_without": cpu_off, "cpu_us_with": cpu_on, "spans_per_request": rounds.spans,
        })
    };
    let coordinator = told("coordinator alone", &alone);
    let cluster = told("whole cluster", &whole);
    Ok(json!({ "prompt_tokens": tokens, "coordinator": coordinator, "cluster": cluster }))
}

/// Rates and CPU of each window, without traces and with them.
struct Rounds {
    windows: [Vec<(f64, f64)>; 2],
    /// Spans that the coordinator exported for each request.
    spans: f64,
}

impl Rounds {
    fn medians(&self) -> [(f64, f64); 2] {
        let of = |windows: &[(f64, f64)]| {
            let (rates, cpu): (Vec<f64>, Vec<f64>) = windows.iter().copied().unzip();
            (median(rates), median(cpu))
        };
        [of(&self.windows[0]), of(&self.windows[1])]
    }

    /// Median over the rounds of the rate with traces over the rate without.
    fn ratio(&self) -> f64 {
        let [without, with] = &self.windows;
        let pairs = without.iter().zip(with);
        median(pairs.map(|((without, _), (with, _))| with / without).collect())
    }
}

async fn compare(
    args: &Args,
    (without, with): (&mut Cluster, &mut Cluster),
    (asked, connections): (&[u8], u16),
) -> Result<Rounds> {
    let window = Duration::from_secs(u64::from(args.seconds));
    for cluster in [&*without, &*with] {
        let mut warm = Connection::open(cluster.http_port()).await?;
        for _ in 0..20 {
            warm.ask(asked).await?;
        }
    }
    let mut windows = [Vec::new(), Vec::new()];
    for round in 0..args.rounds {
        // Who comes first changes, so that what others do on the machine is in both.
        let first = usize::from(round % 2 == 1);
        for which in [first, 1 - first] {
            let cluster = if which == 0 { &mut *without } else { &mut *with };
            windows[which].push(throughput(cluster, asked, connections, window).await?);
        }
    }
    let page = with.metrics().await?;
    let (exported, dropped) = (
        metric_sum(&page, "baton_trace_spans_exported_total"),
        metric_sum(&page, "baton_trace_spans_dropped_total"),
    );
    let requests = metric_sum(&page, "tgi_request_success");
    ensure!(
        dropped == 0.0,
        "{dropped} spans were lost: what was measured is no export"
    );
    Ok(Rounds {
        windows,
        spans: exported / requests,
    })
}
