//! What became of one request.

use super::timing::Phase;

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With a whole answer.
    Done,
    /// Without one.
    Failed(Failure, String),
    /// It was open when the run was interrupted: it counts as nothing.
    Aborted,
}

/// Ways to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Failure {
    /// No connection, or it broke before an answer began.
    Connection,
    /// An answer that is no 200.
    Status(u16),
    /// An error in a stream that began as a 200.
    ErrorEvent,
    /// A 200 that ended too early.
    CutOff,
    /// Something that is no answer of the dialect.
    Malformed,
    /// No end in time.
    Timeout,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Connection => f.write_str("connection"),
            Self::Status(status) => write!(f, "status {status}"),
            Self::ErrorEvent => f.write_str("error event"),
            Self::CutOff => f.write_str("cut off"),
            Self::Malformed => f.write_str("malformed"),
            Self::Timeout => f.write_str("timeout"),
        }
    }
}

/// What became of a request. Times are seconds; all but `intended_s` count from when it was meant to be sent, so that a
/// server (or a client) that falls behind cannot hide it.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Its number in the run, from 0.
    pub index: u64,
    /// When it was meant to be sent, from the start of the run.
    pub intended_s: f64,
    /// How much later than that it was sent.
    pub late_s: f64,
    /// Tokens that its prompt was to have; none where the prompt was given.
    pub asked_input: Option<u32>,
    /// Tokens that were asked for.
    pub asked_output: u32,
    /// How it ended.
    pub outcome: Outcome,
    /// Tokens of the prompt, as the server counted.
    pub prompt_tokens: Option<u32>,
    /// Of those, the ones from a prefix cache, where the server says so.
    pub cached_tokens: Option<u32>,
    /// Tokens generated, as the server counted; where it did not say, the events with text.
    pub output_tokens: u32,
    /// The first event with text. None for answers that are not streamed.
    pub ttft_s: Option<f64>,
    /// The end.
    pub e2e_s: f64,
    /// Times between events with text, in microseconds.
    pub gaps_us: Vec<u32>,
    /// Where the server says the time went; empty where it does not.
    pub phases: Vec<Phase>,
}

/// What a request must keep to. What is not given is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Slo {
    /// Longest time to the first token, in milliseconds.
    pub ttft_ms: Option<f64>,
    /// Longest mean time for each further token.
    pub tpot_ms: Option<f64>,
    /// Longest time between two tokens.
    pub gap_ms: Option<f64>,
    /// Longest time to the end.
    pub e2e_ms: Option<f64>,
}

impl Slo {
    /// Whether something is asked of a request at all.
    pub fn is_given(&self) -> bool {
        *self != Self::default()
    }
}

impl Record {
    /// Whether it ended with a whole answer.
    pub fn is_done(&self) -> bool {
        self.outcome == Outcome::Done
    }

    /// Seconds for each token after the first: (E2E - TTFT) / (output tokens - 1). None for one token, or if not streamed.
    pub fn tpot_s(&self) -> Option<f64> {
        let further = self.output_tokens.checked_sub(1).filter(|further| *further > 0)?;
        Some((self.e2e_s - self.ttft_s?) / f64::from(further))
    }

    /// Longest time between two events with text, in seconds.
    pub fn worst_gap_s(&self) -> Option<f64> {
        self.gaps_us.iter().max().map(|us| f64::from(*us) / 1e6)
    }

    /// Whether it has a whole answer that kept to all of `slo`.
    pub fn meets(&self, slo: &Slo) -> bool {
        let within = |value_s: Option<f64>, limit_ms: Option<f64>| match (value_s, limit_ms) {
            (Some(value), Some(limit)) => value * 1e3 <= limit,
            _ => true,
        };
        self.is_done()
            && within(self.ttft_s, slo.ttft_ms)
            && within(self.tpot_s(), slo.tpot_ms)
            && within(self.worst_gap_s(), slo.gap_ms)
            && within(Some(self.e2e_s), slo.e2e_ms)
    }

    /// When its events with text came, in seconds from the start of the run.
    pub fn text_times(&self) -> impl Iterator<Item = f64> {
        let mut at = self.ttft_s.map(|ttft| self.intended_s + ttft);
        let first = at;
        let later = self.gaps_us.iter().filter_map(move |gap| {
            at = at.map(|at| at + f64::from(*gap) / 1e6);
            at
        });
        first.into_iter().chain(later)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A request of 11 tokens: the first after `ttft_ms`, the others every `gap_ms`.
    pub(crate) fn done(index: u64, ttft_ms: u32, gap_ms: u32) -> Record {
        Record {
            index,
            intended_s: index as f64,
            late_s: 0.0001,
            asked_input: Some(100),
            asked_output: 11,
            outcome: Outcome::Done,
            prompt_tokens: Some(100),
            cached_tokens: Some(16),
            output_tokens: 11,
            ttft_s: Some(f64::from(ttft_ms) / 1e3),
            e2e_s: f64::from(ttft_ms + 10 * gap_ms) / 1e3,
            gaps_us: vec![gap_ms * 1000; 10],
            phases: vec![("queue".to_owned(), 2.0), ("total".to_owned(), f64::from(ttft_ms))],
        }
    }

    /// A request that failed.
    pub(crate) fn failed(index: u64, failure: Failure) -> Record {
        Record {
            outcome: Outcome::Failed(failure, "words".to_owned()),
            output_tokens: 3,
            ..done(index, 10, 1)
        }
    }

    #[test]
    fn objectives_are_of_each_request() {
        let record = done(0, 100, 20);
        let none = Slo::default();
        assert!(record.meets(&none) && !none.is_given());
        let slo = |name: &str, ms: f64| {
            let of = |kind: &str| (kind == name).then_some(ms);
            Slo {
                ttft_ms: of("ttft"),
                tpot_ms: of("tpot"),
                gap_ms: of("gap"),
                e2e_ms: of("e2e"),
            }
        };
        for (name, met, missed) in [
            ("ttft", 100.0, 99.9),
            ("tpot", 20.001, 19.9),
            ("gap", 20.0, 19.0),
            ("e2e", 300.0, 299.0),
        ] {
            assert!(record.meets(&slo(name, met)), "{name} {met}");
            assert!(!record.meets(&slo(name, missed)), "{name} {missed}");
        }
        for failure in [Failure::ErrorEvent, Failure::Status(429), Failure::Timeout] {
            assert!(!failed(0, failure).meets(&none));
        }
        let aborted = Record {
            outcome: Outcome::Aborted,
            ..record
        };
        assert!(!aborted.meets(&none));
    }

    #[test]
    fn tpot_is_of_the_tokens_after_the_first() {
        let record = done(0, 100, 20);
        assert!((record.tpot_s().expect("eleven tokens") - 0.02).abs() < 1e-12);
        let single = Record {
            output_tokens: 1,
            gaps_us: Vec::new(),
            ..record.clone()
        };
        assert_eq!((single.tpot_s(), single.worst_gap_s()), (None, None));
        assert!(single.meets(&Slo {
            tpot_ms: Some(0.1),
            gap_ms: Some(0.1),
            ..Slo::default()
        }));
        let whole = Record { ttft_s: None, ..record };
        assert_eq!(whole.tpot_s(), None);
    }

    #[test]
    fn times_of_events_follow_from_the_gaps() {
        let times: Vec<f64> = done(2, 100, 20).text_times().collect();
        assert_eq!(times.len(), 11);
        assert!((times[0] - 2.1).abs() < 1e-9 && (times[10] - 2.3).abs() < 1e-9);
    }
}
