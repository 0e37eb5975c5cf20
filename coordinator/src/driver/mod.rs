//! The coordinator's one event loop: it owns the core, feeds it facts, and carries out its actions.
//!
//! Life of an input:
//! 1. HTTP handlers ([`crate::handle`]), links and jobs ([`crate::control`]), the clock and the shutdown are the only
//!    sources: see [`Input`]. Their queues are bounded; who finds one full waits, and the driver never waits for them.
//! 2. The core turns the input into actions.
//! 3. Jobs run as tasks of their own, each with a token that resets its stream; clients have bounded queues
//!    ([`clients`]). No action waits for anybody.

mod clients;
pub mod settings;
pub mod telemetry;
mod text;
mod traces;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use config::LogRequests;
use quinn::Connection;
use runtime::clock::Clock;
use runtime::quic::code;
use runtime::shutdown::Shutdown;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::clients::Clients;
use self::telemetry::Gauges;
use crate::control::{FromNode, Joined, job};
use crate::core::block_audit::{AuditError, AuditId, AuditReport};
use crate::core::cluster::{Action, Cluster, ClusterSettings, Fact, OrderError};
use crate::core::ledger::Detokenizer;
use crate::core::nodes::{LegId, LinkId};
use crate::core::rates::Pace;
use crate::core::types::{ClientEvent, ClusterStatus};
use crate::handle::{CoordinatorHandle, FromHandle, Ordered, Submission};
use protocol::control::{CoordinatorMessage, Job, JobUpdate};

/// Inputs that wait for the driver, from handles and from nodes each.
const INPUT_QUEUE: usize = 1024;
/// Inputs taken before the driver looks at its timers again.
const BATCH: usize = 256;
/// How often clients are looked at and the status is published.
const SWEEP: Duration = Duration::from_millis(100);

/// Bounds that are not the core's.
#[derive(Clone, Copy, Debug)]
pub struct DriverSettings {
    /// Events that may wait for a client.
    pub stream_buffer_tokens: usize,
    /// A client that takes no event for this long while some wait is given up.
    pub client_stall_timeout: Duration,
    /// How long running requests may go on after a shutdown was requested.
    pub drain_timeout: Duration,
    /// Level of the line about a request that has ended.
    pub log_requests: LogRequests,
}

/// Everything that can happen to the driver.
enum Input {
    Handle(FromHandle),
    Node(FromNode),
    /// Clients are to be looked at, and the status published.
    Sweep,
    /// A deadline of the core.
    Timeout,
    /// The shutdown was requested.
    Drain,
    /// The time for draining is over, or the shutdown is forced.
    Abort,
}

/// Where the jobs of a node run.
struct NodeLink {
    connection: Connection,
    orders: mpsc::Sender<CoordinatorMessage>,
    jobs: TaskTracker,
}

/// How a job is spoken to.
struct RunningJob {
    cancel: CancellationToken,
    updates: mpsc::Sender<JobUpdate>,
}

/// The driver before it runs.
pub struct Driver {
    core: Cluster,
    clock: Clock,
    settings: DriverSettings,
    shutdown: Shutdown,
    handles: mpsc::Receiver<FromHandle>,
    nodes: mpsc::Receiver<FromNode>,
    /// Given to the jobs.
    to_driver: mpsc::Sender<FromNode>,
    status: watch::Sender<Arc<ClusterStatus>>,
    links: HashMap<LinkId, NodeLink>,
    /// Nodes that wait for an answer.
    at_the_door: HashMap<LinkId, oneshot::Sender<Result<(), String>>>,
    jobs: HashMap<LegId, RunningJob>,
    clients: Clients,
    /// Facts that came up while actions were carried out.
    facts: VecDeque<Fact>,
    actions: Vec<Action>,
    gauges: Gauges,
    pace: Pace,
    /// Who waits for the end of an audit.
    audits: HashMap<AuditId, oneshot::Sender<Result<AuditReport, AuditError>>>,
    /// When the drain has to be over.
    drain_until: Option<Instant>,
}

impl Driver {
    /// A driver, the handle for the HTTP layer, and where the control plane reports to.
    pub fn new(
        core: ClusterSettings,
        settings: DriverSettings,
        detokenizer: Arc<dyn Detokenizer>,
        clock: Clock,
        shutdown: Shutdown,
    ) -> (Self, CoordinatorHandle, mpsc::Sender<FromNode>) {
        let (inputs, handles) = mpsc::channel(INPUT_QUEUE);
        let (to_driver, nodes) = mpsc::channel(INPUT_QUEUE);
        let core = Cluster::new(core, detokenizer);
        let (status, watched) = watch::channel(Arc::new(core.status()));
        let handle = CoordinatorHandle::new(inputs, watched, settings.stream_buffer_tokens);
        let driver = Self {
            core,
            clock,
            settings,
            shutdown,
            handles,
            nodes,
            to_driver: to_driver.clone(),
            status,
            links: HashMap::new(),
            at_the_door: HashMap::new(),
            jobs: HashMap::new(),
            clients: Clients::new(clock.now(), settings.client_stall_timeout),
            facts: VecDeque::new(),
            actions: Vec::new(),
            gauges: Gauges::new(),
            pace: Pace::default(),
            audits: HashMap::new(),
            drain_until: None,
        };
        (driver, handle, to_driver)
    }

    /// Runs until a shutdown was requested and every request has ended, by itself or by the end of the drain time.
    pub async fn run(mut self) {
        let mut sweep = interval(SWEEP);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let input = self.next(&mut sweep).await;
            self.take(input);
            for _ in 1..BATCH {
                let Some(input) = self.waiting() else { break };
                self.take(input);
            }
            if self.drain_until.is_some() && self.core.open_requests() == 0 {
                break;
            }
        }
        self.publish();
        tracing::info!("all requests have ended");
    }

    async fn next(&mut self, sweep: &mut tokio::time::Interval) -> Input {
        let now = self.clock.now();
        let timeout = self.core.poll_timeout(now);
        let timer = async {
            match timeout {
                Some(at) => sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        let abort = async {
            match self.drain_until {
                Some(at) => {
                    tokio::select! {
                        () = sleep_until(at.into()) => {}
                        () = self.shutdown.wait_forced() => {}
                    }
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            Some(input) = self.nodes.recv() => Input::Node(input),
            Some(input) = self.handles.recv() => Input::Handle(input),
            () = timer => Input::Timeout,
            _ = sweep.tick() => Input::Sweep,
            () = self.shutdown.wait(), if self.drain_until.is_none() => Input::Drain,
            () = abort => Input::Abort,
        }
    }

    /// An input that is there already.
    fn waiting(&mut self) -> Option<Input> {
        let node = self.nodes.try_recv().ok().map(Input::Node);
        node.or_else(|| self.handles.try_recv().ok().map(Input::Handle))
    }

    fn take(&mut self, input: Input) {
        let now = self.clock.now();
        match input {
            Input::Handle(FromHandle::Submit(submission)) => self.submit(now, *submission),
            Input::Handle(FromHandle::Cancel(request)) => {
                self.facts.push_back(Fact::Cancel {
                    request,
                    reason: clients::GONE,
                });
            }
            Input::Handle(FromHandle::Order(ordered)) => self.order(now, *ordered),
            Input::Handle(FromHandle::Decisions(asked, reply)) => {
                if reply.send(self.core.explain(now, asked)).is_err() {
                    tracing::trace!("whoever asked for decisions is gone");
                }
            }
            Input::Handle(FromHandle::Requests(most, reply)) => {
                if reply.send(self.core.recent_requests(now, most)).is_err() {
                    tracing::trace!("whoever asked for requests is gone");
                }
            }
            Input::Handle(FromHandle::AuditBlocks(reply)) => self.audit_blocks(now, reply),
            Input::Node(from) => self.node_said(from),
            Input::Timeout => self.core.on_timeout(now, &mut self.actions),
            Input::Sweep => self.sweep(now),
            Input::Drain => {
                self.drain_until = Some(now + self.settings.drain_timeout);
                self.facts.push_back(Fact::Drain);
            }
            Input::Abort => {
                tracing::warn!(
                    open = self.core.open_requests(),
                    "drain time is over: ending what is left"
                );
                self.facts.push_back(Fact::Abort);
            }
        }
        self.settle(now);
    }

    /// Feeds the core and carries out its actions until neither leads to the other any more.
    fn settle(&mut self, now: Instant) {
        let mut membership = false;
        loop {
            let actions = std::mem::take(&mut self.actions);
            for action in actions {
                membership |= matches!(action, Action::Welcome { .. } | Action::Close { .. });
                self.carry_out(action);
            }
            let Some(fact) = self.facts.pop_front() else { break };
            membership |= matches!(fact, Fact::NodeLost { .. } | Fact::Drain);
            self.core.on_fact(now, fact, &mut self.actions);
        }
        if membership {
            self.publish();
        }
    }

    fn submit(&mut self, now: Instant, submission: Submission) {
        let Submission { requests, reply } = submission;
        if requests.iter().any(|request| request.events.is_closed()) {
            return;
        }
        let mut clients = Vec::with_capacity(requests.len());
        let mut call = Vec::with_capacity(requests.len());
        for submitted in requests {
            let context = Arc::clone(&submitted.request.about.context);
            clients.push((submitted.request.id, submitted.events, context));
            call.push((submitted.request, submitted.matcher));
        }
        let admitted = self.core.submit(now, call, &mut self.actions);
        for (id, events, context) in clients {
            match &admitted {
                Ok(()) => self.clients.add(id, events),
                Err(error) => telemetry::refused(id, &context, error),
            }
        }
        if reply.send(admitted).is_err() {
            tracing::trace!("the client went away while its call was admitted");
        }
    }

    /// Gives an order to a node, if it takes it: the core is not told of an order that cannot be given.
    fn order(&mut self, now: Instant, ordered: Ordered) {
        let Ordered { node, order, reply } = ordered;
        let deaf = self.links.iter().any(|(link, of)| {
            self.core.node_name(*link) == Some(node.as_str()) && (of.orders.is_closed() || of.orders.capacity() == 0)
        });
        let result = if deaf {
            Err(OrderError::Deaf { node: node.clone() })
        } else {
            self.core.order(now, &node, order, &mut self.actions)
        };
        match &result {
            Ok(()) => {
                tracing::info!(node, ?order, "order given");
                self.publish();
            }
            Err(error) => tracing::warn!(node, ?order, %error, "order refused"),
        }
        if reply.send(result).is_err() {
            tracing::trace!("whoever gave the order is gone");
        }
    }

    /// Begins an audit; whoever asks hears of it when it is over.
    fn audit_blocks(&mut self, now: Instant, reply: oneshot::Sender<Result<AuditReport, AuditError>>) {
        match self.core.audit_blocks(now, &mut self.actions) {
            Ok(id) => {
                self.audits.insert(id, reply);
            }
            Err(error) => audited(reply, Err(error)),
        }
    }

    fn node_said(&mut self, from: FromNode) {
        let fact = match from {
            FromNode::Joined(joined) => {
                let Joined {
                    link,
                    peer,
                    hello,
                    connection,
                    jobs,
                    orders,
                    answer,
                } = *joined;
                let to_node = NodeLink {
                    connection,
                    orders,
                    jobs,
                };
                self.links.insert(link, to_node);
                self.at_the_door.insert(link, answer);
                Fact::NodeJoined { link, peer, hello }
            }
            FromNode::Report { link, report } => Fact::NodeReport { link, report },
            FromNode::Cache { link, change } => Fact::NodeCache { link, change },
            FromNode::Blocks { link, answer } => Fact::NodeBlocks { link, answer },
            FromNode::Lost { link, reason } => {
                self.links.remove(&link);
                // A link that was replaced is not known any more, and its end no news.
                if let Some(node) = self.core.node_name(link) {
                    tracing::warn!(node, %reason, "node lost");
                }
                Fact::NodeLost { link }
            }
            FromNode::Job { leg, event } => Fact::JobEvent { leg, event },
            FromNode::JobLost { leg, reason } => Fact::JobLost { leg, reason },
        };
        self.facts.push_back(fact);
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Welcome { link } => {
                tracing::info!(node = self.core.node_name(link), "node joined");
                self.answer(link, Ok(()));
            }
            Action::Refuse { link, reason } => {
                self.links.remove(&link);
                self.answer(link, Err(reason));
            }
            Action::Close { link, reason } => {
                if let Some(node) = self.links.remove(&link) {
                    node.connection.close(code::REPLACED, reason.as_bytes());
                }
            }
            Action::Tell { link, message } => {
                if let Some(node) = self.links.get(&link)
                    && node.orders.try_send(message).is_err()
                {
                    tracing::warn!(node = self.core.node_name(link), "the node does not take an order");
                }
            }
            Action::StartJob { leg, link, job } => match self.links.get(&link) {
                Some(NodeLink { connection, jobs, .. }) => {
                    let cancel = CancellationToken::new();
                    let (updates, to_job) = mpsc::channel(most_updates(&job));
                    let (connection, events) = (connection.clone(), self.to_driver.clone());
                    let run = job::run(leg, connection, *job, to_job, events, cancel.clone());
                    // The tracker waits for the task; nobody needs its handle.
                    drop(jobs.spawn(run));
                    self.jobs.insert(leg, RunningJob { cancel, updates });
                }
                None => {
                    let reason = "the link is closed".to_owned();
                    self.facts.push_back(Fact::JobLost { leg, reason });
                }
            },
            Action::ResetJob { leg } => {
                if let Some(job) = self.jobs.remove(&leg) {
                    job.cancel.cancel();
                }
            }
            Action::UpdateJob { leg, update } => {
                if let Some(job) = self.jobs.get(&leg)
                    && job.updates.try_send(update).is_err()
                {
                    tracing::trace!(?leg, "an update for a job that is over");
                }
            }
            Action::Emit { request, event } => {
                if let ClientEvent::Failed(error) = &event {
                    telemetry::failed(error);
                }
                if let Err(reason) = self.clients.deliver(request, event) {
                    self.facts.push_back(Fact::Cancel { request, reason });
                }
            }
            Action::Note { request, context, note } => telemetry::note(request, &context, &note),
            Action::Ended(ended) => {
                telemetry::ended(self.settings.log_requests, &ended);
                traces::export(ended);
            }
            Action::Audited { audit, report } => {
                if let Some(reply) = self.audits.remove(&audit) {
                    audited(reply, Ok(*report));
                }
            }
            Action::Late { token } => telemetry::late(token),
        }
    }

    fn answer(&mut self, link: LinkId, answer: Result<(), String>) {
        // A node that has left meanwhile is reported lost, or was refused anyway.
        if let Some(at_the_door) = self.at_the_door.remove(&link)
            && at_the_door.send(answer).is_err()
        {
            self.links.remove(&link);
            self.facts.push_back(Fact::NodeLost { link });
        }
    }

    fn sweep(&mut self, now: Instant) {
        for (request, reason) in self.clients.sweep(now) {
            self.facts.push_back(Fact::Cancel { request, reason });
        }
        self.gauges.states(&self.core.states(now));
        self.publish();
    }

    fn publish(&mut self) {
        let mut status = self.core.status();
        self.pace.look(self.clock.now(), &mut status);
        self.gauges.nodes(&status);
        self.status.send_if_modified(|published| {
            let changed = **published != status;
            if changed {
                *published = Arc::new(status);
            }
            changed
        });
    }
}

fn audited(reply: oneshot::Sender<Result<AuditReport, AuditError>>, told: Result<AuditReport, AuditError>) {
    if reply.send(told).is_err() {
        tracing::trace!("whoever asked for an audit is gone");
    }
}

/// Most updates that a job gets: one for each choice. At least 1, which is the least that a queue can hold.
fn most_updates(job: &Job) -> usize {
    match job {
        Job::Prefill(_) => 1,
        Job::Decode(job) => job.choices.len().max(1),
    }
}
