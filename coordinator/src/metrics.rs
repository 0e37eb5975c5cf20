//! What `/metrics` tells about requests. Each name stands here once; the HTTP layer records, the driver's snapshot feeds
//! the gauges.
//!
//! Three families of names, because three kinds of dashboards exist: `baton_*` with vLLM's words, TGI's `tgi_*`, and the
//! plain words of the server that the API is modelled on. A number that goes by several names is recorded once here.
//! [`measures`] says what each name means; docs/metrics.md is made from it.

mod names;
pub mod nodes;
mod table;

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::HttpRequest;
use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};
use protocol::context::RequestContext;
use protocol::ids::Role;
use runtime::clock::Clock;

use crate::core::journey::Served;
use crate::core::phases::{Phase, PhaseTimes};
use crate::core::types::{About, ClusterStatus, Completion, NodeStatus, ServeRequest};
use crate::http::trace::{Asked, CallSpan, client_id};
use crate::live::Live;

pub use self::names::*;
pub use self::table::measures;

/// Handles of all request metrics, made once: recording takes no look-up.
pub struct RequestMetrics {
    model: Arc<str>,
    clock: Clock,
    live: Arc<Live>,
    requests: Vec<Counter>,
    successes: Vec<Counter>,
    /// By the label `err`: all there are.
    failures: Vec<(&'static str, Vec<Counter>)>,
    prompt_tokens: Vec<Counter>,
    generation_tokens: Vec<Counter>,
    ttft: Vec<Histogram>,
    itl: Vec<Histogram>,
    e2e: Vec<Histogram>,
    /// In the order of [`Phase::ALL`].
    phases: Vec<Histogram>,
    validation: Histogram,
    queue: Histogram,
    inference: Histogram,
    time_per_token: Histogram,
    generated: Histogram,
    input_length: Histogram,
    max_new_tokens: Histogram,
    waiting: Vec<Gauge>,
    running: Vec<Gauge>,
    batch_size: Gauge,
    batch_tokens: Gauge,
    prefill_steps: Counter,
    decode_steps: Counter,
    queued_bytes: Gauge,
    swapped: Gauge,
    preemptions: Counter,
    cache_usage: Gauge,
    cache_hit_rate: Gauge,
}

impl RequestMetrics {
    /// Registers the metrics with the process's recorder; `model` is the label `model_name`.
    pub fn new(model: &str, clock: Clock) -> Self {
        let counters = |names: &[&'static str]| {
            names
                .iter()
                .map(|name| counter!(*name, "model_name" => model.to_owned()))
                .collect()
        };
        let one = |name: &'static str| histogram!(name, "model_name" => model.to_owned());
        let histograms = |names: &[&'static str]| names.iter().map(|name| one(name)).collect();
        let gauge = |name: &'static str| gauge!(name, "model_name" => model.to_owned());
        let gauges = |names: &[&'static str]| names.iter().map(|name| gauge(name)).collect();
        let steps = |method: &'static str| counter!(BATCH_STEPS, "model_name" => model.to_owned(), "method" => method);
        let failures = |err: &&'static str| {
            let one = |name: &&'static str| counter!(*name, "model_name" => model.to_owned(), "err" => *err);
            (*err, FAILURES.iter().map(one).collect())
        };
        Self {
            model: model.into(),
            clock,
            live: Arc::new(Live::new(clock)),
            requests: counters(&REQUESTS),
            successes: counters(&SUCCESSES),
            failures: Failure::WORDS.iter().map(failures).collect(),
            prompt_tokens: counters(&PROMPT_TOKENS),
            generation_tokens: counters(&GENERATION_TOKENS),
            ttft: histograms(&TTFT),
            itl: histograms(&ITL),
            e2e: histograms(&E2E),
            phases: Phase::ALL
                .iter()
                .map(|phase| histogram!(PHASES, "model_name" => model.to_owned(), "phase" => phase.as_str()))
                .collect(),
            validation: one(VALIDATION),
            queue: one(QUEUE),
            inference: one(INFERENCE),
            time_per_token: one(TIME_PER_TOKEN),
            generated: one(GENERATED),
            input_length: one(INPUT_LENGTH),
            max_new_tokens: one(MAX_NEW_TOKENS),
            waiting: gauges(&WAITING),
            running: gauges(&RUNNING),
            batch_size: gauge(BATCH_SIZE),
            batch_tokens: gauge(BATCH_TOKENS),
            prefill_steps: steps("prefill"),
            decode_steps: steps("decode"),
            queued_bytes: gauge(QUEUED_BYTES),
            swapped: gauge(SWAPPED),
            preemptions: counter!(PREEMPTIONS, "model_name" => model.to_owned()),
            cache_usage: gauge(CACHE_USAGE),
            cache_hit_rate: gauge(CACHE_HIT_RATE),
        }
    }

    /// The same numbers as a page of the coordinator shows them: their last minutes.
    pub fn live(&self) -> Arc<Live> {
        Arc::clone(&self.live)
    }

    /// Starts the clock of a request that has just arrived.
    pub fn arrived(self: &Arc<Self>, request: &HttpRequest) -> RequestTimer {
        add(&self.requests, 1);
        let arrived = self.clock.now();
        let span = CallSpan::begin(request, arrived);
        RequestTimer {
            metrics: Arc::clone(self),
            context: match &span {
                Some(span) => span.context(),
                None => RequestContext {
                    client_id: client_id(request),
                    trace: None,
                },
            },
            span,
            arrived,
            submitted: None,
            first: None,
            last: Vec::new(),
            queue: Duration::ZERO,
            tokens: 0,
            core: None,
            tells_phases: false,
            state: State::Open,
        }
    }

    /// Sets the gauges from what the driver says.
    pub fn observe(&self, status: &ClusterStatus) {
        set(&self.waiting, status.queued);
        set(&self.running, status.running);
        self.queued_bytes.set(status.queued_bytes as f64);
        let of_role = |role: Role| status.nodes.iter().filter(move |node| node.role.may_act_as(role));
        for role in [Role::Prefill, Role::Decode] {
            gauge!(NODES, "role" => role.as_str()).set(of_role(role).count() as f64);
        }
        self.observe_decode(&of_role(Role::Decode).collect::<Vec<_>>());
        self.prefill_steps.absolute(status.watched.prefill_steps);
        self.decode_steps.absolute(status.watched.decode_steps);
        self.preemptions.absolute(status.watched.decode_preemptions);
    }

    /// Sets the gauges that stand for all nodes that generate.
    fn observe_decode(&self, nodes: &[&NodeStatus]) {
        let sum = |of: fn(&NodeStatus) -> f64| nodes.iter().map(|node| of(node)).sum::<f64>();
        let ratio = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let owned = sum(|node| f64::from(node.owned_blocks));
        self.batch_size.set(sum(|node| f64::from(node.running)));
        self.batch_tokens.set(sum(|node| {
            let block_tokens = node.pool_tokens as f64 / f64::from(node.total_blocks.max(1));
            f64::from(node.owned_blocks) * block_tokens
        }));
        self.swapped.set(sum(|node| f64::from(node.preempted)));
        self.cache_usage
            .set(ratio(owned, sum(|node| f64::from(node.total_blocks))));
        self.cache_hit_rate.set(ratio(
            sum(|node| node.done.cache_hit_tokens as f64),
            sum(|node| node.done.cache_queried_tokens as f64),
        ));
    }
}

fn add(counters: &[Counter], amount: u64) {
    for counter in counters {
        counter.increment(amount);
    }
}

fn set(gauges: &[Gauge], value: usize) {
    for gauge in gauges {
        gauge.set(value as f64);
    }
}

fn record(histograms: &[Histogram], value: Duration) {
    for histogram in histograms {
        histogram.record(value.as_secs_f64());
    }
}

/// The clock of one request. Dropped without an end it counts as cancelled: its client went away. Dropped after a success it
/// takes that for the moment when the last of the answer was handed to the connection.
pub struct RequestTimer {
    metrics: Arc<RequestMetrics>,
    /// The request's other names.
    context: RequestContext,
    /// If it is traced.
    span: Option<CallSpan>,
    arrived: Instant,
    submitted: Option<Instant>,
    /// When the first token was on its way.
    first: Option<Instant>,
    /// When each choice had its last token.
    last: Vec<Option<Instant>>,
    queue: Duration,
    tokens: u32,
    /// When the part of the call that took longest was submitted, and where its time went.
    core: Option<(Instant, PhaseTimes)>,
    tells_phases: bool,
    state: State,
}

/// What a timer has been told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// The answer is complete, and on its way to the connection.
    Succeeded,
    Failed,
}

/// How long the parts of a request took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Durations {
    /// Arrival to now.
    pub total: Duration,
    /// Arrival to submission.
    pub validation: Duration,
    /// Submission to the start of the prefill.
    pub queue: Duration,
    /// Start of the prefill to now.
    pub inference: Duration,
    /// `inference` per token.
    pub per_token: Duration,
}

impl RequestTimer {
    /// Where the requests of the call come from.
    pub fn about(&self) -> About {
        About {
            context: Arc::new(self.context.clone()),
            arrived: Some(self.arrived),
        }
    }

    /// The call is valid and its requests go to the cluster.
    pub fn submitted(&mut self, requests: &[ServeRequest]) {
        let now = self.metrics.clock.now();
        self.submitted = Some(now);
        let prompt_tokens = requests.iter().map(|request| request.token_ids.len()).sum();
        let first = requests.first();
        let max_tokens = first.map_or(0, |request| request.stop.max_tokens);
        self.metrics.validation.record((now - self.arrived).as_secs_f64());
        self.metrics.input_length.record(prompt_tokens as f64);
        self.metrics.max_new_tokens.record(f64::from(max_tokens));
        if let Some(span) = &self.span {
            let adapter = first.and_then(|request| request.adapter.as_deref());
            let model = adapter.map_or_else(|| Arc::clone(&self.metrics.model), Arc::from);
            span.asked(Asked {
                model,
                requests: requests.iter().map(|request| request.id).collect(),
                choices: first.map_or(0, |request| request.choices as usize),
                max_tokens,
                prompt_tokens,
            });
        }
    }

    /// The answer will have so many choices.
    pub fn expect_choices(&mut self, choices: usize) {
        self.last = vec![None; choices];
    }

    /// The cluster took the request.
    pub fn admitted(&self, prompt_tokens: usize) {
        add(&self.metrics.prompt_tokens, prompt_tokens as u64);
        self.metrics.live.admitted(prompt_tokens as u64);
    }

    /// A prompt has been computed; its request had waited for `queue` since submission.
    pub fn prefilled(&mut self, queue: Duration) {
        if self.queue.is_zero() {
            self.queue = queue;
        }
        self.metrics.queue.record(queue.as_secs_f64());
    }

    /// One more token of a choice is on its way to the client.
    pub fn token(&mut self, choice: usize) {
        let now = self.metrics.clock.now();
        let last = self.last.get_mut(choice).and_then(|last| last.replace(now));
        match (last, self.first) {
            (Some(last), _) => {
                record(&self.metrics.itl, now - last);
                self.metrics.live.gap(now - last);
            }
            (None, None) => {
                self.first = Some(now);
                if let Some(span) = &self.span {
                    span.first_token(now);
                }
                record(&self.metrics.ttft, now - self.arrived);
                self.metrics.live.first_token(now - self.arrived);
            }
            // The first token of a further choice.
            (None, Some(_)) => {}
        }
        self.tokens += 1;
        add(&self.metrics.generation_tokens, 1);
        self.metrics.live.token();
    }

    /// A choice has ended.
    pub fn choice_ended(&self, completion: &Completion) {
        if let Some(span) = &self.span {
            span.choice_ended(completion.finish.as_str());
        }
    }

    /// Where a request of the call was served.
    pub fn served(&self, served: Served) {
        if let Some(span) = &self.span {
            span.served(served);
        }
    }

    /// The client wants to know where the time went, or does not.
    pub fn tell_phases(&mut self, wanted: bool) {
        self.tells_phases = wanted;
    }

    /// A request of the call is done: it was submitted then, and its time went there.
    pub fn finished(&mut self, submitted: Instant, phases: PhaseTimes) {
        if self.core.is_none_or(|(_, longest)| phases.sum() > longest.sum()) {
            self.core = Some((submitted, phases));
        }
    }

    /// Where the time went up to now: the phases add up to the time since arrival. `None` for a call that took up the answer to
    /// an earlier one: its time is not this one's.
    fn phases(&self, now: Instant) -> Option<PhaseTimes> {
        let (submitted, mut phases) = self.core.filter(|(submitted, _)| *submitted >= self.arrived)?;
        phases.add(Phase::Queue, submitted - self.arrived);
        let rest = (now - self.arrived).saturating_sub(phases.sum());
        phases.add(Phase::ClientWrite, rest);
        Some(phases)
    }

    /// The phases, the time to first token and all the time up to now, if the client wants to know them, as the value of a header
    /// `Server-Timing`: milliseconds.
    pub fn server_timing(&self) -> Option<String> {
        let now = self.metrics.clock.now();
        let phases = self.phases(now).filter(|_| self.tells_phases)?;
        let known = Phase::ALL.iter().filter(|phase| **phase != Phase::ClientWrite);
        let told = known.map(|phase| (phase.as_str(), phases.of(*phase)));
        let first = self.first.map(|first| ("ttft", first - self.arrived));
        let all = told.chain(first).chain([("total", now - self.arrived)]);
        let entries: Vec<String> = all
            .map(|(name, time)| format!("{name};dur={:.3}", time.as_secs_f64() * 1e3))
            .collect();
        Some(entries.join(", "))
    }

    /// The durations up to now.
    pub fn durations(&self) -> Durations {
        let now = self.metrics.clock.now();
        let submitted = self.submitted.unwrap_or(now);
        let inference = (now - submitted).saturating_sub(self.queue);
        Durations {
            total: now - self.arrived,
            validation: submitted - self.arrived,
            queue: self.queue,
            inference,
            per_token: inference / self.tokens.max(1),
        }
    }

    /// The answer is complete.
    pub fn succeeded(&mut self) -> Durations {
        let durations = self.durations();
        self.state = State::Succeeded;
        add(&self.metrics.successes, 1);
        self.metrics.live.answered();
        self.metrics.inference.record(durations.inference.as_secs_f64());
        self.metrics.time_per_token.record(durations.per_token.as_secs_f64());
        self.metrics.generated.record(f64::from(self.tokens));
        durations
    }

    /// The last of a complete answer has been handed to the connection.
    fn written(&mut self) {
        let now = self.metrics.clock.now();
        record(&self.metrics.e2e, now - self.arrived);
        if let Some(phases) = self.phases(now) {
            for (histogram, phase) in self.metrics.phases.iter().zip(Phase::ALL) {
                histogram.record(phases.of(phase).as_secs_f64());
            }
        }
    }

    /// There is no complete answer; `message` is what the client is told.
    pub fn failed(&mut self, failure: Failure, message: &str) {
        if let Some(span) = &self.span {
            span.failed(failure.as_str(), message);
        }
        self.state = State::Failed;
        self.metrics.live.failed();
        let word = failure.as_str();
        for (_, counters) in self.metrics.failures.iter().filter(|(err, _)| *err == word) {
            add(counters, 1);
        }
    }
}

impl Drop for RequestTimer {
    fn drop(&mut self) {
        match self.state {
            State::Open => self.failed(Failure::Cancelled, "the client went away"),
            State::Succeeded => self.written(),
            State::Failed => {}
        }
        if let Some(span) = self.span.take() {
            let now = self.metrics.clock.now();
            let core = self.core.filter(|(submitted, _)| *submitted >= self.arrived);
            let written_from = core.map(|(submitted, phases)| submitted + phases.sum());
            span.ended(now, written_from.filter(|from| *from <= now), self.tokens);
        }
    }
}
