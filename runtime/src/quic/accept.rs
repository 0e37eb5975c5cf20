//! Incoming handshakes: concurrent, bounded in number and time.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::counter;
use protocol::ids::Role;
use quinn::{Endpoint, Incoming};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::measure::Measure;

use super::{Link, accepted_roles, code, describe, peer_of, plane_of};

/// Most handshakes in progress at once.
pub(super) const MAX_PENDING: usize = 256;
/// Counter of incoming handshakes by `result`.
pub const METRIC_HANDSHAKES: &str = "baton_link_handshakes_total";
/// What this module measures.
pub const MEASURES: &[Measure] = &[Measure::counter(
    METRIC_HANDSHAKES,
    &["result"],
    "handshakes",
    "Links that others opened or tried to open, by how the handshake ended.",
)];

/// Values of the label `result`.
const RESULTS: [&str; 7] = [
    "accepted",
    "failed",
    "timed_out",
    "wrong_peer",
    "overloaded",
    "retried",
    "not_taken",
];

/// What became of incoming handshakes. Datagrams that are no QUIC handshake are dropped before they count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AcceptStats {
    /// Authenticated and handed out.
    pub accepted: u64,
    /// Failed: no certificate, wrong CA, wrong plane, malformed.
    pub failed: u64,
    /// Not finished in time.
    pub timed_out: u64,
    /// Authenticated, but of a role or name that may not dial this plane.
    pub wrong_peer: u64,
    /// Refused because too many handshakes were pending.
    pub overloaded: u64,
    /// Asked to prove their address first because many handshakes were pending.
    pub retried: u64,
    /// Authenticated, but nobody took them in time.
    pub not_taken: u64,
    /// In progress now.
    pub pending: u64,
}

#[derive(Default)]
struct Counters {
    accepted: AtomicU64,
    failed: AtomicU64,
    timed_out: AtomicU64,
    wrong_peer: AtomicU64,
    overloaded: AtomicU64,
    retried: AtomicU64,
    not_taken: AtomicU64,
}

pub(super) struct Acceptor {
    own: Role,
    deadline: Duration,
    pending: Arc<Semaphore>,
    links: mpsc::Sender<Link>,
    counters: Counters,
}

impl Acceptor {
    pub(super) fn new(own: Role, deadline: Duration, links: mpsc::Sender<Link>) -> Self {
        for result in RESULTS {
            counter!(METRIC_HANDSHAKES, "result" => result).increment(0);
        }
        Self {
            own,
            deadline,
            pending: Arc::new(Semaphore::new(MAX_PENDING)),
            links,
            counters: Counters::default(),
        }
    }

    pub(super) fn stats(&self) -> AcceptStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let c = &self.counters;
        AcceptStats {
            accepted: read(&c.accepted),
            failed: read(&c.failed),
            timed_out: read(&c.timed_out),
            wrong_peer: read(&c.wrong_peer),
            overloaded: read(&c.overloaded),
            retried: read(&c.retried),
            not_taken: read(&c.not_taken),
            pending: (MAX_PENDING - self.pending.available_permits()) as u64,
        }
    }

    pub(super) async fn run(self: Arc<Self>, endpoint: Endpoint, stop: CancellationToken) {
        loop {
            let incoming = tokio::select! {
                () = stop.cancelled() => return,
                incoming = endpoint.accept() => incoming,
            };
            let Some(incoming) = incoming else { return };
            self.admit(incoming, &stop);
        }
    }

    fn admit(self: &Arc<Self>, incoming: Incoming, stop: &CancellationToken) {
        let Ok(permit) = Arc::clone(&self.pending).try_acquire_owned() else {
            count(&self.counters.overloaded, "overloaded");
            incoming.refuse();
            return;
        };
        // Under pressure a source address must be proven, so that forged ones cannot fill the table.
        let busy = self.pending.available_permits() < MAX_PENDING / 2;
        if busy && !incoming.remote_address_validated() && incoming.may_retry() {
            count(&self.counters.retried, "retried");
            if let Err(error) = incoming.retry() {
                error.into_incoming().refuse();
            }
            return;
        }
        let (this, stop) = (Arc::clone(self), stop.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = this.handshake(incoming, permit) => {}
            }
        });
    }

    async fn handshake(&self, incoming: Incoming, permit: OwnedSemaphorePermit) {
        let remote = incoming.remote_address();
        let connection = match timeout(self.deadline, incoming).await {
            Ok(Ok(connection)) => connection,
            Ok(Err(error)) => {
                let count = count(&self.counters.failed, "failed");
                warn_rarely(count, remote, "stranger turned away", &describe(&error));
                return;
            }
            Err(_) => {
                let count = count(&self.counters.timed_out, "timed_out");
                warn_rarely(count, remote, "stranger turned away", "handshake not finished in time");
                return;
            }
        };
        let link = match (plane_of(&connection), peer_of(&connection)) {
            (Some(alpn), Ok(peer)) if accepted_roles(self.own, alpn).contains(&peer.role) => {
                Link { connection, peer, alpn }
            }
            (alpn, peer) => {
                let expected = alpn.map_or_else(Vec::new, |alpn| accepted_roles(self.own, alpn).to_vec());
                let expected = expected
                    .iter()
                    .map(|role| role.as_str())
                    .collect::<Vec<_>>()
                    .join(" or ");
                let alpn = alpn.map_or_else(|| "no known plane".to_owned(), |alpn| alpn.to_string());
                let found = peer.map_or_else(|error| error.to_string(), |peer| peer.to_string());
                let reason = format!("expected {expected} on {alpn}, found {found}");
                let count = count(&self.counters.wrong_peer, "wrong_peer");
                warn_rarely(count, remote, "peer turned away", &reason);
                connection.close(code::WRONG_PEER, reason.as_bytes());
                return;
            }
        };
        let connection = link.connection.clone();
        match timeout(self.deadline, self.links.send(link)).await {
            Ok(Ok(())) => {
                count(&self.counters.accepted, "accepted");
            }
            Ok(Err(_)) => connection.close(code::CLOSED, b"the process stops"),
            Err(_) => {
                count(&self.counters.not_taken, "not_taken");
                connection.close(code::BUSY, b"too many links wait to be taken");
            }
        }
        drop(permit);
    }
}

/// Counts a result and returns how often it has come now.
fn count(counter: &AtomicU64, result: &'static str) -> u64 {
    counter!(METRIC_HANDSHAKES, "result" => result).increment(1);
    counter.fetch_add(1, Ordering::Relaxed) + 1
}

/// Logs the 1st, 2nd, 4th, 8th ... time: strangers must not be able to fill the log.
fn warn_rarely(count: u64, remote: SocketAddr, what: &str, reason: &str) {
    if count.is_power_of_two() {
        tracing::warn!(%remote, count, reason, "{what}");
    } else {
        tracing::debug!(%remote, count, reason, "{what}");
    }
}
