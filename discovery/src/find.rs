//! A node finds the coordinators.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use config::{DiscoveryConfig, DiscoveryMethod};
use metrics::{counter, gauge};
use runtime::clock::Clock;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::DiscoveryError;
use crate::core::known::{Known, Learnt, MAX_ADDRESSES};
use crate::core::lease::Backoff;
use crate::etcd::{Change, Etcd, EtcdError};
use crate::register::{METRIC_FAILURES, coordinators};

/// Gauge: coordinators that are known.
pub(crate) const METRIC_KNOWN: &str = "baton_discovery_coordinators";
/// The name of etcd among the sources.
const ETCD: &str = "etcd";

/// All addresses of coordinators that are known now; the latest counts.
pub type Found = watch::Receiver<BTreeSet<String>>;

/// Turns a name into addresses.
pub trait Resolve: Send + Sync + 'static {
    /// All addresses of `host:port`. Must end.
    fn resolve(&self, name: &str) -> impl Future<Output = io::Result<Vec<SocketAddr>>> + Send;
}

/// The system's resolver, with its own time limits.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    async fn resolve(&self, name: &str) -> io::Result<Vec<SocketAddr>> {
        Ok(tokio::net::lookup_host(name).await?.collect())
    }
}

/// What all sources share: what they know, and who hears of it.
struct Board {
    known: Mutex<Known>,
    found: watch::Sender<BTreeSet<String>>,
}

impl Board {
    fn answered(&self, source: &str, addresses: impl IntoIterator<Item = String>) {
        let (learnt, all) = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            (known.answered(source, addresses), known.addresses())
        };
        match learnt {
            Learnt::Same => return,
            Learnt::Changed => {}
            Learnt::TooMany => tracing::warn!(
                source,
                most = MAX_ADDRESSES,
                "too many coordinators: the first are taken"
            ),
        }
        tracing::info!(source, coordinators = ?all, "coordinators found");
        gauge!(METRIC_KNOWN).set(all.len() as f64);
        self.found.send_replace(all);
    }
}

/// Begins to look for coordinators in the background, until nobody listens any more. `listed`: those of the configuration.
/// `ipv4`: whether this process dials IPv4 addresses, else IPv6; addresses of the other kind are left out.
///
/// # Errors
/// The settings of etcd cannot be used.
pub fn find(
    config: &DiscoveryConfig,
    listed: &[String],
    ipv4: bool,
    resolver: impl Resolve,
) -> Result<Found, DiscoveryError> {
    let (found, receiver) = watch::channel(BTreeSet::new());
    let board = Arc::new(Board {
        known: Mutex::new(Known::default()),
        found,
    });
    // Shown before the first answer, too.
    gauge!(METRIC_KNOWN).set(0.0);
    let refresh = Duration::from_millis(config.refresh_ms);
    match config.method {
        DiscoveryMethod::Static => {
            gauge!(METRIC_KNOWN).set(listed.len() as f64);
            board.found.send_replace(listed.iter().cloned().collect());
            // The list never changes: the channel stays open for as long as anybody listens.
            tokio::spawn(async move { board.found.closed().await });
        }
        DiscoveryMethod::Dns => {
            let resolver = Arc::new(resolver);
            for name in &config.dns_names {
                let (board, resolver) = (Arc::clone(&board), Arc::clone(&resolver));
                tokio::spawn(follow_name(board, resolver, name.clone(), ipv4, refresh));
            }
        }
        DiscoveryMethod::Etcd => {
            let etcd = Etcd::new(config)?;
            tokio::spawn(follow_etcd(board, etcd, coordinators(config), refresh));
        }
    }
    Ok(receiver)
}

/// Tells of the first trouble and of its end, not of everything in between.
struct Trouble {
    source: String,
    now: bool,
}

impl Trouble {
    fn failed(&mut self, reason: &str) {
        counter!(METRIC_FAILURES).increment(1);
        let source = &self.source;
        if self.now {
            tracing::debug!(source, reason, "still no answer about coordinators");
        } else {
            tracing::warn!(
                source,
                reason,
                "no answer about coordinators: those that are known are kept"
            );
        }
        self.now = true;
    }

    fn worked(&mut self) {
        if std::mem::take(&mut self.now) {
            tracing::info!(source = self.source, "answers about coordinators again");
        }
    }
}

/// Each name has a task of its own: one that resolves slowly delays no other, and is asked once at a time.
async fn follow_name(board: Arc<Board>, resolver: Arc<impl Resolve>, name: String, ipv4: bool, refresh: Duration) {
    let mut trouble = Trouble {
        source: name.clone(),
        now: false,
    };
    let mut backoff = Backoff::new(refresh);
    loop {
        let looked = tokio::select! {
            looked = resolver.resolve(&name) => looked,
            () = board.found.closed() => return,
        };
        let wait = match looked {
            Ok(addresses) => {
                trouble.worked();
                backoff.worked();
                let fitting = addresses.into_iter().filter(|address| address.is_ipv4() == ipv4);
                board.answered(&name, fitting.map(|address| address.to_string()));
                refresh
            }
            Err(error) => {
                trouble.failed(&error.to_string());
                backoff.failed()
            }
        };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = board.found.closed() => return,
        }
    }
}

/// Lists the coordinators, then watches for changes; again after every `refresh`, and after every failure.
async fn follow_etcd(board: Arc<Board>, etcd: Etcd, prefix: String, refresh: Duration) {
    let mut trouble = Trouble {
        source: ETCD.to_owned(),
        now: false,
    };
    let mut backoff = Backoff::new(refresh);
    loop {
        let round = tokio::select! {
            round = list_and_watch(&board, &etcd, &prefix, refresh, &mut trouble, &mut backoff) => round,
            () = board.found.closed() => return,
        };
        if let Err(error) = round {
            trouble.failed(&error.to_string());
            tokio::select! {
                () = tokio::time::sleep(backoff.failed()) => {}
                () = board.found.closed() => return,
            }
        }
    }
}

async fn list_and_watch(
    board: &Board,
    etcd: &Etcd,
    prefix: &str,
    refresh: Duration,
    trouble: &mut Trouble,
    backoff: &mut Backoff,
) -> Result<(), EtcdError> {
    let end = Instant::from_std(Clock.now()) + refresh;
    let listing = etcd.list(prefix).await?;
    trouble.worked();
    backoff.worked();
    let mut values: BTreeMap<String, String> = listing.values;
    board.answered(ETCD, usable(&values));
    let mut watch = match timeout_at(end, etcd.watch(prefix, listing.revision + 1)).await {
        Ok(watch) => watch?,
        Err(_) => return Ok(()),
    };
    loop {
        match timeout_at(end, watch.next()).await {
            Ok(Ok(Change::Put { key, value })) => drop(values.insert(key, value)),
            Ok(Ok(Change::Deleted { key })) => drop(values.remove(&key)),
            Ok(Err(error)) => return Err(error),
            // Time to list again: what a watch has missed, for whatever reason, is found then.
            Err(_) => return Ok(()),
        }
        board.answered(ETCD, usable(&values));
    }
}

/// The addresses among the values: whoever else writes below the prefix makes no node dial nonsense.
fn usable(values: &BTreeMap<String, String>) -> Vec<String> {
    let mut usable = Vec::new();
    for (key, address) in values {
        if config::is_dial_address(address) {
            usable.push(address.clone());
        } else {
            tracing::debug!(key, address, "the value is no host:port");
        }
    }
    usable
}
