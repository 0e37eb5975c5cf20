//! Recorded arrivals and lengths: Azure's CSV and Mooncake's JSON lines, scaled in time and length.

use std::sync::Arc;
use std::time::Duration;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::Invalid;
use super::prompts::MAX_TOKENS;

/// Tokens for which one hash id stands in Mooncake's traces.
pub const BLOCK_TOKENS: u32 = 512;
/// Mooncake's timestamps are multiples of this.
const GRID: Duration = Duration::from_secs(3);

/// A request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// From the first request of the trace.
    pub at: Duration,
    /// Length of the prompt.
    pub input_tokens: u32,
    /// Length of the answer.
    pub output_tokens: u32,
    /// One id for each block of the prompt, the last of which may be partial: equal ids at the same leading positions are
    /// equal text. None where the trace says nothing of prefixes.
    pub blocks: Option<Arc<[u64]>>,
}

/// A trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// In the order of their times.
    pub entries: Vec<Entry>,
    /// Tokens of a full block, after scaling.
    pub block_tokens: f64,
    /// Whether times are on Mooncake's grid of three seconds.
    pub gridded: bool,
}

/// How a trace is changed before it is replayed.
#[derive(Clone, Copy, Debug)]
pub struct Scaling {
    /// Times are multiplied by this: 2 is half the rate.
    pub time: f64,
    /// Lengths (and blocks) are multiplied by this.
    pub length: f64,
    /// Longest prompt; longer ones are cut.
    pub max_input: u32,
    /// Longest answer; longer ones are cut.
    pub max_output: u32,
}

/// A trace that cannot be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// Neither of the two formats.
    #[error(
        "the first line is {0:?}; a trace begins with `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure) or with a JSON object \
         that has timestamp, input_length, output_length and hash_ids (Mooncake)"
    )]
    Unknown(String),
    /// A line that is wrong.
    #[error("line {line}: {what}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong, and what would be right.
        what: String,
    },
    /// Nothing in it.
    #[error("the trace has no requests")]
    Empty,
}

fn wrong(line: usize, what: impl Into<String>) -> TraceError {
    TraceError::Line {
        line,
        what: what.into(),
    }
}

/// Reads a trace of either format. Times count from its earliest request.
pub fn parse(text: &str) -> Result<Trace, TraceError> {
    let first = text.lines().next().unwrap_or_default().trim();
    let mut entries = if first.starts_with('{') {
        mooncake(text)?
    } else if first.eq_ignore_ascii_case("TIMESTAMP,ContextTokens,GeneratedTokens") {
        azure(text)?
    } else if text.trim().is_empty() {
        return Err(TraceError::Empty);
    } else {
        return Err(TraceError::Unknown(first.chars().take(80).collect()));
    };
    if entries.is_empty() {
        return Err(TraceError::Empty);
    }
    entries.sort_by_key(|entry| entry.at);
    let start = entries.first().map_or(Duration::ZERO, |entry| entry.at);
    for entry in &mut entries {
        entry.at -= start;
    }
    let gridded =
        entries[0].blocks.is_some() && entries.iter().all(|entry| entry.at.as_millis() % GRID.as_millis() == 0);
    Ok(Trace {
        entries,
        block_tokens: f64::from(BLOCK_TOKENS),
        gridded,
    })
}

fn azure(text: &str) -> Result<Vec<Entry>, TraceError> {
    // No field of this format is quoted.
    let mut reader = csv::ReaderBuilder::new()
        .has_headers(true)
        .flexible(true)
        .quoting(false)
        .from_reader(text.as_bytes());
    let mut entries = Vec::new();
    for (row, record) in reader.records().enumerate() {
        let line = row + 2;
        let record = record.map_err(|error| wrong(line, error.to_string()))?;
        let fields: Vec<&str> = record.iter().map(str::trim).collect();
        let &[time, input, output] = fields.as_slice() else {
            return Err(wrong(line, format!("{} fields; there must be 3", fields.len())));
        };
        let at = timestamp(time).ok_or_else(|| {
            let right = "the form is 2023-11-16 18:15:46.6805900";
            wrong(line, format!("TIMESTAMP is {time:?}; {right}"))
        })?;
        let count = |name: &str, value: &str| match value.parse::<u32>() {
            Ok(count) if (1..=MAX_TOKENS).contains(&count) => Ok(count),
            _ => Err(wrong(
                line,
                format!("{name} is {value:?}; it must be a number of tokens from 1 to {MAX_TOKENS}"),
            )),
        };
        entries.push(Entry {
            at,
            input_tokens: count("ContextTokens", input)?,
            output_tokens: count("GeneratedTokens", output)?,
            blocks: None,
        });
    }
    Ok(entries)
}

/// Time since the year 0 of `YYYY-MM-DD hh:mm:ss.fffffff`; only differences of them mean anything.
fn timestamp(text: &str) -> Option<Duration> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let numbers = |text: &str, separator: char| -> Option<[u64; 3]> {
        let parts: Vec<u64> = text
            .split(separator)
            .map(|part| {
                if part.bytes().all(|b| b.is_ascii_digit()) {
                    part.parse().ok()
                } else {
                    None
                }
            })
            .collect::<Option<_>>()?;
        parts.try_into().ok()
    };
    let [year, month, day] = numbers(date, '-')?;
    let (whole, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] = numbers(whole, ':')?;
    let legal = (1..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !(legal && hour < 24 && minute < 60 && second <= 60 && fraction.bytes().all(|b| b.is_ascii_digit())) {
        return None;
    }
    let nanos: u32 = format!("{fraction:0<9}").get(..9)?.parse().ok()?;
    // Days by the rule of the civil calendar with years that begin in March, so that leap days come last.
    let (shifted_year, shifted_month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let leap_days = shifted_year / 4 - shifted_year / 100 + shifted_year / 400;
    let days = 365 * shifted_year + leap_days + (153 * shifted_month + 2) / 5 + day - 1;
    Some(Duration::new(((days * 24 + hour) * 60 + minute) * 60 + second, nanos))
}

/// A line of Mooncake's.
#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

fn mooncake(text: &str) -> Result<Vec<Entry>, TraceError> {
    let mut entries = Vec::new();
    for (line, content) in (1..).zip(text.lines()) {
        if content.trim().is_empty() {
            continue;
        }
        let read: Line = serde_json::from_str(content).map_err(|error| wrong(line, error.to_string()))?;
        for (name, value) in [
            ("input_length", read.input_length),
            ("output_length", read.output_length),
        ] {
            if !(1..=MAX_TOKENS).contains(&value) {
                return Err(wrong(
                    line,
                    format!("{name} is {value}; it must be from 1 to {MAX_TOKENS}"),
                ));
            }
        }
        let blocks = read.input_length.div_ceil(BLOCK_TOKENS) as usize;
        if read.hash_ids.len() != blocks {
            let found = read.hash_ids.len();
            let length = read.input_length;
            return Err(wrong(
                line,
                format!("{found} hash_ids; {length} tokens are {blocks} blocks of {BLOCK_TOKENS}"),
            ));
        }
        entries.push(Entry {
            at: Duration::from_millis(read.timestamp),
            input_tokens: read.input_length,
            output_tokens: read.output_length,
            blocks: Some(read.hash_ids.into()),
        });
    }
    Ok(entries)
}

impl Trace {
    /// Spreads the requests of each multiple of three seconds over the three seconds after it, as they may have come.
    #[must_use]
    pub fn spread(mut self, seed: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        for entry in &mut self.entries {
            entry.at += GRID.mul_f64(random.random::<f64>());
        }
        self.entries.sort_by_key(|entry| entry.at);
        let start = self.entries.first().map_or(Duration::ZERO, |entry| entry.at);
        for entry in &mut self.entries {
            entry.at -= start;
        }
        self.gridded = false;
        self
    }

    /// Requests a second: gaps over the time from the first to the last. None for a single moment.
    pub fn rate(&self) -> Option<f64> {
        let span = self.entries.last()?.at.as_secs_f64();
        (span > 0.0).then(|| (self.entries.len() - 1) as f64 / span)
    }

    /// The trace in other times and lengths; also, how many requests were cut to the longest lengths.
    pub fn scaled(mut self, scaling: &Scaling) -> Result<(Self, usize), Invalid> {
        for (what, value) in [("time scale", scaling.time), ("length scale", scaling.length)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(Invalid::new(what, value, "a number above 0"));
            }
        }
        let mut cut = 0;
        let length = |tokens: u32| {
            (f64::from(tokens) * scaling.length)
                .round()
                .clamp(1.0, f64::from(MAX_TOKENS)) as u32
        };
        for entry in &mut self.entries {
            let seconds = entry.at.as_secs_f64() * scaling.time;
            entry.at = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
            let (input, output) = (length(entry.input_tokens), length(entry.output_tokens));
            entry.input_tokens = input.min(scaling.max_input);
            entry.output_tokens = output.min(scaling.max_output);
            cut += usize::from(input > scaling.max_input || output > scaling.max_output);
        }
        self.block_tokens *= scaling.length;
        Ok((self, cut))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 23:59:59.5000000,374,44\r\n\
                         2023-11-17 00:00:01.7500001,396,109";
    const MOONCAKE: &str = "{\"timestamp\": 3000, \"input_length\": 513, \"output_length\": 5, \"hash_ids\": [0, 7]}\n\
                            {\"timestamp\": 0, \"input_length\": 512, \"output_length\": 9, \"hash_ids\": [0]}\n\n";

    fn error(text: &str) -> String {
        parse(text).expect_err("must not be read").to_string()
    }

    #[test]
    fn azure_rows_with_their_line_ends() {
        let trace = parse(AZURE).expect("valid");
        let found: Vec<_> = trace
            .entries
            .iter()
            .map(|e| (e.at.as_nanos(), e.input_tokens, e.output_tokens, e.blocks.is_none()))
            .collect();
        assert_eq!(found, [(0, 374, 44, true), (2_250_000_100, 396, 109, true)]);
        assert!(!trace.gridded);
    }

    #[test]
    fn months_leap_days_and_years() {
        let seconds = |text| timestamp(text).expect("valid").as_secs();
        let day = 86_400;
        for (from, to, days) in [
            ("2024-02-28 00:00:00", "2024-03-01 00:00:00", 2),
            ("2023-02-28 00:00:00", "2023-03-01 00:00:00", 1),
            ("2100-02-28 00:00:00", "2100-03-01 00:00:00", 1),
            ("2000-02-28 00:00:00", "2000-03-01 00:00:00", 2),
            ("1970-01-01 00:00:00", "2026-01-01 00:00:00", 20_454),
        ] {
            assert_eq!(seconds(to) - seconds(from), days * day, "{from} to {to}");
        }
        for bad in [
            "",
            "2023-11-16",
            "2023-13-01 00:00:00",
            "2023-11-16 24:00:00",
            "2023-11-16 1:2",
            "-1-2-3 4:5:6",
        ] {
            assert_eq!(timestamp(bad), None, "{bad}");
        }
    }

    #[test]
    fn mooncake_lines_in_order_of_time() {
        let trace = parse(MOONCAKE).expect("valid");
        let found: Vec<_> = trace
            .entries
            .iter()
            .map(|e| {
                (
                    e.at.as_millis(),
                    e.input_tokens,
                    e.output_tokens,
                    e.blocks.as_deref().map(<[u64]>::to_vec),
                )
            })
            .collect();
        assert_eq!(found, [(0, 512, 9, Some(vec![0])), (3000, 513, 5, Some(vec![0, 7]))]);
        assert!(trace.gridded);
    }

    #[test]
    fn malformed_lines_are_named() {
        let azure = |row: &str| {
            error(&format!(
                "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 00:00:00,1,1\n{row}"
            ))
        };
        for (row, words) in [
            ("yesterday,1,1", &["line 3", "TIMESTAMP", "yesterday"][..]),
            ("2023-11-16 00:00:00,x,1", &["line 3", "ContextTokens", "\"x\""]),
            ("2023-11-16 00:00:00,1,0", &["line 3", "GeneratedTokens", "from 1"]),
            ("2023-11-16 00:00:00,1", &["line 3", "2 fields", "must be 3"]),
        ] {
            let error = azure(row);
            assert!(words.iter().all(|word| error.contains(word)), "{row}: {error}");
        }
        let mooncake = |line: &str| error(&format!("{MOONCAKE}{line}"));
        for (line, words) in [
            ("{", &["line 4"][..]),
            (
                "{\"timestamp\": 1, \"input_length\": 5, \"output_length\": 5}",
                &["line 4", "hash_ids"],
            ),
            (
                "{\"timestamp\": 1, \"input_length\": 513, \"output_length\": 5, \"hash_ids\": [1]}",
                &["line 4", "1 hash_ids", "2 blocks"],
            ),
            (
                "{\"timestamp\": -1, \"input_length\": 5, \"output_length\": 5, \"hash_ids\": [1]}",
                &["line 4", "-1"],
            ),
            (
                "{\"timestamp\": 1, \"input_length\": 0, \"output_length\": 5, \"hash_ids\": []}",
                &["line 4", "input_length"],
            ),
        ] {
            let error = mooncake(line);
            assert!(words.iter().all(|word| error.contains(word)), "{line}: {error}");
        }
        assert!(error("prompt,length\n1,2").contains("TIMESTAMP,ContextTokens"));
        assert_eq!(parse(""), Err(TraceError::Empty));
        assert_eq!(
            parse("TIMESTAMP,ContextTokens,GeneratedTokens\n"),
            Err(TraceError::Empty)
        );
    }

    #[test]
    fn scaling_is_of_times_lengths_and_blocks() {
        let scaling = Scaling {
            time: 2.0,
            length: 0.01,
            max_input: 4,
            max_output: 100,
        };
        let (trace, cut) = parse(AZURE).expect("valid").scaled(&scaling).expect("valid");
        let found: Vec<_> = trace
            .entries
            .iter()
            .map(|e| (e.at.as_millis(), e.input_tokens, e.output_tokens))
            .collect();
        // 3.74 -> 4, 0.44 -> at least 1; 3.96 -> 4.
        assert_eq!((found, cut), (vec![(0, 4, 1), (4500, 4, 1)], 0));
        assert_eq!(trace.block_tokens, 5.12);
        let tight = Scaling {
            max_input: 3,
            ..scaling
        };
        let (_, cut) = parse(AZURE).expect("valid").scaled(&tight).expect("valid");
        assert_eq!(cut, 2);
        let never = Scaling { time: 0.0, ..scaling };
        let error = parse(AZURE)
            .expect("valid")
            .scaled(&never)
            .expect_err("no time")
            .to_string();
        assert!(error.contains("time scale is 0"), "{error}");
    }

    #[test]
    fn a_grid_is_spread_over_its_windows() {
        let line =
            |t: u64| format!("{{\"timestamp\": {t}, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [1]}}\n");
        let text: String = (0..600).map(|i| line(i / 10 * 3000)).collect();
        let trace = parse(&text).expect("valid");
        assert!(trace.gridded);
        let spread = trace.clone().spread(5);
        assert_eq!(spread, trace.clone().spread(5));
        assert_ne!(spread, trace.clone().spread(6));
        let distinct: std::collections::BTreeSet<_> = spread.entries.iter().map(|e| e.at).collect();
        assert_eq!(distinct.len(), 600);
        assert!(spread.entries.is_sorted_by_key(|e| e.at) && !spread.gridded);
        let (before, after) = (trace.rate().expect("a rate"), spread.rate().expect("a rate"));
        assert!((before / after - 1.0).abs() < 0.05, "{before} {after}");
    }
}
