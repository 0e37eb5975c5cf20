//! Load while something happens to the cluster: workers that ask again and again, know every answer beforehand, and
//! judge what comes back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use reqwest::Client;
use runtime::clock::Clock;
use tokio::task::JoinSet;

use crate::ask::{Ask, Outcome, Reply};
use crate::random::Random;

/// A request that nothing may keep from ending in this time ends late; every configured deadline of the tests is shorter.
pub const HANGS_AFTER: Duration = Duration::from_secs(30);
/// No test runs load for longer.
const LONGEST: Duration = Duration::from_secs(600);

/// A request that was sent so long ago has arrived.
const UNDERWAY: Duration = Duration::from_millis(200);

/// Requests with the answers that an undisturbed cluster gives.
#[derive(Debug)]
pub struct Known {
    /// The requests and their answers.
    pub all: Vec<(Ask, Reply)>,
}

/// How one request under load went.
#[derive(Clone, Debug)]
struct Judged {
    began: Instant,
    ended: Instant,
    verdict: Verdict,
}

#[derive(Clone, Debug)]
enum Verdict {
    Exact,
    /// A documented error, in a few words.
    Error(String),
    Unreachable(String),
    Wrong(String),
}

/// What all requests under load came to.
#[derive(Debug, Default)]
pub struct Tally {
    judged: Vec<Judged>,
}

/// Load that is running.
pub struct Running {
    stop: Arc<AtomicBool>,
    workers: JoinSet<Vec<Judged>>,
}

impl Known {
    /// Asks each request alone, twice: what an answer is compared with must be sure itself.
    pub async fn learn(client: &Client, url: &str, asks: Vec<Ask>) -> Result<Self> {
        let mut all = Vec::new();
        for ask in asks {
            let first = ask.send(client, url).await;
            let again = ask.send(client, url).await;
            ensure!(first == again, "two answers to {ask:?}:\n{first:?}\n{again:?}");
            let Outcome::Whole(reply) = first else {
                bail!("{ask:?}: {first:?}")
            };
            all.push((ask, reply));
        }
        Ok(Self { all })
    }

    /// Asks request `index` and judges the outcome. An error is a wrong, undocumented or missing answer.
    pub async fn check(&self, client: &Client, url: &str, index: usize) -> Result<()> {
        match self.judge(client, url, index).await {
            Verdict::Exact => Ok(()),
            other => bail!("request {index}: {other:?}"),
        }
    }

    async fn judge(&self, client: &Client, url: &str, index: usize) -> Verdict {
        let (ask, known) = &self.all[index];
        match tokio::time::timeout(HANGS_AFTER, ask.send(client, url)).await {
            Ok(outcome) => compare(ask, known, outcome),
            Err(_) => Verdict::Wrong(format!("hangs: no end within {HANGS_AFTER:?}: {ask:?}")),
        }
    }

    /// Starts `workers` workers that ask until they are told to stop, each in an order of its own.
    pub fn load(self: &Arc<Self>, client: &Client, url: &str, workers: usize) -> Running {
        let stop = Arc::new(AtomicBool::new(false));
        let mut set = JoinSet::new();
        for worker in 0..workers {
            let (known, client, url, stop) = (Arc::clone(self), client.clone(), url.to_owned(), Arc::clone(&stop));
            set.spawn(async move { known.work(&client, &url, worker as u64, &stop).await });
        }
        Running { stop, workers: set }
    }

    async fn work(&self, client: &Client, url: &str, worker: u64, stop: &AtomicBool) -> Vec<Judged> {
        let mut random = Random::new(worker);
        let mut judged = Vec::new();
        let end = Clock.now() + LONGEST;
        while !stop.load(Ordering::Relaxed) && Clock.now() < end {
            let began = Clock.now();
            let verdict = self
                .judge(client, url, random.below(self.all.len() as u64) as usize)
                .await;
            let failed = matches!(verdict, Verdict::Unreachable(_) | Verdict::Error(_));
            judged.push(Judged {
                began,
                ended: Clock.now(),
                verdict,
            });
            if failed {
                // As a client would: not at once again.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        judged
    }

    /// Asks `count` requests at once and waits for all of them.
    pub async fn burst(self: &Arc<Self>, client: &Client, url: &str, count: usize) -> Result<Tally> {
        let mut set = JoinSet::new();
        for i in 0..count {
            let (known, client, url) = (Arc::clone(self), client.clone(), url.to_owned());
            set.spawn(async move {
                let began = Clock.now();
                let verdict = known.judge(&client, &url, i % known.all.len()).await;
                Judged {
                    began,
                    ended: Clock.now(),
                    verdict,
                }
            });
        }
        let mut tally = Tally::default();
        while let Some(judged) = set.join_next().await {
            tally.judged.push(judged?);
        }
        Ok(tally)
    }
}

impl Running {
    /// Lets every worker finish its request.
    pub async fn stop(mut self) -> Result<Tally> {
        self.stop.store(true, Ordering::Relaxed);
        let mut tally = Tally::default();
        while let Some(judged) = self.workers.join_next().await {
            tally.judged.extend(judged?);
        }
        Ok(tally)
    }
}

fn compare(ask: &Ask, known: &Reply, outcome: Outcome) -> Verdict {
    match outcome {
        Outcome::Whole(reply) if reply == *known => Verdict::Exact,
        Outcome::Whole(reply) => Verdict::Wrong(format!("{:?} got {reply:?}, expected {known:?}", ask.door)),
        Outcome::Refused {
            status, word, message, ..
        } => Verdict::Error(format!("{status} {word}: {message}")),
        // What a client has seen before an error stays true.
        Outcome::Failed {
            word,
            message,
            text,
            ids,
        } if known.text.starts_with(&text) && known.ids.starts_with(&ids) => {
            Verdict::Error(format!("event {word}: {message}"))
        }
        Outcome::Failed { text, ids, .. } => Verdict::Wrong(format!(
            "{:?} failed after {text:?} {ids:?}, expected the beginning of {known:?}",
            ask.door
        )),
        Outcome::Unreachable(why) => Verdict::Unreachable(why),
        Outcome::Undocumented(what) => Verdict::Wrong(format!("{:?}: {what}", ask.door)),
    }
}

impl Tally {
    /// Number of exact answers.
    pub fn exact(&self) -> usize {
        self.judged
            .iter()
            .filter(|judged| matches!(judged.verdict, Verdict::Exact))
            .count()
    }

    /// Documented errors, by kind.
    pub fn errors(&self) -> BTreeMap<String, usize> {
        let mut errors = BTreeMap::new();
        for judged in &self.judged {
            if let Verdict::Error(kind) = &judged.verdict {
                *errors.entry(kind.clone()).or_insert(0) += 1;
            }
        }
        errors
    }

    /// Requests whose connection failed.
    pub fn unreachable(&self) -> usize {
        self.judged
            .iter()
            .filter(|judged| matches!(judged.verdict, Verdict::Unreachable(_)))
            .count()
    }

    /// Longest time a request took.
    pub fn slowest(&self) -> Duration {
        self.judged
            .iter()
            .map(|judged| judged.ended - judged.began)
            .max()
            .unwrap_or_default()
    }

    /// Requests that were open at `at`.
    pub fn open_at(&self, at: Instant) -> usize {
        self.judged
            .iter()
            .filter(|judged| judged.began <= at && judged.ended > at)
            .count()
    }

    /// The requests that were certainly running at `at`: sent some time before, not ended yet.
    pub fn running_at(&self, at: Instant) -> Self {
        let running = |judged: &&Judged| judged.began + UNDERWAY <= at && judged.ended > at;
        Self {
            judged: self.judged.iter().filter(running).cloned().collect(),
        }
    }

    /// Time from `at` to the first exact answer to a request that was sent after it.
    pub fn first_exact_after(&self, at: Instant) -> Option<Duration> {
        let exact = self
            .judged
            .iter()
            .filter(|j| j.began >= at && matches!(j.verdict, Verdict::Exact));
        exact.map(|judged| judged.ended - at).min()
    }

    /// Errors unless every request had its exact answer, a documented error, or, if `may_be_unreachable`, no connection.
    pub fn honest(&self, may_be_unreachable: bool) -> Result<()> {
        let mut problems = Vec::new();
        for judged in &self.judged {
            match &judged.verdict {
                Verdict::Exact | Verdict::Error(_) => {}
                Verdict::Unreachable(_) if may_be_unreachable => {}
                Verdict::Unreachable(why) | Verdict::Wrong(why) => problems.push(why.as_str()),
            }
        }
        let shown: Vec<_> = problems.iter().take(5).collect();
        ensure!(
            problems.is_empty(),
            "{} of {} requests went wrong: {shown:#?}",
            problems.len(),
            self.judged.len()
        );
        Ok(())
    }

    /// [`honest`](Self::honest), and no errors either.
    pub fn all_exact(&self) -> Result<()> {
        self.honest(false)?;
        let errors = self.errors();
        ensure!(errors.is_empty(), "errors where exact answers were due: {errors:?}");
        Ok(())
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (exact, errors, lost) = (self.exact(), self.errors(), self.unreachable());
        write!(
            f,
            "{exact} exact, errors {errors:?}, {lost} unreachable, slowest {:?}",
            self.slowest()
        )
    }
}
