//! The control plane's server: nodes dial in, say who they are, and get jobs.
//!
//! Life of a node's link:
//! 1. `runtime` has checked the certificate: it is of this cluster and names a node.
//! 2. The node opens the membership stream and says `Hello`, or is dropped after a while.
//! 3. The driver's core welcomes or refuses it; a refusal says what differs.
//! 4. Load reports go to the driver; for every job the driver opens a stream ([`job`]).
//! 5. The link ends (closed, silent, replaced): the driver hears of it once, after everything else from this link. It does
//!    not hear it from every job too: one loss is one fact.

pub mod job;
mod link;

use std::sync::Arc;
use std::time::Duration;

use protocol::blocks::BlockAudit;
use protocol::control::{CacheChange, CoordinatorMessage, Hello, JobEvent, LoadReport};
use quinn::Connection;
use runtime::quic::QuicEndpoint;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::core::nodes::{LegId, LinkId, PeerName};

/// What links and jobs tell the driver.
#[derive(Debug)]
pub enum FromNode {
    /// A node has introduced itself.
    Joined(Box<Joined>),
    /// A node reported its load.
    Report {
        /// Its link.
        link: LinkId,
        /// The report.
        report: LoadReport,
    },
    /// A node's prefix cache has changed.
    Cache {
        /// Its link.
        link: LinkId,
        /// How.
        change: CacheChange,
    },
    /// A node says whose its blocks are.
    Blocks {
        /// Its link.
        link: LinkId,
        /// What it says.
        answer: Box<BlockAudit>,
    },
    /// A link is gone. Comes once for every link that had joined, last of all.
    Lost {
        /// Which.
        link: LinkId,
        /// Why.
        reason: String,
    },
    /// A node said something about a job.
    Job {
        /// Which job.
        leg: LegId,
        /// What.
        event: JobEvent,
    },
    /// A job's stream ended without a last event, while its link goes on.
    JobLost {
        /// Which job.
        leg: LegId,
        /// How.
        reason: String,
    },
}

/// A node at the door.
#[derive(Debug)]
pub struct Joined {
    /// Name of its link.
    pub link: LinkId,
    /// What its certificate says.
    pub peer: PeerName,
    /// What it says.
    pub hello: Hello,
    /// Where its jobs' streams are opened.
    pub connection: Connection,
    /// Runs its jobs' streams: the link is not lost before each of them has told what the node had said.
    pub jobs: TaskTracker,
    /// What the node is told once it is a member.
    pub orders: mpsc::Sender<CoordinatorMessage>,
    /// The driver's answer; an error is the reason of a refusal.
    pub answer: oneshot::Sender<Result<(), String>>,
}

/// Accepts links until `stop`, or until the endpoint is closed. `hello_timeout`: longest wait for a node's `Hello`, and
/// for it to take a refusal.
pub async fn serve(
    endpoint: Arc<QuicEndpoint>,
    events: mpsc::Sender<FromNode>,
    hello_timeout: Duration,
    stop: CancellationToken,
) {
    let mut next_link = 0;
    loop {
        let link = tokio::select! {
            link = endpoint.accept() => link,
            () = stop.cancelled() => return,
        };
        let Some(link) = link else { return };
        let id = LinkId(next_link);
        next_link += 1;
        // Strangers have been turned away and peers were slow to get here: links are as many as nodes that dial in.
        tokio::spawn(link::serve(id, link, events.clone(), hello_timeout));
    }
}
