//! What metrics and traces cost: the same requests with neither, with metrics, and with both, in turns, to processes that differ
//! in nothing else. First with nodes that answer at once, so that the coordinator's own work is all there is; then with real nodes
//! and the default model.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use integration_tests::cluster::{Cluster, ClusterSpec, metric_sum};
use integration_tests::collector::{Behaviour, Collector};
use integration_tests::ports::free_tcp;
use model_files::TextModel;
use serde_json::{Value, json};

use super::client::{Connection, request};
use super::{ANSWER, Args, Bench, prompt_of, throughput};
use crate::report::median;

/// Tokens of an answer of the real model.
const REAL_ANSWER: u32 = 32;
/// Connections to the real model.
const REAL_CONNECTIONS: u16 = 8;
/// What is compared, with the first.
const KINDS: [&str; 3] = ["nothing", "metrics", "metrics and traces"];

/// The settings that make a process one of [`KINDS`].
fn settings(kind: usize, collector: &Collector) -> Vec<String> {
    match kind {
        0 => vec!["telemetry.metrics=false".to_owned()],
        1 => Vec::new(),
        _ => vec![collector.setting()],
    }
}

/// Measures both.
pub(super) async fn measure(args: &Args, model: &Path, text: &TextModel) -> Result<Value> {
    let collector = Collector::start(Behaviour::Forgets).await?;
    let length = args.prompts.first().copied().unwrap_or(100);
    let (prompt, tokens) = prompt_of(text, length)?;
    let mut benches = Vec::new();
    for kind in 0..KINDS.len() {
        benches.push(Bench::start(args, model, text, (false, settings(kind, &collector))).await?);
    }
    let clusters = benches.iter_mut().map(|bench| &mut bench.cluster).collect();
    let load = (request(&prompt, ANSWER), args.connections);
    let alone = compare(args, clusters, &["coordinator"], &load).await?;
    drop(benches);
    let mut real = Vec::new();
    for kind in 0..KINDS.len() {
        let mut spec = ClusterSpec::pair(&args.model);
        spec.settings.extend(settings(kind, &collector));
        spec.settings.extend(args.set.iter().cloned());
        for role in ["prefill", "decode"] {
            // Without it they have no metrics.
            spec = spec.set_for(role, format!("node.metrics_listen=127.0.0.1:{}", free_tcp()?));
        }
        real.push(Cluster::start(spec).await?);
    }
    let load = (request(&prompt, REAL_ANSWER), REAL_CONNECTIONS);
    let names = ["coordinator", "prefill-0", "decode-0"];
    let whole = compare(args, real.iter_mut().collect(), &names, &load).await?;
    println!(
        "prompts of {tokens} tokens, {} rounds of {} s each",
        args.rounds, args.seconds
    );
    let coordinator = alone.tell("coordinator alone");
    let cluster = whole.tell("whole cluster");
    Ok(json!({ "prompt_tokens": tokens, "coordinator": coordinator, "cluster": cluster }))
}

/// What each window gave: requests a second, and CPU of a request in microseconds. By kind, and in it by round.
struct Rounds {
    windows: [Vec<(f64, f64)>; 3],
    /// Spans that the coordinator exported for each request.
    spans: f64,
}

type Figure = fn(&(f64, f64)) -> f64;

impl Rounds {
    /// By how many percent a kind's figure is less than the first's: the median over the rounds, and the bounds between which the
    /// median of ever more rounds would be, with a probability of 95 %.
    fn less(&self, kind: usize, of: Figure) -> [f64; 3] {
        let pairs = self.windows[0].iter().zip(&self.windows[kind]);
        let mut all: Vec<f64> = pairs
            .map(|(first, this)| 100.0 * (1.0 - of(this) / of(first)))
            .collect();
        all.sort_by(f64::total_cmp);
        let (half, spread) = (all.len() as f64 / 2.0, 0.98 * (all.len() as f64).sqrt());
        let at = |rank: f64| all[(rank.max(0.0) as usize).min(all.len() - 1)];
        [
            at((half - spread).floor()),
            median(all.clone()),
            at((half + spread).ceil() - 1.0),
        ]
    }

    fn tell(&self, what: &str) -> Value {
        let mut told = Vec::new();
        for (kind, name) in KINDS.into_iter().enumerate() {
            let (rates, cpu): (Vec<f64>, Vec<f64>) = self.windows[kind].iter().copied().unzip();
            let (rate, cpu) = (median(rates), median(cpu));
            print!("{what}, {name:<18}: {rate:>8.1} requests/s, {cpu:>8.1} us of CPU each");
            let ([low, fewer, high], [_, less_cpu, _]) =
                (self.less(kind, |(rate, _)| *rate), self.less(kind, |(_, cpu)| *cpu));
            if kind > 0 {
                print!(
                    "; {fewer:>5.2} % fewer requests/s ({low:.2} to {high:.2}), {:>5.2} % more CPU",
                    -less_cpu
                );
            }
            println!();
            told.push(json!({
                "kind": name, "requests_per_s": rate, "cpu_us": cpu, "fewer_requests_percent": fewer,
                "fewer_requests_percent_between": [low, high], "more_cpu_percent": -less_cpu,
            }));
        }
        println!(
            "{what}: {:.1} spans of the coordinator for each traced window's request",
            self.spans
        );
        json!({ "kinds": told, "spans_per_request": self.spans })
    }
}

async fn compare(
    args: &Args,
    mut clusters: Vec<&mut Cluster>,
    names: &[&str],
    (asked, connections): &(Vec<u8>, u16),
) -> Result<Rounds> {
    let window = Duration::from_secs(u64::from(args.seconds));
    for cluster in &clusters {
        let mut warm = Connection::open(cluster.http_port()).await?;
        for _ in 0..20 {
            warm.ask(asked).await?;
        }
    }
    let mut windows: [Vec<(f64, f64)>; 3] = Default::default();
    for round in 0..usize::from(args.rounds) {
        // Who comes first, and after whom, changes, so that what others do on the machine is in all.
        for turn in 0..KINDS.len() {
            let turn = if round % 2 == 0 { turn } else { KINDS.len() - 1 - turn };
            let kind = (turn + round / 2) % KINDS.len();
            windows[kind].push(throughput(clusters[kind], names, asked, *connections, window).await?);
        }
    }
    let page = clusters[2].metrics().await?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_compared_are_windows_of_one_round() {
        // The machine became twice as fast in the middle; traces always cost a tenth.
        let rates: Vec<f64> = (0..36).map(|round| if round < 18 { 100.0 } else { 200.0 }).collect();
        let of = |share: f64| rates.iter().map(|rate| (rate * share, 1.0)).collect::<Vec<_>>();
        let rounds = Rounds {
            windows: [of(1.0), of(1.0), of(0.9)],
            spans: 0.0,
        };
        let rate: Figure = |(rate, _)| *rate;
        assert_eq!(rounds.less(1, rate), [0.0; 3]);
        for bound in rounds.less(2, rate) {
            assert!((bound - 10.0).abs() < 1e-9, "{bound}");
        }
    }

    #[test]
    fn bounds_hold_the_middle_and_leave_out_the_ends() {
        let noisy: Vec<(f64, f64)> = (0..100).map(|percent| (f64::from(100 - percent), 1.0)).collect();
        let rounds = Rounds {
            windows: [vec![(100.0, 1.0); 100], noisy.clone(), noisy],
            spans: 0.0,
        };
        let [low, middle, high] = rounds.less(1, |(rate, _)| *rate);
        // Ranks of a median of 100 at 95 %: the 40th and the 60th.
        assert!(
            (39.0..42.0).contains(&low) && (58.0..61.0).contains(&high),
            "{low} to {high}"
        );
        assert!((middle - 49.5).abs() < 1e-9, "{middle}");
    }
}
