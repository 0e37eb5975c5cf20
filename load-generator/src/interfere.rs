//! What prompts do to streams that run beside them, seen by clients: the worst gap between two tokens of any stream while a
//! prompt of a given length is computed.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use runtime::clock::Clock;
use serde::Serialize;
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::client::Shot;
use crate::core::gaps::{Stream, Window, median};
use crate::core::prompts::{Content, mix};
use crate::core::record::{Outcome, Record};
use crate::core::summary::{Collector, Distribution};
use crate::run::Means;

/// How often the streams are looked at while something is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// What is done.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Streams that run.
    pub streams: usize,
    /// Tokens of their prompts.
    pub stream_input: u32,
    /// Tokens after which a stream ends and is begun again.
    pub stream_output: u32,
    /// Lengths of the prompts that are sent beside them.
    pub prompts: Vec<u32>,
    /// Tokens that those ask for.
    pub prompt_output: u32,
    /// Times that each length is sent.
    pub repeats: u32,
    /// Time without a prompt before each.
    pub calm: Duration,
    /// Longest wait for all streams to generate.
    pub patience: Duration,
    /// Of the words.
    pub seed: u64,
}

/// What prompts of one length did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Effect {
    /// The length that was aimed at.
    pub asked_tokens: u32,
    /// The length, as the server counted; as aimed at where it did not.
    pub prompt_tokens: u32,
    /// How often.
    pub repeats: usize,
    /// Their time to the first token, median.
    pub ttft_p50_ms: f64,
    /// The longest gap of any stream while the prompt was open: median of the repeats.
    pub worst_gap_p50_ms: f64,
    /// And the longest of all repeats.
    pub worst_gap_max_ms: f64,
    /// Tokens a second of a stream meanwhile, median.
    pub tokens_per_s: f64,
}

/// The file of a measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Interference {
    /// As of a run.
    pub schema: &'static str,
    /// As of a run.
    pub version: u32,
    /// `interfere`.
    pub kind: &'static str,
    /// When it began, in seconds since 1970-01-01 UTC.
    pub started_unix_s: u64,
    /// What was asked for.
    pub settings: Map<String, Value>,
    /// Streams that ran.
    pub streams: usize,
    /// Gaps between tokens without a prompt.
    pub calm: Distribution,
    /// Tokens a second of a stream, without a prompt: median.
    pub calm_tokens_per_s: f64,
    /// By length.
    pub prompts: Vec<Effect>,
    /// What is worth knowing.
    pub notes: Vec<String>,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum InterfereError {
    /// A stream failed.
    #[error("a stream failed: {0}")]
    Stream(String),
    /// A prompt failed.
    #[error("a prompt of {tokens} tokens failed: {words}")]
    Prompt {
        /// Its length.
        tokens: u32,
        /// In what way.
        words: String,
    },
    /// The streams do not generate all at once.
    #[error(
        "{running} of {wanted} streams generate after {seconds} s; the server may serve fewer at once, or --stream-tokens is too small"
    )]
    NotRunning {
        /// Streams that do.
        running: usize,
        /// Streams that should.
        wanted: usize,
        /// How long was waited.
        seconds: f64,
    },
    /// Ctrl-C.
    #[error("interrupted before anything was measured")]
    Interrupted,
    /// No tokens came while nothing disturbed the streams.
    #[error("no gap was seen in the calm time of {0} ms: give it more with --calm-ms")]
    NoGaps(u128),
}

/// Figures without what names and dates them.
#[derive(Debug)]
pub struct Measured {
    /// Gaps without a prompt.
    pub calm: Distribution,
    /// Tokens a second of a stream without a prompt.
    pub calm_tokens_per_s: f64,
    /// By length.
    pub prompts: Vec<Effect>,
    /// Whether it was ended early.
    pub interrupted: bool,
}

/// One prompt among the streams.
struct Sample {
    length: usize,
    prompt_tokens: Option<u32>,
    ttft_s: f64,
    worst_s: f64,
    tokens_per_s: f64,
}

/// Times of the tokens of all streams, shared with the tasks that read them.
struct Watched {
    start: Instant,
    streams: Mutex<Vec<Stream>>,
    failure: Mutex<Option<String>>,
}

impl Watched {
    fn seconds(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.start).as_secs_f64()
    }

    fn with<T>(&self, look: impl FnOnce(&mut Vec<Stream>) -> T) -> T {
        look(&mut self.streams.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn failed(&self) -> Result<(), InterfereError> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        failure.map_or(Ok(()), |words| Err(InterfereError::Stream(words)))
    }
}

/// Measures; `tell` hears of each prompt. An interruption ends it with what there is.
pub async fn interfere(
    means: &Means,
    plan: &Plan,
    stop: watch::Receiver<bool>,
    mut tell: impl FnMut(u32, f64),
) -> Result<Measured, InterfereError> {
    let watched = Arc::new(Watched {
        start: Clock.now(),
        streams: Mutex::new(vec![Stream::new(); plan.streams]),
        failure: Mutex::new(None),
    });
    let mut tasks = JoinSet::new();
    for index in 0..plan.streams {
        tasks.spawn(stream(means.clone(), plan.clone(), index, Arc::clone(&watched)));
    }
    let (mut calm, mut calm_speeds) = (Collector::default(), Vec::new());
    let mut samples = Vec::new();
    'all: for repeat in 0..plan.repeats {
        for (length, tokens) in plan.prompts.iter().enumerate() {
            if *stop.borrow() {
                break 'all;
            }
            all_generate(&watched, plan).await?;
            let from = Clock.now();
            sleep(plan.calm).await;
            let window = window(&watched, from, plan).await?;
            window.gaps_s.iter().for_each(|gap| calm.add(*gap));
            calm_speeds.push(window.tokens_per_s);
            all_generate(&watched, plan).await?;
            let seed = mix(mix(plan.seed, u64::from(repeat)), length as u64);
            let sample = inject(means, &watched, plan, (length, *tokens), seed).await?;
            tell(*tokens, sample.worst_s);
            samples.push(sample);
        }
    }
    let interrupted = *stop.borrow();
    if samples.is_empty() {
        return Err(InterfereError::Interrupted);
    }
    Ok(Measured {
        calm: calm
            .distribution()
            .ok_or(InterfereError::NoGaps(plan.calm.as_millis()))?,
        calm_tokens_per_s: median(&calm_speeds).unwrap_or_default(),
        prompts: effects(plan, &samples),
        interrupted,
    })
}

/// Asks again and again, and notes when tokens come.
async fn stream(means: Means, plan: Plan, index: usize, watched: Arc<Watched>) {
    for round in 0_u64.. {
        let content = Content::Seeded(mix(mix(plan.seed, 1 << 40), mix(index as u64, round)));
        let prompt = means.lexicon.prompt(&content, plan.stream_input);
        watched.with(|streams| streams[index].push(Vec::new()));
        let noted = |at: Instant| {
            let seconds = watched.seconds(at);
            watched.with(|streams| {
                if let Some(times) = streams[index].last_mut() {
                    times.push(seconds);
                }
            });
        };
        let record = ask(&means, &prompt, plan.stream_output, noted).await;
        // What is not generating has no tokens.
        watched.with(|streams| streams[index].push(Vec::new()));
        if let Outcome::Failed(failure, words) = record.outcome {
            let mut first = watched.failure.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(format!("{failure}: {words}"));
            return;
        }
    }
}

async fn ask(means: &Means, prompt: &str, output: u32, on_text: impl FnMut(Instant)) -> Record {
    let now = Clock.now();
    let shot = Shot {
        index: 0,
        intended: now,
        body: means.form.body(prompt, output).into(),
        asked_input: None,
        asked_output: output,
    };
    means.client.ask(&means.form, shot, now, on_text).await
}

/// Waits until every stream has a token of its present request.
async fn all_generate(watched: &Watched, plan: &Plan) -> Result<(), InterfereError> {
    let deadline = Clock.now() + plan.patience;
    loop {
        watched.failed()?;
        let is_running = |stream: &&Stream| stream.last().is_some_and(|times| !times.is_empty());
        let running = watched.with(|streams| streams.iter().filter(is_running).count());
        if running == plan.streams {
            return Ok(());
        }
        if Clock.now() >= deadline {
            return Err(InterfereError::NotRunning {
                running,
                wanted: plan.streams,
                seconds: plan.patience.as_secs_f64(),
            });
        }
        sleep(LOOK_EVERY).await;
    }
}

/// What happened from `from` until now. Waits until the gaps that are open now have ended, as they belong to it.
async fn window(watched: &Watched, from: Instant, plan: &Plan) -> Result<Window, InterfereError> {
    let to = Clock.now();
    let (from, to) = (watched.seconds(from), watched.seconds(to));
    let deadline = Clock.now() + plan.patience;
    // A stream without tokens in its present request has no gap that is open.
    let is_past = |stream: &Stream| {
        stream
            .last()
            .and_then(|times| times.last())
            .is_none_or(|last| *last > to)
    };
    while Clock.now() < deadline && !watched.with(|streams| streams.iter().all(is_past)) {
        watched.failed()?;
        sleep(LOOK_EVERY).await;
    }
    Ok(watched.with(|streams| {
        let window = Window::of(streams, from, to);
        // What came before is of no more use.
        for stream in streams.iter_mut() {
            stream.drain(..stream.len().saturating_sub(1));
            if let Some(times) = stream.last_mut() {
                times.drain(..times.len().saturating_sub(1));
            }
        }
        window
    }))
}

async fn inject(
    means: &Means,
    watched: &Watched,
    plan: &Plan,
    (length, tokens): (usize, u32),
    seed: u64,
) -> Result<Sample, InterfereError> {
    let prompt = means.lexicon.prompt(&Content::Seeded(seed), tokens);
    let from = Clock.now();
    let record = ask(means, &prompt, plan.prompt_output, |_| {}).await;
    if let Outcome::Failed(failure, words) = &record.outcome {
        let words = format!("{failure}: {words}");
        return Err(InterfereError::Prompt { tokens, words });
    }
    let window = window(watched, from, plan).await?;
    Ok(Sample {
        length,
        prompt_tokens: record.prompt_tokens,
        ttft_s: record.ttft_s.unwrap_or(record.e2e_s),
        worst_s: window.worst_s().unwrap_or_default(),
        tokens_per_s: window.tokens_per_s,
    })
}

fn effects(plan: &Plan, samples: &[Sample]) -> Vec<Effect> {
    let mut effects = Vec::new();
    for (length, asked) in plan.prompts.iter().enumerate() {
        let of_length: Vec<&Sample> = samples.iter().filter(|sample| sample.length == length).collect();
        let middle = |of: fn(&Sample) -> f64| median(&of_length.iter().map(|s| of(s)).collect::<Vec<_>>());
        let (Some(ttft), Some(worst), Some(speed)) =
            (middle(|s| s.ttft_s), middle(|s| s.worst_s), middle(|s| s.tokens_per_s))
        else {
            continue;
        };
        effects.push(Effect {
            asked_tokens: *asked,
            prompt_tokens: of_length.iter().find_map(|s| s.prompt_tokens).unwrap_or(*asked),
            repeats: of_length.len(),
            ttft_p50_ms: ttft * 1e3,
            worst_gap_p50_ms: worst * 1e3,
            worst_gap_max_ms: of_length.iter().map(|s| s.worst_s).fold(0.0, f64::max) * 1e3,
            tokens_per_s: speed,
        });
    }
    effects
}
