//! What many records come to: counts, distributions, throughput, goodput. The form of `--json`.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::record::{Outcome, Record, Slo};

/// Marks a file as ours.
pub const SCHEMA: &str = "baton-load";
/// Version of the form of the file: raised when something that was there changes its meaning or goes.
pub const VERSION: u32 = 1;
/// Longest time that is told from longer ones: a day, in microseconds.
const LONGEST_US: u64 = 86_400_000_000;
/// Digits that percentiles have.
const DIGITS: u8 = 3;
/// Points of a cumulative distribution.
const CDF_STEPS: u32 = 200;

/// Times of one kind, in milliseconds. Percentiles have three digits, the others are exact.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// Number of values.
    pub count: u64,
    /// Mean.
    pub mean: f64,
    /// Smallest value.
    pub min: f64,
    /// Median.
    pub p50: f64,
    /// Nine of ten are at most this.
    pub p90: f64,
    /// 99 of a hundred are at most this.
    pub p99: f64,
    /// Largest value.
    pub max: f64,
    /// Points (value, share of values that are at most that), ascending; the last is (max, 1).
    pub cdf: Vec<(f64, f64)>,
}

/// Values of one kind while they are collected.
#[derive(Debug)]
pub struct Collector {
    histogram: Histogram<u64>,
    sum_s: f64,
    min_s: f64,
    max_s: f64,
}

impl Default for Collector {
    fn default() -> Self {
        Self {
            #[allow(clippy::expect_used, reason = "the bounds are constants")]
            histogram: Histogram::new_with_bounds(1, LONGEST_US, DIGITS).expect("1 < longest, digits within 0..=5"),
            sum_s: 0.0,
            min_s: f64::INFINITY,
            max_s: 0.0,
        }
    }
}

impl Collector {
    /// Takes a value in seconds.
    pub fn add(&mut self, seconds: f64) {
        self.histogram.saturating_record((seconds * 1e6).round() as u64);
        self.sum_s += seconds;
        self.min_s = self.min_s.min(seconds);
        self.max_s = self.max_s.max(seconds);
    }

    /// What has been collected; none if nothing.
    pub fn distribution(&self) -> Option<Distribution> {
        let count = self.histogram.len();
        if count == 0 {
            return None;
        }
        let (min, max) = (self.min_s * 1e3, self.max_s * 1e3);
        // The histogram answers with the upper end of a bucket, which may lie above all values.
        let at = |share: f64| (self.histogram.value_at_quantile(share) as f64 / 1e3).clamp(min, max);
        let mut cdf: Vec<(f64, f64)> = (0..CDF_STEPS)
            .map(|step| f64::from(step) / f64::from(CDF_STEPS))
            .chain([0.999])
            .map(|share| (at(share), share))
            .collect();
        cdf.push((max, 1.0));
        Some(Distribution {
            count,
            mean: self.sum_s / count as f64 * 1e3,
            min,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max,
            cdf,
        })
    }
}

/// What became of the requests that count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    /// All that ended; those of the warm-up are in none of the numbers.
    pub requests: u64,
    /// With a whole answer.
    pub succeeded: u64,
    /// Without.
    pub failed: u64,
    /// Of those, by kind.
    pub failures: BTreeMap<String, u64>,
    /// Open when the run was interrupted, and in no other number.
    pub aborted: u64,
    /// With a whole answer that met all objectives.
    pub met_slo: u64,
}

/// Tokens of the requests that succeeded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tokens {
    /// Of prompts, as the server counted; of those that it did not count, as asked for.
    pub prompt: u64,
    /// Requests whose prompts the server counted.
    pub prompts_counted: u64,
    /// Of those of prompts, the ones that the server had in a prefix cache; none where it does not say.
    pub cached: Option<u64>,
    /// Generated.
    pub output: u64,
    /// Events with text; fewer than tokens if the server sends several at once.
    pub text_events: u64,
}

/// Per second of the run: from its start to the end of the last request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Throughput {
    /// Requests that succeeded.
    pub requests_per_s: f64,
    /// Tokens of their prompts.
    pub input_tokens_per_s: f64,
    /// Tokens generated for them.
    pub output_tokens_per_s: f64,
    /// Requests that met all objectives; none without objectives.
    pub goodput_per_s: Option<f64>,
}

/// Times in milliseconds, of requests that succeeded. They count from when a request was meant to be sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latencies {
    /// Time to the first token.
    pub ttft_ms: Option<Distribution>,
    /// Times between two events with text, of all requests together.
    pub itl_ms: Option<Distribution>,
    /// Time for each token after the first, of each request.
    pub tpot_ms: Option<Distribution>,
    /// Time to the end.
    pub e2e_ms: Option<Distribution>,
    /// How much later than meant requests were sent: of all requests.
    pub late_ms: Option<Distribution>,
}

/// A phase of the requests that succeeded, as the server tells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhaseTimes {
    /// Its name.
    pub name: String,
    /// Times in milliseconds.
    pub ms: Distribution,
}

/// The objectives, and how many requests met them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attainment {
    /// Longest time to the first token.
    pub ttft_ms: Option<f64>,
    /// Longest mean time for each further token.
    pub tpot_ms: Option<f64>,
    /// Longest time between two tokens.
    pub gap_ms: Option<f64>,
    /// Longest time to the end.
    pub e2e_ms: Option<f64>,
    /// Share of all requests that met all of them; those that failed did not.
    pub attained: f64,
}

/// What one run came to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// From the start of the run to the end of the last request, in seconds.
    pub duration_s: f64,
    /// Requests a second that were meant to be sent: gaps between them over the time from first to last. None where the answers
    /// decide when the next is sent.
    pub offered_per_s: Option<f64>,
    /// What became of the requests.
    pub counts: Counts,
    /// Tokens.
    pub tokens: Tokens,
    /// Per second.
    pub throughput: Throughput,
    /// Times.
    pub latencies: Latencies,
    /// None without objectives.
    pub slo: Option<Attainment>,
    /// Where the server says the time went, in its order (`total` is all of it); empty where it does not.
    pub phases: Vec<PhaseTimes>,
    /// Up to ten different messages of failures.
    pub messages: Vec<String>,
}

/// The file of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`VERSION`].
    pub version: u32,
    /// `load`.
    pub kind: String,
    /// When the run began, in seconds since 1970-01-01 UTC.
    pub started_unix_s: u64,
    /// What was asked for, by the names of the arguments.
    pub settings: Map<String, Value>,
    /// Whether it was ended before all requests were sent.
    pub interrupted: bool,
    /// CPU time of this program during the run, over its duration: 1 is a whole core.
    pub generator_cpu: Option<f64>,
    /// What is worth knowing before the figures are believed.
    pub notes: Vec<String>,
    /// The figures.
    pub summary: Summary,
}

/// Sums up. `open_loop`: the requests were sent when a schedule said so.
pub fn summarise(records: &[Record], slo: &Slo, open_loop: bool) -> Summary {
    let counted: Vec<&Record> = records.iter().filter(|r| r.outcome != Outcome::Aborted).collect();
    let done: Vec<&Record> = counted.iter().copied().filter(|r| r.is_done()).collect();
    let duration_s = counted.iter().map(|r| r.intended_s + r.e2e_s).fold(0.0, f64::max);
    let met = done.iter().filter(|r| r.meets(slo)).count() as u64;
    let (failures, messages) = failures(&counted);
    let counts = Counts {
        requests: counted.len() as u64,
        succeeded: done.len() as u64,
        failed: (counted.len() - done.len()) as u64,
        failures,
        aborted: (records.len() - counted.len()) as u64,
        met_slo: met,
    };
    let tokens = Tokens {
        prompt: done
            .iter()
            .filter_map(|r| r.prompt_tokens.or(r.asked_input))
            .map(u64::from)
            .sum(),
        prompts_counted: done.iter().filter(|r| r.prompt_tokens.is_some()).count() as u64,
        cached: done
            .iter()
            .filter_map(|r| r.cached_tokens)
            .map(u64::from)
            .reduce(|a, b| a + b),
        output: done.iter().map(|r| u64::from(r.output_tokens)).sum(),
        text_events: done
            .iter()
            .map(|r| r.gaps_us.len() as u64 + u64::from(r.ttft_s.is_some()))
            .sum(),
    };
    let per_s = |count: u64| {
        if duration_s > 0.0 {
            count as f64 / duration_s
        } else {
            0.0
        }
    };
    let attained = if counted.is_empty() {
        0.0
    } else {
        met as f64 / counted.len() as f64
    };
    Summary {
        duration_s,
        offered_per_s: open_loop.then(|| offered(&counted)).flatten(),
        throughput: Throughput {
            requests_per_s: per_s(counts.succeeded),
            input_tokens_per_s: per_s(tokens.prompt),
            output_tokens_per_s: per_s(tokens.output),
            goodput_per_s: slo.is_given().then(|| per_s(met)),
        },
        slo: slo.is_given().then_some(Attainment {
            ttft_ms: slo.ttft_ms,
            tpot_ms: slo.tpot_ms,
            gap_ms: slo.gap_ms,
            e2e_ms: slo.e2e_ms,
            attained,
        }),
        latencies: latencies(&counted, &done),
        phases: phases(&done),
        counts,
        tokens,
        messages,
    }
}

fn offered(records: &[&Record]) -> Option<f64> {
    let times = records.iter().map(|r| r.intended_s);
    let (first, last) = (times.clone().reduce(f64::min)?, times.reduce(f64::max)?);
    (last > first).then(|| (records.len() - 1) as f64 / (last - first))
}

fn failures(counted: &[&Record]) -> (BTreeMap<String, u64>, Vec<String>) {
    let (mut kinds, mut messages) = (BTreeMap::new(), Vec::new());
    for record in counted {
        if let Outcome::Failed(failure, words) = &record.outcome {
            *kinds.entry(failure.to_string()).or_insert(0) += 1;
            let message = format!("{failure}: {words}");
            if messages.len() < 10 && !messages.contains(&message) {
                messages.push(message);
            }
        }
    }
    (kinds, messages)
}

fn phases(done: &[&Record]) -> Vec<PhaseTimes> {
    let mut found: Vec<(String, Collector)> = Vec::new();
    for (name, ms) in done.iter().flat_map(|record| &record.phases) {
        let at = found.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
            found.push((name.clone(), Collector::default()));
            found.len() - 1
        });
        found[at].1.add(ms / 1e3);
    }
    let told = |(name, collector): (String, Collector)| {
        let ms = collector.distribution()?;
        Some(PhaseTimes { name, ms })
    };
    found.into_iter().filter_map(told).collect()
}

fn latencies(counted: &[&Record], done: &[&Record]) -> Latencies {
    let of = |values: &mut dyn Iterator<Item = f64>| {
        let mut collector = Collector::default();
        values.for_each(|value| collector.add(value));
        collector.distribution()
    };
    Latencies {
        ttft_ms: of(&mut done.iter().filter_map(|r| r.ttft_s)),
        itl_ms: of(&mut done.iter().flat_map(|r| &r.gaps_us).map(|us| f64::from(*us) / 1e6)),
        tpot_ms: of(&mut done.iter().filter_map(|r| r.tpot_s())),
        e2e_ms: of(&mut done.iter().map(|r| r.e2e_s)),
        late_ms: of(&mut counted.iter().map(|r| r.late_s)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::Failure;
    use super::super::record::tests::{done, failed};
    use super::*;

    fn near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 2e-3, "{found} is not {expected}");
    }

    #[test]
    fn percentiles_of_known_values() {
        let mut collector = Collector::default();
        // 1 ms to 1 s, in an order of no meaning.
        for i in 0..1000_u32 {
            collector.add(f64::from((i * 7919) % 1000 + 1) / 1e3);
        }
        let found = collector.distribution().expect("a thousand values");
        assert_eq!(found.count, 1000);
        for (value, expected) in [
            (found.mean, 500.5),
            (found.min, 1.0),
            (found.p50, 500.0),
            (found.p90, 900.0),
            (found.p99, 990.0),
            (found.max, 1000.0),
        ] {
            near(value, expected);
        }
        assert!(found.cdf.is_sorted());
        assert_eq!(found.cdf.last(), Some(&(found.max, 1.0)));
        let at_quarter = found.cdf.iter().find(|(_, share)| *share == 0.25).expect("a point");
        near(at_quarter.0, 250.0);
        assert_eq!(Collector::default().distribution(), None);
    }

    #[test]
    fn one_value_is_all_of_its_percentiles() {
        let mut collector = Collector::default();
        collector.add(0.001_234_5);
        let found = collector.distribution().expect("a value");
        for value in [found.min, found.p50, found.p90, found.p99, found.max, found.mean] {
            assert!((value - 1.2345).abs() < 1e-9, "{found:?}");
        }
    }

    #[test]
    fn failures_count_against_the_objectives_and_in_no_latency() {
        let slo = Slo {
            ttft_ms: Some(150.0),
            ..Slo::default()
        };
        let records = [
            done(0, 100, 10),
            done(1, 200, 10),
            failed(2, Failure::ErrorEvent),
            failed(3, Failure::Status(429)),
            done(4, 150, 10),
        ];
        let found = summarise(&records, &slo, true);
        assert_eq!(
            (found.counts.requests, found.counts.succeeded, found.counts.failed),
            (5, 3, 2)
        );
        assert_eq!(found.counts.met_slo, 2);
        assert_eq!(found.counts.failures["error event"], 1);
        assert_eq!(found.counts.failures["status 429"], 1);
        assert_eq!(found.messages, ["error event: words", "status 429: words"]);
        assert!((found.slo.expect("given").attained - 0.4).abs() < 1e-12);
        assert_eq!(found.latencies.ttft_ms.expect("three").count, 3);
        assert_eq!(found.latencies.itl_ms.expect("three times ten").count, 30);
        assert_eq!(found.latencies.late_ms.expect("all").count, 5);
        assert_eq!(
            (found.tokens.prompt, found.tokens.output, found.tokens.text_events),
            (300, 33, 33)
        );
        assert_eq!(found.tokens.cached, Some(48));
        let phases: Vec<_> = found
            .phases
            .iter()
            .map(|phase| (phase.name.as_str(), phase.ms.count))
            .collect();
        assert_eq!(phases, [("queue", 3), ("total", 3)]);
        near(found.phases[1].ms.mean, 150.0);
        // The last is meant for second 4 and takes 0.25 s; five in four gaps of a second.
        near(found.duration_s, 4.25);
        near(found.offered_per_s.expect("open loop"), 1.0);
        near(found.throughput.requests_per_s, 3.0 / 4.25);
        near(found.throughput.output_tokens_per_s, 33.0 / 4.25);
        near(found.throughput.goodput_per_s.expect("objectives"), 2.0 / 4.25);
    }

    #[test]
    fn the_aborted_count_as_nothing() {
        let aborted = Record {
            outcome: Outcome::Aborted,
            ..done(9, 1, 1)
        };
        let found = summarise(&[done(0, 100, 10), aborted], &Slo::default(), false);
        assert_eq!((found.counts.requests, found.counts.aborted), (1, 1));
        near(found.duration_s, 0.2);
        assert_eq!(
            (found.offered_per_s, found.slo, found.throughput.goodput_per_s),
            (None, None, None)
        );
        let nothing = summarise(&[], &Slo::default(), true);
        assert_eq!((nothing.counts.requests, nothing.throughput.requests_per_s), (0, 0.0));
    }
}
