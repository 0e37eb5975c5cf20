//! What the cluster is told, and what it says is to be done.

use std::sync::Arc;

use protocol::blocks::BlockAudit;
use protocol::context::RequestContext;
use protocol::control::{CacheChange, CoordinatorMessage, Hello, Job, JobEvent, JobUpdate, LoadReport};
use protocol::ids::RequestId;

use crate::core::admission::AdmissionLimits;
use crate::core::block_audit::{AuditId, AuditReport};
use crate::core::journey::Ended;
use crate::core::nodes::{HealthLimits, LegId, LinkId, PeerName, PrefillCredit, StepLimits, TextIdentity};
use crate::core::request::{Note, RequestLimits};
use crate::core::routing::{LocalPrefill, Policy};
use crate::core::types::ClientEvent;

/// Everything the core is told about its surroundings at the start.
#[derive(Clone, Debug)]
pub struct ClusterSettings {
    /// Deadlines and bounds of a request.
    pub request: RequestLimits,
    /// Bounds of the queue.
    pub admission: AdmissionLimits,
    /// What nodes must agree with.
    pub text: TextIdentity,
    /// How much prefill work a node gets at once.
    pub prefill_credit: PrefillCredit,
    /// How nodes are chosen.
    pub policy: Policy,
    /// Whether decode nodes compute prompts themselves.
    pub local_prefill: LocalPrefill,
    /// When nodes get no work.
    pub health: HealthLimits,
    /// How many decisions are kept.
    pub decision_records: usize,
    /// How the nodes' engines cut prompts.
    pub steps: StepLimits,
}

/// What happened.
#[derive(Debug)]
pub enum Fact {
    /// A node has introduced itself on a new link.
    NodeJoined {
        /// The link.
        link: LinkId,
        /// What its certificate says.
        peer: PeerName,
        /// What it says.
        hello: Hello,
    },
    /// A node reported its load.
    NodeReport {
        /// Its link.
        link: LinkId,
        /// The report.
        report: LoadReport,
    },
    /// A node's prefix cache has changed.
    NodeCache {
        /// Its link.
        link: LinkId,
        /// How.
        change: CacheChange,
    },
    /// A node says whose its blocks are.
    NodeBlocks {
        /// Its link.
        link: LinkId,
        /// What it says.
        answer: Box<BlockAudit>,
    },
    /// A link is gone.
    NodeLost {
        /// Which.
        link: LinkId,
    },
    /// A node said something about a job.
    JobEvent {
        /// Which job.
        leg: LegId,
        /// What.
        event: JobEvent,
    },
    /// A job's stream ended without a last event.
    JobLost {
        /// Which job.
        leg: LegId,
        /// How.
        reason: String,
    },
    /// The client is gone, or does not read.
    Cancel {
        /// Whose.
        request: RequestId,
        /// Why, in a few words.
        reason: &'static str,
    },
    /// Take no new requests.
    Drain,
    /// End every request that is still open.
    Abort,
}

/// What is to be done, in order.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Tell a node that it may serve.
    Welcome {
        /// Its link.
        link: LinkId,
    },
    /// Tell a node why it may not serve, and close the link.
    Refuse {
        /// Its link.
        link: LinkId,
        /// Why.
        reason: String,
    },
    /// Close a link.
    Close {
        /// Which.
        link: LinkId,
        /// Why.
        reason: &'static str,
    },
    /// Tell a node something on its membership stream.
    Tell {
        /// Its link.
        link: LinkId,
        /// What.
        message: CoordinatorMessage,
    },
    /// Open a job's stream and send the job.
    StartJob {
        /// Name of the job.
        leg: LegId,
        /// Where.
        link: LinkId,
        /// What.
        job: Box<Job>,
    },
    /// Say something more on a job's stream. At most once for each of its choices.
    UpdateJob {
        /// Which.
        leg: LegId,
        /// What.
        update: JobUpdate,
    },
    /// Reset a job's stream, in both directions.
    ResetJob {
        /// Which.
        leg: LegId,
    },
    /// Tell a client.
    Emit {
        /// Whose.
        request: RequestId,
        /// What.
        event: ClientEvent,
    },
    /// For logs and metrics.
    Note {
        /// Whose.
        request: RequestId,
        /// Its other names.
        context: Arc<RequestContext>,
        /// What.
        note: Note,
    },
    /// A request has ended, and its client has been told: for logs and traces.
    Ended(Box<Ended>),
    /// An audit of the nodes' blocks is over.
    Audited {
        /// Which.
        audit: AuditId,
        /// What came of it.
        report: Box<AuditReport>,
    },
    /// A job that was over went on.
    Late {
        /// With a token.
        token: bool,
    },
}

/// True if nothing follows `event` on its stream.
pub fn is_last(event: &JobEvent) -> bool {
    match event {
        JobEvent::Busy { .. }
        | JobEvent::HandedOff(_)
        | JobEvent::Beams(_)
        | JobEvent::Finished
        | JobEvent::Failed(_) => true,
        JobEvent::Granted { .. } | JobEvent::Computed(_) | JobEvent::Committed | JobEvent::Token { .. } => false,
    }
}
