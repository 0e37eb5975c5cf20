//! Membership of one coordinator: dial, introduce the node, report its load and its prefix cache, take jobs; again after every loss.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use discovery::Found;
use discovery::core::directory::{Action, Directory};
use protocol::codec::MAX_CONTROL_BYTES;
use protocol::control::{CoordinatorMessage, Hello, JobErrorKind, LoadReport, NodeMessage};
use protocol::ids::{NodeId, Role};
use quinn::ConnectionError;
use runtime::clock::Clock;
use runtime::framing::{FramingError, MessageReader, MessageWriter};
use runtime::quic::{Alpn, Expect, Link, LinkError, QuicEndpoint, code};
use runtime::shutdown::Shutdown;
use thiserror::Error;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::task::TaskTracker;
use tracing::field::display;

use crate::audits::Audits;
use crate::duty::{Duties, Duty};
use crate::handle::{EngineHandle, EngineLoad};
use crate::job::JobStream;
use crate::job_list::JobList;
use crate::process::NodeRole;
use crate::stats;

/// A report is sent at least every this many intervals, changed or not, so that a lost coordinator is noticed.
const QUIET_INTERVALS: u32 = 20;
/// Longest time a coordinator may take to send a job after opening its stream.
const JOB_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a session with a coordinator ended.
#[derive(Debug, Error)]
enum SessionEnd {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Framing(#[from] FramingError),
    #[error("refused by the coordinator: {0}")]
    Refused(String),
    #[error("the coordinator did not answer within {0} ms")]
    Silent(u64),
    #[error("the coordinator closed the membership stream")]
    Closed,
    #[error("the coordinator broke the protocol: {0}")]
    Protocol(&'static str),
    #[error("another address leads to the same coordinator, {0:?}")]
    Replaced(NodeId),
    #[error("the node has drained")]
    Drained,
}

/// What all memberships of a node share.
pub(crate) struct Member<R> {
    pub(crate) endpoint: Arc<QuicEndpoint>,
    pub(crate) hello: Hello,
    pub(crate) engine: EngineHandle,
    pub(crate) role: Arc<R>,
    pub(crate) jobs: TaskTracker,
    pub(crate) slots: Arc<Semaphore>,
    /// The jobs by name.
    pub(crate) list: Arc<JobList>,
    pub(crate) shutdown: Shutdown,
    pub(crate) duties: Arc<Duties>,
    pub(crate) settings: config::NodeConfig,
    pub(crate) welcome_timeout: Duration,
    pub(crate) sessions: AtomicU64,
    /// The coordinators that are linked, by the address that was dialled.
    pub(crate) linked: watch::Sender<BTreeMap<String, NodeId>>,
}

impl<R: NodeRole> Member<R> {
    /// Serves all coordinators that are found, until the node has drained.
    pub(crate) async fn follow(self: Arc<Self>, mut found: Found) {
        let mut directory = Directory::default();
        let mut tasks: JoinSet<String> = JoinSet::new();
        let mut wanted: HashMap<String, watch::Sender<bool>> = HashMap::new();
        loop {
            let actions = tokio::select! {
                changed = found.changed() => match changed {
                    Ok(()) => directory.found(&found.borrow_and_update()),
                    // Nobody looks any more: those that are known are served on.
                    Err(_) => std::future::pending().await,
                },
                Some(ended) = tasks.join_next(), if !tasks.is_empty() => match ended {
                    Ok(coordinator) => directory.ended(&coordinator).into_iter().collect(),
                    Err(error) => {
                        tracing::error!(%error, "the task of a coordinator has failed");
                        Vec::new()
                    }
                },
            };
            if self.shutdown.is_requested() {
                // Links that exist serve on until the node has drained; no new ones are made.
                continue;
            }
            for action in actions {
                match action {
                    Action::Dial(coordinator) => {
                        let (sender, receiver) = watch::channel(true);
                        wanted.insert(coordinator.clone(), sender);
                        tasks.spawn(Arc::clone(&self).serve(coordinator, receiver));
                    }
                    Action::Keep(coordinator) => tell(&wanted, &coordinator, true),
                    Action::LetGo(coordinator) => tell(&wanted, &coordinator, false),
                }
            }
        }
    }

    /// Serves one coordinator until the node has drained, or until it is not wanted any more and its link is gone. Returns
    /// its address.
    async fn serve(self: Arc<Self>, coordinator: String, mut wanted: watch::Receiver<bool>) -> String {
        let shortest = Duration::from_millis(self.settings.reconnect_min_ms);
        let longest = Duration::from_millis(self.settings.reconnect_max_ms).max(shortest);
        let mut wait = shortest;
        loop {
            let before = self.sessions.load(Ordering::Relaxed);
            let end = self.session(&coordinator).await;
            if self.sessions.load(Ordering::Relaxed) != before {
                wait = shortest;
            }
            match &end {
                SessionEnd::Drained => return coordinator,
                SessionEnd::Replaced(name) => tokio::select! {
                    () = self.until_unlinked(&coordinator, name, longest) => continue,
                    () = self.shutdown.wait() => return coordinator,
                    Ok(_) = wanted.wait_for(|wanted| !wanted) => return coordinator,
                },
                SessionEnd::Refused(reason) => {
                    tracing::error!(%coordinator, %reason, "the coordinator refuses this node");
                    wait = longest;
                }
                other => {
                    tracing::warn!(%coordinator, reason = %other, retry_ms = wait.as_millis() as u64, "no coordinator")
                }
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.shutdown.wait() => return coordinator,
                // An error: nobody decides any more, and it stays wanted.
                Ok(_) = wanted.wait_for(|wanted| !wanted) => {
                    tracing::info!(%coordinator, "this coordinator is not there any more");
                    return coordinator;
                }
            }
            wait = (wait * 2).min(longest);
        }
    }

    /// Waits until no other address is linked to the coordinator of that name, and has not been for a while: whoever is
    /// linked dials again first. (Two links to one coordinator would push each other out for ever, with all jobs on them.)
    async fn until_unlinked(&self, address: &str, name: &NodeId, pause: Duration) {
        tracing::warn!(%address, coordinator = ?name, "this address leads to a coordinator that is linked by another one");
        let others = |linked: &BTreeMap<String, NodeId>| linked.iter().any(|(of, at)| of != address && at == name);
        let mut linked = self.linked.subscribe();
        loop {
            // The sender is a part of this.
            let _alone = linked.wait_for(|linked| !others(linked)).await.is_ok();
            tokio::time::sleep(pause).await;
            if !others(&linked.borrow_and_update()) {
                return;
            }
        }
    }

    async fn session(&self, coordinator: &str) -> SessionEnd {
        match self.join(coordinator).await {
            Ok((link, writer, reader)) => {
                self.sessions.fetch_add(1, Ordering::Relaxed);
                tracing::info!(%coordinator, peer = %link.peer, "joined");
                let (name, connection) = (link.peer.node.clone(), link.connection.clone());
                self.linked
                    .send_modify(|linked| drop(linked.insert(coordinator.to_owned(), name.clone())));
                let end = self.member(link, writer, reader).await;
                self.linked.send_modify(|linked| drop(linked.remove(coordinator)));
                match connection.close_reason() {
                    Some(ConnectionError::ApplicationClosed(close)) if close.error_code == code::REPLACED => {
                        SessionEnd::Replaced(name)
                    }
                    Some(_) | None => end,
                }
            }
            Err(end) => end,
        }
    }

    async fn join(&self, coordinator: &str) -> Result<(Link, MessageWriter, MessageReader), SessionEnd> {
        let expect = Expect {
            role: Role::Coordinator,
            node: None,
        };
        let link = self.endpoint.connect(coordinator, Alpn::Control, expect).await?;
        let hello = async {
            let (send, recv) = link.connection.open_bi().await.map_err(FramingError::from)?;
            let mut writer = MessageWriter::new(send, MAX_CONTROL_BYTES);
            let mut reader = MessageReader::new(recv, MAX_CONTROL_BYTES);
            let hello = Hello {
                role: self.duties.now().role,
                ..self.hello.clone()
            };
            writer.write(&NodeMessage::Hello(hello)).await?;
            match reader.next().await? {
                Some(CoordinatorMessage::Welcome) => Ok((writer, reader)),
                Some(CoordinatorMessage::Refused { reason }) => Err(SessionEnd::Refused(reason)),
                Some(
                    CoordinatorMessage::Drain { .. }
                    | CoordinatorMessage::SetRole { .. }
                    | CoordinatorMessage::ReportBlocks { .. },
                ) => Err(SessionEnd::Protocol("an order before the welcome")),
                None => Err(SessionEnd::Closed),
            }
        };
        let silent = SessionEnd::Silent(self.welcome_timeout.as_millis() as u64);
        let (writer, reader) = timeout(self.welcome_timeout, hello).await.map_err(|_| silent)??;
        Ok((link, writer, reader))
    }

    async fn member(&self, link: Link, mut writer: MessageWriter, mut reader: MessageReader) -> SessionEnd {
        let mut ticks = interval(Duration::from_millis(self.settings.load_report_interval_ms.max(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut reports = Reports::default();
        let mut stopping = false;
        let mut duty = self.duties.watch();
        let mut cache = self.engine.read_cache();
        let mut audits = Audits::new(&self.engine, &self.list, &link.peer.node);
        loop {
            let mut audit = None;
            tokio::select! {
                stream = link.connection.accept_bi() => match stream {
                    Ok((send, recv)) => self.take_job(send, recv, &link.peer.node),
                    Err(error) => return FramingError::from(error).into(),
                },
                _ = ticks.tick() => {}
                () = self.shutdown.wait(), if !stopping => stopping = true,
                // The sender is a part of the node, which is here.
                _ = duty.changed() => {}
                message = reader.next::<CoordinatorMessage>() => match message {
                    Ok(Some(CoordinatorMessage::Refused { reason })) => return SessionEnd::Refused(reason),
                    Ok(Some(CoordinatorMessage::ReportBlocks { number })) => audits.ask(number),
                    Ok(Some(order)) => self.obey(&order, &link),
                    Ok(None) => return SessionEnd::Closed,
                    Err(error) => return error.into(),
                },
                answer = audits.next() => audit = answer,
                // Only closed, and empty, once the node has drained.
                () = self.jobs.wait() => return SessionEnd::Drained,
            }
            let Duty { role, draining } = *duty.borrow_and_update();
            let duty = Duty {
                role,
                draining: draining || stopping,
            };
            if let Some(report) = reports.next(Clock.now(), self.load(), duty)
                && let Err(error) = writer.write(&NodeMessage::Load(report)).await
            {
                return error.into();
            }
            if let Some(audit) = audit
                && let Err(error) = writer.write(&NodeMessage::Blocks(audit)).await
            {
                return error.into();
            }
            // One piece at a time: jobs need not wait for all that a large cache has to say.
            if let Some(change) = cache.next()
                && let Err(error) = writer.write(&NodeMessage::Cache(change)).await
            {
                return error.into();
            }
        }
    }

    /// The engine's state, and what the role has moved.
    fn load(&self) -> EngineLoad {
        let mut load = self.engine.load();
        let moved = self.role.moved();
        (load.done.sent_bytes, load.done.received_bytes) = (moved.sent_bytes, moved.received_bytes);
        load
    }

    fn obey(&self, order: &CoordinatorMessage, link: &Link) {
        match order {
            CoordinatorMessage::Drain { on } => {
                tracing::info!(coordinator = %link.peer, on, "drain ordered");
                self.duties.drain(*on);
            }
            CoordinatorMessage::SetRole { role } if self.duties.set_role(*role) => {
                tracing::info!(coordinator = %link.peer, %role, "role ordered");
            }
            CoordinatorMessage::SetRole { role } => {
                tracing::warn!(coordinator = %link.peer, %role, "a role was ordered that this node may not have");
            }
            CoordinatorMessage::Welcome
            | CoordinatorMessage::Refused { .. }
            | CoordinatorMessage::ReportBlocks { .. } => {}
        }
    }

    fn take_job(&self, send: quinn::SendStream, recv: quinn::RecvStream, coordinator: &NodeId) {
        stats::job();
        let slot = Arc::clone(&self.slots).try_acquire_owned();
        let draining = self.shutdown.is_requested();
        let (role, duties) = (Arc::clone(&self.role), Arc::clone(&self.duties));
        let (list, coordinator) = (Arc::clone(&self.list), coordinator.clone());
        let work = async move {
            let (job, stream) = match timeout(JOB_READ_TIMEOUT, JobStream::accept(send, recv, coordinator)).await {
                Ok(Ok(Some(accepted))) => accepted,
                Ok(Ok(None)) => return,
                Ok(Err(error)) => return tracing::debug!(%error, "a job did not arrive"),
                Err(_) => return tracing::debug!("a job did not arrive in time"),
            };
            let _listed = list.enter(Clock.now(), stream.name());
            let (name, context) = (Arc::clone(stream.name()), job.context().clone());
            let refusal = match draining {
                true => Some("the node is draining".to_owned()),
                false => duties.refusal(&job),
            };
            let ended = match (refusal, slot) {
                (Some(why), _) => stream.fail(JobErrorKind::Draining, why).await,
                (None, Err(_)) => {
                    stream
                        .fail(JobErrorKind::Overloaded, "node.max_jobs jobs are held already")
                        .await
                }
                (None, Ok(_slot)) => role.handle(job, stream).await,
            };
            if let Err(gone) = ended {
                let (client_request_id, trace_id) = (context.client_id.as_deref(), context.trace_id().map(display));
                tracing::debug!(request = %name.key.request, client_request_id, trace_id, %gone, "job ended early");
            }
        };
        // The handle is not needed: the tracker waits for the task.
        drop(self.jobs.spawn(work));
    }
}

fn tell(wanted: &HashMap<String, watch::Sender<bool>>, coordinator: &str, still: bool) {
    if let Some(sender) = wanted.get(coordinator) {
        sender.send_replace(still);
    }
}

/// Decides when a load report is due.
#[derive(Default)]
struct Reports {
    sent: u64,
    last: Option<(EngineLoad, Duty)>,
    quiet: u32,
}

impl Reports {
    fn next(&mut self, now: Instant, load: EngineLoad, duty: Duty) -> Option<LoadReport> {
        self.quiet += 1;
        if self.last == Some((load, duty)) && self.quiet < QUIET_INTERVALS {
            return None;
        }
        self.quiet = 0;
        self.last = Some((load, duty));
        self.sent += 1;
        Some(LoadReport {
            sequence: self.sent,
            steps: load.steps,
            free_blocks: load.free_blocks,
            cached_blocks: load.cached_blocks,
            owned_blocks: load.owned_blocks,
            running: load.running,
            waiting: load.waiting,
            preempted: load.preempted,
            oldest_wait_ms: load.waiting_since.map_or(0, |since| millis(now, since)),
            reservations: load.reservations,
            draining: duty.draining,
            role: duty.role,
            pending: load.pending,
            queued_tokens: load.queued_tokens,
            step_times: load.step_times,
            done: load.done,
        })
    }
}

fn millis(now: Instant, since: Instant) -> u64 {
    u64::try_from(now.saturating_duration_since(since).as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKS: Duty = Duty {
        role: Role::Decode,
        draining: false,
    };
    const DRAINS: Duty = Duty {
        draining: true,
        ..WORKS
    };

    #[test]
    fn a_change_is_reported_at_once_and_silence_is_broken_now_and_then() {
        let (mut reports, now) = (Reports::default(), Clock.now());
        let idle = EngineLoad {
            free_blocks: 8,
            ..EngineLoad::default()
        };
        assert_eq!(reports.next(now, idle, WORKS).map(|r| r.sequence), Some(1));
        assert_eq!(reports.next(now, idle, WORKS), None);
        let busy = EngineLoad { free_blocks: 7, ..idle };
        assert_eq!(
            reports.next(now, busy, WORKS).map(|r| (r.sequence, r.free_blocks)),
            Some((2, 7))
        );
        let draining = reports.next(now, busy, DRAINS).expect("a change");
        assert!(draining.draining && draining.role == Role::Decode);
        let silent = (0..QUIET_INTERVALS - 1)
            .filter(|_| reports.next(now, busy, DRAINS).is_some())
            .count();
        assert_eq!(silent, 0);
        assert!(reports.next(now, busy, DRAINS).is_some());
        let waits = EngineLoad {
            waiting_since: Some(now),
            ..busy
        };
        let told = reports.next(now + Duration::from_millis(1_500), waits, DRAINS);
        assert_eq!(told.map(|report| report.oldest_wait_ms), Some(1_500));
    }
}
