//! What a process measures, as tables: each metric with its kind, labels, unit and meaning. The tables stand beside the code that
//! records; from them come the HELP lines and the buckets of `/metrics`, and docs/metrics.md.

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, histogram};

/// How a metric behaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Grows, and begins at 0 when the process starts.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts values by the upper bounds of buckets.
    Histogram(&'static [f64]),
    /// A counter under a name that Prometheus' rules keep for other kinds. Such names are other servers': they are shown without a
    /// type, which changes nothing for whoever asks for them.
    Untyped,
}

impl Kind {
    /// The word in a TYPE line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram(_) => "histogram",
            Self::Untyped => "untyped",
        }
    }
}

/// One metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measure {
    /// Its name.
    pub name: &'static str,
    /// How it behaves.
    pub kind: Kind,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// Unit of its values: `seconds`, `bytes`, or what is counted.
    pub unit: &'static str,
    /// What it says, in one line.
    pub help: &'static str,
}

impl Measure {
    /// A counter.
    pub const fn counter(
        name: &'static str,
        labels: &'static [&'static str],
        unit: &'static str,
        help: &'static str,
    ) -> Self {
        Self::new(Kind::Counter, name, labels, unit, help)
    }

    /// A gauge.
    pub const fn gauge(
        name: &'static str,
        labels: &'static [&'static str],
        unit: &'static str,
        help: &'static str,
    ) -> Self {
        Self::new(Kind::Gauge, name, labels, unit, help)
    }

    /// A histogram without labels.
    pub const fn histogram(
        name: &'static str,
        buckets: &'static [f64],
        unit: &'static str,
        help: &'static str,
    ) -> Self {
        Self::new(Kind::Histogram(buckets), name, &[], unit, help)
    }

    /// Any.
    pub const fn new(
        kind: Kind,
        name: &'static str,
        labels: &'static [&'static str],
        unit: &'static str,
        help: &'static str,
    ) -> Self {
        Self {
            name,
            kind,
            labels,
            unit,
            help,
        }
    }

    /// Tells the process's recorder about it. What counts and has no labels is shown from now on, with 0: whoever watches for a
    /// first time sees it come.
    pub(crate) fn describe(&self) {
        let (name, unit, help) = (self.name, self.exporters_unit(), self.help);
        let shown = self.labels.is_empty();
        match self.kind {
            Kind::Counter | Kind::Untyped => {
                describe_counter!(name, unit, help);
                if shown {
                    counter!(name).increment(0);
                }
            }
            Kind::Gauge => describe_gauge!(name, unit, help),
            Kind::Histogram(_) => {
                describe_histogram!(name, unit, help);
                if shown {
                    // Known by being made.
                    let _made = histogram!(name);
                }
            }
        }
    }

    fn exporters_unit(&self) -> Unit {
        match self.unit {
            "seconds" => Unit::Seconds,
            "bytes" => Unit::Bytes,
            _ => Unit::Count,
        }
    }
}

/// What this crate measures.
pub fn measures() -> Vec<Measure> {
    [crate::renewal::MEASURES, crate::quic::MEASURES, crate::traces::MEASURES].concat()
}

/// Buckets of times from arrival to something that a person waits for, in seconds.
pub const WAITS: &[f64] = &[
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4,
    0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
];
/// Buckets of the time of a whole answer, in seconds.
pub const ANSWERS: &[f64] = &[
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0,
    15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0,
];
/// Buckets of the gap between two tokens, and of a step, in seconds.
pub const GAPS: &[f64] = &[
    0.000_25, 0.000_5, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05,
    0.06, 0.075, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0,
];
/// Buckets of numbers of tokens.
pub const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 20_000.0, 50_000.0,
    100_000.0, 200_000.0,
];
/// Buckets of numbers of sequences.
pub const SEQUENCES: &[f64] = &[
    1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0,
];
