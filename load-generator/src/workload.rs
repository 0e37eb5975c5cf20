//! What is asked, and when: jobs one after the other, ready to be sent.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::core::arrivals::{Arrivals, Process};
use crate::core::dialect::Form;
use crate::core::prompts::{Content, Lexicon, MAX_TOKENS, mix};
use crate::core::trace::{Scaling, Trace};
use crate::core::{Invalid, trace};

/// Files are read whole; larger ones are no list of prompts and no trace.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// A length in tokens: one, or uniformly distributed over a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Shortest.
    pub from: u32,
    /// Longest.
    pub to: u32,
}

impl std::fmt::Display for Lengths {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.from == self.to {
            write!(f, "{}", self.from)
        } else {
            write!(f, "{}-{}", self.from, self.to)
        }
    }
}

impl std::str::FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("it must be a number of tokens from 1 to {MAX_TOKENS}, or a range like 200-1500");
        let number = |text: &str| {
            let number = text.trim().parse::<u32>().ok();
            number.filter(|n| (1..=MAX_TOKENS).contains(n)).ok_or_else(wrong)
        };
        let (from, to) = match text.split_once('-') {
            Some((from, to)) => (number(from)?, number(to)?),
            None => (number(text)?, number(text)?),
        };
        if from > to {
            return Err(format!("the range begins at {from} and ends before it, at {to}"));
        }
        Ok(Self { from, to })
    }
}

impl Lengths {
    fn draw(self, random: &mut impl Rng) -> u32 {
        random.random_range(self.from..=self.to)
    }
}

/// Where prompts and lengths come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// Synthetic prompts of these lengths.
    Synthetic {
        /// Of prompts.
        input: Lengths,
        /// Of answers.
        output: Lengths,
    },
    /// Prompts of a file, in order, again and again.
    Given {
        /// The prompts, with the tokens to ask for where the file says so.
        prompts: Arc<[(Arc<str>, Option<u32>)]>,
        /// Of answers, where the file does not say.
        output: Lengths,
    },
    /// Lengths (and shared prefixes) of a trace.
    Trace(Arc<Trace>),
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// At times of a process of arrivals.
    Process(Process, f64),
    /// At the times of the trace.
    Trace,
    /// Whenever one of so many users has its answer.
    Users(usize),
}

/// All that decides which requests are sent.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Prompts and lengths.
    pub source: Source,
    /// Times.
    pub pace: Pace,
    /// Number of requests; none for as many as the source or the time allows.
    pub requests: Option<u64>,
    /// No request is sent after so long.
    pub duration: Option<Duration>,
    /// Decides arrivals, lengths and words.
    pub seed: u64,
    /// Further requests with other words but the same times and lengths: each run of a sweep has its own, or a prefix cache
    /// would know the prompts of the second run.
    pub round: u64,
}

/// A request before its text is written.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Its number.
    pub index: u64,
    /// When it is sent, from the start; none where the answers decide.
    pub at: Option<Duration>,
    /// What its prompt says.
    pub content: Content,
    /// How long its prompt is, where it is not given.
    pub input: Option<u32>,
    /// How many tokens it asks for.
    pub output: u32,
}

impl Job {
    /// The body of the request.
    pub fn body(&self, lexicon: &Lexicon, form: &Form) -> Bytes {
        let prompt = lexicon.prompt(&self.content, self.input.unwrap_or(1));
        Bytes::from(form.body(&prompt, self.output))
    }
}

/// The jobs of a workload.
#[derive(Debug)]
pub struct Jobs {
    workload: Workload,
    arrivals: Option<Arrivals>,
    lengths: ChaCha8Rng,
    next: u64,
}

impl Workload {
    /// The jobs, in order.
    pub fn jobs(&self) -> Result<Jobs, Invalid> {
        let arrivals = match self.pace {
            Pace::Process(process, rate) => Some(Arrivals::new(process, rate, self.seed)?),
            Pace::Trace | Pace::Users(_) => None,
        };
        Ok(Jobs {
            workload: self.clone(),
            arrivals,
            // Not the stream of the arrivals: lengths do not depend on the process.
            lengths: ChaCha8Rng::seed_from_u64(mix(self.seed, u64::MAX)),
            next: 0,
        })
    }

    /// How many requests there will be, as far as that is known.
    pub fn known_requests(&self) -> Option<u64> {
        let of_trace = match (&self.source, self.duration) {
            (Source::Trace(trace), Some(duration)) if self.pace == Pace::Trace => {
                Some(trace.entries.iter().filter(|entry| entry.at <= duration).count() as u64)
            }
            (Source::Trace(trace), _) => Some(trace.entries.len() as u64),
            (_, Some(_)) => return None,
            _ => None,
        };
        match (of_trace, self.requests) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

impl Iterator for Jobs {
    type Item = Job;

    fn next(&mut self) -> Option<Job> {
        let index = self.next;
        let workload = &self.workload;
        if workload.requests.is_some_and(|requests| index >= requests) {
            return None;
        }
        let seed = mix(mix(workload.seed, workload.round), index);
        let (content, input, output, recorded) = match &workload.source {
            Source::Synthetic { input, output } => {
                let (input, output) = (input.draw(&mut self.lengths), output.draw(&mut self.lengths));
                (Content::Seeded(seed), Some(input), output, None)
            }
            Source::Given { prompts, output } => {
                let (prompt, given) = &prompts[(index % prompts.len() as u64) as usize];
                let drawn = output.draw(&mut self.lengths);
                (Content::Given(Arc::clone(prompt)), None, given.unwrap_or(drawn), None)
            }
            Source::Trace(trace) => {
                let entry = trace.entries.get(usize::try_from(index).ok()?)?;
                let content = entry
                    .blocks
                    .as_ref()
                    .map_or(Content::Seeded(seed), |ids| Content::Blocks {
                        ids: Arc::clone(ids),
                        block_tokens: trace.block_tokens,
                        seed: mix(workload.seed, workload.round),
                    });
                (content, Some(entry.input_tokens), entry.output_tokens, Some(entry.at))
            }
        };
        let at = match workload.pace {
            Pace::Process(..) => self.arrivals.as_mut().and_then(Iterator::next),
            Pace::Trace => recorded,
            Pace::Users(_) => None,
        };
        if at.zip(workload.duration).is_some_and(|(at, duration)| at > duration) {
            return None;
        }
        self.next += 1;
        Some(Job {
            index,
            at,
            content,
            input,
            output,
        })
    }
}

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("{argument} {path}: {why}")]
    Unreadable {
        /// The argument that named it.
        argument: &'static str,
        /// The file.
        path: String,
        /// Why not.
        why: String,
    },
    /// A scale is none.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

fn read(argument: &'static str, path: &PathBuf) -> Result<String, FileError> {
    let wrong = |why: String| unreadable(argument, path, why);
    let length = std::fs::metadata(path).map_err(|error| wrong(error.to_string()))?.len();
    if length > MAX_FILE_BYTES {
        return Err(wrong(format!(
            "it has {length} bytes; at most {MAX_FILE_BYTES} are read"
        )));
    }
    std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))
}

fn unreadable(argument: &'static str, path: &std::path::Path, why: String) -> FileError {
    FileError::Unreadable {
        argument,
        path: path.display().to_string(),
        why,
    }
}

/// How a trace file is used.
#[derive(Clone, Copy, Debug)]
pub struct Replay {
    /// Times and lengths.
    pub scaling: Scaling,
    /// The mean rate that the trace is stretched to instead of a time scale.
    pub rate: Option<f64>,
    /// Whether requests on a grid of three seconds stay there.
    pub bursts: bool,
    /// Of the spreading.
    pub seed: u64,
}

/// Reads a trace; also what was done to it, in words.
pub fn read_trace(path: &PathBuf, replay: &Replay) -> Result<(Trace, Vec<String>), FileError> {
    let text = read("--trace", path)?;
    let trace = trace::parse(&text).map_err(|error| unreadable("--trace", path, error.to_string()))?;
    let mut notes = Vec::new();
    let trace = match (trace.gridded, replay.bursts) {
        (true, false) => {
            notes.push(
                "the trace's times are on a grid of 3 s: each request was moved by up to 3 s (--bursts keeps them)"
                    .to_owned(),
            );
            trace.spread(replay.seed)
        }
        (true, true) => {
            notes.push("the trace's times are on a grid of 3 s, and were kept: requests come in bursts".to_owned());
            trace
        }
        (false, _) => trace,
    };
    let mut scaling = replay.scaling;
    if let Some(rate) = replay.rate {
        let natural = trace.rate().ok_or_else(|| {
            unreadable(
                "--trace",
                path,
                "all its requests come at once: it has no rate to scale".to_owned(),
            )
        })?;
        scaling.time = natural / rate;
    }
    let (trace, cut) = trace.scaled(&scaling)?;
    if cut > 0 {
        notes.push(format!(
            "{cut} requests of the trace were cut to the longest lengths that were given"
        ));
    }
    Ok((trace, notes))
}

/// A prompt, and the tokens to ask for where the file says so.
pub type GivenPrompt = (Arc<str>, Option<u32>);

/// Reads prompts: of a file that ends with `.jsonl` the objects of its lines (`prompt`, and `max_tokens` if wanted), of
/// others the lines.
pub fn read_prompts(path: &PathBuf) -> Result<Arc<[GivenPrompt]>, FileError> {
    #[derive(serde::Deserialize)]
    struct Line {
        prompt: String,
        max_tokens: Option<std::num::NonZeroU32>,
    }
    let text = read("--prompts", path)?;
    let is_json = path.extension().is_some_and(|extension| extension == "jsonl");
    let mut prompts: Vec<GivenPrompt> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() {
            continue;
        }
        if !is_json {
            prompts.push((line.into(), None));
            continue;
        }
        let read: Line = serde_json::from_str(line).map_err(|error| {
            let right = r#"a line is like {"prompt": "...", "max_tokens": 64}"#;
            unreadable("--prompts", path, format!("line {number}: {error}; {right}"))
        })?;
        if read.prompt.is_empty() {
            return Err(unreadable(
                "--prompts",
                path,
                format!("line {number}: the prompt is empty"),
            ));
        }
        prompts.push((read.prompt.into(), read.max_tokens.map(std::num::NonZeroU32::get)));
    }
    if prompts.is_empty() {
        return Err(unreadable("--prompts", path, "it has no prompts".to_owned()));
    }
    Ok(prompts.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn synthetic(pace: Pace) -> Workload {
        Workload {
            source: Source::Synthetic {
                input: Lengths { from: 10, to: 20 },
                output: Lengths { from: 5, to: 5 },
            },
            pace,
            requests: Some(50),
            duration: None,
            seed: 3,
            round: 0,
        }
    }

    fn jobs(workload: &Workload) -> Vec<Job> {
        workload.jobs().expect("valid").collect()
    }

    #[test]
    fn a_seed_makes_the_same_jobs_and_a_round_only_other_words() {
        let workload = synthetic(Pace::Process(Process::Poisson, 2.0));
        let first = jobs(&workload);
        assert_eq!((first.len(), &first), (50, &jobs(&workload)));
        let other = jobs(&Workload {
            round: 1,
            ..workload.clone()
        });
        for (a, b) in first.iter().zip(&other) {
            assert_eq!((a.at, a.input, a.output), (b.at, b.input, b.output));
            assert_ne!(a.content, b.content);
        }
        assert!(
            first
                .iter()
                .all(|job| (10..=20).contains(&job.input.unwrap_or(0)) && job.output == 5)
        );
        let users = jobs(&synthetic(Pace::Users(4)));
        assert!(users.iter().all(|job| job.at.is_none()));
    }

    #[test]
    fn a_duration_ends_the_sending() {
        let workload = Workload {
            duration: Some(Duration::from_secs(2)),
            ..synthetic(Pace::Process(Process::Constant, 4.0))
        };
        // 0, 0.25, ... 2.
        assert_eq!((jobs(&workload).len(), workload.known_requests()), (9, None));
    }

    #[test]
    fn a_trace_gives_times_lengths_and_prefixes() {
        let line = |t: u64, ids: &str| {
            let text =
                format!("{{\"timestamp\": {t}, \"input_length\": 600, \"output_length\": 7, \"hash_ids\": {ids}}}\n");
            text
        };
        let text = line(100, "[1, 2]") + &line(1100, "[1, 3]") + &line(2100, "[1, 4]");
        let trace = trace::parse(&text).expect("valid");
        let workload = Workload {
            source: Source::Trace(Arc::new(trace)),
            pace: Pace::Trace,
            requests: None,
            duration: Some(Duration::from_millis(1500)),
            seed: 1,
            round: 0,
        };
        let found = jobs(&workload);
        assert_eq!((found.len(), workload.known_requests()), (2, Some(2)));
        assert_eq!(found[1].at, Some(Duration::from_secs(1)));
        let lexicon = Lexicon::unknown();
        let text = |job: &Job| lexicon.prompt(&job.content, job.input.unwrap_or(0));
        let (a, b) = (text(&found[0]), text(&found[1]));
        let common = a.split(' ').zip(b.split(' ')).take_while(|(a, b)| a == b).count();
        assert!((512..515).contains(&common), "{common}");
    }

    #[test]
    fn lengths_are_numbers_or_ranges() {
        for (text, from, to) in [("7", 7, 7), ("1-9", 1, 9), ("3 - 4", 3, 4)] {
            assert_eq!(text.parse(), Ok(Lengths { from, to }));
        }
        for text in ["", "0", "x", "1-", "-1", "9-1", "1-2-3", "10000001"] {
            assert!(text.parse::<Lengths>().is_err(), "{text}");
        }
        assert_eq!(Lengths { from: 1, to: 9 }.to_string(), "1-9");
    }
}
