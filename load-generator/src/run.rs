//! Sends the requests of a workload and collects what becomes of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc as blocking};
use std::time::{Duration, Instant};

use runtime::clock::Clock;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::client::{Client, Shot};
use crate::core::Invalid;
use crate::core::dialect::Form;
use crate::core::prompts::Lexicon;
use crate::core::record::{Outcome, Record};
use crate::workload::{Jobs, Pace, Workload};

/// Time between writing the first request and its intended time.
const LEAD: Duration = Duration::from_millis(50);
/// Requests that are written and wait for their turn to be spawned.
const WRITTEN: usize = 64;

/// What has happened so far, for whoever watches.
#[derive(Debug, Default)]
pub struct Progress {
    /// Requests that were sent.
    pub sent: AtomicU64,
    /// Requests that have ended.
    pub ended: AtomicU64,
    /// Of those, the ones that failed.
    pub failed: AtomicU64,
    /// Tokens of those that succeeded.
    pub tokens: AtomicU64,
}

impl Progress {
    fn note(&self, record: &Record) {
        self.ended.fetch_add(1, Ordering::Relaxed);
        if record.is_done() {
            self.tokens
                .fetch_add(u64::from(record.output_tokens), Ordering::Relaxed);
        } else {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// With what requests are sent.
#[derive(Clone)]
pub struct Means {
    /// Sends them.
    pub client: Client,
    /// How they are made.
    pub form: Form,
    /// Writes prompts.
    pub lexicon: Lexicon,
    /// Most requests that are open at once; more wait, and count as late.
    pub max_open: usize,
}

/// What came of a run.
#[derive(Debug)]
pub struct Outcomes {
    /// In the order in which requests ended.
    pub records: Vec<Record>,
    /// Whether it was ended before all requests were sent.
    pub interrupted: bool,
}

/// Sends all requests of the workload and waits for their ends, each of which has a time limit. When `stop` becomes true
/// nothing more is sent and what is open is given up.
pub async fn run(
    means: &Means,
    workload: &Workload,
    progress: &Arc<Progress>,
    stop: watch::Receiver<bool>,
) -> Result<Outcomes, Invalid> {
    let jobs = workload.jobs()?;
    Ok(match workload.pace {
        Pace::Users(users) => closed(means, jobs, users, workload.duration, progress, stop).await,
        Pace::Process(..) | Pace::Trace => open(means, jobs, progress, stop).await,
    })
}

/// Sends warm-up requests of the workload, a few at once; they count nowhere. Errors with the first failure.
pub async fn warm_up(means: &Means, workload: &Workload, count: u64) -> Result<(), String> {
    let (_keep, stop) = watch::channel(false);
    let warm = Workload {
        pace: Pace::Users(4),
        requests: Some(count),
        duration: None,
        // Other words than those that count.
        round: u64::MAX,
        ..workload.clone()
    };
    let outcomes = run(means, &warm, &Arc::default(), stop)
        .await
        .map_err(|error| error.to_string())?;
    let failure = outcomes.records.into_iter().find_map(|record| match record.outcome {
        Outcome::Failed(failure, words) => Some(format!("{failure}: {words}")),
        Outcome::Done | Outcome::Aborted => None,
    });
    failure.map_or(Ok(()), Err)
}

/// Requests at the times of a schedule. A thread of its own writes each request ahead and hands it over when its time has
/// come: the runtime's timers are a millisecond coarse.
async fn open(means: &Means, jobs: Jobs, progress: &Arc<Progress>, mut stop: watch::Receiver<bool>) -> Outcomes {
    let start = Clock.now() + LEAD;
    let (shots, mut due) = mpsc::channel::<Shot>(WRITTEN);
    let (keep_going, ended) = blocking::sync_channel::<()>(0);
    let (form, lexicon) = (means.form.clone(), means.lexicon.clone());
    let pacer = std::thread::Builder::new()
        .name("pacer".to_owned())
        .spawn(move || pace(jobs, &form, &lexicon, start, &shots, &ended));
    let mut outcomes = Outcomes {
        records: Vec::new(),
        interrupted: pacer.is_err(),
    };
    let mut asking = Asking::new(means, start, progress);
    loop {
        let has_room = asking.set.len() < means.max_open;
        tokio::select! {
            shot = due.recv(), if has_room => match shot {
                Some(shot) => asking.send(shot),
                None => break,
            },
            Some(ended) = asking.set.join_next() => asking.collect(ended, &mut outcomes.records),
            () = stopped(&mut stop) => {
                outcomes.interrupted = true;
                break;
            }
        }
    }
    // Lets the pacer go where it waits for a time that nobody wants any more.
    drop(keep_going);
    drop(due);
    asking.finish(&mut outcomes, stop).await;
    outcomes
}

/// Writes requests and hands each over at its time; ends when nobody takes them or `ended` is closed.
fn pace(
    jobs: Jobs,
    form: &Form,
    lexicon: &Lexicon,
    start: Instant,
    shots: &mpsc::Sender<Shot>,
    ended: &blocking::Receiver<()>,
) {
    for job in jobs {
        let Some(intended) = start.checked_add(job.at.unwrap_or_default()) else {
            return;
        };
        let shot = Shot {
            index: job.index,
            intended,
            body: job.body(lexicon, form),
            asked_input: job.input,
            asked_output: job.output,
        };
        let wait = intended.saturating_duration_since(Clock.now());
        if !wait.is_zero() && ended.recv_timeout(wait) != Err(blocking::RecvTimeoutError::Timeout) {
            return;
        }
        if shots.blocking_send(shot).is_err() {
            return;
        }
    }
}

/// Requests of users who each wait for their answer before they ask again.
async fn closed(
    means: &Means,
    jobs: Jobs,
    users: usize,
    duration: Option<Duration>,
    progress: &Arc<Progress>,
    stop: watch::Receiver<bool>,
) -> Outcomes {
    let start = Clock.now();
    let end = duration.and_then(|duration| start.checked_add(duration));
    let jobs = Arc::new(Mutex::new(jobs));
    let (means, progress) = (Arc::new(means.clone()), Arc::clone(progress));
    let (done, mut records) = mpsc::channel(1024);
    let mut set = JoinSet::new();
    for _ in 0..users {
        let user = User {
            means: Arc::clone(&means),
            jobs: Arc::clone(&jobs),
            progress: Arc::clone(&progress),
            done: done.clone(),
        };
        set.spawn(user.ask_on(start, end, stop.clone()));
    }
    drop(done);
    let mut outcomes = Outcomes {
        records: Vec::new(),
        interrupted: false,
    };
    while let Some(record) = records.recv().await {
        outcomes.records.push(record);
    }
    while let Some(ended) = set.join_next().await {
        if let Err(error) = ended {
            relay_panic(error);
        }
    }
    outcomes.interrupted = *stop.borrow();
    outcomes
}

struct User {
    means: Arc<Means>,
    jobs: Arc<Mutex<Jobs>>,
    progress: Arc<Progress>,
    done: mpsc::Sender<Record>,
}

impl User {
    async fn ask_on(self, start: Instant, end: Option<Instant>, mut stop: watch::Receiver<bool>) {
        let Means {
            client, form, lexicon, ..
        } = &*self.means;
        while !*stop.borrow() && end.is_none_or(|end| Clock.now() < end) {
            let job = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(job) = job else { return };
            let body = job.body(lexicon, form);
            let shot = Shot {
                index: job.index,
                intended: Clock.now(),
                body,
                asked_input: job.input,
                asked_output: job.output,
            };
            self.progress.sent.fetch_add(1, Ordering::Relaxed);
            let given_up = aborted(&shot, start);
            let record = tokio::select! {
                record = client.ask(form, shot, start, |_| {}) => {
                    self.progress.note(&record);
                    record
                }
                () = stopped(&mut stop) => given_up,
            };
            if self.done.send(record).await.is_err() {
                return;
            }
        }
    }
}

/// Goes on with the panic of a task, if that is what ended it.
fn relay_panic(error: tokio::task::JoinError) {
    if let Ok(panic) = error.try_into_panic() {
        std::panic::resume_unwind(panic);
    }
}

/// Returns when the run is to stop.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        // Nobody is left who could say so.
        std::future::pending::<()>().await;
    }
}

fn aborted(shot: &Shot, start: Instant) -> Record {
    Record {
        index: shot.index,
        intended_s: shot.intended.saturating_duration_since(start).as_secs_f64(),
        late_s: 0.0,
        asked_input: shot.asked_input,
        asked_output: shot.asked_output,
        outcome: Outcome::Aborted,
        prompt_tokens: None,
        cached_tokens: None,
        output_tokens: 0,
        ttft_s: None,
        e2e_s: 0.0,
        gaps_us: Vec::new(),
        phases: Vec::new(),
    }
}

/// The requests of an open loop that have not ended.
struct Asking<'a> {
    means: Arc<Means>,
    start: Instant,
    progress: &'a Arc<Progress>,
    set: JoinSet<Record>,
}

impl<'a> Asking<'a> {
    fn new(means: &Means, start: Instant, progress: &'a Arc<Progress>) -> Self {
        Self {
            means: Arc::new(means.clone()),
            start,
            progress,
            set: JoinSet::new(),
        }
    }

    fn send(&mut self, shot: Shot) {
        self.progress.sent.fetch_add(1, Ordering::Relaxed);
        let (means, start) = (Arc::clone(&self.means), self.start);
        self.set
            .spawn(async move { means.client.ask(&means.form, shot, start, |_| {}).await });
    }

    fn collect(&self, ended: Result<Record, tokio::task::JoinError>, records: &mut Vec<Record>) {
        match ended {
            Ok(record) => {
                self.progress.note(&record);
                records.push(record);
            }
            // Only a bug of this program ends a request's task otherwise, and figures without that request would be wrong.
            Err(error) => relay_panic(error),
        }
    }

    /// Waits for all that are open, or gives them up when the run is to stop.
    async fn finish(mut self, outcomes: &mut Outcomes, mut stop: watch::Receiver<bool>) {
        while !self.set.is_empty() && !outcomes.interrupted {
            tokio::select! {
                Some(ended) = self.set.join_next() => self.collect(ended, &mut outcomes.records),
                () = stopped(&mut stop) => outcomes.interrupted = true,
            }
        }
        self.set.abort_all();
        while let Some(ended) = self.set.join_next().await {
            match ended {
                Ok(record) => {
                    self.progress.note(&record);
                    outcomes.records.push(record);
                }
                Err(error) => {
                    relay_panic(error);
                    let now = Clock.now();
                    let shot = Shot {
                        index: u64::MAX,
                        intended: now,
                        body: bytes::Bytes::new(),
                        asked_input: None,
                        asked_output: 0,
                    };
                    outcomes.records.push(aborted(&shot, self.start));
                }
            }
        }
    }
}
